"""Results files: `benchmarks/results/<kind>_<hardware>_<date>.json`, what was run, with which versions, and the rows."""

from __future__ import annotations

import json
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
    """ "cpu2" for two CPU threads in reach, "h200x2" for two such devices."""
    count = torch.cuda.device_count()
    if not count:
        return f"cpu{len_affinity()}"
    return f"{torch.cuda.get_device_name(0).removeprefix('NVIDIA ').lower().replace(' ', '-')}x{count}"


def len_affinity() -> int:
    """CPUs that this process may use."""
    import os

    return len(os.sched_getaffinity(0))


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
