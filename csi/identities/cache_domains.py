"""Cache domains: the user and the cache directory that mounts of one identity share.

A domain stands for a store, a bucket and an identity. Its daemons run as one uid, which no other
domain has, and share one cache directory with mode 0700, owned by that uid: the owner is the
record of the uid, which so cannot be lost without the cache that it protects. Mounts may outlive
it, as when the node gets another disk for its caches. A domain that no mount uses may be set
aside (see `cache_gc`): its uid is reused only after the last of its files is gone.

A keyed hash names a domain, so its name, which mountinfo shows, reveals nothing of the keys. The
hash's key lies beside the directories, so names survive a reboot.
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
from fusefs.linux.files import replace as replace_file

_KEY_SIZE = 32
_NAME = re.compile(r"[0-9a-f]{32}")
_LEAVING = ".leaving"
# What of a cache directory cannot be fetched again (fusefs/cache/disk.py).
_STATE = frozenset(("mounts", "format"))


@dataclass(frozen=True, slots=True)
class CacheDomain:
    """One domain's user and cache directory."""

    name: str
    uid: int
    directory: Path


@dataclass(frozen=True, slots=True)
class UnusedDomain:
    """A domain that was used last `unused_s` seconds ago, as its directory's time says."""

    name: str
    uid: int
    directory: Path
    unused_s: float
    mtime_ns: int


class CacheDomains:
    """The domains below `directory`, with uids from `first` to `last`. Thread-safe.

    `of_mounts` returns the uids of all mounts on record, by the names of their domains.
    """

    def __init__(
        self,
        directory: Path,
        first: int,
        last: int,
        of_mounts: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Raises OSError where the directory cannot be used."""
        self.directory = directory
        self._of_mounts = of_mounts
        self.lacks_uids = False
        self._uids = range(first, last + 1)
        directory.mkdir(mode=0o711, parents=True, exist_ok=True)
        with self._locked():
            self._key = _key(directory / "identity.key")

    def name_of(self, *parts: str) -> str:
        """The name of the domain of these parts: always the same, and without any trace of them."""
        text = b"".join(len(part.encode()).to_bytes(4) + part.encode() for part in parts)
        return hmac.digest(self._key, text, "sha256").hex()[:32]

    def claim(self, name: str) -> CacheDomain:
        """The domain of this name; made if there is none.

        Raises:
            ResourceExhaustedError: all uids are taken.
            UnavailableError: the directory cannot be made, or another domain's mounts have
                its uid.
        """
        directory = self.directory / name
        with self._locked():
            of_mounts = self._of_mounts()
            of_others = {uid for domain, uid in of_mounts.items() if domain != name}
            try:
                directory.mkdir(mode=0o700)
            except FileExistsError:
                pass
            except OSError as error:
                raise UnavailableError(f"{directory}: {error.strerror}") from error
            uid = directory.lstat().st_uid
            # A directory of root was left by a crash between mkdir and chown.
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

    # --- unused domains ---

    def in_use(self) -> set[str]:
        """The names of the domains that mounts use.

        Raises:
            ValueError: a mount's is not known, so that it may be any.
        """
        names = set(self._of_mounts())
        if not all(map(_NAME.fullmatch, names)):
            raise ValueError("the cache of a mount is not known")
        return names

    def touch(self, names: Iterable[str]) -> None:
        """Note that these domains are in use."""
        for name in names:
            with suppress(FileNotFoundError):
                os.utime(self.directory / name, follow_symlinks=False)

    def unused(self) -> list[UnusedDomain]:
        """All domains, the longest unused first."""
        found = []
        for entry in os.scandir(self.directory):
            if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                unused_s = time.time() - status.st_mtime
                path = self.directory / entry.name
                found.append(
                    UnusedDomain(entry.name, status.st_uid, path, unused_s, status.st_mtime_ns)
                )
        return sorted(found, key=lambda domain: domain.mtime_ns)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep others from claiming a domain within the block."""
        with self._locked():
            yield

    def set_aside(self, domain: UnusedDomain, *, keeps_state: bool = False) -> Path:
        """Rename a domain's directory so that no mount finds it. Only within `alone`.

        With `keeps_state` what mounts left stays in its place, and the rest is moved.
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
        """The directories that were set aside and still exist."""
        return [path for path in self.directory.iterdir() if path.name.endswith(_LEAVING)]

    def _free_uid(self, of_mounts: Collection[int]) -> int:
        taken = set(of_mounts)
        for entry in os.scandir(self.directory):
            if _NAME.match(entry.name):
                with suppress(FileNotFoundError):  # it was set aside, and is gone by now
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
    def _locked(self) -> Iterator[None]:
        """Among threads and processes."""
        with open(self.directory / "lock", "ab") as lock:
            # Whoever may read it could lock it, and a daemon's user passes through here.
            os.fchmod(lock.fileno(), 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _key(path: Path) -> bytes:
    """The key of this node's names, made when there is none."""
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        key = b""
    if len(key) == _KEY_SIZE:
        return key
    key = os.urandom(_KEY_SIZE)
    replace_file(path, key, is_durable=True)
    return key
