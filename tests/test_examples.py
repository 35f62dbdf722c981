"""The example trainer in a few steps: CP changes nothing, and a resumed run is the run; and what the committed run shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


FEW = {"batch_size": 5, "capacity": 600, "train_samples": 12, "validation_samples": 4, "validate_every": 1}
LOSSES = {"sft": ("loss",), "ppo": ("policy_loss", "critic_loss")}
TASKS = pytest.mark.parametrize("task", LOSSES)


def make_arm(task: str) -> Callable[..., dict[str, Any]]:
    import arms
    import train_ppo
    import train_sft

    if task == "sft":
        settings: Any = train_sft.Settings(**FEW, steps=4, resume_at=2)
        make = train_sft.makers(*train_sft.load_data(settings))
    else:
        settings = train_ppo.Settings(**FEW, steps=2, resume_at=1, warm_steps=2, warm_batch_size=4)
        make = train_ppo.makers(settings, *train_sft.load_data(settings))

    def run(cp: int, *, whole: bool = False) -> dict[str, Any]:
        own = replace(settings, resume_at=settings.steps) if whole else settings
        return arms.train_arm(f"cp{cp}", cp, own, make(own))

    return run


@TASKS
def test_a_run_is_the_same_at_cp_2_and_after_a_resume(task: str) -> None:
    run = make_arm(task)
    whole, resumed, parallel = run(1, whole=True), run(1), run(2)
    curves = [key for key, value in whole.items() if isinstance(value, list) and key != "validation"]
    assert {*LOSSES[task]} < {*curves}
    assert resumed["resumed_at"] == parallel["resumed_at"] < len(whole[curves[0]])
    for key in (*curves, "validation"):
        assert resumed[key] == whole[key]  # bit for bit
    for key in curves:
        assert parallel[key] == pytest.approx(whole[key], rel=1e-12, abs=1e-13), key
    for here, there in zip(parallel["validation"], whole["validation"], strict=True):
        assert here == pytest.approx(there, rel=1e-12)


def test_the_policy_loss_is_its_formula_token_by_token() -> None:
    import ppo
    import torch
    import train_sft
    from hf_learner import HFLearner, small_model

    data, processor = train_sft.load_data(train_sft.Settings(**FEW, steps=4, resume_at=2))
    policy = HFLearner(small_model(0, processor.tokenizer), processor, 600, None)
    samples, generator = data.train[:3], torch.Generator().manual_seed(0)
    draws = [torch.randn(2, sample.length, generator=generator, dtype=torch.float64) for sample in samples]
    advantages, old = [10.0**i * x[0] for i, x in enumerate(draws)], [x[1] / 5 - 6 for x in draws]
    batch = policy.collator(samples)
    extras = {"advantages": advantages, "old_logprobs": old}
    batch = replace(batch, token_extras={name: batch.plan.pack(x, 0)[None] for name, x in extras.items()})
    logits = policy.output(batch).detach()
    found, metrics = ppo.policy_loss(policy, clip=0.2, entropy_weight=0.1)(logits, batch)

    total, clipped, count, start = 0.0, 0, 0, 0
    for sample, own_advantages, own_old in zip(samples, advantages, old, strict=True):
        ids, labels = sample.inputs["input_ids"], sample.inputs["labels"]
        for t in range(1, sample.length):  # the token that is predicted, from the slot before it
            if labels[t] >= 0:
                p = logits[0, start + t - 1, : policy.vocab_size].softmax(-1)
                ratio = (p[ids[t]].log() - own_old[t - 1]).exp()
                gain = torch.minimum(ratio * own_advantages[t], ratio.clamp(0.8, 1.2) * own_advantages[t])
                total -= float(gain - 0.1 * (p * p.log()).sum())
                clipped, count = clipped + int((ratio - 1).abs() > 0.2), count + 1
        start += sample.length
    assert float(found.local_sum) == pytest.approx(total, rel=1e-6)
    assert int(found.local_count) == count
    assert 0 < clipped < count
    assert float(metrics["clipped"].value) == pytest.approx(clipped / count)


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


def test_the_committed_ppo_runs_are_one_run() -> None:
    (path,) = (ROOT / "examples" / "results").glob("ppo_cpu_*.json")
    rows = {row["arm"]: row for row in json.loads(path.read_text())["rows"]}
    alone = rows.pop("cp1")
    assert path.with_suffix(".png").exists()
    assert sum(alone["reward"][-10:]) > sum(alone["reward"][:10]) + 0.4
    for task in ("count", "read"):
        assert alone["validation"][-1][task] > alone["validation"][0][task]
    assert 0 < alone["resumed_at"] < len(alone["reward"])
    for row in rows.values():
        assert row["reward"] == alone["reward"]  # every token that was sampled is the same
        for key, bound in (("critic_loss", 1e-15), ("policy_loss", 1e-7)):
            assert max(abs(a - b) for a, b in zip(row[key], alone[key], strict=True)) < bound


@TASKS
def test_the_curves_are_drawn(task: str, tmp_path: Path) -> None:
    import curves
    import train_ppo
    import train_sft
    from PIL import Image

    look = {"sft": train_sft.LOOK, "ppo": train_ppo.LOOK}[task]
    points = [{"step": step, "loss": 1 / step, "count": 0.5, "read": 0.1} for step in (2, 4)]
    row = {"resumed_at": 2, "validation": points, **{key: [4.0, 3.0, 2.0, 1.0] for key in look.panels}}
    for number, arms in enumerate((["cp1"], ["cp1", "cp2", "cp1_other_micro_batches"])):
        data = tmp_path / f"{number}.json"
        data.write_text(json.dumps({"rows": [{"arm": arm, **row} for arm in arms]}))
        curves.plot(data, data.with_suffix(".png"), look)
        with Image.open(data.with_suffix(".png")) as image:
            assert image.width > 800
