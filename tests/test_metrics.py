import itertools
import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor

from vlm_cp.alignment import Alignment
from vlm_cp.losses import replicated_loss
from vlm_cp.metrics import (
    Metric,
    PackedLoss,
    masked_max,
    masked_mean,
    masked_min,
    masked_sum,
    merge_metrics,
    packing_invariant,
    reduce_metrics,
)
from vlm_cp.plan import SequencePlan

SAMPLES = ([3.0, 5, 4], [6.0, 9, 7], [8.0, 8.5, 8.2])


def of_samples(masks: list[list[int]]) -> list[dict[str, Metric]]:
    return [
        {
            "values_min": masked_min(torch.tensor(x), torch.tensor(m)),
            "values_max": masked_max(torch.tensor(x), torch.tensor(m)),
        }
        for x, m in zip(SAMPLES, masks, strict=True)
    ]


def test_b29_extrema_of_samples_are_not_added_up() -> None:
    spans = [(-3.0, 1.0), (0.5, 9.0), (2.0, 4.0)]
    declared = [{"v": Metric(low, "min"), "w": Metric(high, "max")} for low, high in spans]
    assert reduce_metrics(declared) == {"v": -3, "w": 9}
    by_name = [{"values_min": low, "values_max": high} for low, high in spans]
    assert reduce_metrics(by_name) == {"values_min": -3, "values_max": 9}


def test_b28_fully_masked_sample_is_no_extremum() -> None:
    found = reduce_metrics(of_samples([[1, 1, 1], [1, 1, 1], [0, 0, 0]]))
    assert found == {"values_min": 3, "values_max": 9}
    low = [{"values_min": masked_min(torch.tensor([v]), torch.tensor([m]))} for v, m in ((0.0, 0), (3.0, 1))]
    assert reduce_metrics(low) == {"values_min": 3}  # 0 of the masked one would be less


def test_b29_all_masked_logs_minus_one_and_only_at_the_end() -> None:
    samples = of_samples([[0, 0, 0]] * 3)
    assert reduce_metrics(samples) == {"values_min": -1, "values_max": -1}
    merged = merge_metrics(samples)
    assert (float(merged["values_min"].value), float(merged["values_max"].value)) == (math.inf, -math.inf)
    assert reduce_metrics([merged, {"values_min": Metric(7.0, "min"), "values_max": Metric(7.0, "max")}]) == {
        "values_min": 7,
        "values_max": 7,
    }
    assert reduce_metrics([{"x": Metric(math.nan, "mean", 0), "n": Metric(0, "sum")}], empty=-7.0) == {"x": -7, "n": 0}


def test_b29_sums_and_means_still_add_up() -> None:
    parts = [
        {"loss": 0.25, "tokens": 3, "m": Metric(10.0, "mean", 1)},
        {"loss": 0.5, "tokens": 4, "m": Metric(1.0, "mean", 3)},
    ]
    assert reduce_metrics(parts) == {"loss": 0.75, "tokens": 7, "m": 13 / 4}


@pytest.mark.parametrize(
    "name",
    ["rate_minibatch", "num_max_len_samples", "grad_minmax_gap", "tokens_minus", "loss_max_t0", "min_reward", "max"],
)
def test_b29_names_with_min_or_max_inside_are_sums(name: str) -> None:
    assert reduce_metrics([{name: 2.0}, {name: 5.0}]) == {name: 7}


