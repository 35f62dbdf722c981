"""What users hand to packing and media by mistake: one sentence, where there was a silently wrong batch or torch's own error."""

import re
from dataclasses import replace

import pytest
import torch
from streams import IMAGE, VIDEO
from test_batch import SPEC

from vlm_cp import (
    Alignment,
    MediaTable,
    PackedBatch,
    SequencePlan,
    SFTCollator,
    pack_samples,
    packed_position_ids,
    preprocess_packed_seqs,
)

IDS = torch.arange(1, 17).view(2, 8)
MASK = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0], [1] * 8])
PLAN = SequencePlan.from_lengths([3, 8], alignment=Alignment(cp_size=2))


def refuses(message):
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize("rank", [None, -1, 2, 0.5, torch.tensor(1)], ids=str)
def test_rank(rank):
    with refuses(f"rank must lie in [0, 2), got {rank}; another rank's tokens would be taken"):
        PLAN.local_index(rank)


def test_shapes_without_that_dimension():
    with refuses("x must have a dimension 1 of the full stream's T = 12, got shape (12,); it has no tokens"):
        PLAN.shard(torch.zeros(12), 0, 1)
    with refuses("x must have a dimension 0 of a shard's T / c = 6, got shape (); it has no tokens"):
        PLAN.unshard([torch.tensor(0.0)] * 2)


def test_backward_of_a_gather():
    plan = SequencePlan.from_lengths([4])
    with refuses('backward must be "slice" or "sum", got \'mean\'; gradients of the other ranks would be dropped'):
        plan.gather(torch.zeros(4), None, backward="mean")


ADDED = torch.zeros(2, 8).masked_fill(MASK == 0, torch.finfo(torch.float32).min)


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        (ADDED, torch.finfo(torch.float32).min),
        (MASK * torch.tensor([[1], [2]]), 2),
        (MASK * float("nan"), float("nan")),
    ],
    ids=["added to scores", "numbered samples", "nan"],
)
def test_masks_that_are_not_0_and_1(mask, found):
    message = (
        f"attention_mask must be 0 or 1, got {found}; of a mask that is added to scores "
        "the padding would be packed, and of numbered samples all as one"
    )
    with refuses(message):
        preprocess_packed_seqs(IDS, mask, alignment=Alignment())
    with refuses(message):
        PLAN.pack_rows(IDS, mask, 0)


@pytest.mark.parametrize(
    "mask", [MASK.bool(), MASK.float(), MASK.bfloat16(), MASK.to(torch.uint8)], ids=lambda m: str(m.dtype)
)
def test_masks_of_any_dtype(mask):
    ids, plan = preprocess_packed_seqs(IDS, mask, alignment=Alignment())
    assert plan.lengths == (3, 8)
    assert ids.tolist() == [[1, 2, 3, *range(9, 17)]]


def test_rows_that_are_none():
    why = "it would not say which cells are tokens"
    with refuses(f"attention_mask must have shape [rows, S], got (8,); {why}"):
        preprocess_packed_seqs(IDS[0], MASK[0], alignment=Alignment())
    with refuses(f"attention_mask must have shape [rows, S], got (2, 1, 8, 8); {why}"):
        PLAN.row_cells(torch.ones(2, 1, 8, 8))
    with refuses(
        "x.size(0) must be the mask's rows = 2, got 1; it belongs to another plan, and using it as it is would lose tokens"
    ):
        PLAN.pack_rows(IDS[:1], MASK, 0)
    with refuses(
        "x must be on the plan's device cpu, got meta; "
        "move the plan once a batch with plan.to(device), a copy for every tensor would stall the step"
    ):
        PLAN.pack_rows(IDS.to("meta"), MASK, 0)
    with refuses("attention_mask must be on input_ids' device cpu, got meta; move both before packing"):
        preprocess_packed_seqs(IDS, MASK.bool().to("meta"), alignment=Alignment())


def test_ids_that_are_none():
    with refuses(
        "input_ids must be int32 or int64, got torch.float32; "
        "half precision rounds ids to other ids, and -100 does not fit in fewer bits"
    ):
        preprocess_packed_seqs(IDS.float(), MASK, alignment=Alignment())


