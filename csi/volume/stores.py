"""The S3 stores that volumes may be in, from a file of the driver's configuration.

Requests to a store are signed with the driver's own or a pod's credentials. So the author of a
PersistentVolume or a pod chooses a store by its name and cannot write an address. The store `aws`
always exists.

The file is TOML:

    [stores.minio]
    endpoint-url = "https://minio.storage.svc:9000"
    region = "us-east-1"            # optional, as all that follow
    addressing = "path"             # or virtual, auto
    ca-bundle = "/etc/fusefs-csi/minio-ca.pem"
    sts-url = "https://minio.storage.svc:9000"
    audience = "minio"              # of the tokens that the STS takes; needed for roleArn

Addresses at which a cloud gives a machine its credentials are refused, both when the file is read
and when a host name is looked up.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from csi.errors import InvalidArgumentError, UnavailableError
from fusefs.settings.types import URL, WORD, Addressing, choice

log = logging.getLogger(__name__)

AWS = "aws"
AWS_AUDIENCE = "sts.amazonaws.com"
# Short names, because a volume id of at most 128 bytes has names of store, bucket and volume.
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,19}")
# A region becomes part of a host name, and must not be a number.
_REGION = re.compile(r"(?!\d+$)[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
_METADATA_HOSTS = {"metadata", "metadata.google.internal", "instance-data"}
# Metadata addresses that are not link-local: AWS (IPv6), Alibaba Cloud, Azure, Oracle.
_METADATA_ADDRESSES = {
    ipaddress.ip_address(text)
    for text in ("fd00:ec2::254", "fd00:ec2::23", "100.100.100.200", "168.63.129.16", "192.0.0.192")
}


class ConfigurationError(ValueError):
    """An administrator's file cannot be used; the message is one line for the administrator."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The addresses of a store. `endpoint_url` is None for AWS; the URLs have no path.

    `sts_url` is the STS that exchanges tokens for credentials. If it is None, AWS' STS of the
    region is used for AWS, and other stores accept no tokens. `audience` is the tokens' audience,
    which differs for each STS: a store that got tokens for AWS' STS could exchange them there.
    """

    name: str
    endpoint_url: str | None = None
    region: str | None = None
    addressing: Addressing = Addressing.AUTO
    ca_bundle: Path | None = None
    sts_url: str | None = None
    audience: str = AWS_AUDIENCE

    def check_address(self) -> None:
        """Look up the store's hosts and check their addresses. Blocks.

        Raises:
            InvalidArgumentError: a host has an address to which requests are never sent.
            UnavailableError: a host's name cannot be resolved now.
        """
        for url in filter(None, (self.endpoint_url, self.sts_url)):
            for address in _addresses(url):
                if is_forbidden(address):
                    raise InvalidArgumentError(
                        f"store {self.name}: {url} is at {address}, a link-local or metadata"
                        " address"
                    )


@dataclass(frozen=True, slots=True)
class Stores:
    """The S3 servers that a volume may choose by name: `aws` and those of the configuration."""

    by_name: Mapping[str, StoreSettings]

    def choose(self, name: str) -> StoreSettings:
        """Return the store of this name, or raise InvalidArgumentError."""
        if name not in self.by_name:
            raise InvalidArgumentError(f"store: no store {name!r} is configured")
        return self.by_name[name]


def read_stores(path: Path | None) -> Stores:
    """Read the stores from the file at `path`; if it is None, return only `aws`.

    Raises:
        ConfigurationError: the file cannot be read or used.
    """
    if path is None:
        return _stores([])
    try:
        return _stores(_store(name, table) for name, table in read_tables(path, "stores").items())
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def read_tables(path: Path, name: str) -> dict[str, Any]:
    """Return the tables `[name.KEY]` of a TOML file, by KEY.

    Raises:
        ValueError: the file cannot be read, or has any other entry.
    """
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(error.strerror) from error
    tables = content.pop(name, {})
    if content or not isinstance(tables, dict):
        raise ValueError(f"{min(content, default=name)}: only [{name}.NAME] is known")
    for key, table in tables.items():
        if not isinstance(table, dict):
            raise ValueError(f"{name}.{key}: is no table")
    return tables


def is_region(text: str) -> bool:
    """True if `text` has the form of a region's name."""
    return _REGION.fullmatch(text) is not None


def is_forbidden(host: str) -> bool:
    """True if `host` is an IP address to which requests are never sent."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False  # a host name
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped:
        found = found.ipv4_mapped
    return (
        found.is_link_local
        or found.is_multicast
        or found.is_unspecified
        or found in _METADATA_ADDRESSES
    )


def _stores(made: Iterable[StoreSettings]) -> Stores:
    return Stores({AWS: StoreSettings(AWS), **{store.name: store for store in made}})


def _store(name: str, table: dict[str, Any]) -> StoreSettings:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"stores.{name}: a name has at most 20 characters, which are a-z, 0-9 and -"
        )
    known: dict[str, Any] = {
        "endpoint-url": read_url,
        "region": _read_region,
        "addressing": choice(Addressing).read,
        "ca-bundle": _read_file,
        "sts-url": read_url,
        "audience": WORD.read,
    }
    read: dict[str, Any] = {}
    for key, text in table.items():
        if key not in known or not isinstance(text, str):
            raise ValueError(f"stores.{name}.{key}: there is no such setting, or it is no string")
        try:
            read[key.replace("-", "_")] = known[key](text)
        except ValueError as error:
            raise ValueError(f"stores.{name}.{key}: {error}") from None
    if name != AWS and "endpoint_url" not in read:
        raise ValueError(f"stores.{name}: has no endpoint-url")
    if name != AWS and "sts_url" in read and "audience" not in read:
        # No error is raised, because volumes with other credentials do not need the STS.
        del read["sts_url"]
        log.error(
            "stores.%s: no volume with a roleArn mounts: sts-url needs an audience of the store's"
            " own, which the component service-account-tokens has to request as well",
            name,
        )
    return StoreSettings(name, **read)


def read_url(text: str) -> str:
    """Check the URL of a host and return it without a path.

    Raises:
        ValueError: the URL is invalid, or its host must never get requests.
    """
    parts = urlsplit(URL.read(text))
    if parts.username or parts.password or parts.query or parts.fragment or parts.path.strip("/"):
        raise ValueError(f"{text}: has to be only a scheme, a host and a port")
    if parts.netloc.endswith(":") or (parts.port is not None and parts.port == 0):
        raise ValueError(f"{text}: has no port that can be connected to")
    host = (parts.hostname or "").rstrip(".")
    if host in _METADATA_HOSTS or is_forbidden(host):
        raise ValueError(f"{text}: a link-local or metadata address")
    return f"{parts.scheme}://{parts.netloc}"


def _read_region(text: str) -> str:
    if not is_region(text):
        raise ValueError(f"{text}: is no region")
    return text


def _read_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise ValueError(f"{text}: is no file")
    return path


def _addresses(url: str) -> set[str]:
    host = urlsplit(url).hostname or ""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UnavailableError(f"{url}: the name is not known: {error}") from error
    return {str(address[0]) for *_, address in found}
