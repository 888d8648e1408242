"""A server between fusefs and S3 that fails on demand.

It forwards every request as it is to the real server (the Host header too,
which the signature covers) and applies what its rules say on the way: another
answer, a stall, a cut, a lie about If-Match, or a request that is held back and
executed after its client has given it up. Rules are looked at in the order
in which they were added; the first that fits and is not used up is taken.
Each request is on record, so that a test can say what must not have been requested.

One thread serves one connection of a client and has one to the real server.
"""

from __future__ import annotations

import contextlib
import fnmatch
import http.client
import io
import math
import select
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import parse_qs, unquote, urlsplit

from fusefs.store.capabilities import PROBE_NAME
from tests.support.servers.s3_server import ACCESS_KEY, REGION, SECRET_KEY

PIECE = 64 << 10
TRICKLE_S = 0.01
REQUEST_ID = "FAULTY00"
HTTP_REASONS = {
    "SlowDown": 503,
    "InternalError": 500,
    "TooManyRequests": 429,
    "AccessDenied": 403,
    "NoSuchKey": 404,
    "NoSuchBucket": 404,
    "ExpiredToken": 400,
    "InvalidObjectState": 403,
    "PreconditionFailed": 412,
    "BadGateway": 502,
    "NotImplemented": 501,
    "InvalidAccessKeyId": 403,
    "ConditionalRequestConflict": 409,
    "RequestTimeout": 400,
}
# A method and a parameter that make an operation of their own.
_BY_PARAMETER = [
    ("GET", "list-type", "LIST"),
    ("GET", "uploadId", "PARTS"),
    ("GET", "uploads", "UPLOADS"),
    ("PUT", "partNumber", "PART"),
    ("POST", "uploads", "BEGIN"),
    ("POST", "uploadId", "COMPLETE"),
    ("POST", "delete", "DELETE MANY"),
    ("DELETE", "uploadId", "ABORT"),
]
_CONDITIONS = ("if-match", "if-none-match")
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@dataclass(frozen=True)
class Request:
    """One request as it came in. `key` is "" for a LIST; `query` has single values.

    `at` is when it came, in seconds since the epoch.
    """

    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    at: float = field(default_factory=time.time)

    @property
    def operation(self) -> str:
        """GET, HEAD, LIST, PUT, COPY, DELETE or DELETE MANY.

        Of multipart uploads BEGIN, PART, PART COPY, COMPLETE, ABORT, PARTS and UPLOADS.
        """
        copy = " COPY" if "x-amz-copy-source" in self.headers else ""
        for method, parameter, name in _BY_PARAMETER:
            if self.method == method and parameter in self.query:
                return name + copy
        return "COPY" if copy else self.method

    @property
    def range(self) -> str:
        return self.headers.get("range", "")


@dataclass
class Held:
    """One request that is held back.

    `status` is the real server's answer, None before it and where the request was
    dropped. `done` is set when the request has been executed or dropped, which was
    at `done_at`, in seconds since the epoch.
    """

    operation: str
    key: str
    status: int | None = None
    is_client_gone: bool = False
    done_at: float = math.nan
    done: threading.Event = field(default_factory=threading.Event)


class Hold:
    """Holds requests back, and executes each `for_s` seconds after its connection has ended.

    `for_s` may be a function that chooses the time of each; None holds them until
    `release`. With `hangs_up` the proxy ends the connection itself, at once or so many
    seconds after the request has come, which its client sees as a connection that
    was lost.
    """

    def __init__(
        self,
        for_s: float | Callable[[], float] | None = None,
        *,
        hangs_up: bool | Callable[[], float] = False,
    ) -> None:
        self._for_s = for_s
        self._hangs_up = hangs_up
        self.held: list[Held] = []
        self.released = threading.Event()
        self.is_dropped = False

    @property
    def for_s(self) -> float | None:
        return self._for_s() if callable(self._for_s) else self._for_s

    @property
    def hang_up_s(self) -> float:
        """When the proxy hangs up by itself, in seconds; never is infinite."""
        if callable(self._hangs_up):
            return self._hangs_up()
        return 0.0 if self._hangs_up else math.inf

    def add(self, request: Request) -> Held:
        held = Held(request.operation, request.key)
        self.held.append(held)
        return held

    def release(self, limit_s: float = 60.0) -> list[Held]:
        """Have all that is held executed now; return it once the real server has answered."""
        self.released.set()
        for one in self.held:
            if not one.done.wait(limit_s):
                raise TimeoutError(f"{one.operation} {one.key} was not executed")
        return self.held

    def drop(self) -> None:
        """Forget all that is held."""
        self.is_dropped = True
        self.released.set()


