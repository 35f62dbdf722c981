"""Rotary embedding inside Megatron's core attention, by Transformer Engine's kernels, instead of Bridge's ten kernels a tensor.

Bridge rotates between projection and core attention, by `apply_rotary_pos_emb_absolute`. Given no angles it leaves that out;
so they travel in the packed parameters and the core attention rotates. The angles are those of every token or patch, which
is what Transformer Engine's `sbhd` form reads at batch 1, whatever samples the stream is made of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

_INT32 = 2**31  # Transformer Engine's kernels count elements in an int


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x [n, H, D] rotated by angles [n, 1, 1, d], d <= D: float32 arithmetic, x's dtype, any strides of x.

    One kernel where Transformer Engine is installed and x lies on a GPU, plain torch elsewhere.
    """
    kernel: Any = rope_utils.fused_apply_rotary_pos_emb
    if kernel is None or not _countable(x):
        return _rotated_plainly(x, angles[:, 0])
    return kernel(x[:, None], angles)[:, 0]


def _countable(x: Tensor) -> bool:
    return x.is_cuda and x.size(0) * x.stride(0) < _INT32


def _rotated_plainly(x: Tensor, angles: Tensor) -> Tensor:
    rotary, rest = x.split([angles.size(-1), x.size(-1) - angles.size(-1)], -1)
    precise = rotary.to(torch.promote_types(x.dtype, torch.float32))
    first, second = precise.chunk(2, -1)
    out = precise * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
    return torch.cat([out.to(x.dtype), rest], -1)


@dataclass
class RotarySeqParams(PackedSeqParams):
    """What a language model's core attention reads: the angles to rotate by, and the layer's own parameters."""

    own: PackedSeqParams = field(kw_only=True)
    angles: Tensor = field(kw_only=True)

    def __post_init__(self) -> None:
        self.qkv_format = "thd"


class AnglesForCore:
    """Mixed into Bridge's `Qwen3VLSelfAttention`: packed samples (`thd`) get their angles through to the core attention."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd" and rotary_pos_emb is not None:
            packed_seq_params = RotarySeqParams(own=packed_seq_params, angles=rotary_pos_emb)
            rotary_pos_emb = None
        stock = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        return stock(
            hidden_states,
            attention_mask,
            *args,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **kwargs,
        )


class RotatingAttention:
    """Mixed into a language model's core attention: rotates queries and keys itself."""

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """query, key, value [T/c, H, D]."""
        stock, params = super().forward, packed_seq_params  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(params, RotarySeqParams):
            query, key = (rotated(x, params.angles) for x in (query, key))
            params = params.own
        return stock(query, key, value, attention_mask, *args, packed_seq_params=params, **kwargs)


def mix_in(module: Any, mixin: type) -> None:
    """Makes the instance `module` one of `mixin` and its own class; parameters and their names stay."""
    base = type(module)
    module.__class__ = type(f"{mixin.__name__}{base.__name__}", (mixin, base), {})


def prepare_text(model: Any) -> int:
    """Changes a built (unwrapped) model's language model in place, once; returns how many layers were changed.

    Layers without softmax attention (Qwen3.5's gated delta nets) and towers stay as they are.
    """
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.attention import Qwen3VLSelfAttention

    language = getattr(model, "language_model", None)
    found = [] if language is None else [m for m in language.modules() if isinstance(m, Qwen3VLSelfAttention)]
    new = [attention for attention in found if not isinstance(attention, AnglesForCore)]
    for attention in new:
        mix_in(attention, AnglesForCore)
        mix_in(attention.core_attention, RotatingAttention)
    return len(new)
