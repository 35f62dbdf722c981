"""Where the time of Bridge's stock vision tower goes, and what each replacement of `shard_vision_over_cp` saves and costs in accuracy.

    python -m benchmarks.profile_tower [--side 64] [--images 24] [--parts whole,parts,...] [--timeout 420] [--out FILE.jsonl]

One GPU, one process, one JSON line a result, each part on its own: one that fails is reported and the next goes on.
--device cpu --shape tiny tries the program where there is no GPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import SHAPES
from benchmarks.models import build, forget_attention_choice, start
from benchmarks.timing import measure, once


class Profile:
    """Three towers with the same weights: stock, the hook with stock kernels, the hook with fused ones."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vlm_cp_hooks import shard_vision_over_cp

        from vlm_cp.engines.preflight import unwrap
        from vlm_cp.spec import VLMSpec

        self.args, self.file = args, Path(args.out) if args.out else None
        self.device = start(args.device)
        shape = SHAPES[args.shape]
        shape = replace(shape, text={**shape.text, "num_hidden_layers": 4})
        arms = {
            "stock": [],
            "hook": [shard_vision_over_cp(fuse=False)],
            "hook_fused": [shard_vision_over_cp(fuse=args.device != "cpu")],
        }
        self.towers: dict[str, Any] = {}
        self.models: dict[str, Any] = {}
        for name, hooks in arms.items():
            provider, self.models[name] = build(shape, hooks=hooks, device=self.device)
            self.towers[name] = unwrap(self.models[name]).vision_model
        self.spec = VLMSpec.from_bridge(provider)

    def emit(self, part: str, **values: Any) -> None:
        line = json.dumps({"part": part, **values})
        print(line, flush=True)
        if self.file:
            with self.file.open("a") as file:
                file.write(line + "\n")

    def batch(self, side: int, images: int) -> tuple[Tensor, Tensor]:
        """(pixels, grids on the device as stock Bridge gets them)."""
        generator = torch.Generator().manual_seed(1)
        grids = torch.tensor([(1, side, side)] * images)
        pixels = torch.randn(images * side * side, 1536, generator=generator).to(self.dtype)
        return pixels.to(self.device), grids.to(self.device)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @cached_property
    def large(self) -> tuple[Tensor, Tensor]:
        return self.batch(self.args.side, self.args.images)

    def forward(self, name: str, pixels: Tensor, grids: Tensor) -> list[Tensor]:
        grids = grids if name == "stock" else grids.cpu()
        forget_attention_choice()
        rows, levels = self.towers[name](pixels, grids)
        return [rows, *levels]

    def step(self, name: str, pixels: Tensor, grids: Tensor) -> None:
        out = self.forward(name, pixels, grids)
        torch.autograd.backward(out, [torch.ones_like(x) for x in out])

    # Parts.

    def whole(self) -> None:
        """The whole tower, forward and forward with backward."""
        pixels, grids = self.large

        def forward(name: str) -> None:
            with torch.no_grad():
                self.forward(name, pixels, grids)

        usable: list[str] = []
        for name in self.towers:
            try:
                for run in (forward, partial(self.step, pixels=pixels, grids=grids)):
                    ms, *_ = once(partial(run, name))
                    self.emit("first_call", arm=name, ms=round(ms, 1))
                usable.append(name)
            except Exception:
                self.emit("first_call", arm=name, error=traceback.format_exc()[-1500:])
        self.emit("forward", patches=len(pixels), arms=measure({n: partial(forward, n) for n in usable}))
        steps = {n: partial(self.step, n, pixels, grids) for n in usable}
        self.emit("forward_backward", patches=len(pixels), arms=measure(steps))

    def accuracy(self) -> None:
        """Rows against float64, and gradients against stock's, on a few images."""
        from benchmarks.tower_oracle import reference_rows

        side = max(self.args.side // 2, 4)
        pixels, grids = self.batch(side, 3)
        truth = reference_rows(self.towers["stock"], self.spec, pixels, grids)
        gradients: dict[str, dict[str, Tensor]] = {}
        for name in list(self.towers):
            tower = self.towers[name]
            self.models[name].zero_grad_buffer()
            rows = self.forward(name, pixels, grids)
            weights = [x.detach().double().to(x.dtype) for x in truth]
            torch.autograd.backward(rows, weights)
            gradients[name] = {n: p.main_grad.double().clone() for n, p in tower.named_parameters()}
            errors = [float((x.double() - y).norm() / y.norm()) for x, y in zip(rows, truth, strict=True)]
            self.emit("error_of_rows_against_float64", arm=name, relative=errors)
        for name in self.towers:
            pairs = [
                (float((g - gradients["stock"][n]).norm() / gradients["stock"][n].norm()), n)
                for n, g in gradients[name].items()
            ]
            norms = [float(torch.cat([g.flatten() for g in gradients[k].values()]).norm()) for k in (name, "stock")]
            self.emit("gradients_against_stock", arm=name, worst=sorted(pairs)[-3:], norm_ratio=norms[0] / norms[1])

    def parts(self) -> None:
        """Each replaced piece alone."""
        from benchmarks.tower_parts import PARTS

        pixels, grids = self.large
        for name, make in PARTS.items():
            arms = None
            try:
                arms, errors = make(self, pixels, grids)
                self.emit("piece", piece=name, arms=measure(arms, rounds=5), **errors)
            except Exception as error:
                self.emit("piece", piece=name, error=f"{type(error).__name__}: {error}"[:600])
            finally:
                del arms
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()

    def syncs(self) -> None:
        """Host syncs of a forward and backward, by the line that asks for them."""
        for name in self.towers:
            pixels, grids = self.large
            host_grids = grids if name == "stock" else grids.cpu()
            forget_attention_choice()
            torch.cuda.synchronize()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                out = self.towers[name](pixels, host_grids)
                out = [out[0], *out[1]]
                torch.autograd.backward(out, [torch.ones_like(x) for x in out])
                torch.cuda.set_sync_debug_mode("default")
            lines = Counter(
                f"{Path(w.filename).name}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)
            )
            self.emit("host_syncs", arm=name, total=sum(lines.values()), lines=dict(lines.most_common(12)))

    def kernels(self) -> None:
        """The kernels that a forward and backward spends its time in, and how many it launches."""
        from torch.profiler import ProfilerActivity, profile

        for name in ("stock", "hook_fused"):
            self.step(name, *self.large)
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
                self.step(name, *self.large)
                torch.cuda.synchronize()
            kernels = [e for e in found.key_averages() if e.device_type.name == "CUDA" and not e.is_user_annotation]
            kernels.sort(key=lambda e: -e.self_device_time_total)
            rows = [(e.key[:90], round(e.self_device_time_total / 1e3, 2), e.count) for e in kernels[:28]]
            total = sum(e.self_device_time_total for e in kernels) / 1e3
            self.emit("kernels", arm=name, total_ms=round(total, 1), launches=sum(e.count for e in kernels), top=rows)

    def sizes(self) -> None:
        """From how many patches on arithmetic takes longer than launches: what `min_patches` rests on."""
        for side in (16, 32, 48, 64, 96, 128):
            pixels, grids = self.batch(side, 1)
            arms = {n: partial(self.step, n, pixels, grids) for n in ("stock", "hook_fused")}
            self.emit("size", patches=side * side, arms=measure(arms, rounds=5))

    def run(self, name: str, limit: float) -> None:
        faulthandler.dump_traceback_later(limit, exit=True)
        begin = time.time()
        run: Callable[[], None] = getattr(self, name)
        try:
            run()
        except Exception:
            self.emit(name, error=traceback.format_exc()[-1500:])
        self.emit("done", name=name, seconds=round(time.time() - begin, 1))


PARTS = ("accuracy", "parts", "whole", "syncs", "kernels", "sizes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="2b")
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--timeout", type=float, default=420.0, help="seconds that one part may take")
    parser.add_argument("--out", help="also append the lines to this file")
    args = parser.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(args.timeout, exit=True)
    profile = Profile(args)
    for name in args.parts.split(","):
        profile.run(name, args.timeout)
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main())
