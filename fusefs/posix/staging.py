"""Files that are being written: each has its content in a local file until the bucket has it.

    DIRECTORY/NODEID         the content
    DIRECTORY/NODEID.json    whose it is: key, what the bucket has, mode, owner, times

The second file is written before anything relies on it, and whole or not at
all, so that another process, also after a crash, finds what has to be uploaded
and under which key.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import trio

from fusefs.posix.inodes import Inode
from fusefs.posix.meta import Meta

logger = logging.getLogger("fusefs.staging")


class Staged:
    """One file that is written. Belongs to the event loop.

    `etag` is that of the object that the bucket has under the key, None if it
    has none. `changes` counts what was done to the content, and `uploaded` is
    what it was when the bucket got it. `lock` is held while it is uploaded,
    renamed or removed; writes wait for it, so that no object is a mix.
    """

    __slots__ = (
        "changes",
        "etag",
        "fd",
        "inode",
        "is_unlinked",
        "lock",
        "meta",
        "path",
        "recorded",
        "since",
        "uploaded",
    )

    def __init__(self, inode: Inode, path: Path, fd: int, meta: Meta, etag: str | None) -> None:
        self.inode = inode
        self.path = path
        self.fd = fd
        self.meta = meta
        self.etag = etag
        self.changes = 1
        self.uploaded = 0
        self.is_unlinked = False
        self.recorded = ""
        self.since = trio.current_time()
        self.lock = trio.Lock()

    @property
    def is_dirty(self) -> bool:
        return self.changes != self.uploaded and not self.is_unlinked

    @property
    def key(self) -> str:
        assert self.inode.info is not None
        return self.inode.info.key

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def touch(self) -> None:
        """The content or what belongs to it has changed."""
        if not self.is_dirty:
            self.since = trio.current_time()
        self.changes += 1


class Staging:
    """All staged files of one mount, by node id."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[int, Staged] = {}

    def __iter__(self) -> Iterator[Staged]:
        return iter(list(self._files.values()))

    def __len__(self) -> int:
        return len(self._files)

    @property
    def pending(self) -> list[Staged]:
        """Those of which the bucket does not have the last content."""
        return [staged for staged in self._files.values() if staged.is_dirty]

    def prepare(self, inode: Inode) -> int:
        """Make an empty file for a node, of no meaning until `begin`; return its descriptor.

        Raises:
            OSError: the disk does not take it.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self._directory / str(inode.nodeid), flags, 0o600)

    def begin(self, inode: Inode, fd: int, meta: Meta, etag: str | None) -> Staged:
        """Let a node's content be what was prepared; takes the descriptor.

        Raises:
            OSError: the disk does not take it.
        """
        staged = Staged(inode, self._directory / str(inode.nodeid), fd, meta, etag)
        try:
            self.record(staged)
        except OSError:
            os.close(fd)
            staged.path.unlink(missing_ok=True)
            raise
        self._add(staged)
        return staged

    def _add(self, staged: Staged) -> None:
        self._files[staged.inode.nodeid] = staged
        staged.inode.staged = staged
        staged.inode.packed = None

    def record(self, staged: Staged) -> None:
        """Put on the disk whose content it is; blocks for as long as creating a file does."""
        meta = staged.meta
        told = json.dumps({
            "key": staged.key, "etag": staged.etag, "mode": meta.mode, "uid": meta.uid,
            "gid": meta.gid, "mtime_ns": meta.mtime_ns, "is_unlinked": staged.is_unlinked,
        })  # fmt: skip
        if told != staged.recorded:
            unfinished = staged.path.with_suffix(".new")
            unfinished.write_text(told)
            unfinished.replace(staged.path.with_suffix(".json"))
            staged.recorded = told

    def restore(self, inode: Inode) -> Staged | None:
        """Take up what an earlier process had staged under this node, if anything.

        It counts as changed: what the bucket has of it is not known.
        """
        path = self._directory / str(inode.nodeid)
        try:
            told = json.loads(path.with_suffix(".json").read_text())
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            # Its content had become the cached copy of what was uploaded.
            path.with_suffix(".json").unlink(missing_ok=True)
            return None
        meta = Meta(told["mode"], told["uid"], told["gid"], told["mtime_ns"])
        staged = Staged(inode, path, fd, meta, told["etag"])
        staged.is_unlinked = told["is_unlinked"]
        self._add(staged)
        return staged

    def on_disk(self) -> list[int]:
        """The nodes that an earlier process of this mount had staged."""
        return [int(path.stem) for path in self._directory.glob("*.json")]

    def release(self, staged: Staged) -> None:
        """Forget a file; what is left of it on the disk is removed."""
        self._files.pop(staged.inode.nodeid, None)
        staged.inode.staged = None
        staged.inode.packed = None
        os.close(staged.fd)
        staged.path.unlink(missing_ok=True)
        staged.path.with_suffix(".json").unlink(missing_ok=True)
