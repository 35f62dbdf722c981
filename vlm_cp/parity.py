"""CP=1 against CP=n on the same weights and samples: log-probabilities, loss and every parameter's gradient.

The reference is transformers itself, one sample at a time: it is what the model's authors ship, and it leaks between
samples when it is given a packed row. The bound is not chosen but measured in the same run: CP=1 is computed two more
times by other right arithmetic (another attention kernel; all samples packed into one stream), and the candidate may
differ from the reference by at most `FLOOR_FACTOR` times what those differ by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from vlm_cp.attention import AttentionMethod
from vlm_cp.launch import rank_device, run_ranks
from vlm_cp.subject import Candidate, Numerics, Outcome, Subject, run_packed, run_padded, run_samples
from vlm_cp.trace import Divergence, first_divergence

# Over 8 seeds and 3 families at CP=2, 3 and 4 the candidate stayed at or below 0.9 floors (benchmarks/results/floor_*.json).
FLOOR_FACTOR = 2.0


@dataclass(frozen=True)
class Difference:
    """How far an outcome is from the reference; gradients relative to the reference's norm, parameter by parameter."""

    logprob_max_abs: float
    logprob_mean_abs: float
    loss_abs: float
    grad_norm_ratio: float
    grad_max_rel: float
    worst_parameter: str

    @classmethod
    def between(cls, found: Outcome, reference: Outcome) -> Difference:
        """NaN anywhere stays NaN, and so never passes."""
        deltas = torch.cat([x.double() - y.double() for x, y in zip(found.logprobs, reference.logprobs, strict=True)])
        relative: dict[str, float] = {}
        for name, expected in reference.gradients.items():
            scale = float(expected.double().norm())
            error = float((found.gradients[name].double() - expected.double()).norm())
            relative[name] = error / scale if scale else error
        # A NaN compares as neither larger nor smaller, so it is sorted to the front by hand.
        worst = max(relative, key=lambda name: (relative[name] != relative[name], relative[name]))
        norms = [sum(float(g.double().square().sum()) for g in x.gradients.values()) ** 0.5 for x in (found, reference)]
        return cls(
            logprob_max_abs=float(deltas.abs().max()),
            logprob_mean_abs=float(deltas.abs().sum() / max(1, sum(len(x) - 1 for x in reference.logprobs))),
            loss_abs=abs(found.loss - reference.loss),
            grad_norm_ratio=norms[0] / norms[1],
            grad_max_rel=relative[worst],
            worst_parameter=worst,
        )


@dataclass(frozen=True)
class Bound:
    """The largest differences that pass: `FLOOR_FACTOR` times the measured floor."""

    logprob_max_abs: float
    grad_max_rel: float
    loss_abs: float

    @classmethod
    def from_floors(cls, floors: Sequence[Difference]) -> Bound:
        """Twice the largest difference between two right computations at CP=1; the loss is a mean of log-probabilities."""
        logprob = FLOOR_FACTOR * max(floor.logprob_max_abs for floor in floors)
        return cls(logprob, FLOOR_FACTOR * max(floor.grad_max_rel for floor in floors), logprob)

    def holds(self, found: Difference) -> bool:
        return (
            found.logprob_max_abs <= self.logprob_max_abs
            and found.grad_max_rel <= self.grad_max_rel
            and found.loss_abs <= self.loss_abs
        )


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """The result of `run_parity`; `summary` is what the JSON file holds."""

    subject: Subject = field(repr=False)
    engine: str
    device: str
    dtype: str
    cp: int
    tp: int
    attention: str
    difference: Difference
    floors: Mapping[str, Difference]
    tolerance: Bound
    passed: bool
    first_divergence: Divergence | None
    seconds: Mapping[str, float]
    reference: Outcome = field(repr=False)
    candidate: Outcome = field(repr=False)

    def summary(self) -> dict[str, Any]:
        """Plain numbers and strings, under the fixed keys of design section 2 and a few more."""
        plan = self.subject.batch(self.cp, self.tp).plan
        return {
            "family": self.subject.family,
            "engine": self.engine,
            "device": self.device,
            "dtype": self.dtype,
            "cp": self.cp,
            "tp": self.tp,
            "attention": self.attention,
            "tokens": sum(plan.lengths),
            "padded_tokens": plan.total_tokens,
            "samples": len(plan.lengths),
            **asdict(self.difference),
            "loss": self.reference.loss,
            "floors": {name: asdict(floor) for name, floor in self.floors.items()},
            "tolerance": asdict(self.tolerance),
            "passed": self.passed,
            "first_divergence": None if self.first_divergence is None else asdict(self.first_divergence),
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
        }


def run_parity(
    subject: Subject,
    *,
    cp: int,
    attention: AttentionMethod = "all_gather",
    device: str = "cpu",
    numerics: Numerics = nullcontext,
    candidate: type[Candidate] = Candidate,
    bound: Bound | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> ParityReport:
    """Compares CP=`cp` with CP=1; when they differ, looks for the first module that does.

    device: where `run_ranks` puts the ranks. numerics: a context that the forwards run under.
    bound: given, it replaces the measured one. progress: called with the name of each step before it starts.
    """
    steps = _Steps(progress)
    home = rank_device(device, 0)
    reference = steps.run("reference: transformers, sample by sample", run_samples, subject, home, numerics)
    floors: dict[str, Difference] = {}
    if bound is None:
        kernel = steps.run("floor: another kernel", run_samples, subject, home, numerics, attention="eager")
        order = steps.run("floor: one padded batch", run_padded, subject, home, numerics)
        floors = {"kernel": Difference.between(kernel, reference), "order": Difference.between(order, reference)}
    tolerance = bound or Bound.from_floors(list(floors.values()))
    job = (subject, attention, device, numerics, candidate)
    found: Outcome = steps.run(f"CP={cp}", run_ranks, cp, _run_rank, *job, device=device, timeout=600)[0]
    difference = Difference.between(found, reference)
    where: Divergence | None = None
    if not tolerance.holds(difference):
        deltas = [x - y for x, y in zip(found.logprobs, reference.logprobs, strict=True)]
        limits = {"logprob_deltas": deltas, "logprob_bound": tolerance.logprob_max_abs}
        where = steps.run("looking for the first module that differs", first_divergence, cp, *job, **limits)
    return ParityReport(
        subject=subject,
        engine="hf",
        device=device,
        dtype=str(next(subject.model.parameters()).dtype).removeprefix("torch."),
        cp=cp,
        tp=1,
        attention=attention,
        difference=difference,
        floors=floors,
        tolerance=tolerance,
        passed=where is None,
        first_divergence=where,
        seconds=steps.seconds,
        reference=reference,
        candidate=found,
    )


class _Steps:
    """Runs steps, telling each one's name before it starts and keeping how long it took."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self.progress, self.seconds = progress, dict[str, float]()

    def run(self, step: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.progress(step)
        begin = perf_counter()
        result = fn(*args, **kwargs)
        self.seconds[step] = perf_counter() - begin
        return result


def _run_rank(
    rank: int,
    subject: Subject,
    attention: AttentionMethod,
    device: str,
    numerics: Numerics,
    candidate: type[Candidate],
) -> Outcome | None:
    home = rank_device(device, rank)
    outcome = run_packed(subject, dist.group.WORLD, attention, home, numerics, candidate)
    return outcome if rank == 0 else None
