"""Case a, the whole training step: forward, backward and the sum of gradients over the ranks, against stock Megatron-Bridge.

    torchrun --nproc_per_node 2 -m benchmarks.run --case step [--cases skewed,image,text,long] [--tokens 32768] [--budget 280]
    python -m benchmarks.run --case step    # one GPU: stock against this package at CP=1 alone

Arms (benchmarks/arms.py): Bridge as it is and this package, at CP=1 and CP=n; at CP=1 every rank runs the whole batch, so that
CP=n is ideal at 1/n of its time. All arms run the same weights and batch, in turn, round by round. Before an arm is timed, its
losses and gradients are compared with stock CP=1's; an arm that differs is refused. For that comparison alone stock is
repaired (megatron-bridge 0.6.2 loses deepstack gradients under full recompute); it is timed as it comes. Of stock's
switches all are run once and the best two to the end; `cp2_stock_best` is the best of them, also against luck of this run.
"""

from __future__ import annotations

import argparse
import faulthandler
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arms import Arm, Resident, all_arms, whole_losses
from benchmarks.cases import CASES, SHAPES, make_batch
from benchmarks.models import start
from benchmarks.results_file import KEYS, ResultsFile
from benchmarks.sketch import Sketch, compare
from benchmarks.timing import Sample, once, summary, together
from vlm_cp.alignment import Alignment
from vlm_cp.batch import PackedBatch
from vlm_cp.mrope import packed_position_ids

Row = dict[str, Any]


