"""The embedded engine on two ranks, through the same `run_parity` as on the CPU."""

import pytest
import torch

from vlm_cp.parity import run_parity
from vlm_cp.subject import Subject

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_cp_2_equals_cp_1(family, dtype, place):
    report = run_parity(Subject.demo(family, dtype=dtype), cp=2, device=place(2))
    assert report.passed, report.summary()
