"""Logprobs, entropies and values on GPUs: the bodies of the CPU tests on another device, and what they hold in memory."""

from collections.abc import Callable

import pytest
from critic_ranks import check_critic
from logprob_ranks import check_grid, logprob_memory_on_gpu
from ranks import run_ranks


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("cp_size", "tp_size"), [(2, 1), (1, 2)], ids=["cp2", "tp2"])
def test_logprobs_of_packed_samples_equal_one_process(cp_size: int, tp_size: int, place: Callable[[int], str]) -> None:
    check_grid(run_ranks, place(cp_size * tp_size), cp_size, tp_size)


@pytest.mark.gpu(1)
def test_b19_tp_times_cp_equals_one_process(place: Callable[[int], str]) -> None:
    check_grid(run_ranks, place(4))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_b21_vlm_critic_equals_one_process(family: str, place: Callable[[int], str]) -> None:
    check_critic(run_ranks, family, [(1, 1), (2, 2)], place(2), 1e-10)


@pytest.mark.gpu(1)
@pytest.mark.timeout(300)
def test_memory_of_logprobs_and_entropies(record_property) -> None:
    """Qwen's vocabulary, 8192 slots, bfloat16: logits of 2.3 GiB and chunks of 149 MiB."""
    tokens, vocab, width, chunk_size = 8192, 151936, 1024, 256
    (found,) = run_ranks(1, logprob_memory_on_gpu, tokens, vocab, width, chunk_size, device="cuda")
    for name, value in found.items():
        record_property(name, value)
    logits, chunk, slots = tokens * vocab * 2, chunk_size * vocab * 4, tokens * 8 * 32
    assert found["no_grad"] < 1.05 * chunk + slots
    assert found["backward"] < logits + 1.05 * chunk + slots
    assert found["inplace_backward"] < 1.05 * chunk + slots
    # The product in bfloat16 beside its float32 copy, weight's gradient in float32, a chunk's part of it, and the result.
    assert found["from_hidden"] < 1.5 * chunk + vocab * width * (4 + 2 + 2) + tokens * width * 2 + slots < logits
