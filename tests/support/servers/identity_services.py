"""What gives programs temporary keys: instance and container metadata, SSO, STS; all in one server.

Each answer has another key, which begins with the service's name and is soon to be renewed.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# Within the minutes before their end in which boto3 asks for others.
LIFETIME = timedelta(minutes=5)
INSTANCE_ROLE = "/latest/meta-data/iam/security-credentials/"
_numbers = itertools.count(1)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == INSTANCE_ROLE:
            self._answer("the-role")
        elif self.path == INSTANCE_ROLE + "the-role":
            self._answer(json.dumps(_keys("instance") | {"Code": "Success"}))
        elif self.path == "/container":
            self._answer(json.dumps(_keys("container")))
        elif self.path.startswith("/federation/credentials"):
            keys = _keys("sso")
            ends = datetime.fromisoformat(keys["Expiration"]).timestamp()
            credentials = {
                "accessKeyId": keys["AccessKeyId"],
                "secretAccessKey": "s",
                "sessionToken": "t",
                "expiration": int(1000 * ends),
            }
            self._answer(json.dumps({"roleCredentials": credentials}))
        else:
            self.send_error(404)

    def do_PUT(self) -> None:  # for a token of the instance metadata service
        self._answer("a token")

    def do_POST(self) -> None:
        form = self.rfile.read(int(self.headers["content-length"])).decode()
        assert "Action=AssumeRoleWithWebIdentity" in form
        keys = _keys("sts") | {"SessionToken": "t"}
        elements = "".join(
            f"<{name}>{text}</{name}>" for name, text in keys.items() if name != "Token"
        )
        self._answer(
            '<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
            f"<AssumeRoleWithWebIdentityResult><Credentials>{elements}</Credentials>"
            "</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
        )

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def _keys(service: str) -> dict[str, str]:
    ends = datetime.now(UTC) + LIFETIME
    return {
        "AccessKeyId": f"{service}{next(_numbers)}",
        "SecretAccessKey": "s",
        "Token": "t",
        "Expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


@contextmanager
def identity_services() -> Iterator[str]:
    """The URL of the server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
