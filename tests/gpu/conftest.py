from collections.abc import Callable

import pytest
import torch


@pytest.fixture
def place(record_property: Callable[[str, object], None]) -> Callable[[int], str]:
    """Where n ranks run: each on a GPU of its own over NCCL, or all on the first one over gloo."""

    def placed(ranks: int) -> str:
        device = "cuda" if torch.cuda.device_count() >= ranks else "cuda:0"
        record_property("device", device)
        return device

    return placed
