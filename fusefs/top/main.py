"""`fusefs top`: samples all mounts once a second, and shows what happened in between.

A thread gets the answers, so that keys work while a mount does not answer. On a
terminal rich draws a screen; `--plain`, or another output, gets lines, and `--json`
one object a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusefs.exporter.queries import MountAnswer, mounts_of_user, query_all
from fusefs.launch import control
from fusefs.launch.control import CommandError, ControlError
from fusefs.top import lines
from fusefs.top.rates import Rates, rates

if TYPE_CHECKING:
    from rich.console import ConsoleDimensions, RenderableType

INTERVAL_S = 1.0
KEY_WAIT_S = 0.1
STATUS_TIMEOUT_S = 1.0
MISSING = (
    "the Python package rich is missing: install the wheel with its extra,"
    " pip install './fusefs_s3-….whl[top]', or use --plain"
)
# What terminals send for the keys with arrows (ECMA-48).
UP, DOWN, ESCAPE = "\x1b[A", "\x1b[B", "\x1b"


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


def run(*, is_plain: bool, is_json: bool, count: int | None) -> int:
    """Show `count` samples (None: until the user ends it); return the exit status.

    Raises:
        CommandError: rich is missing, and the screen was wanted.
    """
    has_screen = sys.stdout.isatty() and sys.stdin.isatty() and not _is_dumb()
    if is_json or is_plain or not has_screen:
        return _run_lines(is_json=is_json, count=count)
    try:
        from fusefs.top import screen
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        raise CommandError(MISSING) from None
    del screen  # the picture imports it again
    return _run_screen(count)


def _is_dumb() -> bool:
    """True if the terminal, as an editor has, cannot move its cursor: rich draws nothing there."""
    return os.environ.get("TERM", "").lower() in ("", "dumb", "unknown")


def _run_lines(*, is_json: bool, count: int | None) -> int:
    sampler = Sampler()
    sampler.sample()
    shown = 0
    while count is None or shown < count:
        time.sleep(INTERVAL_S)
        mounts = sampler.sample()
        if is_json:
            plain = [mount.as_plain() for mount in mounts]
            print(json.dumps({"time": time.time(), "mounts": plain}), flush=True)
        else:
            text = "\n".join(map(lines.line, mounts)) or "no mounts"
            print(f"{time.strftime('%H:%M:%S')}\n{text}", flush=True)
        shown += 1
    return 0


# --- the screen ---------------------------------------------------------------


class Background:
    """Samples in a thread; `mounts` is the last list, and `number` counts the attempts.

    `error` is why the last one failed, "" if it did not.
    """

    def __init__(self) -> None:
        self.mounts: list[Rates] = []
        self.error = ""
        self.number = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fusefs-top", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        sampler = Sampler()
        self._sample(sampler)
        while not self._ending.wait(INTERVAL_S):
            self._sample(sampler)
            self.number += 1

    def _sample(self, sampler: Sampler) -> None:
        try:
            self.mounts = sampler.sample()
            self.error = ""
        except Exception as error:  # without this thread the screen would stay as it is
            self.error = f"{type(error).__name__}: {error}"

    def end(self) -> None:
        self._ending.set()


@dataclass(slots=True)
class View:
    """The view of the user: the number of the chosen mount, and whether in detail."""

    chosen: int = 0
    is_detailed: bool = False
    has_ended: bool = False

    def press(self, key: str, mounts: int) -> None:
        if key in ("q", "Q", "\x03"):
            self.has_ended = True
        elif key in (UP, "k"):
            self.chosen -= 1
        elif key in (DOWN, "j"):
            self.chosen += 1
        elif key in ("\r", "\n"):
            self.is_detailed = mounts > 0
        elif key in (ESCAPE, "b"):
            self.is_detailed = False
        self.chosen = max(0, min(self.chosen, mounts - 1))


def _run_screen(count: int | None) -> int:
    from rich.live import Live

    background, view = Background(), View()
    try:
        with _keys() as descriptor, Live(screen=True, auto_refresh=False) as live:
            shown = -1
            while not view.has_ended and (count is None or background.number < count):
                key = _read_key(descriptor)
                mounts = background.mounts
                view.press(key, len(mounts))
                # The first sample is there after a second.
                if background.number and (key or shown != background.number):
                    shown = background.number
                    picture = _picture(view, mounts, live.console.size, background.error)
                    live.update(picture, refresh=True)
    finally:
        background.end()
    return 0


def _picture(
    view: View, mounts: list[Rates], size: ConsoleDimensions, error: str
) -> RenderableType:
    from fusefs.top import screen

    if error:
        return screen.failure(error)
    if view.is_detailed and view.chosen < len(mounts):
        mount = mounts[view.chosen]
        return screen.detail(mount, _status(mount))
    return screen.overview(mounts, view.chosen, size.width, size.height)


def _status(mount: Rates) -> dict[str, Any] | None:
    """The status of a mount that answers, for its sentence and its slowest files."""
    if not mount.is_up:
        return None
    sockets = {target.volume: target.socket for target in mounts_of_user()}
    socket: Path | None = sockets.get(mount.volume)
    if socket is None:
        return None
    with contextlib.suppress(ControlError):
        return control.request(socket, "status", STATUS_TIMEOUT_S)
    return None


@contextlib.contextmanager
def _keys() -> Iterator[int]:
    """Standard input with each key at once and without echo, as it was afterwards."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _read_key(descriptor: int) -> str:
    """The key that was pressed, "" if none was for a moment."""
    if not select.select([descriptor], [], [], KEY_WAIT_S)[0]:
        return ""
    # A terminal sends the bytes of one key at once.
    text = os.read(descriptor, 16).decode(errors="replace")
    return text if text.startswith("\x1b") else text[:1] or "q"
