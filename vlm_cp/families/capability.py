"""Which Megatron-Bridge model can do context parallelism, as far as it was tried: one row a model class.

A cell comes from a run of the installed model or from a probe of its code, never from a document; `evidence` names the
test that does it. A model without a row was not tried, and is refused under context parallelism like one with a "no".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Layout = Literal["full", "sharded"]


@dataclass(frozen=True, kw_only=True)
class Capability:
    """One row: what a Bridge (or megatron-core) model class does at cp_size > 1 with packed samples.

    model: the class's name. cp: whether context parallelism works at all. packed: whether it does with several samples
    packed in one row. cut: where the stream is cut: inside the model after features are placed, by the caller, or nowhere.
    layouts: the layouts `MegatronEngine` may use. positions: what the model wants, T being T/c in the sharded layout.
    min_bridge, min_core: versions from which that holds. mtp: whether multi-token prediction has CP=1's gradient with it.
    evidence: the test behind the row. reason: why it is refused; None for a row that works.
    """

    model: str
    cp: bool
    packed: bool
    cut: Literal["model", "caller", "nowhere"]
    layouts: tuple[Layout, ...] = ()
    positions: str = "recomputed"
    min_bridge: str | None = None
    min_core: str | None = None
    mtp: bool = False
    evidence: str
    reason: str | None = None


_NOT_CUT = (
    "no code in its forward cuts the stream, so every rank would attend over all tokens with a shard's rotary table"
)

_ROWS = (
    Capability(
        model="Qwen3VLModel",  # Qwen3-VL, Qwen3-VL-MoE, Qwen3.5-VL dense and MoE
        cp=True,
        packed=True,
        cut="model",
        layouts=("full", "sharded"),
        positions="[3, 1, T]",
        min_bridge="0.6.0",
        min_core="0.18.0",
        evidence="run: tests/test_bridge_parity.py (CPU), tests/gpu (NCCL)",
    ),
    Capability(
        model="GPTModel",
        cp=True,
        packed=True,
        cut="caller",
        layouts=("sharded",),
        positions="[1, T]",
        min_core="0.18.0",
        evidence="run: tests/test_bridge_parity.py (CPU), tests/gpu (NCCL)",
    ),
    Capability(
        model="Qwen25VLModel",
        cp=False,
        packed=False,
        cut="nowhere",
        evidence="probe: tests/test_capability.py",
        reason=_NOT_CUT,
    ),
    Capability(
        model="GLM45VModel",
        cp=False,
        packed=False,
        cut="nowhere",
        evidence="probe: tests/test_capability.py",
        reason=_NOT_CUT,
    ),
    Capability(
        model="Ernie45VLModel",
        cp=False,
        packed=False,
        cut="nowhere",
        evidence="probe: tests/test_capability.py",
        reason=_NOT_CUT,
    ),
    Capability(
        model="Step37Model",
        cp=False,
        packed=False,
        cut="nowhere",
        evidence="probe: tests/test_capability.py",
        reason=_NOT_CUT,
    ),
    Capability(
        model="Gemma3VLModel",
        cp=False,
        packed=False,
        cut="nowhere",
        evidence="probe: tests/test_capability.py",
        reason="its provider refuses context_parallel_size > 1, for its attention bias",
    ),
    Capability(
        model="KimiK25VLModel",
        cp=True,
        packed=False,
        cut="model",
        positions="[1, T]",
        evidence="probe: tests/test_capability.py",
        reason="it cuts the whole row in zigzag and ignores cu_seqlens, so with more than one packed sample every rank holds other tokens than attention assumes",
    ),
    Capability(
        model="Qwen3OmniThinkerModel",
        cp=True,
        packed=False,
        cut="model",
        positions="[3, B, S]",
        evidence="probe: tests/test_capability.py",
        reason="its forward raises NotImplementedError for packed samples",
    ),
)
CAPABILITIES = {row.model: row for row in _ROWS}


def capability_of(class_names: Iterable[str]) -> Capability:
    """The row of a model, given its class's name and those of its bases, most derived first; refused without a usable row."""
    names = list(class_names)
    row = next((CAPABILITIES[name] for name in names if name in CAPABILITIES), None)
    usable = [name for name, r in CAPABILITIES.items() if r.reason is None]
    if row is None:
        raise ValueError(
            f"model must be one of {', '.join(usable)} for packed context parallelism, got {names[0]}, which was never tried; "
            "where it cuts the stream is unknown, and a wrong cut raises no error"
        )
    if row.reason is not None:
        raise ValueError(
            f"model must be one of {', '.join(usable)} for packed context parallelism, got {row.model}; {row.reason}"
        )
    return row
