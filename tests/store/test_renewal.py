"""Credentials that expire soon are renewed beside the requests, which go on with what is valid."""

import json
import tempfile
import threading
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from botocore.credentials import RefreshableCredentials

from fusefs.store.errors import CredentialsError
from fusefs.store.s3.access import SOURCE_LIMIT_S
from fusefs.store.s3.store import S3Store
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import ACCESS_KEY, SECRET_KEY
from tests.support.store_reading import BODY, download, opened
from tests.support.waiting import eventually

SOON_S = 15.0
PROGRAM = """\
#!/bin/sh
echo >> calls
while [ -e silent ]; do sleep 0.02; done
cat answer
"""


class Source:
    """A program that gives out credentials, which boto3 calls whenever it renews them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        program = directory / "program"
        program.write_text(PROGRAM.replace("#!/bin/sh\n", f"#!/bin/sh\ncd {directory}\n"))
        program.chmod(0o755)
        (directory / "config").write_text(f"[default]\ncredential_process = {program}\n")

    @property
    def calls(self) -> int:
        return (self.directory / "calls").stat().st_size

    def give(self, minutes: float) -> None:
        """Have it give out what expires after so long."""
        expiry = datetime.now(UTC) + timedelta(minutes=minutes)
        keys = {"Version": 1, "AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET_KEY}
        answer = json.dumps({**keys, "Expiration": expiry.isoformat()})
        (self.directory / "answer").write_text(answer)

    def be_silent(self, *, is_silent: bool) -> None:
        if is_silent:
            (self.directory / "silent").touch()
        else:
            (self.directory / "silent").unlink()

    def fail(self) -> None:
        (self.directory / "answer").unlink()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    return Source(tmp_path)


async def read_all(store: S3Store) -> None:
    """Read a little, much, and a listing."""
    info = await store.head("body")
    for _ in range(3):
        assert await download(store, info, 0, 1000) == BODY[:1000]
        assert await download(store, info) == BODY
        assert await store.list_uploads("") == []


async def near_the_end(store: S3Store, source: Source, minutes: float) -> RefreshableCredentials:
    """Connect with credentials that expire after so long."""
    source.give(60)
    clients = await store.requester.source.connect()
    credentials: Any = clients.credentials
    later = timedelta(minutes=60 - minutes)
    credentials._time_fetcher = lambda: datetime.now(UTC) + later
    assert source.calls == 1
    return cast(RefreshableCredentials, credentials)


@pytest.mark.parametrize("minutes", [12, 5])
async def test_no_request_waits_for_the_renewal_of_what_is_valid(
    store: S3Store, source: Source, minutes: int
) -> None:
    credentials = await near_the_end(store, source, minutes)
    source.be_silent(is_silent=True)
    await read_all(store)
    await eventually(lambda: source.calls == 2)
    source.give(180)
    source.be_silent(is_silent=False)
    await eventually(lambda: not credentials.refresh_needed())
    await read_all(store)
    assert source.calls == 2


@states(
    "What gives out the credentials is waited for 20 s; then the mount is refused, or the request "
    "fails, with a line that says that it does not answer."
)
async def test_a_source_that_does_not_answer_is_named_and_waited_for(
    store: S3Store, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SOURCE_LIMIT_S == 20
    monkeypatch.setattr("fusefs.store.s3.access.SOURCE_LIMIT_S", 0.3)
    source.give(60)
    source.be_silent(is_silent=True)
    for _ in range(2):
        with pytest.raises(CredentialsError, match="credential_process by hand"):
            await store.head("body")
    source.be_silent(is_silent=False)
    await eventually(lambda: store.requester.source.access is not None)
    await read_all(store)
    assert source.calls == 1, "nothing else was begun meanwhile"


async def test_where_there_were_credentials_requests_wait_longer_for_their_source(
    shared: Bucket, faulty: FaultyS3, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.give(60)
    async with opened(shared, faulty) as store, trio.open_nursery() as nursery:
        await read_all(store)
        source.be_silent(is_silent=True)
        store.requester.source.access = None  # as after an answer that they have expired
        with monkeypatch.context() as limited:
            limited.setattr("fusefs.store.s3.access.SOURCE_LIMIT_S", 0.3)
            nursery.start_soon(read_all, store)
            await trio.sleep(1)
        source.be_silent(is_silent=False)
    assert source.calls == 2


async def test_a_refused_request_does_not_wait_longer_for_other_credentials(
    shared: Bucket, faulty: FaultyS3, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.give(60)
    async with opened(shared, faulty, retry_time_s=2.0) as store:
        await read_all(store)
        monkeypatch.setattr("fusefs.store.s3.access.SOURCE_LIMIT_S", 0.3)
        monkeypatch.setattr("fusefs.store.s3.access.RECONNECT_EVERY_S", 0.0)
        source.be_silent(is_silent=True)
        faulty.add("*", "*", code="InvalidAccessKeyId")
        with trio.fail_after(SOON_S), pytest.raises(CredentialsError, match="does not know"):
            await store.head("body")
        source.be_silent(is_silent=False)
    assert source.calls == 2


async def look(store: S3Store) -> None:
    await store.head("body")


async def write(store: S3Store) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(BODY)
        file.flush()
        await store.put_file("new", file.fileno(), len(BODY))


@pytest.mark.parametrize("send", [look, write])
async def test_what_has_expired_is_not_waited_for_without_end(
    shared: Bucket,
    faulty: FaultyS3,
    source: Source,
    monkeypatch: pytest.MonkeyPatch,
    send: Callable[[S3Store], Awaitable[None]],
) -> None:
    async with opened(shared, faulty, retry_time_s=2.0) as store:
        await near_the_end(store, source, 0.5)
        monkeypatch.setattr("fusefs.store.s3.access.SOURCE_LIMIT_S", 0.3)
        source.be_silent(is_silent=True)
        with trio.fail_after(SOON_S), pytest.raises(CredentialsError, match="does not answer"):
            await send(store)
        monkeypatch.setattr("fusefs.store.s3.access.SOURCE_LIMIT_S", 20.0)
        source.give(180)
        source.be_silent(is_silent=False)
        await read_all(store)
        await write(store)


async def test_a_renewal_that_never_ends_is_not_waited_for_again(
    store: S3Store, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    await near_the_end(store, source, 0.5)
    hanging = threading.Event()
    monkeypatch.setattr(store.requester.source.access, "renew", hanging.wait)
    monkeypatch.setattr("fusefs.store.s3.access.SOURCE_LIMIT_S", 1.0)
    try:
        with trio.fail_after(SOON_S):
            await read_all(store)
    finally:
        hanging.set()
    assert source.calls == 2


@pytest.mark.parametrize("minutes", [12, 5])
async def test_where_the_renewal_fails_requests_go_on_with_what_is_valid(
    store: S3Store, source: Source, minutes: int
) -> None:
    await near_the_end(store, source, minutes)
    source.fail()
    await read_all(store)
    await eventually(lambda: source.calls == 2)
    await read_all(store)
    assert source.calls == 2
    assert store.counters()["errors"] == store.counters()["retries"] == 0
