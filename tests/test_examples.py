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


@cache
def arm(cp: int, resume_at: int = 2) -> dict[str, Any]:
    import train_sft

    settings = train_sft.Settings(
        steps=4,
        resume_at=resume_at,
        batch_size=5,
        capacity=600,
        train_samples=12,
        validation_samples=4,
        validate_every=2,
    )
    return train_sft.train_arm(f"cp{cp}", cp, settings, *train_sft.prepare(settings))


def test_training_is_the_same_at_cp_1_and_2() -> None:
    alone, parallel = arm(1), arm(2)
    assert alone["loss"][-1] < alone["loss"][0]
    assert parallel["loss"] == pytest.approx(alone["loss"], rel=1e-12)
    assert parallel["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-12)
    for here, there in zip(parallel["validation"], alone["validation"], strict=True):
        assert here == pytest.approx(there, rel=1e-12)


def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit() -> None:
    interrupted, whole = arm(2), arm(2, resume_at=4)
    for key in ("loss", "grad_norm", "validation"):
        assert interrupted[key] == whole[key]
    assert interrupted["resumed_at"] == 2


def test_a_picture_is_its_number() -> None:
    import pictures

    image, question, answer = pictures.draw(7)
    again = pictures.draw(7)
    assert (question, answer) == (pictures.READ, again[2])
    assert image.tobytes() == again[0].tobytes() != pictures.draw(9)[0].tobytes()
    assert {pictures.draw(i)[2] for i in range(0, 200, 2)} == set("123456")
    assert all(len(pictures.draw(i)[2]) == 2 for i in range(1, 40, 2))


def results() -> list[Path]:
    return sorted((ROOT / "examples" / "results").glob("sft_*.json"))


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


def test_the_curves_are_drawn(tmp_path: Path) -> None:
    import curves
    from PIL import Image

    data = tmp_path / "sft.json"
    data.write_text(json.dumps({"rows": [arm(1), arm(2)]}))
    curves.plot(data, tmp_path / "sft.png")
    with Image.open(tmp_path / "sft.png") as image:
        assert image.width > 800