@pytest.mark.parametrize("reduction", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_b29_nan_and_infinities_surface(reduction: str, order: tuple[int, ...]) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        parts = [Metric(1.0, reduction), Metric(bad, reduction, 2), Metric(-math.inf, reduction, 0)]
        found = reduce_metrics([{"x": parts[i]} for i in order])["x"]
        hides = (reduction, bad) in (("min", math.inf), ("max", -math.inf))
        assert math.isnan(found) if math.isnan(bad) else found == (1 if hides else bad)
    assert reduce_metrics([{"x": Metric(math.inf, "min", 2)}]) == {"x": math.inf}


def test_undeclared_extrema_are_empty_at_their_identity_and_nowhere_else() -> None:
    assert reduce_metrics([{"r_min": math.inf, "r_max": -math.inf}]) == {"r_min": -1, "r_max": -1}
    assert reduce_metrics([{"r_min": -math.inf, "r_max": math.inf}]) == {"r_min": -math.inf, "r_max": math.inf}
    assert math.isnan(reduce_metrics([{"r_min": math.nan}, {"r_min": 1.0}])["r_min"])
    assert reduce_metrics([{"r_min": torch.tensor(math.inf)}, {"r_min": torch.tensor(4.0)}]) == {"r_min": 4}


NUMBERS = st.integers(-64, 64).map(lambda n: n / 8)  # exact in every order
PARTS = st.lists(st.tuples(NUMBERS, st.integers(0, 4)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(parts=PARTS, cuts=st.lists(st.integers(0, 8), max_size=3), seed=st.integers(0, 99), tensors=st.booleans())
def test_merging_is_associative_in_any_order(
    parts: list[tuple[float, int]], cuts: list[int], seed: int, tensors: bool
) -> None:
    def metrics(value: float, count: int) -> dict[str, Metric]:
        v, n = (torch.tensor(float(value)), torch.tensor(count)) if tensors else (value, count)
        return {r: Metric(v, r, n) for r in ("sum", "mean", "min", "max")}

    dicts = [metrics(*part) for part in parts]
    shuffled = [dicts[i] for i in torch.randperm(len(dicts), generator=torch.Generator().manual_seed(seed))]
    bounds = [0, *sorted(min(c, len(dicts)) for c in cuts), len(dicts)]
    groups = [merge_metrics(shuffled[a:b]) for a, b in itertools.pairwise(bounds)]
    found = reduce_metrics(groups)
    counted = [(v, n) for v, n in parts if n]
    total = sum(n for _, n in counted)
    assert found["sum"] == sum(v for v, _ in counted)
    assert found["min"] == min((v for v, _ in counted), default=-1)
    assert found["max"] == max((v for v, _ in counted), default=-1)
    assert found["mean"] == pytest.approx(sum(v * n for v, n in counted) / total if total else -1, abs=1e-12)


def reduced_on_rank(rank: int, cp_size: int) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of this CP rank's own slots, and the same with a rank that has none of them."""
    plan = SequencePlan.from_lengths([1, 13, 2, 7], alignment=Alignment(cp_size=cp_size))
    x = torch.arange(plan.total_tokens).double().where(plan.valid, torch.nan)
    real = torch.arange(float(sum(plan.lengths))) - 4
    x = x.index_copy(0, plan.real_index, real.double())
    mask = plan.scored & (plan.sample_index != 3)
    own, own_mask = plan.shard(x, rank), plan.shard(mask, rank)
    metrics: dict[str, Metric] = {
        "x_min": masked_min(own, own_mask),
        "x_max": masked_max(own, own_mask),
        "x_mean": masked_mean(own, own_mask),
        "x_sum": masked_sum(own, own_mask),
        "tokens": Metric(own_mask.sum(), "sum"),
        "nan_min": Metric(math.nan if rank == 0 else 1.0, "min"),
    }
    group = torch.distributed.group.WORLD
    lacking: list[Mapping[str, Metric]] = [] if rank else [metrics]
    return reduce_metrics([metrics], group=group), reduce_metrics(lacking, group=group)


def test_b27_b29_metrics_are_the_same_for_every_cp_and_on_every_rank() -> None:
    expected = {"x_min": -3, "x_max": 10, "x_mean": None, "x_sum": None, "tokens": 13}
    mean = None
    for cp_size in (1, 2, 4):
        for found, lacking in run_ranks(cp_size, reduced_on_rank, cp_size):
            assert {k: found[k] for k in ("x_min", "x_max", "tokens")} == {
                k: v for k, v in expected.items() if v is not None
            }
            mean = found["x_mean"] if mean is None else mean
            assert found["x_mean"] == pytest.approx(mean, abs=1e-12)
            assert found["x_sum"] == pytest.approx(13 * mean, abs=1e-12)
            assert math.isnan(found["nan_min"])
            assert lacking.keys() == found.keys()


def test_masked_metrics_of_nothing_at_all() -> None:
    nothing, mask = torch.empty(0), torch.empty(0, dtype=torch.bool)
    for fn in (masked_min, masked_max, masked_mean):
        assert reduce_metrics([{"x": fn(nothing, mask)}]) == {"x": -1}
    assert reduce_metrics([{"x": masked_sum(nothing, mask)}]) == {"x": 0}


def test_masked_metrics_weigh_and_ignore_what_is_masked() -> None:
    x, weights = torch.tensor([1.0, math.nan, 3.0]), torch.tensor([0.5, 0.0, 1.5])
    found = reduce_metrics(
        [{"mean": masked_mean(x, weights), "sum": masked_sum(x, weights), "min": masked_min(x, weights)}]
    )
    assert found == {"mean": 5 / 2, "sum": 5, "min": 1}


def test_reduction_conflicts_and_bad_metrics_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^x must have one reduction everywhere, got max, sum; the result would depend on the order$"
    ):
        merge_metrics([{"x": Metric(1, "max")}, {"x": 2.0}])
    with pytest.raises(
        ValueError, match=r"^reduction must be one of sum, mean, min, max, got 'avg'; extrema would be added up$"
    ):
        Metric(1, "avg")
    with pytest.raises(
        ValueError, match=r"^value must be one number, got shape \(2,\); it would be cut to its first entry$"
    ):
        Metric(torch.zeros(2), "sum")


# Packed losses.


@packing_invariant
def clipped_loss(data: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Metric]]:
    """A policy loss as frameworks write it: rows, divided by the whole step's count."""
    mask = data["mask"] * data["sample_mask"][:, None]
    ratio = (data["logprobs"] - data["old"]).exp()
    terms = -torch.minimum(ratio * data["advantages"], ratio.clamp(0.8, 1.2) * data["advantages"])
    loss = terms.where(mask != 0, 0).sum() / 31
    return loss, {"ratio_min": masked_min(ratio, mask), "tokens": Metric((mask != 0).sum(), "sum")}


def local_mean_loss(data: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Metric]]:
    """Divides by the tokens that it sees."""
    mask = data["mask"] != 0
    return -data["logprobs"].where(mask, 0).sum() / mask.sum().clamp(min=1), {}


