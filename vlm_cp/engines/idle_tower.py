"""A micro-batch without images: zero gradients for the tower, so that Megatron's overlapped reduction does not wait for them.

With `overlap_grad_reduce` a bucket is sent once the parameters that had a gradient in the run's first step have one again
(megatron-core 0.19.2, `register_grad_ready`); a text-only last micro-batch would end in an assertion on its rank, and in a
hang on the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _ZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return output.data  # no view: a pipeline stage frees its output, and Megatron refuses to free a view

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, *(p.new_zeros(()).expand_as(p) for p in ctx.parameters)


def with_idle_tower(output: Tensor, tower: nn.Module) -> Tensor:
    """`output`, whose backward also gives every trainable parameter of `tower` a gradient of zeros."""
    trainable = [p for p in tower.parameters() if p.requires_grad]
    if not trainable or not output.requires_grad:
        return output
    return _ZeroGradients.apply(output, *trainable)  # pyright: ignore[reportReturnType]
