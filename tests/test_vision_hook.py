"""`shard_vision_over_cp` on the installed Bridge towers: logprobs and every gradient equal the replicated tower's at CP=1."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from bridge_runs import Result, Run, execute, make_batch, spec_of
from test_bridge_parity import NO_AUX, RECOMPUTE, check
from vlm_cp_hooks import keep_deepstack_gradients, keep_default_loss_scaling, shard_vision_over_cp

from vlm_cp.engines.bridge_tower import FeatureCache
from vlm_cp.engines.megatron import MegatronEngine
from vlm_cp.spec import VLMSpec

OTHERS = (keep_default_loss_scaling, keep_deepstack_gradients)
# Photos; a video beside photos; text alone: conversations by index.
BATCHES = ((0, 1, 2), (3, 4), (5, 1))


def seen(chunks: list[Any], provider: Any) -> list[tuple[str, str, int, int]]:
    """Collects, for every call of the tower on this rank, (mode, exchange, whole frames, shared rows)."""
    calls: list[tuple[str, str, int, int]] = []
    for tower in [chunk.module.vision_model for chunk in chunks if chunk.module.vision_model is not None]:
        encode = tower.encode

        def spy(pixels: Any, layout: Any, encode: Any = encode) -> Any:
            found, rank = layout.assignment, layout.rank
            calls.append((found.mode, found.exchange, len(found.frames_of(rank)), len(found.shared_rows(rank))))
            return encode(pixels, layout)

        tower.encode = spy
    return calls


def hooks(**options: Any) -> tuple[Callable[..., Any], ...]:
    return (*OTHERS, shard_vision_over_cp(**{"min_patches": 0, **options}))


def run_of(family: str, **settings: Any) -> Run:
    own: dict[str, Any] = {"provider": NO_AUX} if family == "qwen3_vl_moe" else {}
    return Run(family=family, micro_batches=BATCHES, **{**own, "after_build": seen, "hooks": hooks(), **settings})


@pytest.fixture(scope="module")
def one_rank(checkpoint: Callable[[str], str]) -> Callable[[str], Result]:
    """The stock tower: CP=1 without the hook."""
    return cache(lambda family: execute(run_of(family, hooks=OTHERS, after_build=None), checkpoint(family)))


OVERLAPPED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_vl-cp1": ("qwen3_vl", {"cp": 1}),
    "qwen3_vl-cp2": ("qwen3_vl", {"cp": 2}),
    "qwen3_vl-cp3": ("qwen3_vl", {"cp": 3}),
    "qwen3_vl-cp4-some-ranks-idle-overlapped-reduce": ("qwen3_vl", {"cp": 4, "ddp": OVERLAPPED}),
    "qwen3_vl-cp2-stock-kernels": ("qwen3_vl", {"cp": 2, "hooks": hooks(fuse=False)}),
    "qwen3_vl-cp2-not-shared": ("qwen3_vl", {"cp": 2, "hooks": hooks(share=False)}),
    "qwen3_vl-cp2-tp2sp": ("qwen3_vl", {"cp": 2, "tp": 2}),
    "qwen3_vl-cp2-pp2": ("qwen3_vl", {"cp": 2, "pp": 2}),
    "qwen3_vl-cp2-recompute": ("qwen3_vl", {"cp": 2, "provider": RECOMPUTE}),
    "qwen3_vl-cp2-recompute-one-layer": (
        "qwen3_vl",
        {"cp": 2, "provider": RECOMPUTE, "hooks": hooks(recompute_layers=1)[::-1]},
    ),
    "qwen3_vl-cp2-sharded-by-the-caller": ("qwen3_vl", {"cp": 2, "layout": "sharded"}),
    "qwen3_vl_moe-cp2": ("qwen3_vl_moe", {"cp": 2}),
    "qwen3_5-cp4": ("qwen3_5", {"cp": 4}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_replicated_tower(
    name: str, checkpoint: Callable[[str], str], one_rank: Callable[[str], Result]
) -> None:
    family, settings = CASES[name]
    found = execute(run_of(family, **settings), checkpoint(family))
    check(found, one_rank(family), family)
    modes = [mode for mode, *_ in found.note]
    assert modes == (["replicated"] * 2 if settings["cp"] == 1 or name.endswith("not-shared") else modes)
    assert "mixed" in modes or settings["cp"] == 1 or name.endswith("not-shared")
    # A TP rank has two heads of the tower, or one of them with tp=2: they are exchanged where they divide by cp.
    by_heads = settings["cp"] <= 2 and settings.get("tp", 1) == 1
    assert {exchange for _, exchange, *_ in found.note} == {
        "heads" if by_heads or name.endswith("not-shared") else "keys"
    }


# Frozen towers.

FROZEN = {"freeze_vision_model": True, "freeze_vision_projection": True}


def test_frozen_tower(checkpoint: Callable[[str], str]) -> None:
    path = checkpoint("qwen3_vl")
    reference = execute(run_of("qwen3_vl", provider=FROZEN, hooks=OTHERS, after_build=None), path)
    check(execute(run_of("qwen3_vl", cp=2, provider=FROZEN), path), reference, "qwen3_vl")


def test_frozen_tower_with_a_trained_projection(checkpoint: Callable[[str], str]) -> None:
    path, frozen = checkpoint("qwen3_vl"), {"freeze_vision_model": True}
    reference = execute(run_of("qwen3_vl", provider=frozen, hooks=OTHERS, after_build=None), path)
    found = execute(run_of("qwen3_vl", cp=2, provider=frozen), path)
    check(found, reference, "qwen3_vl")
    assert found.gradients["model.visual.merger.linear_fc1.weight"].norm() > 0


def _passes(chunks: list[Any], provider: Any) -> dict[str, Any]:
    """Three passes over one batch: how often the tower ran, and how far the passes differ."""
    calls = seen(chunks, provider)
    run = run_of("qwen3_vl", cp=2)
    batch = make_batch(run, (0, 4), spec_of("qwen3_vl"))
    engine = MegatronEngine(chunks, spec=VLMSpec.from_bridge(provider))
    logits = [engine(batch).detach() for _ in range(3)]
    ran = len(calls)
    cache = chunks[0].module.vision_model.vision_work.cache
    kept = len(cache)
    with torch.no_grad():
        chunks[0].module.vision_model.merger.linear_fc2.weight.mul_(2)
    engine(batch)
    after_new_weights = len(calls)
    del batch
    return {
        "ran": ran,
        "kept": kept,
        "kept_after_the_batch": len(cache),
        "after_new_weights": after_new_weights,
        "differ": max(float((x - logits[0]).abs().max()) for x in logits),
    }


@pytest.mark.parametrize(("frozen", "ran"), [(FROZEN, 1), ({}, 3)], ids=["frozen", "trained"])
def test_a_frozen_tower_encodes_a_batch_once(frozen: Any, ran: int, checkpoint: Callable[[str], str]) -> None:
    note = execute(run_of("qwen3_vl", cp=2, provider=frozen, after_build=_passes), checkpoint("qwen3_vl")).note
    assert note["differ"] == 0
    assert (note["ran"], note["kept"], note["after_new_weights"]) == (ran, ran == 1, ran + 1)
    assert note["kept_after_the_batch"] == 0


# What the core attention is given: Transformer Engine compares and converts these on the host, in every layer.


def _lengths_seen(chunks: list[Any], provider: Any) -> list[tuple[Any, ...]]:
    """Collects, for every attention of the tower, its longest runs and whether padding was left to be found out."""
    calls: list[tuple[Any, ...]] = []
    stand_in = type(chunks[0].module.vision_model.vision_work.narrow_attention)
    inner = stand_in.forward

    def spy(self: Any, *args: Any, packed_seq_params: Any, **kwargs: Any) -> Any:
        p = packed_seq_params
        calls.append((type(p).__name__, type(p.max_seqlen_q), type(p.max_seqlen_kv), p.pad_between_seqs))
        assert p.max_seqlen_q == int(p.cu_seqlens_q.diff().max())
        assert p.max_seqlen_kv == int(p.cu_seqlens_kv.diff().max())
        return inner(self, *args, packed_seq_params=p, **kwargs)

    stand_in.forward = spy
    return calls


def test_attention_gets_host_numbers(checkpoint: Callable[[str], str]) -> None:
    found = execute(run_of("qwen3_vl", cp=2, after_build=_lengths_seen), checkpoint("qwen3_vl"))
    assert set(found.note) == {("PackedSeqParams", int, int, False)}


# The hook itself.


def _built(chunks: list[Any], provider: Any) -> dict[str, Any]:
    tower = chunks[0].module.vision_model
    return {
        "keys": list(chunks[0].module.state_dict()),
        "parameters": [name for name, _ in chunks[0].named_parameters()],
        "modules": [name for name, _ in chunks[0].named_modules()],
        "recompute": (
            tower.config.recompute_granularity,
            tower.config.recompute_method,
            tower.config.recompute_num_layers,
        ),
        "language": provider.recompute_granularity,
        "class": type(tower).__mro__[2].__name__,
    }


def build_only(checkpoint: str, **settings: Any) -> dict[str, Any]:
    return execute(run_of("qwen3_vl", after_build=_built, **settings), checkpoint).note


def test_names_stay_and_twice_is_once(checkpoint: Callable[[str], str]) -> None:
    stock = build_only(checkpoint("qwen3_vl"), hooks=OTHERS)
    twice = build_only(checkpoint("qwen3_vl"), hooks=[*hooks(), *hooks()])
    for names in ("keys", "parameters", "modules"):
        assert twice[names] == stock[names]
    assert twice["class"] == "Qwen3VLVisionModel"


def test_recompute_of_the_tower_alone(checkpoint: Callable[[str], str]) -> None:
    kept = build_only(checkpoint("qwen3_vl"), provider=RECOMPUTE)
    none = build_only(checkpoint("qwen3_vl"), provider=RECOMPUTE, hooks=hooks(recompute_layers=0))
    assert (kept["recompute"], kept["language"]) == (("full", "uniform", 1), "full")
    assert (none["recompute"], none["language"]) == ((None, None, None), "full")


REFUSED = {
    "vision_dp_when_cp must be off with shard_vision_over_cp, got True; every image would be dealt out twice, and its rows lost": {
        "vision_dp_when_cp": True
    },
    "the tower's cuda_graph_impl must be \"none\" with shard_vision_over_cp, got 'transformer_engine'; "
    "a captured graph has one number of patches, and ranks get another one every batch": {
        "vision_cuda_graph_impl": "transformer_engine"
    },
}


@pytest.mark.parametrize("message", REFUSED, ids=["vision_dp_when_cp", "cuda-graph"])
def test_refused(message: str, checkpoint: Callable[[str], str]) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        execute(run_of("qwen3_vl", cp=2, provider=REFUSED[message]), checkpoint("qwen3_vl"))


def test_a_text_model_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(1, 1)
    assert shard_vision_over_cp()(model) is model
    chunks = [model]
    with caplog.at_level(logging.INFO):
        assert shard_vision_over_cp()(chunks) is chunks
    assert not caplog.records


def test_feature_cache() -> None:
    cache, calls = FeatureCache(), []

    def encode() -> tuple[torch.Tensor, ...]:
        calls.append(1)
        return (torch.zeros(1),)

    pixels = torch.zeros(2, 2)
    for key in ("a", "a", "b"):
        cache.rows(pixels, key, encode)
    assert len(calls) == 2
    pixels += 1  # the same tensor, other pixels
    cache.rows(pixels, "b", encode)
    assert (len(calls), len(cache)) == (3, 1)
    del pixels
    assert len(cache) == 0
