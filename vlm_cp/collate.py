"""Chat samples -> `PackedBatch`: one place that pads, shifts labels, joins media and computes positions.

Labels are shifted here, inside each sample and before any cut, so that no rank ever needs its neighbour's first token.
`SFTCollator` starts from messages and a real processor; `pack_samples` from what a processor returned.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from vlm_cp import comm
from vlm_cp.alignment import Alignment
from vlm_cp.batch import PackedBatch
from vlm_cp.chat import IGNORE, ChatEncoder, EncodedSample, chat_messages, content_parts, without_last_media
from vlm_cp.cost import Rates, Step, VisionWork, sample_costs
from vlm_cp.media import MediaTable
from vlm_cp.mrope import media_position_ids
from vlm_cp.packing import bin_samples
from vlm_cp.plan import SequencePlan
from vlm_cp.spec import TextSpec, VLMSpec

Overflow = Literal["error", "drop_sample", "drop_media"]


@dataclass(frozen=True)
class SFTCollator:
    """Turns chat samples into one packed micro-batch; usable as a DataLoader's `collate_fn`.

    processor: a transformers processor whose chat template opens turns by turn_start and the role, and closes them by
    turn_end (ChatML by default). A sample is {"messages": [...]} in transformers' chat format, or the messages alone;
    images as the processor takes them, videos as their frames, with "fps" beside them where it is not the collator's.
    max_length: tokens a sample may have, a multiple of alignment.sequence_multiple. A longer one loses the end of its text.
    overflow: what becomes of a sample that cannot be cut so, since that would go through an image or video or leave no
    trained token: "error"; "drop_sample"; "drop_media", as few whole images and videos as make it fit, the last ones first.
    train_roles: whose turns carry the loss, from the text after the role's line to turn_end inclusive; placeholders never do.
    total_tokens: a fixed stream length, as in `SequencePlan.from_lengths`.
    The batch's sample_extras tell what happened: "sample", each one's index in the call; "dropped_media".
    """

    processor: Any
    _: KW_ONLY
    spec: VLMSpec
    alignment: Alignment
    pad_token_id: int
    max_length: int | None = None
    overflow: Overflow = "error"
    train_roles: tuple[str, ...] = ("assistant",)
    turn_start: str = "<|im_start|>"
    turn_end: str = "<|im_end|>"
    fps: float = 2.0
    total_tokens: int | None = None

    def __post_init__(self) -> None:
        multiple = self.alignment.sequence_multiple
        if self.max_length is not None and (self.max_length < 1 or self.max_length % multiple):
            raise ValueError(
                f"max_length must be a multiple of the alignment's sequence_multiple {multiple}, got {self.max_length}; "
                "a sample cut there would be padded beyond it"
            )
        if self.overflow not in get_args(Overflow):
            raise ValueError(
                f"overflow must be one of {', '.join(get_args(Overflow))}, got {self.overflow!r}; samples would be lost unasked"
            )
        if isinstance(self.train_roles, str):
            raise ValueError(
                f"train_roles must be a tuple of roles, got {self.train_roles!r}; its letters would be taken for roles"
            )
        if not self.fps > 0:
            raise ValueError(f"fps must be above 0, got {self.fps}; the times written before frames would be wrong")
        _check_pad(self.pad_token_id)

    def __call__(self, samples: Sequence[Any]) -> PackedBatch:
        """Packs these samples, `EncodedSample`s among them as they are, into one stream."""
        encoded = [
            sample if isinstance(sample, EncodedSample) else self.encode(sample, index)
            for index, sample in enumerate(samples)
        ]
        kept = {index: sample for index, sample in enumerate(encoded) if sample is not None}
        if not kept:
            raise ValueError(
                f"samples must hold one that fits max_length {self.max_length}, got {len(samples)} of which none does; "
                "this rank would have no micro-batch and the others would wait for it"
            )
        batch = pack_samples(
            [sample.inputs for sample in kept.values()],
            alignment=self.alignment,
            spec=self.spec,
            pad_token_id=self.pad_token_id,
            total_tokens=self.total_tokens,
        )
        extras = {
            "sample": torch.tensor(list(kept)),
            "dropped_media": torch.tensor([sample.dropped_media for sample in kept.values()]),
        }
        return replace(batch, sample_extras=extras)

    def encode(self, sample: Any, index: int = 0) -> EncodedSample | None:
        """One sample through the processor, with labels and cut to max_length; None where it is dropped.

        index: what errors call it.
        """
        messages = chat_messages(sample, index)
        encode = self._encoder.encode
        full = encode(messages, index)
        fitting = self._cut(full)
        if fitting is not None or self.overflow == "drop_sample":
            return fitting
        media = sum(part["type"] in ("image", "video") for part in content_parts(messages))
        if self.overflow == "error" or not media:
            raise ValueError(self._overflow_text(full, index))

        def rest(dropped: int) -> EncodedSample | None:
            return self._cut(replace(encode(without_last_media(messages, dropped), index), dropped_media=dropped))

        dropped = 1 + bisect_left(range(1, media), True, key=lambda count: rest(count) is not None)
        fitting = rest(dropped)
        if fitting is None:
            raise ValueError(self._overflow_text(encode(without_last_media(messages, media), index), index))
        return fitting

    def bins(
        self,
        samples: Sequence[EncodedSample],
        *,
        text: TextSpec,
        capacity: int,
        bins_multiple_of: int = 1,
        vision: VisionWork = "replicated",
        step: Step | None = None,
        rates: Rates | None = None,
    ) -> list[list[int]]:
        """`bin_samples` by `sample_costs`: attention, vision and padding count, not length alone.

        capacity: what one bin may cost, in text tokens; its padded stream never has more tokens than that either. To be
        called with all data-parallel ranks' samples, bins_multiple_of being their number.
        """
        multiple = self.alignment.stream_multiple
        if capacity % multiple:
            raise ValueError(
                f"capacity must be a multiple of the alignment's stream_multiple {multiple}, got {capacity}; "
                "a full bin would be padded beyond it"
            )
        costs = sample_costs(
            [sample.length for sample in samples],
            [sample.grids for sample in samples],
            alignment=self.alignment,
            text=text,
            spec=self.spec,
            vision=vision,
            step=step,
            rates=rates,
        )
        return bin_samples(costs, capacity=capacity, bins_multiple_of=bins_multiple_of)

    @property
    def _encoder(self) -> ChatEncoder:
        return ChatEncoder(
            processor=self.processor,
            spec=self.spec,
            train_roles=self.train_roles,
            turn_start=self.turn_start,
            turn_end=self.turn_end,
            fps=self.fps,
        )

    def _cut(self, sample: EncodedSample) -> EncodedSample | None:
        """The sample within max_length, text cut off its end; None where that cuts media or leaves nothing to train."""
        if self.max_length is None or sample.length <= self.max_length:
            return sample
        labels = sample.inputs["labels"][: self.max_length]
        if self._media_end(sample) > self.max_length or not bool((labels != IGNORE).any()):
            return None
        ids = sample.inputs["input_ids"][: self.max_length]
        return replace(sample, inputs={**sample.inputs, "input_ids": ids, "labels": labels})

    def _media_end(self, sample: EncodedSample) -> int:
        """Where the last image or video is over: one token, its vision_end, after the last placeholder; 0 without media."""
        ids = sample.inputs["input_ids"]
        places = ((ids == self.spec.image_token_id) | (ids == self.spec.video_token_id)).nonzero()
        return int(places[-1, 0]) + 2 if len(places) else 0

    def _overflow_text(self, sample: EncodedSample, index: int) -> str:
        end = self._media_end(sample)
        why = (
            f"and its media end at token {end}; features would be left without their placeholders"
            if end > (self.max_length or 0)
            else "and all its trained tokens lie beyond; it would add nothing to the loss"
        )
        return (
            f"samples[{index}] must fit max_length {self.max_length}, got {sample.length} tokens, {why}. See `overflow`"
        )


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
    group: ranks that should all raise when one of them has unusable samples, instead of waiting for it.
    """
    fault = batch = None
    try:
        batch = _packed(samples, alignment, spec, pad_token_id, total_tokens)
    except ValueError as error:
        if comm.group_size(group) == 1:
            raise
        fault = str(error)
    comm.raise_together(fault, group)
    assert batch is not None
    return batch


