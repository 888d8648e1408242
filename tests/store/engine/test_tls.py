"""TLS: what is not to be trusted is refused before a byte of the request is sent."""

import os
import ssl
from pathlib import Path

import pytest

from fusefs.store.engine.engine import Completion, Engine, Request, Route
from tests.support.servers.forward_proxy import forward_proxy
from tests.support.servers.scripted import ScriptedServer, answer, scripted_server
from tests.support.servers.tls import make_authority, sign

BODY = os.urandom(3 << 20)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_authority(tmp_path_factory.mktemp("authority")).parent


def context(authority: Path, name: str = "IP:127.0.0.1", days: int = 30) -> ssl.SSLContext:
    """A server's, with a certificate of the authority."""
    sign(authority, name, days)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(authority / "server.pem", authority / "server.key")
    return made


def trusting(server: ScriptedServer, authority: Path) -> Request:
    return Request("DELETE", f"{server.url}/k", route=Route(ca_file=str(authority / "ca.pem")))


def is_refused(completion: Completion, server: ScriptedServer, error: str, text: str) -> None:
    assert (completion.status, completion.error) == (0, error)
    assert text in completion.detail
    assert server.requests == []


async def test_sessions_are_resumed(engine: Engine, authority: Path) -> None:
    secure = context(authority)
    with scripted_server(lambda _: [answer(b"a")], secure) as server:
        for _ in range(3):
            request = trusting(server, authority)._replace(fresh=True)
            assert (await engine.send(request)).body == b"a"
        assert server.connections == 3
    assert secure.session_stats()["hits"] == 2


async def test_another_authority_is_refused(engine: Engine, authority: Path) -> None:
    with scripted_server(lambda _: [answer()], context(authority)) as server:
        stranger = Route(ca_file="/etc/ssl/certs/ca-certificates.crt")
        for route in (stranger, Route()):
            completion = await engine.send(trusting(server, authority)._replace(route=route))
            is_refused(completion, server, "certificate", "unable to get local issuer")


async def test_another_name_is_refused(engine: Engine, authority: Path) -> None:
    with scripted_server(lambda _: [answer()], context(authority, "IP:127.0.0.2")) as server:
        completion = await engine.send(trusting(server, authority))
        is_refused(completion, server, "certificate", "no alternative certificate subject name")


async def test_an_expired_certificate_is_refused(engine: Engine, authority: Path) -> None:
    with scripted_server(lambda _: [answer()], context(authority, days=-1)) as server:
        completion = await engine.send(trusting(server, authority))
        is_refused(completion, server, "certificate", "certificate has expired")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_old_versions_are_refused(
    engine: Engine, authority: Path, version: ssl.TLSVersion
) -> None:
    old = context(authority)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = old.maximum_version = version
    with scripted_server(lambda _: [answer()], old) as server:
        completion = await engine.send(trusting(server, authority))
        is_refused(completion, server, "tls", "")


async def test_a_file_of_authorities_that_is_not_there(engine: Engine, authority: Path) -> None:
    with scripted_server(lambda _: [answer()], context(authority)) as server:
        route = Route(ca_file=str(authority / "none.pem"))
        completion = await engine.send(trusting(server, authority)._replace(route=route))
        is_refused(completion, server, "tls", "none.pem")


async def test_a_proxy_is_taken_if_the_request_says_so(
    engine: Engine, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = "http://127.0.0.1:1"
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, nowhere)
    monkeypatch.setenv("NO_PROXY", "*")
    with (
        scripted_server(lambda _: [answer()], context(authority)) as secure,
        scripted_server(lambda _: [answer()]) as plain,
        forward_proxy() as proxy,
    ):
        for server in (secure, plain):
            request = trusting(server, authority)
            assert (await engine.send(request)).status == 200
            route = request.route._replace(proxy=proxy.url)
            request = request._replace(route=route, headers=[("authorization", "secret")])
            assert (await engine.send(request)).status == 200
            route = request.route._replace(proxy=nowhere)
            completion = await engine.send(request._replace(route=route))
            assert completion.error == "proxy"


@pytest.mark.parametrize("way", ["refused", "password", "certificate"])
async def test_a_request_has_not_left_before_its_tunnel_is_there(
    engine: Engine, authority: Path, way: str
) -> None:
    with (
        scripted_server(lambda _: [answer()], context(authority)) as server,
        forward_proxy(
            refusal=403 if way == "refused" else None, password="a:b" if way == "password" else None
        ) as proxy,
    ):
        ca_file = None if way == "certificate" else str(authority / "ca.pem")
        request = trusting(server, authority)._replace(route=Route(proxy.url, ca_file))
        completion = await engine.send(request)
    status = {"refused": 403, "password": 407, "certificate": 200}[way]
    error = "certificate" if way == "certificate" else "proxy"
    assert (completion.error, completion.proxy_status) == (error, status)
    assert server.requests == []
