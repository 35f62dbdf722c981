import pytest
import torch
from logprob_ranks import VOCAB, GivesItsGradientAway, check_grid, make_case, make_plan
from ranks import run_ranks
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from vlm_cp.logprobs import (
    next_token_logprobs,
    next_token_logprobs_and_entropy,
    next_token_logprobs_from_hidden,
)


def test_gradients_are_those_of_finite_differences() -> None:
    plan = make_plan(2)
    *_, stream, input_ids = make_case(plan)
    own = plan.shard(stream, 1).nan_to_num(0.5).requires_grad_()

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return next_token_logprobs_and_entropy(x[None], input_ids, plan, cp_rank=1, chunk_size=6, temperature=0.8)

    assert torch.autograd.gradcheck(both, (own,))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=lambda d: str(d).removeprefix("torch."),
)
def test_sums_run_in_float32_or_better(dtype: torch.dtype, expected: torch.dtype) -> None:
    plan = make_plan(1)
    _, _, stream, input_ids = make_case(plan, dtype=dtype)
    stream.requires_grad_()
    found = next_token_logprobs(stream[None], input_ids, plan, cp_rank=0)
    found.sum().backward()
    assert found.dtype == expected
    assert stream.grad.dtype == dtype
    exact = next_token_logprobs(stream[None].double(), input_ids, plan, cp_rank=0)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-6)


def test_b19_tp_times_cp_equals_one_process() -> None:
    """2 x 2 ranks, padded vocabulary, both ways in; the target of a slot is on the other TP rank half of the time."""
    check_grid(run_ranks, "cpu")


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("vocab_size", [VOCAB, 7], ids=["all", "padded"])
def test_b20_masked_logits_give_no_nan(cp_size: int, vocab_size: int) -> None:
    """Top-k sets logits to -inf: also a target's own, and all but one."""
    plan = make_plan(cp_size)
    logits, ids, _, input_ids = make_case(plan)
    masked = [
        x.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.6, -torch.inf) for x in logits
    ]
    masked[3][2] = -torch.inf  # nothing is possible
    masked[3][3] = -torch.inf
    masked[3][3, ids[3][4] % vocab_size] = 1.5  # one token is certain
    stream = plan.pack(masked, -torch.inf)
    for rank in range(cp_size):
        own = plan.shard(stream, rank).clone().requires_grad_()
        logprobs, entropy = next_token_logprobs_and_entropy(
            own[None], input_ids, plan, cp_rank=rank, vocab_size=vocab_size, chunk_size=4
        )
        assert not logprobs.isnan().any()
        assert entropy.isfinite().all()
        (17 * torch.where(logprobs.isfinite(), logprobs, 0).sum() + 23 * entropy.sum()).backward()
        assert own.grad.isfinite().all()
        assert (own.grad[own == -torch.inf] == 0).all()
        reference = plan.shard(plan.pack([x[:, :vocab_size] for x in masked], -torch.inf), rank)
        table = torch.log_softmax(reference, -1)
        target = plan.shard(input_ids[0].roll(-1), rank)
        expected = torch.where(
            target < vocab_size, table.gather(1, target.clamp(max=vocab_size - 1)[:, None])[:, 0], -torch.inf
        )
        ok = plan.shard(plan.scored, rank) & (reference > -torch.inf).any(1)
        torch.testing.assert_close(logprobs[ok], expected[ok], rtol=0, atol=1e-13)
        assert (logprobs[plan.shard(plan.scored, rank) & ~ok] == -torch.inf).all()


def test_a_target_beyond_the_vocabulary_is_impossible_not_somebody_elses() -> None:
    plan = make_plan(1, (3,))
    logits = torch.randn(1, 3, VOCAB, requires_grad=True)
    found = next_token_logprobs(logits, torch.tensor([[0, VOCAB, 4]]), plan, cp_rank=0)
    assert found[0] == -torch.inf
    assert found[1].isfinite()
    (found * torch.tensor([torch.nan, 1.0, 1.0])).sum().backward()
    assert (logits.grad[0, 0] == 0).all()