class StepBenchmark:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begin = args, time.perf_counter()
        self.device = start(args.device)
        self.cp, self.rank = dist.get_world_size(), dist.get_rank()
        on_cpu = args.device == "cpu"
        tower: dict[str, Any] = {"fuse": not on_cpu, "recompute_layers": args.tower_recompute}
        if on_cpu:
            tower["min_patches"] = 0
        hooks = []
        if args.rotary:
            from vlm_cp_hooks import fuse_text_rotary

            hooks.append(fuse_text_rotary)
        self.models = Resident(SHAPES[args.shape], self.device, recompute=args.recompute, hooks=hooks, tower=tower)
        self.options = {"rotary": args.rotary, "tower_recompute": args.tower_recompute}
        for arm in self.wanted():
            self.models.model(arm.cp, arm.stock)
        self.file = ResultsFile("step", args.json, keys=KEYS["step"]) if self.rank == 0 else None
        self.say(f"built {len(self.models.built)} models in {time.perf_counter() - self.begin:.0f} s")

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{time.perf_counter() - self.begin:.0f} s] {text}", flush=True)

    def wanted(self, *, by_count: bool = False) -> list[Arm]:
        """The arms to run; stock CP=1 always, since it is what the others are compared with."""
        arms = all_arms(self.cp, by_count=by_count, every_comm=self.args.every_comm)
        named = self.args.arms.split(",") if self.args.arms else [""]
        return [arm for number, arm in enumerate(arms) if not number or any(arm.name.startswith(n) for n in named)]

    def late(self, spare: float = 0.0) -> bool:
        """Whether the budget is used up but for `spare` seconds; rank 0's clock, on all ranks."""
        return together(time.perf_counter() - self.begin > self.args.budget - spare)

    def batches(self, case: str, tokens: int) -> tuple[dict[int, PackedBatch], float]:
        """The batch by cp_size, on the device; and the ms that a data loader spends on media and positions, on one thread."""
        found: dict[int, PackedBatch] = {}
        times: list[float] = []
        for cp in {arm.cp for arm in self.wanted()}:
            batch = make_batch(case, tokens, SHAPES[self.args.shape], Alignment(cp_size=cp), self.models.spec)
            for _ in range(3):
                begin = time.perf_counter()
                packed_position_ids(
                    batch.input_ids,
                    replace(batch.plan),
                    image_grid_thw=batch.image_grid_thw,
                    video_grid_thw=batch.video_grid_thw,
                    spec=self.models.spec,
                )
                times.append((time.perf_counter() - begin) * 1e3)
            found[cp] = batch.to(self.device)
        return found, round(min(times), 2)

    def case(self, case: str, tokens: int) -> list[Row]:
        batches, positions_ms = self.batches(case, tokens)
        # The uneven gather of Bridge's vision_dp_when_cp is NCCL's alone.
        arms = self.wanted(by_count=case not in ("text", "long") and self.device.type == "cuda")
        self.reference: tuple[str, torch.Tensor, Sketch] | None = None
        rows: dict[str, Row] = {}
        self.models.repair(True)
        for arm in arms:
            rows[arm.name] = self.attempt(arm, lambda arm=arm: self.parity(arm, batches[arm.cp]))
        self.models.repair(self.models.must_stay_repaired)
        usable = [arm for arm in arms if "refused" not in rows[arm.name]]
        self.say(f"{case} {tokens}: compared {len(arms)} arms, {len(usable)} of them usable")
        samples = self.rounds(usable, batches, rows)
        for arm in usable:
            if samples[arm] and "refused" not in rows[arm.name]:
                rows[arm.name] |= summary(samples[arm])
        about = {
            "case": case,
            "tokens": tokens,
            "patches": int(batches[1].media.grids.prod(1).sum()),
            "recompute": self.args.recompute,
            "overlap_grad_reduce": self.models.overlap,
            "stock_repaired": self.models.must_stay_repaired,
            "positions_host_ms": positions_ms,
            "options": self.options,
        }
        return [about | row for row in judged(rows)]

    def attempt(self, arm: Arm, run: Callable[[], Row]) -> Row:
        """`run()`'s row, or the reason why there is none; the ranks agree on which."""
        row: Row = {"arm": arm.name, "cp": arm.cp, "stock": arm.stock, "by_count": arm.by_count}
        failed = False
        try:
            row |= run()
        except torch.OutOfMemoryError:
            failed, row["refused"] = True, "out of memory"
        except Exception as error:
            failed, row["refused"] = True, f"{type(error).__name__}: {error}"[:300]
            if self.args.verbose:
                traceback.print_exc()
        if together(failed, any_rank=True):
            row.setdefault("refused", "another rank failed")
            self.models.wrap_again(self.models.model(arm.cp, arm.stock))
            torch.cuda.empty_cache()
        if "refused" in row:
            self.say(f"{arm.name}: {row['refused']}")
        return row

    def parity(self, arm: Arm, batch: PackedBatch) -> Row:
        """One step against that of the first arm that runs, stock CP=1 if it fits: losses and gradients; refused beyond bounds."""
        built = self.models.activate(arm, batch)
        losses = whole_losses(self.models.step(arm, batch, scale=self.scale(arm, batch)), batch, built)
        sketch = Sketch.of(built.ddp)
        if self.reference is None:
            self.reference = arm.name, losses, sketch
        row: Row = {"cp_comm_type": self.models.choice.comm_type if self.models.choice else arm.comm}
        name, *reference = self.reference
        row["parity"], fault = compare(losses, sketch, *reference, device=self.device.type)
        row["parity"]["against"] = name
        return row | ({"refused": f"differs from {name}: {fault}"} if fault else {})

    def scale(self, arm: Arm, batch: PackedBatch) -> float:
        """Gradients are summed over all ranks, of which cp share a copy of the batch: every arm's is the mean over its tokens."""
        copies = self.cp // arm.cp
        return 1.0 / (sum(batch.plan.lengths) * copies)

    def rounds(self, arms: list[Arm], batches: dict[int, PackedBatch], rows: dict[str, Row]) -> dict[Arm, list[Sample]]:
        """All arms in turn; after the first round only the best two of stock's switches go on. A failure goes into `rows`."""
        samples: dict[Arm, list[Sample]] = {arm: [] for arm in arms}
        running = arms
        for number in range(self.args.rounds):
            if number >= 1 and self.late():
                break
            for arm in running:
                found = self.attempt(arm, lambda arm=arm: self.timed(arm, batches[arm.cp], samples[arm]))
                rows[arm.name] |= found
            running = [arm for arm in running if "refused" not in rows[arm.name]]
            if number == 0:
                switched = sorted((a for a in running if a.stock and a.cp > 1), key=lambda a: samples[a][0][0])
                kept = rank_0s([a not in switched[2:] for a in running])
                running = [arm for arm, keep in zip(running, kept, strict=True) if keep]
        return samples

    def timed(self, arm: Arm, batch: PackedBatch, samples: list[Sample]) -> Row:
        built, scale = self.models.activate(arm, batch), self.scale(arm, batch)
        samples.append(once(lambda: self.models.step(arm, batch, scale=scale)))
        if len(samples) > 1:
            return {}
        reduce = self.models.reduce_gradients(built)
        times: list[float] = []
        for _ in range(3):
            built.ddp.zero_grad_buffer()
            times.append(once(reduce)[0])
        return {"grad_reduce_ms": round(sorted(times)[1], 2)}

    def run(self) -> int:
        good = True
        for overlap in self.args.overlap.split(","):
            self.models.wrap(overlap=overlap == "on")
            for tokens in map(int, self.args.tokens.split(",")):
                for case in self.args.cases.split(","):
                    if self.late(spare=self.args.reserve):
                        self.say(f"no time for {case} {tokens} overlap {overlap}")
                        continue
                    faulthandler.dump_traceback_later(self.args.timeout, exit=True)
                    rows = self.case(case, tokens)
                    good = good and not any("differs" in row.get("refused", "") for row in rows)
                    if self.file:
                        self.file.add(rows)
        faulthandler.cancel_dump_traceback_later()
        if self.file:
            print(self.file.path.name)
        return 0 if good else 1


