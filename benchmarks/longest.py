"""Case f: the longest sample whose training step fits into memory, stock and with this package, at CP=1 and CP=n.

    python -m benchmarks.run --case longest [--cases text,image] [--arms cp1_stock,cp1_vlm_cp] [--budget 560]

A step is forward, backward with full recompute, and the sum of gradients; no optimizer state. Sizes double until one fails,
then go where the peaks of those that fit point to, to --step tokens, at most to the model's number of positions. Ranks run
in processes of their own, which end with their first failure, since an error of allocation leaves tensors behind. Arms of
CP=n run on all GPUs of the host; with one GPU there are none. `_from_hidden` computes log-probabilities without logits
(`vlm_cp.logprobs.output_processor`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import SHAPES, Sample, pack, square
from benchmarks.results_file import KEYS, ResultsFile

Row = dict[str, Any]
CASES: dict[str, Callable[[int], list[Sample]]] = {
    "text": lambda tokens: [(tokens, [])],
    # Three of four tokens are features of images of 64 x 64 patches.
    "image": lambda tokens: [(tokens, [square(64)] * max(tokens * 3 // 4 // 1024, 1))],
}
KINDS = ("stock", "vlm_cp", "vlm_cp_from_hidden")


@dataclass(frozen=True, kw_only=True)
class Bracket:
    """What is known: `good` tokens fit (0: none yet), `bad` do not (None: unknown); the largest two (tokens, bytes) that fit.

    most: positions of the model, beyond which nothing is tried.
    """

    step: int
    first: int
    most: int = 2**62
    good: int = 0
    bad: int | None = None
    failures: int = 0
    peaks: tuple[tuple[int, int], ...] = ()
    capacity: int = 0

    def fits(self, tokens: int, peak: int, capacity: int) -> Bracket:
        return replace(self, good=tokens, peaks=(*self.peaks, (tokens, peak))[-2:], capacity=capacity)

    def fails(self, tokens: int) -> Bracket:
        return replace(self, bad=tokens, failures=self.failures + 1)

    def pointed_to(self) -> int | None:
        """The tokens at which a straight line through the two peaks reaches the capacity."""
        if len(self.peaks) < 2 or self.peaks[1][1] <= self.peaks[0][1]:
            return None
        (tokens0, peak0), (tokens1, peak1) = self.peaks
        return int(tokens1 + (self.capacity - peak1) * (tokens1 - tokens0) / (peak1 - peak0))

    def next(self) -> int | None:
        """The tokens to try next; None when the bracket is no wider than a step, or `most` tokens fit.

        Without a failure, what the peaks point to, at most twice what fits. Below a failure, what they point to if that
        is less; else one step less, then 2, 4, ... so that a wrong guess costs few failures, but never less than the
        middle, which it is where nothing is pointed to.
        """
        pointed = self.pointed_to()
        if self.good >= self.most:
            return None
        if self.bad is None:
            guess = max(min(pointed or 2 * self.good, 2 * self.good), self.first if not self.good else 0)
        elif self.bad - self.good <= self.step:
            return None
        else:
            less = self.bad - self.step * 2 ** (self.failures - 1)
            guess = 0 if pointed is None else pointed if pointed < self.bad else less
            guess = min(max(guess, (self.good + self.bad) // 2), self.bad - self.step)
        return min(max(guess // self.step * self.step, self.good + self.step), self.most)


# A rank's part.


def work(args: argparse.Namespace) -> int:
    """Tries sizes until one fails, a line of JSON before and after each; the process ends with the failure."""
    import torch.distributed as dist

    from benchmarks.arms import Arm, Resident
    from benchmarks.models import start

    device = start(args.device)
    cp, rank = dist.get_world_size(), dist.get_rank()
    begin, bracket, on_cpu = time.perf_counter(), Bracket(**json.loads(args.bracket)), device.type == "cpu"
    stock = args.kind == "stock"
    arm = Arm(cp, stock, by_count=stock and cp > 1 and args.case != "text" and not on_cpu)
    models = Resident(SHAPES[args.shape], device, recompute=True, tower={"fuse": not on_cpu})
    models.model(arm.cp, arm.stock)
    models.wrap(overlap=False)

    def say(**values: Any) -> None:
        print(json.dumps(values), flush=True)

    while (tokens := bracket.next()) is not None and not _late(begin, args.seconds):
        if rank == 0:
            say(trying=tokens)
        try:
            ms, peak, capacity = attempt(args, models, arm, tokens)
        except Exception as error:  # the other ranks wait in a collective: the launcher ends them
            memory = isinstance(error, torch.OutOfMemoryError)
            say(failed=tokens, why="out of memory" if memory else f"{type(error).__name__}: {error}"[:200])
            sys.stdout.flush()
            os._exit(3)
        bracket = bracket.fits(tokens, peak, capacity)
        if rank == 0:
            say(fits=tokens, ms=ms, peak=peak, capacity=capacity)
    return 0


def _late(begin: float, seconds: float) -> bool:
    from benchmarks.timing import together

    return together(time.perf_counter() - begin > seconds)


def attempt(args: argparse.Namespace, models: Any, arm: Any, tokens: int) -> tuple[float, int, int]:
    """(ms, peak bytes of the fullest rank, bytes that such a rank may have) of one step."""
    from benchmarks.timing import once
    from vlm_cp.alignment import Alignment

    shape, alignment = SHAPES[args.shape], Alignment(cp_size=arm.cp)
    batch = pack(CASES[args.case](tokens), shape, alignment, models.spec).to(models.device)
    built = models.activate(arm, batch)
    scale = 1.0 / sum(batch.plan.lengths)
    if args.kind.endswith("_from_hidden"):
        run = partial(_step_from_hidden, built, batch, scale)
    else:
        run = partial(models.step, arm, batch, scale=scale)
    ms, *_ = once(run)
    if args.pretend_limit and tokens > args.pretend_limit * arm.cp:
        raise torch.OutOfMemoryError("pretended")
    if models.device.type == "cpu":
        return ms, tokens, args.pretend_limit * arm.cp
    peak = torch.cuda.max_memory_allocated()
    free, total = torch.cuda.mem_get_info()
    capacity = total - (total - free - torch.cuda.memory_reserved())
    torch.cuda.empty_cache()
    return ms, *_fullest(peak, capacity, models.device)


def _step_from_hidden(built: Any, batch: Any, scale: float) -> None:
    from vlm_cp.logprobs import output_processor

    inputs = built.engine.inputs(batch, built.ddp)
    inputs["output_processor"] = output_processor(batch.input_ids, batch.plan, cp_rank=built.engine.cp_rank)
    logprobs = built.ddp(**inputs)
    (-logprobs.sum() * scale).backward()
    built.ddp.finish_grad_sync()


def _fullest(peak: int, capacity: int, device: torch.device) -> tuple[int, int]:
    """Of the ranks, the one with the least left."""
    import torch.distributed as dist

    found = torch.tensor([peak, capacity], device=device)
    every = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(every, found)
    most, least = min((x.tolist() for x in every), key=lambda x: x[1] - x[0])
    return most, least


# The search.


def search(launch: Callable[[Bracket, float], Iterable[Row]], bracket: Bracket, seconds: float) -> Row:
    """Launches processes until the bracket is one step wide or `seconds` are over. launch: -> their lines, as they come."""
    begin, row = time.perf_counter(), Row()
    why, late = "", False
    while bracket.next() is not None and (left := seconds - (time.perf_counter() - begin)) > 0:
        trying = None
        for line in launch(bracket, left):
            if "trying" in line:
                trying = line["trying"]
            if "fits" in line:
                bracket = bracket.fits(line["fits"], line["peak"], line["capacity"])
                row |= {"ms": round(line["ms"], 1), "peak_gib": round(line["peak"] / 2**30, 2)}
                trying = None
            why = line.get("why", why)
            late = late or "late" in line
        if trying is None or late:
            break  # it stopped by itself, was stopped, or never began
        bracket = bracket.fails(trying)
    row |= {"longest": bracket.good, "fails_at": bracket.bad, "why": why}
    if bracket.next() is not None:
        row["unfinished"] = "no time to search on" if bracket.good else f"no step ran; {why}"
    return row


def launched(
    args: argparse.Namespace, case: str, kind: str, ranks: int, bracket: Bracket, seconds: float
) -> Iterator[Row]:
    """The lines of one launch of `ranks` processes; they are killed --grace seconds after their time is over."""
    options = ["--device", args.device, "--shape", args.shape, "--pretend-limit", str(args.pretend_limit)]
    own = [
        "--worker",
        "--case-name",
        case,
        "--kind",
        kind,
        "--bracket",
        json.dumps(vars(bracket)),
        "--seconds",
        str(seconds),
    ]
    program = [sys.executable, "-m"]
    if ranks > 1:
        program += ["torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(args.port), "-m"]
    command = [*program, "benchmarks.run", "--case", "longest", *options, *own]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "MASTER_PORT": str(args.port)}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, start_new_session=True
        )
        assert process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(seconds + args.grace, end)
        timer.start()
        failed = False
        for line in process.stdout:
            if line.startswith("{"):
                found = json.loads(line)
                failed = failed or "failed" in found
                yield found
        code = process.wait()
        timer.cancel()
        if late.is_set():
            yield {"late": True}
        elif code and not failed:
            yield {"why": f"exit status {code}"}
        errors.seek(0)
        if args.verbose:
            print(errors.read()[-3000:], file=sys.stderr)


def record(path: Path | None, rows: list[Row]) -> None:
    """Writes rows from another process: naming the hardware opens a CUDA context, which takes memory from what is measured."""
    process = multiprocessing.get_context("spawn").Process(target=_record, args=(path, rows))
    process.start()
    process.join()


def _record(path: Path | None, rows: list[Row]) -> None:
    ResultsFile("longest", path, keys=KEYS["longest"]).add(rows)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.run --case longest", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="2b")
    parser.add_argument("--cases", default="text,image", help=f"of {', '.join(CASES)}")
    parser.add_argument("--arms", default="", help="only arms whose names begin with one of these")
    parser.add_argument("--ranks", type=int, help="of the CP=n arms; all GPUs of the host without it")
    parser.add_argument("--first", type=int, default=32768, help="tokens tried first at CP=1; n times as many at CP=n")
    parser.add_argument("--step", type=int, default=1024, help="tokens up to which the limit is found")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for all, dealt out evenly")
    parser.add_argument("--grace", type=int, default=90, help="seconds beyond its share that a launch may take to end")
    parser.add_argument("--port", type=int, default=29671)
    parser.add_argument(
        "--pretend-limit", type=int, default=0, help="tokens a rank beyond which a step is said to fail"
    )
    parser.add_argument("--json", type=Path, help="results file; the one of today without it")
    parser.add_argument("--verbose", action="store_true", help="what the processes wrote to stderr")
    hidden = parser.add_argument_group("of the processes that this program launches")
    hidden.add_argument("--worker", action="store_true")
    hidden.add_argument("--case-name", dest="case")
    hidden.add_argument("--kind", choices=KINDS)
    hidden.add_argument("--bracket")
    hidden.add_argument("--seconds", type=float)
    args = parser.parse_args(arguments)
    if args.worker:
        return work(args)
    ranks = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 1)
    if ranks == 1:
        print("one GPU: only the arms of CP=1 can run", flush=True)
    begin = time.perf_counter()
    arms = [(cp, kind) for cp in dict.fromkeys((1, ranks)) for kind in KINDS]
    wanted = [
        (c, cp, k)
        for c in args.cases.split(",")
        for cp, k in arms
        if f"cp{cp}_{k}".startswith(tuple(args.arms.split(",")))
    ]
    good = True
    for number, (case, cp, kind) in enumerate(wanted):
        share = (args.budget - (time.perf_counter() - begin)) / (len(wanted) - number)
        most = SHAPES[args.shape].text["max_position_embeddings"] * SHAPES[args.shape].scale ** 2
        bracket = Bracket(step=args.step, first=args.first * cp, most=most)
        row = search(partial(launched, args, case, kind, cp), bracket, share)
        good = good and row["longest"] > 0
        record(args.json, [{"case": case, "arm": f"cp{cp}_{kind}", "cp": cp, "step": args.step, **row}])
    return 0 if good else 1
