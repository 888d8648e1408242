"""A server behind TLS, with a certificate of an authority that nobody else knows."""

from __future__ import annotations

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

PIECE = 1 << 16


@dataclass(frozen=True)
class TlsDoor:
    """Where the server is to be found, and the file that is to be trusted for it."""

    url: str
    authority: Path


@contextlib.contextmanager
def tls_door(upstream: str, directory: Path) -> Iterator[TlsDoor]:
    """Forward connections to `upstream`, an http URL."""
    authority = _make_certificates(directory)
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


def _make_certificates(directory: Path) -> Path:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=directory, check=True, capture_output=True)

    key = ("-newkey", "rsa:2048", "-nodes")
    run("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test", "-days",
        "30", "-addext", "keyUsage=critical,keyCertSign")  # fmt: skip
    run("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=127.0.0.1")
    (directory / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    run("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
        "-out", "server.pem", "-days", "30", "-extfile", "names")  # fmt: skip
    return directory / "ca.pem"


def _serve(listener: socket.socket, context: ssl.SSLContext, address: tuple[str, int]) -> None:
    while True:
        try:
            plain, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_forward, args=(plain, context, address), daemon=True).start()


def _forward(plain: socket.socket, context: ssl.SSLContext, address: tuple[str, int]) -> None:
    """Pass one connection's requests on, one thread for each direction."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(address) as upstream,
        context.wrap_socket(plain, server_side=True) as client,
    ):
        answers = threading.Thread(target=_copy, args=(upstream, client), daemon=True)
        answers.start()
        _copy(client, upstream)
        answers.join(60)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(PIECE):
            target.sendall(piece)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
