"""Which way of exchanging keys and values makes a step's attention fastest: Transformer Engine's `cp_comm_type`, by plan.

p2p         a ring: c kernels a layer, their keys on the way while the former are used, and a correction after each
all_gather  keys and values of the whole stream on every rank, then two kernels, one for each of a sample's two chunks
a2a         tokens traded for heads and back; one kernel over whole samples with 1/c of the heads

What a layer's forward and backward take beyond what all types share is modelled as

    fixed + 14 * query channels * pairs / rate        pairs: (query, key) pairs of a rank; two products forward, five backward

with a fixed time and a rate of each type, fitted to measurements (`benchmarks/exchange.py`). a2a and all_gather leave each
softmax in one kernel, so that the forward at CP=n equals the one at CP=1 bit by bit; a ring's partial sums round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from vlm_cp.plan import SequencePlan

CommType = Literal["p2p", "all_gather", "a2a"]
COMM_TYPES: tuple[CommType, ...] = get_args(CommType)
EXACT: tuple[CommType, ...] = ("all_gather", "a2a")


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """fixed: seconds of a layer and micro-batch, the same constant being left out for every type. rate: FLOP/s."""

    fixed: float
    rate: float

    def seconds(self, flops: float) -> float:
        return self.fixed + flops / self.rate


# 2 NVIDIA H200, CP=2, bf16, 28 layers of 16 heads: lines through whole stock steps of 16384 tokens in four samples and in one
# (p2p 350 and 420 ms, a2a 367 and 432, all_gather 399 and 408). Such steps wait for kernel launches, which is why
# all_gather's two kernels cost almost nothing when they grow.
MEASURED: Mapping[CommType, LayerTime] = {
    "p2p": LayerTime(fixed=0.0, rate=577e12),
    "a2a": LayerTime(fixed=0.65e-3, rate=621e12),
    "all_gather": LayerTime(fixed=2.46e-3, rate=4490e12),
}


@dataclass(frozen=True, kw_only=True)
class CommChoice:
    """comm_type: what was picked. seconds: what each type was expected to take a layer, empty where nothing is exchanged."""

    comm_type: CommType
    seconds: Mapping[CommType, float]

    def __str__(self) -> str:
        times = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in self.seconds.items())
        return f"cp_comm_type {self.comm_type}" + (f" (a layer: {times})" if times else " (nothing is exchanged)")


def choose_comm_type(
    plans: Sequence[SequencePlan],
    *,
    heads: int,
    key_value_heads: int,
    head_dim: int,
    allowed: Collection[CommType] = COMM_TYPES,
    times: Mapping[CommType, LayerTime] = MEASURED,
) -> CommChoice:
    """The type of `allowed` that is expected to be fastest for a step of these micro-batches; the same on every rank.

    heads, key_value_heads: on one TP rank; a2a needs both divisible by cp_size and is left out where they are not.
    allowed: one type overrides the model. times: of each type, `MEASURED` on H200.
    """
    wrong = [name for name in allowed if name not in COMM_TYPES]
    if wrong or not allowed:
        raise ValueError(
            f"allowed must hold some of {', '.join(COMM_TYPES)}, got {wrong or 'none'}; attention layers would exchange nothing"
        )
    size = plans[0].cp_size
    divides = heads % size == 0 and key_value_heads % size == 0
    usable: list[CommType] = [name for name in COMM_TYPES if name in allowed and (divides or name != "a2a")]
    if not usable:
        raise ValueError(
            f"heads must be divisible by cp_size {size} for a2a, got {heads} query and {key_value_heads} key/value heads on a "
            "TP rank; allow p2p or all_gather"
        )
    if size == 1:
        return CommChoice(comm_type=usable[0], seconds={})
    seconds: dict[CommType, float] = dict.fromkeys(usable, 0.0)
    for plan in plans:
        pairs = sum(length * (length + 1) // 2 for length in plan.padded_lengths) / size
        flops = 14 * heads * head_dim * pairs
        seconds = {name: total + times[name].seconds(flops) for name, total in seconds.items()}
    return CommChoice(comm_type=min(seconds, key=lambda name: seconds[name]), seconds=seconds)
