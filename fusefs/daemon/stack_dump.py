"""What a daemon does at this moment: its tree of trio tasks, and the stacks of its threads.

The answer to `{"command": "stacks"}`, for `fusefs report`. It has places in the
code and names of tasks, and no values: arguments may hold keys and secrets. A
daemon whose event loop hangs does not answer; it is sent SIGUSR1 instead, which
has faulthandler write the threads' stacks to the log.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import trio

# A mount under load has a task for each request: equal stacks are shown once, with
# their number, and of what is left so many. A control answer may have 4 MiB.
MOST_STACKS = 500
MOST_FRAMES = 60
MOST_TASKS = 20_000


def collect() -> dict[str, Any]:
    """The stacks as text. To be called in the event loop; 1,000 tasks take some 20 ms."""
    return {"tasks": _tasks(), "threads": _threads()}


def _tasks() -> str:
    """The tree of tasks, each nursery's children below it, equal ones once."""
    root = trio.lowlevel.current_root_task()
    if root is None:
        return ""
    lines: list[str] = []
    counted = 0
    for depth, task, number in _walk(root, 0):
        counted += number
        if len(lines) >= MOST_STACKS * MOST_FRAMES or counted > MOST_TASKS:
            lines.append("… and more")
            break
        indent = "  " * depth
        times = f" ({number} times)" if number > 1 else ""
        lines.append(f"{indent}task {task.name}{times}")
        lines += [f"{indent}    {place}" for place in _places(task)]
    return "\n".join(lines) + "\n"


def _walk(task: trio.lowlevel.Task, depth: int) -> Iterator[tuple[int, trio.lowlevel.Task, int]]:
    """Each task with its depth, and how many siblings without children look the same."""
    yield depth, task, 1
    alike: dict[tuple[str, ...], trio.lowlevel.Task] = {}
    numbers: Counter[tuple[str, ...]] = Counter()
    for nursery in task.child_nurseries:
        for child in list(nursery.child_tasks):
            if child.child_nurseries:
                yield from _walk(child, depth + 1)
                continue
            look = (child.name, *_places(child))
            alike.setdefault(look, child)
            numbers[look] += 1
    for look, child in alike.items():
        yield depth + 1, child, numbers[look]


def _places(task: trio.lowlevel.Task) -> list[str]:
    """Where a task waits, the outermost call first."""
    found = []
    for frame, line in task.iter_await_frames():
        found.append(_place(frame, line))
        if len(found) == MOST_FRAMES:
            break
    return found


def _place(frame: FrameType, line: int | None) -> str:
    code = frame.f_code
    return f"{code.co_filename}:{line or '?'} in {code.co_qualname}"


def _threads() -> str:
    """The stacks of all threads of Python, equal ones once."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks: dict[str, list[str]] = {}
    for ident, frame in sys._current_frames().items():
        places = [
            f"    {entry.filename}:{entry.lineno} in {entry.name}"
            for entry in traceback.extract_stack(frame, MOST_FRAMES)
        ]
        stacks.setdefault("\n".join(places), []).append(names.get(ident, "?"))
    parts = []
    for stack, owners in list(stacks.items())[:MOST_STACKS]:
        of = f"{len(owners)} threads, as {owners[0]}" if len(owners) > 1 else f"thread {owners[0]}"
        parts.append(f"{of}\n{stack}")
    return "\n".join(parts) + "\n"
