"""The contender's interface, and those that need no program: the bare disk and the bare client.

A contender that is mounted shows the whole bucket below `root`. `start`
begins with an empty cache of its own, `stop` leaves nothing behind; both can
be called again, and `stop` after a failed `start`. For writing, peers are
mounted in the way in which close returns when the bucket has the file.
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from bench import processes
from bench.bucket import Bucket
from bench.processes import Usage


@dataclass(frozen=True, slots=True)
class Place:
    """The place that contenders share: the bucket, the local copy of its files, room for mounts."""

    bucket: Bucket
    native_root: Path
    scratch: Path


class Contender:
    """Base of all: something that does not need starting and uses nothing."""

    is_writable = False
    # Bytes that its cache may have from the next start on; None: what it takes by itself.
    cache_limit: int | None = None

    def __init__(self, name: str, place: Place) -> None:
        self.name = name
        self.row_name = name  # the contender whose rows it is measured in
        self.place = place
        self.root = place.native_root
        self.cache = place.scratch / "caches" / name

    def writing_to(self, bucket: Bucket) -> Self:
        """The same contender, to be started for writing, on another bucket."""
        other = copy.copy(self)
        other.place = replace(self.place, bucket=bucket)
        other.is_writable = True
        return other

    def missing(self) -> str | None:
        """The reason why it cannot be measured here; None if it can."""
        return None

    def version(self) -> str:
        return ""

    def command(self) -> str:
        """The command that starts it, for the record."""
        return ""

    def start(self) -> None:
        """Make it ready, with nothing cached."""

    def stop(self) -> None:
        """End it and remove its cache."""

    def settle(self) -> None:
        """Have in the bucket what was written, where close did not wait for that."""

    def usage(self) -> Usage | None:
        """The resources that its processes have used since `start`."""
        return None

    def requests(self) -> dict[str, int]:
        """Requests made to S3 since `start`, where the contender counts them."""
        return {}


class Native(Contender):
    """The files on the local disk: what a cached read is compared with."""

    def writing_to(self, bucket: Bucket) -> Self:
        other = super().writing_to(bucket)
        other.root = other.cache
        return other

    def start(self) -> None:
        self.cache.mkdir(parents=True, exist_ok=True)

    def stop(self) -> None:
        shutil.rmtree(self.cache, ignore_errors=True)


class BareClient(Native):
    """obstore without a file system: what a first read and an upload are compared with."""

    def version(self) -> str:
        import obstore

        return f"obstore {obstore.__version__}"


class Mount(Contender):
    """A contender with a mountpoint and a cache directory."""

    def __init__(self, name: str, place: Place) -> None:
        super().__init__(name, place)
        self.root = place.scratch / "mounts" / name
        self.log = place.scratch / f"{name}.log"

    def _prepare(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.cache, ignore_errors=True)
        self.cache.mkdir(parents=True, mode=0o700)

    def _clear(self) -> None:
        processes.unmount(self.root)
        shutil.rmtree(self.cache, ignore_errors=True)
