import os
from collections.abc import Callable
from functools import cache

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model hub's name then fails at once instead of retrying for a minute

import pytest
import torch

torch.set_num_threads(1)  # before any operation: forked ranks hang once torch has run two threads


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is not None and found < marker.args[0]:
            item.add_marker(pytest.mark.skip(reason=f"needs {marker.args[0]} CUDA devices, found {found}"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Family -> folder of a tiny transformers checkpoint that every parallel layout of a Bridge model loads."""
    from bridge_runs import save_checkpoint

    return cache(lambda family: save_checkpoint(family, tmp_path_factory.mktemp(family)))