@pytest.mark.parametrize("shard_for_cp", [True, False])
@pytest.mark.parametrize(("cp_size", "rank"), [(1, 1), (2, 2), (2, -1)])
def test_a_rank_beyond_the_alignment(cp_size, rank, shard_for_cp):
    """At cp_size 1 above all: an alignment that forgot the layout gave every rank the whole stream."""
    with refuses(
        f"cp_rank must lie in [0, {cp_size}), the alignment's cp_size, got {rank}; "
        "an alignment of another layout would give every rank the same tokens"
    ):
        preprocess_packed_seqs(IDS, MASK, alignment=Alignment(cp_size=cp_size), cp_rank=rank, shard_for_cp=shard_for_cp)


def test_sub_sequences():
    def pack(**options):
        return preprocess_packed_seqs(IDS, MASK, alignment=Alignment(), **options)

    with refuses(
        "sub_seq_lengths[0] must be a list of lengths, one a sample in that row, got 3; samples would move to other rows"
    ):
        pack(sub_seq_lengths=[3, 8])
    why = "samples would be looked for at other columns"
    with refuses(f"row_multiple must be at least 1 and come with sub_seq_lengths, got 0; {why}"):
        pack(sub_seq_lengths=[[3], [8]], row_multiple=0)
    with refuses(f"row_multiple must be at least 1 and come with sub_seq_lengths, got 4 alone; {why}"):
        pack(row_multiple=4)
    assert pack(sub_seq_lengths=[torch.tensor([3]), torch.tensor([8])])[1].lengths == (3, 8)


# Batches.

STREAM = torch.tensor([[1, 2, IMAGE, IMAGE, 3, 4]])
GRID = torch.tensor([[1, 2, 4]])
ONE = SequencePlan.from_lengths([6])


def batch_of(**changes):
    media = MediaTable.from_batch(STREAM, ONE, image_grid_thw=GRID, spec=SPEC)
    fields = {
        "plan": ONE,
        "input_ids": STREAM,
        "labels": torch.full_like(STREAM, -100),
        "loss_mask": torch.zeros(1, 6, dtype=torch.bool),
        "position_ids": torch.zeros(3, 1, 6, dtype=torch.int64),
        "media": media,
        "pixel_values": torch.zeros(8, 12),
        "image_grid_thw": GRID,
    }
    return PackedBatch(**{**fields, **changes})


@pytest.mark.parametrize("grids", [None, torch.tensor([[1, 4, 2]]), GRID[0]], ids=["none", "transposed", "1-D"])
def test_grids_that_media_was_not_made_from(grids):
    """Without grids the HF engine took the batch for text."""
    with refuses(
        f"image_grid_thw must be the grids that media was made from, [[1, 2, 4]], got {None if grids is None else grids.tolist()}; "
        "the tower would see other images than the placeholders stand for, or none"
    ):
        batch_of(image_grid_thw=grids)


def test_media_of_something_else():
    fault = MediaTable.from_batch(STREAM, ONE, spec=SPEC)
    with refuses(
        f"media must be a table of this stream's 6 tokens without a fault, got {fault.fault}; features would be left out or misplaced"
    ):
        batch_of(media=fault, image_grid_thw=None, pixel_values=None)
    short = MediaTable.from_batch(STREAM[:, :5], SequencePlan.from_lengths([5]), image_grid_thw=GRID, spec=SPEC)
    with refuses(
        "media must be a table of this stream's 6 tokens without a fault, got one of 5 tokens; features would be left out or misplaced"
    ):
        batch_of(media=short)


def test_fields_of_another_kind():
    with refuses("loss_mask must have shape [1, T = 6], got (1, 6, 1); it would be cut at other tokens"):
        batch_of(loss_mask=torch.zeros(1, 6, 1))
    why = "half precision rounds ids to other ids, and -100 does not fit in fewer bits"
    with refuses(f"input_ids must be int32 or int64, got torch.bfloat16; {why}"):
        batch_of(input_ids=STREAM.bfloat16())
    with refuses(f"labels must be int32 or int64, got torch.uint8; {why}"):
        batch_of(labels=STREAM.byte())
    with refuses("reward must have one entry a sample, 1 in all, got a scalar; samples would be mixed up"):
        batch_of(sample_extras={"reward": torch.tensor(1.0)})


