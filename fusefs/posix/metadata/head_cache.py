"""What listings do not tell: the mode, owner, time and attributes that an object's metadata says.

A writable mount asks for them with a HEAD for each name that is looked up, where
objects are not presumed to say nothing (see head_policy.py). A program that looks at
one name after the other in the order of the listing (`ls -l`, `rsync`) gets the
following ones asked for at the same time: one, two, four, and at most MOST_AHEAD. Of
the folders that a walk is about to come to, the one file is asked ahead that may be enough.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import trio

from fusefs.posix.directory.listings import Directories
from fusefs.posix.directory.segment import Entry, Segment
from fusefs.posix.metadata import object_metadata as meta
from fusefs.posix.metadata.object_metadata import SECOND_NS, Meta
from fusefs.posix.nodes import names
from fusefs.posix.nodes.inode_table import Inode, InodeTable, Ownership
from fusefs.store.errors import NotFoundError, StoreError
from fusefs.store.interface import ObjectInfo, Store

# As many as requests may run at once by default.
MOST_AHEAD = 32
# Fewer, for a connection that is open costs less than a new one, and the first may say it all.
SAMPLED_AT_ONCE = 16
# Answers that nobody has wanted yet, and directories that are walked through.
MOST_KEPT = 4096
MOST_STREAKS = 64
# Versions of which it is remembered what they say, at about 100 bytes for each.
MOST_REMEMBERED = 200_000
# S3 tells times in whole seconds, and by a clock of its own.
SETTLED_NS = 5 * SECOND_NS


class Question:
    """One HEAD, under way or answered. `info` None: there is no such object."""

    __slots__ = ("asked", "done", "error", "info")

    def __init__(self) -> None:
        self.asked = time.monotonic()
        self.done = trio.Event()
        self.info: ObjectInfo | None = None
        self.error: StoreError | None = None


class Streak:
    """A program on its way through a directory: where it is, and how far it is ahead of it."""

    __slots__ = ("last", "left", "width")

    def __init__(self) -> None:
        self.last = ""
        self.width = 0
        self.left = 0  # of the names that were asked for ahead


class Learner:
    """The metadata of one mount. Belongs to the event loop.

    Questions run in `nursery`; None on a read-only mount, where all is as the
    mount's settings say.
    """

    def __init__(
        self,
        store: Store,
        directories: Directories,
        inodes: InodeTable,
        owner: Ownership,
        nursery: trio.Nursery | None,
    ) -> None:
        self._store = store
        self._directories = directories
        self._inodes = inodes
        self._owner = owner
        self._nursery = nursery
        self._presumption = directories.presumption
        self._questions: OrderedDict[str, Question] = OrderedDict()
        self._streaks: OrderedDict[str, Streak] = OrderedDict()
        # What a version is to say that its object does not say yet; set by who writes.
        self.deferred: Callable[[ObjectInfo], Meta | None] = lambda _info: None
        # Directories of which a file is just asked ahead.
        self._sampled: dict[str, trio.Event] = {}
        if nursery is not None:
            directories.expect = self._sample_ahead
        # What versions say, None for nothing, by what tells them apart: the kernel
        # forgets names, and asks for them again, sooner than anything of it changes.
        self._remembered: OrderedDict[int, Meta | None] = OrderedDict()

    @property
    def is_on(self) -> bool:
        """Whether objects tell of modes and owners at all."""
        return self._nursery is not None

    def must_ask(self, inode: Inode) -> bool:
        """Whether the bucket has to be asked before an inode's attributes are shown."""
        if not self.lacks(inode):
            return False
        return inode.parent is None or _modified_ns(inode) > self.silent_until(inode.parent)

    def must_ask_of(self, inode: Inode, silent_until: float) -> bool:
        """As `must_ask`, of one of a directory that `silent_until` is of."""
        return self.lacks(inode) and _modified_ns(inode) > silent_until

    def silent_until(self, directory: Inode) -> float:
        """How young what is in a directory may be to be taken to say nothing (head_policy.py)."""
        return self._presumption.silent_until(self._inodes.key(directory))

    def lacks(self, inode: Inode) -> bool:
        """Whether it is not known what an inode's object says."""
        if self._nursery is None or inode.meta is not None or inode.staged is not None:
            return False
        if inode.is_removed:
            return False  # there is no object any more
        if inode.info is None:
            # A whole bucket's root has no key, and so no object that could tell of it.
            return bool(inode.parent is not None or self._inodes.prefix)
        waiting = self.deferred(inode.info)
        if waiting is not None:
            inode.meta, inode.packed = waiting, None
            return False
        version = _version(inode.info)
        if version not in self._remembered:
            return True
        self._remembered.move_to_end(version)
        inode.meta = self._remembered[version] or inode.default_meta(self._owner)
        inode.packed = None
        return False

    def meta(self, inode: Inode) -> Meta:
        """What is kept with an inode, as far as it is known."""
        inode = inode.lead or inode
        if inode.staged is not None:
            return inode.staged.meta
        return inode.meta or inode.default_meta(self._owner)

    async def show(self, inode: Inode) -> None:
        """Know what to show of an inode: what its object says, or is presumed to.

        Raises:
            StoreError: the bucket could not tell.
        """
        if self.must_ask(inode):
            await self.learn(inode)

    async def learn(self, inode: Inode) -> None:
        """Know what an inode's object says, as whoever changes it has to.

        Raises:
            StoreError: the bucket could not tell.
        """
        if not self.lacks(inode):
            return
        key = self._inodes.key(inode)
        question = self._questions.pop(key, None)
        if question is not None and not self._is_about(question, inode):
            question = None
        self._look_ahead(inode, is_expected=question is not None)
        await self._take(inode, question or self._ask(key))

    async def show_all(self, directory: Inode, inodes: Sequence[Inode]) -> None:
        """As `show`, for several of one directory at once."""
        prefix = self._inodes.key(directory)
        while asked := [inode for inode in inodes if self.must_ask(inode)]:
            asked = asked[: max(1, self._presumption.left(prefix))]
            questions = [self._ask(self._inodes.key(inode)) for inode in asked]
            for inode, question in zip(asked, questions, strict=True):
                await self._take(inode, question)

    def wants_sample(self, directory: Inode) -> bool:
        """Whether a few of a directory's files should be asked, to see if any say anything."""
        return self._presumption.is_undecided(self._inodes.key(directory))

    async def sample(self, directory: Inode, inodes: Sequence[Inode]) -> None:
        """Ask a few of a directory's files, to see if the others need not be asked."""
        prefix = self._inodes.key(directory)
        if prefix in self._sampled:
            await self._sampled[prefix].wait()
        asked = [inode for inode in inodes if self.must_ask(inode)]
        while asked and self._presumption.is_undecided(prefix):
            few = asked[: min(SAMPLED_AT_ONCE, self._presumption.left(prefix))]
            del asked[: len(few)]
            questions = [self._ask(self._inodes.key(inode)) for inode in few]
            for inode, question in zip(few, questions, strict=True):
                try:
                    await self._take(inode, question)
                except StoreError:
                    continue  # whoever wants its attributes is told

    def _sample_ahead(self, prefix: str, segment: Segment) -> None:
        """Have the one file asked that may show the others of a directory to be silent."""
        if not self._presumption.is_undecided(prefix) or len(self._sampled) >= MOST_AHEAD:
            return
        first = next((entry for entry in segment.entries.values() if entry is not None), None)
        if self._presumption.left(prefix) == 1 and first is not None and self.lacks_version(first):
            assert self._nursery is not None
            self._sampled[prefix] = trio.Event()
            self._nursery.start_soon(self._sample_one, prefix, first)

    async def _sample_one(self, prefix: str, info: ObjectInfo) -> None:
        try:
            await self.learn_version(info)
        finally:
            self._sampled.pop(prefix).set()

    def lacks_version(self, info: ObjectInfo) -> bool:
        """Whether `learn_version` would ask."""
        has_room = len(self._remembered) < MOST_REMEMBERED
        if self._nursery is None or not has_room or _version(info) in self._remembered:
            return False
        return not self._presumption.is_silent(_directory(info.key), info.mtime_ns)

    async def learn_version(self, info: ObjectInfo) -> None:
        """Remember what a listed object's metadata says, before anybody looks its name up.

        If the bucket can't tell, or has another version by now, nothing is remembered.
        """
        try:
            told = await self._store.head(info.key)
        except StoreError:
            return
        self._heard(told)
        default = self._owner.file
        if _is_same(told, info) and _is_settled(told):
            said = meta.read(told.metadata or {}, default)
            self._remember(told, None if said == default else said)

    async def _take(self, inode: Inode, question: Question) -> None:
        """Wait for an answer, and have the inode keep it."""
        await question.done.wait()
        if question.error is not None:
            raise question.error
        if self.lacks(inode):
            # Without an object: a directory that has no marker, or a file that is just going.
            told = question.info.metadata if question.info is not None else None
            default = inode.default_meta(self._owner)
            inode.meta = meta.read(told or {}, default)
            inode.packed = None
            info = question.info
            if info is not None and _is_same(info, inode.info) and _is_settled(info):
                self._remember(info, None if inode.meta == default else inode.meta)

    def _remember(self, info: ObjectInfo, said: Meta | None) -> None:
        self._remembered[_version(info)] = said
        if len(self._remembered) > MOST_REMEMBERED:
            self._remembered.popitem(last=False)

    def _is_about(self, question: Question, inode: Inode) -> bool:
        """Whether a question was asked about what an inode stands for, and not too long ago."""
        if time.monotonic() - question.asked > self._directories.ttl_s or question.error:
            return False
        info = question.info
        return inode.info is None or info is None or info.etag == inode.info.etag

    def _ask(self, key: str) -> Question:
        assert self._nursery is not None
        question = Question()
        self._nursery.start_soon(self._run, key, question)
        return question

    async def _run(self, key: str, question: Question) -> None:
        try:
            question.info = await self._store.head(key)
            self._heard(question.info)
        except NotFoundError:
            self._presumption.heard(_directory(key), 0, says=False)
        except StoreError as error:
            question.error = error
        finally:
            question.done.set()

    def _heard(self, info: ObjectInfo) -> None:
        modified_ns = 0 if info.key.endswith("/") else info.mtime_ns
        says = meta.tells_attributes(info.metadata or {})
        self._presumption.heard(_directory(info.key), modified_ns, says=says)

    # Ahead

    def _look_ahead(self, inode: Inode, *, is_expected: bool) -> None:
        """Ask for the next names of a directory if one name after the other is wanted."""
        if inode.parent is None or not self._directories.ttl_s:
            return
        prefix = self._inodes.key(inode.parent)
        segment = self._directories.get(prefix).holding(inode.name)
        if segment is None or segment.expires <= time.monotonic():
            return
        streak = self._streak(prefix)
        behind = segment.after(names.position(inode.name))
        before = segment.ordered[behind - 2] if behind > 1 else streak.last
        is_in_order = is_expected or (bool(streak.last) and before == streak.last)
        streak.last = inode.name
        streak.left = max(0, streak.left - 1)
        if not is_in_order:
            streak.width = streak.left = 0
        elif 2 * streak.left <= streak.width:
            most = min(MOST_AHEAD, self._presumption.left(prefix))
            streak.width = streak.left = min(most, max(1, 2 * streak.width))
            for name in segment.ordered[behind : behind + streak.width]:
                self._ask_ahead(inode.parent, prefix, name, segment.entries[name])

    def _streak(self, prefix: str) -> Streak:
        streak = self._streaks.setdefault(prefix, Streak())
        self._streaks.move_to_end(prefix)
        if len(self._streaks) > MOST_STREAKS:
            self._streaks.popitem(last=False)
        return streak

    def _ask_ahead(self, parent: Inode, prefix: str, name: str, entry: Entry) -> None:
        key = prefix + name if entry is not None else prefix + name + "/"
        known = (parent.children or {}).get(name)
        if key in self._questions or (known is not None and not self.lacks(known)):
            return
        self._questions[key] = self._ask(key)
        if len(self._questions) > MOST_KEPT:
            self._questions.popitem(last=False)


def _directory(key: str) -> str:
    """The prefix of the directory that a key, or a marker, is in."""
    return key[: key.rstrip("/").rfind("/") + 1]


def _modified_ns(inode: Inode) -> int:
    return inode.info.mtime_ns if inode.info is not None else 0


def _version(info: ObjectInfo) -> int:
    """What tells an object from others and from itself after each change of its metadata."""
    # Some servers list parts of seconds, which a HEAD does not tell.
    return hash((info.key, info.etag, info.size, info.mtime_ns // SECOND_NS))


def _is_settled(info: ObjectInfo) -> bool:
    """Whether a further change of its metadata would show in its time."""
    return time.time_ns() - info.mtime_ns > SETTLED_NS


def _is_same(told: ObjectInfo, known: ObjectInfo | None) -> bool:
    return known is not None and _version(told) == _version(known)
