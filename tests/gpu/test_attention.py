"""The flash path of `ContextParallelAttention` on two ranks, against the definition in float64."""

import pytest
import torch
from attention_ranks import all_errors, runs_without_syncs
from ranks import run_ranks

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]


def test_cp_2_is_as_exact_as_cp_1(place):
    for errors in run_ranks(2, all_errors, device=place(2)):
        for (_, dtype), (ours, kernel) in errors.items():
            assert ours <= 1.5 * kernel + 1e-6
            assert ours <= (2e-2 if dtype != torch.float32 else 1e-5)


@pytest.mark.gpu(2)  # gloo waits for the device itself
def test_no_host_sync():
    assert run_ranks(2, runs_without_syncs, device="cuda") == [True, True]