def test_grids_and_ids_of_a_table():
    why = "patch counts would be rounded"
    with refuses(f"grid_thw must be an integer tensor [*, 3], got list; {why}"):
        MediaTable.from_batch(STREAM, ONE, image_grid_thw=GRID.tolist(), spec=SPEC)
    with refuses(f"grid_thw must be an integer tensor [*, 3], got torch.float32; {why}"):
        MediaTable.from_batch(STREAM, ONE, image_grid_thw=GRID + 0.5, spec=SPEC)
    with refuses("input_ids must be int32 or int64, got torch.bfloat16; half precision rounds ids to other ids"):
        MediaTable.from_batch(STREAM.bfloat16(), ONE, image_grid_thw=GRID, spec=SPEC)


@pytest.mark.parametrize(
    ("seconds", "rule"),
    [
        (torch.tensor([-1.0]), "be finite and not negative, got [-1.0]; its frames would run backwards"),
        (torch.tensor([float("nan")]), "be finite and not negative, got [nan]; its frames would run backwards"),
        (
            torch.tensor(1.0),
            "have one entry a video, 1 in all, got shape (); a video would take another one's frame rate",
        ),
        (
            torch.ones(1, 1),
            "have one entry a video, 1 in all, got shape (1, 1); a video would take another one's frame rate",
        ),
    ],
    ids=["negative", "nan", "scalar", "2-D"],
)
def test_seconds(seconds, rule):
    timed = replace(SPEC, family="qwen2_5_vl", position_scheme="time", tokens_per_second=2)
    ids = STREAM.where(STREAM != IMAGE, VIDEO)
    with refuses(f"second_per_grid_ts must {rule}"):
        packed_position_ids(ids, ONE, video_grid_thw=GRID, second_per_grid_ts=seconds, spec=timed)


# Samples.


def pack(*samples, pad=0):
    return pack_samples(samples, alignment=Alignment(cp_size=2), spec=SPEC, pad_token_id=pad)


def test_samples_that_are_none():
    with refuses("samples must be a sequence of mappings, got one mapping; its keys would be taken for samples"):
        pack_samples({"input_ids": STREAM[0]}, alignment=Alignment(), spec=SPEC, pad_token_id=0)
    with refuses("samples must be mappings with input_ids, got keys ['ids']; there is nothing to pack"):
        pack({"ids": STREAM[0]})
    with refuses(
        "samples[1] must come without padding, got an attention_mask with zeros; padding would be trained as text"
    ):
        text = {"input_ids": torch.tensor([1, 2, 0]), "attention_mask": torch.tensor([1, 1, 0])}
        pack({**text, "attention_mask": torch.ones(3)}, text)
    for labels in (torch.ones(3), torch.ones(3, dtype=torch.uint8), torch.ones(3, dtype=torch.bool)):
        with refuses(f"labels must be int32 or int64, got {labels.dtype}; ids and -100 would become other numbers"):
            pack({"input_ids": torch.tensor([1, 2, 3]), "labels": labels})


@pytest.mark.parametrize("pad", [None, -1], ids=str)
def test_pad_token(pad):
    message = f"pad_token_id must be an id of the tokenizer, got {pad!r}; padding is embedded like any token"
    with refuses(message):
        pack({"input_ids": torch.tensor([1, 2])}, pad=pad)
    with refuses(message):
        SFTCollator(None, spec=SPEC, alignment=Alignment(), pad_token_id=pad)


def test_collator_options():
    with refuses("train_roles must be a tuple of roles, got 'assistant'; its letters would be taken for roles"):
        SFTCollator(None, spec=SPEC, alignment=Alignment(), pad_token_id=0, train_roles="assistant")
    with refuses("fps must be above 0, got 0; the times written before frames would be wrong"):
        SFTCollator(None, spec=SPEC, alignment=Alignment(), pad_token_id=0, fps=0)
