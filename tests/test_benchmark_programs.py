"""The benchmark programs that need no peer's file, run small on the CPU: what they print can be read, and parity holds."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from benchmarks import run
from benchmarks.longest import Bracket, search

Row = dict[str, Any]


def _rank(arguments: list[str], environment: dict[str, str], out: Path) -> None:
    os.environ.update(environment)
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = sys.stderr = open(file, "w", buffering=1, closefd=False)
    sys.argv = ["benchmarks.run", *arguments]
    os._exit(run.main())


def program(folder: Path, arguments: list[str], ranks: int = 1) -> tuple[int, str]:
    """(the largest exit status, what rank 0 wrote) of `benchmarks.run` on forked ranks, which need not import Megatron again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(ranks):
        environment = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": port}
        target = partial(_rank, arguments, environment, folder / f"out{rank}")
        processes.append(multiprocessing.get_context("fork").Process(target=target))
        processes[-1].start()
    for process in processes:
        process.join(100)
    return max(abs(process.exitcode) for process in processes), (folder / "out0").read_text()


def rows(folder: Path, arguments: list[str], ranks: int = 1) -> list[Row]:
    import bridge_on_cpu  # noqa: F401  before the fork

    file = folder / "rows.json"
    code, out = program(folder, [*arguments, "--device", "cpu", "--json", str(file)], ranks)
    assert code == 0, out[-3000:]
    return json.loads(file.read_text())["rows"]


STEP = ["--case", "step", "--shape", "tiny", "--cases", "image", "--tokens", "8192", "--rounds", "1"]


def test_step_on_one_rank(tmp_path: Path) -> None:
    """Stock against this package at CP=1 alone."""
    found = {row["arm"]: row for row in rows(tmp_path, [*STEP, "--rotary"])}
    assert list(found) == ["cp1_stock", "cp1_vlm_cp"]
    ours = found["cp1_vlm_cp"]
    assert ours["speedup_vs_stock"] == pytest.approx(found["cp1_stock"]["ms"] / ours["ms"], abs=1e-3)
    assert ours["efficiency"] == 1
    assert ours["parity"]["grad_worst"] < 1e-5


def test_step_on_two_ranks(tmp_path: Path) -> None:
    found = {row["arm"]: row for row in rows(tmp_path, STEP, ranks=2)}
    assert {"cp1_stock", "cp1_vlm_cp", "cp2_stock_best", "cp2_vlm_cp"} < set(found)
    assert found["cp2_stock_best"]["speedup_vs_stock"] == 1
    ours = found["cp2_vlm_cp"]
    assert ours["efficiency"] == pytest.approx(found["cp1_vlm_cp"]["ms"] / 2 / ours["ms"], abs=1e-3)


def test_vision(tmp_path: Path) -> None:
    case = ["--case", "vision", "--shape", "tiny", "--cases", "skewed", "--tokens", "16384", "--budget", "0"]
    found = {row["arm"]: row for row in rows(tmp_path, case, 2)}
    assert set(found) == {"stock", "replicated", "shared"}
    assert found["shared"]["mode"] == "mixed"
    assert max(row["rows"] for row in found.values()) < 1e-5


def test_logprobs(tmp_path: Path) -> None:
    found = rows(tmp_path, ["--case", "logprobs", "--tokens", "40", "--chunks", "16", "--rounds", "1"])
    assert not any("refused" in row for row in found)
    arms = {part: {row["arm"] for row in found if row["part"] == part} for part in {row["part"] for row in found}}
    own = {"vlm_cp", "vlm_cp_chunk16"}
    for part in ("logprobs", "with_entropy"):
        assert arms[f"{part}_forward"] == own
        assert arms[f"{part}_forward_backward"] == {*own, "vlm_cp_inplace"}
    assert arms["from_hidden_forward_backward"] == own


# The longest sequence that fits.


def by_limit(limit: int, tried: list[int], fixed: int = 0) -> Callable[[Bracket, float], Iterator[Row]]:
    """Launches as they would go where memory is `fixed` and one byte a token, and `limit` bytes are to be had."""

    def launch(bracket: Bracket, seconds: float) -> Iterator[Row]:
        while (tokens := bracket.next()) is not None:
            tried.append(tokens)
            yield {"trying": tokens}
            peak = tokens + fixed
            if peak > limit:
                yield {"failed": tokens, "why": "out of memory"}
                return
            bracket = bracket.fits(tokens, peak, limit + 700)  # what fragments cost is not known beforehand
            yield {"fits": tokens, "ms": 1.0, "peak": peak, "capacity": bracket.capacity}

    return launch


@pytest.mark.parametrize("limit", [1500, 32768, 40000, 99999, 131072, 262144 + 5000])
@pytest.mark.parametrize("fixed", [0, 500])
def test_search_finds_the_limit(limit: int, fixed: int) -> None:
    tried: list[int] = []
    row = search(by_limit(limit, tried, fixed), Bracket(step=1024, first=32768), 60)
    assert row["longest"] == (limit - fixed) // 1024 * 1024 or limit - fixed < 1024
    assert row["fails_at"] == row["longest"] + 1024
    assert "unfinished" not in row
    failures = sum(tokens + fixed > limit for tokens in tried)
    assert failures <= (6 if limit < 65536 else 3)  # halving, where two sizes never fitted


def test_search_ends_at_the_models_positions() -> None:
    tried: list[int] = []
    row = search(by_limit(10**9, tried), Bracket(step=1024, first=32768, most=100_000), 60)
    assert (row["longest"], row["fails_at"], "unfinished" in row) == (100_000, None, False)
    assert tried == [32768, 65536, 100_000]


def test_search_says_what_it_could_not_find() -> None:
    def killed(bracket: Bracket, seconds: float) -> Iterable[Row]:
        return [
            {"trying": 32768},
            {"fits": 32768, "ms": 1.0, "peak": 5, "capacity": 9},
            {"trying": 65536},
            {"late": True},
        ]

    row = search(killed, Bracket(step=1024, first=32768), 60)
    assert (row["longest"], row["fails_at"], row["unfinished"]) == (32768, None, "no time to search on")
    row = search(lambda *_: [{"why": "exit status 1"}], Bracket(step=1024, first=32768), 60)
    assert (row["longest"], row["unfinished"]) == (0, "no step ran; exit status 1")


@pytest.mark.parametrize(("kind", "ranks"), [("stock", 1), ("vlm_cp_from_hidden", 2)])
def test_longest_on_tiny_models(kind: str, ranks: int, tmp_path: Path) -> None:
    """Whole steps, up to a limit that is pretended."""
    import bridge_on_cpu  # noqa: F401  before the fork

    def launch(bracket: Bracket, seconds: float) -> list[Row]:
        case = ["--case", "longest", "--worker", "--case-name", "image", "--kind", kind, "--device", "cpu"]
        options = [
            "--shape",
            "tiny",
            "--pretend-limit",
            "30000",
            "--seconds",
            "60",
            "--bracket",
            json.dumps(vars(bracket)),
        ]
        code, out = program(tmp_path, [*case, *options], ranks)
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert code in (0, 3), out[-3000:]
        return lines

    row = search(launch, Bracket(step=4096, first=8192 * ranks), 60)
    assert row["longest"] == 28672 * ranks if ranks == 1 else row["longest"] == 57344
    assert row["fails_at"] == row["longest"] + 4096
