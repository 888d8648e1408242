"""The certificates that are trusted for S3, the same for every library that opens a connection.

botocore and libcurl have lists and variables of their own. Here the first of these is used:

1. `--ca-bundle`;
2. `AWS_CA_BUNDLE`, or `ca_bundle` of the AWS configuration, and then
   `REQUESTS_CA_BUNDLE`, as botocore does;
3. `SSL_CERT_FILE` and `SSL_CERT_DIR`, both if both are set, as OpenSSL does
   (SSL_CTX_set_default_verify_paths(3));
4. the system's list, which includes authorities that an administrator installed;
5. botocore's list, on a machine without any.

All libraries get the path of one file; anything else is first copied to a file in memory.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fusefs.store.errors import StoreError

# Paths of the system's list: Debian, Fedora, SUSE, RHEL's older path, Alpine.
SYSTEM_FILES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
)
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Trust:
    """Trusted certificates in the file `path`, which exists as long as this object."""

    path: str
    _memory: object = None  # keeps the file in memory open, if there is one


def find(
    bundle: str | None, environment: Mapping[str, str], configured: str | None = None
) -> Trust:
    """Return the certificates to trust. Blocks.

    `bundle` is the path in the settings, `configured` is botocore's `ca_bundle`.

    Raises:
        StoreError: the configured file can't be read, or has no certificate.
    """
    named = (
        (bundle, "--ca-bundle"),
        (configured, "AWS_CA_BUNDLE or the AWS configuration"),
        (environment.get("REQUESTS_CA_BUNDLE"), "REQUESTS_CA_BUNDLE"),
    )
    for path, origin in named:
        if path:
            return _trust([path], origin)
    # A list of directories separated by colons, like PATH.
    directories = environment.get("SSL_CERT_DIR", "").split(":")
    if files := list(filter(None, [environment.get("SSL_CERT_FILE"), *directories])):
        # As in OpenSSL, one of them may be missing.
        found = [path for path in files if os.path.exists(path)]
        return _trust(found or files[:1], "SSL_CERT_FILE or SSL_CERT_DIR")
    return _system()


def _system() -> Trust:
    defaults = ssl.get_default_verify_paths()
    for path in (*SYSTEM_FILES, defaults.openssl_cafile):
        if os.path.isfile(path):
            return Trust(path)
    if os.path.isdir(defaults.openssl_capath) and os.listdir(defaults.openssl_capath):
        return _trust([defaults.openssl_capath], "the system's certificates")
    from botocore.httpsession import DEFAULT_CA_BUNDLE

    return Trust(DEFAULT_CA_BUNDLE)


def _trust(paths: list[str], origin: str) -> Trust:
    """Return the distinct certificates in files and folders; errors name the setting `origin`."""
    found: dict[bytes, None] = {}
    try:
        for path in map(Path, paths):
            # OpenSSL expects hashes as names; files of a mounted ConfigMap have other names.
            for file in sorted(path.iterdir()) if path.is_dir() else [path]:
                # There may also be keys, which are not readable for everybody.
                if file == path or (file.is_file() and os.access(file, os.R_OK)):
                    found |= dict.fromkeys(_CERTIFICATE.findall(file.read_bytes()))
    except OSError as error:
        sentence = f"the CA bundle {path} ({origin}) can't be read: {error.strerror}"
        raise StoreError(sentence) from error
    if not found:
        raise StoreError(f"the CA bundle {' '.join(paths)} ({origin}) has no certificate")
    if len(paths) == 1 and not os.path.isdir(paths[0]):
        return Trust(paths[0])
    memory = os.fdopen(os.memfd_create("certificates"), "wb")
    memory.write(b"\n".join(found) + b"\n")
    memory.flush()
    return Trust(f"/proc/self/fd/{memory.fileno()}", memory)