def judged(rows: dict[str, Row]) -> list[Row]:
    """Rows with `efficiency`, `speedup_vs_stock`, and one more, cp<n>_stock_best, for the fastest of stock's switches."""
    timed = {name: row for name, row in rows.items() if "ms" in row}
    best: dict[int, Row] = {}
    for row in timed.values():
        if row["stock"] and row["ms"] < best.get(row["cp"], {"ms": float("inf")})["ms"]:
            best[row["cp"]] = row
    found = list(rows.values()) + [
        {**row, "arm": f"cp{cp}_stock_best", "switches": row["arm"]} for cp, row in best.items() if cp > 1
    ]
    for row in found:
        one = timed.get("cp1_stock" if row["stock"] else "cp1_vlm_cp")
        if "ms" in row and one:
            row["efficiency"] = round(one["ms"] / row["cp"] / row["ms"], 3)
        if "ms" in row and row["cp"] in best:
            row["speedup_vs_stock"] = round(best[row["cp"]]["ms"] / row["ms"], 3)
    return found


def rank_0s(values: list[bool]) -> list[bool]:
    """Rank 0's list, on all ranks."""
    box: list[Any] = [values]
    dist.broadcast_object_list(box, 0)
    return box[0]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.run --case step", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="2b")
    parser.add_argument("--cases", default="skewed,image,text,long", help=f"of {', '.join(CASES)}, in this order")
    parser.add_argument("--tokens", default="32768")
    parser.add_argument("--no-recompute", dest="recompute", action="store_false")
    parser.add_argument("--overlap", default="off", help="overlap_grad_reduce: off, on, or off,on")
    parser.add_argument("--arms", default="", help="only arms whose names begin with one of these, and cp1_stock")
    parser.add_argument("--every-comm", action="store_true", help="this package also with every cp_comm_type")
    parser.add_argument("--rotary", action="store_true", help="with fuse_text_rotary")
    parser.add_argument("--tower-recompute", type=int, help="recompute_layers of shard_vision_over_cp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=280.0, help="seconds after which no round begins")
    parser.add_argument("--reserve", type=float, default=45.0, help="seconds that must be left for a case to begin")
    parser.add_argument("--timeout", type=float, default=200.0, help="seconds that one case may take")
    parser.add_argument("--json", type=Path, help="results file; the one of today without it")
    parser.add_argument("--verbose", action="store_true", help="tracebacks of arms that fail")
    args = parser.parse_args(arguments)
    faulthandler.enable()
    faulthandler.dump_traceback_later(args.timeout, exit=True)
    return StepBenchmark(args).run()
