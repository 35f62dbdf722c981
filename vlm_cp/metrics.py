"""Metrics that declare how they are reduced, and losses written for single samples run on packed batches.

A metric is (value, reduction, count): sums add, means are weighed by count, extrema fold. Count 0 means that nothing was
measured; the value is then ignored, whatever it is. So folding is associative over samples, micro-batches and ranks, an
empty part changes nothing, and a real infinity or NaN, whose count is not 0, is not mistaken for "nothing" and hidden.
Only `reduce_metrics`, which ends it, turns what is still empty into a number to log.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from vlm_cp import comm
from vlm_cp.batch import postprocess_packed_seqs
from vlm_cp.plan import SequencePlan

MetricReduction = Literal["sum", "mean", "min", "max"]
Number = int | float | Tensor


@dataclass(frozen=True)
class Metric:
    """value: a number or a 0-dim tensor, which stays on its device until `reduce_metrics`. count: of what it was measured on.

    A mean over ranks whose parts were already divided by a global count is a "sum".
    """

    value: Number
    reduction: MetricReduction
    count: Number = 1

    def __post_init__(self) -> None:
        if self.reduction not in get_args(MetricReduction):
            raise ValueError(
                f"reduction must be one of {', '.join(get_args(MetricReduction))}, got {self.reduction!r}; extrema would be added up"
            )
        for name, x in (("value", self.value), ("count", self.count)):
            if isinstance(x, Tensor) and x.ndim:
                raise ValueError(
                    f"{name} must be one number, got shape {tuple(x.shape)}; it would be cut to its first entry"
                )
        if not isinstance(self.count, Tensor) and not self.count >= 0:
            raise ValueError(f"count must be at least 0, got {self.count}; what was measured would pass for nothing")

    @classmethod
    def named(cls, name: str, value: Metric | Number) -> Metric:
        """`value` itself when it is a Metric; else by its name: "..._min" and "..._max" are extrema, everything else a sum.

        The suffix decides, not a part in the middle (`rate_minibatch`, `num_max_len_samples`). An undeclared extremum that
        is its reduction's identity, inf for a minimum, counts as empty: so producers say that they had no valid element.
        """
        if isinstance(value, Metric):
            return value
        # Of a tensor `count` is a tensor, so that no device is asked.
        if name.endswith("_min"):
            return cls(value, "min", (value != math.inf) * 1)
        if name.endswith("_max"):
            return cls(value, "max", (value != -math.inf) * 1)
        return cls(value, "sum")


def masked_min(x: Tensor, mask: Tensor) -> Metric:
    """The least entry where `mask` is not 0; empty where there is none. No host sync, like its siblings."""
    return Metric(_masked(x, mask, math.inf).amin(), "min", (mask != 0).sum())


def masked_max(x: Tensor, mask: Tensor) -> Metric:
    """The largest entry where `mask` is not 0."""
    return Metric(_masked(x, mask, -math.inf).amax(), "max", (mask != 0).sum())


def masked_mean(x: Tensor, mask: Tensor) -> Metric:
    """The mean weighed by `mask`, its count the weights' sum."""
    weights = mask.to(torch.float64)
    total = weights.sum()
    return Metric(_masked(_fits(x, mask) * weights, mask, 0).sum() / total.where(total > 0, 1), "mean", total)


def masked_sum(x: Tensor, mask: Tensor) -> Metric:
    """The sum weighed by `mask`."""
    return Metric(_masked(_fits(x, mask) * mask, mask, 0).sum(), "sum", (mask != 0).sum())


def _fits(x: Tensor, mask: Tensor) -> Tensor:
    if x.shape != mask.shape:
        raise ValueError(
            f"mask must have x's shape {tuple(x.shape)}, got {tuple(mask.shape)}; it would be spread over other entries"
        )
    return x


def _masked(x: Tensor, mask: Tensor, fill: float) -> Tensor:
    kept = _fits(x, mask).detach().to(torch.float64).where(mask != 0, fill).flatten()
    return torch.cat([kept, kept.new_tensor([fill])])  # an extremum of no entries at all is none