def _packed(
    samples: Sequence[Mapping[str, Tensor]],
    alignment: Alignment,
    spec: VLMSpec,
    pad_token_id: int,
    total_tokens: int | None,
) -> PackedBatch:
    if isinstance(samples, Mapping):
        raise ValueError("samples must be a sequence of mappings, got one mapping; its keys would be taken for samples")
    _check_pad(pad_token_id)
    ids = [_row(sample, "input_ids") for sample in samples]
    _check_unpadded(samples)
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
    media.check()
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


def _check_pad(pad_token_id: int) -> None:
    if not isinstance(pad_token_id, int) or pad_token_id < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"pad_token_id must be an id of the tokenizer, got {pad_token_id!r}; padding is embedded like any token"
        )


def _check_unpadded(samples: Sequence[Mapping[str, Tensor]]) -> None:
    for index, sample in enumerate(samples):
        if sample.get("attention_mask") is not None and not bool(torch.as_tensor(sample["attention_mask"]).all()):
            raise ValueError(
                f"samples[{index}] must come without padding, got an attention_mask with zeros; padding would be trained as text"
            )


def _row(sample: Mapping[str, Tensor], key: str) -> Tensor:
    if key not in sample:
        raise ValueError(f"samples must be mappings with {key}, got keys {list(sample)}; there is nothing to pack")
    row = torch.as_tensor(sample[key])
    if key != "placeholder_mask" and row.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{key} must be int32 or int64, got {row.dtype}; ids and -100 would become other numbers")
    row = row[0] if row.ndim == 2 and len(row) == 1 else row
    if row.ndim != 1 or len(row) != torch.as_tensor(sample["input_ids"]).numel():
        raise ValueError(
            f"{key} must hold one row of a sample's {torch.as_tensor(sample['input_ids']).numel()} tokens, got {tuple(row.shape)}; "
            "a batch of rows must be given sample by sample"
        )
    return row


def _joined(samples: Sequence[Mapping[str, Tensor]], key: str) -> Tensor | None:
    found = [torch.as_tensor(sample[key]) for sample in samples if sample.get(key) is not None]
    if len({x.shape[1:] for x in found}) > 1:
        raise ValueError(
            f"{key} must have one shape behind its rows, got {sorted({tuple(x.shape) for x in found})}; samples of two processors were mixed"
        )
    return torch.cat(found) if found else None
