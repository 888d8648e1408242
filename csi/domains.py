"""Identity domains: what mounts share, and what nobody else gets at.

A domain is a store, a bucket and an identity. Its mounts run as one uid, which
is no other domain's, and have one cache directory, 0700 and that uid's. The
directory's owner is the only record of who has which uid, so it cannot be lost
without the cache that it protects.

Domains are named by a keyed hash: what names a directory in mountinfo says
nothing about the keys that went into it. The hash's key lies beside the
directories, so names stay the same after a reboot.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from csi.errors import CsiError, UnavailableError

_KEY_SIZE = 32
_NAME = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Domain:
    """One domain's user and cache directory."""

    name: str
    uid: int
    directory: Path


class Domains:
    """The domains below `directory`, with uids from `first` to `last`. Any thread may ask."""

    def __init__(self, directory: Path, first: int, last: int) -> None:
        """Raises OSError where the directory cannot be used."""
        self._directory = directory
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
        directory = self._directory / name
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
        return Domain(name, uid, directory)

    def _free_uid(self) -> int:
        taken = {
            entry.stat(follow_symlinks=False).st_uid
            for entry in os.scandir(self._directory)
            if _NAME.fullmatch(entry.name)
        }
        for uid in self._uids:
            if uid not in taken:
                return uid
        raise NoUidError(
            f"all {len(self._uids)} uids are taken; remove caches that nobody uses from"
            f" {self._directory}, or widen --uid-range"
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Among threads and processes."""
        with open(self._directory / "lock", "ab") as lock:
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
