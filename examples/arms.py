"""A training run as its arms: the same run in several layouts, each with a checkpoint and new processes in the middle."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import cos, pi
from pathlib import Path
from typing import Any

import curves
import torch
import torch.distributed as dist

from vlm_cp.launch import run_ranks
from vlm_cp.report import versions


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every run has. capacity: what a micro-batch may cost, in text tokens (`SFTCollator.bins`)."""

    steps: int
    resume_at: int
    batch_size: int
    capacity: int
    learning_rate: float
    warmup: int
    train_samples: int = 3000
    validation_samples: int = 256
    validate_every: int
    seed: int = 0

    def rate(self, step: int) -> float:
        """Learning rate of step number `step`: a linear warmup under a cosine."""
        return self.learning_rate * min(1.0, (step + 1) / self.warmup) * (0.5 + 0.5 * cos(pi * step / self.steps))


class Trainer(ABC):
    """A run that is a function of its settings and the number of its step, so that it resumes without random state."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.step = settings, 0

    @abstractmethod
    def train_step(self) -> dict[str, float]: ...

    @abstractmethod
    def validate(self) -> dict[str, float]: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def save(self, path: Path) -> None:
        """Written beside `path` and moved there, so that a run that ends here leaves the former checkpoint whole."""
        state = {"step": self.step, **self.state_dict()}
        if rank() == 0:
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Every rank reads before any goes on: else one could save anew, and another read what is not its step."""
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.step = state.pop("step")
        self.load_state_dict(state)
        if dist.is_initialized():
            dist.barrier()

    def run(self, until: int) -> dict[str, list[Any]]:
        """Trains up to step `until`; the curves of these steps."""
        steps: list[dict[str, float]] = []
        validation: list[dict[str, float]] = []
        while self.step < until:
            steps.append(self.train_step())
            self.step += 1
            if self.step % self.settings.validate_every == 0 or self.step == self.settings.steps:
                validation.append({"step": self.step, **self.validate()})
                if rank() == 0:
                    found = {**steps[-1], **validation[-1]}
                    print(", ".join(f"{k} {v:.3g}" for k, v in found.items()), flush=True)
        return {key: [step[key] for step in steps] for key in steps[0]} | {"validation": validation}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


Maker = Callable[[dist.ProcessGroup | None], Trainer]


def part(_: int, cp: int, make: Maker, until: int, path: Path, resume: bool) -> dict[str, list[Any]]:
    """Runs on every rank: from nothing, or from the checkpoint at `path`, up to step `until`, and saves there."""
    trainer = make(dist.group.WORLD if cp > 1 else None)
    if resume:
        trainer.load(path)
    found = trainer.run(until)
    trainer.save(path)
    return found


def train_arm(name: str, cp: int, settings: Settings, make: Maker, timeout: float = 7200.0) -> dict[str, Any]:
    """A whole run at this cp: to `resume_at`, then, if it is not the end, from a checkpoint on, in new processes."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        ends = sorted({settings.resume_at, settings.steps})
        halves = [run_ranks(cp, part, cp, make, until, path, until > ends[0], timeout=timeout)[0] for until in ends]
    return row(name, cp, settings, halves, time.monotonic() - start)


def row(
    name: str, cp: int, settings: Settings, halves: Sequence[Mapping[str, list[Any]]], seconds: float
) -> dict[str, Any]:
    """One arm's entry of a results file."""
    joined = {key: [x for half in halves for x in half[key]] for key in halves[0]}
    return {"arm": name, "cp": cp, "resumed_at": settings.resume_at, "seconds": seconds, **joined}


def arms_of(settings: Settings) -> dict[str, tuple[int, Settings]]:
    """Name -> cp and settings of each arm."""
    other = replace(settings, capacity=settings.capacity // 3)
    return {"cp1": (1, settings), "cp2": (2, settings), "cp1_other_micro_batches": (1, other)}


def write_rows(
    path: Path, rows: Sequence[Mapping[str, Any]], names: Sequence[str], how: str, look: curves.Look
) -> None:
    """Adds rows to the results file, those of other arms in it stay, and draws it."""
    known = {row["arm"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    known |= {row["arm"]: {**row, "command": how} for row in rows}
    ordered = [known[name] for name in names if name in known]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"versions": versions(), "command": how, "rows": ordered}) + "\n")
    curves.plot(path, path.with_suffix(".png"), look)
    print(f"wrote {path} and {path.with_suffix('.png')}")


def command(*program: str) -> str:
    """How this was called, without a path of this machine."""
    return shlex.join([*program, *(Path(x).name if os.path.isabs(x) else x for x in sys.argv)])


def results_path(out: Path, kind: str, hardware: str) -> Path:
    return out / f"{kind}_{hardware}_{datetime.now(UTC):%Y-%m-%d}.json"


def main(
    doc: str,
    kind: str,
    default: Settings,
    prepare: Callable[[Settings], Callable[[Settings], Maker]],
    look: curves.Look,
) -> None:
    """The command line of an example on the CPU. prepare: makes what all arms share, and returns how each makes its trainer."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(arms_of(default))
    parser.add_argument("--arms", nargs="+", choices=names, default=names, help="which to train (default: all)")
    parser.add_argument("--steps", type=int, default=default.steps, help="of each arm (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the curves and their picture; arms found there are kept"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # before any operation, since ranks are forked
    settings = replace(default, steps=options.steps, resume_at=options.steps // 2)
    make = prepare(settings)
    path = results_path(options.out, kind, "cpu")
    for name in options.arms:
        print(name)
        cp, own = arms_of(settings)[name]
        write_rows(path, [train_arm(name, cp, own, make(own))], names, command("python"), look)