def merge_metrics(dicts: Iterable[Mapping[str, Metric | Number]]) -> dict[str, Metric]:
    """Folds metrics of samples, micro-batches or ranks, name by name; a name that some lack is folded over the others.

    Plain numbers are read by their names (`Metric.named`). Two reductions under one name: `ValueError`.
    """
    if isinstance(dicts, Mapping):
        raise ValueError(
            f"dicts must be a sequence of mappings, got one mapping of {list(dicts)}; its names would be taken for metrics"
        )
    found: dict[str, list[Metric]] = {}
    for metrics in dicts:
        for name, value in metrics.items():
            found.setdefault(name, []).append(Metric.named(name, value))
    return {name: _fold(name, parts) for name, parts in found.items()}


def _fold(name: str, parts: Sequence[Metric]) -> Metric:
    reductions = {part.reduction for part in parts}
    if len(reductions) > 1:
        raise ValueError(
            f"{name} must have one reduction everywhere, got {', '.join(sorted(reductions))}; the result would depend on the order"
        )
    reduction = parts[0].reduction
    numbers = [x for part in parts for x in (part.value, part.count)]
    devices = {x.device for x in numbers if isinstance(x, Tensor)}
    # An accelerator before the CPU: numbers can go there without a sync, and not come from there.
    device = max(devices, key=lambda d: d.type != "cpu", default=torch.device("cpu"))
    stacked = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device).detach() for x in numbers])
    value, count = _folded(stacked[0::2], stacked[1::2], reduction)
    return Metric(value, reduction, count) if devices else Metric(value.item(), reduction, count.item())


def _folded(values: Tensor, counts: Tensor, reduction: MetricReduction) -> tuple[Tensor, Tensor]:
    measured, count = counts > 0, counts.sum()
    if reduction == "min":
        return values.where(measured, math.inf).amin(), count
    if reduction == "max":
        return values.where(measured, -math.inf).amax(), count
    if reduction == "sum":
        return values.where(measured, 0).sum(), count
    return (values * counts).where(measured, 0).sum() / count.where(count > 0, 1), count


def reduce_metrics(
    dicts: Iterable[Mapping[str, Metric | Number]], *, group: dist.ProcessGroup | None = None, empty: float = -1.0
) -> dict[str, float]:
    """Merges this rank's metrics, folds them over the ranks of `group`, and ends in plain numbers, the same on every rank.

    group: the ranks whose metrics are parts of the whole. Metrics of a rank's own slots: DP and CP ranks together; metrics
    that every CP rank computed of the whole micro-batch: DP ranks only, or sums would be c times too large.
    empty: what a mean or an extremum over nothing is logged as; a sum over nothing is 0.
    One gather of objects: `ReduceOp.MIN` and `MAX` would drop NaN, and ranks may lack names. Call it once a step.
    """
    if group is None or comm.group_size(group) == 1:
        return {name: _final(m, empty) for name, m in merge_metrics(dicts).items()}
    own: dict[str, Metric] | str
    try:
        own = {name: Metric(float(m.value), m.reduction, float(m.count)) for name, m in merge_metrics(dicts).items()}
    except ValueError as error:
        own = str(error)  # gathered in place of the metrics: the others would wait for them
    parts = [own] * comm.group_size(group)
    dist.all_gather_object(parts, own, group=group)
    for rank, part in enumerate(parts):
        if isinstance(part, str):
            raise ValueError(f"{part} (found on rank {rank} of {len(parts)})")
    return {name: _final(m, empty) for name, m in merge_metrics(p for p in parts if not isinstance(p, str)).items()}


def _final(metric: Metric, empty: float) -> float:
    return empty if metric.count == 0 and metric.reduction != "sum" else float(metric.value)


# Losses that were written for padded rows.

LossFunction = Callable[[Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Metric | Number]]]


def packing_invariant[F: Callable[..., Any]](loss_fn: F) -> F:
    """Declares that the loss of a batch of rows is the sum of its rows' losses, however the rows are padded.

    So it is for sums over tokens or samples that are divided by counts of the whole step, given as constants. It is not
    for a loss that divides by what it sees in its rows. On a class: set `packing_invariant = True`.
    """
    loss_fn.packing_invariant = True  # pyright: ignore[reportFunctionMemberAccess]
    return loss_fn


