"""The secrets of a cluster cache: the credentials of its bucket, and the key of its domain.

Both are in files of the user who mounts. A daemon, which may not read these files, gets their
content in memory; a secret is never a setting or an argument.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path

from fusefs.settings.mount import MountSettings

# Environment variables of a daemon: the paths of the contents in memory.
_KEY = "FUSEFS_CLUSTER_CACHE_KEY_CONTENT"
_CREDENTIALS = "FUSEFS_CLUSTER_CACHE_CREDENTIALS_CONTENT"
LEAST_KEY = 16
_MOST_KEY = 4096
_PROFILE = "default"
# The environment variables, by their names in a credentials file.
_NAMES = {
    "aws_access_key_id": "AWS_ACCESS_KEY_ID",
    "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "aws_session_token": "AWS_SESSION_TOKEN",
}


class AccessError(ValueError):
    """A file is invalid or can't be read; the message is one line, without the file's content."""


def read(settings: MountSettings) -> dict[str, str]:
    """Return the secrets to hand to a daemon: file contents, by environment variable. Blocks.

    In a daemon, which may start another keeper, these are the contents that the daemon was given.

    Raises:
        AccessError: a file is invalid or can't be read.
    """
    handed = {}
    if settings.cluster_cache_key is not None:
        handed[_KEY] = base64.b64encode(key(settings)).decode()
    if settings.cluster_cache_credentials is not None:
        path = _credentials_file(settings.cluster_cache_credentials)
        _read_credentials(path)
        handed[_CREDENTIALS] = _content(path).decode()
    return handed


def key(settings: MountSettings) -> bytes:
    """Return the domain's key, from memory or else from its file; b"" if no file is set.

    Raises:
        AccessError: the key can't be read, or is too short or too long.
    """
    path, handed = settings.cluster_cache_key, os.environ.get(_KEY)
    if path is None:
        return b""
    if handed is not None:
        return base64.b64decode(_content(Path(handed)))
    content = _content(path).rstrip(b"\r\n")
    if not LEAST_KEY <= len(content) <= _MOST_KEY:
        raise AccessError(f"{path}: a key has {LEAST_KEY} to {_MOST_KEY} bytes")
    return content


def credentials(settings: MountSettings) -> Mapping[str, str] | None:
    """Return the bucket's credentials by environment variable; None means the mount's own.

    Raises:
        AccessError: the file has no credentials.
    """
    if settings.cluster_cache_credentials is None:
        return None
    return _read_credentials(_credentials_file(settings.cluster_cache_credentials))


def _credentials_file(path: Path) -> Path:
    return Path(os.environ.get(_CREDENTIALS, path))


def _read_credentials(path: Path) -> Mapping[str, str]:
    import configparser  # slow to import, and most mounts have no such file

    parser = configparser.RawConfigParser()
    try:
        parser.read_string(_content(path).decode())
        section = parser[_PROFILE]
    except (UnicodeDecodeError, configparser.Error, KeyError):
        raise AccessError(f"{path}: has no profile [{_PROFILE}]") from None
    found = {variable: section[name] for name, variable in _NAMES.items() if section.get(name)}
    if len(found.keys() & {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}) < 2:
        raise AccessError(
            f"{path}: the profile has no aws_access_key_id or no aws_secret_access_key"
        )
    return found


def _content(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 16)
    except OSError as error:
        raise AccessError(f"{path} cannot be read: {error.strerror}") from None
