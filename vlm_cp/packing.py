"""Samples -> bins (micro-batches) by cost: as few as fit, the same number on every data-parallel rank, evenly filled.

First-fit decreasing fixes how many bins there are; longest-processing-time-first then levels them, since data-parallel
ranks wait for the slowest. No library does this as it has to be done: `binpacking` 2.0.1 takes an item larger than a bin
and answers nothing with one empty bin, `numberpartitioning` has had no release since 2021, and `prtpy` brings an
integer-programming solver along. What is needed of them is the 20 lines below.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heapreplace
from math import isfinite, lcm
from numbers import Real


def bin_samples(costs: Sequence[float], *, capacity: float, bins_multiple_of: int = 1) -> list[list[int]]:
    """Sample indices of each bin: every sample once, no bin above `capacity`, the dearest bin first, indices ascending.

    costs: one a sample, above 0: padded lengths, or `cost.sample_costs`. Sums are exact, floats included.
    bins_multiple_of: data-parallel ranks; rank r takes `bins[r::bins_multiple_of]`, so all have the same number and bins
    that run at the same time cost about the same. Every rank must call this with the costs of all ranks' samples.
    With k bins at the end, k rounded up to `bins_multiple_of` from first-fit decreasing's number (at most 11/9 of the least
    possible + 6/9), the dearest bin costs at most 4/3 of what the best choice of k bins could reach.
    `restore_order` brings results back into the samples' order.

    >>> bin_samples([3, 9, 4, 5, 2], capacity=10, bins_multiple_of=2)
    [[1], [0, 4], [3], [2]]
    """
    _check(costs, capacity, bins_multiple_of)
    units, room = _whole_units(costs, capacity)
    dearest_first = sorted(range(len(units)), key=lambda sample: -units[sample])
    bins = _first_fit(dearest_first, units, room)
    count = -(-len(bins) // bins_multiple_of) * bins_multiple_of
    if count > len(units):
        raise ValueError(
            f"costs must hold at least {count} samples to fill {count} bins, a multiple of {bins_multiple_of}, got {len(units)}; "
            "a data-parallel rank would have no micro-batch and the others would wait for it"
        )
    level = _level(dearest_first, units, count)
    bins = level if max(_loads(level, units)) <= room else _split(bins, units, count)
    loads = _loads(bins, units)
    order = sorted(range(count), key=lambda index: (-loads[index], min(bins[index])))
    return [sorted(bins[index]) for index in order]


def restore_order[T](bins: Sequence[Sequence[int]], outputs: Sequence[Sequence[T]]) -> list[T]:
    """The inverse of `bin_samples`: one result a sample, in the samples' order, from each bin's results in its order.

    Of results held by data-parallel ranks, bin b's are rank b % dp's, its b // dp-th.

    >>> restore_order([[1], [3], [0, 4], [2]], [["b"], ["d"], ["a", "e"], ["c"]])
    ['a', 'b', 'c', 'd', 'e']
    """
    found, expected = list(map(len, outputs)), list(map(len, bins))
    if found != expected:
        raise ValueError(
            f"outputs must have one entry a sample of each bin, {expected}, got {found}; results would move to other samples"
        )
    by_sample = {i: x for bin_, xs in zip(bins, outputs, strict=True) for i, x in zip(bin_, xs, strict=True)}
    if sorted(by_sample) != list(range(sum(expected))):
        raise ValueError(
            f"bins must hold each of the samples 0 to {sum(expected) - 1} once, got {[list(bin_) for bin_ in bins]}; results would be lost"
        )
    return [by_sample[sample] for sample in range(len(by_sample))]


def _check(costs: Sequence[float], capacity: float, bins_multiple_of: int) -> None:
    if not isinstance(bins_multiple_of, int) or bins_multiple_of < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"bins_multiple_of must be at least 1, got {bins_multiple_of}; no rank would get a bin")
    for name, number in [("capacity", capacity), *((f"costs[{sample}]", cost) for sample, cost in enumerate(costs))]:
        if not isinstance(number, Real):
            raise ValueError(
                f"{name} must be a plain number, got {number!r}; sums of it would not be exact. Call .tolist()"
            )
    if not (isfinite(capacity) and capacity > 0):
        raise ValueError(f"capacity must be finite and above 0, got {capacity}; a bin would never be full")
    if not len(costs):
        raise ValueError(
            "costs must hold at least one sample, got none; the step would have no micro-batch on any rank"
        )
    for sample, cost in enumerate(costs):
        if not (isfinite(cost) and cost > 0):
            raise ValueError(
                f"costs[{sample}] must be finite and above 0, got {cost}; bins would be filled without regard to it"
            )
        if cost > capacity:
            raise ValueError(
                f"costs[{sample}] must be at most the capacity {capacity}, got {cost}; "
                "its bin would run out of memory. Shorten or drop the sample, or raise the capacity"
            )


def _whole_units(costs: Sequence[float], capacity: float) -> tuple[list[int], int]:
    """Costs and capacity as integers of one common unit, so that sums are exact and do not depend on their order."""
    fractions = [Fraction(cost) for cost in costs]
    unit = lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * unit) for fraction in fractions], int(Fraction(capacity) * unit)


def _first_fit(samples: Sequence[int], units: Sequence[int], room: int) -> list[list[int]]:
    bins: list[list[int]] = []
    left: list[int] = []
    for sample in samples:
        cost = units[sample]
        index = next((i for i, free in enumerate(left) if free >= cost), len(left))
        if index == len(left):
            bins.append([])
            left.append(room)
        bins[index].append(sample)
        left[index] -= cost
    return bins


def _level(samples: Sequence[int], units: Sequence[int], count: int) -> list[list[int]]:
    """Every sample, the dearest first, into the bin that holds least (Graham 1969: at most 4/3 - 1/(3 count) of the best)."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, index) for index in range(count)]
    heapify(heap)
    for sample in samples:
        load, index = heap[0]
        bins[index].append(sample)
        heapreplace(heap, (load + units[sample], index))
    return bins


def _split(bins: list[list[int]], units: Sequence[int], count: int) -> list[list[int]]:
    """`count` bins from fewer: the dearest bin that holds several samples is halved until there are enough."""
    bins = [list(bin_) for bin_ in bins]
    while len(bins) < count:
        loads = _loads(bins, units)
        index = max((i for i, bin_ in enumerate(bins) if len(bin_) > 1), key=lambda i: loads[i])
        kept, given = _level(bins[index], units, 2)
        bins[index] = kept
        bins.append(given)
    return bins


def _loads(bins: Sequence[Sequence[int]], units: Sequence[int]) -> list[int]:
    return [sum(units[sample] for sample in bin_) for bin_ in bins]
