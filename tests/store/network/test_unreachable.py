"""Why S3 can't be reached: the cause in one line, and nothing that never heals tried again."""

from typing import Any

import pytest
from botocore import exceptions

from fusefs.store import unreachable
from fusefs.store.engine.engine import Completion
from fusefs.store.errors import StoreError
from fusefs.store.s3 import list as lister
from tests.support.mounting import Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_reading import as_owner as as_owner
from tests.support.store_reading import opened
from tests.support.store_reading import shared as shared

URL = "https://s3.example.org/bucket?list-type=2"
PROXY = "http://user:word@proxy.example.org:3128"


@pytest.mark.parametrize(
    ("reason", "part", "may_pass"),
    [
        (
            "certificate verify failed: self-signed certificate (_ssl.c:1006)",
            "its own authority",
            False,
        ),
        (
            "certificate verify failed: self-signed certificate in certificate chain (_ssl.c:1006)",
            "an authority that is not trusted",
            False,
        ),
        (
            "certificate verify failed: unable to get local issuer certificate (_ssl.c:1006)",
            "an authority that is not trusted",
            False,
        ),
        ("certificate verify failed: certificate has expired (_ssl.c:1006)", "has expired", False),
        ("certificate verify failed: certificate is not yet valid (_ssl.c:1)", "clock", False),
        (
            "certificate verify failed: EE certificate key too weak (_ssl.c:1006)')",
            "refused: EE certificate key too weak",
            False,
        ),
        ("hostname 's3.example.org' doesn't match 'other.example'", "for other.example", False),
        ("IP address mismatch, certificate is not valid for '::1'.", "another name", False),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)", "no TLS", False),
        ("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred", "EOF occurred", True),
    ],
)
def test_openssls_reason_is_in_the_sentence(reason: str, part: str, *, may_pass: bool) -> None:
    cause = unreachable.of_botocore(exceptions.SSLError(endpoint_url=URL, error=reason))
    assert cause.sentence.startswith("no secure connection to https://s3.example.org: ")
    assert part in cause.sentence
    assert cause.may_pass == may_pass


@pytest.mark.parametrize(
    ("reason", "part", "may_pass"),
    [
        (
            "Tunnel connection failed: 407 Proxy Authentication Required",
            "user and a password",
            False,
        ),
        ("OSError('Tunnel connection failed: 403 Forbidden')", "to S3: 403 Forbidden", False),
        ("OSError('Tunnel connection failed: 503 Service Unavailable')", "503 Service", True),
        (
            "Failed to establish a new connection: [Errno 111] Connection refused",
            "no connection to the proxy proxy.example.org:3128: connection refused",
            True,
        ),
        ("Failed to resolve 'proxy.example.org'", "the name is not known", True),
        (
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired",
            "to the proxy proxy.example.org:3128: its certificate has expired",
            False,
        ),
    ],
)
def test_a_proxys_reason_is_in_the_sentence(reason: str, part: str, *, may_pass: bool) -> None:
    error = exceptions.ProxyConnectionError(proxy_url=PROXY, error=reason)
    cause = unreachable.of_botocore(error)
    assert part in cause.sentence
    assert "word@" not in cause.sentence
    assert cause.may_pass == may_pass


def test_a_proxy_is_named_whatever_botocore_has_masked() -> None:
    # Of http://t:p@…, where it looks for user and password from the beginning.
    masked = "ht***://***:p@proxy.example.org:3128"
    error = exceptions.ProxyConnectionError(proxy_url=masked, error="[Errno 111] refused")
    sentence = unreachable.of_botocore(error).sentence
    assert sentence == "no connection to the proxy proxy.example.org:3128: connection refused"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (exceptions.ConnectTimeoutError(endpoint_url=URL), "no answer from https://s3.example.org"),
        (
            exceptions.EndpointConnectionError(endpoint_url=URL, error="[Errno 113] No route"),
            "no connection to https://s3.example.org: no route to host",
        ),
        (
            exceptions.EndpointConnectionError(endpoint_url=URL, error="Failed to resolve 's3'"),
            "no connection to https://s3.example.org: the name is not known",
        ),
    ],
)
def test_what_may_pass_is_tried_again(error: Exception, sentence: str) -> None:
    cause = unreachable.of_botocore(error)
    assert cause.sentence.startswith(sentence)
    assert cause.may_pass


def _completion(error: str, **known: Any) -> Completion:
    """The end of a request that got no answer."""
    values = {"errno": 0, "proxy_status": 0, "detail": "", **known}
    errno, proxy_status, detail = values["errno"], values["proxy_status"], values["detail"]
    fields = (0, {}, b"", 0, error, errno, proxy_status, detail, False, 0.0, 0.0, 0.0)
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
        (
            _completion("certificate", detail="SSL certificate problem: certificate has expired"),
            "its certificate has expired",
            False,
        ),
        (
            _completion("certificate", detail="SSL certificate problem: EE key too weak"),
            "refused: EE key too weak",
            False,
        ),
    ],
)
def test_the_engines_reason_is_in_the_sentence(
    completion: Completion, part: str, *, may_pass: bool
) -> None:
    cause = unreachable.of_engine(completion, "https://s3.example.org", None)
    assert part in cause.sentence
    assert cause.may_pass == may_pass


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
    assert cause.may_pass == may_pass


async def _complaint(shared: Bucket, faulty: FaultyS3, **answer: Any) -> str:
    faulty.clear()
    async with opened(shared, faulty) as store:
        faulty.add(**answer)
        with pytest.raises(StoreError) as raised:
            await store.check("")
        assert store.counters()["retries"] == 0
    return str(raised.value)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_an_endpoint_that_redirects_names_its_target(
    shared: Bucket, faulty: FaultyS3, status: int
) -> None:
    away = {"location": "https://s3.example.org:9000/bucket"}
    sentence = await _complaint(shared, faulty, status=status, headers=away)
    assert f"{faulty.endpoint_url} redirects to https://s3.example.org:9000: " in sentence
    sentence = await _complaint(shared, faulty, status=status, headers={"location": "/login"})
    assert f"{faulty.endpoint_url} redirects to its own path /login" in sentence
    sentence = await _complaint(shared, faulty, status=status)
    assert f"{faulty.endpoint_url} redirects and does not say where to" in sentence


async def test_a_redirect_that_comes_later_is_named_too(shared: Bucket, faulty: FaultyS3) -> None:
    async with opened(shared, faulty) as store:
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


def test_a_mount_of_what_redirects_is_refused_with_the_target(
    faulty: FaultyS3, mounter: Mounter
) -> None:
    faulty.add(status=307, headers={"location": "https://s3.example.org/"})
    with pytest.raises(AssertionError, match=r"redirects to https://s3\.example\.org"):
        mounter(endpoint_url=faulty.endpoint_url)