@dataclass
class Rule:
    """What happens to the requests that fit; `times` None means to all of them.

    A fault is one of: `code` (an S3 error, with its usual status or `status`),
    `stall` (silence until the client gives up or the test says `release`),
    `cut_after` and `stall_after` (the body breaks off, or stops, after so many
    bytes), `trickle_after` (behind so many it comes byte by byte), `short` (a body
    with so many bytes, declared as whole). `ignored_header` is taken away; `with_header`
    is for requests that have the one of that name alone. `headers` go with an
    answer of the rule's own, which comes after the real server's if `is_done`. Of a
    request with a body: `cut_request_after` hangs up when so many bytes of it have
    come, `corrupt` changes one of them on the way, and `lose_answer` hangs up when
    the real server has answered. `before` is called before the request
    goes on, `at` (a number of body bytes, and what to
    call then) in the middle of the answer. `delay_s` comes before all. `hold` keeps the
    request back until its client is gone, and later. With `above_per_s` the rule is only
    for requests above that rate (a tenth of a second's worth may come at once); `used`
    does not count those that it lets pass. Requests by which a mount tries what the store
    honours fit only where `key` names them.
    """

    operation: str = "*"
    key: str = "*"
    times: int | None = None
    code: str | None = None
    status: int | None = None
    body: bytes | None = None
    stall: bool = False
    cut_after: int | None = None
    stall_after: int | None = None
    trickle_after: int | None = None
    short: int | None = None
    ignored_header: str | None = None
    with_header: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    is_done: bool = False
    cut_request_after: int | None = None
    corrupt: bool = False
    lose_answer: bool = False
    before: Callable[[], None] | None = None
    at: tuple[int, Callable[[], None]] | None = None
    delay_s: float = 0.0
    bytes_per_s: float | None = None
    hold: Hold | None = None
    above_per_s: float | None = None
    used: int = 0
    _tokens: float = 0.0
    _filled: float = 0.0
    _released: threading.Event = field(default_factory=threading.Event)

    def fits(self, request: Request) -> bool:
        if self.times is not None and self.used >= self.times:
            return False
        if self.with_header is not None and self.with_header not in request.headers:
            return False
        if PROBE_NAME in request.key and PROBE_NAME not in self.key:
            return False
        return fnmatch.fnmatchcase(request.operation, self.operation) and fnmatch.fnmatchcase(
            request.key, self.key
        )

    def is_due(self) -> bool:
        """True if a request that fits is above the rate."""
        if self.above_per_s is None:
            return True
        now = time.monotonic()
        room = max(1.0, self.above_per_s / 10)
        self._tokens = min(room, self._tokens + (now - self._filled) * self.above_per_s)
        self._filled = now
        if self._tokens < 1:
            return True
        self._tokens -= 1
        return False

    def release(self) -> None:
        """Let what stalls go on; what is held back is forgotten."""
        self._released.set()
        if self.hold is not None:
            self.hold.drop()

    def wait_for_release(self) -> None:
        self._released.wait(60)


