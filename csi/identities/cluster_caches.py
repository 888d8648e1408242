"""Cluster caches: S3 stores near the nodes, each for the volumes of one cache domain.

Anybody who may write the blocks of a cluster cache and has the domain's key can forge the data that
readers get. So the administrator of the nodes maps domains to cluster caches in a TOML file, and a
volume names only its domain (`cacheDomain`; options.py):

    [cluster-caches.training]
    url = "s3://fusefs-cache/training"
    endpoint = "http://seaweedfs-s3.fusefs-cache:8333"   # AWS without it
    credentials-file = "/etc/fusefs-csi-cluster-caches/training/credentials"
    key-file = "/etc/fusefs-csi-cluster-caches/training/key"

`"*"` in place of a domain's name is for volumes without a domain, except inline volumes. The driver
reads the secrets in the two files each time that it plans a mount, because a mounted Kubernetes
Secret may change. Each mount has a copy of its first secrets (credentials.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from csi.errors import FailedPreconditionError
from csi.volume.options import anywhere, is_cache_domain
from csi.volume.stores import ConfigurationError, read_tables, read_url
from fusefs.cluster_cache.access import AccessError as ClusterCacheAccessError
from fusefs.cluster_cache.access import read as check_cluster_cache
from fusefs.settings.mount import RawValue, SettingsError, build

# The entry for volumes without a cacheDomain; no domain's name may have this character.
OTHERS = "*"
# The mount settings, by their names in the file.
_SETTINGS = {
    "url": "cluster_cache",
    "endpoint": "cluster_cache_endpoint",
    "credentials-file": "cluster_cache_credentials",
    "key-file": "cluster_cache_key",
}
_OF_SECRETS = ("cluster_cache_credentials", "cluster_cache_key")


@dataclass(frozen=True, slots=True)
class CacheSecrets:
    """The contents of a cluster cache's two files. Neither `repr` nor `str` shows them."""

    credentials: bytes = field(repr=False)
    key: bytes = field(repr=False)

    @property
    def proof(self) -> str:
        """A digest of credentials and key together, to be used only as input of a keyed hash."""
        lengths = len(self.credentials).to_bytes(8)
        return hashlib.sha256(lengths + self.credentials + self.key).hexdigest()


@dataclass(frozen=True, slots=True)
class ClusterCacheConfig:
    """The cluster cache of one cache domain; `texts` has a mount's settings for it, by name."""

    domain: str
    texts: Mapping[str, str]

    @property
    def settings(self) -> dict[str, str]:
        """The settings without the paths of the secrets, of which each mount has a copy."""
        return {name: text for name, text in self.texts.items() if name not in _OF_SECRETS}

    def check(self, origins: Mapping[str, str]) -> None:
        """Check the settings and files; `origins` maps settings to their names in errors. Blocks.

        Raises:
            SettingsError: a setting cannot be read.
            ClusterCacheAccessError: a file does not hold its secret.
        """
        layer = {name: RawValue(text, origins[name]) for name, text in self.texts.items()}
        check_cluster_cache(build(layer, anywhere()))

    def secrets(self) -> CacheSecrets:
        """Read the credentials and the key; FailedPreconditionError if that fails. Blocks."""
        try:
            self.check({setting: name for name, setting in _SETTINGS.items()})
            credentials, key = (Path(self.texts[name]).read_bytes() for name in _OF_SECRETS)
            return CacheSecrets(credentials, key)
        except ClusterCacheAccessError as error:
            why = str(error)
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
        raise FailedPreconditionError(f"the cluster cache of {self.domain}: {why}")


@dataclass(frozen=True, slots=True)
class ClusterCaches:
    """The cluster caches of a node, by domain."""

    by_domain: Mapping[str, ClusterCacheConfig] = field(default_factory=dict)

    def of(self, domain: str | None, *, is_inline: bool) -> ClusterCacheConfig | None:
        """Return the cluster cache for a volume's cacheDomain, or None; `domain` may be None."""
        if domain is None and is_inline:
            return None
        return self.by_domain.get(OTHERS if domain is None else domain)


def read_cluster_caches(path: Path | None) -> ClusterCaches:
    """Read the cluster caches from the file at `path`; empty if `path` is None. Blocks.

    Raises:
        ConfigurationError: the file, or a file that it names, cannot be read or used.
    """
    if path is None:
        return ClusterCaches()
    try:
        tables = read_tables(path, "cluster-caches")
        return ClusterCaches({name: _cluster_cache(name, table) for name, table in tables.items()})
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _cluster_cache(domain: str, table: dict[str, Any]) -> ClusterCacheConfig:
    where = f"cluster-caches.{domain}"
    if domain != OTHERS and not is_cache_domain(domain):
        raise ValueError(f"{where}: is no cacheDomain")
    for name, value in table.items():
        if name not in _SETTINGS or not isinstance(value, str):
            raise ValueError(f"{where}.{name}: there is no such setting, or it is no string")
    for name in sorted(_SETTINGS.keys() - {"endpoint"} - table.keys()):
        raise ValueError(f"{where}: has no {name}")
    if "endpoint" in table:
        try:
            read_url(table["endpoint"])
        except ValueError as error:
            raise ValueError(f"{where}.endpoint: {error}") from None
    cache = ClusterCacheConfig(domain, {_SETTINGS[name]: value for name, value in table.items()})
    origins = {setting: f"{where}.{name}" for name, setting in _SETTINGS.items()}
    try:
        cache.check(origins)
    except (SettingsError, ClusterCacheAccessError) as error:
        raise ValueError(str(error)) from None
    return cache
