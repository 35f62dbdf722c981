import inspect
from types import SimpleNamespace

import pytest
import torch
from logprob_ranks import (
    LENGTHS,
    VOCAB,
    make_case,
    make_plan,
    naive_logprobs,
    to_slots,
)
from megatron_import import import_megatron
from ranks import run_ranks
from torch import Tensor

from vlm_cp.batch import postprocess_packed_seqs
from vlm_cp.logprobs import (
    next_token_entropy,
    next_token_logprobs,
    next_token_logprobs_and_entropy,
    next_token_logprobs_and_entropy_from_hidden,
    next_token_logprobs_from_hidden,
    output_processor,
)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("chunk_size", [1, 5, 1000], ids=lambda n: f"chunk{n}")
def test_equals_log_softmax_of_every_sample(cp_size: int, chunk_size: int) -> None:
    plan = make_plan(cp_size)
    logits, ids, stream, input_ids = make_case(plan)
    leaves = [x.clone().requires_grad_() for x in logits]
    logprobs, entropies = naive_logprobs(leaves, ids)
    weights = [10.0 ** torch.arange(len(x) % 3, len(x) % 3 + len(x)).remainder(4) for x in logprobs]
    sum(((2 * x - y) * w).sum() for x, y, w in zip(logprobs, entropies, weights, strict=True)).backward()
    expected_grad = plan.pack([x.grad for x in leaves], 0.0)
    slot_weights = to_slots(plan, weights)

    for rank in range(cp_size):
        own = plan.shard(stream, rank).clone().requires_grad_()
        found = next_token_logprobs_and_entropy(own[None], input_ids, plan, cp_rank=rank, chunk_size=chunk_size)
        ((2 * found[0] - found[1]) * plan.shard(slot_weights, rank)).sum().backward()
        for x, expected in zip(found, (logprobs, entropies), strict=True):
            torch.testing.assert_close(x, plan.shard(to_slots(plan, expected), rank), rtol=0, atol=1e-14)
        torch.testing.assert_close(own.grad, plan.shard(expected_grad, rank), rtol=1e-12, atol=1e-12)
        scored = plan.shard(plan.scored, rank)
        assert (found[0][~scored] == 0).all()
        assert (own.grad[~scored] == 0).all()


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_single_functions_equal_the_joint_pass(cp_size: int) -> None:
    plan = make_plan(cp_size)
    *_, stream, input_ids = make_case(plan)
    for rank in range(cp_size):
        grads = []
        for fn in (next_token_logprobs, next_token_entropy, next_token_logprobs_and_entropy):
            own = plan.shard(stream, rank).clone().requires_grad_()
            found = fn(own[None], input_ids, plan, cp_rank=rank)
            sum(x.sum() for x in (found if isinstance(found, tuple) else (found,))).backward()
            grads.append((found, own.grad))
        torch.testing.assert_close(grads[0][0], grads[2][0][0], rtol=0, atol=0)
        torch.testing.assert_close(grads[1][0], grads[2][0][1], rtol=0, atol=0)
        torch.testing.assert_close(grads[0][1] + grads[1][1], grads[2][1], rtol=0, atol=1e-14)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_b15_label_roll_at_chunk_edge(cp_size: int) -> None:
    """The last slot of a chunk predicts the first token of the next chunk, which another rank holds."""
    plan = make_plan(cp_size, (8 * cp_size,))
    ids = torch.arange(8 * cp_size)[None]
    certain = torch.full((8 * cp_size, 8 * cp_size), -50.0).scatter_(1, ids[0].roll(-1)[:, None], 50.0)
    for rank in range(cp_size):
        found = next_token_logprobs(plan.shard(certain, rank)[None], ids, plan, cp_rank=rank)
        assert found.abs().max() < 1e-6
        if cp_size > 1:  # what rolling the shard would give
            local = plan.shard(ids[0], rank).roll(-1)
            assert (local != plan.shard(ids[0].roll(-1), rank))[plan.shard(plan.scored, rank)].any()


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_b16_nothing_leaks_into_the_next_sample(cp_size: int) -> None:
    plan = make_plan(cp_size)
    *_, stream, input_ids = make_case(plan)
    stream = stream.nan_to_num(0.0)
    changed = input_ids.clone()
    changed[0, plan.cu_seqlens_padded[1]] = (
        changed[0, plan.cu_seqlens_padded[1]] + 1
    ) % VOCAB  # sample 1's first token
    for rank in range(cp_size):
        own = plan.shard(stream, rank)[None]
        before, after = (next_token_logprobs(own, x, plan, cp_rank=rank) for x in (input_ids, changed))
        torch.testing.assert_close(before, after, rtol=0, atol=0)  # a first token is no slot's target


