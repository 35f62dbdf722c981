"""NeMo-RL's own functions, taken out of the files of a checkout: the package around them needs Ray and a cluster to import."""

from __future__ import annotations
import __future__

import ast
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def load(checkout: Path, file: str, names: list[str], **known: Any) -> SimpleNamespace:
    """Definitions `names` of `file`, executed on their own; `known` are the other names that they use."""
    tree = ast.parse((checkout / file).read_text())
    chosen = [node for node in tree.body if getattr(node, "name", None) in names]
    assert [getattr(node, "name", "") for node in chosen] == names, f"{file} no longer defines {names} in this order"
    code = compile(ast.Module(chosen, []), file, "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)
    namespace: dict[str, Any] = {"torch": torch, "math": math, **known}
    exec(code, namespace)
    return SimpleNamespace(**{name: namespace[name] for name in names})
