"""What users hand to losses and metrics by mistake: one sentence, where broadcasting or rounding gave a wrong number."""

import re

import pytest
import torch

from vlm_cp import Metric, SequencePlan, TokenLoss, bin_samples, merge_metrics, next_token_logprobs, reduce_metrics
from vlm_cp.losses import (
    emit_default,
    emit_mean,
    emit_per_token,
    global_count,
    local_count,
    sequence_loss,
    sequence_ratio,
    sequence_sum,
    token_loss,
)
from vlm_cp.metrics import PackedLoss, masked_max, masked_mean, masked_min, masked_sum, packing_invariant
from vlm_cp.values import value_loss, value_terms

PLAN = SequencePlan.from_lengths([3, 8])
IDS = torch.arange(11)[None]
LOGITS = torch.zeros(1, 11, 16)
X = torch.arange(11.0)
MASK = PLAN.scored[None]
LOSS = TokenLoss(torch.tensor(2.0), 4)
NAN = float("nan")


def refuses(message):
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


# Logprobs.


def logprobs(ids=IDS, **options):
    return next_token_logprobs(LOGITS, ids, PLAN, cp_rank=0, **options)


def test_labels_in_place_of_ids():
    """Shifted labels have the ids' shape; their last slot of every sample holds -100, whatever was masked."""
    labels = PLAN.pack([torch.tensor([5, 6, -100]), torch.tensor([1, 2, 3, 4, 5, 6, 7, -100])], -100)[None]
    with refuses(
        "input_ids must be ids, got -100 at a token; labels are shifted already, and targets would be one token off"
    ):
        logprobs(labels)


def test_padding_may_hold_anything():
    plan = SequencePlan.from_lengths([3], total_tokens=4)
    ids = torch.tensor([[1, 2, 3, -100]])
    assert next_token_logprobs(LOGITS[:, :4], ids, plan, cp_rank=0).isfinite().all()


def test_ids_of_another_kind():
    for ids in (IDS.float(), IDS.to("meta")):
        with refuses(
            f"input_ids must be int32 or int64 on the plan's device cpu, got {ids.dtype} on {ids.device}; "
            "half precision rounds ids to other ids"
        ):
            logprobs(ids)


@pytest.mark.parametrize("value", [0, -1, float("inf"), NAN], ids=str)
def test_temperature(value):
    for temperature in (value, torch.ones(11).index_fill(0, torch.tensor([1]), value)):
        shown = value if temperature is value else float(value)
        with refuses(
            f"temperature must be positive and finite, got {shown}; likely tokens would become unlikely, or NaN"
        ):
            logprobs(temperature=temperature)


@pytest.mark.parametrize("shape", [(), (11, 1), (1, 11), (2,)], ids=str)
def test_shape_of_temperature(shape):
    with refuses(
        f"temperature must be a number or the full stream's [11], got {shape}; rows would be divided by other slots' temperatures"
    ):
        logprobs(temperature=torch.ones(shape))


# Values.


@pytest.mark.parametrize("shape", [(11, 1), (1, 11), (2,)], ids=str)
def test_value_terms_do_not_broadcast(shape):
    why = "every value would be held against every entry"
    with refuses(f"returns must have the values' shape (11,), got {shape}; {why}"):
        value_terms(X, torch.zeros(shape))
    with refuses(f"old_values must have the values' shape (11,), got {shape}; {why}"):
        value_terms(X, X, torch.zeros(shape), clip=0.2)


def test_value_loss_takes_streams():
    with refuses(
        "returns must have the values' shape (11,), got (11, 1); every value would be held against every entry"
    ):
        value_loss(X, PLAN, returns=torch.zeros(1, 11, 1), loss_mask=MASK, cp_rank=0)
    with refuses("loss_mask must be the full stream's [1, 11], got (1, 11, 1); terms would count for other tokens"):
        value_loss(X, PLAN, returns=torch.zeros(1, 11), loss_mask=MASK[..., None], cp_rank=0)


# Losses.


@pytest.mark.parametrize("shape", [(), (1,), (11, 1), (1, 11), (10,)], ids=str)
def test_terms_do_not_broadcast(shape):
    with refuses(
        f"terms_local must have shape [11], one term a slot of this rank, got {shape}; terms would be weighed by other slots' masks"
    ):
        token_loss(torch.zeros(shape), PLAN, MASK, cp_rank=0)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean_token_mean"])
def test_a_rank_that_is_none(reduction):
    """Counts of samples are dealt by `[rank :: c]`, which takes any rank."""
    with refuses("rank must lie in [0, 1), got 1; another rank's tokens would be taken"):
        local_count(PLAN, MASK, cp_rank=1, reduction=reduction)


@pytest.mark.parametrize("count", [2.5, torch.tensor(2.5), torch.tensor([1, 2]), True, None], ids=str)
def test_counts_are_integers(count):
    with refuses(f"local_counts must be single integers, got {count!r}; fractions would be cut off"):
        global_count([1, count], None)
    with refuses(
        f"local_count must be one integer, got {count!r}; Megatron adds counts up in an integer tensor and would crash"
    ):
        TokenLoss(torch.tensor(1.0), count)
    if count is not None:
        with refuses(f"routed_tokens_local must be one integer, got {count!r}; Megatron adds counts up as integers"):
            emit_per_token(LOSS, global_count=4, routed_tokens_local=count, routed_tokens_global=9)


