"""The way to S3 as `fusefs doctor` finds it: TLS by each path, names and clocks."""

import email.utils
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from fusefs.diagnosis import bucket as diagnosis
from fusefs.diagnosis import doctor, network
from fusefs.diagnosis.findings import Finding, Level
from fusefs.settings.mount import RawValue, build
from fusefs.store.s3.access import S3Settings
from tests.support.machine.surroundings import of_no_machine as of_no_machine
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.tls import TlsDoor
from tests.support.servers.tls import secure as secure


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
    assert "TLSv1" in tls.text
    assert tls.figures["certificate_valid_seconds"] > 0


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


@pytest.mark.usefixtures("as_owner")
def test_an_interrupt_in_the_middle_of_reading_is_one(
    shared: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        await trio.sleep_forever()

    monkeypatch.setattr(diagnosis, "_read", interrupted)
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


@pytest.mark.usefixtures("as_owner")
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


@pytest.mark.usefixtures("as_owner")
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
