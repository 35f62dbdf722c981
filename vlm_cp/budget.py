"""`vlm-cp plan`: what a file of sample sizes costs on every CP rank before anything is trained.

FILE has one sample a line, a number of tokens or an object:

    1234
    {"length": 1234, "images": [[1, 64, 64]], "videos": [[8, 24, 40]]}

length counts all tokens, placeholders included; a grid is [t, h, w] in patches, as processors return it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from vlm_cp.alignment import Alignment, Fp8Recipe
from vlm_cp.cost import RankCost, Step, VisionWork, rank_costs, sample_costs
from vlm_cp.packing import bin_samples
from vlm_cp.plan import SequencePlan
from vlm_cp.spec import TextSpec, TowerSpec, VLMSpec

QWEN3_VL_2B = (
    TextSpec(
        num_layers=28,
        hidden_size=2048,
        intermediate_size=6144,
        num_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
    ),
    VLMSpec(
        family="qwen3_vl",
        image_token_id=151655,
        video_token_id=151656,
        vision_start_token_id=151652,
        spatial_merge_size=2,
        position_scheme="frames",
        tokens_per_second=1,
        tower=TowerSpec(
            depth=24,
            hidden_size=1024,
            num_heads=16,
            intermediate_size=4096,
            patch_size=16,
            temporal_patch_size=2,
            out_hidden_size=2048,
        ),
        deepstack_levels=3,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sample of the file. grids: images and videos, (t, h, w) in patches."""

    length: int
    grids: tuple[tuple[int, int, int], ...] = ()

    def grid_tensor(self) -> Tensor:
        return torch.tensor(self.grids, dtype=torch.int64).reshape(-1, 3)


@dataclass(frozen=True, kw_only=True)
class RankBudget:
    """A CP rank's sum over all micro-batches. seconds: at `cost.Rates`' default rates."""

    rank: int
    tokens: int
    text_flops: float
    attention_flops: float
    vision_flops: float
    sent_bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A file's samples on one parallel layout.

    padding_waste: padding's share of all padded tokens. efficiency: one rank's time at CP=1 over cp times its time here.
    step_seconds: the micro-batches of the data-parallel ranks side by side, each waiting for the slowest.
    """

    samples: int
    tokens: int
    padded_tokens: int
    padding_waste: float
    efficiency: float
    step_seconds: float
    ranks: tuple[RankBudget, ...]
    micro_batches: tuple[tuple[int, ...], ...]


def read_rows(lines: Iterable[str], spec: VLMSpec) -> list[Row]:
    """The file's samples; blank lines are skipped. `ValueError` names the line that is wrong."""
    rows = [_row(text, number, spec) for number, text in enumerate(lines, 1) if text.strip()]
    if not rows:
        raise ValueError("the file must hold at least one sample, got none; there is nothing to plan")
    return rows


