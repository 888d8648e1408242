"""The contenders' interface, and two without a mount: the bare disk and the bare client.

A mounted contender shows the whole bucket below `root`. `start` begins with an empty cache of its
own, `stop` leaves nothing behind; both can be called again, and `stop` after a failed `start`. For
writing, peers are mounted so that close returns when the bucket has the file.
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
    """The bucket, a local copy of its files, and room for mounts, shared by all contenders."""

    bucket: Bucket
    native_root: Path
    scratch: Path


class Contender:
    """Base of all contenders: needs no start and uses no resources."""

    is_writable = False
    # The maximum size of its cache in bytes from the next start on; None: its own default.
    cache_limit: int | None = None

    def __init__(self, name: str, place: Place) -> None:
        self.name = name
        self.row_name = name  # the contender in whose rows it is measured
        self.place = place
        self.root = place.native_root
        self.cache = place.scratch / "caches" / name

    def writing_to(self, bucket: Bucket) -> Self:
        """Return a copy of the contender for writing to another bucket; it is not started."""
        other = copy.copy(self)
        other.place = replace(self.place, bucket=bucket)
        other.is_writable = True
        return other

    def missing(self) -> str | None:
        """Return the reason why the contender cannot be measured here; None if it can."""
        return None

    def version(self) -> str:
        return ""

    def command(self) -> str:
        """Return the contender's start command, for the report."""
        return ""

    def start(self) -> None:
        """Make the contender ready, with nothing cached."""

    def stop(self) -> None:
        """Stop the contender and remove its cache."""

    def settle(self) -> None:
        """Upload written files to the bucket, if close did not wait for the upload."""

    def usage(self) -> Usage | None:
        """Return the resources used by its processes since `start`; None if it has none."""
        return None

    def requests(self) -> dict[str, int]:
        """Return the numbers of S3 requests since `start`; empty if the contender has no counts."""
        return {}


class Native(Contender):
    """The files on the local disk: the reference for cached reads."""

    def writing_to(self, bucket: Bucket) -> Self:
        other = super().writing_to(bucket)
        other.root = other.cache
        return other

    def start(self) -> None:
        self.cache.mkdir(parents=True, exist_ok=True)

    def stop(self) -> None:
        shutil.rmtree(self.cache, ignore_errors=True)


class BareClient(Native):
    """obstore without a file system: the reference for first reads and uploads."""

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
