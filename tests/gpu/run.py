"""Runs the parity rows on two ranks and writes benchmarks/results/parity_<hardware>_<date>.json.

    python tests/gpu/run.py [--items qwen3_vl/cp1,qwen3_vl/cp2] [--budget 480] [--device cuda|cuda:0|cpu]

All items share two worker processes, since importing the stack costs half a minute. An item that fails, or hangs, takes
its workers with it; it is recorded with the end of their output and the rest goes on in new ones. Exits 1 if a row did
not pass. --device cuda:0 has both ranks on one GPU, over gloo: the same kernels and cuts without NCCL, for layouts that send
nothing from one rank to another (no p2p ring, no pipeline). --device cpu tries the runner itself, where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import layouts
from tolerances import judged

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACKAGES = (
    "torch",
    "transformer-engine",
    "megatron-core",
    "megatron-bridge",
    "transformers",
    "flash-linear-attention",
    "vlm-cp",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", help="comma-separated family/layout; all without it")
    parser.add_argument(
        "--budget", type=float, default=480.0, help="seconds after which no item is begun; all ends a minute later"
    )
    parser.add_argument("--device", choices=("cuda", "cuda:0", "cpu"), help="cuda with two GPUs, cuda:0 with one")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--work", type=Path, help="where checkpoints and logs go; a temporary folder without it")
    parser.add_argument(
        "--judge", type=Path, help="no run: judge a results file's measured rows by tolerances.py again"
    )
    args = parser.parse_args()
    if args.judge:
        return judge_again(args.judge)
    args.device = args.device or ("cuda" if len(gpu_names()) > 1 else "cuda:0")
    todo = args.items.split(",") if args.items else ["/".join(item) for item in layouts.items(args.device)]
    work: Path = args.work or Path(tempfile.mkdtemp(prefix="vlm_cp_parity_"))
    work.mkdir(parents=True, exist_ok=True)
    rows = run_items(todo, work, args.device, time.time() + args.budget)
    args.out.mkdir(parents=True, exist_ok=True)
    hardware = hardware_name(args.device)
    file = args.out / f"parity_{hardware}_{time.strftime('%Y-%m-%d')}.json"
    items = f" --items {args.items}" if args.items else ""  # never a path of this machine
    write_results(file, rows, f"python tests/gpu/run.py --device {args.device}{items}")
    print(table(rows))
    print(f"{file.name}: {sum(r['passed'] for r in rows)} of {len(rows)} rows passed")
    if args.work is None:
        shutil.rmtree(work)
    return 0 if rows and all(row["passed"] for row in rows) else 1


def judge_again(file: Path) -> int:
    """Replaces verdicts, not numbers, and says so in the file; for when a bound or the floor's definition has changed."""
    result = json.loads(file.read_text())
    measured = [row for row in result["rows"] if "logprob_mean_abs" in row]
    # A family's last case holds the batches of all others.
    floors = {row["family"]: row["logprob_mean_abs"] for row in measured if row["layout"] == "floor-kernel"}
    for row in measured:
        row.update(judged(row, row["layout"].split(" ")[0], floors.get(row["family"])))
    result["judged"] = f"verdicts by tests/gpu/tolerances.py of {time.strftime('%Y-%m-%d')}; numbers as measured"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["rows"]))
    return 0 if all(row["passed"] for row in result["rows"]) else 1


def write_results(file: Path, rows: list[dict[str, Any]], command: str) -> None:
    """Writes the rows; those of other items, run earlier that day on the same versions, stay."""
    if file.exists():
        earlier = json.loads(file.read_text())
        if earlier["versions"] == versions():
            items = {row["item"] for row in rows}
            rows = [row for row in earlier["rows"] if row["item"] not in items] + rows
            command = f"{earlier['command']}; {command}"
    file.write_text(json.dumps({"versions": versions(), "command": command, "rows": rows}, indent=1) + "\n")


