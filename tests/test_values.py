import pytest
import torch
from critic_ranks import check_critic
from ranks import run_ranks
from torch import Tensor

from vlm_cp.alignment import Alignment
from vlm_cp.batch import postprocess_packed_seqs
from vlm_cp.plan import SequencePlan
from vlm_cp.values import make_value_head, shifted_values, slot_targets, value_loss, value_terms

LENGTHS = (1, 13, 2, 7)


def make_plan(cp_size: int, lengths: tuple[int, ...] = LENGTHS) -> SequencePlan:
    return SequencePlan.from_lengths(lengths, alignment=Alignment(cp_size=cp_size))


def shifted_on_rank(rank: int, cp_size: int, shape: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
    plan = make_plan(cp_size)
    stream = torch.arange(plan.total_tokens).double().where(plan.valid, torch.nan)
    own = plan.shard(stream, rank).requires_grad_()
    group = torch.distributed.group.WORLD if cp_size > 1 else None
    values = shifted_values(own.reshape(shape), plan, group=group)
    weights = torch.arange(sum(plan.lengths)).double()
    (torch.cat(values) * weights).sum().backward()
    return [x.detach() for x in values], own.grad


@pytest.mark.parametrize(
    ("cp_size", "shape"), [(1, (-1,)), (1, (-1, 1)), (2, (1, -1, 1)), (4, (1, -1, 1))], ids=lambda x: str(x)
)
def test_values_are_gathered_then_shifted_inside_every_sample(cp_size: int, shape: tuple[int, ...]) -> None:
    plan = make_plan(cp_size)
    for rank, (values, grad) in enumerate(run_ranks(cp_size, shifted_on_rank, cp_size, shape)):
        for value, start, length in zip(values, plan.cu_seqlens_padded.tolist(), LENGTHS, strict=False):
            assert value.tolist() == [0.0] + [float(start + t) for t in range(length - 1)]
        # The weight of values[t] reaches slot t - 1 and no other: nothing from first tokens, nothing to last ones.
        expected = slot_targets(
            plan.pack(list(torch.arange(23.0).double().split(LENGTHS)), 0)[None], plan, cp_rank=rank
        )
        assert torch.equal(grad, expected)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_slot_targets_meet_the_values_without_a_collective(cp_size: int) -> None:
    """The value at slot j is the one before token j + 1: pairing them locally equals gathering, shifting and pairing."""
    plan = make_plan(cp_size)
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(plan.total_tokens, generator=generator).double()
    returns, old = (torch.randn(1, plan.total_tokens, generator=generator).double() for _ in range(2))
    mask = torch.rand(1, plan.total_tokens, generator=generator) < 0.7
    slots = plan.real_index
    whole = torch.cat(shifted_values(heads, make_plan_of_one(plan)))
    terms = value_terms(whole, returns[0, slots], old[0, slots], clip=0.2)
    counted = mask[0, slots] & (plan.token_index[slots] > 0)
    parts = [
        value_loss(plan.shard(heads, r), plan, returns=returns, old_values=old, loss_mask=mask, cp_rank=r, clip=0.2)
        for r in range(cp_size)
    ]
    torch.testing.assert_close(sum(s for s, _ in parts), terms[counted].sum(), rtol=1e-14, atol=0)
    assert sum(int(n) for _, n in parts) == int(counted.sum())


def make_plan_of_one(plan: SequencePlan) -> SequencePlan:
    """The same padded stream for one rank, so that `shifted_values` needs no group."""
    return SequencePlan.from_lengths(
        plan.lengths, alignment=Alignment(sample_multiple=plan.alignment.sequence_multiple)
    )


def test_b31_first_token_counts_neither_in_the_sum_nor_in_the_count() -> None:
    plan = SequencePlan.from_lengths([4])
    returns, mask = torch.tensor([[100.0, 1.0, 2.0, 3.0]]), torch.ones(1, 4)
    total, count = value_loss(torch.zeros(4), plan, returns=returns, loss_mask=mask, cp_rank=0)
    assert (total.item(), count.item()) == (0.5 * (1 + 4 + 9), 3)


def test_clipped_value_loss_takes_the_larger_error_and_its_gradient() -> None:
    values = torch.tensor([0.05, 1.0, 1.0, -2.0], requires_grad=True)
    returns = torch.tensor([1.0, 5.0, 0.0, 0.0])
    terms = value_terms(values, returns, torch.zeros(4), clip=0.1)
    # inside the range; clipping makes it worse, and constant; clipping would hide the error, twice
    torch.testing.assert_close(terms, 0.5 * torch.tensor([0.95**2, 4.9**2, 1.0, 4.0]))
    terms.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([-0.95, 0.0, 1.0, -2.0]))
    torch.testing.assert_close(value_terms(values, returns), 0.5 * (values - returns).square())


