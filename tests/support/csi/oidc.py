"""A cluster's issuer of tokens (OpenID Connect), and SeaweedFS's own STS, which trusts it.

The gateway is a second one over the tests' S3 server: there pods exchange their service account
tokens (AssumeRoleWithWebIdentity), and there alone the keys that they get for them are known.
"""

import base64
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.servers import s3_server
from tests.support.servers.in_process import Answer, Headers, InProcessServer
from tests.support.servers.s3_server import GRPC_DISTANCE, S3Server, die_with_parent, free_ports
from tests.support.waiting import until

AUDIENCE = "sts.amazonaws.com"
ROLE = "arn:aws:iam::123456789012:role/reader"
_KEY_ID = "key-1"


class Issuer(InProcessServer):
    """Serves its public key at `endpoint_url`, and signs tokens (RS256) as kubelet gets them."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._key = directory / "issuer.key"
        self._another_key = directory / "another.key"
        for key in (self._key, self._another_key):
            subprocess.run(
                ["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True
            )

    def answer(self, method: str, target: str, headers: Headers, body: bytes) -> Answer:
        document = self.documents().get(target)
        status = 404 if document is None else 200
        return status, {"Content-Type": "application/json"}, json.dumps(document).encode()

    def documents(self) -> dict[str, Any]:
        """What is served, by path."""
        line = _openssl("rsa", "-in", self._key, "-noout", "-modulus").decode()
        modulus = bytes.fromhex(line.strip().partition("=")[2])
        key = {
            "kty": "RSA",
            "kid": _KEY_ID,
            "use": "sig",
            "alg": "RS256",
            "n": _base64(modulus),
            "e": _base64((65537).to_bytes(3)),
        }
        return {
            "/.well-known/openid-configuration": {
                "issuer": self.endpoint_url,
                "jwks_uri": f"{self.endpoint_url}/keys",
                "id_token_signing_alg_values_supported": ["RS256"],
            },
            "/keys": {"keys": [key]},
        }

    def token(
        self,
        account: str,
        *,
        audience: str = AUDIENCE,
        lifetime_s: float = 3600,
        is_forged: bool = False,
    ) -> str:
        """A token of a service account, NAMESPACE:NAME."""
        now = int(time.time())
        claims = {
            "iss": self.endpoint_url,
            "aud": [audience],
            "sub": f"system:serviceaccount:{account}",
            "iat": now - 1,
            "exp": int(now + lifetime_s),
            "jti": uuid.uuid4().hex,
        }
        header = {"alg": "RS256", "kid": _KEY_ID}
        signed = ".".join(_base64(json.dumps(part).encode()) for part in (header, claims))
        key = self._another_key if is_forged else self._key
        signature = _openssl("dgst", "-sha256", "-sign", key, text=signed.encode())
        return f"{signed}.{_base64(signature)}"


@contextmanager
def sts_gateway(s3: S3Server, issuer: Issuer, account: str, directory: Path) -> Iterator[str]:
    """The URL of a gateway to the server's buckets with an STS, where `account` may be ROLE."""
    path = directory / "iam.json"
    url = issuer.endpoint_url
    path.write_text(json.dumps(iam_config(url, f"{url}/keys", AUDIENCE, account)))
    port = free_ports()[0]
    command = [
        str(Path(sys.prefix) / "bin" / "weed"),
        f"-logdir={directory}",
        "s3",
        f"-filer=127.0.0.1:{s3._ports[2]}",
        "-ip.bind=127.0.0.1",
        f"-port={port}",
        f"-port.grpc={port + GRPC_DISTANCE}",
        "-port.iceberg=0",
        "-port.lance=0",
        f"-config={s3.data.parent / 'identities.json'}",
        f"-iam.config={path}",
    ]
    with (
        (directory / "sts.log").open("ab") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent,
        ) as process,
    ):
        try:
            until(lambda: not s3_server.is_free(port), "the gateway listens")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            for near in (port, port + GRPC_DISTANCE):
                for left in Path("/tmp").glob(f"seaweedfs-*-{near}.sock"):
                    left.unlink(missing_ok=True)


def iam_config(
    issuer: str, keys: str, audience: str, account: str, *, duration: str = "1h"
) -> dict[str, Any]:
    """SeaweedFS's configuration: tokens of `issuer` let `account` be ROLE, which may do all.

    `keys` is the URL of the issuer's public keys; the role's own keys are valid for `duration`.
    """
    trust = {
        "Effect": "Allow",
        "Principal": {"Federated": "cluster"},
        "Action": ["sts:AssumeRoleWithWebIdentity"],
        "Condition": {"StringEquals": {"oidc:sub": f"system:serviceaccount:{account}"}},
    }
    allowed = [
        {"Effect": "Allow", "Action": ["s3:*"], "Resource": ["arn:aws:s3:::*"]},
        {"Effect": "Allow", "Action": ["sts:ValidateSession"], "Resource": ["*"]},
    ]
    return {
        "sts": {
            "tokenDuration": duration,
            "maxSessionLength": "12h",
            "issuer": "the-sts",
            "signingKey": base64.b64encode(b"k" * 32).decode(),
        },
        "providers": [
            {
                "name": "cluster",
                "type": "oidc",
                "enabled": True,
                "config": {"issuer": issuer, "clientId": audience, "jwksUri": keys},
            }
        ],
        "policy": {"defaultEffect": "Deny"},
        "policies": [{"name": "all", "document": {"Version": "2012-10-17", "Statement": allowed}}],
        "roles": [
            {
                "roleName": ROLE.rpartition("/")[2],
                "roleArn": ROLE,
                "attachedPolicies": ["all"],
                "trustPolicy": {"Version": "2012-10-17", "Statement": [trust]},
            }
        ],
    }


def _openssl(*arguments: Any, text: bytes = b"") -> bytes:
    return subprocess.run(
        ["openssl", *arguments], input=text, capture_output=True, check=True
    ).stdout


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
