"""The bucket of a run, and its server's memory.

A first read is to measure the reader and not the server's disk, so `warm`
brings the server's files into the page cache before each one; dropping the
page cache, which the bench does all the time, takes them out again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from bench import pagecache, readers
from tests.support.s3_server import REGION, S3Server


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where the objects are, and what gives a program access to them."""

    server: S3Server
    name: str

    def environment(self) -> dict[str, str]:
        return os.environ | self.server.environment

    def reader_options(self) -> dict[str, str]:
        """What the readers need to reach it, without the keys."""
        return {"bucket": self.name, "endpoint": self.server.endpoint_url, "region": REGION}

    def store(self) -> Any:
        """A client for the upload of the data set."""
        return readers.open_store(self.reader_options(), self.server.environment)

    def another(self) -> Bucket:
        """An empty bucket of the same server, which has made room for its first objects."""
        bucket = Bucket(self.server, self.server.new_bucket())
        self.server.client().put_object(Bucket=bucket.name, Key="ready", Body=b"ready")
        return bucket

    def remove(self) -> None:
        """Remove the bucket with all that is in it; the server frees the space at once."""
        self.server.client().delete_bucket(Bucket=self.name)

    def warm(self) -> None:
        """Read the server's own files once, so that it serves from memory."""
        pagecache.load(self.server.data)
