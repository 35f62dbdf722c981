"""Megatron in tests. Without a GPU its import and its configs warn about all they miss, which pytest would turn into errors."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest


@contextmanager
def megatron_may_warn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def import_megatron(name: str) -> ModuleType:
    """The module `name` of megatron-core; skips the test where it is not installed."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ModuleNotFoundError)
    with megatron_may_warn():
        return importlib.import_module(name)
