"""Case b, the vision phase alone: the tower and the exchange of its rows at CP=n, stock and with `shard_vision_over_cp`.

    torchrun --nproc_per_node 2 -m benchmarks.run --case vision [--cases image,skewed,video] [--tokens 32768] [--json FILE]

Arms: stock (every rank encodes everything), stock_by_count (Bridge's `vision_dp_when_cp`), replicated (the hook without
sharing), shared. On one rank nothing is shared, and both of the hook's arms are the faster tower alone. Before anything is
timed, rows and summed gradients of every arm are compared with the stock tower's.
"""

from __future__ import annotations

import argparse
import faulthandler
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cases import CASES, SHAPES, make_batch
from benchmarks.models import RECOMPUTE, build, forget_attention_choice, start
from benchmarks.results_file import KEYS, ResultsFile
from benchmarks.timing import measure
from vlm_cp.alignment import Alignment

# bf16 rounds rows and gradients of 24 layers at other places; a row or a gradient of another image is off by 1 and more.
TOLERANCE = {"rows": 5e-2, "gradient": 0.2, "norm": 5e-3}


class Phase:
    def __init__(self, args: argparse.Namespace) -> None:
        from vlm_cp_hooks import keep_deepstack_gradients, shard_vision_over_cp

        from vlm_cp.engines.preflight import unwrap
        from vlm_cp.spec import VLMSpec

        self.args, self.device = args, start(args.device)
        self.cp, self.rank = dist.get_world_size(), dist.get_rank()
        shape = SHAPES[args.shape]
        self.shape = replace(shape, text={**shape.text, "num_hidden_layers": 4})
        fuse = args.device != "cpu"
        least = {} if fuse else {"min_patches": 0}
        hooks = {
            "stock": [],
            "replicated": [shard_vision_over_cp(share=False, fuse=fuse)],
            "shared": [shard_vision_over_cp(fuse=fuse, **least)],
        }
        self.models: dict[str, Any] = {}
        self.towers: dict[str, Any] = {}
        settings = RECOMPUTE if args.recompute else {}
        for name, own in hooks.items():
            provider, self.models[name] = build(
                self.shape, cp=self.cp, hooks=[keep_deepstack_gradients, *own], provider=settings, device=self.device
            )
            self.towers[name] = unwrap(self.models[name]).vision_model
        self.spec = VLMSpec.from_bridge(provider)
        self.group = unwrap(self.models["stock"]).pg_collection.cp

    def arms(self, pixels: Tensor, grids: Tensor) -> dict[str, Callable[[], list[Tensor]]]:
        host = grids.cpu()
        return {
            "stock": lambda: _flat(self.towers["stock"](pixels, grids)),
            "stock_by_count": lambda: self.by_count(pixels, grids),
            "replicated": lambda: _flat(self.towers["replicated"](pixels, host)),
            "shared": lambda: _flat(self.towers["shared"](pixels, host)),
        }

    def by_count(self, pixels: Tensor, grids: Tensor) -> list[Tensor]:
        """What Bridge's model does with `vision_dp_when_cp`, by its own functions."""
        from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import utils

        pixels, grids, numbers, padded = utils.qwen3vl_cp_split(self.cp, pixels, grids)
        pixels, grids, lengths = utils.get_vision_cp_data(pixels, grids, 4, numbers, padded, self.rank, self.cp)
        rows = _flat(self.towers["stock"](pixels, utils.collapse_thw(grids)))
        utils.ensure_requires_grad_for_cp_collective(tuple(rows))
        return [utils.AllGatherVisionEmbeddings.apply(x, lengths, self.group) for x in rows]

    def case(self, name: str) -> list[dict[str, Any]]:
        batch = make_batch(name, self.args.tokens, self.shape, Alignment(cp_size=self.cp), self.spec)
        images = batch.image_stream()
        pixels, grids = images.pixel_values.to(self.device), images.grid_thw.to(self.device)
        pixels = pixels if self.device.type == "cuda" else pixels.float()
        arms = self.arms(pixels, grids)
        if self.device.type == "cpu" or self.cp == 1:
            del arms["stock_by_count"]  # its gather of uneven sizes is NCCL's alone; one rank has nothing to deal out
        differences = self.compare(arms)
        faults = {arm: d for arm, d in differences.items() if any(d[k] > TOLERANCE[k] for k in TOLERANCE)}
        row = {"case": name, "cp": self.cp, "patches": len(pixels)}
        assignment = self.towers["shared"].vision_work.layout(grids.cpu(), self.device).assignment
        row |= {"mode": assignment.mode, "shared_frames": len(assignment.shared_frames)}
        if faults:
            return [
                {**row, "arm": arm, "refused": "rows or gradients differ from stock's", **d}
                for arm, d in faults.items()
            ]
        forward = measure({n: partial(_forward, run) for n, run in arms.items()}, rounds=5)
        step = measure({n: partial(_step, run) for n, run in arms.items()}, rounds=5, budget=self.args.budget)
        return [{**row, "arm": n, **differences[n], "forward": forward[n], "forward_backward": step[n]} for n in arms]

    def compare(self, arms: dict[str, Callable[[], list[Tensor]]]) -> dict[str, dict[str, float]]:
        """Each arm against stock: rows, the worst parameter's gradient and the gradient's norm, each rank using its own rows."""
        reference: tuple[list[Tensor], dict[str, Tensor]] | None = None
        found: dict[str, dict[str, float]] = {}
        for name, run in arms.items():
            owner = "stock" if name.startswith("stock") else name
            self.models[owner].zero_grad_buffer()
            rows = run()
            torch.autograd.backward(rows, [self.own_rows(x) for x in rows])
            self.models[owner].finish_grad_sync()
            gradients = {n: p.main_grad.clone() for n, p in self.towers[owner].named_parameters()}
            rows = [x.detach().float() for x in rows]
            if reference is None:
                reference = rows, gradients
            errors = [_relative(x, y) for x, y in zip(rows, reference[0], strict=True)]
            worst = max((_relative(g, reference[1][n]), n) for n, g in gradients.items())
            norms = [torch.cat([g.flatten() for g in x.values()]).double().norm() for x in (gradients, reference[1])]
            values = torch.tensor([max(errors), worst[0], abs(float(norms[0] / norms[1]) - 1)], device=self.device)
            dist.all_reduce(values, dist.ReduceOp.MAX)
            found[name] = dict(zip(TOLERANCE, values.tolist(), strict=True)) | {"worst_parameter": worst[1]}
        return found

    def own_rows(self, rows: Tensor) -> Tensor:
        """A gradient as the text model returns it: of the rows whose tokens this rank holds, other ranks having the others."""
        own = torch.arange(len(rows), device=rows.device) // 32 % self.cp == self.rank
        return torch.where(own[:, None], rows.detach(), 0.0)


