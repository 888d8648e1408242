"""`fusefs plan` sends a mount the order of coming reads; `fusefs record` lists opened files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fusefs.cli import manifest, sync
from fusefs.cli.polling import ANSWER_TIMEOUT_S, FIRST_PAUSE_S, POLL_S, SILENCE_S
from fusefs.launch.control import CommandError, NotAnsweringError
from fusefs.launch.mount_requests import daemon_request
from fusefs.planning.table import planned

# The bytes of the list that are read at a time, and the maximum length of an entry in bytes.
CHUNK = 1 << 20
LONGEST_ENTRY = 8192
# A file that begins with this many bad entries is not a list of paths.
MOST_BAD = 100
BAD_NAMED = 10
# Time between requests of `fusefs record` for the opened files.
RECORD_EVERY_S = 0.2
# Time limit for the look-up of the first entries; it usually takes less.
FIRST_LOOK_S = 3.0
FIRST_LOOK = 64
ZSTD = bytes.fromhex("28b52ffd")  # the first bytes of a compressed list


class Sender:
    """A sender of one reader's plan to the daemon, in pieces."""

    def __init__(self, mountpoint: Path, reader: str) -> None:
        self._mountpoint = mountpoint
        self._reader = reader
        self._offset = self._size = self.count = 0
        self._piece: list[str] = []

    def add(self, path: str, span: str = "") -> None:
        self._piece.append(planned(path, span))
        self._size += len(self._piece[-1].encode()) + 1
        self.count += 1
        if self._size >= manifest.PIECE:
            self.flush()

    def flush(self, *, is_last: bool = False) -> None:
        """Send the entries added since the last request; the first one replaces an earlier plan."""
        if not self._piece and not (is_last and self.count):
            return
        message = {"command": "plan", "reader": self._reader, "offset": self._offset}
        entries = {"entries": self._piece, "is_last": is_last}
        daemon_request(self._mountpoint, message | entries, ANSWER_TIMEOUT_S)
        self._offset, self._size, self._piece = self._offset + self._size, 0, []

    def plan(self) -> dict[str, Any]:
        """Return the plan's state as in `fusefs status --json`; CommandError if the plan ended."""
        answer = daemon_request(self._mountpoint, {"command": "plans"}, ANSWER_TIMEOUT_S)
        found = [plan for plan in answer["plans"] if plan["reader"] == self._reader]
        if not found:
            raise CommandError("the plan was ended meanwhile")
        plan: dict[str, Any] = found[0]
        return plan


def send(
    base: Path, file: str, reader: str, separator: bytes, complain: Callable[[str], None]
) -> bool:
    """Send the plans in `file` ("-": standard input); entries without a reader are for `reader`.

    Relative paths are below `base`. Returns False, and tells `complain`, if entries are bad or
    their files missing.
    """
    mountpoint, below = sync.find(base)
    # A line of text is a path, a reader and a range; NUL-separated entries are only paths.
    is_text = separator != b"\0"
    reading = manifest.Manifest(mountpoint, below, is_text=is_text)
    senders: dict[str, Sender] = {}
    bad = number = 0
    named: list[str] = []  # bad lines that `complain` has not been told yet

    def refuse(at: int, why: str) -> None:
        nonlocal bad
        bad += 1
        if bad <= BAD_NAMED:
            named.append(f"{number + at}: {why}")

    with _opened(file) as fd:
        for entries in _entries(fd, separator, file):
            pairs = [entry.partition(b"\t") if is_text else (entry, b"", b"") for entry in entries]
            paths = reading.paths([path for path, _, _ in pairs], refuse)
            for at, ((_, _, more), path) in enumerate(zip(pairs, paths, strict=True), 1):
                if path:
                    name, _, span = more.decode(errors="replace").partition("\t")
                    whose = name.strip() or reader
                    sender = senders.get(whose) or Sender(mountpoint, whose)
                    try:
                        sender.add(path, span.strip())
                        senders[whose] = sender
                    except ValueError as error:
                        refuse(at, str(error))
            number += len(entries)
            if bad >= MOST_BAD and not senders:
                raise CommandError(f"{file} is no list of paths of {mountpoint}: line {named[0]}")
            while named and senders:
                complain(f"{file}:{named.pop(0)}")
            # Sent now, because a stream may continue much later.
            for sender in senders.values():
                sender.flush()
    for sender in senders.values():
        sender.flush(is_last=True)
    if not senders:
        first = f": line {named[0]}" if named else ""
        raise CommandError(f"{file} names no file of {mountpoint}{first}")
    if bad > BAD_NAMED:
        complain(f"{file}: {bad:,} lines in all name nothing of the mount")
    return _are_found(list(senders.values()), complain) and not bad


