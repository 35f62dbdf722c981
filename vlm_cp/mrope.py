"""Three-axis rotary positions (mRoPE) of a whole packed stream, vectorised: one cumulative sum, no loop over samples.

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
    item = media.item_of_row()
    grids = media.grids // torch.tensor([1, spec.spatial_merge_size, spec.spatial_merge_size])
    _, height, width = grids[item].unbind(1)
    offset = torch.arange(len(item)) - (media.row_counts.cumsum(0) - media.row_counts)[item]
    frame, in_frame = offset // (height * width), offset % (height * width)
    is_frame = (
        (item >= media.num_images) if spec.position_scheme == "frames" else torch.zeros_like(item, dtype=torch.bool)
    )

    rows = torch.stack(
        [frame * _time_steps(media, second_per_grid_ts, spec)[item], in_frame // width, in_frame % width]
    )
    rows[0].masked_fill_(is_frame, 0)
    ends_run = torch.where(is_frame, in_frame == height * width - 1, offset == media.row_counts[item] - 1)

    step = torch.ones(plan.total_tokens, dtype=torch.int64)
    step[media.row_slots] = torch.maximum(height, width) * ends_run
    counter = step.cumsum(0) - step
    counter -= counter[plan.cu_seqlens_padded[:-1].long()][plan.sample_index]
    positions = counter.repeat(3, 1)
    positions[:, media.row_slots] += rows
    return positions.mul_(plan.valid)[:, None]


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
