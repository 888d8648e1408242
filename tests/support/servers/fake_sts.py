"""An STS that exchanges service account tokens for keys, and the bucket's door for those keys.

One server does both: `AssumeRoleWithWebIdentity` looks at a token's signature,
issuer, audience and expiry (HS256, as a stand-in for an OIDC issuer's keys).
Every other request is one of S3: it needs a session token that was given out
and has not expired, and goes on to the real server under its owner's name.
"""

import base64
import contextlib
import hashlib
import hmac
import http.client
import json
import threading
import time
import uuid
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.servers.in_process import Answer, Headers, InProcessServer
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


class FakeSts(InProcessServer):
    """`exchanged` are the tokens that were taken, as (role, session, token)."""

    def __init__(self, upstream_url: str) -> None:
        super().__init__()
        self.upstream = urlsplit(upstream_url).netloc
        self.exchanged: list[tuple[str, str, str]] = []
        self.seen_by_s3: list[str] = []
        self._sessions: set[str] = set()
        self._lock = threading.Lock()

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

    def answer(self, method: str, target: str, headers: Headers, body: bytes) -> Answer:
        form = parse_qs(body.decode(errors="replace")) if method == "POST" else {}
        if form.get("Action") == ["AssumeRoleWithWebIdentity"]:
            status, text = self.exchange(form)
            return status, {"Content-Type": "text/xml"}, text.encode()
        return self._pass_on(method, target, headers, body)

    def _pass_on(self, method: str, target: str, headers: Headers, body: bytes) -> Answer:
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        self.seen_by_s3.append(f"{target} {headers}")
        if not self.is_valid(headers.get("x-amz-security-token", "")):
            error = b"<Error><Code>ExpiredToken</Code><Message>expired</Message></Error>"
            return 400, {"Content-Type": "application/xml"}, error
        kept = {name: headers[name] for name in _KEPT if name in headers}
        kept["host"] = self.upstream
        request = AWSRequest(method, f"http://{self.upstream}{target}", headers=kept, data=body)
        S3SigV4Auth(Credentials(ACCESS_KEY, SECRET_KEY), "s3", REGION).add_auth(request)
        upstream = http.client.HTTPConnection(self.upstream, timeout=30)
        with contextlib.closing(upstream):
            upstream.request(method, target, body, dict(request.headers.items()))
            answer = upstream.getresponse()
            data = answer.read()
        ours = (
            "transfer-encoding",
            "connection",
            *(() if method == "HEAD" else ("content-length",)),
        )
        shown = {name: value for name, value in answer.getheaders() if name.lower() not in ours}
        return answer.status, shown, data