def run_items(todo: list[str], work: Path, device: str, deadline: float) -> list[dict[str, Any]]:
    """All rows: what the workers wrote, and one for every item that failed or that there was no time for."""
    lines, current = work / "rows.jsonl", work / "current"
    failed: list[dict[str, Any]] = []
    attempt = 0
    while todo and time.time() < deadline:
        attempt += 1
        current.unlink(missing_ok=True)
        codes = run_workers(todo, work, device, deadline, attempt)
        done = {json.loads(line)["item"] for line in lines.read_text().splitlines()} if lines.exists() else set()
        todo = [item for item in todo if item not in done]
        if any(codes) and todo:
            item = current.read_text() if current.exists() else todo[0]
            failed.append(failure(item, f"workers ended with {codes}: {last_words(work, attempt)}"))
            todo = [x for x in todo if x != item]
    failed += [failure(item, "no time was left") for item in todo]
    found = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return found + failed


def run_workers(todo: list[str], work: Path, device: str, deadline: float, attempt: int) -> list[int]:
    """Exit codes of both ranks; when one ends early, or an item outlives its limit, the other is ended too."""
    port = free_port()
    processes: list[subprocess.Popen[bytes]] = []
    for rank in range(2):
        path = os.pathsep.join(
            [str(HERE), str(HERE.parent), str(ROOT), str(ROOT / "hooks"), os.environ.get("PYTHONPATH", "")]
        )
        env = {
            **os.environ,
            "PYTHONPATH": path,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, "-u", str(HERE / "worker.py"), "--work", str(work), "--device", device]
        log = (work / f"log.{attempt}.{rank}").open("wb")
        processes.append(
            subprocess.Popen([*command, "--deadline", str(deadline), *todo], env=env, stdout=log, stderr=log)
        )
    ended: float | None = None
    while any(p.poll() is None for p in processes):
        time.sleep(0.2)
        if any(p.poll() not in (None, 0) for p in processes) and ended is None:
            ended = time.time()
        if (ended is not None and time.time() > ended + 10) or time.time() > deadline + 60:
            for process in processes:
                process.kill()
    return [p.wait() for p in processes]


def failure(item: str, error: str) -> dict[str, Any]:
    family, layout = item.split("/")
    return {"item": item, "family": family, "layout": layout, "error": error, "passed": False}


def last_words(work: Path, attempt: int) -> str:
    """The error that a rank named, or where it stood when its time was up, else the ends of both logs."""
    texts = [(work / f"log.{attempt}.{rank}").read_text(errors="replace") for rank in range(2)]
    lines = [re.sub(r"^\[rank\d\]:\s*", "", line) for text in texts for line in text.strip().splitlines()[-60:]]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    if errors:
        return errors[0]
    if any(line.startswith("Timeout (") for line in lines):
        frames = [line.strip() for line in lines if line.lstrip().startswith("File ")]
        return "longer than its limit, in " + " < ".join(frames[:4])
    return " | ".join(line for text in texts for line in text.strip().splitlines()[-4:])


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def versions() -> dict[str, str]:
    found: dict[str, str] = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def hardware_name(device: str) -> str:
    if device == "cpu":
        return "cpu"
    count = 2 if device == "cuda" else 1
    return f"{count}x" + re.sub(r"[^a-z0-9]+", "-", gpu_names()[0].lower().removeprefix("nvidia ")).strip("-")


def gpu_names() -> list[str]:
    """Of every GPU in this machine."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


def table(rows: list[dict[str, Any]]) -> str:
    """One line a row."""
    lines = [f"{'row':44} {'mean|dlogp|':>12} {'floor':>9} {'max':>9} {'grad ratio':>11} {'worst grad':>11}  s"]
    for row in rows:
        name = f"{row['family']} {row['layout']} {row.get('case', '')}"[:44]
        cells = [
            row.get(k)
            for k in ("logprob_mean_abs", "logprob_floor", "logprob_max_abs", "grad_norm_ratio", "grad_max_rel")
        ]
        widths = (12, 9, 9, 11, 11)
        text = " ".join(f"{'' if x is None else f'{x:.6f}':>{w}}" for x, w in zip(cells, widths, strict=True))
        mark = "" if row["passed"] else f"  FAILED {row.get('error', '')}"
        flips = f"  flips {row['routing_flips']}" if "routing_flips" in row else ""
        lines.append(f"{name:44} {text}  {row.get('seconds', '')}{flips}{mark}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
