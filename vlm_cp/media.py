"""`MediaTable`: which sample owns which image or video, where its feature rows go, and whether everything fits.

A feature row is one merged patch, what the tower returns; a placeholder is the token that a row replaces. Rows are
counted over all images in the order of `image_grid_thw`, then over all videos in the order of `video_grid_thw`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vlm_cp import transfer
from vlm_cp.comm import raise_together
from vlm_cp.plan import SequencePlan
from vlm_cp.rows import spread
from vlm_cp.spec import VLMSpec

_ROWS_LOST = "rows would be placed into another image or sample"


@dataclass(frozen=True, kw_only=True, eq=False)
class MediaTable:
    """The media of one packed batch; M images and videos, R feature rows.

    grids: int64 [M, 3], (t, h, w) in patches, images first. num_images: how many of the M are images.
    row_counts: int64 [M], feature rows of each. samples: int64 [M], the sample that owns each.
    row_slots: int64 [R], the stream slot that each feature row replaces. total_tokens: T.
    frame_order: int64 [F], the frames of all media (an image is one, counted images first), in the order in which they
    stand in the stream.
    fault: why the batch is not usable, or None. Call `check` before anything else is read: with a fault, `samples`,
    `row_slots` and `frame_order` are empty.
    """

    grids: Tensor
    num_images: int
    row_counts: Tensor
    samples: Tensor
    row_slots: Tensor
    frame_order: Tensor
    total_tokens: int
    fault: str | None

    @classmethod
    def from_batch(
        cls,
        input_ids: Tensor,
        plan: SequencePlan,
        *,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        placeholder_mask: Tensor | None = None,
        spec: VLMSpec,
    ) -> MediaTable:
        """Reads the table off the full stream, on the CPU.

        input_ids: [1, T]. image_grid_thw, video_grid_thw: [*, 3], in stream order within each kind.
        placeholder_mask: bool [1, T], True where an id stands for a feature row; without it every image or video id does.
        Pass it in RL, where the policy may sample such an id as text.
        """
        _check_stream("input_ids", input_ids, plan)
        if input_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"input_ids must be int32 or int64, got {input_ids.dtype}; half precision rounds ids to other ids"
            )
        if placeholder_mask is not None:
            _check_stream("placeholder_mask", placeholder_mask, plan)
        images, videos = _as_grids(image_grid_thw), _as_grids(video_grid_thw)
        grids = torch.cat([images, videos])
        merge = spec.spatial_merge_size
        row_counts = grids.prod(1) // merge**2
        ids = input_ids[0]
        stands = plan.valid if placeholder_mask is None else plan.valid & placeholder_mask[0].bool()
        slots = [_where(stands & (ids == token)) for token in (spec.image_token_id, spec.video_token_id)]
        table = cls(
            grids=grids,
            num_images=len(images),
            row_counts=row_counts,
            samples=torch.empty(0, dtype=torch.int64),
            row_slots=torch.empty(0, dtype=torch.int64),
            frame_order=torch.empty(0, dtype=torch.int64),
            total_tokens=plan.total_tokens,
            fault=None,
        )
        fault = _grid_fault(images, "image", merge) or _grid_fault(videos, "video", merge)
        if fault is None and placeholder_mask is not None and int(stands.sum()) != sum(map(len, slots)):
            slot = int((stands & (ids != spec.image_token_id) & (ids != spec.video_token_id)).nonzero()[0, 0])
            fault = f"placeholder_mask must mark image and video ids only, got id {int(ids[slot])} at slot {slot}; {_ROWS_LOST}"
        fault = fault or _count_fault(slots[0], images, row_counts[: len(images)], plan, "image")
        fault = fault or _count_fault(slots[1], videos, row_counts[len(images) :], plan, "video")
        if fault is not None:
            return replace(table, fault=fault)
        row_slots = torch.cat(slots)
        samples = plan.sample_index[row_slots[row_counts.cumsum(0) - row_counts]]
        frame_order = _order_of_frames(grids, row_counts, row_slots)
        table = replace(table, row_slots=row_slots, samples=samples, frame_order=frame_order)
        return replace(table, fault=table._run_fault(spec))

    def check(self, group: dist.ProcessGroup | None = None) -> None:
        """Raises the fault, if there is one, on every rank of `group` together; call it before any other collective."""
        raise_together(self.fault, group)

    def item_of_row(self) -> Tensor:
        """int64 [R]: the image or video, an index into `grids`, of every feature row."""
        return spread(torch.arange(len(self.grids)), self.row_counts, len(self.row_slots))

    def slot_rows(self) -> Tensor:
        """int64 [T]: the feature row that replaces each slot, -1 where the slot is text or padding; the same object at every call."""
        return self._slot_rows

    @cached_property
    def _slot_rows(self) -> Tensor:
        rows = torch.arange(len(self.row_slots), device=self.row_slots.device)
        return rows.new_full((self.total_tokens,), -1).index_copy(0, self.row_slots, rows)

    @property
    def frame_grids(self) -> Tensor:
        """int64 [F, 3]: (1, h, w) of every frame, images first, each video's frames in order."""
        return _frames(self.grids)

    def patch_order(self) -> Tensor:
        """int64 [patches]: takes the patches of all images and then all videos to stream order, frame by frame."""
        counts = self.frame_grids.prod(1)
        starts, taken = counts.cumsum(0) - counts, counts[self.frame_order]
        shift = starts[self.frame_order] - (taken.cumsum(0) - taken)
        total = int(counts.sum())
        return torch.arange(total) + spread(shift, taken, total)

    def to(self, device: torch.device | str) -> MediaTable:
        """The same table with `row_slots` on `device`; everything else stays on the CPU, where it is read."""
        return self.placed(transfer.moved(self.row_slots, device))

    def placed(self, row_slots: Tensor) -> MediaTable:
        """The same table with `row_slots` where they lie now; the table itself where they did not move."""
        return self if row_slots.device == self.row_slots.device else replace(self, row_slots=row_slots)

    def name(self, item: int) -> str:
        """How messages and reports call an item: "image 3" or "video 0", counted within its kind."""
        return f"image {item}" if item < self.num_images else f"video {item - self.num_images}"

    def _run_fault(self, spec: VLMSpec) -> str | None:
        """A run is what must lie in one piece: an image, a frame of a video, or with the "time" scheme a whole video."""
        if not len(self.row_slots):
            return None
        runs = self.row_counts
        if spec.position_scheme == "frames":
            frames = self.grids[:, 0].where(torch.arange(len(self.grids)) >= self.num_images, 1)
            runs = spread(runs // frames, frames, int(frames.sum()))
        ends = runs.cumsum(0)
        if torch.equal(self.row_slots[ends - 1] - self.row_slots[ends - runs] + 1, runs):  # slots of a kind ascend
            return None
        starts_run = torch.zeros(len(self.row_slots), dtype=torch.bool)
        starts_run[ends - runs] = True
        item, run_length = self.item_of_row(), spread(runs, runs, len(starts_run))
        broken = (self.row_slots.diff() != 1) & ~starts_run[1:]
        row = int(broken.nonzero()[0, 0]) + 1
        unit = "frame" if spec.position_scheme == "frames" and int(item[row]) >= self.num_images else "grid"
        return (
            f"{self.name(int(item[row]))} of sample {int(self.samples[item[row]])} must have the {int(run_length[row])} "
            f"placeholders of a {unit} in one piece, got a gap before slot {int(self.row_slots[row])}; "
            "the positions of everything after it would be wrong"
        )


def _check_stream(name: str, x: Tensor, plan: SequencePlan) -> None:
    if tuple(x.shape) != (1, plan.total_tokens):
        raise ValueError(
            f"{name} must have the full stream's shape (1, {plan.total_tokens}), got {tuple(x.shape)}; media would be misplaced"
        )
    if x.device.type != "cpu" or plan.device.type != "cpu":
        raise ValueError(
            f"{name} and plan must lie on the CPU, got {x.device} and {plan.device}; "
            "media are checked once a batch before it moves, and checking them on an accelerator stalls the step"
        )


def _where(mask: Tensor) -> Tensor:
    """int64: where a mask [T] on the CPU is True; numpy takes an eighth of torch's time."""
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def _frames(grids: Tensor) -> Tensor:
    frames = spread(grids, grids[:, 0], int(grids[:, 0].sum()))
    frames[:, 0] = 1
    return frames


def _order_of_frames(grids: Tensor, row_counts: Tensor, row_slots: Tensor) -> Tensor:
    """int64 [F]: frames sorted by the slot of their first feature row."""
    frame_rows = spread(row_counts // grids[:, 0], grids[:, 0], int(grids[:, 0].sum()))
    return row_slots[frame_rows.cumsum(0) - frame_rows].argsort()


def _as_grids(grid_thw: Tensor | None) -> Tensor:
    if grid_thw is None:
        return torch.empty(0, 3, dtype=torch.int64)
    if not isinstance(grid_thw, Tensor) or grid_thw.dtype.is_floating_point:  # pyright: ignore[reportUnnecessaryIsInstance]
        found = grid_thw.dtype if isinstance(grid_thw, Tensor) else type(grid_thw).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"grid_thw must be an integer tensor [*, 3], got {found}; patch counts would be rounded")
    if grid_thw.ndim != 2 or grid_thw.size(1) != 3:
        raise ValueError(
            f"grid_thw must have shape [*, 3], (t, h, w) in patches, got {tuple(grid_thw.shape)}; {_ROWS_LOST}"
        )
    return grid_thw.cpu().long()


def _grid_fault(grids: Tensor, kind: str, merge: int) -> str | None:
    if not len(grids):
        return None
    bad = (grids < 1).any(1) | (grids[:, 1:] % merge != 0).any(1)
    if not bool(bad.any()):
        return None
    item = int(bad.nonzero()[0, 0])
    return (
        f"{kind} {item} must have a grid of positive t, and h and w divisible by spatial_merge_size {merge}, "
        f"got {tuple(grids[item].tolist())}; the tower would merge patches of different rows"
    )


def _count_fault(slots: Tensor, grids: Tensor, row_counts: Tensor, plan: SequencePlan, kind: str) -> str | None:
    """Placeholders against feature rows, sample by sample: each sample must hold whole items."""
    if not len(slots) and not len(grids):
        return None
    held = torch.searchsorted(slots, plan.cu_seqlens_padded[1:].long())
    item_ends = torch.cat([torch.zeros(1, dtype=torch.int64), row_counts.cumsum(0)])
    unfit = item_ends[torch.searchsorted(item_ends, held).clamp_(max=len(grids))] != held
    if not bool(unfit.any()):
        if int(held[-1]) == int(item_ends[-1]):
            return None
        item = int(torch.searchsorted(item_ends, held[-1]))
        return (
            f"{kind}_grid_thw must describe the {item} {kind}s that the ids hold, got {len(grids)}: {kind} {item} "
            f"{tuple(grids[item].tolist())} has {int(row_counts[item])} feature rows and no placeholder; its features would be dropped"
        )
    sample = int(unfit.nonzero()[0, 0])
    before = int(held[sample - 1]) if sample else 0
    first = int(torch.searchsorted(item_ends, before))
    own = row_counts[first:][item_ends[first:-1] < held[sample]]
    last = first + len(own) - 1
    got = int(held[sample]) - before
    if last < first:
        expected = f"no {kind} is left in {kind}_grid_thw for it"
    else:
        expected = f"{int(own.sum())} feature rows in {kind}_grid_thw, {kind} {last} {tuple(grids[last].tolist())} being cut or followed by more"
    return (
        f"sample {sample} must hold one {kind} placeholder for every feature row, got {got} placeholders and {expected}; {_ROWS_LOST} "
        f"(a truncated prompt, or an id that the policy sampled as text: then pass placeholder_mask)"
    )
