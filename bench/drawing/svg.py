"""Draws pictures as SVG with matplotlib.

The same numbers give the same bytes with the same matplotlib: identifiers are salted with a
constant, and no date is written. Text stays text, in the reader's own sans-serif font, which keeps
the files small. The background is white and opaque, so that the pictures can be read on dark pages
as well.

Importing this module raises ModuleNotFoundError if matplotlib is missing.
"""

from __future__ import annotations

import textwrap
from io import BytesIO
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from bench.contenders.registry import JUICEFS, KERNEL, NATIVE, OBSTORE
from bench.drawing.pictures import Bars, Group, Lines, Picture, name_of

STYLE = {
    "svg.hashsalt": "fusefs",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#57606a",
    "text.color": "#1f2328",
    "axes.labelcolor": "#1f2328",
    "xtick.color": "#1f2328",
    "ytick.color": "#1f2328",
    "grid.color": "#d8dee4",
}
# Distinguishable also for readers with impaired colour vision (Okabe and Ito's set).
COLOURS = {
    NATIVE: "#57606a",
    OBSTORE: "#b0b7bf",
    KERNEL: "#0072b2",
    "fusefs-nopt": "#56b4e9",
    "fusefs-local": "#56b4e9",
    "fusefs-writable": "#3b8fc4",
    "fusefs-pyfuse3": "#8fd0f2",
    "fusefs-csi": "#004d7a",
    "mountpoint-s3": "#d55e00",
    "geesefs": "#f0e442",
    "rclone": "#e69f00",
    "s3fs": "#009e73",
    JUICEFS: "#cc79a7",
}
WIDTH_IN = 10.0
# Heights in inches: of a bar, between groups of bars, of a panel's title and axis, of lines.
BAR_IN, GAP_IN, FRAME_IN, LINES_IN = 0.17, 0.14, 0.75, 2.6
HEAD_IN, NOTE_LINE_IN, NOTE_WIDTH = 0.75, 0.17, 150


def draw(picture: Picture, source: str) -> bytes:
    """Draw the picture as an SVG file; `source` names the file with the numbers."""
    note = textwrap.wrap(picture.note, NOTE_WIDTH)
    rows = [picture.panels[start : start + 2] for start in range(0, len(picture.panels), 2)]
    heights = [max(_height(panel) for panel in row) for row in rows]
    foot = 0.15 + NOTE_LINE_IN * len(note)
    total = HEAD_IN + sum(heights) + foot
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, total), facecolor="white")
        FigureCanvasSVG(figure)
        top = total - HEAD_IN
        for row, height in zip(rows, heights, strict=True):
            for column, panel in enumerate(row):
                _panel(_axes(figure, (column, len(row)), (top, total), panel), panel)
            top -= height
        _head(figure, picture, total)
        figure.text(0.01, 0.08 / total, "\n".join(note), fontsize=7.5, color="#57606a", va="bottom")
        output = BytesIO()
        figure.savefig(output, format="svg", metadata=_metadata(picture, source))
    return output.getvalue()


def _metadata(picture: Picture, source: str) -> dict[str, Any]:
    return {
        "Date": None,
        "Creator": "python -m bench draw",
        "Title": picture.title,
        "Description": picture.note,
        "Source": source,
        "Identifier": picture.digest,
    }


def _head(figure: Any, picture: Picture, total: float) -> None:
    figure.text(0.01, 1 - 0.1 / total, picture.title, fontsize=13, weight="bold", va="top")
    patches = [Patch(color=COLOURS[name], label=name_of(name)) for name in picture.contenders]
    figure.legend(
        handles=patches,
        loc="upper left",
        bbox_to_anchor=(0.0, 1 - 0.34 / total),
        ncols=len(patches),
        frameon=False,
        fontsize=9,
        handlelength=1.0,
        columnspacing=1.4,
    )


def _height(panel: Bars | Lines) -> float:
    if isinstance(panel, Lines):
        return FRAME_IN + LINES_IN
    return FRAME_IN + sum(BAR_IN * len(group.marks) + GAP_IN for group in panel.groups)


def _axes(
    figure: Any, place: tuple[int, int], edges: tuple[float, float], panel: Bars | Lines
) -> Any:
    """Add axes with the panel's own height, at the top of its row."""
    (column, columns), (top, total) = place, edges
    width = 1 / columns
    has_labels = isinstance(panel, Bars) and any(group.label for group in panel.groups)
    # Room for the labels of rows, or for the numbers of an axis.
    left = 1.6 if has_labels else 0.95
    height = _height(panel) - FRAME_IN
    return figure.add_axes(
        (
            column * width + left / WIDTH_IN,
            (top - 0.3 - height) / total,
            width - (left + 0.2) / WIDTH_IN,
            height / total,
        )
    )


def _panel(axes: Any, panel: Bars | Lines) -> None:
    axes.set_title(panel.title, weight="bold")
    if isinstance(panel, Lines):
        _draw_lines(axes, panel)
    else:
        _draw_bars(axes, panel)


def _draw_bars(axes: Any, panel: Bars) -> None:
    """Draw horizontal bars, the first group at the top, each with its value as measured."""
    y, ticks = 0.0, []
    highest = max(mark.high for group in panel.groups for mark in group.marks)
    for group in panel.groups:
        ticks.append(y + BAR_IN * (len(group.marks) - 1) / 2)
        _draw_group(axes, group, y, highest)
        y += BAR_IN * len(group.marks) + GAP_IN
    axes.set_ylim(y - GAP_IN / 2 - BAR_IN / 2, -BAR_IN / 2 - GAP_IN / 2)
    axes.set_xlim(0, highest * 1.38)  # with room for the values beside the bars
    axes.set_yticks(ticks, [group.label for group in panel.groups])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(panel.axis)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.grid(axis="x", linewidth=0.6)
    axes.set_axisbelow(True)
    if panel.reference:
        axes.axvline(1, color="#57606a", linewidth=1, linestyle=(0, (4, 2)))


def _draw_group(axes: Any, group: Group, top: float, highest: float) -> None:
    for number, mark in enumerate(group.marks):
        y = top + BAR_IN * number
        axes.barh(y, mark.value, height=BAR_IN * 0.86, color=COLOURS[mark.contender])
        if mark.high > mark.low:
            axes.plot([mark.low, mark.high], [y, y], color="#1f2328", linewidth=1)
        axes.text(
            max(mark.high, mark.value) + highest * 0.02,
            y,
            mark.text,
            fontsize=7.5,
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )


def _draw_lines(axes: Any, panel: Lines) -> None:
    """Draw a line for each contender, with its range; counts are at equal distances."""
    positions = list(range(len(panel.counts)))
    for line in panel.lines:
        colour = COLOURS[line[0].contender]
        values = [mark.value for mark in line]
        below = [mark.value - mark.low for mark in line]
        above = [mark.high - mark.value for mark in line]
        axes.errorbar(
            positions,
            values,
            yerr=[below, above],
            color=colour,
            marker="o",
            markersize=3.5,
            linewidth=1.5,
            elinewidth=0.9,
            capsize=2,
        )
    axes.set_xticks(positions, [str(count) for count in panel.counts])
    axes.set_xlabel(panel.counted)
    if panel.is_logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylabel(f"{panel.axis} (logarithmic)")
    else:
        axes.set_ylim(bottom=0)
        axes.set_ylabel(panel.axis)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", linewidth=0.6)
    axes.set_axisbelow(True)
