"""A server behind TLS, with a certificate of an authority that is not known otherwise."""

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.servers.buckets import Bucket
from tests.support.servers.relay import relay


@dataclass(frozen=True)
class TlsDoor:
    """Where the server is to be found, and the file that is to be trusted for it."""

    url: str
    authority: Path

    @property
    def settings(self) -> dict[str, str]:
        """Settings of a store behind it."""
        return {"endpoint_url": self.url, "ca_bundle": str(self.authority)}


@contextlib.contextmanager
def tls_door(
    upstream: str, directory: Path, *, is_own_authority: bool = False, name: str = "IP:127.0.0.1"
) -> Iterator[TlsDoor]:
    """Forward connections to `upstream`, an http URL.

    The server's certificate is for `name`; with `is_own_authority` it has signed itself.
    """
    make = _make_own_authority if is_own_authority else _make_certificates
    authority = make(directory, name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "server.pem", directory / "server.key")
    parts = urlsplit(upstream)
    assert parts.hostname is not None
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        address = (parts.hostname, parts.port or 80)
        thread = threading.Thread(target=_serve, args=(listener, context, address), daemon=True)
        thread.start()
        yield TlsDoor(f"https://127.0.0.1:{listener.getsockname()[1]}", authority)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture(scope="module")
def secure(shared: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsDoor]:
    """The shared bucket's server with a certificate of a private authority."""
    with tls_door(shared.server.endpoint_url, tmp_path_factory.mktemp("tls")) as door:
        yield door


def openssl(directory: Path, arguments: str) -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs openssl")
    command = [program, *arguments.split()]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)


def make_authority(directory: Path) -> Path:
    """The certificate of an authority, with its key beside it."""
    usage = "-addext keyUsage=critical,keyCertSign"
    names = "-subj /CN=test -keyout ca.key -out ca.pem"
    openssl(directory, f"req -x509 -newkey rsa:2048 -nodes -days 30 {names} {usage}")
    return directory / "ca.pem"


def sign(directory: Path, name: str, days: int = 30) -> None:
    """Make a server's key, and a certificate for it of the authority in a directory."""
    subject = "-subj /CN=127.0.0.1 -keyout server.key -out server.csr"
    openssl(directory, f"req -newkey rsa:2048 -nodes {subject}")
    (directory / "names").write_text(f"subjectAltName={name}\n")
    authority = "-CA ca.pem -CAkey ca.key -CAcreateserial -extfile names"
    openssl(directory, f"x509 -req -in server.csr -out server.pem -days {days} {authority}")


def _make_certificates(directory: Path, name: str) -> Path:
    authority = make_authority(directory)
    sign(directory, name)
    return authority


def _make_own_authority(directory: Path, name: str) -> Path:
    """What `openssl req -x509` makes by default: basicConstraints=critical,CA:TRUE."""
    names = f"-subj /CN=127.0.0.1 -addext subjectAltName={name}"
    files = "-keyout server.key -out server.pem"
    openssl(directory, f"req -x509 -newkey rsa:2048 -nodes -days 30 {names} {files}")
    return directory / "server.pem"


def _serve(listener: socket.socket, context: ssl.SSLContext, address: tuple[str, int]) -> None:
    while True:
        try:
            plain, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_forward, args=(plain, context, address), daemon=True).start()


def _forward(plain: socket.socket, context: ssl.SSLContext, address: tuple[str, int]) -> None:
    with (
        contextlib.suppress(OSError),
        socket.create_connection(address) as upstream,
        context.wrap_socket(plain, server_side=True) as client,
    ):
        relay(client, upstream)
