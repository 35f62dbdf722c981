"""Draws the arms of a training run on one picture: curves on top of each other, their difference, answers learned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Wide and light below, narrow and dark on top, so that equal curves are both seen.
STYLES = {"cp1": ("#b9c7e8", 5.0), "cp2": ("#1f3b8f", 1.2), "cp1_other_micro_batches": ("#e08a1e", 0.8)}
TASKS = (("count", "-"), ("read", "--"))


@dataclass(frozen=True, kw_only=True)
class Look:
    """What is drawn of a run. panels: a row's keys -> axis labels. validated: the panel that validation points belong to.

    compared: the key whose distance between arms is drawn; the first panel's without it.
    """

    title: str
    panels: Mapping[str, str]
    validated: str | None = None
    compared: str | None = None


def plot(results: Path, picture: Path, look: Look) -> None:
    """results: a file as `arms.write_rows` writes it. Training needs no matplotlib, only this does."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = json.loads(results.read_text())["rows"]
    n = len(look.panels)
    figure, axes = plt.subplots(
        n + 2,
        1,
        figsize=(8, 5 + 3 * n - (n > 1) * n),
        sharex=True,
        height_ratios=(*[3] * n, 1.5, 2),
        layout="constrained",
    )
    for panel, (key, label) in zip(axes, look.panels.items(), strict=False):
        for row in rows:
            if row["arm"] in ("cp1", "cp2"):  # the others are shown by their distance alone
                draw_curve(panel, row, key, first=row is rows[0], validated=key == look.validated)
        panel.set_ylabel(label)
    if len(rows) > 1:
        draw_gaps(axes[n], rows, look.compared or next(iter(look.panels)))
    draw_answers(axes[n + 1], rows)
    for panel in axes:
        panel.axvline(rows[0]["resumed_at"], color="0.6", linestyle=":", linewidth=1)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(loc="best", fontsize=8)
        panel.grid(alpha=0.2)
    axes[0].annotate(
        "checkpoint, resume",
        (rows[0]["resumed_at"], axes[0].get_ylim()[1]),
        xytext=(4, -12),
        textcoords="offset points",
        fontsize=8,
        color="0.4",
    )
    axes[-1].set_xlabel("step")
    figure.suptitle(look.title, fontsize=11)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def name_of(row: Mapping[str, Any]) -> str:
    return row["arm"].replace("_", " ").replace("cp", "CP=")


def draw_curve(panel: Any, row: Mapping[str, Any], key: str, *, first: bool, validated: bool) -> None:
    color, width = STYLES[row["arm"]]
    panel.plot(range(1, len(row[key]) + 1), row[key], color=color, linewidth=width, label=f"{name_of(row)} training")
    if validated:
        points = [(point["step"], point[key]) for point in row["validation"]]
        label = f"{name_of(row)} validation"
        panel.plot(*zip(*points, strict=True), "o", color=color, markersize=9 if first else 4, label=label)


def draw_gaps(panel: Any, rows: list[dict[str, Any]], key: str) -> None:
    """How far every arm is from the first one, step by step."""
    for row in rows[1:]:
        apart = [max(abs(a - b), 1e-17) for a, b in zip(row[key], rows[0][key], strict=False)]
        color, _ = STYLES[row["arm"]]
        label = f"{name_of(row)} against {name_of(rows[0])}"
        panel.semilogy(range(1, len(apart) + 1), apart, color=color, linewidth=1, label=label)
    panel.set_ylabel(f"|difference|\nof {key.replace('_', ' ')}")


def draw_answers(panel: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["arm"] in ("cp1", "cp2"):
            color, width = STYLES[row["arm"]]
            steps = [point["step"] for point in row["validation"]]
            for task, style in TASKS:
                right = [100 * point[task] for point in row["validation"]]
                panel.plot(steps, right, style, color=color, linewidth=width, label=f"{name_of(row)} {task}")
    panel.set_ylabel("exact answers, %")
