"""Connections to one address, opened by ourselves and kept for the next request.

They take the proxy that proxies.py chooses and trust the certificates of
trust.py, as boto3's connections do, and need nothing but `socket` and `ssl`.
Over TLS a proxy makes a tunnel (CONNECT, RFC 9110 section 9.3.6); without TLS it
is sent the whole URL. A proxy that is itself reached over TLS can't make a
tunnel here: `Network.pool` gives none, and boto3 sends such requests.

A server closes idle connections, so each is looked at before it is used again.
"""

from __future__ import annotations

import base64
import select
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from fusefs.store import unreachable
from fusefs.store.errors import AttemptError, Failure, UnreachableError
from fusefs.store.http.answers import WireError, read_head
from fusefs.store.http.exchange import Stream
from fusefs.store.http.proxies import PORTS, Proxies


@dataclass(frozen=True, slots=True)
class Network:
    """How to reach servers: `ca_file` has the trusted authorities (None: only without TLS)."""

    proxies: Proxies
    ca_file: str | None
    connect_timeout_s: float
    read_timeout_s: float
    max_idle: int

    def pool(self, origin: str) -> ConnectionPool | None:
        """A pool for an origin such as `https://host:port`; None if boto3 has to connect.

        Raises:
            ProxyError: no proxy of its kind can be used.
        """
        proxy = self.proxies.choose(origin)
        if proxy is not None and proxy.startswith("https:"):
            return None
        return ConnectionPool(self, origin, proxy)


@dataclass(slots=True)
class BorrowedConnection:
    """A connection in use; it is closed unless the borrower sets `is_reusable`."""

    sock: socket.socket
    is_reusable: bool = False


class ConnectionPool:
    """Idle connections to one origin, the last used first; for any number of threads.

    `target_prefix` goes before a request's path, and `headers` with each request.
    """

    def __init__(self, network: Network, origin: str, proxy: str | None) -> None:
        address = urlsplit(origin)
        self._network = network
        self._origin = origin
        self._proxy = proxy
        self._host = (address.hostname or "").rstrip(".")
        self._port = address.port or PORTS[address.scheme]
        self._idle: list[socket.socket] = []  # append and pop are atomic
        self._is_closed = False
        self._tls: ssl.SSLContext | None = None
        if address.scheme == "https":
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._tls.load_verify_locations(network.ca_file)
            self._tls.set_alpn_protocols(["http/1.1"])
        is_forwarded = proxy is not None and self._tls is None
        self.target_prefix = origin if is_forwarded else ""
        self.headers = _authorization(proxy) if is_forwarded else {}

    @contextmanager
    def connection(self) -> Iterator[BorrowedConnection]:
        """An idle connection, or a new one. Blocks.

        Raises:
            AttemptError: none can be opened.
        """
        borrowed = BorrowedConnection(self.take_idle() or self._connect())
        try:
            yield borrowed
        finally:
            self.give_back(borrowed)

    def take_idle(self) -> socket.socket | None:
        """An idle connection, which is to be given back; None if there is none."""
        while self._idle:
            try:
                sock = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            if _is_idle(sock):
                return sock
            sock.close()  # the server has closed it, or sent bytes without a request
        return None

    def open_idle(self) -> None:
        """Open a connection for a later request. Blocks.

        Raises:
            AttemptError: none can be opened.
        """
        self.give_back(BorrowedConnection(self._connect(), is_reusable=True))

    def give_back(self, borrowed: BorrowedConnection) -> None:
        """Keep a connection for the next request if it can be used again."""
        has_room = len(self._idle) < self._network.max_idle
        if borrowed.is_reusable and has_room and not self._is_closed:
            self._idle.append(borrowed.sock)
        else:
            borrowed.sock.close()

    def close(self) -> None:
        """Close the idle connections now, and those in use when they are given back."""
        self._is_closed = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close the idle connections; the next requests open new ones."""
        while self._idle:
            with suppress(IndexError):
                self._idle.pop().close()

    def _connect(self) -> socket.socket:
        proxy = urlsplit(self._proxy) if self._proxy is not None else None
        host, port = self._host, self._port
        if proxy is not None:
            host, port = proxy.hostname or "", proxy.port or PORTS[proxy.scheme]
        try:
            sock = socket.create_connection((host, port), self._network.connect_timeout_s)
        except OSError as error:
            raise self._unreachable(error, self._proxy) from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                if self._proxy is not None:
                    self._open_tunnel(sock, self._proxy)
                try:
                    sock = self._tls.wrap_socket(sock, server_hostname=self._host)
                except OSError as error:
                    if isinstance(error, ssl.SSLCertVerificationError):
                        self._read_authorities(self._tls)
                    raise self._unreachable(error, None) from error
            sock.settimeout(self._network.read_timeout_s)
        except BaseException:
            sock.close()
            raise
        return sock

    def _read_authorities(self, tls: ssl.SSLContext) -> None:
        """Have later connections trust what the bundle of authorities says by now."""
        with suppress(OSError):  # it may just be replaced
            tls.load_verify_locations(self._network.ca_file)

    def _open_tunnel(self, sock: socket.socket, proxy: str) -> None:
        host = f"[{self._host}]" if ":" in self._host else self._host
        lines = [f"CONNECT {host}:{self._port} HTTP/1.1", f"host: {host}:{self._port}"]
        lines += [f"{name}: {value}" for name, value in _authorization(proxy).items()]
        try:
            sock.sendall("".join(f"{line}\r\n" for line in [*lines, ""]).encode())
            stream = Stream(sock)
            text = stream.read(stream.until(b"\r\n\r\n"))
            if read_head(text).status // 100 != 2:
                status = text.partition(b"\r\n")[0].partition(b" ")[2].decode("latin-1")
                raise WireError(f"Tunnel connection failed: {status}")
        except (OSError, WireError) as error:
            raise self._unreachable(error, proxy) from error

    def _unreachable(self, error: Exception, proxy: str | None) -> AttemptError:
        cause = unreachable.of_connecting(error, self._origin, proxy)
        return AttemptError(Failure(UnreachableError, cause.sentence, is_retryable=cause.may_pass))


def _is_idle(sock: socket.socket) -> bool:
    """Whether a connection is open, and nothing has come on it."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    # What TLS has read ahead the kernel does not show.
    if isinstance(sock, ssl.SSLSocket) and sock.pending():
        return False
    if not poll.poll(0):
        return True
    if not isinstance(sock, ssl.SSLSocket):
        return False
    # A connection that has had no request yet may have the tickets that follow a handshake
    # (RFC 8446, section 4.6.1); to read takes them in, and finds no data.
    limit_s = sock.gettimeout()
    try:
        sock.setblocking(False)
        sock.recv(1)
    except ssl.SSLWantReadError:
        sock.settimeout(limit_s)
        return True
    except OSError:
        pass
    return False


def _authorization(proxy: str | None) -> dict[str, str]:
    """The header with user and password of a proxy's URL, if it has them."""
    parts = urlsplit(proxy or "")
    if not parts.username or parts.password is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password)}".encode()
    return {"proxy-authorization": f"Basic {base64.b64encode(pair).decode()}"}
