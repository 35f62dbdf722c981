"""Moves tensors to an accelerator without waiting for it: pinned memory, asynchronous copies, one for many small tensors."""

from __future__ import annotations

from collections.abc import Sequence

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
    """The tensors on `device`; those on the CPU travel there in one pinned copy and are views of one piece of memory."""
    target = resolved(device)
    if target.type != "cuda":
        return [x.to(target) for x in tensors]
    here = [i for i, x in enumerate(tensors) if x.device.type == "cpu"]
    starts, end = {}, 0
    for i in here:
        starts[i] = end
        end += -(-tensors[i].nbytes // _ALIGN) * _ALIGN
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    for i in here:
        _piece(buffer, starts[i], tensors[i]).copy_(tensors[i])
    there = buffer.to(target, non_blocking=True)
    return [_piece(there, starts[i], x) if i in starts else x.to(target) for i, x in enumerate(tensors)]


def _piece(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
