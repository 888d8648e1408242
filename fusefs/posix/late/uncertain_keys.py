"""The uncertain keys of a mount: keys that a late request may still change.

A *late request* is a change (PUT, COPY or DELETE) that the server executes after its sender has
given it up. Any request without an answer (a time-out, a lost connection, a killed process) may be
executed late, and makes its key *uncertain*. Only for uncertain keys, the result of the last
acknowledged change (the *expected* state) is recorded, with a copy of the expected content:

    DIRECTORY/source     the bucket to which all records belong
    DIRECTORY/N.json     an uncertain key: its unanswered requests and its expected state
    DIRECTORY/N.SEQUENCE the expected content, if an object is expected

The key is checked after 5, 15, 60 and 300 s (repair.py sends the HEAD). The token in the object's
metadata (store/fencing.py) tells which request has made the object. If an unanswered request has
made the object, or has deleted the expected one, the expected state is restored. If another client
has made the object, the object is left alone and the checks end. A request that was sent after the
last acknowledged change undoes nothing, nor does a request that makes the expected state.

A record is written before its change is acknowledged, without fsync, because a crash of the machine
ends the requests as well. The next process and the next mount at the same place take the records
over. Times are those of CLOCK_BOOTTIME, which has no steps and runs while the machine is suspended.
"""

from __future__ import annotations

import enum
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import trio

from fusefs.linux import clock, files
from fusefs.posix.late import request_log
from fusefs.posix.late.request_log import DELETE, PUT, Change
from fusefs.store.interface import ObjectInfo, UnansweredChanges

logger = logging.getLogger("fusefs.late")


class Absent:
    """The state of a key that has no object."""


ABSENT = Absent()
# The state of a key, as a HEAD found it or as the mount expects it.
KeyState = ObjectInfo | Absent

# The times of a key's checks after its last unanswered request. No S3 service promises a bound for
# late requests; those observed were seconds late, and few connections live for minutes.
CHECKS_S = (5.0, 15.0, 60.0, 300.0)
# The time for which changes of a key wait for a request that was under way when its process
# was killed. None of 1,200 requests to a server on a machine with tenfold load took longer
# than half a second; if a request comes later, its effect is repaired.
KILLED_WAIT_S = 1.5


