"""A lock that prevents changes of names below a directory while the directory is being renamed.

A change reads the key that it works on and then waits for the bucket. If a directory above the
key were renamed meanwhile, the change would land under the old key, where no program looks for
it, and a later process that finishes the rename could not tell which objects are copies. So
the rename of a directory *closes* its old and its new prefix. The rename begins when all earlier
changes below the two prefixes have ended, and later changes wait until the rename is finished, if
need be by a later process. A change or rename waits only for earlier ones, so there is no deadlock.

If the bucket refuses a request of a rename, the changes that wait for the rename fail with that
error; the next change starts another attempt.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import trio

from fusefs.posix.nodes.inode_table import Inode

# Returns the current keys of some names; renames of directories above change these keys.
Keys = Callable[[], tuple[str, ...]]
Name = tuple[Inode, str]


class _Change:
    """A change that waits or is under way; `number` gives the order in which changes came."""

    __slots__ = ("_targets", "number")

    def __init__(self, number: int, targets: Keys) -> None:
        self.number = number
        self._targets = targets

    def targets(self) -> tuple[str, ...]:
        """The keys to be changed, as they are now; of a rename under way, its two prefixes."""
        return self._targets()


class Closure(_Change):
    """The two prefixes of a rename, closed to changes; `error` ended the rename's last attempt."""

    __slots__ = ("error", "is_kept")

    def __init__(self, number: int, targets: Keys, *, is_kept: bool = False) -> None:
        super().__init__(number, targets)
        self.error: Exception | None = None
        # True while the rename is on record.
        self.is_kept = is_kept

    def begin(self) -> None:
        """Keep the two prefixes as they are now, because the rename itself will change them."""
        prefixes = tuple(map(_as_prefix, self.targets()))
        self._targets = lambda: prefixes

    def is_before(self, other: _Change) -> bool:
        """True if `other` came later and has to wait for this rename."""
        if self.number >= other.number:
            return False
        return self.covers(*other.targets()) or (
            isinstance(other, Closure) and other.covers(*self.targets())
        )

    def covers(self, *keys: str) -> bool:
        """True if one of the keys is at or below one of the two prefixes."""
        prefixes = tuple(map(_as_prefix, self.targets()))
        return any(_as_prefix(key).startswith(prefixes) for key in keys)


class PrefixLock:
    """Makes changes wait for renames of directories above, and renames for earlier changes.

    For the event loop of one mount. `key` returns a directory's prefix. `wanted` is set when a
    rename that has failed should be tried again. If a rename can't be finished now, all changes
    that wait for it raise the StoreError or OSError of the rename.
    """

    def __init__(self, key: Callable[[Inode], str]) -> None:
        self._key = key
        self._numbers = itertools.count()
        self._changes: set[_Change] = set()
        self._closures: list[Closure] = []
        self._moved = trio.Event()
        self.wanted = trio.Event()

    def is_open(self, *names: Name) -> bool:
        """True if a change of these names would not have to wait."""
        return not self._closures or all(map(self.is_open_at, self._keys(names)))

    def is_open_at(self, key: str) -> bool:
        """True if a change of a key would not have to wait."""
        return not (self._closures and any(closure.covers(key) for closure in self._closures))

    def change(self, *names: Name) -> AbstractAsyncContextManager[None]:
        """Hold the lock for a change of these names: no directory above is renamed meanwhile."""
        return self._changing(lambda: self._keys(names))

    async def until_open(self, *names: Name) -> None:
        """Wait until no rename blocks changes of these names; raise a failed rename's error."""
        if not self.is_open(*names):
            async with self.change(*names):
                pass

    async def until_open_at(self, key: Callable[[], str]) -> None:
        """Wait until no rename blocks changes of the key `key()`, which a rename may change."""
        if not self.is_open_at(key()):
            async with self._changing(lambda: (key(),)):
                pass

    @asynccontextmanager
    async def _changing(self, keys: Keys) -> AsyncIterator[None]:
        change = _Change(next(self._numbers), keys)
        self._changes.add(change)
        try:
            if self._closures:
                await self.wait_for_turn(change)
            yield
        finally:
            self._changes.remove(change)
            if any(closure.covers(*keys()) for closure in self._closures):
                self._notify()

    @asynccontextmanager
    async def closed(self, *names: Name) -> AsyncIterator[Closure]:
        """Make changes below two names wait during the block, longer if the closure `is_kept`."""
        closure = Closure(next(self._numbers), lambda: self._keys(names))
        self._closures.append(closure)
        try:
            await self.wait_for_turn(closure)
            closure.begin()
            yield closure
        finally:
            if not closure.is_kept:
                self.open(closure)

    def close(self, *prefixes: str) -> Closure:
        """Make changes wait below the prefixes of a rename that an earlier process has begun."""
        closure = Closure(next(self._numbers), lambda: prefixes, is_kept=True)
        self._closures.append(closure)
        return closure

    def open(self, closure: Closure) -> None:
        """Let the changes go on that waited for a rename, which has ended."""
        closure.is_kept = False
        if closure in self._closures:
            self._closures.remove(closure)
            self._notify()

    def fail(self, closure: Closure, error: Exception) -> None:
        """Make all changes that wait for a rename raise `error`, which prevents the rename."""
        closure.error = error
        self._notify()

    def retry(self, closure: Closure) -> None:
        """Request another attempt at a rename that could not be finished."""
        closure.error = None
        self.wanted.set()

    def waiting(self, closure: Closure) -> list[str]:
        """The keys of the changes that wait for a rename, except requests for the same rename."""
        waiting = filter(closure.is_before, [*self._changes, *self._closures])
        targets = [change.targets() for change in sorted(waiting, key=lambda one: one.number)]
        own = closure.targets()
        return [keys[0] for keys in targets if tuple(map(_as_prefix, keys)) != own]

    async def wait_for_turn(self, change: _Change) -> None:
        """Wait for the earlier changes and renames that block `change`; raise a rename's error."""
        for closure in self._closures:
            if closure.error is not None and closure.is_before(change):
                self.retry(closure)
        while True:
            before = next((one for one in self._closures if one.is_before(change)), None)
            if before is not None and before.error is not None:
                raise before.error
            has_earlier = isinstance(change, Closure) and any(
                earlier.number < change.number and change.covers(*earlier.targets())
                for earlier in self._changes
            )
            if before is None and not has_earlier:
                return
            await self._moved.wait()

    def _notify(self) -> None:
        self._moved.set()
        self._moved = trio.Event()

    def _keys(self, names: tuple[Name, ...]) -> tuple[str, ...]:
        return tuple(self._key(directory) + name for directory, name in names)


def _as_prefix(key: str) -> str:
    return key if key.endswith("/") else key + "/"
