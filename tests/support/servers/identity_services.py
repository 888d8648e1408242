"""What gives programs temporary keys: instance and container metadata, SSO, STS; all in one server.

Each answer has another key, which begins with the service's name and is soon to be renewed.
"""

import itertools
import json
from datetime import UTC, datetime, timedelta

from tests.support.servers.in_process import Answer, Headers, InProcessServer

# Within the minutes before their end in which boto3 asks for others.
LIFETIME = timedelta(minutes=5)
INSTANCE_ROLE = "/latest/meta-data/iam/security-credentials/"
_numbers = itertools.count(1)


class IdentityServices(InProcessServer):
    """All of them."""

    def answer(self, method: str, target: str, headers: Headers, body: bytes) -> Answer:
        if method == "PUT":  # for a token of the instance metadata service
            text = "a token"
        elif method == "POST":
            assert b"Action=AssumeRoleWithWebIdentity" in body
            text = _sts_keys()
        elif target == INSTANCE_ROLE:
            text = "the-role"
        elif target == INSTANCE_ROLE + "the-role":
            text = json.dumps(_keys("instance") | {"Code": "Success"})
        elif target == "/container":
            text = json.dumps(_keys("container"))
        elif target.startswith("/federation/credentials"):
            text = _sso_keys()
        else:
            return 404, {}, b""
        return 200, {}, text.encode()


def _sso_keys() -> str:
    keys = _keys("sso")
    credentials = {
        "accessKeyId": keys["AccessKeyId"],
        "secretAccessKey": "s",
        "sessionToken": "t",
        "expiration": int(1000 * datetime.fromisoformat(keys["Expiration"]).timestamp()),
    }
    return json.dumps({"roleCredentials": credentials})


def _sts_keys() -> str:
    keys = _keys("sts") | {"SessionToken": "t"}
    elements = "".join(f"<{name}>{text}</{name}>" for name, text in keys.items() if name != "Token")
    return (
        '<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
        f"<AssumeRoleWithWebIdentityResult><Credentials>{elements}</Credentials>"
        "</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
    )


def _keys(service: str) -> dict[str, str]:
    ends = datetime.now(UTC) + LIFETIME
    return {
        "AccessKeyId": f"{service}{next(_numbers)}",
        "SecretAccessKey": "s",
        "Token": "t",
        "Expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
