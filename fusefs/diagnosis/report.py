"""`fusefs report`: one archive with what a bug report needs, and without secrets.

The archive (tar.gz, for its owner alone) has a directory for each mount, with
its settings, status, metrics, stacks and the end of its log, and beside them
versions, findings about this machine, and the kernel's table of mounts. What
can't be read is named in the archive and does not fail the report. A daemon that
does not answer is sent SIGUSR1, so that its log has the stacks of its threads.

Every text passes through `redaction` on its way into the archive.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import platform
import re
import signal
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fusefs
from fusefs.diagnosis import cache_disk, machine, subject
from fusefs.diagnosis.mounted import check as findings_of
from fusefs.diagnosis.redaction import NameHashes, Secrets, known_secrets
from fusefs.diagnosis.subject import MountSubject
from fusefs.launch import log_location, registry
from fusefs.launch.control import ControlError
from fusefs.launch.mount_requests import daemon_request
from fusefs.launch.users import aws_files
from fusefs.linux import mountinfo
from fusefs.linux.fuse_connection import FUSECTL
from fusefs.settings.mount import MountSettings

# The end of each log: some 40,000 lines.
LOG_BYTES = 4 << 20
ANSWER_TIMEOUT_S = 3.0
# How long faulthandler may take to write a daemon's stacks to its log.
STACKS_S = 0.5
_PROCESS_FILES = ("status", "limits", "cgroup", "io", "schedstat", "wchan")
_MACHINE_FILES = (
    "/etc/os-release",
    "/proc/version",
    "/proc/cmdline",
    "/proc/meminfo",
    "/proc/loadavg",
    "/proc/pressure/io",
    "/proc/pressure/memory",
    "/proc/pressure/cpu",
)


class Archive:
    """The files of a report; each text loses secrets, and names where that is wanted."""

    def __init__(
        self, tar: tarfile.TarFile, top: str, known: Secrets, names: NameHashes | None
    ) -> None:
        self._tar = tar
        self._top = top
        self._secrets = known
        self._names = names

    def add_text(self, name: str, text: str, *, has_names: bool = True) -> None:
        """Add a text; one without names, such as versions, stays readable in each report."""
        text = self._secrets.remove(text)
        if self._names is not None and has_names:
            text = self._names.remove(text)
        self._add(name, text)

    def add_plain(self, name: str, value: Any, *, has_names: bool = True) -> None:
        """Add a JSON value."""
        value = self._secrets.remove_plain(value)
        if self._names is not None and has_names:
            value = self._names.remove_plain(value)
        self._add(name, json.dumps(value, indent=2) + "\n")

    def _add(self, name: str, text: str) -> None:
        data = text.encode(errors="replace")
        entry = tarfile.TarInfo(f"{self._top}/{name}")
        entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
        self._tar.addfile(entry, io.BytesIO(data))


def write(path: Path, mountpoint: Path | None, settings: MountSettings, *, redacts: bool) -> None:
    """Write the report about a mount, or all of this user, to `path`, which must not exist. Blocks.

    `settings` are those of a mount that would be made now; the machine is checked for them.

    Raises:
        OSError: the file can't be written.
        CommandError: a mountpoint is not a mount of fusefs.
    """
    subjects = subject.find_all() if mountpoint is None else [subject.find(mountpoint)]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            names = NameHashes(_names_of(subjects)) if redacts else None
            top = path.name.lstrip(".").partition(".")[0]  # also of a hidden file
            archive = Archive(tar, top, Secrets(_secrets_of(subjects)), names)
            _add_machine(archive, settings)
            for number, mounted in enumerate(subjects, start=1):
                _add_mount(archive, f"mount-{number}", mounted)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # of the archive itself
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _secrets_of(subjects: Sequence[MountSubject]) -> list[str]:
    """The secrets that this process, and those of the mounts, are known to have."""
    files = []
    for _, path in aws_files():
        with contextlib.suppress(OSError):
            files.append(path.read_text(errors="replace"))
    found = known_secrets(os.environ, files)
    for mounted in subjects:
        found += known_secrets(mounted.environment or {}, mounted.files.values())
    return found


def _names_of(subjects: Sequence[MountSubject]) -> set[str]:
    """Words of buckets, prefixes and paths, which are names also where fusefs has such a word."""
    texts = {text for mounted in subjects for text in (mounted.source, str(mounted.mountpoint))}
    for mounted in subjects:
        if mounted.settings is not None:
            texts |= {str(mounted.settings.cache_dir), str(mounted.settings.endpoint_url or "")}
    # What every one of these has.
    common = {"s3", "http", "https", "mnt", "var", "cache", "fusefs", "tmp", "home", ""}
    return {word for text in texts for word in re.split(r"[/:.\s]+", text)} - common


# --- the machine --------------------------------------------------------------


def _add_machine(archive: Archive, settings: MountSettings) -> None:
    archive.add_plain("versions.json", versions(), has_names=False)
    found = [*machine.check(None, allow_other=False), *cache_disk.check(settings)]
    archive.add_plain("doctor.json", [finding.as_plain() for finding in found])
    for name in _MACHINE_FILES:
        text = _read(Path(name))
        # The kernel's command line may name hosts and disks.
        has_names = name == "/proc/cmdline"
        archive.add_text(f"machine/{name.strip('/').replace('/', '-')}", text, has_names=has_names)
    mounts = [mount for mount in mountinfo.kernel_mounts() if mount.is_fuse]
    lines = [f"{mount.device} {mount.filesystem} {mount.source} {mount.path}" for mount in mounts]
    archive.add_text("machine/fuse-mounts", "\n".join(lines) + "\n")
    variables = sorted(name for name in os.environ if name.startswith(("FUSEFS_", "AWS_")))
    archive.add_plain("machine/environment-names.json", variables, has_names=False)


def versions() -> dict[str, Any]:
    """The versions of fusefs, Python, the kernel and the packages that fusefs needs."""
    packages = {}
    for needed in importlib.metadata.requires("fusefs") or ():
        match = re.match(r"[\w.-]+", needed)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if match is not None:
                packages[match[0]] = importlib.metadata.version(match[0])
    return {
        "fusefs": fusefs.__version__,
        "python": sys.version,
        "kernel": " ".join(os.uname()[2:]),
        "machine": platform.platform(),
        "processors": os.cpu_count(),
        "uid": os.geteuid(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "packages": packages,
    }


# --- one mount ----------------------------------------------------------------


def _add_mount(archive: Archive, folder: str, mounted: MountSubject) -> None:
    archive.add_plain(
        f"{folder}/mount.json",
        {
            "mountpoint": str(mounted.mountpoint),
            "source": mounted.source,
            "pid": mounted.pid,
            "not_answering": mounted.why_silent,
            "files_of_keys": sorted(mounted.files),
        },
    )
    if mounted.settings is not None:
        archive.add_plain(f"{folder}/settings.json", json.loads(mounted.settings.to_json()))
    found = [finding.as_plain() for finding in findings_of(mounted)]
    archive.add_plain(f"{folder}/doctor.json", found)
    archive.add_plain(f"{folder}/status.json", mounted.status)
    archive.add_plain(f"{folder}/keeper.json", mounted.keeper)
    archive.add_plain(f"{folder}/metrics.json", _ask(mounted, "metrics"))
    stacks = _ask(mounted, "stacks")
    for part in ("tasks", "threads"):
        # They have places in the code, and no values; why there are none has a path.
        text = str(stacks.get(part, stacks))
        archive.add_text(f"{folder}/stacks-{part}.txt", text, has_names=part not in stacks)
    if "tasks" not in stacks:
        _log_stacks(mounted)
    for name, text in _process_files(mounted):
        archive.add_text(f"{folder}/process/{name}", text)
    archive.add_text(f"{folder}/connection-waiting", _waiting(mounted.mountpoint))
    archive.add_text(f"{folder}/log", _log(mounted.settings))


def _ask(mounted: MountSubject, command: str) -> dict[str, Any]:
    """The daemon's answer, or why there is none."""
    if mounted.why_silent:
        return {"not_answering": mounted.why_silent}
    try:
        return daemon_request(mounted.mountpoint, {"command": command}, ANSWER_TIMEOUT_S)
    except ControlError as error:
        return {"not_answering": str(error)}


def _log_stacks(mounted: MountSubject) -> None:
    """Have a silent daemon's threads write their stacks to the log, if its process is there."""
    registration = registry.registration_of(mounted.mountpoint)
    if registration is None:
        return
    with contextlib.suppress(OSError):
        process = os.pidfd_open(registration.pid)
        try:
            if registration.is_alive():  # the descriptor is of the daemon, and of no later process
                signal.pidfd_send_signal(process, signal.SIGUSR1)
                time.sleep(STACKS_S)
        finally:
            os.close(process)


def _process_files(mounted: MountSubject) -> Iterator[tuple[str, str]]:
    if mounted.pid is None:
        return
    for name in _PROCESS_FILES:
        yield name, _read(Path(f"/proc/{mounted.pid}/{name}"))


def _waiting(mountpoint: Path) -> str:
    """The number of requests without an answer, which the kernel counts."""
    mount = mountinfo.find_mount(mountpoint)
    return _read(Path(FUSECTL, str(mount.connection), "waiting")) if mount is not None else ""


def _log(settings: MountSettings | None) -> str:
    """The end of the mount's log."""
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


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        return f"{error.strerror}\n"
