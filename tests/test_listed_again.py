"""Listings seen twice: hidden keys are counted once, and rewinding asks again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Bucket
from tests.support.libc import DirectoryStream
from tests.support.listing_server import ListingServer
from tests.support.mounting import Mount
from tests.support.s3_server import S3Server
from tests.support.semantics import states
from tests.support.sharing import mounted, until


@pytest.mark.parametrize("session", ["kernel", "pyfuse3"])
def test_a_hidden_key_is_counted_once(session: str, s3: S3Server, tmp_path: Path) -> None:
    with (
        ListingServer(["x" * 256, "good"]).serving() as server,
        mounted(
            s3,
            "s3://some-bucket",
            tmp_path,
            "--session",
            session,
            "--anonymous",
            "--metadata-ttl",
            "0s",
            endpoint_url=server.endpoint_url,
        ) as mount,
    ):
        for _ in range(5):
            assert os.listdir(mount.path) == ["good"]
        assert mount.status()["metadata"]["hidden_keys"] == 1


@states(
    "`rewinddir` asks again as well where the metadata TTL is under 10 s;"
    " with a longer one the kernel may repeat what it has."
)
def test_rewinddir_shows_new_names_after_the_ttl(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    bucket.put("d/first", b"")
    here = mount("--metadata-ttl", "300ms")
    with DirectoryStream(here.path / "d") as stream:
        assert "first" in stream.names()
        bucket.put("d/second", b"")

        def again() -> bool:
            stream.rewind()
            return "second" in stream.names()

        until(again, "the new name")
