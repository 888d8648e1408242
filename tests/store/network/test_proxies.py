"""Proxies of the environment: the same for every path to S3."""

from collections.abc import Iterator

import pytest

from csi.controller.bucket_client import Bucket as CsiBucket
from csi.identities.keys import AccessKeys
from csi.volume.stores import StoreSettings as CsiStore
from fusefs.store.errors import StoreError
from fusefs.store.http.proxies import choose, shown
from fusefs.store.s3.access import Access
from fusefs.store.s3.settings import S3Settings
from tests.support.machine.surroundings import of_no_machine as of_no_machine
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.forward_proxy import ForwardProxy, forward_proxy
from tests.support.servers.s3_server import ACCESS_KEY, REGION, SECRET_KEY
from tests.support.servers.tls import TlsDoor
from tests.support.servers.tls import secure as secure
from tests.support.store_reading import opened, read_body

PROXY = "http://proxy.example.org:3128"
# No process listens there.
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def proxy() -> Iterator[ForwardProxy]:
    with forward_proxy() as one:
        yield one


@pytest.mark.parametrize(
    ("url", "environment", "chosen"),
    [
        ("https://s3.example.org", {"HTTPS_PROXY": PROXY}, PROXY),
        ("http://s3.example.org", {"HTTPS_PROXY": PROXY}, None),
        ("http://s3.example.org", {"HTTP_PROXY": PROXY}, PROXY),
        ("http://s3.example.org", {"HTTP_PROXY": PROXY, "REQUEST_METHOD": "GET"}, None),
        ("https://s3.example.org", {"ALL_PROXY": PROXY}, PROXY),
        ("http://s3.example.org", {"all_proxy": PROXY}, PROXY),
        ("https://s3.example.org", {"ALL_PROXY": NOWHERE, "HTTPS_PROXY": PROXY}, PROXY),
        ("https://s3.example.org", {"HTTPS_PROXY": NOWHERE, "https_proxy": PROXY}, PROXY),
        ("https://s3.example.org", {"HTTPS_PROXY": PROXY, "https_proxy": ""}, None),
        ("https://s3.example.org", {"HTTPS_PROXY": "proxy.example.org:3128"}, PROXY),
        ("https://s3.example.org", {}, None),
    ],
)
def test_the_proxy_is_that_of_the_scheme_or_of_all(
    url: str, environment: dict[str, str], chosen: str | None
) -> None:
    assert choose(url, environment) == chosen


@pytest.mark.parametrize(
    ("excluded", "url", "is_excluded"),
    [
        ("*", "https://s3.example.org", True),
        ("s3.example.org", "https://s3.example.org", True),
        ("S3.Example.ORG", "https://s3.example.org", True),
        ("example.org", "https://s3.example.org", True),
        (".example.org", "https://s3.example.org", True),
        ("*.example.org", "https://s3.example.org", True),
        ("example.org", "https://example.org.", True),
        ("example.org", "https://s3-example.org", False),
        ("s3.example.org", "https://example.org", False),
        ("other.org, example.org", "https://s3.example.org", True),
        ("other.org example.org", "https://s3.example.org", True),
        ("example.org:9000", "https://s3.example.org:9000", True),
        ("example.org:9000", "https://s3.example.org", False),
        ("example.org:443", "https://s3.example.org", True),
        ("10.0.0.0/8", "https://10.1.2.3:9000", True),
        ("10.0.0.0/8", "https://11.1.2.3", False),
        ("10.0.0.0/8:9000", "https://10.1.2.3:9000", True),
        ("10.0.0.0/8:9000", "https://10.1.2.3", False),
        ("10.1.2.3", "https://10.1.2.3", True),
        ("10.0.0.0/8", "https://s3.example.org", False),
        ("fd00::/8", "https://[fd00::1]:9000", True),
        ("::1", "https://[::1]", True),
        ("[::1]:9000", "https://[::1]:9000", True),
        ("[::1]:9000", "https://[::1]", False),
        (",,", "https://s3.example.org", False),
        ("", "https://s3.example.org", False),
    ],
)
def test_what_no_proxy_names_is_reached_without(
    excluded: str, url: str, *, is_excluded: bool
) -> None:
    environment = {"ALL_PROXY": PROXY, "NO_PROXY": excluded}
    assert choose(url, environment) == (None if is_excluded else PROXY)


