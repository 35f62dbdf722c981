"""Measures functions side by side: interleaved, so that a slow minute hits all alike; medians, and how far the rest lies off."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

Sample = tuple[float, float, float, float]  # ms, host ms, CPU ms, peak GiB


def measure(
    arms: Mapping[str, Callable[[], Any]], *, rounds: int = 7, warmup: int = 2, budget: float | None = None
) -> dict[str, dict[str, float]]:
    """arm -> ms (median), min_ms, spread_ms (from the first to the last quartile), host_ms (until the call returned), peak_gib.

    And min_cpu_ms, the calling thread's own time, into which no other program's comes.
    All ranks of the default group call this together; a round starts behind a barrier. budget: seconds after which no
    round begins (rank 0 decides), two being run in any case.
    """
    found: dict[str, list[Sample]] = {name: [] for name in arms}
    begin = time.perf_counter()
    for number in range(-warmup, rounds):
        if number >= 2 and budget is not None and together(time.perf_counter() - begin > budget):
            break
        for name, run in arms.items():
            sample = once(run)
            if number >= 0:
                found[name].append(sample)
    return {name: summary(samples) for name, samples in found.items()}


def once(run: Callable[[], Any]) -> Sample:
    """One call, between two waits for the device."""
    _wait()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    begin, cpu = time.perf_counter(), time.thread_time()
    run()
    returned, cpu = time.perf_counter(), time.thread_time() - cpu
    _wait(barrier=False)
    end = time.perf_counter()
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return (end - begin) * 1e3, (returned - begin) * 1e3, cpu * 1e3, peak


def summary(samples: list[Sample]) -> dict[str, float]:
    times = sorted(ms for ms, *_ in samples)
    quarter = len(times) // 4
    return {
        "ms": round(statistics.median(times), 3),
        "min_ms": round(times[0], 3),
        "spread_ms": round(times[-1 - quarter] - times[quarter], 3),
        "host_ms": round(statistics.median(host for _, host, _, _ in samples), 3),
        "min_cpu_ms": round(min(cpu for _, _, cpu, _ in samples), 3),
        "peak_gib": round(max(peak for *_, peak in samples), 2),
        "rounds": len(samples),
    }


def beside(found: Mapping[str, dict[str, float]], device: str, own: str = "vlm_cp") -> list[dict[str, Any]]:
    """One row an arm: its best_ms, and how many times arm `own`'s that is (`vlm_cp_is_faster`).

    The best round: by the thread's own time for what runs on the CPU, by the clock on a GPU.
    """
    best = {name: x["min_cpu_ms" if device == "cpu" else "min_ms"] for name, x in found.items()}
    return [
        {"arm": name, "best_ms": best[name], "vlm_cp_is_faster": round(best[name] / best[own], 2), **x}
        for name, x in found.items()
    ]


def _wait(*, barrier: bool = True) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if barrier and dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)


def together(value: float, *, any_rank: bool = False) -> bool:
    """Rank 0's value, on all ranks; with any_rank, whether it is true on any."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return bool(value)
    flag = torch.tensor([float(value)], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    if any_rank:
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    else:
        dist.broadcast(flag, 0)
    return bool(flag.item())
