"""Small files are sent from the event loop, over connections that are open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from fusefs.store.fencing import without_token
from fusefs.store.http.client import HttpClient
from fusefs.store.s3 import put as writing
from tests.support.machine.local_file import MakeFile
from tests.support.servers.buckets import Bucket
from tests.support.servers.tls import tls_door
from tests.support.store_writing import METADATA, opened, put

pytestmark = pytest.mark.usefixtures("as_owner")


def _fail(*_: Any, **__: Any) -> None:
    raise AssertionError("sent in a thread")


@pytest.mark.parametrize("size", [0, 1000, writing.SMALL])
async def test_a_small_file_takes_no_thread(
    bucket: Bucket, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    file = make_file(size)
    async with opened(bucket, bucket.server.endpoint_url) as store:
        await put(store, "first", file)  # opens a connection
        monkeypatch.setattr(HttpClient, "send", _fail)
        for name in ("one", "another"):
            info = await put(store, name, file)
            assert (info.size, without_token(info.metadata or {})) == (size, METADATA)
    found = bucket.client.get_object(Bucket=bucket.name, Key="another")
    assert (found["Body"].read(), without_token(found["Metadata"])) == (file.data, METADATA)


async def test_small_files_go_through_tls_as_well(
    bucket: Bucket, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = make_file(writing.SMALL)
    with tls_door(bucket.server.endpoint_url, tmp_path) as door:
        async with opened(bucket, door.url, ca_bundle=str(door.authority)) as store:
            async with trio.open_nursery() as nursery:
                for number in range(3):
                    nursery.start_soon(put, store, f"first{number}", file)
            monkeypatch.setattr(HttpClient, "send", _fail)
            async with trio.open_nursery() as nursery:
                for number in range(2):
                    nursery.start_soon(put, store, f"then{number}", file)
    for name in ("then0", "then1"):
        found = bucket.client.get_object(Bucket=bucket.name, Key=name)
        assert found["Body"].read() == file.data