@contextmanager
def _opened(file: str) -> Iterator[int]:
    """Open a list and yield its descriptor; the program zstd decompresses a compressed list."""
    with sys.stdin.buffer if file == "-" else open(file, "rb") as source:
        if not source.seekable() or os.pread(source.fileno(), len(ZSTD), 0) != ZSTD:
            yield source.fileno()
            return
        # All of it is tested first, because a part of a damaged list would replace the last plan.
        tested = subprocess.run(["zstd", "-tq"], stdin=source, capture_output=True, text=True)
        if tested.returncode:
            raise CommandError(f"{file} can't be decompressed: {tested.stderr.strip()}")
        source.seek(0)
        with subprocess.Popen(["zstd", "-dcq"], stdin=source, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            yield process.stdout.fileno()


def _entries(fd: int, separator: bytes, file: str) -> Iterator[list[bytes]]:
    rest = b""
    while chunk := os.read(fd, CHUNK):
        if separator != b"\0" and b"\0" in chunk:
            raise CommandError(f"{file} is no list of paths: it has NUL bytes (see --null)")
        *entries, rest = (rest + chunk).split(separator)
        if len(rest) > LONGEST_ENTRY or any(len(entry) > LONGEST_ENTRY for entry in entries):
            raise CommandError(f"{file} is no list of paths: an entry is too long for one")
        if entries:
            yield entries
    if rest:
        yield [rest]


def _are_found(senders: list[Sender], complain: Callable[[str], None]) -> bool:
    """Wait up to 3 s until each plan's first paths are looked up; False if the bucket lacks one."""
    deadline, pause_s = time.monotonic() + FIRST_LOOK_S, FIRST_PAUSE_S
    for sender in senders:
        wanted = min(sender.plan()["entries"], FIRST_LOOK)
        while (plan := sender.plan())["looked_up"] < wanted and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S)
        if plan["missing"]:
            complain(
                f"{plan['missing']:,} of the first {plan['looked_up']:,} paths are not in the"
                f" bucket; the first of them is {plan['first_missing']}"
            )
            return False
    return True


def end(base: Path, reader: str) -> None:
    """End a reader's plan in the mount of `base`; raise CommandError if there is no such plan."""
    mountpoint, _ = sync.find(base)
    message = {"command": "end plan", "reader": reader}
    if not daemon_request(mountpoint, message, ANSWER_TIMEOUT_S)["was_there"]:
        raise CommandError(f"{mountpoint} has no plan" + (f" of {reader}" if reader else ""))


def record(base: Path, file: str, separator: str) -> None:
    """Write the paths that programs open in a mount to a file, `separator` after each path.

    The call ends only by an exception: at the end of the mount, or by Ctrl-C.
    """
    mountpoint, _ = sync.find(base)
    after, last_answer = 0, time.monotonic()
    with open(file, "w", encoding="utf-8") as target:
        while True:
            try:
                message = {"command": "record", "after": after}
                answer = daemon_request(mountpoint, message, ANSWER_TIMEOUT_S)
            except NotAnsweringError:
                if time.monotonic() - last_answer > SILENCE_S:
                    raise
                time.sleep(RECORD_EVERY_S)
                continue
            last_answer = time.monotonic()
            target.writelines(f"{entry}{separator}" for entry in answer["entries"])
            target.flush()
            after = answer["after"] + len(answer["entries"])
            if not answer["entries"]:
                time.sleep(RECORD_EVERY_S)
