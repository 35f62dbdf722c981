"""A packed micro-batch as NeMo-RL has it, and its own functions, taken out of the files of a checkout.

The package around them needs Ray and a cluster to import.
"""

from __future__ import annotations
import __future__

import ast
import math
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vlm_cp.alignment import Alignment
from vlm_cp.plan import SequencePlan
from vlm_cp.values import value_terms

LENGTHS = (5, 9, 1, 3)


class Batch(UserDict[str, Any]):
    """As much of BatchedDataDict as the wrapper uses."""

    def slice(self, start: int, end: int) -> Batch:
        return Batch({k: x[start:end] for k, x in self.data.items()})


class ValueLoss:
    """NeMo-RL's value loss in short: rows, global counts, extrema that are 0.0 where nothing is valid."""

    cliprange = 0.2

    def __init__(self, packing_invariant: bool = False) -> None:
        self.packing_invariant = packing_invariant

    def __call__(
        self, logits: Tensor, data: Any, global_valid_seqs: Any, global_valid_toks: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = data["token_mask"] * data["sample_mask"][:, None]
        terms = value_terms(logits, data["returns"], data["values"], clip=self.cliprange)
        kept = logits[mask.bool()].detach()
        metrics = {
            "values_min": kept.min().item() if len(kept) else 0.0,
            "values_max": kept.max().item() if len(kept) else 0.0,
            "values_mean": (logits.detach() * mask).sum() / global_valid_toks,
            "num_valid_samples": len(logits),
        }
        return (terms * mask).sum() / global_valid_toks, metrics


def make_pack(cp_size: int) -> tuple[SequencePlan, Tensor, Batch]:
    """A pack of samples, head outputs [T] of its slots, and its data in rows of width 9."""
    plan = SequencePlan.from_lengths(LENGTHS, alignment=Alignment(cp_size=cp_size, sample_multiple=8))
    generator = torch.Generator().manual_seed(0)
    heads = plan.pack(list(torch.randn(sum(LENGTHS), generator=generator).double().split(LENGTHS)), 0.0)
    shape = len(LENGTHS), max(LENGTHS)
    rows = {key: torch.randn(shape, generator=generator, dtype=torch.float64) for key in ("returns", "values")}
    real = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    mask = real & (torch.rand(shape, generator=generator) < 0.7)
    mask[:, 0] = torch.tensor([False, True, True, False])  # the framework counts a first token, whose value is 0
    data = {
        "input_ids": torch.zeros(shape, dtype=torch.int64),
        "token_mask": mask.double(),
        "sample_mask": torch.tensor([1.0, 1.0, 1.0, 0.0]).double(),
        "grids": torch.arange(12).view(4, 3),
        **rows,
    }
    return plan, heads, Batch(data)


def expected_values(plan: SequencePlan, heads: Tensor, width: int) -> Tensor:
    rows = [
        torch.cat([x.new_zeros(1), x[:-1], x.new_zeros(width)])[:width] for x in heads.split(list(plan.padded_lengths))
    ]
    return torch.stack(rows)


def load(checkout: Path, file: str, names: list[str], **known: Any) -> SimpleNamespace:
    """Definitions `names` of `file`, executed on their own; `known` are the other names that they use."""
    tree = ast.parse((checkout / file).read_text())
    chosen = [node for node in tree.body if getattr(node, "name", None) in names]
    assert [getattr(node, "name", "") for node in chosen] == names, f"{file} no longer defines {names} in this order"
    code = compile(ast.Module(chosen, []), file, "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)
    namespace: dict[str, Any] = {"torch": torch, "math": math, **known}
    exec(code, namespace)
    return SimpleNamespace(**{name: namespace[name] for name in names})
