"""The one padding rule: packer, collator, model call and unpacker all ask the same `Alignment`.

Symbols: c = cp_size; t = tp_size with sequence parallelism, else 1; q = the FP8 recipe's GEMM multiple.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Literal, get_args

Fp8Recipe = Literal["delayed", "tensorwise", "mxfp8", "blockwise", "nvfp4"]

# Rows of the weight-gradient GEMM contract over the gathered T / c tokens: multiples of 16 for per-tensor scaling,
# of the 32-wide block of MXFP8, of the 128-wide blocks of block scaling; NVFP4 takes 128 as Transformer Engine's grouped GEMM does.
_FP8_MULTIPLE: dict[Fp8Recipe, int] = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128, "nvfp4": 128}


@dataclass(frozen=True)
class Alignment:
    """Which multiples samples and the packed stream are padded to, for one parallel layout.

    All rules are joined by the least common multiple; nothing is clamped, and a size that does not fit is refused.

    cp_size, tp_size: ranks of context and tensor parallelism. sequence_parallel: Megatron's, over the TP ranks.
    fp8: None, "delayed", "tensorwise", "mxfp8", "blockwise" or "nvfp4" (Transformer Engine's recipes).
    sample_multiple, total_multiple: further multiples that a framework asks of every sample, or of the stream.

    >>> Alignment(cp_size=2).sequence_multiple, Alignment(cp_size=2, tp_size=4, sequence_parallel=True).stream_multiple
    (4, 8)
    >>> Alignment(cp_size=2, tp_size=8, sequence_parallel=True, fp8="delayed").stream_multiple
    256
    """

    cp_size: int = 1
    tp_size: int = 1
    sequence_parallel: bool = False
    fp8: Fp8Recipe | None = None
    sample_multiple: int = 1
    total_multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("cp_size", "tp_size", "sample_multiple", "total_multiple"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}; no padding rule follows from it")
        if self.fp8 is not None and self.fp8 not in _FP8_MULTIPLE:
            names = ", ".join(get_args(Fp8Recipe))
            raise ValueError(
                f"fp8 must be None or one of {names}, got {self.fp8!r}; an unknown recipe would be padded as if it were bf16"
            )

    @property
    def sequence_multiple(self) -> int:
        """Every sample's padded length is a multiple of this: 2c chunks of equal size, and `sample_multiple`."""
        return lcm(2 * self.cp_size if self.cp_size > 1 else 1, self.sample_multiple)

    @property
    def stream_multiple(self) -> int:
        """The packed stream's length T is a multiple of this: one slice a sequence-parallel rank, FP8 rows, `total_multiple`."""
        slices = self.cp_size * (self.tp_size if self.sequence_parallel else 1)
        rows = _FP8_MULTIPLE[self.fp8] * slices if self.fp8 is not None else slices
        return lcm(self.sequence_multiple, rows, self.total_multiple)