LENGTHS = (3, 9, 1, 6)
TOKEN_KEYS = ("mask", "old", "advantages")


def make_rows(cp_size: int) -> tuple[dict[str, Tensor], Tensor, SequencePlan, Tensor]:
    """Data in rows, left-padded; the mask of the rows, the plan, and logprobs [T] of its slots."""
    generator = torch.Generator().manual_seed(0)
    shape = len(LENGTHS), 10
    attention_mask = torch.arange(10) >= 10 - torch.tensor(LENGTHS)[:, None]
    data = {key: torch.randn(shape, generator=generator, dtype=torch.float64) for key in TOKEN_KEYS}
    data["mask"] = (data["mask"] > -0.5) & attention_mask
    data["sample_mask"] = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    data["rewards"] = torch.randn(len(LENGTHS), 7, generator=generator)  # [B, k], not a sequence
    plan = SequencePlan.from_lengths(LENGTHS, alignment=Alignment(cp_size=cp_size))
    real = -torch.rand(sum(LENGTHS), generator=generator, dtype=torch.float64)
    return data, attention_mask, plan, plan.pack(real.split(LENGTHS), torch.nan)


def packed_on_rank(rank: int, cp_size: int) -> tuple[Tensor, Tensor, dict[str, float]]:
    data, attention_mask, plan, logprobs = make_rows(cp_size)
    own = plan.shard(logprobs, rank).clone().requires_grad_()
    group = torch.distributed.group.WORLD if cp_size > 1 else None
    packed = PackedLoss(clipped_loss, TOKEN_KEYS)
    loss, metrics = packed(data, plan, attention_mask, slots_local={"logprobs": own}, group=group)
    replicated_loss(loss, 1, cp_rank=rank).local_sum.backward()
    return loss.detach(), own.grad, reduce_metrics([metrics])


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_b30_packed_loss_is_the_unpacked_one_bit_for_bit(cp_size: int) -> None:
    data, attention_mask, plan, logprobs = make_rows(cp_size)
    rows = torch.zeros(attention_mask.shape, dtype=torch.float64)
    rows[attention_mask] = logprobs[plan.real_index]
    rows.requires_grad_()
    expected, metrics = clipped_loss({**data, "logprobs": rows})
    expected.backward()
    gradient = plan.pack_rows(rows.grad, attention_mask, 0)
    for rank, (loss, grad, found) in enumerate(run_ranks(cp_size, packed_on_rank, cp_size)):
        assert torch.equal(loss, expected)
        assert torch.equal(grad, plan.shard(gradient, rank))
        assert found == reduce_metrics([metrics])


