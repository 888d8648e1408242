"""An STS that exchanges service account tokens for keys, and the bucket's door for those keys.

One server does both: `AssumeRoleWithWebIdentity` looks at a token's signature,
issuer, audience and expiry (HS256, as a stand-in for an OIDC issuer's keys).
Every other request is one of S3: it needs a session token that was given out
and has not expired, and goes on to the real server under its owner's name.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.servers.s3_server import ACCESS_KEY, REGION, SECRET_KEY

AUDIENCE = "sts.amazonaws.com"
ISSUER = "https://issuer.test"
_KEY = b"the issuer's key"
_KEPT = ("range", "if-match", "if-none-match", "content-type", "content-length")
_XML = "https://sts.amazonaws.com/doc/2011-06-15/"


def token_for(
    subject: str, *, audience: str = AUDIENCE, lifetime_s: float = 3600, key: bytes = _KEY
) -> str:
    """A service account's token, as kubelet gets it."""
    claims = {
        "iss": ISSUER,
        "aud": [audience],
        "sub": f"system:serviceaccount:{subject}",
        "exp": time.time() + lifetime_s,
        "jti": uuid.uuid4().hex,
    }
    signed = f"{_encode({'alg': 'HS256'})}.{_encode(claims)}"
    return f"{signed}.{_base64(hmac.digest(key, signed.encode(), hashlib.sha256))}"


def _encode(part: dict[str, Any]) -> str:
    return _base64(json.dumps(part).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _refusal(token: str) -> str:
    """Why a token is not taken; empty if it is."""
    signed, _, signature = token.rpartition(".")
    if signature != _base64(hmac.digest(_KEY, signed.encode(), hashlib.sha256)):
        return "InvalidIdentityToken"
    payload = signed.partition(".")[2]
    claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    if claims["iss"] != ISSUER or AUDIENCE not in claims["aud"]:
        return "InvalidIdentityToken"
    return "ExpiredTokenException" if claims["exp"] < time.time() else ""


class FakeSts:
    """Serves at `url`. `exchanged` are the tokens that were taken, as (role, session, token)."""

    def __init__(self, upstream_url: str) -> None:
        self.upstream = urlsplit(upstream_url).netloc
        self.exchanged: list[tuple[str, str, str]] = []
        self.seen_by_s3: list[str] = []
        self._sessions: set[str] = set()
        self._lock = threading.Lock()
        owner = self

        class Handler(_Handler):
            sts = owner

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeSts:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def expire_all(self) -> None:
        """Take back all keys that were given out."""
        with self._lock:
            self._sessions.clear()

    def exchange(self, form: dict[str, list[str]]) -> tuple[int, str]:
        """Answer AssumeRoleWithWebIdentity."""
        token = form["WebIdentityToken"][0]
        refusal = _refusal(token)
        if refusal:
            return 400, (
                f'<ErrorResponse xmlns="{_XML}"><Error><Type>Sender</Type><Code>{refusal}</Code>'
                "<Message>no</Message></Error><RequestId>STS1</RequestId></ErrorResponse>"
            )
        session = uuid.uuid4().hex
        with self._lock:
            self._sessions.add(session)
            self.exchanged.append((form["RoleArn"][0], form["RoleSessionName"][0], token))
        expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
        return 200, (
            f'<AssumeRoleWithWebIdentityResponse xmlns="{_XML}"><AssumeRoleWithWebIdentityResult>'
            f"<Credentials><AccessKeyId>ASIA{session[:8]}</AccessKeyId>"
            f"<SecretAccessKey>{session}</SecretAccessKey><SessionToken>{session}</SessionToken>"
            f"<Expiration>{expires}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>"
            "</AssumeRoleWithWebIdentityResponse>"
        )

    def is_valid(self, session: str) -> bool:
        with self._lock:
            return session in self._sessions


class _Handler(BaseHTTPRequestHandler):
    sts: FakeSts
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        form = parse_qs(body.decode(errors="replace"))
        if form.get("Action") == ["AssumeRoleWithWebIdentity"]:
            status, text = self.sts.exchange(form)
            self._answer(status, text.encode(), {"Content-Type": "text/xml"})
        else:
            self._pass_on(body)

    def do_GET(self) -> None:
        self._pass_on(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    do_HEAD = do_PUT = do_DELETE = do_GET

    def _pass_on(self, body: bytes) -> None:
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        self.sts.seen_by_s3.append(f"{self.path} {self.headers}")
        if not self.sts.is_valid(self.headers.get("x-amz-security-token", "")):
            error = b"<Error><Code>ExpiredToken</Code><Message>expired</Message></Error>"
            self._answer(400, error, {"Content-Type": "application/xml"})
            return
        kept = {name: self.headers[name] for name in _KEPT if name in self.headers}
        kept["host"] = self.sts.upstream
        url = f"http://{self.sts.upstream}{self.path}"
        request = AWSRequest(self.command, url, headers=kept, data=body)
        S3SigV4Auth(Credentials(ACCESS_KEY, SECRET_KEY), "s3", REGION).add_auth(request)
        upstream = http.client.HTTPConnection(self.sts.upstream, timeout=30)
        try:
            upstream.request(self.command, self.path, body, dict(request.headers.items()))
            answer = upstream.getresponse()
            data = answer.read()
        finally:
            upstream.close()
        headers = {
            name: value
            for name, value in answer.getheaders()
            if name.lower() not in ("transfer-encoding", "connection")
        }
        self._answer(answer.status, data, headers)

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() != "content-length" or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""