@dataclass(frozen=True)
class PackedLoss:
    """Runs a loss of padded rows, data -> (loss, metrics), on a packed batch under context parallelism.

    A `packing_invariant` loss is called once with all rows, and gives bit for bit what it gives unpacked. Any other is called
    sample by sample, on rows without padding, and its results are added up: a warning says so, since a loss that divides by
    what it sees then depends on the batching.
    token_keys: which entries of the data are [B, S, ...]; the others are [B, ...], one entry a sample, and never cut.
    """

    loss_fn: LossFunction
    token_keys: Collection[str]

    def __post_init__(self) -> None:
        if not self.in_one_call:
            name = getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)
            warnings.warn(
                f"{name} is not declared packing_invariant: it runs sample by sample, and if it divides by what it sees, "
                "its value depends on how samples are batched",
                stacklevel=3,
            )

    @property
    def in_one_call(self) -> bool:
        return bool(getattr(self.loss_fn, "packing_invariant", False))

    def __call__(
        self,
        data: Mapping[str, Tensor],
        plan: SequencePlan,
        attention_mask: Tensor,
        *,
        slots_local: Mapping[str, Tensor],
        align: Literal["slot", "token"] = "slot",
        group: dist.ProcessGroup | None = None,
    ) -> tuple[Tensor, dict[str, Metric]]:
        """The loss of the whole micro-batch, on every CP rank, and its metrics; see `losses.replicated_loss`.

        data: rows as the loss takes them. slots_local: what this rank computed, [T/c, ...] scalars (logprobs, values), added to
        the data as rows; align: "slot" puts the logprob of token j + 1 at column j, "token" the value before token j there.
        attention_mask: [B, S] of the rows, one sample each.
        """
        if len(attention_mask) != len(plan.lengths):
            raise ValueError(
                f"attention_mask must have one row a sample, {len(plan.lengths)} in all, got {len(attention_mask)}; "
                "entries of samples would meet other samples' tokens"
            )
        gathered = {
            name: postprocess_packed_seqs(x, plan, attention_mask, group=group, align=align)
            for name, x in slots_local.items()
        }
        rows = {**data, **gathered}
        self._check_rows(rows, attention_mask, gathered)
        if self.in_one_call:
            loss, metrics = self.loss_fn(rows)
            return loss, merge_metrics([metrics])
        return self._by_sample(rows, attention_mask.bool(), {*self.token_keys, *gathered})

    def _check_rows(self, rows: Mapping[str, Tensor], attention_mask: Tensor, gathered: Collection[str]) -> None:
        unknown = sorted(set(self.token_keys) - set(rows))
        if unknown:
            raise ValueError(
                f"token_keys must be entries of the data, got {', '.join(unknown)}; they would be cut as samples are"
            )
        for name, x in rows.items():
            wanted = tuple(attention_mask.shape) if name in {*self.token_keys, *gathered} else (len(attention_mask),)
            if tuple(x.shape[: len(wanted)]) != wanted:
                raise ValueError(
                    f"{name} must have shape [{', '.join(map(str, wanted))}, ...], got {tuple(x.shape)}; "
                    "entries of samples would meet other samples' tokens"
                )

    def check(self, data: Mapping[str, Tensor], attention_mask: Tensor, *, rtol: float = 1e-6) -> None:
        """Raises `ValueError` where a loss that declares itself packing-invariant is not, on this data in padded rows."""
        together, _ = self.loss_fn(data)
        apart, _ = self._by_sample(data, attention_mask.bool(), set(self.token_keys))
        if self.in_one_call and not torch.allclose(together, apart, rtol=rtol, atol=0):
            raise ValueError(
                f"a packing_invariant loss must be the sum of its samples' losses, got {float(together)} of all rows and "
                f"{float(apart)} added up; packed and unpacked training would differ"
            )

    def _by_sample(
        self, rows: Mapping[str, Tensor], mask: Tensor, token_keys: Collection[str]
    ) -> tuple[Tensor, dict[str, Metric]]:
        results = [
            self.loss_fn({k: x[i][own][None] if k in token_keys else x[i : i + 1] for k, x in rows.items()})
            for i, own in enumerate(mask)
        ]
        return torch.stack([loss for loss, _ in results]).sum(), merge_metrics(metrics for _, metrics in results)
