"""Pictures of results files: bars of milliseconds, one group a case, this package beside what it is compared with.

    python -m benchmarks.plots [FILE ...]

writes FILE's name with .png beside each file; without arguments, of every file in `benchmarks/results` that `PLOTS` knows.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.results_file import RESULTS, Row

OWN, OTHERS = (
    ("#1f4e9c", "#6f9bd8", "#a9c6ee"),
    ("#c8c8c8", "#9a9a9a", "#e0b070", "#c98b5a", "#8a8a6a", "#b5a0c0", "#7fb08a", "#d7a6a6"),
)


@dataclass(frozen=True)
class Plot:
    """How rows of one kind become bars.

    value: the column of milliseconds; "a.b" is column b of the dict in column a. panels: a column, one panel for each of its
    values. case: what stands under a group of bars, from a row's columns. arms: which arms, in this order; all of them by
    default. only: which panels. statistic: what the value is.
    """

    title: str
    value: str
    case: str
    statistic: str = "median"
    panels: str | None = None
    arms: Sequence[str] = ()
    only: Sequence[str] = ()


STEP = Plot(
    "Whole training step, forward, backward and gradient reduction",
    "ms",
    "{tokens} tokens",
    panels="case",
    arms=("cp1_stock", "cp1_vlm_cp", "cp2_stock_best", "cp2_vlm_cp"),
)
PLOTS = {
    "mrope": Plot(
        "Three-axis positions of one packed batch", "best_ms", "{tokens} tokens\n{media} media", "fastest round"
    ),
    "pack": Plot(
        "Rows to a packed stream and back", "best_ms", "{samples} rows\nof {width}", "fastest round", panels="part"
    ),
    "logprobs": Plot("Log-probabilities of the next token", "ms", "{tokens} tokens", panels="part"),
    "step": STEP,
    "vision": Plot("Vision phase, tower and exchange of its rows", "forward_backward.ms", "{case}\n{patches} patches"),
    "tower": Plot(
        "Vision tower at CP=1", "ms", "{patches}\npatches", panels="part", only=("forward", "forward_backward")
    ),
}


def bars(rows: Iterable[Row], plot: Plot) -> dict[str, dict[str, dict[str, float]]]:
    """panel -> case -> arm -> milliseconds, of the rows that were timed."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in flat(rows):
        value, panel = column(row, plot.value), str(row[plot.panels]) if plot.panels else ""
        unwanted = (plot.arms and row["arm"] not in plot.arms) or (plot.only and panel not in plot.only)
        if value is None or unwanted:
            continue
        found.setdefault(panel, {}).setdefault(plot.case.format(**row), {})[row["arm"]] = value
    return found


def flat(rows: Iterable[Row]) -> Iterable[Row]:
    """Rows of one arm each; a row may hold all of its arms in a dict."""
    for row in rows:
        if "arms" in row:
            yield from ({**row, "arm": arm, **found} for arm, found in row["arms"].items())
        else:
            yield row


def column(row: Row, name: str) -> float | None:
    for part in name.split("."):
        row = row.get(part, {})
    return row if isinstance(row, (int, float)) else None


def number(x: float) -> str:
    """Rounded to three digits, without an exponent."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def is_own(arm: str) -> bool:
    return any(word in arm for word in ("vlm_cp", "hook", "shared", "replicated"))


def colours(arms: Sequence[str]) -> dict[str, str]:
    """Blue for this package's arms, other colours for the rest."""
    own, others = [a for a in arms if is_own(a)], [a for a in arms if not is_own(a)]
    return dict(zip(own, OWN, strict=False)) | dict(zip(others, OTHERS, strict=False))


def draw(axes: Axes, cases: Mapping[str, Mapping[str, float]], order: Sequence[str], paint: Mapping[str, str]) -> None:
    """Groups of bars. Each says its ms; one of another's also how many times this package's that is. Wide ranges get a log axis."""
    width = 0.84 / len(order)
    for place, arms in enumerate(cases.values()):
        own = min((ms for arm, ms in arms.items() if is_own(arm)), default=None)
        present = [arm for arm in order if arm in arms]
        for index, arm in enumerate(present):
            x, ms = place + (index - (len(present) - 1) / 2) * width, arms[arm]
            axes.bar(x, ms, width * 0.94, color=paint[arm])
            times = "" if own is None or is_own(arm) else f"\n{ms / own:.{1 if ms < 9.95 * own else 0}f}x"
            axes.annotate(
                f"{number(ms)}{times}",
                (x, ms),
                (0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=7.5,
            )
    low, high = min(map(min, (arms.values() for arms in cases.values()))), axes.get_ylim()[1]
    if high > 8 * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 2, high * (high / low) ** 0.15)
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(0, high * 1.1)
    axes.set_xticks(range(len(cases)), list(cases), fontsize=8.5)
    axes.set_xlim(-0.6, len(cases) - 0.4)
    axes.set_ylabel("ms" + (", log scale" if axes.get_yscale() == "log" else ""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)


def figure(content: Mapping[str, Any], plot: Plot, *, hardware: str, date: str) -> Figure:
    panels = bars(content["rows"], plot)
    order = list(dict.fromkeys(arm for cases in panels.values() for arms in cases.values() for arm in arms))
    order = sorted(order, key=plot.arms.index) if plot.arms else sorted(order, key=is_own, reverse=True)
    groups = max(len(cases) for cases in panels.values())
    size = max(7.5, 0.9 + 0.42 * groups * len(order)), 0.9 + 3.0 * len(panels)
    picture = Figure(figsize=size, layout="constrained", dpi=130)
    paint = colours(order)
    for axes, (name, cases) in zip(picture.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        draw(axes, cases, order, paint)
        axes.set_title(name.replace("_", " "), loc="left", fontsize=10)
    handles = [axes.bar(0, 0, color=paint[arm], label=arm) for arm in order]
    title = f"{plot.title}: ms, {plot.statistic}, and how many times the best blue bar"
    names = {"title": title, "title_fontsize": 11.5, "alignment": "left", "frameon": False, "fontsize": 9}
    picture.legend(
        handles=handles, loc="outside upper left", ncols=min(4 if len(order) > 6 else 6, len(order)), **names
    )
    used = ", ".join(f"{name} {version}" for name, version in content["versions"].items() if name != "python")
    about = textwrap.fill(f"{hardware}, {date}. {used}", int(17 * size[0]))
    picture.supxlabel(about, fontsize=6.5, color="#555555", x=0.01, ha="left")
    return picture


def write(file: Path) -> Path:
    """Draws one results file; its name says kind, hardware and date."""
    kind, hardware, date = file.stem.split("_")[:3]
    target = file.with_suffix(".png")
    picture = figure(json.loads(file.read_text()), PLOTS[kind], hardware=hardware.replace("x", " x ", 1), date=date)
    picture.savefig(target, metadata={"Software": None})
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*")
    args = parser.parse_args()
    for file in args.files or sorted(RESULTS.glob("*.json")):
        if file.stem.split("_")[0] in PLOTS:
            print(write(file).name)


if __name__ == "__main__":
    main()
