"""Who encodes what: vision work dealt over the context-parallel ranks by cost. Pure index maths, no process group.

The unit is a frame: an image, or one temporal patch of a video, since attention in the tower never leaves it. Frames stay
whole on one rank each as long as that balances. Where it does not, the smallest set of the largest frames is *shared*:
their patches form one stream that is cut into a slice a rank, at any feature row, and their attention is exchanged
(`vlm_cp.cut_attention`). So the smallest unit of work is a feature row, and one huge image balances as well as many.

    F  frames, in the order of their grids      m  spatial_merge_size; a feature row is m * m patches
    local stream of a rank: its own frames whole, in their order, then its slice of the shared stream
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vlm_cp.cost import Rates, frame_pairs, vision_work
from vlm_cp.spec import VLMSpec

# Fewer patches than this in a batch: the tower's launches take as long as its arithmetic.
MIN_PATCHES = 4096

VisionMode = Literal["replicated", "whole", "mixed"]
Exchange = Literal["heads", "keys"]
# Each rank's whole frames, the shared frames, and the cuts of their stream.
_Dealt = tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, eq=False)
class VisionAssignment:
    """What every rank encodes. All ranks compute the same assignment from the same grids.

    frame_grids: int64 [F, 3], (1, h, w) in patches. merge: m.
    mode: "replicated", every rank encodes everything and nothing is exchanged; "whole", frames are dealt whole; "mixed",
    some frames are shared besides. exchange: how a shared frame's attention is exchanged, by heads or by keys and values.
    owned: each rank's whole frames. shared_frames: in stream order. cuts: [c + 1] feature rows of the shared stream; rank r
    has those from cuts[r] to cuts[r + 1]. costs: each rank's seconds of one forward pass.
    """

    frame_grids: Tensor
    merge: int
    mode: VisionMode
    exchange: Exchange
    owned: tuple[tuple[int, ...], ...]
    shared_frames: tuple[int, ...]
    cuts: tuple[int, ...]
    costs: tuple[float, ...]

    @property
    def cp_size(self) -> int:
        return len(self.owned)

    def frames_of(self, rank: int) -> tuple[int, ...]:
        """The frames that `rank` encodes whole, in their order."""
        return self.owned[self._rank(rank)]

    def shared_rows(self, rank: int) -> range:
        """The feature rows of the shared stream that `rank` encodes; empty where nothing is shared."""
        return range(self.cuts[self._rank(rank)], self.cuts[rank + 1])

    def cost_of(self, rank: int) -> float:
        """Seconds of one forward pass on `rank`, at the rates that were assigned with."""
        return self.costs[self._rank(rank)]

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < self.cp_size:
            raise ValueError(f"rank must lie in [0, {self.cp_size}), got {rank}; another rank's frames would be taken")
        return rank

    @cached_property
    def row_counts(self) -> np.ndarray:
        """int64 [F]: feature rows of every frame."""
        return self.frame_grids.prod(1).numpy() // self.merge**2

    def parts(self, rank: int) -> np.ndarray:
        """int64 [P, 3], (frame, first feature row inside it, feature rows): `rank`'s local stream, in order."""
        whole = np.array(self.owned[rank], np.int64)
        own = np.stack([whole, np.zeros_like(whole), self.row_counts[whole]], 1)
        return np.concatenate([own, self.shared_parts(rank)])

    def shared_parts(self, rank: int) -> np.ndarray:
        """The parts of `rank`'s slice of the shared stream."""
        frames = np.array(self.shared_frames, np.int64)
        ends = self.row_counts[frames].cumsum()
        starts = ends - self.row_counts[frames]
        first, last = np.maximum(starts, self.cuts[rank]), np.minimum(ends, self.cuts[rank + 1])
        parts = np.stack([frames, first - starts, last - first], 1)
        return parts[parts[:, 2] > 0]


