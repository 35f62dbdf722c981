"""`vlm-cp parity --engine bridge` with Transformer Engine, on two ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from shared_device import sum_buckets_one_by_one

from vlm_cp.bridge_parity import bridge_subject, run_bridge_parity

MISSING = [
    name for name in ("transformer_engine", "megatron.bridge") if importlib.util.find_spec(name.split(".")[0]) is None
]


@pytest.mark.gpu(1)
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
def test_cp_2_equals_cp_1(place: Callable[[int], str]) -> None:
    device = place(2)
    prepare = sum_buckets_one_by_one if device != "cuda" else None
    report = run_bridge_parity(bridge_subject("qwen3_vl", dtype=torch.bfloat16), cp=2, device=device, prepare=prepare)
    assert report.passed, report.summary()
