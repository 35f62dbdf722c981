"""Three-axis rotary positions (mRoPE) of a whole packed stream, vectorised: one cumulative sum, no loop over samples or media.

A position depends on everything before it in its sample, so it can only be computed on the full stream: a shard does
not know how many rows an image on another rank took. The rule (transformers 5.12 `get_rope_index`, per sample): a text
token advances the counter by one; an image, or a frame, sits at the counter's value plus (t, y, x) in merged patches
and advances it by max(h, w) / m. Every sample starts at 0. Padding gets 0 and is never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlm_cp.media import MediaTable
from vlm_cp.plan import SequencePlan
from vlm_cp.rows import spread
from vlm_cp.spec import VLMSpec


def packed_position_ids(
    input_ids: Tensor,
    plan: SequencePlan,
    *,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    second_per_grid_ts: Tensor | None = None,
    placeholder_mask: Tensor | None = None,
    spec: VLMSpec,
) -> Tensor:
    """int64 [3, 1, T]: (temporal, height, width) positions of the full stream, on the CPU.

    Arguments are `MediaTable.from_batch`'s; second_per_grid_ts: [videos], seconds a temporal patch spans, read only by the
    "time" scheme (1 without it, as in transformers). Raises `ValueError` when placeholders and grids do not fit.
    """
    media = MediaTable.from_batch(
        input_ids,
        plan,
        image_grid_thw=image_grid_thw,
        video_grid_thw=video_grid_thw,
        placeholder_mask=placeholder_mask,
        spec=spec,
    )
    media.check()
    return media_position_ids(media, plan, second_per_grid_ts=second_per_grid_ts, spec=spec)


def media_position_ids(
    media: MediaTable, plan: SequencePlan, *, second_per_grid_ts: Tensor | None = None, spec: VLMSpec
) -> Tensor:
    """`packed_position_ids` for a `MediaTable` that was built and checked before."""
    m = spec.spatial_merge_size
    whole_videos = spec.position_scheme == "time"
    steps = _time_steps(media, second_per_grid_ts, spec)
    runs = media.grids // torch.tensor([1, m, m])  # what lies in one piece and counts from one place
    if not whole_videos:
        frames = runs[:, 0].where(torch.arange(len(runs)) >= media.num_images, 1)
        total = int(frames.sum())
        runs, steps = spread(runs, frames, total), spread(steps, frames, total)
        runs[media.num_images :, 0] = 1
    within, ends = _positions_in_runs(runs, steps, media.row_slots)

    # A slot's position is its place in its sample, less what the runs before it take up less of than they have rows.
    saved = torch.zeros(plan.total_tokens + 1, dtype=torch.int64)
    saved[ends] = runs.prod(1) - runs[:, 1:].amax(1)
    saved = saved.cumsum_(0)[:-1]
    starts = plan.cu_seqlens_padded[:-1].long()
    base = spread(starts - saved[starts], plan.cu_seqlens_padded.diff(), len(saved))
    positions = (torch.arange(len(saved)) - saved - base).repeat(3, 1)
    positions.index_add_(1, media.row_slots, within)
    return (positions if sum(plan.lengths) == plan.total_tokens else positions.mul_(plan.valid))[:, None]


def _positions_in_runs(runs: Tensor, steps: Tensor, row_slots: Tensor) -> tuple[Tensor, Tensor]:
    """(int64 [3, R], int64 [Q]): each row's (t, y, x) in its run, less its number in the run; the slot after each run.

    runs: [Q, 3], (frames, height, width) in feature rows. steps: [Q], from one frame to the next.
    """
    frames, lines = (int(x) for x in (runs[:, 0].sum(), runs[:, :2].prod(1).sum()))
    height, width = (spread(runs[:, k], runs[:, 0], frames) for k in (1, 2))  # of each frame
    widths = spread(width, height, lines)  # of each line
    rows = runs.prod(1)
    total = len(row_slots)
    time = _count(runs[:, 0], frames) * spread(steps, runs[:, 0], frames)
    within = torch.stack(
        [
            spread(time, height * width, total),
            spread(_count(height, lines), widths, total),
            _count(widths, total),
        ]
    )
    return within.sub_(_count(rows, total)), row_slots[rows.cumsum(0) - 1] + 1


def _count(lengths: Tensor, total: int) -> Tensor:
    """int64 [total]: 0, 1, ... lengths[0] - 1, then the same up to lengths[1] - 1, and so on."""
    return torch.arange(total) - spread(lengths.cumsum(0) - lengths, lengths, total)


def _time_steps(media: MediaTable, second_per_grid_ts: Tensor | None, spec: VLMSpec) -> Tensor:
    """int64 [M]: how far the temporal axis advances from one temporal patch to the next."""
    steps = torch.ones(len(media.grids), dtype=torch.int64)
    num_videos = len(steps) - media.num_images
    if spec.position_scheme != "time":
        return steps
    seconds = torch.ones(num_videos) if second_per_grid_ts is None else torch.as_tensor(second_per_grid_ts).cpu()
    if tuple(seconds.shape) != (num_videos,):
        found = len(seconds) if seconds.ndim == 1 else f"shape {tuple(seconds.shape)}"
        raise ValueError(
            f"second_per_grid_ts must have one entry a video, {num_videos} in all, got {found}; "
            "a video would take another one's frame rate"
        )
    if not bool(((seconds >= 0) & seconds.isfinite()).all()):
        raise ValueError(
            f"second_per_grid_ts must be finite and not negative, got {seconds.tolist()}; its frames would run backwards"
        )
    steps[media.num_images :] = (
        spec.tokens_per_second * seconds.long()
    )  # truncated to whole seconds, as transformers does
    return steps