def _flat(out: tuple[Tensor, list[Tensor]]) -> list[Tensor]:
    return [out[0], *out[1]]


def _relative(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


def _forward(run: Callable[[], list[Tensor]]) -> None:
    forget_attention_choice()
    with torch.no_grad():
        run()


def _step(run: Callable[[], list[Tensor]]) -> None:
    forget_attention_choice()
    rows = run()
    torch.autograd.backward(rows, [torch.ones_like(x) for x in rows])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.run --case vision", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="2b")
    parser.add_argument("--cases", default="image,skewed,video")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--no-recompute", dest="recompute", action="store_false")
    parser.add_argument(
        "--budget", type=float, default=40.0, help="seconds after which a case's timing begins no new round"
    )
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds that one case may take")
    parser.add_argument("--json", type=Path, help="results file; the one of today without it")
    args = parser.parse_args(arguments)
    assert set(args.cases.split(",")) <= set(CASES)
    faulthandler.enable()
    faulthandler.dump_traceback_later(args.timeout, exit=True)
    phase = Phase(args)
    file = ResultsFile("vision", args.json, keys=KEYS["vision"]) if phase.rank == 0 else None
    good = True
    for name in args.cases.split(","):
        faulthandler.dump_traceback_later(args.timeout, exit=True)
        try:
            rows = phase.case(name)
        except Exception:
            rows = [{"case": name, "arm": "", "refused": traceback.format_exc()[-1500:]}]
        refused = any("refused" in row for row in rows)
        good = good and not refused
        if file:
            file.add({**row, "tokens": args.tokens, "recompute": args.recompute} for row in rows)
        elif refused:
            print(f"rank {phase.rank}: {rows}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return 0 if good else 1
