"""Why S3 can't be reached: the cause in one line, and nothing that never heals tried again."""

from typing import Any

import pytest

from fusefs.store import unreachable
from fusefs.store.engine.engine import Completion
from fusefs.store.errors import StoreError
from fusefs.store.s3 import list as lister
from fusefs.store.s3.store import S3Store
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_reading import opened

URL = "https://s3.example.org/bucket?list-type=2"
PROXY = "http://user:word@proxy.example.org:3128"


def _completion(error: str, **known: Any) -> Completion:
    """The end of a request that got no answer."""
    values = {"errno": 0, "proxy_status": 0, "detail": "", **known}
    errno, proxy_status, detail = values["errno"], values["proxy_status"], values["detail"]
    fields = (0, {}, b"", 0, error, errno, proxy_status, detail, 0.0, 0.0, 0.0)
    return Completion(*fields)


@pytest.mark.parametrize(
    ("completion", "part", "may_pass"),
    [
        (_completion("timeout"), "no answer from https://s3.example.org in time", True),
        (_completion("low-speed"), "no answer from https://s3.example.org in time", True),
        (_completion("resolve"), "s3.example.org: the name is not known", True),
        (_completion("connect", errno=111), "s3.example.org: connection refused", True),
        (_completion("short"), "the answer broke off", True),
        (_completion("too-large"), "longer than any should be", False),
        (_completion("malformed"), "a header that none should have", False),
        *(
            (_completion("certificate", detail=f"SSL certificate problem: {detail}"), part, False)
            for detail, part in (
                ("self-signed certificate", "its own authority"),
                ("self-signed certificate in certificate chain", "an authority that is not"),
                ("unable to get local issuer certificate", "an authority that is not trusted"),
                ("certificate has expired", "its certificate has expired"),
                ("certificate is not yet valid", "clock"),
                ("EE key too weak", "refused: EE key too weak"),
            )
        ),
        (
            _completion("tls", detail="error:0A00010B:SSL routines::wrong version number"),
            "no TLS",
            False,
        ),
        (_completion("tls", detail="unexpected eof while reading"), "unexpected eof", True),
    ],
)
def test_the_engines_reason_is_in_the_sentence(
    completion: Completion, part: str, *, may_pass: bool
) -> None:
    cause = unreachable.of_engine(completion, "https://s3.example.org", None)
    assert part in cause.sentence
    assert cause.is_retryable == may_pass


@pytest.mark.parametrize(
    ("completion", "part", "may_pass"),
    [
        (_completion("proxy", proxy_status=407), "user and a password", False),
        (_completion("proxy", proxy_status=403), "does not connect to S3: 403", False),
        (_completion("proxy", proxy_status=503), "does not connect to S3: 503", True),
        (
            _completion("connect", errno=111),
            "no connection to the proxy proxy.example.org:3128: connection refused",
            True,
        ),
    ],
)
def test_a_proxy_is_named_without_its_password(
    completion: Completion, part: str, *, may_pass: bool
) -> None:
    cause = unreachable.of_engine(completion, "https://s3.example.org", PROXY)
    assert part in cause.sentence
    assert "word@" not in cause.sentence
    assert cause.is_retryable == may_pass


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_an_endpoint_that_redirects_names_its_target(
    shared: Bucket, faulty: FaultyS3, status: int
) -> None:
    for headers, expected in (
        ({"location": "https://s3.example.org:9000/bucket"}, "to https://s3.example.org:9000: "),
        ({"location": "/login"}, "to its own path /login"),
        ({"location": "https://[s3"}, "to an address that is not valid"),
        ({"location": "s3.example.org:9000"}, "to an address that is not valid"),
        ({}, "and does not say where to"),
    ):
        faulty.clear()
        async with opened(shared, faulty) as store:
            faulty.add(status=status, headers=headers)
            with pytest.raises(StoreError) as raised:
                await store.check("")
            assert store.counters()["retries"] == 0
        assert f"{faulty.endpoint_url} redirects {expected}" in str(raised.value)


async def test_a_redirect_that_comes_later_is_named_too(store: S3Store, faulty: FaultyS3) -> None:
    await store.check("")
    faulty.add(status=307, headers={"location": "https://s3.example.org/bucket"})
    with pytest.raises(StoreError, match=r"redirects to https://s3\.example\.org: "):
        await store.list_page("")
    with pytest.raises(StoreError, match=r"redirects to https://s3\.example\.org: "):
        await store.head("body")


@pytest.mark.parametrize(
    "body", [b"<html>Welcome</html>", b"<ListBucketResult><Contents><Key>one\x01x</Key></Contents>"]
)
@states("A listing that cannot be parsed is EIO after a few seconds.")
async def test_a_list_that_cannot_be_parsed_fails_soon(
    shared: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setattr(lister, "GARBLED_TIME_S", 0.0)
    async with opened(shared, faulty, retry_time_s=3600.0) as store:
        await store.check("")
        faulty.add("LIST", body=body)
        # `opened` allows 30 s; the retry time has an hour.
        with pytest.raises(StoreError, match="not a listing"):
            await store.list_page("")
        # However soon the time is over, the answer may have been cut.
        assert store.counters()["retries"] == 1
