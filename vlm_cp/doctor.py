"""`vlm-cp doctor`: what is installed, what is supported, and what goes wrong where the two differ."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, get_args

import torch
import torch.cuda.nccl
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table

from vlm_cp.families import FAMILIES

Engine = Literal["hf", "bridge"]
Status = Literal["ok", "off", "check", "not needed"]

BOTH: tuple[Engine, ...] = ("hf", "bridge")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Something that an engine needs. supported: a version specifier. families: empty for all of them."""

    name: str
    supported: str
    why: str
    engines: tuple[Engine, ...] = BOTH
    families: tuple[str, ...] = ()


# The ranges of pyproject.toml, and of what the GPU results were measured on.
PARTS = (
    Part(name="python", supported=">=3.12,<3.13", why="megatron-bridge installs on 3.12 only"),
    Part(
        name="torch", supported=">=2.11,<2.12", why="attention calls kernels whose signatures change between releases"
    ),
    Part(
        name="torchvision",
        supported=">=0.26,<0.27",
        why="without it transformers' processors are others, or none, and pixels differ",
    ),
    Part(
        name="transformers",
        supported=">=5.8,<=5.12.1",
        why="models are called through interfaces of this range, which is megatron-bridge's too",
    ),
    Part(name="pillow", supported=">=11", why="processors open images with it"),
    Part(name="numpy", supported=">=2", why="processors hand frames over in it"),
    Part(
        name="megatron-core",
        supported="==0.19.2",
        why="layouts and loss scaling differ between releases without an error",
        engines=("bridge",),
    ),
    Part(
        name="megatron-bridge",
        supported="==0.6.2",
        why="hooks replace parts of this release's models",
        engines=("bridge",),
    ),
    Part(name="einops", supported=">=0.8", why="megatron-bridge imports it", engines=("bridge",)),
    Part(name="omegaconf", supported=">=2.3", why="megatron-bridge imports it", engines=("bridge",)),
    Part(
        name="transformer-engine",
        supported=">=2.20.2,<2.21",
        why="packed context-parallel attention runs in it, and megatron-bridge does not import without it",
        engines=("bridge",),
    ),
    Part(
        name="flash-linear-attention",
        supported=">=0.4.2,<0.5",
        why="gated delta net layers run in it",
        engines=("bridge",),
        families=("qwen3_5",),
    ),
    Part(
        name="CUDA device",
        supported=">=1",
        why="Transformer Engine has no CPU kernels; the hf engine runs on the CPU too",
        engines=("bridge",),
    ),
    Part(name="CUDA", supported=">=13.0,<14", why="Transformer Engine's wheel is built for it", engines=("bridge",)),
    Part(name="cuDNN", supported=">=9.19", why="fused attention was measured with torch's own", engines=("bridge",)),
    Part(name="NCCL", supported=">=2", why="ranks exchange through it", engines=("bridge",)),
)

_SYSTEM_CUDNN = "cuDNN of the system"
_NOT_PACKAGES = ("python", "CUDA device", "CUDA", "cuDNN", "NCCL")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One part as it is here. found: its version, None where it is not there.

    status: "off" keeps the engine from running right; "check" may, depending on what this cannot see.
    """

    name: str
    found: str | None
    supported: str
    status: Status
    why: str


def probe() -> dict[str, str | None]:
    """What is installed here: the version of every part, None where there is none; of CUDA devices, their number."""
    found: dict[str, str | None] = {part.name: _package(part.name) for part in PARTS if part.name not in _NOT_PACKAGES}
    found["python"] = platform.python_version()
    return found | _accelerator()


def diagnose(found: Mapping[str, str | None], *, engine: Engine, family: str) -> list[Finding]:
    """What stands against `engine` running `family`; parts that it does not need are listed and never count."""
    findings: list[Finding] = []
    for part in PARTS:
        here = found[part.name]
        needed = engine in part.engines and (not part.families or family in part.families)
        fits = here is not None and SpecifierSet(part.supported).contains(here, prereleases=True)
        status: Status = ("ok" if fits else "off") if needed else "not needed"
        why = part.why if status == "off" else ""
        findings.append(Finding(name=part.name, found=here, supported=part.supported, status=status, why=why))
    system, own = found[_SYSTEM_CUDNN], found["cuDNN"]
    if engine == "bridge" and system is not None and system != own:
        why = (
            "Transformer Engine may load it and then refuses fused attention: set CUDNN_HOME and CUDNN_PATH to torch's"
        )
        findings.append(Finding(name=_SYSTEM_CUDNN, found=system, supported=f"=={own}", status="check", why=why))
    return findings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `vlm-cp doctor`."""
    parser.add_argument(
        "--engine", choices=get_args(Engine), default="hf", help="what is to run (default: %(default)s)"
    )
    parser.add_argument(
        "--family", choices=list(FAMILIES), default="qwen3_vl", help="model family (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Prints the findings; returns 1 when something that the engine needs is off, else 0."""
    findings = diagnose(probe(), engine=args.engine, family=args.family)
    healthy = all(finding.status != "off" for finding in findings)
    if args.json:
        rows = [asdict(finding) for finding in findings]
        json.dump({"engine": args.engine, "family": args.family, "ok": healthy, "parts": rows}, sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        print_findings(findings, Console(), title=f"{args.family} on the {args.engine} engine")
    return 0 if healthy else 1


def print_findings(findings: list[Finding], console: Console, *, title: str) -> None:
    """A table, and what is off in a sentence each."""
    styles = {"ok": "green", "off": "bold red", "check": "yellow", "not needed": "dim"}
    table = Table(title=title)
    for column in ("part", "installed", "supported", ""):
        table.add_column(column)
    for finding in findings:
        style = styles[finding.status]
        table.add_row(finding.name, finding.found or "-", finding.supported, finding.status, style=style)
    console.print(table)
    for finding in findings:
        if finding.why:
            here = finding.found or "none"
            console.print(f"{finding.name} must be {finding.supported}, got {here}; {finding.why}", highlight=False)
    if all(finding.status != "off" for finding in findings):
        console.print("[green]everything that is needed is there")


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _accelerator() -> dict[str, str | None]:
    """What torch was built with, and the devices that it sees."""
    found: dict[str, str | None] = dict.fromkeys(("CUDA device", "CUDA", "cuDNN", "NCCL", _SYSTEM_CUDNN))
    if torch.version.cuda is None:
        return found
    found |= {"CUDA": torch.version.cuda, "CUDA device": str(torch.cuda.device_count())}
    if (number := torch.backends.cudnn.version()) is not None:
        found["cuDNN"] = _cudnn_version(number)
        found[_SYSTEM_CUDNN] = _system_cudnn(number // 10000)
    if torch.distributed.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _system_cudnn(major: int) -> str | None:
    """The cuDNN that the loader finds in a process without torch; None where it finds none."""
    code = f"import ctypes; print(ctypes.CDLL('libcudnn.so.{major}').cudnnGetVersion())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return _cudnn_version(int(done.stdout)) if done.returncode == 0 else None


def _cudnn_version(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
