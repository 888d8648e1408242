"""Settings of requests to one bucket: address, identity, and properties of new objects.

Directory buckets (S3 Express One Zone) are refused: they need sessions, which are not implemented.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fusefs.settings.types import Encryption
from fusefs.store.customer_key import CustomerKey
from fusefs.store.errors import MisconfiguredError, StoreError, UnsupportedError

if TYPE_CHECKING:
    from fusefs.settings.mount import MountSettings

_ENCRYPTION = "x-amz-server-side-encryption"
# Endings of names that AWS reserves for directory buckets and their access points.
DIRECTORY_BUCKETS = ("--x-s3", "--xa-s3")


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of new objects; None leaves a choice to the bucket. `kms_key`: id, ARN or alias."""

    storage_class: str | None = None
    encryption: str | None = None
    kms_key: str | None = None
    acl: str | None = None

    @classmethod
    def of(cls, settings: MountSettings) -> WriteOptions:
        """Return the options that a mount's settings choose."""
        # A KMS key without an encryption implies SSE-KMS.
        encryption = settings.encryption or (Encryption.KMS if settings.kms_key else None)
        return cls(settings.storage_class, encryption, settings.kms_key, settings.acl)

    def headers(self) -> dict[str, str]:
        """Return the options' headers, with names in lower case."""
        chosen = {
            "x-amz-storage-class": self.storage_class,
            _ENCRYPTION: self.encryption,
            f"{_ENCRYPTION}-aws-kms-key-id": self.kms_key,
            # Bucket keys: one request to KMS for many objects. Double encryption has none.
            f"{_ENCRYPTION}-bucket-key-enabled": "true" if self.encryption == "aws:kms" else None,
            "x-amz-acl": self.acl,
        }
        return {name: text for name, text in chosen.items() if text is not None}


NO_OPTIONS = WriteOptions()


@dataclass(frozen=True, slots=True)
class S3Settings:
    """The bucket, its address, and the identity and time-outs of its requests.

    `keys` are fixed credentials, by the names of the environment's variables, instead of those that
    botocore would find. They and `customer_key` are secrets, and not in the repr. With
    `ignores_configured_endpoints`, AWS's variables and files may not set the host.
    """

    bucket: str
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    keys: Mapping[str, str] | None = field(default=None, repr=False)
    anonymous: bool = False
    addressing: str = "auto"
    max_connections: int = 32
    max_streams: int = 32
    retry_time_s: float = 60.0
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 20.0
    ca_bundle: str | None = None
    requester_pays: bool = False
    write_options: WriteOptions = NO_OPTIONS
    customer_key: CustomerKey | None = None
    fips: bool = False
    dual_stack: bool = False
    ignores_configured_endpoints: bool = False
    part_size: int = 8 << 20


def obstacle(bucket: str, *, is_aws: bool) -> StoreError | None:
    """Return an error for a directory bucket of AWS, which cannot be mounted; else None."""
    if is_aws and bucket.endswith(DIRECTORY_BUCKETS):
        sentence = "directory buckets (S3 Express One Zone) take sessions, which mounts do not make"
        return UnsupportedError(sentence)
    return None


def customer_key_obstacle(url: str, proxy: str | None) -> StoreError | None:
    """Return an error if a customer key could be read on its way to the endpoint, else None."""
    address = urlsplit(url)
    if address.scheme == "https" or (proxy is None and _is_loopback(address.hostname or "")):
        return None
    return MisconfiguredError(f"a customer key is sent over TLS alone, and {url} has none")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
