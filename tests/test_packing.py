"""Bins: nothing lost, nothing over capacity, as few and as level as theory says, the same number on every DP rank."""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from math import ceil, fsum, inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_cp.alignment import Alignment
from vlm_cp.packing import bin_samples, restore_order
from vlm_cp.plan import SequencePlan

COSTS = st.lists(st.one_of(st.integers(1, 100), st.floats(0.1, 100)), min_size=1, max_size=40)


def loads(bins: list[list[int]], costs: list[float]) -> list[float]:
    return [fsum(costs[sample] for sample in bin_) for bin_ in bins]


@given(costs=COSTS, multiple=st.integers(1, 4), extra=st.floats(1, 4))
def test_every_sample_once_within_capacity_and_the_same_number_a_rank(
    costs: list[float], multiple: int, extra: float
) -> None:
    capacity = max(costs) * extra
    costs = costs * multiple  # enough for one sample a bin
    bins = bin_samples(costs, capacity=capacity, bins_multiple_of=multiple)
    assert sorted(sample for bin_ in bins for sample in bin_) == list(range(len(costs)))
    assert all(bins)
    assert len(bins) % multiple == 0
    assert max(loads(bins, costs)) <= capacity
    assert bins == [sorted(bin_) for bin_ in bins]
    assert loads(bins, costs) == sorted(loads(bins, costs), reverse=True)
    # Two bins that were opened for want of room hold more than one capacity together.
    assert len(bins) <= multiple * ceil((2 * fsum(costs) / capacity + 1) / multiple)


@cache
def best_fills(costs: tuple[int, ...], count: int) -> int:
    """The least possible load of the dearest of `count` bins, by trying everything."""
    best = sum(costs)
    for choice in product(range(count), repeat=len(costs) - 1):
        sums = [0] * count
        for cost, index in zip(costs, (0, *choice), strict=True):
            sums[index] += cost
        best = min(best, max(sums))
    return best


@settings(max_examples=40, deadline=None)
@given(costs=st.lists(st.integers(1, 20), min_size=1, max_size=6), extra=st.integers(0, 12))
def test_the_number_and_the_level_of_bins_are_near_the_best(costs: list[int], extra: int) -> None:
    capacity = max(costs) + extra
    bins = bin_samples(costs, capacity=capacity)
    least = next(n for n in range(1, len(costs) + 1) if best_fills(tuple(costs), n) <= capacity)
    assert 9 * len(bins) <= 11 * least + 6
    count = len(bins)
    dearest = max(loads(bins, list(costs)))
    assert 3 * count * dearest <= (4 * count - 1) * best_fills(tuple(costs), count)


def test_bins_are_level_where_first_fit_would_leave_one_nearly_empty() -> None:
    costs = [50] * 5
    assert loads(bin_samples(costs, capacity=200), [*costs]) == [150, 100]


def test_a_tight_fit_that_levelling_would_break_is_kept() -> None:
    # Longest first would give (6, 4, 4) and (6, 4): 14 is over 12, while first fit finds (6, 6) and (4, 4, 4).
    assert bin_samples([6, 6, 4, 4, 4], capacity=12) == [[0, 1], [2, 3, 4]]
    # Eight full bins must become nine: levelling all anew would reach 14, so one full bin is halved.
    costs = [6] * 8 + [4] * 12
    assert loads(bin_samples(costs, capacity=12, bins_multiple_of=9), [*costs]) == [12] * 7 + [6, 6]


def test_sums_are_exact() -> None:
    # In floating point 0.1 + 0.2 is above 0.3; exactly, the two floats' sum is too, and 0.125 + 0.25 fills 0.375.
    assert len(bin_samples([0.1, 0.2], capacity=0.3)) == 2
    assert len(bin_samples([0.125, 0.25], capacity=0.375)) == 1
    # Sixteen halves of an ulp each vanish in a running float sum of 1.0; exactly they do not.
    tiny = 2.0**-54
    assert len(bin_samples([1.0, *[tiny] * 16], capacity=1.0)) == 2


