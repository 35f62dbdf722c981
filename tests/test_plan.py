import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_cp import Alignment, SequencePlan


def padded_by_hand(lengths, multiple):
    return [-(-length // multiple) * multiple for length in lengths]


def zigzag_by_hand(lengths, padded, cp):
    """Rank -> the (sample, token) of every local slot, by the definition: chunks r and 2c-1-r of each sample."""
    ranks = [[] for _ in range(cp)]
    for sample, length in enumerate(padded):
        tokens = [(sample, token) for token in range(length)]
        if cp == 1:
            ranks[0] += tokens
            continue
        chunk = length // (2 * cp)
        for rank in range(cp):
            back = 2 * cp - 1 - rank
            ranks[rank] += tokens[rank * chunk : (rank + 1) * chunk] + tokens[back * chunk : (back + 1) * chunk]
    return ranks


@pytest.mark.parametrize("fp8", [None, "delayed", "mxfp8", "blockwise"])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("cp", range(1, 9))
def test_b2_shards_unzigzagged_are_the_padded_stream(cp, tp, fp8):
    rule = Alignment(cp_size=cp, tp_size=tp, sequence_parallel=tp > 1, fp8=fp8)
    lengths = list(range(1, 3 * max(2, rule.sequence_multiple) + 1))
    plan = SequencePlan.from_lengths(lengths, alignment=rule)
    padded = padded_by_hand(lengths, rule.sequence_multiple)
    padded[-1] += -sum(padded) % rule.stream_multiple
    assert list(plan.padded_lengths) == padded
    assert plan.total_tokens % rule.stream_multiple == 0
    by_hand = zigzag_by_hand(lengths, padded, cp)
    for rank in range(cp):
        index = plan.local_index(rank)
        assert (
            list(zip(plan.sample_index[index].tolist(), plan.token_index[index].tolist(), strict=True)) == by_hand[rank]
        )
    stream = torch.arange(plan.total_tokens)
    assert torch.equal(plan.unshard([plan.shard(stream, rank) for rank in range(cp)]), stream)


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    cp=st.integers(1, 8),
    tp=st.integers(1, 4),
    fp8=st.sampled_from([None, "delayed", "tensorwise", "mxfp8", "blockwise", "nvfp4"]),
    sample_multiple=st.sampled_from([1, 3, 8]),
    extra=st.integers(0, 2),
)
def test_plan_properties(lengths, cp, tp, fp8, sample_multiple, extra):
    rule = Alignment(cp_size=cp, tp_size=tp, sequence_parallel=True, fp8=fp8, sample_multiple=sample_multiple)
    least = SequencePlan.from_lengths(lengths, alignment=rule).total_tokens
    plan = SequencePlan.from_lengths(lengths, alignment=rule, total_tokens=least + extra * rule.stream_multiple)
    assert plan.total_tokens == least + extra * rule.stream_multiple == int(plan.cu_seqlens_padded[-1])
    assert all(length % rule.sequence_multiple == 0 for length in plan.padded_lengths)
    assert plan.padded_lengths[:-1] == tuple(padded_by_hand(lengths[:-1], rule.sequence_multiple))
    assert plan.cu_seqlens.dtype == plan.cu_seqlens_padded.dtype == torch.int32
    assert plan.max_seqlen == max(plan.padded_lengths)
    assert isinstance(plan.max_seqlen, int)
    assert sorted(plan.rank_order.tolist()) == list(range(plan.total_tokens))
    assert int(plan.valid.sum()) == sum(lengths)
    assert int(plan.scored.sum()) == sum(lengths) - len(lengths)
    assert plan.real_index.tolist() == plan.valid.nonzero()[:, 0].tolist()
    for sample, (start, length) in enumerate(zip(plan.cu_seqlens_padded.tolist(), lengths, strict=False)):
        own = plan.sample_index == sample
        assert plan.valid[own].tolist() == [True] * length + [False] * (plan.padded_lengths[sample] - length)
        assert bool(own[start])


DTYPES = [torch.bool, torch.int32, torch.int64, torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "dim"), [(("T",), 0), ((1, "T"), 1), ((1, "T", 5), 1), ((3, 1, "T"), 2), (("T", 4), 0)], ids=str
)
@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_b11_b14_round_trip(cp, shape, dim, dtype):
    plan = SequencePlan.from_lengths([1, 7, 16, 33], alignment=Alignment(cp_size=cp))
    size = [plan.total_tokens if n == "T" else n for n in shape]
    x = torch.randint(0, 2, size).bool() if dtype == torch.bool else torch.randint(0, 100, size).to(dtype)
    strided = torch.stack([x, x], -1).select(-1, 0)
    assert not strided.is_contiguous() or x.numel() == 1
    for value in (x, strided, x.transpose(0, dim).contiguous().transpose(0, dim)):
        shards = [plan.shard(value, rank, dim) for rank in range(cp)]
        assert all(shard.size(dim) == plan.local_tokens for shard in shards)
        assert torch.equal(plan.unshard(shards, dim), x)


def test_b1_a_short_sample_leaves_pad_ids_never_copies():
    plan = SequencePlan.from_lengths([1], alignment=Alignment(cp_size=2))
    ids = plan.pack([torch.tensor([7])], fill=-1)
    assert [plan.shard(ids, rank).tolist() for rank in (0, 1)] == [[7, -1], [-1, -1]]


