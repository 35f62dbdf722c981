import re

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from vlm_cp import (
    Alignment,
    MediaTable,
    PackedBatch,
    SequencePlan,
    TowerSpec,
    VLMSpec,
    postprocess_packed_seqs,
    preprocess_packed_seqs,
    unpack,
)

TOWER = TowerSpec(
    depth=1, hidden_size=8, num_heads=1, intermediate_size=8, patch_size=14, temporal_patch_size=2, out_hidden_size=8
)
SPEC = VLMSpec(
    family="qwen3_vl",
    image_token_id=90,
    video_token_id=91,
    vision_start_token_id=92,
    spatial_merge_size=2,
    position_scheme="frames",
    tokens_per_second=1,
    tower=TOWER,
    deepstack_levels=0,
)


def refuses(message):
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


def rows_of(samples, width, side):
    """[B, width] ids and mask; padding left, right, or one hole inside each row."""
    ids, mask = torch.full((len(samples), width), 99), torch.zeros(len(samples), width, dtype=torch.bool)
    for row, sample in enumerate(samples):
        columns = torch.arange(len(sample))
        if side == "left":
            columns += width - len(sample)
        if side == "inside":
            columns[len(sample) // 2 :] += width - len(sample)
        ids[row, columns], mask[row, columns] = sample, True
    return ids, mask


def samples_of(lengths):
    return [torch.arange(1, n + 1) + 100 * (i + 1) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("side", ["left", "right", "inside"])
@pytest.mark.parametrize("lengths", [[1], [3, 8], [17, 5, 16, 1]], ids=str)
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_rows_to_stream_and_shards(cp, lengths, side):
    samples = samples_of(lengths)
    ids, mask = rows_of(samples, 20, side)
    rule = Alignment(cp_size=cp)
    full, plan = preprocess_packed_seqs(ids, mask, alignment=rule, shard_for_cp=False, pad_token_id=7)
    assert full.shape == (1, plan.total_tokens)
    assert torch.equal(full[0], plan.pack(samples, 7))
    shards = [preprocess_packed_seqs(ids, mask.long(), alignment=rule, cp_rank=r, pad_token_id=7)[0] for r in range(cp)]
    assert torch.equal(plan.unshard([s[0] for s in shards]), full[0])


def packed_rows(row_lengths, step, width):
    """Rows of several samples as SkyRL's packed collator writes them: the next sample starts at a multiple of `step`."""
    ids, mask = torch.full((len(row_lengths), width), 99), torch.zeros(len(row_lengths), width, dtype=torch.bool)
    samples = iter(samples_of([n for row in row_lengths for n in row]))
    for row, lengths in enumerate(row_lengths):
        start = 0
        for length in lengths:
            ids[row, start : start + length], mask[row, start : start + length] = next(samples), True
            start += -(-length // step) * step
    return ids, mask


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_several_samples_a_row(cp, tp, sp):
    row_lengths = [[5, 1, 17], [16], [2, 3]]
    rule = Alignment(cp_size=cp, tp_size=tp, sequence_parallel=sp)
    step = tp * 2 * cp if cp > 1 else tp  # SkyRL's step, whatever sequence parallelism is
    ids, mask = packed_rows(row_lengths, step, 96)
    full, plan = preprocess_packed_seqs(
        ids, mask, alignment=rule, shard_for_cp=False, sub_seq_lengths=row_lengths, row_multiple=step
    )
    assert plan.lengths == (5, 1, 17, 16, 2, 3)
    assert torch.equal(full[0], plan.pack(samples_of(plan.lengths), 0))
    scores = torch.arange(plan.total_tokens).float()
    if cp == 1:
        rows = postprocess_packed_seqs(scores, plan, mask, fill=-1)
        assert torch.equal(rows[mask], scores[plan.valid])
        assert bool((rows[~mask] == -1).all())


def test_the_row_step_is_the_alignments_by_default():
    ids, mask = packed_rows([[3, 2]], 4, 12)
    ids_1t, plan = preprocess_packed_seqs(
        ids, mask, alignment=Alignment(cp_size=2), shard_for_cp=False, sub_seq_lengths=[[3, 2]]
    )
    assert torch.equal(ids_1t[0][plan.valid], torch.cat(samples_of([3, 2])))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_ids(layout):
    samples = samples_of([4, 9, 1])
    nested = torch.nested.nested_tensor(samples, layout=layout)
    ids, plan = preprocess_packed_seqs(nested, None, alignment=Alignment(cp_size=2), shard_for_cp=False)
    assert torch.equal(ids[0], plan.pack(samples, 0))


def test_slots_and_tokens():
    samples = samples_of([3, 2])
    _, mask = rows_of(samples, 4, "left")
    plan = SequencePlan.from_lengths([3, 2])
    scores = torch.tensor([1.0, 2.0, 3.0, 10.0, 20.0])
    slot = postprocess_packed_seqs(scores, plan, mask, fill=-1)
    assert slot.tolist() == [[-1, 1, 2, 3], [-1, -1, 10, 20]]
    token = postprocess_packed_seqs(scores, plan, mask, fill=-1, align="token")
    assert token.tolist() == [[-1, -1, 1, 2], [-1, -1, -1, 10]]
    assert [x.tolist() for x in unpack(scores, plan)] == [[1, 2, 3], [10, 20]]


def test_rows_of_vectors():
    _, mask = rows_of(samples_of([3, 2]), 4, "right")
    plan = SequencePlan.from_lengths([3, 2])
    rows = postprocess_packed_seqs(torch.randn(5, 6), plan, mask)
    assert rows.shape == (2, 4, 6)
    assert bool((rows[~mask] == 0).all())


def _round_trip(rank, lengths, side):
    cp = dist.get_world_size()
    plan = SequencePlan.from_lengths(lengths, alignment=Alignment(cp_size=cp))
    _, mask = rows_of(samples_of(lengths), max(lengths) + 3, side)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(*mask.shape, 2, dtype=torch.float64, generator=generator)
    weight = torch.randn(rows.shape, dtype=torch.float64, generator=generator)
    local = plan.shard(plan.pack_rows(rows, mask, 0.0), rank).requires_grad_()
    back = postprocess_packed_seqs(local, plan, mask, group=dist.group.WORLD)
    (back * weight).sum().backward()
    own = plan.shard(plan.pack_rows(weight, mask, 0.0), rank)
    parts = torch.cat(unpack(local.detach(), plan, group=dist.group.WORLD))
    return torch.equal(back, rows * mask[..., None]), torch.equal(local.grad, own), torch.equal(parts, rows[mask])


@pytest.mark.parametrize("side", ["left", "right", "inside"])
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_rows_round_trip_over_ranks(cp, side):
    assert run_ranks(cp, _round_trip, [1, 9, 4, 30], side) == [(True, True, True)] * cp


def test_pack_rows_and_gradient():
    _, mask = rows_of(samples_of([3, 2]), 4, "left")
    plan = SequencePlan.from_lengths([3, 2], alignment=Alignment(cp_size=2))
    rows = torch.randn(2, 4, requires_grad=True)
    stream = plan.pack_rows(rows, mask, 5.0)
    assert torch.equal(stream[plan.valid], rows[mask])
    assert bool((stream[~plan.valid] == 5).all())
    stream.sum().backward()
    assert torch.equal(rows.grad, mask.float())


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_shard_rows_is_shard_of_pack_rows_and_has_its_gradient(cp):
    lengths = [3, 8, 1, 17]
    _, mask = rows_of(samples_of(lengths), 20, "inside")
    plan = SequencePlan.from_lengths(lengths, alignment=Alignment(cp_size=cp))
    for rank in range(cp):
        rows = torch.randn(*mask.shape, 3, requires_grad=True)
        whole = plan.shard(plan.pack_rows(rows, mask, 5.0), rank)
        direct = plan.shard_cells(rows, plan.row_cells(mask, rows), rank, 5.0)
        assert torch.equal(whole, direct)
        weight = torch.randn_like(direct)
        expected, found = (torch.autograd.grad((x * weight).sum(), rows)[0] for x in (whole, direct))
        assert torch.equal(expected, found)


def test_sharding_without_a_rank():
    ids, mask = rows_of(samples_of([3]), 4, "right")
    with refuses(
        "cp_rank must be given to shard at cp_size 2, got None; every rank would train on rank 0's tokens. "
        "Pass shard_for_cp=False for the full stream"
    ):
        preprocess_packed_seqs(ids, mask, alignment=Alignment(cp_size=2))


def test_masks_that_do_not_fit():
    ids, mask = rows_of(samples_of([3, 2]), 4, "right")
    rule = Alignment()
    with refuses("attention_mask must have input_ids' shape (2, 4), got (2, 3); padding would be packed as text"):
        preprocess_packed_seqs(ids, mask[:, :3], alignment=rule)
    with refuses("attention_mask must have input_ids' shape (2, 4), got None; padding would be packed as text"):
        preprocess_packed_seqs(ids, None, alignment=rule)
    with refuses("attention_mask must be None with nested input_ids, got (2, 4); lengths would be given twice"):
        preprocess_packed_seqs(
            torch.nested.nested_tensor(samples_of([3, 2]), layout=torch.jagged), mask, alignment=rule
        )
    with refuses(
        "lengths[1] must be at least 1, got 0; an empty sample owns no chunk, and its neighbours' tokens would be taken for its own"
    ):
        preprocess_packed_seqs(ids, mask & torch.tensor([[True], [False]]), alignment=rule)
    plan = SequencePlan.from_lengths([3, 2])
    with refuses(
        "attention_mask must mark exactly the plan's 5 tokens, samples whole in their rows, got 4 in rows of [2, 2]; "
        "values would move to other samples"
    ):
        plan.pack_rows(ids, mask & (torch.arange(4) < 2), 0)
    with refuses("x must start with the mask's shape (2, 4), got (2, 3); cells would be misread"):
        plan.pack_rows(ids[:, :3], mask, 0)


def test_row_layouts_that_do_not_fit():
    ids, mask = packed_rows([[3, 2]], 4, 12)
    call = dict(alignment=Alignment(cp_size=2), shard_for_cp=False)
    with refuses("sub_seq_lengths must have one list a row, 1 in all, got 2; samples would move to other rows"):
        preprocess_packed_seqs(ids, mask, sub_seq_lengths=[[3], [2]], **call)
    with refuses(
        "attention_mask must be True at exactly the tokens that sub_seq_lengths and row_multiple 8 place, "
        "got True at row 0, column 4; padding inside the row would be packed as text"
    ):
        preprocess_packed_seqs(ids, mask, sub_seq_lengths=[[3, 2]], row_multiple=8, **call)
    with refuses(
        "sub_seq_lengths must fit their rows of width 12, got sample 1 of 2 tokens at column 16 with row_multiple 16; "
        "tokens of the next row would be read"
    ):
        preprocess_packed_seqs(ids, mask, sub_seq_lengths=[[3, 2]], row_multiple=16, **call)


def test_align_is_slot_or_token():
    plan = SequencePlan.from_lengths([2])
    with refuses('align must be "slot" or "token", got \'row\'; every value would stand one token off'):
        postprocess_packed_seqs(torch.zeros(2), plan, torch.ones(1, 2), align="row")


def batch_of(cp=2, **overrides):
    plan = SequencePlan.from_lengths([6, 3], alignment=Alignment(cp_size=cp))
    ids = plan.pack([torch.tensor([1, 92, 90, 90, 93, 2]), torch.tensor([3, 4, 5])], 0)[None]
    grid = torch.tensor([[1, 2, 4]])
    fields = dict(
        plan=plan,
        input_ids=ids,
        labels=ids.roll(-1),
        loss_mask=plan.scored[None],
        position_ids=torch.arange(plan.total_tokens).expand(3, 1, -1),
        media=MediaTable.from_batch(ids, plan, image_grid_thw=grid, spec=SPEC),
        pixel_values=torch.randn(8, 12),
        image_grid_thw=grid,
        token_extras={"advantages": torch.randn(1, plan.total_tokens), "old": torch.randn(1, plan.total_tokens, 2)},
        sample_extras={"rewards": torch.tensor([1.0, 2.0])},
    )
    return PackedBatch(**{**fields, **overrides})


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_local_cuts_everything_by_one_index(cp):
    batch = batch_of(cp)
    parts = [batch.local(rank) for rank in range(cp)]
    for name in ("input_ids", "labels", "loss_mask"):
        assert torch.equal(batch.plan.unshard([getattr(p, name) for p in parts], 1), getattr(batch, name))
    assert torch.equal(batch.plan.unshard([p.position_ids for p in parts], 2), batch.position_ids)
    for name, value in batch.token_extras.items():
        assert torch.equal(batch.plan.unshard([p.token_extras[name] for p in parts], 1), value)
    rows = batch.plan.unshard([p.slot_rows for p in parts])
    assert torch.equal(rows >= 0, batch.input_ids[0] == 90)
    assert rows[rows >= 0].tolist() == [0, 1]
    assert parts[-1].sample_extras["rewards"].tolist() == [1, 2]


def tensors_of(batch):
    """Every tensor that moves with a batch, by name."""
    own = {name: x for name, x in vars(batch).items() if isinstance(x, torch.Tensor)}
    offsets = {"real": batch.plan.cu_seqlens, "padded": batch.plan.cu_seqlens_padded, "slots": batch.media.row_slots}
    return {**own, **offsets, **batch.token_extras, **batch.sample_extras}


def test_to_moves_everything():
    batch = batch_of()
    before, after = tensors_of(batch), tensors_of(batch.to("meta"))
    assert before.keys() == after.keys()
    assert {x.device.type for x in after.values()} == {"meta"}
    assert {name: (x.shape, x.dtype) for name, x in after.items()} == {
        name: (x.shape, x.dtype) for name, x in before.items()
    }


def test_to_where_it_is_keeps_what_was_derived():
    """The indices of a plan are made once a batch, also for whoever moves the batch again to be sure."""
    batch = batch_of()
    batch.plan.local_index(0), batch.media.slot_rows()
    again = batch.to("cpu")
    assert again.plan is batch.plan
    assert again.media is batch.media
    assert all(x is tensors_of(batch)[name] for name, x in tensors_of(again).items())


def test_the_passes_of_a_batch_share_its_parts():
    """Old logprobs, reference, training, and each stage of a pipeline ask for the same things: each is made once."""
    batch = batch_of()
    plan = batch.plan
    assert batch.local(1) is batch.local(1)
    assert batch.local(0) is not batch.local(1)
    assert batch.image_stream() is batch.image_stream()
    assert batch.media.slot_rows() is batch.media.slot_rows()
    assert plan.local_index(1) is plan.local_index(1)
    for name in ("sample_index", "token_index", "valid", "scored", "real_index", "rank_order", "inverse_index"):
        assert getattr(plan, name) is getattr(plan, name)


def test_batches_that_do_not_fit():
    with refuses("labels must have shape [1, T = 12], got (12,); it would be cut at other tokens"):
        batch_of(labels=torch.zeros(12))
    with refuses("rewards must have one entry a sample, 2 in all, got 12; samples would be mixed up"):
        batch_of(sample_extras={"rewards": torch.zeros(12)})
    with refuses(
        "pixel_values must have the 8 patches that its grids describe, got 0; images would shift into each other"
    ):
        batch_of(pixel_values=None)
    with refuses(
        "pixel_values_videos must have the 0 patches that its grids describe, got 4; images would shift into each other"
    ):
        batch_of(pixel_values_videos=torch.zeros(4, 12))


@pytest.mark.parametrize("shape", [(1, 12), (4, 1, 12), (3, 12)])
def test_b45_positions_without_three_axes(shape):
    with refuses(
        f"position_ids must have shape [3, 1, T = 12], got {shape}; "
        "models with mRoPE ignore other ranks of positions and recompute their own on the shard"
    ):
        batch_of(position_ids=torch.zeros(shape))


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_b47_what_a_router_chose_follows_its_tokens(cp):
    lengths = [5, 1, 7]
    plan = SequencePlan.from_lengths(lengths, alignment=Alignment(cp_size=cp))
    chosen = [torch.randint(64, (n, 8), generator=torch.Generator().manual_seed(n)) for n in lengths]
    stream = plan.pack(chosen, 0)
    stream[~plan.valid] = torch.arange(8)  # experts of padding, which no loss sees, differ from one another
    shards = [plan.shard(stream, rank) for rank in range(cp)]
    ids = [plan.shard(torch.arange(plan.total_tokens), rank) for rank in range(cp)]
    for shard, slots in zip(shards, ids, strict=True):
        assert torch.equal(shard, stream[slots])
    assert torch.equal(plan.unshard(shards)[plan.valid], torch.cat(chosen))


def test_b53_a_sample_tensor_is_never_cut_by_its_shape():
    plan = SequencePlan.from_lengths([1] * 8, alignment=Alignment(cp_size=2))
    ids = torch.zeros(1, plan.total_tokens, dtype=torch.long)
    batch = batch_of(
        plan=plan,
        input_ids=ids,
        labels=ids,
        loss_mask=ids,
        position_ids=ids.expand(3, 1, -1),
        media=MediaTable.from_batch(ids, plan, spec=SPEC),
        pixel_values=None,
        image_grid_thw=None,
        token_extras={},
        sample_extras={"returns": torch.zeros(8, plan.total_tokens)},
    )
    assert batch.local(0).sample_extras["returns"].shape == (8, plan.total_tokens)
