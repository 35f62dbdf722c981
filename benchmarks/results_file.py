"""Results files: `benchmarks/results/<kind>_<hardware>_<date>.json`, what was run, with which versions, and the rows.

    python -m benchmarks.results_file step FILE [FILE ...]

joins files that were written elsewhere (on a GPU host, command by command) into that one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformer-engine", "megatron-core", "megatron-bridge", "transformers", "vlm-cp")
Row = dict[str, Any]


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda and torch.cuda.is_available():
        found["cuda"], found["cudnn"] = torch.version.cuda, str(torch.backends.cudnn.version())
    return found


def hardware() -> str:
    """ "2xcpu" for two CPUs that this process may use, "2xh200" for two such devices, as tests/gpu/run.py calls them."""
    count = torch.cuda.device_count()
    if not count:
        return f"{len(os.sched_getaffinity(0))}xcpu"
    return f"{count}x{torch.cuda.get_device_name(0).removeprefix('NVIDIA ').lower().replace(' ', '-')}"


def command() -> str:
    """How this program was called, without a path of this machine."""
    arguments = [Path(x).name if os.path.isabs(x) else x for x in sys.argv[1:]]
    module = sys.modules["__main__"].__spec__
    program = f"python -m {module.name}" if module else Path(sys.argv[0]).name
    return f"{program} {' '.join(arguments)}".strip()


def write_results(kind: str, rows: Sequence[Row], path: Path | None = None) -> Path:
    """Writes the rows under the file's name for today, or to `path`, and returns where."""
    file = ResultsFile(kind, path, keys=())
    file.rows, file.commands = list(rows), [command()]
    file.write()
    return file.path


class ResultsFile:
    """Rows of one kind, on disk after every row, so that a run that is cut short keeps what it measured.

    keys: what tells one row from another. A row replaces the one with the same values; others, of earlier commands on the
    same versions and hardware, stay. A file of other versions or hardware is left alone and another name taken.
    more_versions: of what is measured beside the installed packages.
    """

    def __init__(
        self,
        kind: str,
        path: Path | None = None,
        *,
        keys: Sequence[str],
        more_versions: Mapping[str, str] | None = None,
    ) -> None:
        self.keys = tuple(keys)
        self.about = {"versions": {**versions(), **(more_versions or {})}, "hardware": hardware()}
        self.machine = platform.machine()
        self.path = path or RESULTS / f"{kind}_{hardware()}_{datetime.now(UTC):%Y-%m-%d}.json"
        self.rows: list[Row] = []
        self.commands: list[str] = []
        stem, number = self.path.stem, 1
        while keys and self.path.exists():
            found = json.loads(self.path.read_text())
            if {k: found.get(k) for k in self.about} == self.about:
                self.rows, self.commands = found["rows"], found["command"].split("; ")
                break
            number += 1
            self.path = self.path.with_name(f"{stem}_{number}.json")

    def add(self, rows: Iterable[Row]) -> None:
        """Appends rows, prints them as lines of JSON, and writes the file."""
        new = list(rows)
        for row in new:
            print(json.dumps(row), flush=True)
        self.rows = replaced(self.rows, new, self.keys)
        if command() not in self.commands:
            self.commands.append(command())
        self.write()

    def write(self) -> None:
        content = {
            **self.about,
            "machine": self.machine,
            "command": "; ".join(self.commands),
            "rows": self.rows,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        half = self.path.with_suffix(".tmp")
        half.write_text(json.dumps(content, indent=1) + "\n")
        half.replace(self.path)


def replaced(old: Sequence[Row], new: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """`old` without the rows that `new` measures again, then `new`."""
    again = {tuple(map(str, (row.get(k) for k in keys))) for row in new} if keys else set()
    return [row for row in old if tuple(map(str, (row.get(k) for k in keys))) not in again] + list(new)


def join(kind: str, files: Sequence[Path], keys: Sequence[str]) -> Path:
    """Joins files of the same versions and hardware into `benchmarks/results`; a later file's row replaces an earlier one's."""
    contents = [json.loads(file.read_text()) for file in files]
    about = {key: contents[0][key] for key in ("versions", "hardware", "machine")}
    for file, found in zip(files, contents, strict=True):
        if {key: found[key] for key in about} != about:
            raise ValueError(
                f"{file.name} must have the versions and hardware of {files[0].name}, got {found['versions']}; "
                "rows that cannot be compared would stand side by side"
            )
    rows: list[Row] = []
    for found in contents:
        rows = replaced(rows, found["rows"], keys)
    commands = dict.fromkeys(c for found in contents for c in found["command"].split("; "))
    path = RESULTS / f"{kind}_{about['hardware']}_{datetime.now(UTC):%Y-%m-%d}.json"
    path.write_text(json.dumps({**about, "command": "; ".join(commands), "rows": rows}, indent=1) + "\n")
    return path


# What tells rows of a kind from one another.
KEYS = {
    "step": ("case", "arm", "tokens", "recompute", "overlap_grad_reduce", "options"),
    "vision": ("case", "arm", "tokens", "recompute"),
    "mrope": ("tokens", "media", "device", "arm"),
    "pack": ("samples", "width", "part", "device", "arm"),
    "logprobs": ("tokens", "vocab", "part", "device", "arm"),
    "longest": ("case", "arm"),
    "exchange": ("samples", "tokens", "arm"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=tuple(KEYS))
    parser.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    print(join(args.kind, args.files, KEYS[args.kind]))


if __name__ == "__main__":
    main()
