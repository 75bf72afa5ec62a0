"""The plots of a report, drawn by matplotlib as SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glm5_plugins.campaign.journal import Run
from glm5_plugins.campaign.plan import Cell, Plan
from glm5_plugins.campaign.report import LATENCIES, Result, doubts, figure_text
from glm5_plugins.campaign.verdicts import Comparison, compare, level_of_arm

# Okabe and Ito's colours can be told apart by the colour-blind; the markers by everybody.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "osD^vPX"
_WIDEST = (0.5, 2.0)  # ratios beyond are shown by an arrow
_OF_VERDICT = {"pays": "#009E73", "does not": "#D55E00", "cannot tell": "#666666"}


@dataclass(frozen=True)
class Plot:
    """One picture and what a reader who does not see it is told."""

    title: str
    text: str
    svg: str


def draw(result: Result) -> list[Plot]:
    """Draw the ratios to the baseline, and for each shape the figures of all arms over concurrency."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "glm5-plugins", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    )
    rows = [row for row in compare(result.plan, result.journal.runs, doubts(result)) if row.ratio]
    plots = [_ratios(rows, result.plan.decision.worth_percent)] if rows else []
    return plots + [
        _levels(result.plan, result.journal.runs, shape.name)
        for shape in result.plan.bench.shapes
        if any(run.ok and run.shape == shape.name for run in result.journal.runs)
    ]


def _ratios(rows: Sequence[Comparison], worth_percent: float) -> Plot:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.36 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    low = max(_WIDEST[0], min(row.ratio.low for row in rows if row.ratio) - 0.01)
    high = min(_WIDEST[1], max(row.ratio.high for row in rows if row.ratio) + 0.01)
    axes.set_xlim(min(low, 0.98), max(high, 1.02))
    for place, row in enumerate(reversed(rows)):
        ratio = row.ratio
        if ratio is None:
            continue
        colour = _OF_VERDICT[row.verdict]
        ends = (max(ratio.low, low), min(ratio.high, high))
        axes.plot(ends, [place, place], color=colour, linewidth=2, solid_capstyle="butt")
        axes.plot([min(max(ratio.value, low), high)], [place], marker="o", color=colour, markersize=6)
        for beyond, end, arrow in ((ratio.low < low, low, "<"), (ratio.high > high, high, ">")):
            if beyond:  # it goes on where the picture ends
                axes.plot([end], [place], marker=arrow, color=colour, markersize=8, clip_on=False)
    axes.axvline(1, color="black", linewidth=1)
    axes.axvspan(1, 1 + worth_percent / 100, color="#dddddd", zorder=0, linewidth=0)
    axes.set_yticks(range(len(rows)), [f"{row.arm}, {row.cell}: {row.verdict}" for row in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("output throughput over the baseline's (grey: not worth having)")
    text = "; ".join(f"{row.arm} at {row.cell}: {row.ratio.value:.3f}, {row.verdict}" for row in rows if row.ratio)
    return Plot("Ratio to the baseline, with simultaneous intervals", text, _svg(figure))


def _levels(plan: Plan, runs: Sequence[Run], shape: str) -> Plot:
    from matplotlib.figure import Figure

    panels = {"output_throughput": "output, tokens/s"} | {m: f"median {name}, ms" for m, name in LATENCIES.items()}
    arms = [arm for arm in plan.arms if any(run.ok and run.arm == arm.name and run.shape == shape for run in runs)]
    figure = Figure(figsize=(12, 3.9), layout="constrained")
    axes: Any = figure.subplots(1, len(panels))
    levels = sorted(plan.bench.concurrency)
    for panel, (metric, label) in zip(axes, panels.items(), strict=True):
        for index, arm in enumerate(arms):
            place = _beside(index, len(arms))
            points = [
                (level * place, found)
                for level in levels
                if (found := level_of_arm(runs, arm.name, Cell(shape, level), metric, plan.decision.confidence))
            ]
            if not points:
                continue
            panel.errorbar(
                [x for x, _ in points],
                [found.value for _, found in points],
                yerr=[
                    [found.value - found.low for _, found in points],
                    [found.high - found.value for _, found in points],
                ],
                color=_COLOURS[index % len(_COLOURS)],
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=5,
                linewidth=1.3,
                capsize=3,
                label=arm.name,
            )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(levels, [str(level) for level in levels])
        panel.minorticks_off()
        _plain_numbers(panel)
        panel.set_xlabel("concurrency")
        panel.set_ylabel(label)
        panel.grid(axis="y", color="#e5e5e5")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(arms), frameon=False)
    of = plan.shape(shape)
    title = f"Shape {shape}: {of.input} tokens in, {of.output} out"
    return Plot(title, f"{title}; throughput, TTFT and ITL of {len(arms)} arms over concurrency", _svg(figure))


def _beside(index: int, count: int) -> float:
    """A factor on a logarithmic axis that puts arms beside each other, where their bars can be seen."""
    return math.pow(2, 0.12 * (index - (count - 1) / 2))


def _plain_numbers(axes: Any) -> None:
    """Ticks at round figures, however narrow or wide the range is."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = axes.get_ylim()
    if high / low < 8:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    else:
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0) if high / low < 100 else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: figure_text(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
