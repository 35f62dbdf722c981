"""Rotation inside the core attention: as exact as Bridge's, and `fuse_text_rotary` leaves models as they were otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bridge_runs import Result, execute
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.attention import Qwen3VLSelfAttention
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.rope import apply_rotary_pos_emb_absolute
from rotary_ranks import kernel_errors, table, with_gradient
from test_bridge_parity import LOGPROB, RECOMPUTE, check, run_of
from torch import Tensor
from vlm_cp_hooks import fuse_text_rotary, keep_deepstack_gradients, keep_default_loss_scaling, shard_vision_over_cp

from vlm_cp.engines.rotary import RotarySeqParams, rotated

OTHERS = (keep_default_loss_scaling, keep_deepstack_gradients)
OURS = (*OTHERS, fuse_text_rotary)


# Arithmetic.


def stock(x: Tensor, angles: Tensor, *, in_fp32: bool = False) -> Tensor:
    config: Any = SimpleNamespace(
        apply_rope_fusion=False, apply_rotary_pos_emb_in_fp32=in_fp32, rotary_interleaved=False
    )
    return apply_rotary_pos_emb_absolute(x, angles, config, cu_seqlens=torch.tensor([0, len(x)]))


@pytest.mark.parametrize("width", [64, 24], ids=["whole-head", "partial"])
def test_no_further_from_float64_than_stock(width: int) -> None:
    """bfloat16, as models are trained; Qwen3.5 rotates only the first part of each head."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(50, 3, 64, generator=generator).bfloat16() for _ in range(2))
    angles = table(50, width)
    truth = with_gradient(lambda y: stock(y, angles.double()), x.double(), weight)
    ours = with_gradient(lambda y: rotated(y, angles), x, weight)
    theirs = with_gradient(lambda y: stock(y, angles), x, weight)
    for true, own, other in zip(truth, ours, theirs, strict=True):
        assert (own - true).norm() < 0.9 * (other - true).norm()
    assert torch.equal(ours[0], with_gradient(lambda y: stock(y, angles, in_fp32=True), x, weight)[0])


def test_what_the_gpu_test_measures_is_equal_here() -> None:
    for errors in kernel_errors(0, "cpu").values():
        for own, plain in errors.values():
            assert own == plain < 5e-3


# The hook on Bridge's models.


def seen(chunks: list[Any], provider: Any) -> list[tuple[bool, bool, bool]]:
    """Collects, for every call of a language model's attention, (it got angles), and of its core, (it got angles, packed)."""
    calls: list[tuple[bool, bool, bool]] = []
    for module in [m for chunk in chunks for m in chunk.module.language_model.modules()]:
        if isinstance(module, Qwen3VLSelfAttention):

            def spy(_: Any, args: Any, kwargs: Any) -> None:
                params = kwargs["packed_seq_params"]
                calls.append((isinstance(params, RotarySeqParams), params.qkv_format == "thd", args[0].dim() == 3))

            module.core_attention.register_forward_pre_hook(spy, with_kwargs=True)
    return calls


@pytest.fixture(scope="module")
def one_rank(checkpoint: Callable[[str], str]) -> Callable[[str], Result]:
    """Stock rotation at CP=1."""
    return cache(lambda family: execute(run_of(family, hooks=OTHERS), checkpoint(family)))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_vl-cp1": ("qwen3_vl", {"cp": 1}),
    "qwen3_vl-cp2": ("qwen3_vl", {"cp": 2}),
    "qwen3_vl-cp2-tp2sp": ("qwen3_vl", {"cp": 2, "tp": 2}),
    "qwen3_vl-cp2-pp2": ("qwen3_vl", {"cp": 2, "pp": 2}),
    "qwen3_vl-cp2-recompute": ("qwen3_vl", {"cp": 2, "provider": RECOMPUTE}),
    "qwen3_vl-cp2-all-hooks": ("qwen3_vl", {"cp": 2, "hooks": (fuse_text_rotary, shard_vision_over_cp(), *OURS)}),
    "qwen3_5-cp2": ("qwen3_5", {"cp": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_stock_rotation(name: str, checkpoint: Callable[[str], str], one_rank: Callable[[str], Result]) -> None:
    family, settings = CASES[name]
    found = execute(run_of(family, **{"hooks": OURS, "after_build": seen, **settings}), checkpoint(family))
    check(found, one_rank(family), family)
    assert set(found.note) == {(True, True, True)}


def _forget_the_angles(chunks: list[Any], provider: Any) -> None:
    """The fault that the tests above must catch: queries and keys that nobody rotates."""
    for module in chunks[0].module.language_model.modules():
        if isinstance(module, Qwen3VLSelfAttention):
            module.core_attention.__class__ = type(module.core_attention).__mro__[2]
            inner = module.core_attention.forward
            module.core_attention.forward = lambda *args, packed_seq_params, inner=inner, **kwargs: inner(
                *args, packed_seq_params=packed_seq_params.own, **kwargs
            )


def test_unrotated_is_seen(checkpoint: Callable[[str], str], one_rank: Callable[[str], Result]) -> None:
    found = execute(run_of("qwen3_vl", hooks=OURS, after_build=_forget_the_angles), checkpoint("qwen3_vl"))
    assert found.worst_logprob(one_rank("qwen3_vl")) > 100 * LOGPROB["qwen3_vl"]


def _built(chunks: list[Any], provider: Any) -> dict[str, Any]:
    model = chunks[0].module
    attention = model.language_model.decoder.layers[0].self_attention
    return {
        "keys": list(model.state_dict()),
        "parameters": [name for name, _ in model.named_parameters()],
        "modules": [name for name, _ in model.named_modules()],
        "depth": len(type(attention).__mro__),
        "tower": type(model.vision_model.decoder.layers[0].self_attention).__name__,
    }


def test_names_stay_and_twice_is_once(checkpoint: Callable[[str], str]) -> None:
    built = [
        execute(run_of("qwen3_vl", hooks=hooks, after_build=_built), checkpoint("qwen3_vl")).note
        for hooks in (OTHERS, OURS, (*OURS, fuse_text_rotary))
    ]
    stock, once, twice = built
    assert once == twice
    for names in ("keys", "parameters", "modules", "tower"):
        assert once[names] == stock[names]
    assert once["depth"] == stock["depth"] + 2


def test_a_model_without_such_layers_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(1, 1)
    chunks = [model]
    with caplog.at_level(logging.INFO):
        assert fuse_text_rotary(model) is model
        assert fuse_text_rotary(chunks) is chunks
    assert not caplog.records
