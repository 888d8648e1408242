"""What a daemon does at this moment: its tree of trio tasks, and the stacks of its threads.

The answer to `{"command": "stacks"}`, for `fusefs report`. It has places in the
code and names of tasks, and no values: arguments may hold keys and secrets. A
daemon whose event loop hangs does not answer; it is sent SIGUSR1 instead, which
has faulthandler write the threads' stacks to the log.
"""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import trio

# A mount under load has a task for each request: equal stacks of siblings are shown once, with
# their number. Beyond these bounds the rest is left out: each task takes the event loop
# some 10 us, and a control answer may have 4 MiB.
MOST_TASKS = 2000
MOST_FRAMES = 60
MOST_BYTES = 1 << 20


def collect() -> dict[str, Any]:
    """The stacks as text. To be called in the event loop."""
    return {"tasks": _bounded(_tasks()), "threads": _bounded(_threads())}


def _bounded(lines: Iterable[str]) -> str:
    """Lines as text, as many as may be."""
    parts, size = [], 0
    for line in lines:
        size += len(line) + 1
        if size > MOST_BYTES:
            parts.append("... and more")
            break
        parts.append(line)
    return "\n".join(parts) + "\n"


def _tasks() -> Iterator[str]:
    """The tree of tasks, each nursery's children below it, equal ones once."""
    root = trio.lowlevel.current_root_task()
    if root is None:
        return
    for depth, task, number in _walk(root, 0, itertools.count()):
        indent = "  " * depth
        times = f" ({number} times)" if number > 1 else ""
        yield f"{indent}task {task.name}{times}"
        for place in _places(task):
            yield f"{indent}    {place}"


def _walk(
    task: trio.lowlevel.Task, depth: int, visited: Iterator[int]
) -> Iterator[tuple[int, trio.lowlevel.Task, int]]:
    """Each task with its depth, and how many siblings without children look the same.

    `visited` counts the tasks that were looked at.
    """
    yield depth, task, 1
    alike: dict[tuple[str, ...], trio.lowlevel.Task] = {}
    numbers: Counter[tuple[str, ...]] = Counter()
    for nursery in task.child_nurseries:
        for child in list(nursery.child_tasks):
            if next(visited) >= MOST_TASKS:
                break
            if child.child_nurseries:
                yield from _walk(child, depth + 1, visited)
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


def _threads() -> Iterator[str]:
    """The stacks of all threads of Python, equal ones once."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks: dict[tuple[str, ...], list[str]] = {}
    for ident, frame in sys._current_frames().items():
        # Without the lines of the sources, which extract_stack would read in the event loop.
        frames = itertools.islice(traceback.walk_stack(frame), MOST_FRAMES)
        places = tuple(f"    {_place(*one)}" for one in frames)[::-1]
        stacks.setdefault(places, []).append(names.get(ident, "?"))
    for places, owners in stacks.items():
        alone = len(owners) == 1
        yield f"thread {owners[0]}" if alone else f"{len(owners)} threads, as {owners[0]}"
        yield from places