def test_b4_an_aligned_sample_gets_no_padding():
    plan = SequencePlan.from_lengths([8, 4], alignment=Alignment(cp_size=2))
    assert plan.padded_lengths == plan.lengths
    assert torch.equal(plan.cu_seqlens, plan.cu_seqlens_padded)


def test_pack_and_gradient():
    plan = SequencePlan.from_lengths([2, 5], alignment=Alignment(cp_size=2))
    parts = [torch.randn(n, 3, requires_grad=True) for n in plan.lengths]
    stream = plan.pack(parts, fill=9.0)
    assert torch.equal(stream[plan.valid], torch.cat(parts))
    assert bool((stream[~plan.valid] == 9).all())
    weight = torch.randn_like(stream)
    (stream * weight).sum().backward()
    assert torch.equal(torch.cat([p.grad for p in parts]), weight[plan.valid])


def test_shard_gradient_goes_to_the_own_tokens():
    plan = SequencePlan.from_lengths([5, 9], alignment=Alignment(cp_size=2))
    x = torch.randn(plan.total_tokens, requires_grad=True)
    plan.shard(x, 1).sum().backward()
    assert x.grad.nonzero()[:, 0].tolist() == sorted(plan.local_index(1).tolist())


def test_lengths_may_be_a_tensor():
    plan = SequencePlan.from_lengths(torch.tensor([3, 4], dtype=torch.int32))
    assert plan.lengths == (3, 4)
    assert all(isinstance(n, int) for n in plan.lengths + plan.padded_lengths)


def test_to_the_same_device_is_the_same_plan():
    plan = SequencePlan.from_lengths([3])
    assert plan.to("cpu") is plan


def refuses(message):
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


def test_b3_zero_length_names_the_sample():
    with refuses(
        "lengths[1] must be at least 1, got 0; an empty sample owns no chunk, and its neighbours' tokens would be taken for its own"
    ):
        SequencePlan.from_lengths([3, 0, 2])


def test_lengths_that_are_no_lengths():
    with refuses("lengths must hold one entry a sample, got shape (0,); there is nothing to plan"):
        SequencePlan.from_lengths([])
    with refuses("lengths must be integers, got float32; a mask would plan one-token samples"):
        SequencePlan.from_lengths([2.0])
    with refuses("lengths must be integers, got bool; a mask would plan one-token samples"):
        SequencePlan.from_lengths(torch.tensor([True, True]))


@pytest.mark.parametrize("total", [0, 12, 18, 22])
def test_b7_fixed_total_is_refused_when_too_small_or_unaligned(total):
    with refuses(
        f"total_tokens must be a multiple of 4 and at least 16, got {total}; "
        "samples would be cut, or ranks would hold unequal shards"
    ):
        SequencePlan.from_lengths([5, 6], alignment=Alignment(cp_size=2), total_tokens=total)


def test_b6_a_fixed_total_pads_the_last_sample():
    plan = SequencePlan.from_lengths([5, 6], alignment=Alignment(cp_size=2), total_tokens=40)
    assert plan.padded_lengths == (8, 32)


@pytest.mark.parametrize("rank", [-1, 2])
def test_wrong_rank(rank):
    plan = SequencePlan.from_lengths([5], alignment=Alignment(cp_size=2))
    with refuses(f"rank must lie in [0, 2), got {rank}; another rank's tokens would be taken"):
        plan.shard(torch.arange(8), rank)


def test_b13_double_shard():
    plan = SequencePlan.from_lengths([5], alignment=Alignment(cp_size=2))
    once = plan.shard(torch.arange(8), 0)
    with refuses(
        "x.size(0) must be the full stream's T = 8, got 4; this is already a rank's shard, and using it as it is would lose tokens"
    ):
        plan.shard(once, 0)
    with refuses(
        "x.size(0) must be the full stream's T = 8, got 6; it belongs to another plan, and using it as it is would lose tokens"
    ):
        plan.shard(torch.arange(6), 0)


def test_unshard_needs_every_rank():
    plan = SequencePlan.from_lengths([5], alignment=Alignment(cp_size=2))
    with refuses("shards must hold one tensor a rank, 2 in all, got 1; tokens would be missing"):
        plan.unshard([torch.arange(4)])
    with refuses(
        "x.size(0) must be a shard's T / c = 4, got 8; it belongs to another plan, and using it as it is would lose tokens"
    ):
        plan.unshard([torch.arange(8), torch.arange(8)])


def test_gather_needs_a_group_at_cp_above_1():
    plan = SequencePlan.from_lengths([5], alignment=Alignment(cp_size=2))
    with refuses(
        "group must be the context-parallel group at cp_size 2, got None; "
        "the default group may span data-parallel ranks and would mix their samples"
    ):
        plan.gather(torch.arange(4), None)


def test_b11_gather_at_cp_1_keeps_the_graph():
    plan = SequencePlan.from_lengths([5])
    x = torch.randn(5, requires_grad=True)
    assert plan.gather(x, None) is x


def test_pack_needs_the_plans_lengths():
    plan = SequencePlan.from_lengths([2, 3])
    with refuses("tensors must have the plan's lengths (2, 3), got (3, 2); tokens would move to other samples"):
        plan.pack([torch.zeros(3), torch.zeros(2)], 0)


def test_a_tensor_on_another_device_than_the_plan():
    plan = SequencePlan.from_lengths([4])
    with refuses(
        "x must be on the plan's device cpu, got meta; "
        "move the plan once a batch with plan.to(device), a copy for every tensor would stall the step"
    ):
        plan.shard(torch.empty(4, device="meta"), 0)
