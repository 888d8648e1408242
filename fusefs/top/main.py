"""`fusefs top`: samples all mounts now and then, and shows what happened in between.

A terminal shows the latest sample, a block for each mount; `--plain`, or another output, gets a
line for each mount, and `--json` one object a line.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from fusefs.exporter.queries import MountAnswer, mounts_of_user, query_all
from fusefs.top import lines
from fusefs.top.rates import Rates, rates

# Moves the cursor to the upper left corner and clears the screen (ECMA-48).
_CLEAR = "\x1b[H\x1b[2J"


@dataclass(slots=True)
class Sampler:
    """Gets the rates of all mounts, one time after the other."""

    _before: dict[str, MountAnswer] = field(default_factory=dict)

    def sample(self) -> list[Rates]:
        """The rates since the last call. Blocks for as long as a silent mount may take."""
        answers = query_all(mounts_of_user())
        found = [rates(self._before.get(one.target.volume), one) for one in answers]
        # A mount that misses one answer goes on from the last that it gave and that can be read.
        self._before = {
            one.target.volume: one if mount.is_up else self._before[one.target.volume]
            for one, mount in zip(answers, found, strict=True)
            if mount.is_up or one.target.volume in self._before
        }
        return found


def run(*, is_plain: bool, is_json: bool, count: int | None, every_s: float = 1.0) -> int:
    """Show `count` samples (None: until the user ends it), `every_s` seconds apart.

    Returns the exit status.
    """
    # A terminal without a cursor, as an editor has, cannot be cleared.
    has_screen = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    sampler = Sampler()
    with contextlib.suppress(KeyboardInterrupt):
        sampler.sample()
        for _ in range(count) if count is not None else itertools.count():
            time.sleep(every_s)
            _show(sampler.sample(), is_json=is_json, has_screen=has_screen and not is_plain)
    return 0


def _show(mounts: Sequence[Rates], *, is_json: bool, has_screen: bool) -> None:
    now = time.strftime("%H:%M:%S")
    if is_json:
        plain = [asdict(mount) for mount in mounts]
        print(json.dumps({"time": time.time(), "mounts": plain}), flush=True)
    elif has_screen:
        width, height = shutil.get_terminal_size()
        text = screen(mounts, width, height - 1)
        print(f"{_CLEAR}fusefs top {now}, Ctrl-C ends it\n{text}", end="", flush=True)
    else:
        text = "\n".join(map(lines.line, mounts)) or "no mounts"
        print(f"{now}\n{text}", flush=True)


def screen(mounts: Sequence[Rates], width: int, height: int) -> str:
    """A block for each mount, cut at `width` and `height`; a line each if blocks have no room."""
    text = [line for mount in mounts for line in lines.block(mount)] or ["no mounts"]
    if len(text) > height:
        text = [lines.line(mount) for mount in mounts]
    if len(text) > height:
        text[height - 1 :] = [f"and {len(text) - height + 1} more"]
    return "\n".join(line[:width] for line in text)
