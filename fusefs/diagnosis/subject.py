"""The mounts that `fusefs doctor` and `fusefs report` describe.

A mount's keeper gives the mount's settings, and the contents of the daemon's AWS configuration
files; the daemon's environment is read from the keeper's process, if this user may. So the checks
send requests as the daemon does, not with the settings of the command's shell.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusefs.diagnosis.mount_status import mount_status
from fusefs.launch import registry
from fusefs.launch.control import CommandError, ControlError
from fusefs.launch.mount_requests import keeper_pid, keeper_request
from fusefs.settings.mount import MountSettings, SettingsError
from fusefs.settings.types import MountSource

ANSWER_TIMEOUT_S = 2.0
# The variables that affect connections and credentials, in three kinds.
_PREFIXES = ("AWS_",)
_NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "REQUESTS_CA_BUNDLE")
_FILES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "HOME")


@dataclass(slots=True)
class MountSubject:
    """One mount, as its processes describe it; `status` is as in `fusefs status --json`.

    `settings` is None if no keeper gives them. `files` has the contents of AWS configuration files
    by their variables; `environment` has the daemon's variables that affect requests (None: not
    readable). Both may contain secrets.
    """

    mountpoint: Path
    status: dict[str, Any]
    settings: MountSettings | None = None
    files: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] | None = None


def find(mountpoint: Path) -> MountSubject:
    """Return a mount as its processes describe it; wait a few seconds at most for each process.

    Raises CommandError if `mountpoint` is not a mount of fusefs.
    """
    subject = MountSubject(mountpoint, mount_status(mountpoint))
    # A mount under pyfuse3 has no keeper.
    with contextlib.suppress(ControlError, SettingsError, ValueError, KeyError):
        answer = keeper_request(subject.mountpoint, {"do": "settings"}, ANSWER_TIMEOUT_S)
        given = json.loads(answer["settings"])
        subject.files = dict(given.get("files", {}))
        subject.settings = MountSettings.from_texts(given["settings"])
        if "environment" in given:
            subject.environment = _chosen(given["environment"])
    if subject.environment is None and (pid := keeper_pid(subject.mountpoint)) is not None:
        subject.environment = environment_of(pid)
    return subject


def find_all() -> list[MountSubject]:
    """Return all mounts of this user as their processes describe them, except ended mounts."""
    found = []
    for registration in registry.all_mounts():
        with contextlib.suppress(CommandError):
            found.append(find(Path(registration.mountpoint)))
    return found


def environment_of(pid: int) -> dict[str, str] | None:
    """Return a process's variables that affect requests; None if they are not readable."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (os.fsdecode(entry).partition("=") for entry in content.split(b"\0") if entry)
    return _chosen({name: value for name, _, value in pairs})


def _chosen(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if is_about_requests(name)}


def is_about_requests(name: str) -> bool:
    """True if an environment variable affects connections or credentials."""
    return name.startswith(_PREFIXES) or name.upper() in _NAMES or name in _FILES


@contextlib.contextmanager
def as_daemon(subject: MountSubject) -> Iterator[None]:
    """Give this process, during the block, the daemon's variables that affect requests."""
    before, fds = dict(os.environ), []
    try:
        if subject.environment is not None:
            for name in [name for name in os.environ if is_about_requests(name)]:
                del os.environ[name]
            os.environ.update(subject.environment)
        for variable, content in subject.files.items():
            fd = os.memfd_create(variable)  # in memory, as it has secrets
            fds.append(fd)
            os.write(fd, content.encode())
            os.environ[variable] = f"/proc/self/fd/{fd}"
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for fd in fds:
            os.close(fd)


def source_of(subject: MountSubject) -> MountSource:
    """Return the bucket and prefix in a mount's status, for a mount without known settings."""
    bucket, _, prefix = str(subject.status["source"]).removeprefix("s3://").partition("/")
    return MountSource(bucket, prefix)
