"""What a rank runs to judge rotation kernels and the tower's host syncs; its own file, since a GPU test's ranks import it anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor

from vlm_cp.engines.rotary import _rotated_plainly, rotated

Errors = dict[str, tuple[float, float]]


def table(tokens: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Angles [tokens, 1, 1, width] of far positions, where cosines are hard."""
    frequencies = 5e6 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    half = (torch.arange(tokens, dtype=torch.float64) * 1009)[:, None] * frequencies
    return torch.cat([half, half], 1)[:, None, None].to(dtype)


def with_gradient(rotate: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    out = rotate(x)
    (gradient,) = torch.autograd.grad(out, x, weight.to(out.dtype))
    return out.detach().double(), gradient.double()


def kernel_errors(rank: int, device: str = "cuda") -> dict[str, Errors]:
    """case -> (error of what is used on this device, error of plain torch) against float64, of "value" and "gradient"."""
    if device == "cuda":
        assert rope_utils.fused_apply_rotary_pos_emb is not None
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(100, 4, 3 * 64, generator=generator).bfloat16().to(device)
    weight = torch.randn(100, 4, 64, generator=generator).bfloat16().to(device)
    found: dict[str, Errors] = {}
    for name, width in (("whole-head", 64), ("partial", 24)):
        angles = table(100, width).to(device)
        strided = mixed[..., 64:128]
        truth = with_gradient(lambda x, a=angles: _rotated_plainly(x, a.double()[:, 0]), strided.double(), weight)
        own = with_gradient(lambda x, a=angles: rotated(x, a), strided, weight)
        plain = with_gradient(lambda x, a=angles: _rotated_plainly(x, a[:, 0]), strided, weight)
        found[name] = _errors(own, plain, truth)
    return found


def _errors(own: tuple[Tensor, ...], plain: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> Errors:
    def far(found: Tensor, true: Tensor) -> float:
        return float((found - true).norm() / true.norm())

    names = ("value", "gradient")
    return {n: (far(a, t), far(b, t)) for n, a, b, t in zip(names, own, plain, truth, strict=True)}


def tower_without_syncs(rank: int) -> bool:
    """The tower with the hook, forward and backward of frames of new sizes, under the detector of host syncs."""
    from vlm_cp_hooks import shard_vision_over_cp

    from benchmarks.cases import SHAPES
    from benchmarks.models import build
    from vlm_cp.engines.preflight import unwrap

    shape = SHAPES["2b"]
    small: dict[str, Any] = {"vision": {**shape.vision, "depth": 4, "deepstack_visual_indexes": [1, 2]}}
    small["text"] = {**shape.text, "num_hidden_layers": 2, "vocab_size": 152064}
    device = torch.device("cuda", rank)
    _, model = build(replace(shape, **small), hooks=[shard_vision_over_cp()], device=device)
    tower = unwrap(model).vision_model
    for sides in ((16, 24), (20, 32)):
        grids = torch.tensor([(1, side, side) for side in sides])
        pixels = torch.randn(int(grids.prod(1).sum()), 1536, device=device).bfloat16()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("default" if sides == (16, 24) else "error")
        try:
            rows, levels = tower(pixels, grids)
            out = [rows, *levels]
            torch.autograd.backward(out, [torch.ones_like(x) for x in out])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return bool(rows.isfinite().all())
