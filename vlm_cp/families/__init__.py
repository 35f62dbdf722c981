"""One file a model family: what its tower returns, what its text model takes, and which layers need the natural order.

Families do not know each other. A family without an entry in `FAMILIES` is refused, since the engine would not know
where its feature rows belong.
"""

from __future__ import annotations

from vlm_cp.families.base import Family, VisionRows
from vlm_cp.families.qwen2_5_vl import Qwen25VL
from vlm_cp.families.qwen3_5 import Qwen35
from vlm_cp.families.qwen3_vl import Qwen3VL
from vlm_cp.spec import VLMSpec

FAMILIES: dict[str, Family] = {"qwen2_5_vl": Qwen25VL(), "qwen3_vl": Qwen3VL(), "qwen3_5": Qwen35()}


def family_of(spec: VLMSpec) -> Family:
    """The spec's family; `ValueError` for one that has no entry."""
    if spec.family not in FAMILIES:
        raise ValueError(
            f"family must be one of {', '.join(FAMILIES)} for context parallelism, got {spec.family!r}; "
            "its feature rows or positions would be cut wrongly without an error"
        )
    return FAMILIES[spec.family]


__all__ = ["FAMILIES", "Family", "VisionRows", "family_of"]
