"""Processor samples -> `PackedBatch`: one place that pads, shifts labels, joins media and computes positions.

Labels are shifted here, inside each sample and before any cut, so that no rank ever needs its neighbour's first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from vlm_cp.alignment import Alignment
from vlm_cp.batch import PackedBatch
from vlm_cp.media import MediaTable
from vlm_cp.mrope import media_position_ids
from vlm_cp.plan import SequencePlan
from vlm_cp.spec import VLMSpec

IGNORE = -100


def pack_samples(
    samples: Sequence[Mapping[str, Tensor]],
    *,
    alignment: Alignment,
    spec: VLMSpec,
    pad_token_id: int,
    total_tokens: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> PackedBatch:
    """Packs samples as a transformers processor returns them for one conversation each.

    Read from each sample: `input_ids` [L] or [1, L]; `labels` like the ids, unshifted, -100 where no loss is wanted (the
    ids without them); `placeholder_mask` like the ids, False where an image or video id was sampled as text;
    `pixel_values` with `image_grid_thw`, `pixel_values_videos` with `video_grid_thw`, `second_per_grid_ts`.
    group: ranks that should all raise when one of them has unusable media, instead of waiting for it.
    """
    ids = [_row(sample, "input_ids") for sample in samples]
    plan = SequencePlan.from_lengths([len(x) for x in ids], alignment=alignment, total_tokens=total_tokens)
    targets = [_row(sample, "labels") if "labels" in sample else x for sample, x in zip(samples, ids, strict=True)]
    labels = plan.pack([torch.cat([x[1:], x.new_tensor([IGNORE])]) for x in targets], IGNORE)[None]
    stands = [
        _row(s, "placeholder_mask").bool() if "placeholder_mask" in s else torch.ones_like(x, dtype=torch.bool)
        for s, x in zip(samples, ids, strict=True)
    ]
    input_ids = plan.pack(ids, pad_token_id)[None]
    image_grids, video_grids = _joined(samples, "image_grid_thw"), _joined(samples, "video_grid_thw")
    media_ids = (input_ids == spec.image_token_id) | (input_ids == spec.video_token_id)
    media = MediaTable.from_batch(
        input_ids,
        plan,
        image_grid_thw=image_grids,
        video_grid_thw=video_grids,
        placeholder_mask=plan.pack(stands, False)[None] & media_ids,
        spec=spec,
    )
    media.check(group)
    seconds = _joined(samples, "second_per_grid_ts")
    return PackedBatch(
        plan=plan,
        input_ids=input_ids,
        labels=labels,
        loss_mask=labels != IGNORE,
        position_ids=media_position_ids(media, plan, second_per_grid_ts=seconds, spec=spec),
        media=media,
        pixel_values=_joined(samples, "pixel_values"),
        image_grid_thw=image_grids,
        pixel_values_videos=_joined(samples, "pixel_values_videos"),
        video_grid_thw=video_grids,
        second_per_grid_ts=seconds,
    )


def _row(sample: Mapping[str, Tensor], key: str) -> Tensor:
    row = torch.as_tensor(sample[key])
    row = row[0] if row.ndim == 2 and len(row) == 1 else row
    if row.ndim != 1 or len(row) != torch.as_tensor(sample["input_ids"]).numel():
        raise ValueError(
            f"{key} must hold one row of a sample's {torch.as_tensor(sample['input_ids']).numel()} tokens, got {tuple(row.shape)}; "
            "a batch of rows must be given sample by sample"
        )
    return row


def _joined(samples: Sequence[Mapping[str, Tensor]], key: str) -> Tensor | None:
    found = [torch.as_tensor(sample[key]) for sample in samples if sample.get(key) is not None]
    return torch.cat(found) if found else None