def budget(
    rows: Sequence[Row],
    *,
    alignment: Alignment,
    text: TextSpec,
    spec: VLMSpec,
    vision: VisionWork = "replicated",
    step: Step | None = None,
    capacity: int | None = None,
    dp_size: int = 1,
) -> Budget:
    """Bins the rows (all into one micro-batch without a capacity) and adds up what every CP rank computes."""
    shape: dict[str, Any] = {"text": text, "spec": spec, "vision": vision, "step": step}
    bins = _bins(rows, alignment, capacity, dp_size, shape)
    by_bin: list[tuple[RankCost, ...]] = []
    padded, single = 0, 0.0
    for bin_ in bins:
        lengths = [rows[i].length for i in bin_]
        grids = torch.cat([rows[i].grid_tensor() for i in bin_])
        plan = SequencePlan.from_lengths(lengths, alignment=alignment)
        padded += plan.total_tokens
        by_bin.append(rank_costs(plan, grids, **shape))
        single += rank_costs(SequencePlan.from_lengths(lengths), grids, **shape)[0].seconds()
    ranks = tuple(_total(rank, costs) for rank, costs in enumerate(zip(*by_bin, strict=True)))
    slowest = [max(cost.seconds() for cost in costs) for costs in by_bin]
    tokens = sum(row.length for row in rows)
    return Budget(
        samples=len(rows),
        tokens=tokens,
        padded_tokens=padded,
        padding_waste=1 - tokens / padded,
        efficiency=single / (alignment.cp_size * sum(slowest)),
        step_seconds=sum(max(slowest[i : i + dp_size]) for i in range(0, len(slowest), dp_size)),
        ranks=ranks,
        micro_batches=tuple(tuple(bin_) for bin_ in bins),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `vlm-cp plan`."""
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="one sample a line: 1234, or an object (below)")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks (default: %(default)s)")
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        help="tensor-parallel ranks; a CP rank's numbers are theirs together (default: %(default)s)",
    )
    parser.add_argument("--sequence-parallel", action="store_true", help="Megatron's, over the tensor-parallel ranks")
    parser.add_argument("--fp8", choices=get_args(Fp8Recipe), help="recipe whose GEMM multiple the stream is padded to")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks that share the bins (needs --capacity)")
    parser.add_argument(
        "--capacity", type=int, help="most a micro-batch may cost, in text tokens; without it there is one"
    )
    parser.add_argument(
        "--vision",
        choices=get_args(VisionWork),
        default="replicated",
        help="the tower over CP ranks (default: %(default)s)",
    )
    parser.add_argument("--recompute", action="store_true", help="full activation recompute")
    parser.add_argument("--frozen-tower", action="store_true", help="the tower runs forward only")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="a transformers model's folder or config.json (default: the Qwen3-VL 2B shape)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.epilog = re.sub(r"\s+", " ", (__doc__ or "").partition("\n\n")[2])


def run(args: argparse.Namespace) -> int:
    """Prints the budget; returns 0. Wrong input is a `ValueError` with one sentence."""
    if args.dp < 1:
        raise ValueError(f"--dp must be at least 1, got {args.dp}; there would be no rank to run on")
    if args.dp > 1 and args.capacity is None:
        raise ValueError(
            f"--dp {args.dp} must come with --capacity, got none; there would be one micro-batch for all ranks"
        )
    alignment = Alignment(cp_size=args.cp, tp_size=args.tp, sequence_parallel=args.sequence_parallel, fp8=args.fp8)
    text, spec = QWEN3_VL_2B if args.model is None else _shapes(args.model)
    try:
        rows = read_rows(args.file.read_text().splitlines(), spec)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"FILE must be a readable text file, got {args.file}: {error}") from error
    found = budget(
        rows,
        alignment=alignment,
        text=text,
        spec=spec,
        vision=args.vision,
        step=Step(recompute=args.recompute, train_vision=not args.frozen_tower),
        capacity=args.capacity,
        dp_size=args.dp,
    )
    model = escape(str(args.model or "the Qwen3-VL 2B shape"))
    if args.json:
        layout = asdict(alignment) | {"dp_size": args.dp, "capacity": args.capacity, "vision": args.vision}
        json.dump({"model": model, **layout, **asdict(found)}, sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        print_budget(
            found, Console(), title=f"{escape(args.file.name)} · {model} · CP={args.cp} · vision {args.vision}"
        )
    return 0


def print_budget(found: Budget, console: Console, *, title: str) -> None:
    """A table of the ranks and three sentences."""
    table = Table(title=title)
    for column in ("rank", "tokens", "text TFLOP", "attention TFLOP", "vision TFLOP", "sent GB", "ms"):
        table.add_column(column, justify="right")
    for rank in found.ranks:
        flops = (f"{x / 1e12:,.1f}" for x in (rank.text_flops, rank.attention_flops, rank.vision_flops))
        table.add_row(
            str(rank.rank), f"{rank.tokens:,}", *flops, f"{rank.sent_bytes / 1e9:,.2f}", f"{1e3 * rank.seconds:,.0f}"
        )
    console.print(table)
    micro = len(found.micro_batches)
    console.print(
        f"{found.samples:,} samples, {found.tokens:,} tokens, padded to {found.padded_tokens:,}: "
        f"{found.padding_waste:.1%} padding, in {micro} micro-batch{'es' if micro > 1 else ''}",
        highlight=False,
    )
    console.print(
        f"one step about {1e3 * found.step_seconds:,.0f} ms of arithmetic at one H200's measured rates; "
        f"{found.efficiency:.0%} of CP=1's speed a GPU",
        highlight=False,
    )


def _row(line: str, number: int, spec: VLMSpec) -> Row:
    lost = "its cost would be another sample's"
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} must be JSON, got {line.strip()[:60]!r} ({error.msg}); {lost}") from error
    known = {"length", "images", "videos"}
    value = {"length": value} if not isinstance(value, dict) else value
    if unknown := set(value) - known:
        raise ValueError(
            f"line {number} must have the keys {', '.join(sorted(known))} only, got {min(unknown)!r}; {lost}"
        )
    length = value.get("length")
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"line {number} must have a length of at least 1 token, got {length!r}; {lost}")
    kinds = [value.get(kind) or [] for kind in ("images", "videos")]
    if not all(isinstance(kind, list) for kind in kinds):
        raise ValueError(f"line {number} must have lists of grids [t, h, w], got {kinds[0]!r} and {kinds[1]!r}; {lost}")
    grids: list[Any] = [grid for kind in kinds for grid in kind]
    merge = spec.spatial_merge_size
    for grid in grids:
        if not (
            isinstance(grid, list)
            and len(grid) == 3
            and all(isinstance(x, int) and x > 0 for x in grid)
            and not (grid[1] % merge or grid[2] % merge)
        ):
            raise ValueError(
                f"line {number} must have grids [t, h, w] in patches, h and w multiples of {merge}, got {grid!r}; {lost}"
            )
    placeholders = sum(t * h * w for t, h, w in grids) // merge**2
    if placeholders > length:
        raise ValueError(
            f"line {number} must count its media's {placeholders} placeholders in its length, got {length}; {lost}"
        )
    return Row(length=length, grids=tuple((t, h, w) for t, h, w in grids))


def _bins(
    rows: Sequence[Row], alignment: Alignment, capacity: int | None, dp_size: int, shape: dict[str, Any]
) -> list[list[int]]:
    if capacity is None:
        return [list(range(len(rows)))]
    lengths, grids = [row.length for row in rows], [row.grid_tensor() for row in rows]
    costs = sample_costs(lengths, grids, alignment=alignment, **shape)
    return bin_samples(costs, capacity=capacity, bins_multiple_of=dp_size)


def _total(rank: int, costs: Sequence[RankCost]) -> RankBudget:
    return RankBudget(
        rank=rank,
        tokens=sum(cost.tokens for cost in costs),
        text_flops=sum(cost.text.flops for cost in costs),
        attention_flops=sum(cost.attention.flops for cost in costs),
        vision_flops=sum(cost.vision.flops + cost.vision_attention.flops for cost in costs),
        sent_bytes=sum(getattr(cost, part.name).sent_bytes for cost in costs for part in fields(cost)[1:]),
        seconds=sum(cost.seconds() for cost in costs),
    )


def _shapes(model: Path) -> tuple[TextSpec, VLMSpec]:
    """The shapes in a local config; transformers is loaded only here."""
    from transformers import AutoConfig

    if not model.exists():
        raise ValueError(f"--model must be a folder or config.json on this machine, got {model}; no model hub is asked")
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
    except OSError as error:
        raise ValueError(f"--model must hold a transformers config, got {model}: {error}") from error
    return TextSpec.from_hf_config(config), VLMSpec.from_hf_config(config)
