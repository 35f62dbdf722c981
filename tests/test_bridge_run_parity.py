"""`run_bridge_parity` on the installed Bridge over gloo: green when all is right, red and placed when the engine is not."""

from dataclasses import replace

import pytest
import torch
from bridge_on_cpu import use_cpu

from vlm_cp.bridge_parity import bridge_subject, run_bridge_parity
from vlm_cp.parity import Bound
from vlm_cp.subject import Subject

# float32: what the oracle's own comparisons keep (tests/test_bridge_parity.py).
BOUND = Bound(logprob_max_abs=1e-4, grad_max_rel=1e-4, loss_abs=1e-5)


def subject() -> Subject:
    demo = Subject.demo("qwen3_vl", vocab_size=320, num_hidden_layers=2)
    return replace(demo, samples=demo.samples[:3])


@pytest.mark.parametrize("tp", [1, 2])
def test_cp_2_equals_cp_1(tp: int) -> None:
    report = run_bridge_parity(subject(), cp=2, tp=tp, device="cpu", bound=BOUND, prepare=use_cpu)
    assert report.passed, report.difference
    row = report.summary()
    assert (row["engine"], row["cp"], row["tp"], row["tokens"]) == ("bridge", 2, tp, 246)
    assert report.difference.grad_norm_ratio == pytest.approx(1, abs=1e-5)
    assert len(report.reference.gradients) > 50 * tp


def test_a_difference_is_placed_on_its_tokens() -> None:
    report = run_bridge_parity(subject(), cp=2, device="cpu", bound=Bound(0.0, 0.0, 0.0), prepare=use_cpu)
    assert not report.passed
    assert report.first_divergence is not None
    assert report.first_divergence.cause == "engine"
    assert report.first_divergence.sample is not None


def test_a_family_that_bridge_cannot_cut() -> None:
    with pytest.raises(
        ValueError, match=r"^family must be one of qwen3_vl, qwen3_5 for the bridge engine, got 'qwen2_5_vl'"
    ):
        bridge_subject("qwen2_5_vl", dtype=torch.bfloat16)
