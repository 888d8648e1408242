"""Picture of simulated starts: requests to S3, refusals, and the number of warm nodes.

It has the style of the other pictures (bench/drawing/svg.py). Importing this module raises
ModuleNotFoundError if matplotlib is missing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from bench.drawing.svg import STYLE, WIDTH_IN

HEIGHT_IN = 4.1
# Okabe and Ito's set, as for the contenders of the bench.
COLOURS = ("#57606a", "#d55e00", "#e69f00", "#0072b2", "#cc79a7", "#56b4e9", "#009e73")
PANELS = (
    ("sent", "GETs sent to S3, each second", True),
    ("refused", "of them refused (503 SlowDown)", True),
    ("warm", "nodes that have all", False),
)


def draw(path: Path) -> bytes:
    """Draw the picture as an SVG file."""
    result = json.loads(path.read_bytes())
    runs: Sequence[dict[str, Any]] = result["runs"]
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), facecolor="white")
        FigureCanvasSVG(figure)
        all_axes = figure.subplots(1, len(PANELS))
        for axes, (series, title, is_logarithmic) in zip(all_axes, PANELS, strict=True):
            _panel(axes, runs, series, is_logarithmic=is_logarithmic)
            axes.set_title(title, weight="bold")
        figure.subplots_adjust(left=0.075, right=0.985, top=0.73, bottom=0.12, wspace=0.27)
        title = f"{result['nodes']:,} simulated nodes start at once"
        figure.text(0.01, 0.975, title, fontsize=13, weight="bold", va="top")
        handles, labels = all_axes[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="upper left", bbox_to_anchor=(0.0, 0.925), ncols=3, frameon=False
        )
        output = BytesIO()
        metadata = {"Date": None, "Creator": "python -m bench draw", "Source": path.name}
        figure.savefig(output, format="svg", metadata=metadata)
    return output.getvalue()


def _panel(axes: Any, runs: Sequence[dict[str, Any]], series: str, *, is_logarithmic: bool) -> None:
    for run, colour in zip(runs, COLOURS, strict=False):
        values = run["series"][series]
        if is_logarithmic:
            # A logarithmic axis has no zero, so zeros are drawn at the bottom.
            values = [max(value, 0.5) for value in values]
        axes.step(range(len(values)), values, where="post", color=colour, label=run["name"])
    if is_logarithmic:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.8)
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds from the start")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", linewidth=0.6)
    axes.set_axisbelow(True)
