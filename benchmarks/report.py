"""Writes one benchmark's result as Markdown tables, JSON and a picture below benchmarks/results/."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    import matplotlib
except ImportError:
    raise SystemExit("benchmarks draw pictures: `make setup-test` installs matplotlib") from None

matplotlib.use("Agg")

from matplotlib import pyplot as plt

RESULTS = Path(__file__).resolve().parent / "results"


def results_folder(wanted: Path | None, quick: bool) -> Path:
    """Where a benchmark writes. Runs whose numbers mean nothing have a folder beside the kept results."""
    return wanted or (RESULTS / "quick" if quick else RESULTS)


@dataclass(frozen=True)
class Measurement:
    """One figure, by engine or variant. Values of one measurement share a unit, named in `name`."""

    name: str
    values: dict[str, float]


@dataclass(frozen=True)
class Table:
    """A part of a document: heading, a sentence or two, and rows as text."""

    title: str
    text: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Panel:
    """One diagram: lines over numbers or, where `bars`, one bar per name. A name of `marks` is drawn as a level line.

    `spans`: for bars, from where to where the value may lie.
    """

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    bars: Mapping[str, float] = field(default_factory=dict)
    spans: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    marks: Mapping[str, float] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False


def today() -> str:
    """The date in UTC."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


def write_document(
    folder: Path, name: str, intro: str, tables: Sequence[Table], panels: Sequence[Panel], data: Any
) -> None:
    """Writes FOLDER/NAME.md, .json and .png: a document of several tables, all from one run."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [intro, "", f"![Diagrams of the tables below]({name}.png)"]
    for table in tables:
        lines += ["", f"## {table.title}", "", table.text, ""]
        lines += ["| " + " | ".join(table.columns) + " |", "|---|" + "---:|" * (len(table.columns) - 1)]
        lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    _draw_panels(folder / f"{name}.png", panels)


def _draw_panels(path: Path, panels: Sequence[Panel]) -> None:
    columns = min(3, len(panels))
    height = -(-len(panels) // columns)
    figure, axes = plt.subplots(height, columns, figsize=(5.2 * columns, 3.8 * height), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        for label, (xs, ys) in panel.lines.items():
            axis.plot(xs, ys, marker="o", markersize=4, label=label)
        if panel.bars:
            shown = axis.bar(list(panel.bars), list(panel.bars.values()), color="C0")
            axis.bar_label(shown, fmt="%.3g", fontsize=8)
            axis.tick_params(axis="x", labelsize=7)
            for name, (low, high) in panel.spans.items():
                axis.plot([name, name], [low, high], color="black", linewidth=1)
        for label, level in panel.marks.items():
            axis.axhline(level, color="gray", linestyle="--", linewidth=1, label=label)
        if not panel.bars:  # names have no scale
            axis.set_xscale("log" if panel.log_x else "linear")
        if panel.log_x:  # what was measured, in plain numbers: powers would run into each other
            places = sorted({x for xs, _ in panel.lines.values() for x in xs})
            axis.set_xticks(places, [f"{x:g}" for x in places], fontsize=7)
            axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axis.set_yscale("log" if panel.log_y else "linear")
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel(panel.x_label, fontsize=8)
        axis.set_ylabel(panel.y_label, fontsize=8)
        if not (panel.log_y or panel.bars):
            axis.set_ylim(bottom=0)
        if panel.lines or panel.marks:
            axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def machine() -> str:
    """The machine in words: processor and cores."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    return f"{model}, {os.cpu_count()} cores"


def ratio(measurement: Measurement, higher_is_better: set[str]) -> float | None:
    """How many times better the first variant is than the second; None with one variant."""
    values = list(measurement.values.values())
    if len(values) < 2 or not all(values):
        return None
    return values[0] / values[1] if measurement.name in higher_is_better else values[1] / values[0]


def write_report(
    name: str,
    title: str,
    rows: list[Measurement],
    higher_is_better: set[str],
    folder: Path = RESULTS,
    notes: str = "",
    rounds: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
) -> None:
    """Writes FOLDER/NAME.md, .json and .png and prints the table.

    `notes` stand below the table; `rounds` are the single values behind it, variant → figure → values.
    """
    better = higher_is_better
    folder.mkdir(parents=True, exist_ok=True)
    variants = list(dict.fromkeys(v for row in rows for v in row.values))
    day = today()
    lines = [f"# {title}", "", f"{day}, {machine()}. Ratio: how many times better the first column is.", ""]
    lines += ["| figure | " + " | ".join(variants) + " | ratio |", "|---|" + "---:|" * (len(variants) + 1)]
    for row in rows:
        cells = [f"{row.values[v]:.2f}" if v in row.values else "–" for v in variants]
        factor = ratio(row, better)
        lines.append(
            f"| {row.name} | " + " | ".join(cells) + f" | {'–' if factor is None else f'{factor:.2f}'} |"
        )
    text = "\n".join(lines) + f"\n\n{notes}\n\n![{title}]({name}.png)\n"
    (folder / f"{name}.md").write_text(text)
    data = {
        "title": title,
        "date": day,
        "machine": machine(),
        "rows": {row.name: row.values for row in rows},
        "rounds": rounds,
    }
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    _plot(folder / f"{name}.png", title, rows, variants)
    print(text)


def _plot(path: Path, title: str, rows: list[Measurement], variants: list[str]) -> None:
    """One small bar chart per measurement: units differ, so they share no axis."""
    columns = 4
    height = -(-len(rows) // columns)
    figure, axes = plt.subplots(height, columns, figsize=(4 * columns, 2.6 * height), squeeze=False)
    for axis in axes.flat:
        axis.set_visible(False)
    for axis, row in zip(axes.flat, rows, strict=False):
        axis.set_visible(True)
        shown = [v for v in variants if v in row.values]
        bars = axis.bar(shown, [row.values[v] for v in shown], color=[f"C{variants.index(v)}" for v in shown])
        axis.bar_label(bars, fmt="%.3g", fontsize=8)
        axis.set_title(row.name, fontsize=9)
        axis.tick_params(labelsize=8)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
