"""Messages about failed requests, and about a clock that is wrong."""

import contextlib
import email.utils
import logging
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from fusefs.diagnosis import bucket as diagnosis
from fusefs.diagnosis import doctor, network
from fusefs.diagnosis.findings import Finding, Level
from fusefs.settings.mount import RawValue, build
from fusefs.store.errors import AccessDeniedError, StoreError
from fusefs.store.http.server_clock import SKEWED, ServerClock
from fusefs.store.interface import ObjectVersion, read_bytes
from fusefs.store.s3.settings import S3Settings
from fusefs.store.s3.store import S3Store, open_store
from tests.support.machine.surroundings import of_no_machine as of_no_machine
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.flat_s3 import FlatS3
from tests.support.servers.in_process import Answer, Headers
from tests.support.servers.tls import TlsDoor
from tests.support.servers.tls import secure as secure
from tests.support.store_reading import ODD_KEY, download, opened


async def test_a_bucket_that_may_not_be_listed_is_told_with_the_right_the_key_and_the_place(
    store: S3Store, shared: Bucket, faulty: FaultyS3
) -> None:
    faulty.add("LIST", code="AccessDenied")
    with pytest.raises(AccessDeniedError) as caught:
        await store.check("")
    told = f"key {shared.server.access_key} lacks s3:ListBucket there"
    assert str(caught.value).endswith(told)
    assert faulty.endpoint_url in str(caught.value)


async def test_an_object_that_may_not_be_read_is_no_failure_of_s3(
    store: S3Store, faulty: FaultyS3
) -> None:
    faulty.add("HEAD", code="AccessDenied")
    with pytest.raises(AccessDeniedError):
        await store.head("forbidden")
    told = store.requester.last_error()
    assert told is not None
    assert told["since_s"] is None
    faulty.add("LIST", code="AccessDenied")
    with pytest.raises(AccessDeniedError):
        await store.list_page("")
    told = store.requester.last_error()
    assert told is not None
    assert told["since_s"] is not None


