"""Cache domains: each is one user and one cache directory, shared by mounts of one identity.

A domain stands for a store, a bucket and an identity. Its daemons run as one uid, which no other
domain has, and share one cache directory with mode 0700, owned by that uid. The directory's owner
is the only record of the uid, so the uid cannot be lost without the cache that it protects. Mounts
may outlive the directory, as when the node gets another disk for its caches. The directory of a
domain that no mount uses may be removed (see `cache_gc`); the uid is reused only after that.

A domain's name is a keyed hash, so the name, which mountinfo shows, reveals nothing of the keys.
The hash's key lies beside the directories, so names survive a reboot.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from csi.errors import ResourceExhaustedError, UnavailableError
from fusefs.linux.files import opened_below
from fusefs.linux.files import replace as replace_file

_KEY_SIZE = 32
_NAME = re.compile(r"[0-9a-f]{32}")
_LEAVING = ".leaving"
# The entries of a cache directory that are not copies of S3's data (fusefs/cache/disk.py).
_STATE = frozenset(("mounts", "format"))


@dataclass(frozen=True, slots=True)
class CacheDomain:
    """The user and the cache directory of one domain."""

    name: str
    uid: int
    directory: Path


@dataclass(frozen=True, slots=True)
class DomainOnDisk(CacheDomain):
    """A domain with the time of its last use: the mtime of its directory (ns since the epoch)."""

    used_ns: int


class CacheDomains:
    """The domains below `directory`, with uids from `first` to `last`. Thread-safe.

    `of_mounts` returns the uids of the mounts on record, by the names of their domains.
    """

    def __init__(
        self,
        directory: Path,
        first: int,
        last: int,
        of_mounts: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Make `directory` and its key if they are missing; raise OSError if that fails."""
        self.directory = directory
        self._of_mounts = of_mounts
        self.lacks_uids = False
        self._uids = range(first, last + 1)
        directory.mkdir(mode=0o711, parents=True, exist_ok=True)
        with self.alone():
            self._key = _key(directory / "identity.key")

    def name_of(self, *parts: str) -> str:
        """Return the name of the domain that `parts` identify: a keyed hash of the parts."""
        text = b"".join(len(part.encode()).to_bytes(4) + part.encode() for part in parts)
        return hmac.digest(self._key, text, "sha256").hex()[:32]

    def claim(self, name: str) -> CacheDomain:
        """Return the domain of this name and record its use; make its directory if missing.

        Raises:
            ResourceExhaustedError: all uids are taken.
            UnavailableError: the directory cannot be made, or its owner is the uid of another
                domain's mounts.
        """
        directory = self.directory / name
        with self.alone():
            of_mounts = self._of_mounts()
            of_others = {uid for domain, uid in of_mounts.items() if domain != name}
            try:
                directory.mkdir(mode=0o700)
            except FileExistsError:
                pass
            except OSError as error:
                raise UnavailableError(f"{directory}: {error.strerror}") from error
            uid = directory.lstat().st_uid
            # A crash between mkdir and chown leaves a directory that root owns.
            if uid == 0:
                uid = of_mounts.get(name) or self._free_uid(of_others)
                os.chown(directory, uid, uid, follow_symlinks=False)
            if uid in of_others:
                raise UnavailableError(
                    f"{directory} is user {uid}'s, as whom another identity's mounts run: they"
                    " began on another disk, and have to end first"
                )
            os.utime(directory, follow_symlinks=False)
        return CacheDomain(name, uid, directory)

    def has_files(self, name: str, *below: str) -> bool:
        """True if a directory in a domain's cache has entries; links are not followed."""
        with suppress(OSError), opened_below(self.directory / name, *below) as fd:
            return bool(os.listdir(fd))
        return False

    # --- removal of domains ---

    def in_use(self) -> set[str]:
        """Return the domains that mounts use; raise ValueError if a mount's domain is unknown."""
        names = set(self._of_mounts())
        if not all(map(_NAME.fullmatch, names)):
            raise ValueError("the cache of a mount is not known")
        return names

    def touch(self, names: Iterable[str]) -> None:
        """Set the time of last use of these domains to now."""
        for name in names:
            with suppress(FileNotFoundError):
                os.utime(self.directory / name, follow_symlinks=False)

    def by_last_use(self) -> list[DomainOnDisk]:
        """Return all domains, also those in use, the longest unused first."""
        found = []
        for entry in os.scandir(self.directory):
            if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                path = self.directory / entry.name
                found.append(DomainOnDisk(entry.name, status.st_uid, path, status.st_mtime_ns))
        return sorted(found, key=lambda domain: domain.used_ns)

    def set_aside(self, domain: CacheDomain, *, keeps_state: bool = False) -> Path:
        """Move a domain's cache to a path that no mount finds, and return this path.

        With `keeps_state` the mounts' state stays at the old path. Call only within `alone`.
        """
        aside = domain.directory.with_name(f"{domain.name}.{time.time_ns():x}{_LEAVING}")
        if not keeps_state:
            domain.directory.rename(aside)
            self.lacks_uids = False
            return aside
        aside.mkdir(mode=0o700)
        os.chown(aside, domain.uid, domain.uid, follow_symlinks=False)
        for name in os.listdir(domain.directory):
            if name not in _STATE:
                os.rename(domain.directory / name, aside / name)
        return aside

    def leaving(self) -> list[Path]:
        """Return the directories from `set_aside` that still exist."""
        return [path for path in self.directory.iterdir() if path.name.endswith(_LEAVING)]

    def _free_uid(self, of_mounts: Collection[int]) -> int:
        taken = set(of_mounts)
        for entry in os.scandir(self.directory):
            if _NAME.match(entry.name):
                with suppress(FileNotFoundError):  # removed meanwhile
                    taken.add(entry.stat(follow_symlinks=False).st_uid)
        for uid in self._uids:
            if uid not in taken:
                return uid
        self.lacks_uids = True
        raise ResourceExhaustedError(
            f"all {len(self._uids)} uids are taken; remove unused caches from"
            f" {self.directory}, or widen --uid-range"
        )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the domains for the block: no other thread or process claims one meanwhile."""
        with open(self.directory / "lock", "ab") as lock:
            # Daemons' users can reach the file, and could lock it if they could read it.
            os.fchmod(lock.fileno(), 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _key(path: Path) -> bytes:
    """Read the key for the hash of names from `path`; make a key if there is none."""
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        key = b""
    if len(key) == _KEY_SIZE:
        return key
    key = os.urandom(_KEY_SIZE)
    replace_file(path, key, is_durable=True)
    return key
