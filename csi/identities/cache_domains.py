"""Identity domains: what mounts share, and what nobody else gets at.

A domain is a store, a bucket and an identity. Its mounts run as one uid, which
is no other domain's, and have one cache directory, 0700 and that uid's. The
directory's owner is the only record of who has which uid, so it cannot be lost
without the cache that it protects.

A domain that no mount uses any more may be put aside (see `sweeping`): its uid
is nobody else's before the last of its files is gone.

Domains are named by a keyed hash: what names a directory in mountinfo says
nothing about the keys that went into it. The hash's key lies beside the
directories, so names stay the same after a reboot.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from csi.errors import CsiError, UnavailableError

_KEY_SIZE = 32
_NAME = re.compile(r"[0-9a-f]{32}")
_LEAVING = ".leaving"


@dataclass(frozen=True, slots=True)
class Domain:
    """One domain's user and cache directory."""

    name: str
    uid: int
    directory: Path


@dataclass(frozen=True, slots=True)
class Unused:
    """A domain that was used last `unused_s` seconds ago, as its directory's time says."""

    name: str
    uid: int
    directory: Path
    unused_s: float
    mtime_ns: int


class Domains:
    """The domains below `directory`, with uids from `first` to `last`. Any thread may ask."""

    def __init__(self, directory: Path, first: int, last: int) -> None:
        """Raises OSError where the directory cannot be used."""
        self.directory = directory
        self.lacks_uids = False
        self._uids = range(first, last + 1)
        directory.mkdir(mode=0o711, parents=True, exist_ok=True)
        with self._locked():
            self._key = _key(directory / "identity.key")

    def name_of(self, *parts: str) -> str:
        """The name of what these parts make up, the same for ever and telling nothing of them."""
        text = b"".join(len(part.encode()).to_bytes(4) + part.encode() for part in parts)
        return hmac.digest(self._key, text, "sha256").hex()[:32]

    def claim(self, name: str) -> Domain:
        """The domain of this name, which is made if there is none.

        Raises:
            CsiError: it cannot be, above all because all uids are taken.
        """
        directory = self.directory / name
        with self._locked():
            try:
                directory.mkdir(mode=0o700)
            except FileExistsError:
                pass
            except OSError as error:
                raise UnavailableError(f"{directory}: {error.strerror}") from error
            uid = directory.lstat().st_uid
            # One that is still root's was left behind between the two steps.
            if uid == 0:
                uid = self._free_uid()
                os.chown(directory, uid, uid, follow_symlinks=False)
            os.utime(directory, follow_symlinks=False)
        return Domain(name, uid, directory)

    # --- domains that nobody uses ---

    def touch(self, names: Iterable[str]) -> None:
        """Note that these domains are in use."""
        for name in names:
            with suppress(FileNotFoundError):
                os.utime(self.directory / name, follow_symlinks=False)

    def unused(self) -> list[Unused]:
        """All domains, the one whose last use is longest ago first."""
        found = []
        for entry in os.scandir(self.directory):
            if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                unused_s = time.time() - status.st_mtime
                path = self.directory / entry.name
                found.append(Unused(entry.name, status.st_uid, path, unused_s, status.st_mtime_ns))
        return sorted(found, key=lambda one: one.mtime_ns)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let nobody claim a domain meanwhile."""
        with self._locked():
            yield

    def is_unchanged(self, domain: Unused) -> bool:
        """Whether nobody has used a domain since it was found unused."""
        return domain.directory.lstat().st_mtime_ns == domain.mtime_ns

    def set_aside(self, domain: Unused) -> Path:
        """Have no mount find a domain's directory any more; return where it is. Only `alone`."""
        aside = domain.directory.with_name(f"{domain.name}.{time.time_ns():x}{_LEAVING}")
        domain.directory.rename(aside)
        self.lacks_uids = False
        return aside

    def leaving(self) -> list[Path]:
        """What was put aside and is still there."""
        return [path for path in self.directory.iterdir() if path.name.endswith(_LEAVING)]

    def _free_uid(self) -> int:
        taken = {
            entry.stat(follow_symlinks=False).st_uid
            for entry in os.scandir(self.directory)
            if _NAME.match(entry.name)
        }
        for uid in self._uids:
            if uid not in taken:
                return uid
        self.lacks_uids = True
        raise NoUidError(
            f"all {len(self._uids)} uids are taken; remove caches that nobody uses from"
            f" {self.directory}, or widen --uid-range"
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Among threads and processes."""
        with open(self.directory / "lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class NoUidError(CsiError):
    """There are more identities than uids for them."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


def _key(path: Path) -> bytes:
    """The key of this node's names, made when there is none."""
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        key = b""
    if len(key) == _KEY_SIZE:
        return key
    key = os.urandom(_KEY_SIZE)
    unfinished = path.with_name(path.name + ".new")
    unfinished.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(unfinished, flags, 0o600), "wb") as file:
        file.write(key)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    return key