async def test_an_endpoint_of_the_aws_configuration_is_named_as_such(
    shared: Bucket, faulty: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    config.write_text(f"[default]\nendpoint_url = {faulty.endpoint_url}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    faulty.add("LIST", code="NoSuchBucket")
    async with opened(shared, faulty, endpoint_url=None) as store:
        with pytest.raises(StoreError, match="endpoint_url of the AWS configuration"):
            await store.check("")


async def test_no_secret_is_in_the_log(
    shared: Bucket, faulty: FaultyS3, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "fusefs"):
        for fault in ({"code": "AccessDenied"}, {"stall": True}, {"cut_after": 9}, {"status": 400}):
            faulty.clear()
            async with opened(shared, faulty, retry_time_s=0.1, read_timeout_s=0.2) as store:
                faulty.add(**fault)
                for ask in (store.list_page, store.head):
                    with contextlib.suppress(StoreError):
                        await ask("body")
                for key in ("body", ODD_KEY):
                    with contextlib.suppress(StoreError):
                        await download(store, ObjectVersion(key, '"x"', 10))
    assert caplog.records
    assert shared.server.secret_key not in caplog.text
    assert "Signature=" not in caplog.text


KEYS = {"AWS_ACCESS_KEY_ID": "access", "AWS_SECRET_ACCESS_KEY": "secret"}
ALLOWED_S = 900


class LaterServer(FlatS3):
    """Its clock is `ahead_s` ahead, and it refuses what is signed with another time."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s
        self.refused: list[str] = []
        super().__init__()

    def now(self) -> float:
        return time.time() + self.ahead_s

    def answer(self, method: str, target: str, headers: Headers, body: bytes) -> Answer:
        signed = time.strptime(headers["x-amz-date"], "%Y%m%dT%H%M%SZ")
        if abs(self.now() - (time.mktime(signed) - time.timezone)) <= ALLOWED_S:
            return super().answer(method, target, headers, body)
        self.refused.append(f"{method} {target}")
        return 403, {}, f"<Error><Code>{SKEWED}</Code></Error>".encode()


@states(
    "Where the machine's clock is off by more than S3 allows, requests are signed with the time "
    "that S3's answers tell."
)
@pytest.mark.parametrize("ahead_s", [4000.0, -100_000.0])
async def test_a_wrong_clock_costs_one_refusal(ahead_s: float) -> None:
    server = LaterServer(ahead_s)
    with server, tempfile.TemporaryFile() as file:
        file.write(b"hello")
        file.flush()
        async with open_store(S3Settings("bucket", server.endpoint_url, keys=KEYS)) as store:
            info = await store.put_file("a", file.fileno(), 5)
            assert (await store.head("a")).etag == info.etag
            data = await read_bytes(store, info.version, 0, 5)
            assert [one.key for one in (await store.list_page("")).objects] == ["a"]
            assert not await store.delete_many(["a"])
    assert (data, server.contents()) == (b"hello", {})
    assert len(server.refused) == 1


async def test_a_refusal_for_another_reason_is_no_matter_of_time() -> None:
    class Refusing(LaterServer):
        def get(self, *_: object) -> Answer:
            self.refused.append("GET")
            return 403, {}, b"<Error><Code>AccessDenied</Code></Error>"

    server = Refusing(4000.0)
    with server:
        async with open_store(S3Settings("bucket", server.endpoint_url, keys=KEYS)) as store:
            await store.list_page("")
            with pytest.raises(AccessDeniedError):
                await store.head("a")
    assert server.refused[1:] == ["GET"] * (len(server.refused) - 1)
    assert len(server.refused) <= 4


@pytest.mark.parametrize("date", [None, "", "soon", "Mon, 01 Jan 2026 00:00:00 +9999"])
def test_a_date_that_is_none_corrects_nothing(date: str | None) -> None:
    clock = ServerClock()
    assert not clock.corrects(403, SKEWED, {} if date is None else {"date": date}, 0.0)
    assert clock.offset_s == 0.0
    assert abs(clock.now() - time.time()) < 60


def found(bucket: Bucket, url: str, ca_bundle: Path | None = None) -> dict[str, Finding]:
    settings = S3Settings(bucket.name, endpoint_url=url)
    if ca_bundle is not None:
        settings = replace(settings, ca_bundle=str(ca_bundle))
    return {finding.check: finding for finding in network.check(settings)}


def test_the_connection_is_tried_with_the_certificates_of_the_settings(
    shared: Bucket, secure: TlsDoor
) -> None:
    tls = found(shared, secure.url, secure.authority)["TLS"]
    assert tls.level is Level.OK
    assert "connected in" in tls.text


def test_an_authority_that_is_not_trusted_is_a_problem(shared: Bucket, secure: TlsDoor) -> None:
    tls = found(shared, secure.url)["TLS"]
    assert tls.level is Level.PROBLEM
    assert "not trusted" in tls.text
    assert "--ca-bundle" in tls.advice


def test_a_connection_without_tls_is_tried_and_named(shared: Bucket, faulty: FaultyS3) -> None:
    checks = found(shared, faulty.endpoint_url)
    assert checks["connection"].level is Level.OK
    assert checks["TLS"].level is Level.SKIPPED


@pytest.mark.parametrize(
    ("ahead_s", "level"), [(0, Level.OK), (120, Level.ADVICE), (-3600, Level.PROBLEM)]
)
def test_a_wrong_clock_is_found_also_where_access_is_denied(
    shared: Bucket, faulty: FaultyS3, ahead_s: float, level: Level
) -> None:
    date = email.utils.formatdate(time.time() + ahead_s, usegmt=True)
    faulty.add("LIST", code="AccessDenied", headers={"Date": date})
    clock = found(shared, faulty.endpoint_url)["clock"]
    assert clock.level is level
    assert clock.figures["skew_seconds"] == pytest.approx(ahead_s, abs=20)


def test_an_interrupt_in_the_middle_of_reading_is_one(
    shared: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        await trio.sleep_forever()

    monkeypatch.setattr(diagnosis, "read_bytes", interrupted)
    monkeypatch.setattr(diagnosis, "_latency", diagnosis._throughput)
    shared.put("large", b"x" * diagnosis.LEAST_MEASURED)
    texts = {
        "source": f"s3://{shared.name}",
        "mountpoint": "/nonexistent",
        "endpoint_url": shared.server.endpoint_url,
    }
    settings = build({name: RawValue(text, name) for name, text in texts.items()})
    with pytest.raises(KeyboardInterrupt):
        list(doctor._check_bucket(settings, tries_permissions=False))


async def test_large_answers_that_do_not_arrive_are_a_problem(
    bucket: Bucket, faulty: FaultyS3
) -> None:
    bucket.put("large", b"x" * 2 * diagnosis.LEAST_MEASURED)
    settings = S3Settings(bucket.name, endpoint_url=faulty.endpoint_url)
    faulty.add("GET", "large", stall_after=1000)
    findings = await diagnosis.check(settings, "", tries_permissions=False, may_write=False)
    checks = {finding.check: finding for finding in findings}
    assert checks["latency"].level is Level.OK
    assert checks["throughput"].level is Level.PROBLEM
    assert "MTU" in checks["throughput"].advice


async def test_an_archived_object_says_nothing_about_permissions(
    bucket: Bucket, faulty: FaultyS3
) -> None:
    bucket.put("archived", b"x" * 2 * diagnosis.LEAST_MEASURED)
    bucket.put("readable", b"x" * diagnosis.LEAST_MEASURED)
    settings = S3Settings(bucket.name, endpoint_url=faulty.endpoint_url)

    async def look() -> dict[str, Level]:
        findings = await diagnosis.check(settings, "", tries_permissions=False, may_write=False)
        return {finding.check: finding.level for finding in findings}

    faulty.add("GET", "archived", status=403, code="InvalidObjectState")
    levels = await look()
    assert Level.PROBLEM not in levels.values()
    assert {"latency", "throughput"} <= levels.keys()
    faulty.add("GET", "readable", status=403, code="InvalidObjectState")
    assert (await look())["get"] is Level.SKIPPED
