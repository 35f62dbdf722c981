"""The embedded engine on two GPUs over NCCL, through the same `run_parity` as on the CPU."""

import pytest
import torch

from vlm_cp.parity import run_parity
from vlm_cp.subject import Subject

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(300)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_cp_2_equals_cp_1(family, dtype):
    report = run_parity(Subject.demo(family, dtype=dtype), cp=2, device="cuda")
    assert report.passed, report.summary()
