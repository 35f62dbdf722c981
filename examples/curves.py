"""Draws the arms of a training run on one picture: losses on top of each other, their difference, answers learned."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Wide and light below, narrow and dark on top, so that equal curves are both seen.
STYLES = {"cp1": ("#b9c7e8", 5.0), "cp2": ("#1f3b8f", 1.2), "cp1_other_micro_batches": ("#e08a1e", 0.8)}


def plot(results: Path, picture: Path) -> None:
    """results: a JSON file of `train_sft.py`."""
    rows = json.loads(results.read_text())["rows"]
    figure, (loss, gap, answers) = plt.subplots(
        3, 1, figsize=(8, 9), sharex=True, height_ratios=(3, 1.2, 2), layout="constrained"
    )
    first = rows[0]
    for row in rows:
        color, width = STYLES[row["arm"]]
        steps = range(1, len(row["loss"]) + 1)
        name = row["arm"].replace("_", " ").replace("cp", "CP=")
        if row is not first:
            apart = [abs(a - b) for a, b in zip(row["loss"], first["loss"], strict=True)]
            gap.semilogy(steps, [max(x, 1e-17) for x in apart], color=color, linewidth=1, label=f"{name} against CP=1")
        if row["arm"] not in ("cp1", "cp2"):
            continue  # shown by its distance alone
        loss.plot(steps, row["loss"], color=color, linewidth=width, label=f"{name} training")
        checked = [point["step"] for point in row["validation"]]
        loss.plot(
            checked,
            [point["loss"] for point in row["validation"]],
            "o",
            color=color,
            markersize=9 if row is first else 4,
            label=f"{name} validation",
        )
        for task, style in (("count", "-"), ("read", "--")):
            exact = [100 * point[task] for point in row["validation"]]
            answers.plot(checked, exact, style, color=color, linewidth=width, label=f"{name} {task}")
    for axes in (loss, gap, answers):
        axes.axvline(first["resumed_at"], color="0.6", linestyle=":", linewidth=1)
        axes.legend(loc="best", fontsize=8)
        axes.grid(alpha=0.2)
    loss.annotate(
        "checkpoint, new processes, resume",
        (first["resumed_at"], loss.get_ylim()[1]),
        xytext=(4, -12),
        textcoords="offset points",
        fontsize=8,
        color="0.4",
    )
    loss.set_ylabel("loss a token")
    gap.set_ylabel("|difference|")
    answers.set_ylabel("exact answers, %")
    answers.set_xlabel("step")
    figure.suptitle("Read the digits, count the shapes: a small Qwen3-VL from random weights", fontsize=11)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    plot(Path(sys.argv[1]), Path(sys.argv[2]))
