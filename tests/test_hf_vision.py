"""The embedded engine with vision work shared over the ranks: logits and every gradient equal transformers', sample by sample."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exact import Keep64
from ranks import run_ranks
from test_engine_hf import reference, subject_of, weights_of

from vlm_cp import VLMSpec, unpack
from vlm_cp.engines.hf import HFEngine
from vlm_cp.subject import Subject

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen3_5"]


def _run(rank: int, subject: Any, logits: Any, gradients: Any) -> dict[str, Any]:
    model, group = subject.model, dist.group.WORLD
    model.zero_grad()
    batch = subject.batch(dist.get_world_size())
    with HFEngine(model, spec=subject.spec, cp_group=group, vision="shared", min_patches=0) as engine:
        with Keep64():
            local = engine(batch)
        weight = batch.plan.shard(batch.plan.pack(weights_of(subject), 0.0), rank)
        (local[0] * weight).sum().backward()
        engine.sync_gradients(group)
        assignment = engine.assign(batch)
    pairs = zip(unpack(local[0].detach(), batch.plan, group=group), logits, strict=True)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(gradients) <= set(found)
    assert all(float(g.abs().max()) == 0 for n, g in found.items() if n not in gradients)
    return {
        "logits": max(float((x - y).abs().max()) for x, y in pairs),
        "gradients": max(float((found[n] - g).norm() / g.norm()) for n, g in gradients.items()),
        "mode": assignment.mode,
        "exchange": assignment.exchange,
        "frames": len(assignment.frames_of(rank)),
        "rows": len(assignment.shared_rows(rank)),
    }


def check(family: str, cp: int, names: list[str] | None = None) -> list[dict[str, Any]]:
    subject = subject_of(family, cp, "all_gather", names)
    found = run_ranks(cp, _run, subject, *reference(subject))
    for rank in found:
        assert rank["logits"] <= 1e-11
        assert rank["gradients"] <= 1e-10
    return found


@pytest.mark.parametrize(
    ("family", "cp"), [("qwen3_vl", 2), ("qwen3_vl", 3), ("qwen3_vl", 4), ("qwen3_5", 4), ("qwen2_5_vl", 3)]
)
def test_images_and_a_video(family: str, cp: int) -> None:
    found = check(family, cp, ["mixed", "note"])
    assert found[0]["mode"] == ("whole" if family == "qwen2_5_vl" else "mixed")
    assert found[0]["exchange"] == ("heads" if cp == 2 else "keys")  # the tiny towers have two heads


def test_all_demo_images_and_videos() -> None:
    assert check("qwen3_vl", 2)[0]["mode"] == "whole"


@pytest.mark.parametrize("family", FAMILIES)
def test_one_image(family: str) -> None:
    """Fewer frames than ranks: a tower that may be cut is, a windowed one stays replicated."""
    found = check(family, 2, ["note", "launch"])
    assert [rank["mode"] for rank in found] == ["replicated" if family == "qwen2_5_vl" else "mixed"] * 2
    assert family == "qwen2_5_vl" or [rank["frames"] for rank in found] == [0, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_video_on_more_ranks_than_it_balances_on(family: str) -> None:
    found = check(family, 4, ["video", "note"])
    assert sum(rank["frames"] == 0 for rank in found) == (1 if family == "qwen2_5_vl" else 4)


def test_text_only() -> None:
    assert check("qwen3_vl", 2, ["note", "text"])[0]["mode"] == "replicated"


def _frozen(rank: int, subject: Any) -> tuple[bool, float]:
    """A frozen tower, as in most RL: no gradient there, and the text model's as with the replicated tower."""
    model, gradients = subject.model, []
    model.model.visual.requires_grad_(False)
    for vision in ("replicated", "shared"):
        model.zero_grad()
        with HFEngine(model, spec=subject.spec, cp_group=dist.group.WORLD, vision=vision, min_patches=0) as engine:
            with Keep64():
                logits = engine(subject.batch(2))
            logits.square().mean().backward()
            engine.sync_gradients(dist.group.WORLD)
        gradients.append([p.grad for p in model.model.language_model.parameters()])
    untouched = all(p.grad is None for p in model.model.visual.parameters())
    return untouched, max(float((a - b).norm() / a.norm()) for a, b in zip(*gradients, strict=True))


def test_frozen_tower() -> None:
    for untouched, difference in run_ranks(2, _frozen, Subject.demo("qwen3_vl", dtype=torch.float64)):
        assert untouched
        assert difference <= 1e-10


def _checkpointed(rank: int, subject: Any) -> tuple[float, int]:
    """As shipped: the float64 mode would not be there when it recomputes."""
    gradients = []
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    subject.model.model.visual.blocks[0].norm1.register_forward_pre_hook(count)
    for recompute in (False, True):
        if recompute:
            subject.model.gradient_checkpointing_enable({"use_reentrant": False})
        subject.model.train()
        subject.model.zero_grad()
        with HFEngine(
            subject.model, spec=subject.spec, cp_group=dist.group.WORLD, vision="shared", min_patches=0
        ) as engine:
            engine(subject.batch(2)).square().mean().backward()
        gradients.append({n: p.grad.clone() for n, p in subject.model.named_parameters()})
    return max(float((gradients[1][n] - g).norm() / g.norm()) for n, g in gradients[0].items()), calls


def test_recomputation_changes_nothing() -> None:
    for difference, calls in run_ranks(2, _checkpointed, Subject.demo("qwen3_vl")):
        assert difference <= 1e-5
        assert calls == 1 + 2


def test_an_unknown_way_is_refused() -> None:
    subject = Subject.demo("qwen3_vl")
    message = "vision must be one of replicated, shared, got 'split'; every rank would encode everything"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        HFEngine(subject.model, spec=VLMSpec.from_hf_config(subject.model.config), vision="split")  # type: ignore[arg-type]
