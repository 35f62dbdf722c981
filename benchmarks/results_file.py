"""Results files: `benchmarks/results/<kind>_<hardware>_<date>.json`, what was run, with which versions, and the rows."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from vlm_cp.report import versions

RESULTS = Path(__file__).parent / "results"


def hardware() -> str:
    """ "2xcpu" for two CPUs that this process may use, "2xh200" for two such devices, as tests/gpu/run.py calls them."""
    count = torch.cuda.device_count()
    if not count:
        return f"{len(os.sched_getaffinity(0))}xcpu"
    return f"{count}x{torch.cuda.get_device_name(0).removeprefix('NVIDIA ').lower().replace(' ', '-')}"


def write_results(kind: str, rows: Sequence[dict[str, Any]], path: Path | None = None) -> Path:
    """Writes the rows under the file's name for today, or to `path`, and returns where."""
    path = path or RESULTS / f"{kind}_{hardware()}_{datetime.now(UTC):%Y-%m-%d}.json"
    content = {
        "versions": versions(),
        "machine": platform.machine(),
        "command": f"python -m {sys.modules['__main__'].__spec__.name} {' '.join(sys.argv[1:])}".strip(),
        "rows": list(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
