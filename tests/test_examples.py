"""The example trainer in a few steps: CP changes nothing, and a resumed run is the run; and what the committed run shows."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


FEW = {"batch_size": 5, "capacity": 600, "train_samples": 12, "validation_samples": 4, "validate_every": 2}
LOSSES = {"sft": ("loss",), "ppo": ("policy_loss", "critic_loss")}
TASKS = pytest.mark.parametrize("task", LOSSES)


@cache
def arm(task: str, cp: int, resume_at: int = 2) -> dict[str, Any]:
    import arms
    import train_ppo
    import train_sft

    if task == "sft":
        settings = train_sft.Settings(**FEW, steps=4, resume_at=resume_at)
        make = train_sft.makers(*train_sft.load_data(settings))
    else:
        settings = train_ppo.Settings(**FEW, steps=4, resume_at=resume_at, warm_steps=2, warm_batch_size=4)
        make = train_ppo.makers(settings, *train_sft.load_data(settings))
    return arms.train_arm(f"cp{cp}", cp, settings, make(settings))


@TASKS
def test_training_is_the_same_at_cp_1_and_2(task: str) -> None:
    alone, parallel = arm(task, 1), arm(task, 2)
    curves = [key for key, value in alone.items() if isinstance(value, list) and key != "validation"]
    assert {*LOSSES[task]} < {*curves}
    for key in curves:
        assert len(alone[key]) == 4
        assert parallel[key] == pytest.approx(alone[key], rel=1e-12, abs=1e-13), key
    for here, there in zip(parallel["validation"], alone["validation"], strict=True):
        assert here == pytest.approx(there, rel=1e-12)


@TASKS
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(task: str) -> None:
    interrupted, whole = arm(task, 2), arm(task, 2, resume_at=4)
    for key in (*LOSSES[task], "validation"):
        assert interrupted[key] == whole[key]
    assert interrupted["resumed_at"] == 2


def test_advantages_are_those_of_the_definition() -> None:
    """GAE: sum over k of (gamma lambda)^k times the temporal-difference error k tokens later (Schulman et al. 2016, eq. 16)."""
    import ppo
    import torch

    rewards, values = torch.tensor([0.0, 1.0, 10.0]).double(), torch.tensor([2.0, 0.5, 4.0]).double()
    gamma, lam = 0.9, 0.8
    after = [*values.tolist()[1:], 0.0]
    errors = [float(r) + gamma * v2 - float(v) for r, v, v2 in zip(rewards, values, after, strict=True)]
    expected = [sum((gamma * lam) ** k * e for k, e in enumerate(errors[t:])) for t in range(3)]
    found = ppo.advantages_of(rewards, values, gamma=gamma, lam=lam)
    assert found.tolist() == pytest.approx(expected, rel=1e-14)


def test_a_right_answer_is_worth_one_and_every_token_its_share() -> None:
    import ppo
    import torch

    answer = torch.tensor([5, 6, 9])
    assert ppo.token_rewards(answer, answer).sum() == 1
    assert ppo.token_rewards(torch.tensor([5, 9]), answer).tolist() == pytest.approx([1 / 3, 0])
    assert ppo.token_rewards(torch.tensor([6, 5, 9]), answer).tolist() == pytest.approx([0, 0, 1 / 3])


def test_a_picture_is_its_number() -> None:
    import pictures

    image, question, answer = pictures.draw(7)
    again = pictures.draw(7)
    assert (question, answer) == (pictures.READ, again[2])
    assert image.tobytes() == again[0].tobytes() != pictures.draw(9)[0].tobytes()
    assert {pictures.draw(i)[2] for i in range(0, 200, 2)} == set("123456")
    assert all(len(pictures.draw(i)[2]) == 2 for i in range(1, 40, 2))


def results() -> list[Path]:
    return sorted((ROOT / "examples" / "results").glob("sft_cpu_*.json"))


@pytest.mark.parametrize("path", results(), ids=lambda path: path.stem)
def test_the_committed_run_learned_the_task_with_equal_curves(path: Path) -> None:
    rows = {row["arm"]: row for row in json.loads(path.read_text())["rows"]}
    assert path.with_suffix(".png").exists()
    for arm_name in ("cp1", "cp2"):
        row = rows[arm_name]
        assert row["validation"][-1]["count"] > 0.95
        assert row["validation"][-1]["read"] > 0.9
        assert 0 < row["resumed_at"] < len(row["loss"])

    def apart(name: str) -> list[float]:
        return [abs(a - b) for a, b in zip(rows[name]["loss"], rows["cp1"]["loss"], strict=True)]

    # Rounding, which training amplifies: CP=2 is no further from CP=1 than CP=1 is from itself with other micro-batches.
    parallel, reordered = apart("cp2"), apart("cp1_other_micro_batches")
    assert max(parallel[:30]) < 1e-13
    assert max(parallel[:300]) < 10 * max(reordered[:300])


@TASKS
def test_the_curves_are_drawn(task: str, tmp_path: Path) -> None:
    import curves
    import train_ppo
    import train_sft
    from PIL import Image

    data = tmp_path / "curves.json"
    data.write_text(json.dumps({"rows": [arm(task, 1), arm(task, 2)]}))
    curves.plot(data, tmp_path / "curves.png", {"sft": train_sft.LOOK, "ppo": train_ppo.LOOK}[task])
    with Image.open(tmp_path / "curves.png") as image:
        assert image.width > 800
