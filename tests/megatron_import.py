"""Imports parts of Megatron in tests; without a GPU its import warns about every accelerator library that is not there."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

import pytest


def import_megatron(name: str) -> ModuleType:
    """The module `name` of megatron-core; skips the test where it is not installed."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ModuleNotFoundError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