class FaultyS3:
    """The server; a context manager. Its `rules` may be changed at any time.

    With `ignores_conditions` changes are executed without theirs.
    """

    def __init__(self, endpoint_url: str) -> None:
        self.upstream = urlsplit(endpoint_url).netloc
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self.ignores_conditions = False
        self._requests: list[Request] = []
        self._sockets: set[socket.socket] = set()
        self._server = _Server(self)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FaultyS3:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.clear()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self.drop_connections()

    def add(self, operation: str = "*", key: str = "*", **fault: object) -> Rule:
        """Add a rule; its `used` tells how often it was taken."""
        rule = Rule(operation, key, **fault)  # type: ignore[arg-type]
        with self._lock:
            self._rules.append(rule)
        return rule

    def hold(
        self,
        operation: str,
        key: str,
        for_s: float | Callable[[], float] | None = None,
        *,
        times: int | None = 1,
        hangs_up: bool | Callable[[], float] = False,
    ) -> Hold:
        """Add a rule that holds requests back."""
        hold = Hold(for_s, hangs_up=hangs_up)
        self.add(operation, key, times=times, hold=hold)
        return hold

    def remove(self, rule: Rule) -> None:
        rule.release()
        with self._lock:
            self._rules.remove(rule)

    def clear(self) -> None:
        """Forget all rules and requests; what stalls goes on."""
        with self._lock:
            rules, self._rules = self._rules, []
            self._requests = []
            self.ignores_conditions = False
        for rule in rules:
            rule.release()

    def requests(self, operation: str = "*", key: str = "*") -> list[Request]:
        wanted = Rule(operation, key)
        with self._lock:
            return [request for request in self._requests if wanted.fits(request)]

    def drop_connections(self) -> None:
        """Cut every connection of a client, as a dying load balancer does."""
        with self._lock:
            sockets = list(self._sockets)
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def connected(self, client: socket.socket) -> Iterator[http.client.HTTPConnection]:
        with self._lock:
            self._sockets.add(client)
        upstream = http.client.HTTPConnection(self.upstream, timeout=60)
        try:
            yield upstream
        finally:
            upstream.close()
            with self._lock:
                self._sockets.discard(client)

    def note(self, request: Request) -> Rule:
        """Put a request on record and find what is to be done to it."""
        with self._lock:
            self._requests.append(request)
            fitting = (rule for rule in self._rules if rule.fits(request) and rule.is_due())
            rule = next(fitting, None)
            if rule is None:
                return Rule()
            rule.used += 1
            return rule


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, owner: FaultyS3) -> None:
        self.owner = owner
        super().__init__(("127.0.0.1", 0), _Client)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hung up is what these tests are about."""


class _HangUpError(Exception):
    """The connection of the client ends here."""


class _Client(socketserver.StreamRequestHandler):
    """One connection, request after request."""

    server: _Server
    disable_nagle_algorithm = True

    def handle(self) -> None:
        owner = self.server.owner
        with (
            owner.connected(self.connection) as upstream,
            contextlib.suppress(_HangUpError, OSError, http.client.HTTPException),
        ):
            while line := self.rfile.readline(PIECE):
                self._serve(owner, upstream, line)

    def _serve(self, owner: FaultyS3, upstream: http.client.HTTPConnection, line: bytes) -> None:
        method, target, _ = line.decode("latin-1").split(" ", 2)
        headers = {
            name.lower(): value for name, value in http.client.parse_headers(self.rfile).items()
        }
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query, True).items()}
        key = unquote(parts.path).partition("/")[2].partition("/")[2]
        request = Request(method, key, query, headers)
        rule = owner.note(request)
        body = self._take_body(headers, rule)
        ignored = _CONDITIONS if owner.ignores_conditions and method != "GET" else ()
        for name in (*ignored, rule.ignored_header):
            if name in headers:
                headers = self._signed_without(owner, method, target, headers, body, name)
        time.sleep(rule.delay_s)
        if rule.before is not None:
            rule.before()
        if rule.stall:
            rule.wait_for_release()
        if rule.hold is not None:
            self._hold(owner, rule, request, (method, target, body, headers))
            return
        if rule.code is not None or rule.status is not None or rule.body is not None:
            if rule.is_done:
                self._ask(upstream, method, target, body, headers).read()
            self._answer(method, rule)
            return
        answer = self._ask(upstream, method, target, body, headers)
        if rule.lose_answer:
            answer.read()
            raise _HangUpError
        self._pass_on(method, answer, rule)

    def _take_body(self, headers: dict[str, str], rule: Rule) -> bytes:
        if headers.pop("expect", None) is not None:
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = int(headers.get("content-length", 0))
        if rule.cut_request_after is not None:
            self.rfile.read(min(length, rule.cut_request_after))
            raise _HangUpError
        body = self.rfile.read(length)
        return bytes([body[0] ^ 1]) + body[1:] if rule.corrupt else body

    def _hold(
        self,
        owner: FaultyS3,
        rule: Rule,
        request: Request,
        what: tuple[str, str, bytes, dict[str, str]],
    ) -> None:
        """Execute a request late, and answer it if its client is there still."""
        hold = rule.hold
        held = hold.add(request)
        try:
            for_s = hold.for_s
            held.is_client_gone = self._has_ended(hold.released, hold.hang_up_s)
            hold.released.wait(60.0 if for_s is None else for_s)
            if hold.is_dropped:
                raise _HangUpError
            with contextlib.closing(http.client.HTTPConnection(owner.upstream, timeout=60)) as late:
                answer = self._ask(late, *what)
                held.status = answer.status
                if held.is_client_gone:
                    raise _HangUpError
                self._pass_on(request.method, answer, rule)
        finally:
            held.done_at = time.time()
            held.done.set()

    def _has_ended(self, released: threading.Event, hang_up_s: float) -> bool:
        """Wait for the end of the client's connection, or for a release; tell whether it ended.

        After `hang_up_s` seconds this server ends it.
        """
        poll = select.poll()
        poll.register(self.connection, select.POLLIN | select.POLLRDHUP)
        hangs_up_at = time.monotonic() + hang_up_s
        while not released.is_set():
            if time.monotonic() >= hangs_up_at:
                self.connection.shutdown(socket.SHUT_RDWR)
                return True
            if poll.poll(50):
                try:
                    return not self.connection.recv(1, socket.MSG_PEEK)
                except OSError:
                    return True
        return False

    def _signed_without(
        self,
        owner: FaultyS3,
        method: str,
        target: str,
        headers: dict[str, str],
        body: bytes,
        name: str,
    ) -> dict[str, str]:
        """The request without a header, which the old signature covers."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        old = {name, "authorization", "x-amz-date", "x-amz-content-sha256"}
        kept = {known: value for known, value in headers.items() if known not in old}
        kept["host"] = owner.upstream
        request = AWSRequest(method, f"http://{owner.upstream}{target}", headers=kept, data=body)
        S3SigV4Auth(Credentials(ACCESS_KEY, SECRET_KEY), "s3", REGION).add_auth(request)
        return dict(request.headers.items())

    def _ask(
        self,
        upstream: http.client.HTTPConnection,
        method: str,
        target: str,
        body: bytes,
        headers: dict[str, str],
    ) -> http.client.HTTPResponse:
        upstream.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            upstream.putheader(name, value)
        upstream.endheaders(body or None)
        return upstream.getresponse()

    def _answer(self, method: str, rule: Rule) -> None:
        code = rule.code or ""
        status = rule.status or HTTP_REASONS.get(code, 200)
        body = rule.body
        if body is None:
            body = (
                f"<Error><Code>{code}</Code><Message>as the test wants</Message>"
                f"<RequestId>{REQUEST_ID}</RequestId></Error>"
            ).encode()
        headers = {"x-amz-request-id": REQUEST_ID, "content-type": "application/xml"}
        self._head(status, {**headers, **rule.headers}, 0 if method == "HEAD" else len(body))
        if method != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, str], length: int | None) -> None:
        lines = [f"HTTP/1.1 {status} {http.client.responses.get(status, 'Unknown')}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"content-length: {length}"] if length is not None else []
        self.wfile.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))

    def _pass_on(self, method: str, answer: http.client.HTTPResponse, rule: Rule) -> None:
        headers = {
            name: value for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP
        }
        declared = answer.getheader("content-length")
        if method == "HEAD":
            answer.read()
            self._head(answer.status, headers, int(declared) if declared is not None else 0)
            return
        # Without a length it is chunked, as SeaweedFS sends long listings.
        whole = answer.read() if declared is None else b""
        body = answer if declared is not None else io.BytesIO(whole)
        length = int(declared) if declared is not None else len(whole)
        end = length if rule.short is None else min(length, rule.short)
        self._head(answer.status, headers, end)
        self._send_body(body, end, rule)
        answer.read()

    def _send_body(self, body: http.client.HTTPResponse | io.BytesIO, end: int, rule: Rule) -> None:
        marks = [rule.cut_after, rule.stall_after, rule.trickle_after]
        marks += [rule.at[0] if rule.at else None]
        sent = 0
        while True:
            if rule.at is not None and sent == rule.at[0]:
                rule.at[1]()
            if sent == rule.stall_after:
                rule.wait_for_release()
            if sent == rule.cut_after:
                raise _HangUpError
            ahead = [mark - sent for mark in marks if mark is not None and mark > sent]
            is_trickling = rule.trickle_after is not None and sent >= rule.trickle_after
            piece = body.read(min([1 if is_trickling else PIECE, end - sent, *ahead]))
            if not piece:
                break
            self.wfile.write(piece)
            sent += len(piece)
            if is_trickling:
                time.sleep(TRICKLE_S)
            if rule.bytes_per_s:
                time.sleep(len(piece) / rule.bytes_per_s)
        if sent < end:
            raise _HangUpError
