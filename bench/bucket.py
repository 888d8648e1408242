"""The bucket of a run, and its server's memory.

A first read must measure the reader and not the server's disk, so `warm` reads the server's files
into the page cache before each one; the bench, which often drops the page cache, removes them
again.
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

# Variables that would make programs trust other certificates than the given ones.
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
    """The bucket of the objects, and the options for access to it.

    With a `proxy`, measured requests go through it.
    """

    server: S3Server
    name: str
    proxy: Proxy | None = None

    @classmethod
    def create(cls, server: S3Server) -> Bucket:
        """Create a bucket; the server has made room for its first objects."""
        name = server.new_bucket()
        server.client().put_object(Bucket=name, Key=READY, Body=b"ready")
        return cls(server, name)

    @property
    def endpoint_url(self) -> str:
        return self.server.endpoint_url if self.proxy is None else self.proxy.endpoint_url

    @property
    def authority(self) -> Path | None:
        """The root certificate (PEM) to trust; None if nothing is encrypted."""
        return None if self.proxy is None else self.proxy.authority

    def environment(self) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if name not in CERTIFICATES}
        return ours | self.server.environment

    def reader_options(self) -> dict[str, str]:
        """Return the options with which readers reach the bucket, without the keys."""
        options = {"bucket": self.name, "endpoint": self.endpoint_url, "region": REGION}
        return options if self.authority is None else {**options, "authority": str(self.authority)}

    def near(self) -> Bucket:
        """Return the same bucket without the proxy, for requests that are not measured."""
        return replace(self, proxy=None)

    def store(self) -> Any:
        """Open a client for the upload of the data set."""
        return open_store(self.near().reader_options(), self.server.environment)

    def age(self) -> None:
        """Make all objects of the bucket look older than they are; see aging.py."""
        aging.age(self.server.filer_address, self.name)

    def another(self) -> Bucket:
        """Create a new bucket on the same server."""
        return replace(self.create(self.server), proxy=self.proxy)

    def remove(self) -> None:
        """Remove the bucket with its objects; the server frees the space at once."""
        self.server.client().delete_bucket(Bucket=self.name)

    def warm(self) -> None:
        """Read the server's own files once, so that it serves from memory."""
        pagecache.load(self.server.data)