def boottime() -> float:
    """Seconds since the machine was started (CLOCK_BOOTTIME)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class CheckResult(enum.Enum):
    """The result of a check of an uncertain key.

    `UNDONE`: a late request has undone the last acknowledged change. `NEWER`: a later request,
    unanswered, has changed the key. `FOREIGN`: another client has changed the key since.
    """

    AS_EXPECTED = enum.auto()
    NEWER = enum.auto()
    UNDONE = enum.auto()
    FOREIGN = enum.auto()


@dataclass(slots=True)
class UnansweredRequest:
    """A request without an answer; `is_newer` if sent after the last acknowledged change."""

    change: Change
    is_newer: bool = True

    def has_made(self, found: ObjectInfo) -> bool:
        """True if this request may have made the object `found`."""
        change = self.change
        if change.kind == DELETE:
            return False
        if found.token is None and change.kind == PUT and found.key.endswith("/"):
            # Not every store keeps metadata with the markers of directories.
            return not found.size
        is_named = found.token is not None and str(found.token) in change.tokens
        return is_named or bool(change.etag and change.etag == found.etag)


@dataclass(slots=True, eq=False)
class UncertainKey:
    """One uncertain key. The task that changes or repairs the key holds `lock`.

    The last unanswered request was given up at `since`, and changes of the key wait until
    `waits_until`, both in seconds of boottime(); `checks_done` counts the checks after `since`.
    `expected` is None if the expected state is unknown; `content` is the file name of the
    expected content. If a task waits for the next check, that check sets the event `wanted`.
    """

    key: str
    number: int
    since: float
    unanswered: list[UnansweredRequest] = field(default_factory=list)
    expected: KeyState | None = None
    content: str | None = None
    checks_done: int = 0
    waits_until: float = -math.inf
    is_over: bool = False
    wanted: trio.Event | None = None
    lock: trio.Lock = field(default_factory=trio.Lock)

    @property
    def is_harmless(self) -> bool:
        """True if no unanswered request can change the expected state."""
        older = [one.change for one in self.unanswered if not one.is_newer]
        if isinstance(self.expected, Absent):
            return all(change.kind == DELETE for change in older)
        token = None if self.expected is None else str(self.expected.token)
        return token is None or all(token in change.tokens for change in older)

    def check(self, found: KeyState) -> CheckResult:
        """Compare the state that a HEAD found with the expected state."""
        expected = self.expected
        if isinstance(found, Absent) or isinstance(expected, Absent):
            is_expected = isinstance(found, Absent) and isinstance(expected, Absent)
        elif expected is not None:
            # Not every store keeps metadata with a marker.
            is_marker = found.key.endswith("/") and found.token is None
            same = (found.etag, found.token) == (expected.etag, expected.token)
            is_expected = is_marker or same
        if expected is None or is_expected:
            return CheckResult.AS_EXPECTED
        makers = self.possible_makers(found)
        if not makers:
            return CheckResult.FOREIGN
        return CheckResult.UNDONE if any(not one.is_newer for one in makers) else CheckResult.NEWER

    def possible_makers(self, found: KeyState) -> list[UnansweredRequest]:
        """The unanswered requests that may have led to the state that was found."""
        if isinstance(found, Absent):
            return [one for one in self.unanswered if one.change.kind == DELETE]
        return [one for one in self.unanswered if one.has_made(found)]

    def plain(self) -> dict[str, Any]:
        expected = self.expected
        return {
            "key": self.key,
            "since": self.since,
            "looks": self.checks_done,
            "settled_at": self.waits_until if math.isfinite(self.waits_until) else None,
            "unanswered": [
                [one.change.kind, one.change.tokens, one.change.etag, one.is_newer]
                for one in self.unanswered
            ],
            "expected": "absent" if isinstance(expected, Absent) else _plain(expected),
            "content": self.content,
        }

    @staticmethod
    def from_plain(number: int, plain: Mapping[str, Any]) -> UncertainKey:
        key, state = plain["key"], plain["expected"]
        unanswered = [
            UnansweredRequest(Change(kind, key, tuple(tokens), etag), is_newer)
            for kind, tokens, etag, is_newer in plain["unanswered"]
        ]
        expected = ABSENT if state == "absent" else None if state is None else ObjectInfo(**state)
        entry = UncertainKey(key, number, plain["since"], unanswered, expected, plain["content"])
        entry.checks_done = plain["looks"]
        if plain["settled_at"] is not None:
            entry.waits_until = plain["settled_at"]
        return entry


def _plain(expected: ObjectInfo | None) -> dict[str, Any] | None:
    if expected is None:
        return None
    plain = asdict(expected) | {"metadata": dict(expected.metadata or {})}
    del plain["crc32"]  # not needed any more
    return plain


def _is_of(directory: Path, source: str) -> bool:
    """True if a directory of records belongs to the bucket that `source` names."""
    try:
        return (directory / "source").read_bytes() == source.encode()
    except OSError:  # a new directory, or a foreign one
        return False


def _undone_object(entry: UncertainKey | None) -> ObjectInfo | None:
    """The expected object of a key, if a late request may have undone it; else None."""
    if entry is None or entry.is_harmless or not isinstance(entry.expected, ObjectInfo):
        return None
    return entry.expected


class UncertainKeys(UnansweredChanges):
    """The uncertain keys of one mount, and their records. Belongs to the event loop.

    `checks_s` are the seconds after which a key is checked.
    """

    def __init__(
        self, directory: Path, source: str, checks_s: tuple[float, ...] = CHECKS_S
    ) -> None:
        """Load the records in `directory` and its siblings. Blocks; OSError if the disk fails."""
        self.directory = directory
        self._checks_s = checks_s
        self.repairs = 0
        self.woken = trio.Event()
        self._entries: dict[str, UncertainKey] = {}
        self._numbers = 0
        self._sequence = 0
        self._boot_id = clock.boot_id()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        files.try_lock(self._lock)
        if not _is_of(directory, source):
            (directory / "source").write_text(source)  # only if new: the disk may be full by now
        self._load(directory)
        for other in sorted(directory.parent.iterdir()):
            if other != directory and other.is_dir():
                self._adopt(other, source)
        self.log = request_log.RequestLog(directory)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[UncertainKey]:
        return iter(list(self._entries.values()))

    def get(self, key: str) -> UncertainKey | None:
        return self._entries.get(key)

    @property
    def unsettled_s(self) -> float:
        """Seconds from now for which requests of a killed process may still be under way."""
        now = boottime()
        return max((one.waits_until - now for one in self._entries.values()), default=0.0)

    def note_unanswered(self, change: Change, waits_until: float = -math.inf) -> UncertainKey:
        """Note that a request got no answer: its key is uncertain from now on.

        Changes of the key wait until `waits_until`, in seconds of boottime(). Blocks for as
        long as creating a small file does.
        """
        entry = self._entries.get(change.key)
        if entry is None:
            self._numbers += 1
            entry = self._entries[change.key] = UncertainKey(change.key, self._numbers, 0.0)
        entry.unanswered.append(UnansweredRequest(change))
        entry.since, entry.checks_done = boottime(), 0
        entry.waits_until = max(entry.waits_until, waits_until)
        self.record(entry)
        self.woken.set()
        return entry

    def expect(
        self,
        entry: UncertainKey,
        state: KeyState | None,
        content: str | None,
        *,
        is_acknowledged: bool = True,
    ) -> None:
        """Record the expected state (None: unknown) after a change, and the content's file name.

        If the change `is_acknowledged`, no unanswered request is newer.
        """
        old, entry.content = entry.content, content
        entry.expected = state
        for one in entry.unanswered:
            one.is_newer = one.is_newer and not is_acknowledged
        self.record(entry)
        if old is not None and old != content:
            self.remove(old)

    def record(self, entry: UncertainKey) -> None:
        """Write a key's record, whole or not at all; log an OSError. Blocks."""
        content = json.dumps(entry.plain() | {"boot_id": self._boot_id})
        try:
            files.replace(self._path(entry), content)
        except OSError as error:
            logger.warning("%s: a request without an answer is not on record: %s", entry.key, error)

    def content_path(self, entry: UncertainKey) -> Path:
        """Return a path, not used before, for a copy of a key's expected content."""
        self._sequence += 1
        return self.directory / f"{entry.number}.{time.time_ns()}-{self._sequence}"

    def forget(self, entry: UncertainKey) -> None:
        """Stop checking a key: remove its entry, and its record and content from the disk."""
        entry.is_over = True
        self._wake_waiter(entry)
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        self.remove(self._path(entry).name)
        if entry.content is not None:
            self.remove(entry.content)

    def remove(self, name: str) -> None:
        """Delete the file `name` of a record or a content; a failure is harmless, and logged."""
        try:
            (self.directory / name).unlink(missing_ok=True)
        except OSError as error:
            logger.info("%s is kept: %s", self.directory / name, error.strerror)

    def due_at(self, entry: UncertainKey) -> float:
        """The time of a key's next check, in seconds of boottime()."""
        if entry.wanted is not None:
            return 0.0
        return entry.since + self._checks_s[min(entry.checks_done, len(self._checks_s) - 1)]

    def check_soon(self, entry: UncertainKey) -> trio.Event:
        """Make the next check of a key due now; return the event that this check sets."""
        entry.wanted = entry.wanted or trio.Event()
        self.woken.set()
        return entry.wanted

    def _wake_waiter(self, entry: UncertainKey) -> None:
        if entry.wanted is not None:
            entry.wanted.set()
            entry.wanted = None

    def note_checked(self, entry: UncertainKey) -> None:
        """Note that a key was checked; forget the key after its last check."""
        self._wake_waiter(entry)
        now = boottime()
        while entry.checks_done < len(self._checks_s) and self.due_at(entry) <= now:
            entry.checks_done += 1
        if entry.checks_done >= len(self._checks_s):
            self.forget(entry)
        else:
            self.record(entry)

    def close(self, *, remove: bool) -> None:
        """Close the records; with `remove`, remove the directory unless uncertain keys are left."""
        self.log.close(remove=remove)
        if remove and not self._entries:
            (self.directory / "source").unlink(missing_ok=True)
            try:
                self.directory.rmdir()
            except OSError as error:
                logger.warning("%s is kept: %s", self.directory, error.strerror)
        os.close(self._lock)

    # The interface of `UnansweredChanges`

    def concerns(self, key: str) -> bool:
        return key in self._entries

    def tokens(self, key: str) -> list[str]:
        entry = self._entries.get(key)
        return [t for one in entry.unanswered for t in one.change.tokens] if entry else []

    def may_have_made(self, found: ObjectInfo) -> bool:
        entry = self._entries.get(found.key)
        return entry is not None and bool(entry.possible_makers(found))

    def has_undone(self, key: str, found: ObjectInfo | None) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.check(found or ABSENT) is CheckResult.UNDONE

    def may_have_undone(self, key: str) -> bool:
        return _undone_object(self._entries.get(key)) is not None

    def expected_below(self, prefix: str) -> dict[str, ObjectInfo | None]:
        known = [entry for entry in self._below(prefix) if not entry.is_harmless]
        return {entry.key: _undone_object(entry) for entry in known if entry.expected is not None}

    def unconfirmed_below(self, prefix: str) -> list[str]:
        below = self._below(prefix)
        return [entry.key for entry in below if any(one.is_newer for one in entry.unanswered)]

    def renamed_below(self, prefix: str) -> None:
        for entry in self._below(prefix):
            self.expect(entry, ABSENT, None)

    async def restored(self, key: str) -> ObjectInfo | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        await self.check_soon(entry).wait()
        return entry.expected if isinstance(entry.expected, ObjectInfo) else None

    def counters(self) -> dict[str, int]:
        return {"uncertain": len(self._entries), "repairs": self.repairs}

    def _below(self, prefix: str) -> list[UncertainKey]:
        return [entry for entry in self if entry.key.startswith(prefix)]

    # Records of earlier processes

    def _path(self, entry: UncertainKey) -> Path:
        return self.directory / f"{entry.number}.json"

    def _adopt(self, other: Path, source: str) -> None:
        """Take over the records of an ended mount of the same bucket."""
        with files.closing(os.open(other, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            # A locked directory belongs to a detached mount whose process has not ended yet.
            is_ours = files.try_lock(fd) and _is_of(other, source)
        if is_ours:
            self._load(other)
            for path in other.iterdir():
                path.unlink()
            other.rmdir()

    def _load(self, directory: Path) -> None:
        found = [path for path in directory.glob("*.json") if path.stem.isdecimal()]
        self._numbers = max([self._numbers, *(int(path.stem) for path in found)])
        for path in found:
            try:
                self._load_one(path)
            except (ValueError, KeyError, TypeError) as error:
                logger.error("%s is damaged: %s", path, error)
                path.unlink()
        for change in request_log.unanswered_in(directory):
            self.note_unanswered(change, boottime() + KILLED_WAIT_S)
        known = {entry.content for entry in self._entries.values()}
        for path in self.directory.iterdir():
            is_content = path.name.partition(".")[0].isdecimal() and path.suffix != ".json"
            if is_content and path.name not in known:
                path.unlink()

    def _load_one(self, path: Path) -> None:
        plain = json.loads(path.read_text())
        number = int(path.stem)
        if path.parent != self.directory:
            self._numbers += 1
            number = self._numbers
        entry = UncertainKey.from_plain(number, plain)
        is_of_other_boot = plain["boot_id"] != self._boot_id
        if is_of_other_boot:
            entry.since, entry.checks_done, entry.waits_until = boottime(), 0, -math.inf
        older = self._entries.get(entry.key)
        if older is not None and older.content == entry.content:
            older.content = None  # a killed process had linked the content here already
        elif path.parent != self.directory and entry.content is not None:
            try:
                # The content has both names until its record is here, as it is removed without one.
                os.link(path.parent / entry.content, self.directory / entry.content)
            except OSError as error:
                logger.warning("%s has no content: %s", path, error.strerror)
                entry.content = None
        # Two mounts have left records of the same key; the later mount's record is read later.
        if older is not None:
            entry.unanswered = older.unanswered + entry.unanswered
            entry.waits_until = max(older.waits_until, entry.waits_until)
            self.forget(older)
        self._entries[entry.key] = entry
        if older is not None or path.parent != self.directory or is_of_other_boot:
            self.record(entry)