@pytest.mark.parametrize("cp_size", [1, 2])
def test_b30_other_losses_run_sample_by_sample_and_say_so(cp_size: int) -> None:
    data, attention_mask, plan, logprobs = make_rows(1)
    message = (
        "local_mean_loss is not declared packing_invariant: it runs sample by sample, and if it divides by what it sees, "
        "its value depends on how samples are batched"
    )
    with pytest.warns(UserWarning, match=f"^{message}$"):
        packed = PackedLoss(local_mean_loss, TOKEN_KEYS)
    loss, _ = packed(data, plan, attention_mask, slots_local={"logprobs": logprobs})
    parts = [
        -(x[m].mean() if m.any() else x.new_zeros(()))
        for x, m in (
            (logprobs[plan.real_index].split(LENGTHS)[i], data["mask"][i][attention_mask[i]])
            for i in range(len(LENGTHS))
        )
    ]
    torch.testing.assert_close(loss, torch.stack(parts).sum(), rtol=1e-14, atol=0)


def test_b30_a_false_declaration_is_found() -> None:
    data, attention_mask, _, _ = make_rows(1)
    data["logprobs"] = -torch.rand(attention_mask.shape, dtype=torch.float64)
    keys = (*TOKEN_KEYS, "logprobs")
    PackedLoss(clipped_loss, keys).check(data, attention_mask)
    liar = PackedLoss(packing_invariant(lambda rows: local_mean_loss(rows)), keys)
    with pytest.raises(
        ValueError, match=r"^a packing_invariant loss must be the sum of its samples' losses, got 0\.\d+ of all rows"
    ):
        liar.check(data, attention_mask)


def test_b53_only_declared_keys_are_cut_like_tokens() -> None:
    data, attention_mask, plan, logprobs = make_rows(1)
    seen: list[dict[str, tuple[int, ...]]] = []

    class Recorder:
        packing_invariant = False

        def __call__(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Metric]]:
            seen.append({k: tuple(x.shape) for k, x in rows.items()})
            return rows["logprobs"].sum(), {}

    with pytest.warns(UserWarning, match=r"^Recorder is not declared"):
        packed = PackedLoss(Recorder(), TOKEN_KEYS)
    packed(data, plan, attention_mask, slots_local={"logprobs": logprobs})
    for shapes, length in zip(seen, LENGTHS, strict=True):
        assert {shapes[k] for k in (*TOKEN_KEYS, "logprobs")} == {(1, length)}
        assert shapes["rewards"] == (1, 7)
        assert shapes["sample_mask"] == (1,)


def test_rows_of_several_samples_are_refused() -> None:
    data, attention_mask, plan, logprobs = make_rows(1)
    with pytest.raises(
        ValueError, match=r"^attention_mask must have one row a sample, 4 in all, got 3; entries of samples would"
    ):
        PackedLoss(clipped_loss, TOKEN_KEYS)(data, plan, attention_mask[:3], slots_local={"logprobs": logprobs})


def test_extrema_of_one_sign_are_not_hidden_by_what_is_masked():
    mask = torch.tensor([1, 1, 0])
    assert masked_max(torch.tensor([-3.0, -1.0, 5.0]), mask).value == -1
    assert masked_min(torch.tensor([3.0, 1.0, -5.0]), mask).value == 1


def test_small_losses_are_held_to_their_own_size():
    """A loss of 1e-4 that depends on its batch differs by less than any absolute tolerance."""

    @packing_invariant
    def averaged(data):
        return 1e-4 * data["x"].mean(), {}

    message = "a packing_invariant loss must be the sum of its samples' losses, got "
    with pytest.raises(ValueError, match=f"^{message}"):
        PackedLoss(averaged, ["x"]).check({"x": torch.ones(2, 3)}, torch.ones(2, 3))
