"""Functions of other frameworks, read from their files where somebody has them; none of their code is in this repository.

Only the functions and classes that are asked for, and what those use of the same file, are compiled, in a namespace of this
file's making: so their packages need not be installed, and Megatron's global groups are answered by arguments.
"""

from __future__ import annotations

import argparse
import ast
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

# option -> the file it names, as the projects call it
FILES = {
    "skyrl-pack": "skyrl/backends/skyrl_train/distributed/megatron/megatron_utils.py",
    "skyrl-logprobs": "skyrl/backends/skyrl_train/distributed/megatron/model_utils.py",
    "verl-pack": "verl/models/mcore/util.py",
    "verl-logprobs": "verl/utils/megatron/tensor_parallel.py",
    "nemo-rl-pack": "nemo_rl/models/megatron/data.py",
    "nemo-rl-logprobs": "nemo_rl/distributed/model_utils.py",
}


def add_options(parser: argparse.ArgumentParser, ending: str) -> None:
    """One option for each peer's file of that kind ("pack" or "logprobs"); a peer without its file is left out.

    And `--peer-versions`, a dict of what the results file says of them.
    """
    for name, path in FILES.items():
        if name.endswith(ending):
            parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"that project's {path}")
    parser.add_argument(
        "--peer-versions",
        type=versions_of,
        default={},
        metavar="PEER=COMMIT[,...]",
        help="the commits that the files are of, written into the results file",
    )


def versions_of(text: str) -> dict[str, str]:
    """ "a=1,b=2" -> {"a": "1", "b": "2"}."""
    return dict(part.split("=", 1) for part in text.split(","))


@dataclass(frozen=True)
class Ranks:
    """What Megatron's `parallel_state` is asked for. group: of the CP ranks; TP ranks have none here."""

    tp_size: int
    cp_size: int
    cp_rank: int
    group: dist.ProcessGroup | None = None

    def parallel_state(self) -> SimpleNamespace:
        return SimpleNamespace(
            get_tensor_model_parallel_world_size=lambda: self.tp_size,
            get_tensor_model_parallel_rank=lambda: 0,
            get_tensor_model_parallel_group=lambda: None,
            get_context_parallel_world_size=lambda: self.cp_size,
            get_context_parallel_rank=lambda: self.cp_rank,
            get_context_parallel_group=lambda: self.group,
        )


def load(file: Path, names: Iterable[str], ranks: Ranks, **more: Any) -> SimpleNamespace:
    """The functions and classes `names` of `file`. more: what they use of other files."""
    tree = ast.parse(file.read_text())
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    missing = [name for name in names if name not in defined]
    if missing:
        raise ValueError(
            f"{file.name} must define {', '.join(missing)}, got another version of it; nothing could be compared"
        )
    wanted, todo = set(names), list(names)
    while todo:
        for node in ast.walk(defined[todo.pop()]):
            if isinstance(node, ast.Name) and node.id in defined and node.id not in wanted:
                wanted.add(node.id)
                todo.append(node.id)
    state = ranks.parallel_state()
    scope = {"torch": torch, "math": math, "mpu": state, "PackedSeqParams": PackedSeqParams, **vars(state), **more}
    body: list[ast.stmt] = [node for name, node in defined.items() if name in wanted]
    future = ast.parse("from __future__ import annotations").body  # annotations name types of other files
    exec(compile(ast.Module(future + body, []), file.name, "exec"), scope)
    return SimpleNamespace(**{name: scope[name] for name in names})
