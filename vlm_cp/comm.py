"""Differentiable collectives over a given process group, for gloo and NCCL alike.

`group=None` never means the default group: it stands for "one rank", where every collective is the identity.
Each function says what its backward does, since two right gradients exist (see `all_gather`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

GatherBackward = Literal["slice", "sum"]


def group_size(group: dist.ProcessGroup | None) -> int:
    """Ranks in `group`; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's rank inside `group`; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, backward: GatherBackward) -> Tensor:
        ctx.group, ctx.sums = group, backward == "sum"
        x = x.contiguous()
        out = x.new_empty((x.size(0) * group_size(group), *x.shape[1:]))
        dist.all_gather_into_tensor(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grads[0].contiguous()
        rows = grad.size(0) // group_size(ctx.group)
        if not ctx.sums:
            return grad.narrow(0, group_rank(ctx.group) * rows, rows), None, None
        own = grad.new_empty((rows, *grad.shape[1:]))
        dist.reduce_scatter_tensor(own, grad, group=ctx.group)
        return own, None, None


def all_gather(x: Tensor, group: dist.ProcessGroup | None, *, backward: GatherBackward) -> Tensor:
    """Concatenates every rank's `x` along dim 0; all ranks pass the same shape.

    backward="slice" takes this rank's own rows of the gradient. It is right where every rank goes on to compute the same
    value from the result (a loss of the whole batch on every rank), for then each rank already holds the whole gradient.
    backward="sum" is the true adjoint, a reduce-scatter: right where each rank uses the result for its own part only
    (keys and values of attention). The wrong choice scales gradients by the group's size, or drops the other ranks' share.
    """
    if backward not in get_args(GatherBackward):
        raise ValueError(
            f'backward must be "slice" or "sum", got {backward!r}; gradients of the other ranks would be dropped'
        )
    if group_size(group) == 1:
        return x
    return _AllGather.apply(x, group, backward)  # pyright: ignore[reportReturnType]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grads[0].contiguous()
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad, group=ctx.group)
        return out, None


def all_to_all(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sends `x[r]` to rank r and returns what the ranks sent here, in their order; `x.size(0)` is the group's size.

    The backward is the same exchange, its own adjoint.
    """
    if x.size(0) != group_size(group):
        raise ValueError(
            f"x.size(0) must be the group's size {group_size(group)}, got {x.size(0)}; rows would go to the wrong rank"
        )
    if group_size(group) == 1:
        return x
    return _AllToAll.apply(x, group)  # pyright: ignore[reportReturnType]


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, sums: bool) -> Tensor:
        ctx.group = group
        return _summed(x, group) if sums else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _summed(grads[0], ctx.group), None, None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of every rank's `x`, on every rank. The backward sums the ranks' gradients: the true adjoint.

    Right where each rank uses the sum for its own part of the loss. Where all ranks go on to compute one and the same
    loss, it makes gradients too large by the group's size.
    """
    if group is None or group_size(group) == 1:
        return x
    return _AllReduce.apply(x, group, True)  # pyright: ignore[reportReturnType]


def sum_gradient(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`x` itself; the backward sums the ranks' gradients. For a replicated `x` of which each rank uses a different part."""
    if group is None or group_size(group) == 1:
        return x
    return _AllReduce.apply(x, group, False)  # pyright: ignore[reportReturnType]


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _trade_rows(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _trade_rows(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _trade_rows(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def all_to_all_rows(
    x: Tensor, *, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Sends the first sent[0] rows of `x` to rank 0, the next sent[1] to rank 1, ...; returns what came, received[r] from rank r.

    Any of them may be 0, but every rank must call it. The backward is the reverse exchange, its own adjoint.
    """
    if sum(sent) != len(x):
        raise ValueError(
            f"sent must add up to x's {len(x)} rows, got {list(sent)}; the ranks would wait for rows that never come"
        )
    if group_size(group) == 1:
        return x
    return _AllToAllRows.apply(x, list(sent), list(received), group)  # pyright: ignore[reportReturnType]


def raise_together(fault: str | None, group: dist.ProcessGroup | None) -> None:
    """Raises `ValueError` on every rank of `group` when any rank has a fault, with the first faulty rank's sentence.

    One small object gather. Without it the healthy ranks would wait in their next collective for a rank that has gone.
    """
    faults: list[str | None] = [fault]
    if group is not None and group_size(group) > 1:
        faults = [None] * group_size(group)
        dist.all_gather_object(faults, fault, group=group)
    for rank, text in enumerate(faults):
        if text is not None:
            raise ValueError(text if len(faults) == 1 else f"{text} (found on rank {rank} of {len(faults)})")


__all__ = [
    "GatherBackward",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_rows",
    "group_rank",
    "group_size",
    "raise_together",
    "sum_gradient",
]