def assign_vision(
    grids: Tensor | Sequence[Sequence[int]],
    *,
    cp_size: int,
    spec: VLMSpec,
    heads_per_tp: int | None = None,
    min_patches: int = MIN_PATCHES,
    tolerance: float = 0.03,
    rates: Rates | None = None,
) -> VisionAssignment:
    """Deals the frames of `grids` over `cp_size` ranks.

    grids: [M, 3], (t, h, w) in patches of images and videos, in the order in which the tower takes them.
    heads_per_tp: the tower's heads on one TP rank, all of them by default; shared frames exchange heads where these divide
    by cp_size, keys and values otherwise.
    min_patches: a batch of fewer stays replicated, since launches then cost more than arithmetic, and every rank pays them.
    tolerance: how far the busiest rank may lie above the mean; frames are shared, the largest first, until it holds. A tower
    with windows (Qwen2.5-VL) orders its patches by window, so its frames stay whole and it may not be reached.
    rates: what a rank computes a second; only their ratio counts.
    """
    if cp_size < 1:
        raise ValueError(f"cp_size must be at least 1, got {cp_size}; there would be no rank to deal frames to")
    frames = _frames(grids, spec.spatial_merge_size)
    costs = _frame_costs(frames, spec, rates or Rates())
    patches = frames.prod(1).numpy()
    heads = spec.tower.num_heads if heads_per_tp is None else heads_per_tp
    exchange: Exchange = "heads" if heads % cp_size == 0 else "keys"
    deal = _Deal(patches // spec.spatial_merge_size**2, costs, cp_size, exchange)
    limit = float(costs.sum()) / cp_size * (1 + tolerance)
    may_cut = spec.tower.window_size is None
    dealt, mode = deal.whole(frozenset()), "whole"
    if cp_size == 1 or int(patches.sum()) < max(min_patches, 1) or (len(frames) == 1 and not may_cut):
        dealt, mode = deal.replicated(), "replicated"
    elif may_cut and float(deal.rank_costs(*dealt).max()) > limit:
        dealt, mode = deal.mixed(limit), "mixed"
    owned, shared, cuts = dealt
    return VisionAssignment(
        frame_grids=frames,
        merge=spec.spatial_merge_size,
        mode=mode,
        exchange=exchange,
        owned=owned,
        shared_frames=shared,
        cuts=cuts,
        costs=tuple(deal.rank_costs(*dealt).tolist()),
    )


def _frames(grids: Tensor | Sequence[Sequence[int]], merge: int) -> Tensor:
    table = torch.as_tensor(grids).cpu()
    if table.numel() and (table.ndim != 2 or table.size(1) != 3 or table.dtype.is_floating_point):
        raise ValueError(
            f"grids must be integers of shape [*, 3], (t, h, w) in patches, got {table.dtype} of shape {tuple(table.shape)}; "
            "other frames would be dealt than the tower takes"
        )
    table = table.long().reshape(-1, 3)
    bad = (table < 1).any(1) | (table[:, 1:] % merge != 0).any(1)
    if bool(bad.any()):
        item = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"grids[{item}] must be (t, h, w) with positive t, and h and w divisible by spatial_merge_size {merge}, "
            f"got {tuple(table[item].tolist())}; a rank's slice would end inside a feature row"
        )
    frames = table.repeat_interleave(table[:, 0], 0)
    frames[:, 0] = 1
    return frames


def _frame_costs(frames: Tensor, spec: VLMSpec, rates: Rates) -> np.ndarray:
    """float64 [F, 2]: seconds of a frame's matrix products and of its attention."""
    merge, tower = spec.spatial_merge_size, spec.tower
    one_row, _ = vision_work(torch.tensor([[1, merge, merge]]), spec)
    patches = frames.prod(1).numpy().astype(np.float64)
    if tower.window_size is None:
        pairs = patches**2 * tower.depth
    else:
        sizes, index = np.unique(frames.numpy(), axis=0, return_inverse=True)
        pairs = np.array([frame_pairs(torch.from_numpy(size[None]), spec) for size in sizes], np.float64)[index]
    dense = patches / merge**2 * one_row.flops / rates.vision
    return np.stack([dense, 4 * tower.hidden_size * pairs / rates.vision_attention], 1)


