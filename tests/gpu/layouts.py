"""What is run on two GPUs, in order of value: (family, layout) pairs. A family's "cp1" is the reference of its other rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is spread over the two ranks. cases: see models.CASES; the last one's gradients are compared by HF names."""

    cp: int = 1
    tp: int = 1
    pp: int = 1
    layout: Any = "full"
    cases: tuple[str, ...] = ("mixed",)
    total_tokens: int | None = None
    provider: Mapping[str, Any] = field(default_factory=dict)
    torch_attention: bool = (
        False  # vlm_cp's attention in Transformer Engine's place: another kernel, for the noise floor
    )
    reverse: bool = False  # samples packed in the other order

    @property
    def sends(self) -> bool:
        """Whether one rank sends to another, which gloo does not do for tensors on a GPU: the p2p ring, and pipelines."""
        ring = self.provider.get("cp_comm_type", "p2p") == "p2p" and not self.torch_attention
        return self.pp > 1 or (self.cp > 1 and ring)

    @property
    def dp(self) -> int:
        return 2 // (self.cp * self.tp * self.pp)


ALL = ("ragged", "text-only", "image-on-one-rank", "video", "mixed")
VLM: dict[str, Layout] = {
    "cp1": Layout(cases=ALL),
    "floor-kernel": Layout(cases=ALL, torch_attention=True),
    "floor-order": Layout(cases=ALL, reverse=True),
    "cp2": Layout(cp=2, cases=ALL),
    "cp2-all_gather": Layout(cp=2, provider={"cp_comm_type": "all_gather"}),
    "cp2-a2a": Layout(cp=2, provider={"cp_comm_type": "a2a"}),
    "cp2-sharded": Layout(cp=2, layout="sharded"),
    "cp2-torch": Layout(cp=2, torch_attention=True),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "pp2-fixed": Layout(pp=2, total_tokens=1664, provider={"variable_seq_lengths": False}),
    "cp2-recompute": Layout(
        cp=2, provider={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    ),
}
_SMALL = {name: VLM[name] for name in ("cp1", "floor-kernel", "cp2", "cp2-a2a")}


def _only(case: str, layouts: Mapping[str, Layout], **changes: Any) -> dict[str, Layout]:
    return {name: Layout(**{**vars(x), "cases": (case,), **changes}) for name, x in layouts.items()}


FAMILIES: dict[str, dict[str, Layout]] = {
    "qwen3_vl": VLM,
    "qwen3": _only("mixed", _SMALL, layout="sharded"),
    "qwen3_vl_moe": _only("ragged", _SMALL),
    "qwen3_vl_2b": _only("long", _SMALL),
    "qwen3_5": _only("few", _SMALL),
}
# Seconds an item may take; delta nets spend minutes in Triton's autotuning on a cold machine, and look hung.
LIMITS = {"qwen3_5": 280.0, "qwen3_vl_2b": 150.0}
DEFAULT_LIMIT = 100.0
ITEMS: list[tuple[str, str]] = [
    ("qwen3_vl", "index"),  # the partition against Transformer Engine's own
    *[("qwen3_vl", name) for name in VLM],
    ("qwen3_vl", "hf"),  # the same weights in the embedded engine
    ("qwen3_vl", "hf-cp2"),
    *[(family, name) for family in FAMILIES if family != "qwen3_vl" for name in FAMILIES[family]],
]


def items(device: str) -> list[tuple[str, str]]:
    """All items that can run there; `tp2` is also compared with `cp2`, and so needs a device for each rank as well."""
    if device != "cuda:0":
        return ITEMS
    return [(f, name) for f, name in ITEMS if name != "tp2" and not (name in FAMILIES[f] and FAMILIES[f][name].sends)]
