"""Picture of an accelerator's utilisation in each epoch, without a plan and with one.

Importing this module raises ModuleNotFoundError if matplotlib is missing.
"""

from __future__ import annotations

import json
import statistics
from io import BytesIO
from pathlib import Path

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from bench.drawing.svg import STYLE, WIDTH_IN

HEIGHT_IN = 2.6
COLOURS = ("#b0b7bf", "#0072b2")
BAR = 0.38


def draw(path: Path) -> bytes:
    """Draw the picture of a file with `utilisation`: by name, the rounds' percent in each epoch.

    A bar is the median of the rounds, the thin line goes from the lowest to the highest.
    """
    found: dict[str, list[list[float]]] = json.loads(path.read_bytes())["utilisation"]
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), facecolor="white")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        for shift, (name, epochs) in enumerate(found.items()):
            middles = [statistics.median(rounds) for rounds in epochs]
            places = [number + BAR * shift for number in range(len(epochs))]
            low = [middle - min(rounds) for middle, rounds in zip(middles, epochs, strict=True)]
            high = [max(rounds) - middle for middle, rounds in zip(middles, epochs, strict=True)]
            look = {"color": COLOURS[shift], "label": name, "ecolor": "#57606a"}
            bars = axes.bar(places, middles, BAR, yerr=(low, high), **look)
            axes.bar_label(bars, [f"{middle:.1f}%" for middle in middles], label_type="center")
        axes.set_xticks([number + BAR / 2 for number in range(len(epochs))])
        axes.set_xticklabels([f"epoch {number + 1}" for number in range(len(epochs))])
        axes.set_title("The accelerator's utilisation", weight="bold")
        axes.legend(loc="lower right", frameon=False, ncols=2, bbox_to_anchor=(1.0, 1.0))
        output = BytesIO()
        metadata = {"Date": None, "Creator": "python -m bench draw", "Source": path.name}
        figure.savefig(output, format="svg", metadata=metadata)
    return output.getvalue()
