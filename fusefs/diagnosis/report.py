"""`fusefs report`: writes an archive for a bug report, without secrets.

The archive (tar.gz, readable only by its owner) has versions, and a directory for each mount with
its settings, its status and the end of its log. If a log can't be read, the archive has the error.

Every text passes through `redaction` on its way into the archive.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fusefs
from fusefs.diagnosis import subject
from fusefs.diagnosis.redaction import Secrets, known_secrets
from fusefs.diagnosis.subject import MountSubject
from fusefs.launch import log_location
from fusefs.launch.users import aws_files
from fusefs.settings.mount import MountSettings

# The number of bytes from the end of each log: some 40,000 lines.
LOG_BYTES = 4 << 20


def write(path: Path, mountpoint: Path | None) -> None:
    """Write a report about a mount, or (None) about all mounts of this user. Blocks.

    Raises:
        OSError: the file at `path` exists, or can't be written.
        CommandError: `mountpoint` is not a mount of fusefs.
    """
    subjects = subject.find_all() if mountpoint is None else [subject.find(mountpoint)]
    files = []
    for _, file_path in aws_files():
        with contextlib.suppress(OSError):
            files.append(file_path.read_text(errors="replace"))
    secrets = known_secrets(os.environ, files)
    for mounted in subjects:
        secrets += known_secrets(mounted.environment or {}, mounted.files.values())
    known = Secrets(secrets)
    top = path.name.lstrip(".").partition(".")[0]  # also for a hidden file
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            for name, content in _files(subjects):
                _add(tar, f"{top}/{name}", known, content)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # from writing the archive
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _add(tar: tarfile.TarFile, name: str, known: Secrets, content: Any) -> None:
    """Add a file to the archive: a text, or another value as JSON, without its secrets."""
    if isinstance(content, str):
        text = known.remove(content)
    else:
        text = json.dumps(known.remove_plain(content), indent=2) + "\n"
    data = text.encode(errors="replace")
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
    tar.addfile(entry, io.BytesIO(data))


def _files(subjects: Sequence[MountSubject]) -> Iterator[tuple[str, Any]]:
    yield "versions.json", versions()
    for number, mounted in enumerate(subjects, start=1):
        folder = f"mount-{number}"
        if mounted.settings is not None:
            yield f"{folder}/settings.json", mounted.settings.as_texts()
        yield f"{folder}/status.json", mounted.status
        yield f"{folder}/log", _log(mounted.settings)


def versions() -> dict[str, Any]:
    """Return the versions of fusefs, Python, the kernel and all packages of this Python."""
    return {
        "fusefs": fusefs.__version__,
        "python": sys.version,
        "kernel": " ".join(os.uname()[2:]),
        "processors": os.cpu_count(),
        "uid": os.geteuid(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "packages": {one.name: one.version for one in importlib.metadata.distributions()},
    }


def _log(settings: MountSettings | None) -> str:
    if settings is None:
        return "the settings of this mount are not known\n"
    path = log_location.path_of(settings)
    if path is None:
        return "the log of a mount in the foreground is its standard error\n"
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_BYTES))
            return log.read(LOG_BYTES).decode(errors="replace")
    except OSError as error:
        return f"{path}: {error.strerror}\n"