def test_b51_data_parallel_ranks_get_the_same_number_of_bins_and_the_order_is_restored() -> None:
    costs = [700, 30, 900, 250, 260, 90, 800, 40, 410, 5]
    bins = bin_samples(costs, capacity=1000, bins_multiple_of=4)
    by_rank = [bins[rank::4] for rank in range(4)]
    assert len({len(own) for own in by_rank}) == 1
    # What each rank computed of its own bins, joined bin by bin.
    outputs = [[10 * costs[sample] for sample in by_rank[b % 4][b // 4]] for b in range(len(bins))]
    assert restore_order(bins, outputs) == [10 * cost for cost in costs]


@given(costs=COSTS, extra=st.floats(1, 4))
def test_restore_order_is_the_inverse(costs: list[float], extra: float) -> None:
    bins = bin_samples(costs, capacity=max(costs) * extra)
    assert restore_order(bins, [[costs[sample] for sample in bin_] for bin_ in bins]) == costs


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=30),
    cp_size=st.sampled_from([1, 2, 3, 4]),
    tp_size=st.sampled_from([1, 2, 4]),
)
def test_b52_bins_of_aligned_costs_hold_their_packed_streams(lengths: list[int], cp_size: int, tp_size: int) -> None:
    """The multiple that sizes the bins is the one that pads the stream: SkyRL bins raw lengths and overflows."""
    alignment = Alignment(cp_size=cp_size, tp_size=tp_size, sequence_parallel=True)
    capacity = 3 * alignment.stream_multiple * 24
    padded = [
        SequencePlan.from_lengths([length], alignment=Alignment(cp_size=cp_size)).total_tokens for length in lengths
    ]
    for bin_ in bin_samples(padded, capacity=capacity):
        plan = SequencePlan.from_lengths([lengths[sample] for sample in bin_], alignment=alignment)
        assert plan.total_tokens <= capacity


def test_raw_lengths_would_overflow_the_bin() -> None:
    """The wrong costs, so that the test above is known to see something."""
    alignment = Alignment(cp_size=4)
    lengths = [1] * 16
    (bin_,) = bin_samples(lengths, capacity=16)
    assert SequencePlan.from_lengths([lengths[i] for i in bin_], alignment=alignment).total_tokens == 128


@pytest.mark.parametrize(
    ("costs", "options", "message"),
    [
        pytest.param(
            [],
            {"capacity": 8},
            "costs must hold at least one sample, got none; the step would have no micro-batch on any rank",
            id="zero-samples",
        ),
        pytest.param(
            [3, 9],
            {"capacity": 8},
            "costs[1] must be at most the capacity 8, got 9; "
            "its bin would run out of memory. Shorten or drop the sample, or raise the capacity",
            id="sample-above-capacity",
        ),
        pytest.param(
            [3, 4, 5],
            {"capacity": 8, "bins_multiple_of": 4},
            "costs must hold at least 4 samples to fill 4 bins, a multiple of 4, got 3; "
            "a data-parallel rank would have no micro-batch and the others would wait for it",
            id="fewer-samples-than-bins",
        ),
        pytest.param(
            [8, 8, 8],
            {"capacity": 8, "bins_multiple_of": 2},
            "costs must hold at least 4 samples to fill 4 bins, a multiple of 2, got 3; "
            "a data-parallel rank would have no micro-batch and the others would wait for it",
            id="fewer-samples-than-the-rounded-number-of-bins",
        ),
        pytest.param(
            [3, 0],
            {"capacity": 8},
            "costs[1] must be finite and above 0, got 0; bins would be filled without regard to it",
            id="zero-cost",
        ),
        pytest.param(
            [nan],
            {"capacity": 8},
            "costs[0] must be finite and above 0, got nan; bins would be filled without regard to it",
            id="nan-cost",
        ),
        pytest.param(
            [3],
            {"capacity": inf},
            "capacity must be finite and above 0, got inf; a bin would never be full",
            id="infinite-capacity",
        ),
        pytest.param(
            [3],
            {"capacity": 8, "bins_multiple_of": 0},
            "bins_multiple_of must be at least 1, got 0; no rank would get a bin",
            id="multiple-of-zero",
        ),
    ],
)
def test_bad_input_is_refused(costs: list[float], options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        bin_samples(costs, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("bins", "outputs", "message"),
    [
        pytest.param(
            [[0, 2], [1]],
            [["a"], ["b"]],
            "outputs must have one entry a sample of each bin, [2, 1], got [1, 1]; results would move to other samples",
            id="a-result-is-missing",
        ),
        pytest.param(
            [[0, 2], [2]],
            [["a", "c"], ["c"]],
            "bins must hold each of the samples 0 to 2 once, got [[0, 2], [2]]; results would be lost",
            id="a-sample-twice",
        ),
    ],
)
def test_results_that_do_not_fit_the_bins_are_refused(
    bins: list[list[int]], outputs: list[list[str]], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        restore_order(bins, outputs)
