"""All parity rows on two GPUs, in the runner's own processes; see run.py for the rows and tolerances.py for the bounds."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
NEEDED = ("transformer_engine", "megatron", "fla")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    out = tmp_path_factory.mktemp("parity")
    subprocess.run([sys.executable, HERE / "run.py", "--out", out], check=False, timeout=1100)
    (file,) = out.glob("parity_*.json")
    return json.loads(file.read_text())["rows"]


@pytest.mark.gpu(2)
@pytest.mark.timeout(1200)
def test_every_row_is_within_its_tolerance(rows: list[dict[str, Any]]) -> None:
    outside = [{k: v for k, v in row.items() if k != "parameters"} for row in rows if not row["passed"]]
    assert rows
    assert not outside
