"""`python -m bench draw RESULT.json…`: draws results, into their directory or another."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.drawing.pictures import ResultError, load, pictures
from bench.scale.nodes import is_simulation

MISSING = "the Python package matplotlib is missing: pip install -e '.[draw]'"


class DrawingError(Exception):
    """Nothing could be drawn; the message says why, in one line."""


def main(arguments: Sequence[str]) -> int:
    """Draw the results that the arguments name; return the exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        for path in parsed.results:
            for target in draw_result(path, parsed.out or path.parent):
                print(f"drawn {target}")
    except (DrawingError, ResultError, OSError) as error:
        print(f"bench draw: {error}", file=sys.stderr)
        return 1
    return 0


def draw_result(path: Path, directory: Path) -> list[Path]:
    """Write the pictures of a result into the directory, as RESULT-PROFILE-PICTURE.svg.

    Raises:
        DrawingError: matplotlib is missing, or the result has no row to draw.
        ResultError: the file is not a result of the bench.
        OSError: a picture could not be written.
    """
    drawn_whole = is_simulation(path) or _is_utilisation(path)
    result = None if drawn_whole else load(path)
    try:
        from bench.drawing import utilisation
        from bench.drawing.svg import draw
        from bench.scale import picture as simulated
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise DrawingError(MISSING) from None
    directory.mkdir(parents=True, exist_ok=True)
    if result is None:
        target = directory / f"{path.stem}.svg"
        kind = simulated if is_simulation(path) else utilisation
        target.write_bytes(kind.draw(path))
        return [target]
    written = []
    for profile in result["profiles"]:
        for picture in pictures(result, profile):
            target = directory / f"{path.stem}-{profile}-{picture.name}.svg"
            target.write_bytes(draw(picture, path.name))
            written.append(target)
    if not written:
        raise DrawingError(f"{path}: has no row that is drawn")
    return written


def _is_utilisation(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return "utilisation" in json.loads(path.read_bytes())
    return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench draw", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: beside the result")
    return parser
