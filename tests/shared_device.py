"""Ranks that share one GPU: Megatron's DDP sums its buckets in one coalesced call, which gloo does not have for CUDA tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def _one_by_one(*_: Any, **__: Any) -> Iterator[None]:
    yield


def sum_buckets_one_by_one() -> None:
    """Test-only: the same all-reduces, each on its own."""
    from megatron.core.distributed import param_and_grad_buffer

    param_and_grad_buffer._coalescing_manager = _one_by_one
