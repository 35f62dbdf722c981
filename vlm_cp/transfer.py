"""Moves tensors to an accelerator without waiting for it: pinned memory, asynchronous copies, one for many small tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

_ALIGN = 16  # bytes, so that every piece can be seen as any dtype


def resolved(device: torch.device | str) -> torch.device:
    """`device` with its index, so that it compares equal to that of tensors there."""
    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if found == torch.device("cuda") else found


def moved(x: Tensor, device: torch.device | str) -> Tensor:
    """`x` on `device`; from the CPU through pinned memory, which a data loader may have pinned it to before."""
    target = resolved(device)
    if target.type == "cuda" and x.device.type == "cpu" and not x.is_pinned():
        x = x.pin_memory()
    return x.to(target, non_blocking=True)


def moved_together(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """The tensors on `device`; those on the CPU travel there in one pinned copy and are views of one piece of memory there."""
    target = resolved(device)
    if target.type != "cuda":
        return [x.to(target) for x in tensors]
    waiting = [x for x in tensors if x.device.type == "cpu"]
    arrived = iter(through_one_buffer(waiting, lambda buffer: moved(buffer, target), pin=True))
    return [next(arrived) if x.device.type == "cpu" else x.to(target) for x in tensors]


def through_one_buffer(
    tensors: Sequence[Tensor], move: Callable[[Tensor], Tensor], *, pin: bool = False
) -> list[Tensor]:
    """The tensors, from the CPU, as views of `move(buffer)`; the buffer, uint8 and pinned or not, holds them all."""
    ends = list(accumulate(-(-x.nbytes // _ALIGN) * _ALIGN for x in tensors))
    buffer = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8, pin_memory=pin)
    starts = [0, *ends[:-1]]
    for start, x in zip(starts, tensors, strict=False):
        _piece(buffer, start, x).copy_(x)
    there = move(buffer)
    return [_piece(there, start, x) for start, x in zip(starts, tensors, strict=False)]


def _piece(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
