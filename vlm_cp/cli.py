"""The `vlm-cp` command. Exit codes: 0 equal (`parity`) or fit (`doctor`), 1 not, 2 wrong usage."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vlm_cp import budget, doctor
from vlm_cp.attention import AttentionMethod
from vlm_cp.bridge_parity import bridge_subject, run_bridge_parity
from vlm_cp.families import FAMILIES
from vlm_cp.parity import ParityReport, run_parity
from vlm_cp.report import print_report, write_html, write_json
from vlm_cp.subject import Subject

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="vlm-cp", description="Context parallelism for vision-language models.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_parity(
        commands.add_parser("parity", help="compare CP=n with CP=1: log-probabilities, loss and every gradient")
    )
    budget.add_arguments(
        commands.add_parser("plan", help="padding, and each rank's tokens and FLOPs, of a file of sizes")
    )
    doctor.add_arguments(commands.add_parser("doctor", help="what is installed, against what is supported"))
    options = parser.parse_args(arguments)
    try:
        if options.command == "parity":
            return _parity(options, shlex.join(["vlm-cp", *arguments]))
        return budget.run(options) if options.command == "plan" else doctor.run(options)
    except ValueError as error:
        Console(stderr=True).print(f"[red]vlm-cp: {escape(str(error))}", highlight=False)
        return 2


def _add_parity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--family", choices=list(FAMILIES), default="qwen3_vl", help="model family (default: %(default)s)"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="a saved checkpoint with its processor, in place of --family's small random model",
    )
    parser.add_argument(
        "--engine", choices=["hf", "bridge"], default="hf", help="what runs CP=n (default: %(default)s)"
    )
    parser.add_argument("--cp", type=int, default=2, help="context-parallel ranks (default: %(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, bridge only (default: %(default)s)")
    parser.add_argument(
        "--attention",
        choices=get_args(AttentionMethod),
        default="all_gather",
        help="how ranks exchange (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda", "cuda:0"],
        default="cpu",
        help="cpu: gloo; cuda: NCCL, one device a rank; cuda:0: gloo, all ranks on that device",
    )
    parser.add_argument(
        "--dtype", choices=list(_DTYPES), default="float32", help="weights and activations (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="F", help="write the result here")
    parser.add_argument("--html", type=Path, metavar="F", help="write a page with pictures and ownership here")


def _parity(options: argparse.Namespace, command: str) -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here needs a model hub, and waiting for one takes a minute
    torch.set_num_threads(1)  # before any operation, since ranks are forked
    _check_parity(options)
    console = Console()
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("building the model and the samples", total=None)
        report = _run(options, lambda step: bar.update(task, description=step))
    print_report(report, console)
    if options.json:
        write_json(report, options.json, command)
        console.print(f"wrote {options.json}")
    if options.html:
        write_html(report, options.html, command)
        console.print(f"wrote {options.html}")
    return 0 if report.passed else 1


def _check_parity(options: argparse.Namespace) -> None:
    ranks = options.cp * options.tp
    if options.cp < 1 or options.tp < 1:
        raise ValueError(
            f"--cp and --tp must be at least 1, got {options.cp} and {options.tp}; there would be no rank to run on"
        )
    for name, path in (("--json", options.json), ("--html", options.html)):
        if path and (path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK)):
            raise ValueError(
                f"{name} must be a file in a folder that can be written to, got {path}; the result would be lost after the run"
            )
    if options.engine == "hf" and options.tp > 1:
        raise ValueError(f"--tp must be 1 for the hf engine, got {options.tp}; transformers' layers are not split")
    if options.engine == "bridge" and options.device != "cuda":
        raise ValueError(
            f"--device must be cuda for the bridge engine, got {options.device}; its layers are Transformer Engine's, and its "
            "sum of gradients needs NCCL, a device for each rank"
        )
    if options.engine == "bridge" and options.dtype != "bfloat16":
        raise ValueError(
            f"--dtype must be bfloat16 for the bridge engine, got {options.dtype}; "
            "Transformer Engine has no other attention for packed samples under CP"
        )
    needed, found = {"cpu": 0, "cuda": ranks}.get(options.device, 1), torch.cuda.device_count()
    if found < needed:
        raise ValueError(f"--device {options.device} must find {needed} devices, got {found}; ranks would share one")


def _run(options: argparse.Namespace, progress: Callable[[str], None]) -> ParityReport:
    dtype, bridge = _DTYPES[options.dtype], options.engine == "bridge"
    if options.model:
        subject = Subject.from_pretrained(options.model, dtype=dtype)
    else:
        subject = (bridge_subject if bridge else Subject.demo)(options.family, dtype=dtype, seed=options.seed)
    if bridge:
        return run_bridge_parity(subject, cp=options.cp, tp=options.tp, device=options.device, progress=progress)
    return run_parity(subject, cp=options.cp, attention=options.attention, device=options.device, progress=progress)
