"""The store and its credentials: who gets to see them, and what happens when they are refused."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from fusefs.store.errors import CredentialsError, StoreError
from fusefs.store.interface import ObjectVersion
from fusefs.store.s3.access import Access
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import ACCESS_KEY, SECRET_KEY
from tests.support.store_reading import BODY, download, opened
from tests.support.waiting import eventually

HELLO = ObjectVersion("hello", '"1"', 5)
HELLO_HEADERS = {
    "etag": '"1"',
    "content-range": "bytes 0-4/5",
    "last-modified": "Sat, 21 Nov 2026 13:00:00 GMT",
}
EMPTY_LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
PROFILE = "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n"


@pytest.fixture
def elsewhere(shared: Bucket) -> Iterator[FaultyS3]:
    """Another host, which would answer."""
    with FaultyS3(shared.server.endpoint_url) as server:
        server.add("GET", status=206, body=b"hello", headers=HELLO_HEADERS)
        yield server


@pytest.mark.parametrize("size", [5, 3 << 20], ids=["small", "large"])
async def test_a_session_token_does_not_follow_a_redirect(
    shared: Bucket,
    faulty: FaultyS3,
    elsewhere: FaultyS3,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token-of-a-session")
    faulty.add("LIST", body=EMPTY_LISTING)
    away = {"location": f"{elsewhere.endpoint_url}/{shared.name}/hello"}
    faulty.add("GET", status=307, headers=away)
    async with opened(shared, faulty, retry_time_s=0.5) as store:
        await store.list_page("")
        with pytest.raises(StoreError):
            await download(store, ObjectVersion("hello", '"1"', size))
    assert faulty.requests("GET", "hello")
    assert faulty.requests("GET", "hello")[0].headers["x-amz-security-token"]
    assert elsewhere.requests() == []


async def test_a_key_that_is_rejected_is_looked_up_again_before_a_read_fails(
    shared: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fusefs.store.s3.access.RECONNECT_EVERY_S", 0.0)
    credentials = tmp_path / "credentials"
    credentials.write_text(PROFILE.format("retired", SECRET_KEY))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    async with opened(shared, faulty) as store:
        with pytest.raises(CredentialsError):
            await store.list_page("")
        credentials.write_text(PROFILE.format(ACCESS_KEY, SECRET_KEY))
        assert (await store.list_page("")).objects
        assert await download(store, await store.head("body")) == BODY


async def test_a_source_of_keys_that_has_none_for_a_moment_is_waited_for(
    shared: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fusefs.store.s3.access.RECONNECT_EVERY_S", 0.0)
    credentials = tmp_path / "credentials"
    credentials.write_text(PROFILE.format(ACCESS_KEY, SECRET_KEY))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    async with opened(shared, faulty) as store, trio.open_nursery() as nursery:
        info = await store.head("body")
        faulty.add("GET", code="ExpiredToken", times=1, before=credentials.unlink)
        nursery.start_soon(download, store, info)
        await eventually(lambda: store.requester.source.access is None)
        await eventually(lambda: store.counters()["retries"] > 1)
        credentials.write_text(PROFILE.format(ACCESS_KEY, SECRET_KEY))


async def test_a_request_that_is_cancelled_does_not_wait_for_who_gives_out_credentials(
    shared: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_silent, may_answer = threading.Event(), threading.Event()

    def find(self: Access) -> None:
        is_silent.set()
        may_answer.wait(10)

    monkeypatch.setattr(Access, "_find_credentials", find)
    async with opened(shared, faulty) as store, trio.open_nursery() as nursery:
        nursery.start_soon(store.head, "body")
        await eventually(is_silent.is_set)
        nursery.cancel_scope.cancel()
    assert not may_answer.is_set()
    may_answer.set()


async def test_a_silent_token_service_is_not_waited_for_longer_than_s3(
    shared: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("token")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/reader")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{silent.getsockname()[1]}")
        async with opened(shared, faulty, retry_time_s=0.1, read_timeout_s=0.1) as store:
            with pytest.raises(StoreError, match="no answer"):
                await store.list_page("")


@pytest.mark.parametrize("listed", ['"1"', 'W/"1"'])
@pytest.mark.parametrize("answered", ['"1"', 'W/"1"'])
async def test_a_proxy_that_weakens_etags_makes_no_other_versions(
    shared: Bucket, faulty: FaultyS3, listed: str, answered: str
) -> None:
    page = (
        "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>hello</Key><Size>5</Size>"
        f"<ETag>{listed}</ETag><LastModified>2026-11-21T13:00:00Z</LastModified></Contents>"
        "</ListBucketResult>"
    )
    faulty.add("LIST", body=page.encode())
    faulty.add("GET", status=206, body=b"hello", headers={**HELLO_HEADERS, "etag": answered})
    async with opened(shared, faulty) as store:
        (info,) = (await store.list_page("")).objects
        assert info.version == HELLO
        assert await download(store, info) == b"hello"
    assert {one.headers["if-match"] for one in faulty.requests("GET")} == {'"1"'}
