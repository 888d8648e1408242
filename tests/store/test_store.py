"""The store against a real S3 server: what it reads and lists, and downloads that break."""

import os
import subprocess
import sys

import pytest

from fusefs.store.errors import StaleVersionError
from fusefs.store.s3.store import S3Store
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_reading import BODY, ODD_KEY, Collector, download, opened

KEYS = ["a b", "a+b", "a%20b", "a%2Bb", "ü/ö", "x\x01y", "a&b<c>", "q'\"q", "😀", "%", "d+e/f g+h"]


async def test_keys_of_all_kinds_are_listed_and_read(bucket: Bucket, faulty: FaultyS3) -> None:
    for key in KEYS:
        bucket.put(key, key.encode())
    async with opened(bucket, faulty) as store:
        await store.list_page("", delimiter="", max_keys=1)
        page = await store.list_page("", delimiter="")
        assert sorted(info.key for info in page.objects) == sorted(KEYS)
        for info in page.objects:
            assert await download(store, info) == info.key.encode()


async def test_pages_follow_each_other(bucket: Bucket, faulty: FaultyS3) -> None:
    for number in range(5):
        bucket.put(f"p/{number}+ x", b"")
    async with opened(bucket, faulty) as store:
        first = await store.list_page("p/", max_keys=2)
        second = await store.list_page("p/", start_after=first.last)
        assert [info.key for info in second.objects] == ["p/2+ x", "p/3+ x", "p/4+ x"]
        assert (first.next_token is None, second.next_token is None) == (False, True)


@pytest.mark.parametrize("is_plain", [True, False])
async def test_botocore_tells_the_address_and_sends_nothing(
    shared: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, is_plain: bool
) -> None:
    if not is_plain:  # of its own variables only botocore knows the meaning
        monkeypatch.setenv("AWS_USE_DUALSTACK_ENDPOINT", "false")
    async with opened(shared, faulty) as store:
        for _ in range(2):
            assert (await store.list_page("")).objects
        sent = faulty.requests()
        assert len(sent) == 2
        assert not any("amz-sdk-request" in request.headers for request in sent)


def test_a_daemon_lists_a_bucket_without_importing_botocore(shared: Bucket) -> None:
    """It would take more than half of the time of a mount's start."""
    script = f"""
import sys, trio
import fusefs.daemon.entry
from fusefs.store.s3.settings import S3Settings
from fusefs.store.s3.store import open_store
async def main():
    settings = S3Settings({shared.name!r}, {shared.server.endpoint_url!r})
    async with open_store(settings) as store:
        await store.check("")
        await store.list_page("")
trio.run(main)
print(*({{"boto3", "botocore", "asyncio"}} & sys.modules.keys()), end="")
"""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("AWS_")}
    imported = subprocess.run(
        [sys.executable, "-c", script],
        env={**kept, **shared.server.environment, "HOME": "/nowhere"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert imported.stdout == ""


async def test_a_public_bucket_gets_requests_without_a_signature(
    shared: Bucket, faulty: FaultyS3
) -> None:
    listed = (
        b"<ListBucketResult><Contents><Key>k</Key><ETag>x</ETag><Size>1</Size>"
        b"<LastModified>2026-11-21T04:15:07Z</LastModified></Contents></ListBucketResult>"
    )
    faulty.add("LIST", body=listed)
    async with opened(shared, faulty, anonymous=True) as store:
        for _ in range(2):
            assert [info.key for info in (await store.list_page("")).objects] == ["k"]
        assert not any("authorization" in request.headers for request in faulty.requests())


async def test_a_stream_that_breaks_again_and_again_arrives_in_the_end(
    store: S3Store, faulty: FaultyS3
) -> None:
    faulty.add("GET", cut_after=1_100_000)
    assert await download(store, await store.head("body")) == BODY
    assert store.counters()["bytes_fetched"] == len(BODY)


@pytest.mark.parametrize("key", ["body", ODD_KEY])
@pytest.mark.parametrize("ignored", [None, "if-match"])
async def test_another_content_than_requested_is_stale(
    bucket: Bucket, faulty: FaultyS3, key: str, ignored: str | None
) -> None:
    faulty.add("GET", key, ignored_header=ignored)
    bucket.put(key, b"old")
    async with opened(bucket, faulty) as store:
        info = await store.head(key)
        bucket.put(key, b"new")
        with pytest.raises(StaleVersionError):
            await download(store, info)


async def test_an_object_replaced_before_a_stream_goes_on_is_stale(
    bucket: Bucket, faulty: FaultyS3
) -> None:
    bucket.put("body", BODY)
    faulty.add(
        "GET", times=1, cut_after=2_500_000, at=(2_500_000, lambda: bucket.put("body", BODY[::-1]))
    )
    async with opened(bucket, faulty) as store:
        info = await store.head("body")
        sink = Collector(0)
        with pytest.raises(StaleVersionError):
            await store.download(info.version, 0, info.size, sink)
        sink.close()
        assert sink.data
        assert sink.data == BODY[: sink.stop]