@dataclass(frozen=True)
class _Deal:
    """Ways to deal frames of `rows` feature rows and `costs` [F, 2] over `size` ranks."""

    rows: np.ndarray
    costs: np.ndarray
    size: int
    exchange: Exchange

    def replicated(self) -> _Dealt:
        """Every frame on every rank."""
        return (tuple(range(len(self.rows))),) * self.size, (), (0,) * (self.size + 1)

    def mixed(self, limit: float) -> _Dealt:
        """The deal with the fewest shared frames whose busiest rank stays within `limit`; with all shared otherwise."""
        largest = np.argsort(-self.costs.sum(1), kind="stable").tolist()
        for count in range(1, len(largest)):
            found = self.whole(frozenset(largest[:count]))
            if float(self.rank_costs(*found).max()) <= limit:
                return found
        return self.whole(frozenset(largest))

    def whole(self, shared: frozenset[int]) -> _Dealt:
        """The frames outside `shared` whole, the largest first to the least busy rank; the shared ones' slices level the rest."""
        totals = self.costs.sum(1)
        owned: list[list[int]] = [[] for _ in range(self.size)]
        heap = [(0.0, rank) for rank in range(self.size)]
        for frame in np.argsort(-totals, kind="stable").tolist():
            if frame not in shared:
                load, rank = heap[0]
                owned[rank].append(frame)
                heapq.heapreplace(heap, (load + float(totals[frame]), rank))
        loads = np.array([load for load, _ in sorted(heap, key=lambda entry: entry[1])])
        ordered = tuple(sorted(shared))
        return tuple(tuple(sorted(own)) for own in owned), ordered, self._cuts(ordered, loads)

    def rank_costs(self, owned: Sequence[Sequence[int]], shared: Sequence[int], cuts: Sequence[int]) -> np.ndarray:
        """float64 [c]: every rank's seconds."""
        totals = self.costs.sum(1)
        loads = np.array([totals[list(own)].sum() for own in owned])
        if not shared:
            return loads
        rows, costs, fixed = self._shared_stream(shared)
        return loads + np.diff(np.interp(cuts, rows, costs)) + fixed

    def _shared_stream(self, shared: Sequence[int]) -> tuple[np.ndarray, np.ndarray, float]:
        """(rows, costs) [S + 1]: cost up to a feature row of the shared stream, linear between; and what each rank pays anyhow.

        With heads exchanged, every rank has 1/c of the attention whatever its slice is; with keys, its own queries' part.
        """
        frames = list(shared)
        by_row = self.costs[frames].sum(1) if self.exchange == "keys" else self.costs[frames, 0]
        fixed = 0.0 if self.exchange == "keys" else float(self.costs[frames, 1].sum()) / self.size
        zero = np.zeros(1)
        return np.concatenate([zero, self.rows[frames].cumsum()]), np.concatenate([zero, by_row.cumsum()]), fixed

    def _cuts(self, shared: Sequence[int], loads: np.ndarray) -> tuple[int, ...]:
        """[c + 1]: slices that bring every rank to the same level, as far as it does not lie above it already."""
        if not shared:
            return (0,) * (self.size + 1)
        rows, costs, _ = self._shared_stream(shared)
        ascending = np.sort(loads)
        levels = (ascending.cumsum() + costs[-1]) / np.arange(1, self.size + 1)
        level = float(levels.min())  # filling the k least busy ranks; the right k gives the lowest level
        ends = np.maximum(level - loads, 0.0).cumsum()
        cuts = np.interp(ends * (costs[-1] / ends[-1]), costs, rows).round().astype(int)
        return (0, *cuts[:-1].tolist(), int(rows[-1]))
