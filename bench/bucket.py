"""The bucket of a run, and its server's memory.

A first read is to measure the reader and not the server's disk, so `warm`
brings the server's files into the page cache before each one; dropping the
page cache, which the bench does all the time, takes them out again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import aging, pagecache
from bench.cloud.proxy import Proxy
from bench.programs.readers import open_store
from tests.support.servers.s3_server import REGION, S3Server

# What would have programs trust other certificates than they are given.
CERTIFICATES = (
    "AWS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
)

# An object that is in every bucket from the start.
READY = "ready"


@dataclass(frozen=True, slots=True)
class Bucket:
    """The place of the objects, and what gives a program access to them.

    With a `proxy`, what is measured goes through that.
    """

    server: S3Server
    name: str
    proxy: Proxy | None = None

    @classmethod
    def create(cls, server: S3Server) -> Bucket:
        """A new bucket; the server has made room for its first objects."""
        name = server.new_bucket()
        server.client().put_object(Bucket=name, Key=READY, Body=b"ready")
        return cls(server, name)

    @property
    def endpoint_url(self) -> str:
        return self.server.endpoint_url if self.proxy is None else self.proxy.endpoint_url

    @property
    def authority(self) -> Path | None:
        """The root certificate (PEM) to trust; None where nothing is encrypted."""
        return None if self.proxy is None else self.proxy.authority

    def environment(self) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if name not in CERTIFICATES}
        return ours | self.server.environment

    def reader_options(self) -> dict[str, str]:
        """The options with which readers reach it, without the keys."""
        options = {"bucket": self.name, "endpoint": self.endpoint_url, "region": REGION}
        return options if self.authority is None else {**options, "authority": str(self.authority)}

    def near(self) -> Bucket:
        """The same bucket without the proxy, for what is not measured."""
        return replace(self, proxy=None)

    def store(self) -> Any:
        """A client for the upload of the data set."""
        return open_store(self.near().reader_options(), self.server.environment)

    def age(self) -> None:
        """Have all its objects older than they are; see aging.py."""
        aging.age(self.server.filer_address, self.name)

    def another(self) -> Bucket:
        """A new bucket of the same server."""
        return replace(self.create(self.server), proxy=self.proxy)

    def remove(self) -> None:
        """Remove the bucket with all that is in it; the server frees the space at once."""
        self.server.client().delete_bucket(Bucket=self.name)

    def warm(self) -> None:
        """Read the server's own files once, so that it serves from memory."""
        pagecache.load(self.server.data)
