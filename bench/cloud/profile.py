"""The two profiles: the server as it is, and the same server far away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.bucket import Bucket
from bench.cloud.proxy import Distance, Proxy

LOCAL = "local"
CLOUD = "cloud"
PROFILES = (LOCAL, CLOUD)


@contextmanager
def at_distance(profile: str, bucket: Bucket, scratch: Path, base: Path) -> Iterator[Bucket]:
    """Yield the bucket as the profile shows it; the proxy is built below `base`, which keeps it."""
    if profile == LOCAL:
        yield bucket
        return
    with Proxy(bucket.server.endpoint_url, scratch, base / "build") as proxy:
        proxy.set(Distance())
        yield replace(bucket, proxy=proxy)
