"""A parity result for people: a table in the terminal, JSON for machines, and one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import io
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import log10
from pathlib import Path
from typing import Any

import jinja2
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor

from vlm_cp.batch import PackedBatch
from vlm_cp.parity import ParityReport

RANK_COLORS = ("#3b6fd4", "#e08a1e", "#2f9e6e", "#b04fb5", "#c9413a", "#12919c", "#7a6a4f", "#6a7280")
_CHART_COLUMNS = 900


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in (
        "vlm-cp",
        "torch",
        "torchvision",
        "transformers",
        "megatron-core",
        "megatron-bridge",
        "transformer-engine",
    ):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_json(report: ParityReport, path: Path, command: str) -> None:
    """One run as a results file of kind `parity`: versions, command, and one row with the fixed keys."""
    row = report.summary()
    path.write_text(json.dumps({"versions": versions(), "command": command, **row, "rows": [row]}, indent=1) + "\n")


def print_report(report: ParityReport, console: Console) -> None:
    """The verdict, what was measured against which bound, and where the two sides part when they do."""
    row = report.summary()
    table = Table(
        title=f"{row['family']} · CP={row['cp']} against CP=1 · {row['dtype']} on {row['device']} · {row['attention']}"
    )
    for column in ("measure", f"CP={row['cp']} vs CP=1", "another kernel", "another order", "bound"):
        table.add_column(column, justify="left" if column == "measure" else "right")
    for line in _measures(report):
        table.add_row(line.name, line.found, *line.floors, line.bound, style="bold red" if line.exceeds else None)
    console.print(table)
    console.print(
        f"{row['tokens']} tokens in {row['samples']} samples, padded to {row['padded_tokens']}; "
        f"{len(report.reference.gradients)} parameters; {sum(report.seconds.values()):.1f} s"
    )
    console.print("[bold green]equal within the measured floor" if report.passed else "[bold red]NOT EQUAL")
    where = report.first_divergence
    if where is not None:
        console.print(
            f"first difference: [bold]{where.module}[/bold] ({where.cause}), |difference| up to {where.max_abs:.3g}"
        )
        console.print(f"  {_place(report)}")
        console.print(f"  likely: {where.likely}")


def write_html(report: ParityReport, path: Path, command: str) -> None:
    """A self-contained page: the verdict, |logprob difference| along the stream, and which rank owned what."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vlm_cp", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    batch = report.subject.batch(report.cp, report.tp)
    page = environment.get_template("report.html.j2").render(
        report=report,
        row=report.summary(),
        measures=_measures(report),
        place=_place(report),
        chart=_chart(report, batch),
        samples=[_sample_view(report, batch, index) for index in range(len(batch.plan.lengths))],
        colors=[RANK_COLORS[rank % len(RANK_COLORS)] for rank in range(report.cp)],
        versions=versions(),
        command=command,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    path.write_text(page)


@dataclass(frozen=True)
class _Measure:
    name: str
    found: str
    floors: Sequence[str]
    bound: str
    exceeds: bool


def _measures(report: ParityReport) -> list[_Measure]:
    names = {
        "logprob_max_abs": "logprob |diff|, max",
        "logprob_mean_abs": "logprob |diff|, mean",
        "loss_abs": "loss |diff|",
        "grad_max_rel": "gradient diff, worst relative",
        "grad_norm_ratio": "gradient norm ratio",
    }
    lines: list[_Measure] = []
    for key, name in names.items():
        bound = getattr(report.tolerance, key, None)
        found = getattr(report.difference, key)
        form = "{:.9f}" if key == "grad_norm_ratio" else "{:.2e}"
        floors = [form.format(getattr(floor, key)) for floor in report.floors.values()] or ["", ""]
        exceeds = bound is not None and not found <= bound
        lines.append(_Measure(name, form.format(found), floors, "" if bound is None else f"{bound:.2e}", exceeds))
    return lines


def _place(report: ParityReport) -> str:
    where = report.first_divergence
    if where is None or where.sample is None:
        return "no token differs"
    name = report.subject.samples[where.sample].conversation.name
    item = f", {where.item}" if where.item else ""
    span = "" if where.first_token is None else f", tokens {where.first_token} to {where.last_token}"
    return f'sample {where.sample} ("{name}"){span}{item}; {where.tokens} rows differ in the batch'


def _deltas(report: ParityReport) -> Tensor:
    pairs = zip(report.candidate.logprobs, report.reference.logprobs, strict=True)
    return torch.cat([(x.double() - y.double()).abs() for x, y in pairs])


def _chart(report: ParityReport, batch: PackedBatch) -> dict[str, Any]:
    """Bars of the largest difference in each column, log scale, with samples and media along the axis."""
    deltas, plan = _deltas(report), batch.plan
    total = len(deltas)
    step = max(1, -(-total // _CHART_COLUMNS))
    bound = report.tolerance.logprob_max_abs
    top = log10(max(bound, float(deltas.nan_to_num(1.0).max()), 1e-12)) + 0.3
    low = min(top - 5, log10(max(bound, 1e-16)) - 0.7)
    width = 1000 / -(-total // step)

    def height(value: float) -> float:
        return 200 * min(1.0, max(0.0, (log10(max(value, 1e-300)) - low) / (top - low)))

    bars: list[dict[str, Any]] = [
        {
            "x": width * i,
            "height": height(float(column.nan_to_num(1e300).max())),
            "first": i * step,
            "value": f"{float(column.max()):.1e}",
        }
        for i, column in enumerate(deltas.split(step))
    ]
    bounds = plan.cu_seqlens.tolist()
    is_media = (batch.media.slot_rows() >= 0)[plan.real_index].tolist()
    return {
        "bars": [bar for bar in bars if bar["height"] > 0],
        "width": max(0.6, width * 0.9),
        "bound": 200 - height(bound),
        "lines": [
            {"y": 200 - height(10.0**p), "label": f"1e{p}"} for p in range(int(low), int(top) + 1) if low < p < top
        ],
        "samples": [
            {"x": 1000 * a / total, "width": 1000 * (b - a) / total, "name": sample.conversation.name}
            for a, b, sample in zip(bounds[:-1], bounds[1:], report.subject.samples, strict=True)
        ],
        "media": [{"x": 1000 * a / total, "width": 1000 * (b - a) / total} for a, b in _runs(is_media)],
    }


def _runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """[start, end) of every run of True."""
    edges = [i for i in range(len(flags) + 1) if (i > 0 and flags[i - 1]) != (i < len(flags) and flags[i])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _sample_view(report: ParityReport, batch: PackedBatch, index: int) -> dict[str, Any]:
    plan, sample = batch.plan, report.subject.samples[index]
    start = int(plan.cu_seqlens_padded[index])
    owners = _owners(batch)[start : start + plan.padded_lengths[index]].tolist()
    rows = batch.media.slot_rows()[start : start + plan.padded_lengths[index]].tolist()
    first = int(plan.cu_seqlens[index])
    deltas = _deltas(report)[first : first + plan.lengths[index]]
    return {
        "name": sample.conversation.name,
        "tokens": plan.lengths[index],
        "padded": plan.padded_lengths[index],
        "worst": f"{float(deltas.max()):.1e}",
        "share": [owners[: plan.lengths[index]].count(rank) for rank in range(report.cp)],
        "text": _text(report, sample.inputs["input_ids"].flatten().tolist(), owners, rows),
        "pictures": _pictures(report, batch, index),
    }


def _owners(batch: PackedBatch) -> Tensor:
    """int64 [T]: the rank that owns each slot."""
    ranks = torch.arange(batch.plan.cp_size).repeat_interleave(batch.plan.local_tokens)
    return ranks[batch.plan.inverse_index]


def _text(report: ParityReport, ids: Sequence[int], owners: Sequence[int], rows: Sequence[int]) -> list[dict[str, Any]]:
    """Runs of tokens of one owner; placeholders are told by their number."""
    pieces: list[dict[str, Any]] = []
    for token, owner, row in zip(ids, owners, rows, strict=False):
        is_media = row >= 0
        if not pieces or pieces[-1]["owner"] != owner or pieces[-1]["is_media"] != is_media:
            pieces.append({"owner": owner, "is_media": is_media, "ids": []})
        pieces[-1]["ids"].append(token)
    for piece in pieces:
        ids_held = piece["ids"]
        piece["text"] = f"{len(ids_held)} rows" if piece["is_media"] else report.subject.tokenizer.decode(ids_held)
    return pieces


def _pictures(report: ParityReport, batch: PackedBatch, index: int) -> list[dict[str, Any]]:
    """Each image, and each temporal patch of a video, with its rows' owners as a grid over it."""
    media, conversation = batch.media, report.subject.samples[index].conversation
    owners = _owners(batch)
    ends = media.row_counts.cumsum(0).tolist()
    merge, step = report.subject.spec.spatial_merge_size, report.subject.spec.tower.temporal_patch_size
    shown = [[image] for image in conversation.images] + [video[::step] for video in conversation.videos]
    views: list[dict[str, Any]] = []
    for item, frames in zip((media.samples == index).nonzero()[:, 0].tolist(), shown, strict=True):
        t, h, w = media.grids[item].tolist()
        slots = media.row_slots[ends[item] - int(media.row_counts[item]) : ends[item]]
        cells = owners[slots].view(t, h // merge, w // merge).tolist()
        views += [
            {
                "name": f"{media.name(item)}, frame {i}" if t > 1 else media.name(item),
                "data": _data_uri(frame),
                "cells": cells[i],
            }
            for i, frame in enumerate(frames[:t])
        ]
    return views


def _data_uri(image: Image.Image) -> str:
    buffer = io.BytesIO()
    small = image.copy()
    small.thumbnail((360, 360))
    small.save(buffer, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
