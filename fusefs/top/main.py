"""The main program of `fusefs top`: samples all mounts' metrics regularly, and shows rates.

On a terminal the latest sample is shown, with a block for each mount. With `--plain`, or without a
terminal, a line for each mount is printed; with `--json`, one object for each sample.
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
    """A sampler of the rates of all mounts, which stores the last answers."""

    _before: dict[str, MountAnswer] = field(default_factory=dict)

    def sample(self) -> list[Rates]:
        """Return all mounts' rates since the last call. Blocks until each answered or timed out."""
        answers = query_all(mounts_of_user())
        found = [rates(self._before.get(one.target.volume), one) for one in answers]
        # After a missing or malformed answer, the last good answer is the base of the next rates.
        self._before = {
            one.target.volume: one if mount.is_up else self._before[one.target.volume]
            for one, mount in zip(answers, found, strict=True)
            if mount.is_up or one.target.volume in self._before
        }
        return found


def run(*, is_plain: bool, is_json: bool, count: int | None, every_s: float = 1.0) -> int:
    """Show `count` samples (None: until Ctrl-C), `every_s` seconds apart.

    Returns the exit status.
    """
    # A terminal without cursor control, as an editor's, cannot be cleared.
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
    """Return a block for each mount, or a line if blocks have no room; cut to the given size."""
    text = [line for mount in mounts for line in lines.block(mount)] or ["no mounts"]
    if len(text) > height:
        text = [lines.line(mount) for mount in mounts]
    if len(text) > height:
        text[height - 1 :] = [f"and {len(text) - height + 1} more"]
    return "\n".join(line[:width] for line in text)