def test_no_proxy_may_name_a_bucket_s_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", "data.s3.example.org")
    for bucket, proxy in (("data", None), ("other", PROXY)):
        settings = S3Settings(
            bucket, "https://s3.example.org", anonymous=True, addressing="virtual"
        )
        assert Access(settings).address.route.proxy == proxy


@pytest.mark.parametrize("proxy", ["socks5h://u:word@host:1080", "http://", "http://host:port"])
def test_a_proxy_that_nothing_can_use_is_refused_without_its_password(proxy: str) -> None:
    with pytest.raises(StoreError) as raised:
        choose("https://s3.example.org", {"ALL_PROXY": proxy})
    assert "word" not in str(raised.value)
    assert shown("http://user:word@host:1") == "http://host:1"


async def read_all(shared: Bucket, faulty: FaultyS3, secure: TlsDoor | None) -> dict[str, int]:
    """Read an object in parts and whole; return the store's counters."""
    async with opened(shared, faulty, **(secure.settings if secure else {})) as store:
        await read_body(store)
        return store.counters()


@pytest.mark.parametrize(
    ("variable", "is_secure"),
    [("HTTPS_PROXY", True), ("ALL_PROXY", True), ("HTTP_PROXY", False), ("ALL_PROXY", False)],
)
@states(
    "All requests take the same proxy: that of `HTTPS_PROXY`, `HTTP_PROXY` or `ALL_PROXY`, but"
    " for the hosts, networks and ports in `NO_PROXY`."
)
async def test_every_read_goes_through_the_proxy(
    shared: Bucket,
    faulty: FaultyS3,
    secure: TlsDoor,
    proxy: ForwardProxy,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    *,
    is_secure: bool,
) -> None:
    monkeypatch.setenv(variable, proxy.url)
    await read_all(shared, faulty, secure if is_secure else None)
    if is_secure:
        assert set(proxy.tunnels) == {secure.url.removeprefix("https://")}
    else:
        through = [url for url in proxy.urls if url.startswith(faulty.endpoint_url)]
        assert len(through) == len(faulty.requests()) > 2


@pytest.mark.parametrize("is_secure", [True, False])
@pytest.mark.parametrize("excluded", ["127.0.0.0/8", "127.0.0.1"])
async def test_no_read_goes_through_a_proxy_where_no_proxy_says_so(
    shared: Bucket,
    faulty: FaultyS3,
    secure: TlsDoor,
    monkeypatch: pytest.MonkeyPatch,
    excluded: str,
    *,
    is_secure: bool,
) -> None:
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(variable, NOWHERE)
    monkeypatch.setenv("NO_PROXY", f"example.org, {excluded}")
    assert (await read_all(shared, faulty, secure if is_secure else None))["retries"] == 0


@pytest.mark.parametrize("is_secure", [True, False])
async def test_a_password_that_the_proxy_refuses_is_the_reason_and_is_not_tried_again(
    shared: Bucket,
    faulty: FaultyS3,
    secure: TlsDoor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    is_secure: bool,
) -> None:
    with forward_proxy(password="user:right") as proxy:
        monkeypatch.setenv("ALL_PROXY", proxy.url.replace("//", "//user:wrong@"))
        async with opened(shared, faulty, **(secure.settings if is_secure else {})) as store:
            with pytest.raises(StoreError, match="proxy wants a user and a password") as raised:
                await store.check("")
            assert store.counters()["retries"] == 0
        assert proxy.refused == 1
    assert "wrong" not in str(raised.value) + caplog.text


async def test_a_password_that_the_proxy_takes_goes_with_every_connection(
    shared: Bucket, faulty: FaultyS3, secure: TlsDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with forward_proxy(password="user:p@ss") as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("//", "//user:p%40ss@"))
        await read_all(shared, faulty, secure)
        assert proxy.refused == 0


def test_the_controller_chooses_proxies_as_mounts_do(
    shared: Bucket, secure: TlsDoor, proxy: ForwardProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(secure.authority))
    monkeypatch.setenv("ALL_PROXY", proxy.url)
    shared.put("record", b"{}")
    keys = AccessKeys(ACCESS_KEY, SECRET_KEY, None)
    through = CsiBucket(CsiStore("through", secure.url, REGION), shared.name, None, keys)
    assert through.get("record") == b"{}"
    assert proxy.tunnels == [secure.url.removeprefix("https://")]
    monkeypatch.setenv("NO_PROXY", "127.0.0.0/8")
    without = CsiBucket(CsiStore("without", secure.url, REGION), shared.name, None, keys)
    assert without.get("record") == b"{}"
    assert len(proxy.tunnels) == 1