def test_masked_terms_may_hold_anything() -> None:
    plan = SequencePlan.from_lengths([3])
    heads = torch.tensor([1.0, torch.nan, torch.inf], requires_grad=True)
    total, count = value_loss(
        heads, plan, returns=torch.zeros(1, 3), loss_mask=torch.tensor([[0.0, 0.5, 0.0]]), cp_rank=0
    )
    total.backward()
    assert (total.item(), count.item()) == (0.25, 1)
    assert heads.grad.tolist() == [0.5, 0, 0]


def test_values_run_in_float32_or_better() -> None:
    plan = SequencePlan.from_lengths([3])
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert shifted_values(torch.zeros(1, 3, 1, dtype=dtype), plan)[0].dtype == expected


def test_rows_hold_the_same_values() -> None:
    plan = SequencePlan.from_lengths([3, 1, 4])
    heads = torch.randn(8)
    mask = torch.tensor([[0, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()
    rows = postprocess_packed_seqs(heads, plan, mask, align="token")
    assert torch.equal(rows[mask], torch.cat(shifted_values(heads, plan)))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_b21_vlm_critic_equals_one_process(family: str) -> None:
    """Values and gradients of ragged samples with pictures and video, through the clipped value loss, CP 1, 2, 4 and 1, 2, 4
    micro-batches, against transformers' own forward of each sample alone."""
    cases = [(2, 2)] if family != "qwen3_vl" else [(1, 1), (2, 2), (1, 4), (4, 1)]
    check_critic(run_ranks, family, cases, "cpu", 1e-11)


def test_value_head_is_the_same_on_every_rank_and_draws_nothing() -> None:
    before = torch.random.get_rng_state()
    first = make_value_head(8, std=0.5, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.randn(5)
    assert torch.equal(first.weight, make_value_head(8, std=0.5, seed=3).weight)
    assert not torch.equal(first.weight, make_value_head(8, std=0.5, seed=4).weight)
    assert first.bias is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda plan: shifted_values(torch.zeros(1, 3), plan),
            "values_local must have shape [3], [3, 1] or [1, 3, 1], one value a slot of this rank, got (1, 3); "
            "values would belong to other tokens",
        ),
        (
            lambda plan: slot_targets(torch.zeros(3), plan, cp_rank=0),
            "x must be the full stream [1, 3, ...], got (3,); shifted inside a shard it is wrong at the end of every chunk",
        ),
        (
            lambda plan: value_terms(torch.zeros(3), torch.zeros(3), clip=0.2),
            "clip must be positive and come with old_values, got 0.2 and no old_values; "
            "values would not be clipped, or not move at all",
        ),
        (
            lambda plan: value_terms(torch.zeros(3), torch.zeros(3), torch.zeros(3), clip=0.0),
            "clip must be positive and come with old_values, got 0.0 and old_values; "
            "values would not be clipped, or not move at all",
        ),
    ],
    ids=["shape", "targets", "clip-alone", "clip-zero"],
)
def test_bad_input_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make(SequencePlan.from_lengths([3]))
    assert str(error.value) == message
