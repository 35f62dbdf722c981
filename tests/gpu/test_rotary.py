"""Transformer Engine's rotary kernels on angles of every token, and a tower that never waits for the device."""

import pytest
from ranks import run_ranks

pytest.importorskip("transformer_engine", reason="needs Transformer Engine")

from rotary_ranks import kernel_errors, tower_without_syncs

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]


def test_kernels_are_as_exact_as_float32_arithmetic():
    (found,) = run_ranks(1, kernel_errors, device="cuda")
    for errors in found.values():
        for kernel, plain in errors.values():
            assert kernel <= 1.01 * plain < 5e-3


def test_the_tower_does_not_sync():
    assert run_ranks(1, tower_without_syncs, device="cuda") == [True]