def test_inplace_backward_writes_over_the_logits() -> None:
    plan = make_plan(2)
    *_, stream, input_ids = make_case(plan)
    grads = []
    for inplace in (False, True):
        hidden = plan.shard(stream, 0).nan_to_num(0).requires_grad_()
        logits = 2 * hidden
        logits.retain_grad()
        found = next_token_logprobs_and_entropy(logits[None], input_ids, plan, cp_rank=0, inplace_backward=inplace)
        sum(x.sum() for x in found).backward()
        grads.append(hidden.grad)
        assert torch.equal(logits, logits.grad) == inplace
    assert torch.equal(*grads)


def test_inplace_backward_is_noticed_by_whoever_saved_the_logits() -> None:
    plan = make_plan(1)
    *_, stream, input_ids = make_case(plan)
    logits = 2 * stream.nan_to_num(0).requires_grad_()
    z_loss = logits.square().sum()
    found = next_token_logprobs(logits[None], input_ids, plan, cp_rank=0, inplace_backward=True)
    found.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z_loss.backward()


def peak_bytes(fn) -> int:
    """The most memory above the start that `fn` held at any moment, temporaries of every operator included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        fn()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize("entropy", [False, True], ids=["logprob", "with-entropy"])
def test_memory_is_one_chunk_and_one_gradient(entropy: bool) -> None:
    """Above the logits: one chunk without grad; a gradient and a chunk with backward; one chunk with inplace_backward."""
    vocab, chunk_size, n = 16384, 16, 256
    plan = make_plan(1, (n,))
    input_ids = torch.randint(vocab, (1, n))
    logits_bytes, chunk_bytes = n * vocab * 2, chunk_size * vocab * 4
    slots_bytes = chunk_bytes // 8  # a few dozen numbers a slot: targets, masks, sums
    fn = next_token_logprobs_and_entropy if entropy else next_token_logprobs

    def run(logits: Tensor, **options: bool) -> None:
        found = fn(logits, input_ids, plan, cp_rank=0, chunk_size=chunk_size, **options)
        if logits.requires_grad:
            sum(x.sum() for x in (found if entropy else (found,))).backward()

    leaf = torch.randn(1, n, vocab).bfloat16().requires_grad_()
    logits = leaf * 1
    assert peak_bytes(lambda: run(leaf.detach())) < chunk_bytes + slots_bytes
    assert peak_bytes(lambda: run(leaf)) < logits_bytes + chunk_bytes + slots_bytes
    assert peak_bytes(lambda: run(logits, inplace_backward=True)) < logits_bytes + chunk_bytes + slots_bytes

    source = torch.zeros(1, requires_grad=True)
    given = GivesItsGradientAway.apply(source, logits.detach())
    assert peak_bytes(lambda: run(given, inplace_backward=True)) < chunk_bytes + slots_bytes


def test_memory_from_hidden_never_holds_the_logits() -> None:
    vocab, width, chunk_size, n = 16384, 2, 16, 256
    plan = make_plan(1, (n,))
    input_ids = torch.randint(vocab, (1, n))
    hidden = torch.randn(1, n, width).bfloat16().requires_grad_()
    weight = torch.randn(vocab, width).bfloat16().requires_grad_()

    def run() -> None:
        next_token_logprobs_from_hidden(
            hidden, weight, input_ids, plan, cp_rank=0, chunk_size=chunk_size
        ).sum().backward()

    chunks = chunk_size * vocab * (4 + 2)  # the product in bfloat16 and its float32 copy
    gradients = vocab * width * (4 + 2 + 2) + n * width * 2  # float32 sums, a chunk's part, the result
    assert peak_bytes(run) < chunks + gradients + chunks // 16 < n * vocab * 2 / 2