@pytest.mark.parametrize("found", [1.0, torch.tensor(3)], ids=repr)
def test_a_sum_that_has_no_gradient(found):
    with refuses(f"local_sum must be a floating-point tensor, got {found!r}; there would be no gradient"):
        TokenLoss(found, 2)


@pytest.mark.parametrize(
    ("x", "mask"),
    [((1, 11), (11,)), ((5,), (5,)), ((11,), (1, 11)), ((11,), (11, 1)), ((11,), (5,))],
    ids=str,
)
def test_sums_of_a_shard(x, mask):
    """Lengths are not checked by torch here: it read past the end."""
    with refuses(
        f"x_local and mask_local must have shapes [11, ...] and [11], one entry a slot of this rank, got {x} and {mask}; "
        "terms of other samples would be summed"
    ):
        sequence_sum(torch.zeros(x), PLAN, torch.ones(mask), None)


def test_ratio_does_not_broadcast():
    with refuses(
        "old_logprobs_local must have the shape of logprobs_local (11,), got (11, 1); slots would be mixed up"
    ):
        sequence_ratio(X, X[:, None], PLAN, MASK[0], None)


def test_sequence_terms():
    for terms, mask in (((2, 3), None), ((), None), ((2,), (2, 1)), ((2,), (3,))):
        with refuses(
            f"terms and mask must have shape [K], one entry a sequence, got {terms} and {mask}; "
            "terms would count for other sequences"
        ):
            sequence_loss(torch.zeros(terms), cp_rank=0, cp_size=1, mask=None if mask is None else torch.ones(mask))
    with refuses("cp_rank must lie in [0, 2), got 2; no rank would count its terms"):
        sequence_loss(torch.zeros(2), cp_rank=2, cp_size=2)


@pytest.mark.parametrize("size", [0, -1, 1.5, None], ids=str)
def test_sizes_of_emitters(size):
    why = f"must be an int of at least 1, got {size!r}; the loss would be scaled away"
    with refuses(f"num_microbatches {why}"):
        emit_default(LOSS, global_count=4, num_microbatches=size, dp_size=1)
    with refuses(f"dp_size {why}"):
        emit_default(LOSS, global_count=4, num_microbatches=1, dp_size=size)
    with refuses(f"world_size {why}"):
        emit_mean(LOSS, global_count=4, world_size=size)


@pytest.mark.parametrize("count", [-4, NAN, torch.tensor([4, 4])], ids=str)
def test_a_global_count_that_is_none(count):
    with refuses(f"global_count must be one number of at least 0, got {count!r}; the loss would be divided by another"):
        emit_mean(LOSS, global_count=count, world_size=1)


@pytest.mark.parametrize(
    ("name", "value"), [("kl", 1.0), ("loss", torch.tensor(1.0))], ids=["a number", "the name loss"]
)
def test_metrics_of_emitters(name, value):
    with refuses(
        f'metrics must be tensors under other names than "loss", got {name!r}: {value!r}; Megatron\'s loops add tensors up, '
        "and the loss' own sum and count would be replaced"
    ):
        emit_per_token(LOSS, metrics={name: value})


# Metrics and packed losses.


@pytest.mark.parametrize("count", [-1, NAN], ids=str)
def test_counts_of_metrics(count):
    with refuses(f"count must be at least 0, got {count}; what was measured would pass for nothing"):
        Metric(1.0, "mean", count)


@pytest.mark.parametrize("call", [merge_metrics, reduce_metrics])
def test_one_mapping(call):
    with refuses(
        "dicts must be a sequence of mappings, got one mapping of ['a']; its names would be taken for metrics"
    ):
        call({"a": 1.0})


@pytest.mark.parametrize("call", [masked_min, masked_max, masked_mean, masked_sum])
def test_masks_do_not_broadcast(call):
    with refuses("mask must have x's shape (3, 3), got (3,); it would be spread over other entries"):
        call(torch.ones(3, 3), torch.tensor([1, 0, 0]))


@packing_invariant
def summed(data):
    return data["logprobs"].sum(), {}


ROWS = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0], [1] * 8])


@pytest.mark.parametrize(
    ("keys", "data", "message"),
    [
        (["adv"], {}, "token_keys must be entries of the data, got adv; they would be cut as samples are"),
        (["adv"], {"adv": ROWS[:, 1:]}, "adv must have shape [2, 8, ...], got (2, 7); "),
        ([], {"reward": torch.ones(1)}, "reward must have shape [2, ...], got (1,); "),
    ],
    ids=["unknown key", "S - 1 columns", "one sample"],
)
def test_entries_of_a_packed_loss(keys, data, message):
    why = "entries of samples would meet other samples' tokens" if message.endswith("; ") else ""
    with refuses(message + why):
        PackedLoss(summed, keys)(data, PLAN, ROWS, slots_local={"logprobs": X})


def test_costs_that_are_tensors():
    cost = torch.tensor(1)
    with refuses(f"costs[0] must be a plain number, got {cost!r}; sums of it would not be exact. Call .tolist()"):
        bin_samples(torch.tensor([1, 2]), capacity=4)
    with refuses("bins_multiple_of must be at least 1, got 1.5; no rank would get a bin"):
        bin_samples([1, 2], capacity=4, bins_multiple_of=1.5)
