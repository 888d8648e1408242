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

# An object that is in every bucket from the start.
READY = "ready"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where the objects are, and what gives a program access to them."""

    server: S3Server
    name: str

    @classmethod
    def create(cls, server: S3Server) -> Bucket:
        """A new bucket; the server has made room for its first objects."""
        name = server.new_bucket()
        server.client().put_object(Bucket=name, Key=READY, Body=b"ready")
        return cls(server, name)

    def environment(self) -> dict[str, str]:
        return os.environ | self.server.environment

    def reader_options(self) -> dict[str, str]:
        """What the readers need to reach it, without the keys."""
        return {"bucket": self.name, "endpoint": self.server.endpoint_url, "region": REGION}

    def store(self) -> Any:
        """A client for the upload of the data set."""
        return readers.open_store(self.reader_options(), self.server.environment)

    def another(self) -> Bucket:
        """A new bucket of the same server."""
        return self.create(self.server)

    def remove(self) -> None:
        """Remove the bucket with all that is in it; the server frees the space at once."""
        self.server.client().delete_bucket(Bucket=self.name)

    def warm(self) -> None:
        """Read the server's own files once, so that it serves from memory."""
        pagecache.load(self.server.data)
