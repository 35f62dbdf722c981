"""examples/train_bridge.py on the installed Megatron-Bridge, on the CPU: CP=2 trains as two data-parallel ranks do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bridge_on_cpu import use_cpu
from ranks import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def _train(rank: int, task: str, folder: str) -> dict[str, Any]:
    use_cpu()
    import train_bridge
    import train_ppo
    import train_sft

    few = {
        "steps": 2,
        "resume_at": 1,
        "batch_size": 6,
        "capacity": 600,
        "train_samples": 12,
        "validation_samples": 4,
        "validate_every": 2,
    }
    settings = {"sft": train_sft.Settings(**few), "ppo": train_ppo.Settings(**few, warm_steps=1, warm_batch_size=4)}
    prepare = {"sft": train_bridge.sft, "ppo": train_bridge.ppo}
    weights = train_bridge.start(Path(folder) / "weights", train_sft.load_processor(), "cpu")
    make = prepare[task](settings[task], weights, "cpu")
    return {
        name: train_bridge.train_arm(name, cp, settings[task], lambda cp=cp: make(cp), Path(folder) / "checkpoint.pt")
        for name, cp in (("cp1", 1), ("cp2", 2))
    }


@pytest.mark.parametrize("task", ["sft", "ppo"])
def test_cp_2_trains_as_two_data_parallel_ranks_do(task: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, _train, task, str(tmp_path))
    one, two = first["cp1"], first["cp2"]
    curves = [key for key, value in one.items() if isinstance(value, list) and key != "validation"]
    assert {"sft": "loss", "ppo": "critic_loss"}[task] in curves
    for key in curves:
        assert len(one[key]) == 2
        assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5), key
        assert second["cp2"][key] == two[key]
    assert two["validation"][-1] == pytest.approx(one["validation"][-1], rel=1e-4)
