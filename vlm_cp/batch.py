"""`PackedBatch` (the full stream), `LocalBatch` (one rank's part), and the ways in and out of padded rows.

Which of the two a tensor belongs to is its type, never a guess from its shape: `[1, S]` of one sample and `[1, T]` of a
packed stream look the same, and taking one for the other moves tokens silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from vlm_cp import rows, transfer
from vlm_cp.alignment import Alignment
from vlm_cp.media import MediaTable
from vlm_cp.plan import SequencePlan

_PIXELS = ("pixel_values", "pixel_values_videos")


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A packed batch as every CP rank holds it: the whole stream, media unsplit.

    input_ids, labels, loss_mask: [1, T]; labels are shifted already (slot j holds the id after token j of its own
    sample, -100 where there is none). position_ids: [3, 1, T]. media: what `MediaTable.from_batch` read off the ids.
    pixel_values, pixel_values_videos: [patches, channels] as processors return them, with their grids [*, 3].
    token_extras: tensors [1, T, ...] that are cut like the ids (advantages, old logprobs). sample_extras: [B, ...], not
    cut. Both are declared by being put there; a tensor of B rows is never taken for one of T.
    """

    plan: SequencePlan
    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    media: MediaTable
    pixel_values: Tensor | None = None
    image_grid_thw: Tensor | None = None
    pixel_values_videos: Tensor | None = None
    video_grid_thw: Tensor | None = None
    second_per_grid_ts: Tensor | None = None
    token_extras: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    sample_extras: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    def __post_init__(self) -> None:
        total = self.plan.total_tokens
        own = {"input_ids": self.input_ids, "labels": self.labels, "loss_mask": self.loss_mask}
        for name, x in own.items():
            if tuple(x.shape) != (1, total):
                raise ValueError(
                    f"{name} must have shape [1, T = {total}], got {tuple(x.shape)}; it would be cut at other tokens"
                )
        _check_ids("input_ids", self.input_ids)
        _check_ids("labels", self.labels)
        for name, x in self.token_extras.items():
            if tuple(x.shape[:2]) != (1, total):
                raise ValueError(
                    f"{name} must have shape [1, T = {total}, ...], got {tuple(x.shape)}; it would be cut at other tokens"
                )
        if tuple(self.position_ids.shape) != (3, 1, total):
            raise ValueError(
                f"position_ids must have shape [3, 1, T = {total}], got {tuple(self.position_ids.shape)}; "
                "models with mRoPE ignore other ranks of positions and recompute their own on the shard"
            )
        for name, x in self.sample_extras.items():
            entries = len(x) if x.ndim else "a scalar"
            if entries != len(self.plan.lengths):
                raise ValueError(
                    f"{name} must have one entry a sample, {len(self.plan.lengths)} in all, got {entries}; samples would be mixed up"
                )
        _check_media(self.media, total)
        images, videos = self.media.grids.tensor_split([self.media.num_images])
        _check_grids("image_grid_thw", self.image_grid_thw, images)
        _check_grids("video_grid_thw", self.video_grid_thw, videos)
        _check_patches("pixel_values", self.pixel_values, images)
        _check_patches("pixel_values_videos", self.pixel_values_videos, videos)

    def to(self, device: torch.device | str) -> PackedBatch:
        """The batch on `device`, with its plan and media table: pixels in a copy of their own, all else in one, nothing waits."""
        plan, media = self.plan, self.media
        tensors = {f.name: x for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}
        pixels = {name: transfer.moved(tensors.pop(name), device) for name in _PIXELS if name in tensors}
        extras = [*self.token_extras.values(), *self.sample_extras.values()]
        moved = iter(
            transfer.moved_together(
                [plan.cu_seqlens, plan.cu_seqlens_padded, media.row_slots, *tensors.values(), *extras], device
            )
        )
        return replace(
            self,
            plan=plan.placed(next(moved), next(moved)),
            media=media.placed(next(moved)),
            **pixels,
            **{name: next(moved) for name in tensors},
            token_extras={name: next(moved) for name in self.token_extras},
            sample_extras={name: next(moved) for name in self.sample_extras},
        )

    def image_stream(self) -> ImageStream | None:
        """All media as images in the order of their placeholders, the same object at every call; None for text only.

        What Megatron-Bridge takes without a look at the ids: it only puts the tower's rows where the mask is True.
        """
        return self._image_stream

    @cached_property
    def _image_stream(self) -> ImageStream | None:
        media = self.media
        kinds = [x for x in (self.pixel_values, self.pixel_values_videos) if x is not None]
        if not len(media.frame_order):
            return None
        pixels = kinds[0] if len(kinds) == 1 else torch.cat(kinds)
        if bool((media.frame_order.diff() < 0).any()):
            pixels = pixels.index_select(0, transfer.moved(media.patch_order(), pixels.device))
        grids = media.frame_grids[media.frame_order]
        return ImageStream(
            pixel_values=pixels,
            grid_thw=grids,
            placeholder_mask=(media.slot_rows() >= 0)[None],
        )

    def local(self, cp_rank: int) -> LocalBatch:
        """The part of `cp_rank`: every token-aligned tensor is cut by the plan's one index, media stay whole.

        The same object at every call, for the passes (old logprobs, reference, training) that a batch goes through.
        """
        if cp_rank not in self._locals:
            self._locals[cp_rank] = self._cut(cp_rank)
        return self._locals[cp_rank]

    @cached_property
    def _locals(self) -> dict[int, LocalBatch]:
        return {}

    def _cut(self, rank: int) -> LocalBatch:
        shard = self.plan.shard
        return LocalBatch(
            plan=self.plan,
            cp_rank=rank,
            input_ids=shard(self.input_ids, rank, 1),
            labels=shard(self.labels, rank, 1),
            loss_mask=shard(self.loss_mask, rank, 1),
            position_ids=shard(self.position_ids, rank, 2),
            slot_rows=shard(self.media.slot_rows(), rank),
            token_extras={name: shard(x, rank, 1) for name, x in self.token_extras.items()},
            sample_extras=self.sample_extras,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageStream:
    """Images and video frames of a batch as one list of images: row k of the tower's output goes to the k-th placeholder.

    pixel_values: [patches, channels]. grid_thw: int64 [F, 3], (1, h, w) of every frame, on the CPU, where it is read.
    placeholder_mask: bool [1, T].
    """

    pixel_values: Tensor
    grid_thw: Tensor
    placeholder_mask: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalBatch:
    """What one CP rank computes on: tensors of [1, T/c] tokens in local order, position_ids [3, 1, T/c].

    slot_rows: int64 [T/c], the feature row that replaces each slot (-1: none), counted over the whole batch's rows.
    """

    plan: SequencePlan
    cp_rank: int
    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    slot_rows: Tensor
    token_extras: Mapping[str, Tensor]
    sample_extras: Mapping[str, Tensor]


def preprocess_packed_seqs(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    *,
    alignment: Alignment,
    cp_rank: int | None = None,
    shard_for_cp: bool = True,
    sub_seq_lengths: Sequence[Sequence[int]] | None = None,
    row_multiple: int | None = None,
    pad_token_id: int = 0,
) -> tuple[Tensor, SequencePlan]:
    """Padded rows -> packed ids and their plan, both on the rows' device.

    input_ids: [rows, S], or a nested integer tensor of samples with attention_mask None. attention_mask: [rows, S], True
    (or 1) at tokens; padding may lie left, right or inside.
    shard_for_cp: True gives this rank's ids [1, T/c], for text models. False gives the whole stream [1, T]: what a VLM
    needs on every rank, since features and positions are placed on the full stream and the model cuts afterwards.
    sub_seq_lengths: for rows of several samples, each row's lengths. row_multiple: the step between samples inside a row
    (the first starts at 0, each next one at the former's start plus its length rounded up); None is
    `alignment.sequence_multiple`. The mask must be True at exactly these tokens.
    """
    if shard_for_cp and cp_rank is None and alignment.cp_size > 1:
        raise ValueError(
            f"cp_rank must be given to shard at cp_size {alignment.cp_size}, got None; "
            "every rank would train on rank 0's tokens. Pass shard_for_cp=False for the full stream"
        )
    if cp_rank is not None and not 0 <= cp_rank < alignment.cp_size:
        raise ValueError(
            f"cp_rank must lie in [0, {alignment.cp_size}), the alignment's cp_size, got {cp_rank}; "
            "an alignment of another layout would give every rank the same tokens"
        )
    _check_ids("input_ids", input_ids)
    if input_ids.is_nested:
        plan, stream = _pack_nested(input_ids, attention_mask, alignment, pad_token_id)
        return (plan.shard(stream, cp_rank or 0) if shard_for_cp else stream)[None], plan
    if attention_mask is None or attention_mask.shape != input_ids.shape:
        found = None if attention_mask is None else tuple(attention_mask.shape)
        raise ValueError(
            f"attention_mask must have input_ids' shape {tuple(input_ids.shape)}, got {found}; padding would be packed as text"
        )
    mask = rows.row_mask(attention_mask)
    if mask.device != input_ids.device:
        raise ValueError(
            f"attention_mask must be on input_ids' device {input_ids.device}, got {mask.device}; move both before packing"
        )
    rows.check_row_arguments(sub_seq_lengths, row_multiple)
    lengths = rows.counts_of(mask) if sub_seq_lengths is None else list(chain.from_iterable(sub_seq_lengths))
    plan = SequencePlan.from_lengths(lengths, alignment=alignment).to(input_ids.device)
    if sub_seq_lengths is not None:
        rows.check_row_layout(mask, sub_seq_lengths, row_multiple or alignment.sequence_multiple)
    cells = rows.true_cells(mask, sum(plan.lengths))
    if shard_for_cp and alignment.cp_size > 1:
        return plan.shard_cells(input_ids, cells, cp_rank or 0, pad_token_id)[None], plan
    real = input_ids.flatten(0, 1).index_select(0, cells)
    return rows.put(real, plan.real_index, plan.total_tokens, pad_token_id)[None], plan


def postprocess_packed_seqs(
    values_local: Tensor,
    plan: SequencePlan,
    attention_mask: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    fill: float = 0,
    align: Literal["slot", "token"] = "slot",
) -> Tensor:
    """This rank's values [T/c, ...] -> rows [rows, S, ...] on every rank; differentiable, the backward takes the own slice.

    attention_mask: the rows' mask that was packed. align="slot" puts slot j at token j's column (the logprob of token
    j + 1 stands at column j); align="token" puts slot j - 1 there (the logprob of token j), `fill` at first tokens.
    group: the CP group. Send scalars through this, never logits.
    """
    if align not in ("slot", "token"):
        raise ValueError(f'align must be "slot" or "token", got {align!r}; every value would stand one token off')
    plan.check_mask(attention_mask)
    stream, slots = plan.gather(values_local, group), plan.real_index
    if align == "token":
        real = stream.index_select(0, (slots - 1).clamp(min=0)).index_fill(0, plan.cu_seqlens[:-1].long(), fill)
    else:
        real = stream.index_select(0, slots) if len(slots) < len(stream) else stream
    return rows.put_where(real, attention_mask.bool(), fill)


def unpack(values_local: Tensor, plan: SequencePlan, *, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """This rank's values [T/c, ...] -> B tensors [L_i, ...] in slot order on every rank; differentiable as `plan.gather`."""
    stream = plan.gather(values_local, group)
    return list(stream.index_select(0, plan.real_index).split(list(plan.lengths)))


def _pack_nested(nested: Tensor, mask: Tensor | None, alignment: Alignment, pad: int) -> tuple[SequencePlan, Tensor]:
    if mask is not None:
        raise ValueError(
            f"attention_mask must be None with nested input_ids, got {tuple(mask.shape)}; lengths would be given twice"
        )
    samples = nested.unbind()
    plan = SequencePlan.from_lengths(list(map(len, samples)), alignment=alignment).to(nested.device)
    return plan, plan.pack(samples, pad)


def _check_ids(name: str, ids: Tensor) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name} must be int32 or int64, got {ids.dtype}; half precision rounds ids to other ids, and -100 does not fit in fewer bits"
        )


def _check_media(media: MediaTable, total: int) -> None:
    if media.fault is not None or media.total_tokens != total:
        found = media.fault or f"one of {media.total_tokens} tokens"
        raise ValueError(
            f"media must be a table of this stream's {total} tokens without a fault, got {found}; features would be left out or misplaced"
        )


def _check_grids(name: str, found: Tensor | None, grids: Tensor) -> None:
    fits = not len(grids) if found is None else tuple(found.shape) == tuple(grids.shape)
    if fits and found is not None and found.device.type == "cpu":  # elsewhere to look would be a sync
        fits = torch.equal(found.long(), grids)
    if not fits:
        raise ValueError(
            f"{name} must be the grids that media was made from, {grids.tolist()}, got {None if found is None else found.tolist()}; "
            "the tower would see other images than the placeholders stand for, or none"
        )


def _check_patches(name: str, pixels: Tensor | None, grids: Tensor) -> None:
    patches, found = int(grids.prod(1).sum()), 0 if pixels is None else len(pixels)
    if patches != found:
        raise ValueError(
            f"{name} must have the {patches} patches that its grids describe, got {found}; images would shift into each other"
        )