def rows_on_rank(rank: int, cp_size: int) -> tuple[Tensor, Tensor]:
    """Logprobs as left-padded rows [B, S - 1] on every rank, and this rank's gradient of a loss that all ranks compute."""
    plan = make_plan(cp_size)
    *_, stream, input_ids = make_case(plan)
    own = plan.shard(stream, rank).clone().requires_grad_()
    group = torch.distributed.group.WORLD if cp_size > 1 else None
    found = next_token_logprobs(own[None], input_ids, plan, cp_rank=rank)
    rows = postprocess_packed_seqs(found, plan, LEFT_PADDED, group=group)[:, :-1]
    (rows * 10.0 ** torch.arange(len(LENGTHS))[:, None]).sum().backward()
    return rows.detach(), own.grad


LEFT_PADDED = torch.arange(15) >= 15 - torch.tensor(LENGTHS)[:, None]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_b16_rows_hold_the_logprob_of_token_j_plus_1_at_column_j(cp_size: int) -> None:
    plan = make_plan(cp_size)
    logits, ids, *_ = make_case(plan)
    leaves = [x.clone().requires_grad_() for x in logits]
    logprobs, _ = naive_logprobs(leaves, ids)
    expected = torch.stack([torch.cat([x.new_zeros(14 - len(x)), x]) for x in logprobs])
    sum(10.0**i * x.sum() for i, x in enumerate(logprobs)).backward()
    gradient = plan.pack([x.grad for x in leaves], 0.0)
    for rank, (rows, grad) in enumerate(run_ranks(cp_size, rows_on_rank, cp_size)):
        torch.testing.assert_close(rows, expected.detach(), rtol=0, atol=1e-14)
        torch.testing.assert_close(grad, plan.shard(gradient, rank), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_b17_response_of_one_token_is_one_term_at_the_slot_before_it(cp_size: int) -> None:
    plan = make_plan(cp_size, (5, 9))
    logits, ids, stream, input_ids = make_case(plan)
    response = torch.zeros(plan.total_tokens, dtype=torch.bool)
    response[plan.cu_seqlens_padded[1] + 8] = True  # the second sample's last token
    slots = response.roll(-1) & plan.scored
    terms, touched = [], []
    for rank in range(cp_size):
        own = plan.shard(stream, rank).clone().requires_grad_()
        found = next_token_logprobs(own[None], input_ids, plan, cp_rank=rank)
        loss = found.where(plan.shard(slots, rank), 0).sum()
        loss.backward()
        terms.append(loss.detach())
        touched += plan.local_index(rank)[(own.grad != 0).any(1)].tolist()
    expected = naive_logprobs(logits, ids)[0][1][-1]
    torch.testing.assert_close(sum(terms), expected, rtol=0, atol=1e-14)
    assert touched == [int(plan.cu_seqlens_padded[1]) + 7]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_b18_sample_without_a_scored_slot_gives_zero_and_no_gradient(cp_size: int) -> None:
    plan = make_plan(cp_size, (1,))
    *_, stream, input_ids = make_case(plan)
    for rank in range(cp_size):
        own = plan.shard(stream, rank).clone().requires_grad_()
        logprobs, entropy = next_token_logprobs_and_entropy(own[None], input_ids, plan, cp_rank=rank)
        (logprobs.sum() + entropy.sum()).backward()
        assert (logprobs == 0).all()
        assert (entropy == 0).all()
        assert (own.grad == 0).all()


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_temperature_per_token(cp_size: int) -> None:
    plan = make_plan(cp_size)
    *_, stream, input_ids = make_case(plan)
    temperature = torch.tensor([0.5, 2.0, 1.0])[torch.arange(plan.total_tokens) % 3].where(plan.scored, 0.0)
    for rank in range(cp_size):
        own = plan.shard(stream, rank).clone().requires_grad_()
        found = next_token_logprobs_and_entropy(own[None], input_ids, plan, cp_rank=rank, temperature=temperature)
        sum(x.sum() for x in found).backward()
        divided = plan.shard(stream, rank).clone().requires_grad_()
        scale = plan.shard(temperature.where(plan.scored, 1.0), rank)[:, None].double()
        expected = next_token_logprobs_and_entropy((divided / scale)[None], input_ids, plan, cp_rank=rank)
        sum(x.sum() for x in expected).backward()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
        torch.testing.assert_close(own.grad.nan_to_num(0), divided.grad.nan_to_num(0), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("chunk_size", [3, 1000], ids=lambda n: f"chunk{n}")
def test_from_hidden_equals_from_logits(cp_size: int, chunk_size: int) -> None:
    plan = make_plan(cp_size)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(plan.total_tokens, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, 6, generator=generator, dtype=torch.float64)
    *_, input_ids = make_case(plan)
    for rank in range(cp_size):
        results = []
        for fused in (False, True):
            own, columns = plan.shard(hidden, rank).requires_grad_(), weight.clone().requires_grad_()
            if fused:
                found = next_token_logprobs_and_entropy_from_hidden(
                    own[None], columns, input_ids, plan, cp_rank=rank, chunk_size=chunk_size, vocab_size=9
                )
            else:
                logits = (own @ columns.T)[None]
                found = next_token_logprobs_and_entropy(logits, input_ids, plan, cp_rank=rank, vocab_size=9)
            (100 * found[0].where(found[0].isfinite(), 0).sum() + found[1].sum()).backward()
            results.append((*found, own.grad, columns.grad))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_from_hidden_leaves_a_frozen_output_layer_alone() -> None:
    plan = make_plan(1)
    *_, input_ids = make_case(plan)
    hidden, weight = torch.randn(1, plan.total_tokens, 6, requires_grad=True), torch.randn(VOCAB, 6)
    next_token_logprobs_from_hidden(hidden, weight, input_ids, plan, cp_rank=0).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0; no slot would ever be computed"),
        (
            {"temperature": 0.0},
            "temperature must be positive and finite, got 0.0; likely tokens would become unlikely, or NaN",
        ),
        (
            {"temperature": torch.tensor([1.0, -1.0, 0.0])},
            "temperature must be positive and finite, got -1.0; likely tokens would become unlikely, or NaN",
        ),
        (
            {"vocab_size": 12},
            "vocab_size must lie in [1, 11], the columns of all TP ranks, got 12; "
            "the padding columns would not be where they are looked for",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    plan = make_plan(1, (3,))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        next_token_logprobs(torch.zeros(1, 3, VOCAB), torch.zeros(1, 3, dtype=torch.int64), plan, cp_rank=0, **options)
    assert str(error.value) == message


def test_shards_in_place_of_streams_are_refused() -> None:
    plan = make_plan(2, (8,))
    ids = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^input_ids must be the full stream \[1, 8\], got \(1, 4\); targets rolled"):
        next_token_logprobs(torch.zeros(1, 4, VOCAB), ids[:, :4], plan, cp_rank=0)
    with pytest.raises(
        ValueError,
        match=r"^logits_local must have shape \[1, 4, \.\.\.\], one row a slot of this rank, got \(1, 8, 11\)",
    ):
        next_token_logprobs(torch.zeros(1, 8, VOCAB), ids, plan, cp_rank=0)
    with pytest.raises(
        ValueError, match=r"^hidden_local must have shape \[1, 4, \.\.\.\], one row a slot of this rank, got \(4, 6\)"
    ):
        next_token_logprobs_from_hidden(torch.zeros(4, 6), torch.zeros(VOCAB, 6), ids, plan, cp_rank=0)


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("tied", [False, True], ids=["own-weight", "tied"])
def test_output_processor_in_the_place_of_megatrons_output_layer(cp_size: int, tied: bool) -> None:
    """Through GPTModel's own `_postprocess`, the code that calls it; width scaling (muP) included."""
    gpt_model = import_megatron("megatron.core.models.gpt.gpt_model")
    plan = make_plan(cp_size)
    *_, input_ids = make_case(plan)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(plan.total_tokens, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, 6, generator=generator, dtype=torch.float64)
    config = SimpleNamespace(mtp_num_layers=None, use_mup=True, mup_output_mult=0.5)
    model = SimpleNamespace(
        config=config,
        post_process=True,
        share_embeddings_and_output_weights=tied,
        shared_embedding_or_output_weight=lambda: weight,
        output_layer=SimpleNamespace(weight=None if tied else weight, bias=None, sequence_parallel=False),
        compute_language_model_loss=None,
        _scale_logits=None,
    )
    unused = dict.fromkeys(
        inspect.signature(gpt_model.GPTModel._postprocess).parameters.keys() - {"self", "hidden_states"}
    )
    for rank in range(cp_size):
        processor = output_processor(input_ids, plan, cp_rank=rank, temperature=0.7, entropy=True, chunk_size=4)
        own = plan.shard(hidden, rank)
        given = {**unused, "hidden_states": own[:, None], "output_processor": processor}
        found = gpt_model.GPTModel._postprocess(model, **given)
        logits = (0.5 * own @ weight.T)[None]
        expected = next_token_logprobs_and_entropy(logits, input_ids, plan, cp_rank=rank, temperature=0.7)
        torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-13)


def test_output_processor_refuses_what_it_would_leave_out() -> None:
    plan = make_plan(1, (3,))
    processor = output_processor(torch.zeros(1, 3, dtype=torch.int64), plan, cp_rank=0)
    layer = torch.nn.Linear(4, VOCAB)
    message = "output_layer must hold a weight and no bias, got Linear; a bias or an adapter would be left out of the logprobs"
    with pytest.raises(ValueError, match=f"^{message}$"):
        processor(hidden_states=torch.zeros(3, 1, 4), output_layer=layer, output_weight=None, config=None)
