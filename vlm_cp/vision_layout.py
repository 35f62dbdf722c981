"""`VisionLayout`: where one rank's patches and feature rows lie, on the device, and the exchange that joins all ranks' rows.

Everything is derived on the device from a few numbers a frame, moved there in one copy; nothing is ever asked back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vlm_cp import comm, transfer
from vlm_cp.vision import VisionAssignment


@dataclass(frozen=True, eq=False)
class Runs:
    """Patches that attend together: run i is q_lengths[i] queries, all of which see the k_lengths[i] keys of their frame.

    cu_q, cu_k: int32 [runs + 1] on the device, the same tensor where queries and keys are the same patches.
    """

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    cu_q: Tensor
    cu_k: Tensor

    @property
    def max_q(self) -> int:
        return max(self.q_lengths)

    @property
    def max_k(self) -> int:
        return max(self.k_lengths)


@dataclass(frozen=True, kw_only=True, eq=False)
class VisionLayout:
    """One rank's local stream of patches: its own frames, then its slice of the shared stream.

    idle: this rank has nothing to encode and runs one blank frame of m * m patches instead, whose row is dropped: so it enters
    every collective and touches every parameter of the tower, with gradient zero.
    parts: int64 [P, 3], (frame, first feature row in it, feature rows), on the CPU. sizes: (h, w) of each part's frame.
    own: the own frames' attention; None without any. shared: attention of the shared frames: of all of them where heads are
    exchanged, of this rank's patches alone where keys are; None where this rank has none to compute.
    slices: patches of the shared stream on every rank. keys: the patches of the shared stream that `shared` sees.
    """

    assignment: VisionAssignment
    rank: int
    idle: bool
    parts: np.ndarray
    sizes: tuple[tuple[int, int], ...]
    own: Runs | None
    shared: Runs | None
    slices: tuple[int, ...]
    keys: range
    _part_table: Tensor  # int64 [4, P]: patches, first patch in the stream, first patch in the frame, w
    _row_table: (
        Tensor  # int64 [2, S]: feature rows of a part, where they stand among all ranks' padded rows; stream order
    )

    @classmethod
    def of(cls, assignment: VisionAssignment, rank: int, device: torch.device | str) -> VisionLayout:
        """The layout of `rank`, its tables on `device`."""
        unit = assignment.merge**2
        parts = assignment.parts(rank)
        idle = not len(parts)
        if idle:
            parts = np.array([[0, 0, 1]], np.int64)
        sizes = np.full((1, 2), assignment.merge) if idle else assignment.frame_grids.numpy()[parts[:, 0], 1:]
        starts = assignment.row_counts.cumsum() - assignment.row_counts
        first = np.zeros(1, np.int64) if idle else (starts[parts[:, 0]] + parts[:, 1]) * unit
        part_table = np.stack([parts[:, 2] * unit, first, parts[:, 1] * unit, sizes[:, 1]])
        own_parts = max(len(assignment.frames_of(rank)), idle)
        own = tuple((parts[:own_parts, 2] * unit).tolist())
        slices = tuple(len(assignment.shared_rows(r)) * unit for r in range(assignment.cp_size))
        queries, seen, keys = _shared_runs(assignment, rank)
        row_table = _row_table(assignment)
        tables = [part_table, row_table, _bounds(own)[None], _bounds(queries)[None], _bounds(seen)[None]]
        on_device = transfer.moved_together([torch.from_numpy(table) for table in tables], device)
        cu_own, cu_q, cu_k = (x[0].int() for x in on_device[2:])
        return cls(
            assignment=assignment,
            rank=rank,
            idle=idle,
            parts=parts,
            sizes=tuple(map(tuple, sizes.tolist())),
            own=Runs(own, own, cu_own, cu_own) if own else None,
            shared=Runs(queries, seen, cu_q, cu_q if queries == seen else cu_k) if queries else None,
            slices=slices,
            keys=keys,
            _part_table=on_device[0],
            _row_table=on_device[1],
        )

    @property
    def device(self) -> torch.device:
        return self._part_table.device

    @property
    def own_patches(self) -> int:
        """Patches of the local stream that stand before the slice of the shared stream."""
        return self.num_patches - self.slices[self.rank]

    @cached_property
    def num_patches(self) -> int:
        """Patches of the local stream."""
        return int(self.parts[:, 2].sum()) * self.assignment.merge**2

    @cached_property
    def patch_offset(self) -> Tensor:
        """int64 [n]: every local patch's place inside its frame, in the frame's own order (merged patches together)."""
        return _runs_of(self._part_table[2], self._part_table[0], self.num_patches)

    def offsets_from(self, starts: Tensor) -> Tensor:
        """int64 [n]: every local patch's place in tables of whole frames, part p's table starting at starts[p]."""
        return self.patch_offset + starts.repeat_interleave(self._part_table[0], output_size=self.num_patches)

    @cached_property
    def coordinates(self) -> Tensor:
        """int64 [n, 2]: (row, column) of every local patch in its frame."""
        m = self.assignment.merge
        width = self._part_table[3].repeat_interleave(self._part_table[0], output_size=self.num_patches)
        block, inner = self.patch_offset // m**2, self.patch_offset % m**2
        row = block // (width // m) * m + inner // m
        return torch.stack([row, block % (width // m) * m + inner % m], 1)

    def take(self, pixels: Tensor) -> Tensor:
        """[n, channels]: this rank's patches of all patches in stream order; a blank frame on an idle rank."""
        if self.idle:
            return pixels.new_zeros(self.num_patches, pixels.size(1))
        if self.num_patches == len(pixels):  # every patch, in order
            return pixels
        return pixels.index_select(0, _runs_of(self._part_table[1], self._part_table[0], self.num_patches))

    def join(self, rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """This rank's feature rows [n / m^2, channels] -> all rows [R, channels] in stream order, on every rank.

        One all-gather. Differentiable: a row's gradients are summed over the ranks, once, to the rank that encoded it.
        """
        if self.assignment.mode == "replicated":
            return rows
        own = rows[: 0 if self.idle else len(rows)]
        return _Join.apply(own, self._row_index, self._most_rows, group)  # pyright: ignore[reportReturnType]

    @cached_property
    def _most_rows(self) -> int:
        return max(int(self.assignment.parts(rank)[:, 2].sum()) for rank in range(self.assignment.cp_size))

    @cached_property
    def _row_index(self) -> Tensor:
        """int64 [R]: each stream row's place among all ranks' padded rows."""
        return _runs_of(self._row_table[1], self._row_table[0], int(self.assignment.row_counts.sum()))


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, most: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.rows, ctx.most = group, len(rows), most
        ctx.save_for_backward(index)
        padded = rows if len(rows) == most else F.pad(rows, (0, 0, 0, most - len(rows)))
        every = padded.new_empty(most * comm.group_size(group), padded.size(1))
        dist.all_gather_into_tensor(every, padded.contiguous(), group=group)
        return every.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (index,) = ctx.saved_tensors
        every = grads[0].new_zeros(ctx.most * comm.group_size(ctx.group), grads[0].size(1))
        every.index_copy_(0, index, grads[0])
        own = every.new_empty(ctx.most, every.size(1))
        dist.reduce_scatter_tensor(own, every, group=ctx.group)
        return own[: ctx.rows], None, None, None


def _shared_runs(assignment: VisionAssignment, rank: int) -> tuple[tuple[int, ...], tuple[int, ...], range]:
    """(queries and keys of each run of the shared frames' attention on `rank`, the patches of the shared stream it sees)."""
    unit = assignment.merge**2
    frames = np.array(assignment.shared_frames, np.int64)
    patches = assignment.row_counts[frames] * unit
    if assignment.exchange == "heads":
        return tuple(patches.tolist()), tuple(patches.tolist()), range(int(patches.sum()))
    parts = assignment.shared_parts(rank)
    place = np.searchsorted(frames, parts[:, 0])
    starts = patches.cumsum() - patches
    first, last = (int(starts[place[0]]), int((starts + patches)[place[-1]])) if len(place) else (0, 0)
    return tuple((parts[:, 2] * unit).tolist()), tuple(patches[place].tolist()), range(first, last)


def _row_table(assignment: VisionAssignment) -> np.ndarray:
    """int64 [2, S]: see `VisionLayout`; a shared frame has one part on every rank that encodes some of it."""
    parts = [assignment.parts(rank) for rank in range(assignment.cp_size if assignment.mode != "replicated" else 1)]
    most = max((int(p[:, 2].sum()) for p in parts), default=0)
    places = [rank * most + p[:, 2].cumsum() - p[:, 2] for rank, p in enumerate(parts)]
    every = np.concatenate(parts)
    order = np.lexsort((every[:, 1], every[:, 0]))
    return np.stack([every[:, 2], np.concatenate(places)])[:, order]


def _bounds(lengths: tuple[int, ...]) -> np.ndarray:
    return np.array([0, *accumulate(lengths)], np.int64)


def _runs_of(starts: Tensor, counts: Tensor, total: int) -> Tensor:
    """int64 [total]: starts[i], starts[i] + 1, ... counts[i] times, for every i; `total` is the sum of counts."""
    shifts = starts - (counts.cumsum(0) - counts)
    return torch.arange(total, device=counts.device) + shifts.repeat_interleave(counts, output_size=total)
