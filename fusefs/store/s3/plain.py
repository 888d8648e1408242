"""The needs of requests to S3, where they are known without botocore.

Importing botocore and making its client of S3 takes longer than all else of a mount's start.
Where the endpoint is named, no configuration of AWS's is there and nothing in the environment
changes how requests are made, everything that botocore would find is known beforehand: the
address, the region of the signature, and often the keys. Where anything else is found, botocore
decides as ever.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from fusefs.store.http import redirects

DEFAULT_REGION = "us-east-1"
# What these say is where keys come from, or is looked at here.
_KNOWN_VARIABLES = frozenset(
    (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_CA_BUNDLE",
        "AWS_CONFIG_FILE",
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_EC2_METADATA_DISABLED",
        "AWS_ROLE_ARN",
        "AWS_ROLE_SESSION_NAME",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_STS_REGIONAL_ENDPOINTS",
        "AWS_ENDPOINT_URL_STS",
    )
)
# The same of a profile in AWS's files.
_KNOWN_IN_PROFILE = frozenset(
    ("aws_access_key_id", "aws_secret_access_key", "aws_session_token", "region", "output")
)
_FILES = {
    "AWS_CONFIG_FILE": "~/.aws/config",
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
}


class FrozenKeys(NamedTuple):
    """As botocore's ReadOnlyCredentials."""

    access_key: str
    secret_key: str
    token: str | None


class EnvironmentKeys:
    """Keys as the environment has them, with the interface of botocore's Credentials."""

    method = "env"

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.frozen = FrozenKeys(
            environment["AWS_ACCESS_KEY_ID"],
            environment["AWS_SECRET_ACCESS_KEY"],
            environment.get("AWS_SESSION_TOKEN") or None,
        )

    def get_frozen_credentials(self) -> FrozenKeys:
        return self.frozen


def is_plain_endpoint(url: str | None, addressing: str, environment: Mapping[str, str]) -> bool:
    """True if requests go to this endpoint with the bucket in the path, as far as is seen here."""
    if url is None or addressing == "virtual" or redirects.is_aws(url):
        return False
    address = urlsplit(url)
    if address.path.strip("/") or address.query or "@" in address.netloc:
        return False
    names = {name for name in environment if name.startswith("AWS_")}
    return names <= _KNOWN_VARIABLES


def is_plain_profile(profile: Mapping[str, Any]) -> bool:
    """True if what botocore has read of AWS's files says nothing about how requests are made."""
    return profile.keys() <= _KNOWN_IN_PROFILE


def has_files(environment: Mapping[str, str]) -> bool:
    """True if there is one of AWS's files, which botocore would read."""
    for variable, usual in _FILES.items():
        path = environment.get(variable) or os.path.expanduser(usual)
        if path != os.devnull and os.path.exists(path):
            return True
    return False


def has_keys(environment: Mapping[str, str]) -> bool:
    """True if the environment has keys, which botocore takes before all others."""
    return all(environment.get(one) for one in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
