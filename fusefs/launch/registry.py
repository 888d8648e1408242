"""The registry of this user's mounts and their daemons.

The runtime directory has one directory for each mount, named by a hash of the
mountpoint, with `mount.json` (the daemon's process) and `status.sock` (see `control`).
Root's is /run/fusefs. Another user's is $XDG_RUNTIME_DIR/fusefs or, without this
variable, /tmp/fusefs-UID; a search looks in both, and in /run/user/UID/fusefs. The
kernel's table (linux/mountinfo.py) tells what is mounted. This module and the commands
never call stat(2) or open(2) on a mountpoint: both block while the mount's daemon hangs.

A record identifies its daemon by pid and start time, as another process may get the
pid later. The next process that finds the record of a dead daemon removes it, unless a
process listens on its socket: a daemon in another PID namespace looks dead as well.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fusefs.keeper.exchange import peer
from fusefs.linux import files, mountinfo

RUNTIME_VARIABLE = "FUSEFS_RUNTIME_DIRECTORY"
# Parents of the runtime directories of users without and with a login session.
TEMPORARY = "/tmp"
SESSIONS = "/run/user"
# The link to the directory of a mount's files that are not uploaded yet.
STAGING = "staging"
_MAX_RECORD = 1 << 16  # bytes
MAX_LINKS = 40  # as many symbolic links as the kernel itself follows


class MountsError(Exception):
    """The registry cannot be used; the message is for the user."""


# --- paths ---------------------------------------------------------------------


def resolve(path: Path) -> Path:
    """Return `path` made absolute and free of symbolic links, as paths in mountinfo are.

    Only readlink is used, because the kernel answers it for the root of a mount
    without asking the daemon. Parts that do not exist stay as they are.
    """
    resolved = Path("/")
    todo = list(reversed(files.absolute(path).parts[1:]))
    links = 0
    while todo:
        part = todo.pop()
        if part == "..":
            resolved = resolved.parent
            continue
        target = _link_target(resolved / part)
        if target is None:
            resolved /= part
            continue
        links += 1
        if links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        if target.is_absolute():
            resolved = Path("/")
        todo.extend(reversed([name for name in target.parts if name != "/"]))
    return resolved


def _link_target(path: Path) -> Path | None:
    try:
        return Path(os.readlink(path))
    except OSError:
        return None


# --- processes ----------------------------------------------------------------


def start_time(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot; None for no process or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses, which may contain any characters.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _user_of(pid: int) -> int | None:
    """Return a process's real uid, even if root owns its /proc/PID; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.partition("\nUid:")[2].split()[0])


# --- records of the daemons ---------------------------------------------------


class Registration(NamedTuple):
    """One mount and its daemon. `started` is the daemon's start time in ticks."""

    mountpoint: str
    source: str
    pid: int
    started: int

    def is_alive(self) -> bool:
        """True if the process `pid` is the daemon, by its start time and its user."""
        # The user is checked because the directory's owner may have written any pid.
        if start_time(self.pid) != self.started:
            return False
        owner = server_of(Path(self.mountpoint))
        return owner in (None, os.geteuid()) or _user_of(self.pid) == owner

    @property
    def directory(self) -> Path:
        return directory_of(Path(self.mountpoint))

    @property
    def socket(self) -> Path:
        return self.directory / "status.sock"


def use_runtime_directory(directory: Path) -> None:
    """Set the runtime directory of this process and of the processes that it starts."""
    os.environ[RUNTIME_VARIABLE] = os.fspath(directory)


def runtime_directory() -> Path:
    """Return the directory for records of new mounts; daemons get it from the environment."""
    return Path(_runtime_paths()[0])


def _runtime_paths() -> list[str]:
    """Return the runtime directories that may have this user's mounts; new mounts use the first.

    Jobs of cron and of batch systems have no XDG_RUNTIME_DIR, or that of the submitting machine,
    while the user's shell on this machine may have one.
    """
    if given := os.environ.get(RUNTIME_VARIABLE):
        return [given]
    uid = os.geteuid()
    if uid == 0:
        return ["/run/fusefs"]
    base = os.environ.get("XDG_RUNTIME_DIR")
    own = [f"{base}/fusefs"] if base and os.path.isdir(base) else []
    return list(dict.fromkeys([*own, *_paths_of(uid)]))


def _paths_of(uid: int) -> list[str]:
    """Return the default runtime directories of an ordinary user."""
    return [f"{TEMPORARY}/fusefs-{uid}", f"{SESSIONS}/{uid}/fusefs"]


def socket_of(mountpoint: Path, uid: int) -> Path | None:
    """Return the status socket of another user's mount, for root; None if there is none."""
    for place in map(Path, _paths_of(uid)):
        with suppress(OSError):
            path = place / _hashed(mountpoint) / "status.sock"
            if place.lstat().st_uid == uid and stat.S_ISSOCK(path.lstat().st_mode):
                return path
    return None


def _places() -> Iterator[Path]:
    """Yield the runtime directories of this user that are safe to read."""
    is_given = os.environ.get(RUNTIME_VARIABLE)
    for place in map(Path, _runtime_paths()):
        # Another user may have made the directory in /tmp.
        with suppress(OSError):
            found = place.lstat()
            if is_given or (stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()):
                yield place


def _place_of(mountpoint: Path) -> Path:
    """Return the runtime directory of a mount's record or keeper socket, or one without them."""
    name = _hashed(mountpoint)
    for place in _places():
        if (place / name).exists() or (place / f"{name}.keeper").exists():
            return place
    return Path(_runtime_paths()[-1])  # not the one in /tmp, where others may make it now


def _hashed(mountpoint: Path) -> str:
    return hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16]


def mount_directory(mountpoint: Path) -> Path:
    """Make a mount's directory in the runtime directory, and return it; raises MountsError."""
    directory = runtime_directory() / _hashed(mountpoint)
    # Daemons of other users need to pass through root's runtime directory.
    _make(directory.parent, 0o711 if os.geteuid() == 0 else 0o700, owners=(0, os.geteuid()))
    _make(directory, 0o700, owners=(os.geteuid(),))
    return directory


def directory_of(mountpoint: Path) -> Path:
    """Return the path of a mount's directory in its runtime directory, without making it."""
    return _place_of(mountpoint) / _hashed(mountpoint)


def hand_over(mountpoint: Path, uid: int, gid: int) -> None:
    """Make the mount's directory anew, with the daemon's user as its owner."""
    _remove(mountpoint)
    os.chown(mount_directory(mountpoint), uid, gid)


def server_of(mountpoint: Path) -> int | None:
    """Return the uid of a mount's daemon; None if the mount has no directory."""
    try:
        return directory_of(mountpoint).stat().st_uid
    except OSError:
        return None


def keeper_socket(mountpoint: Path) -> Path:
    """Return the path of the keeper's socket, outside of the daemon's own directory."""
    return _place_of(mountpoint) / f"{_hashed(mountpoint)}.keeper"


def new_keeper_socket(mountpoint: Path) -> Path:
    """Return the path of the socket for the keeper of a new mount."""
    return runtime_directory() / f"{_hashed(mountpoint)}.keeper"


def _make(path: Path, mode: int, *, owners: tuple[int, ...]) -> None:
    """Make a directory; MountsError unless one of `owners` owns it (others can write /tmp)."""
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise MountsError(f"{path} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners:
        raise MountsError(f"{path} is not a directory of this user; remove it")
    if stat.S_IMODE(found.st_mode) != mode and found.st_uid == os.geteuid():
        path.chmod(mode)


def register(mountpoint: Path, source: str, pid: int, staging: Path | None = None) -> Registration:
    """Write the record of a mount and its running daemon.

    `staging` is the directory of files that are not uploaded yet, which commands read when the
    mount's processes are gone.

    Raises:
        MountsError: there is no process `pid`, or the directory can't be used.
        OSError: the record can't be written.
    """
    started = start_time(pid)
    if started is None:
        raise MountsError(f"there is no process {pid}")
    registration = Registration(str(mountpoint), source, pid, started)
    directory = mount_directory(mountpoint)
    if staging is not None:
        (directory / STAGING).unlink(missing_ok=True)
        (directory / STAGING).symlink_to(staging)
    files.replace(directory / "mount.json", json.dumps(registration._asdict()) + "\n")
    return registration


def staging_of(mountpoint: Path) -> Path | None:
    """Return the directory of files that a mount has not uploaded; None for a read-only mount."""
    return _link_target(directory_of(mountpoint) / STAGING)


def unregister(mountpoint: Path, *, pid: int | None = None) -> None:
    """Remove a mount's record; with `pid`, only if it is still the record of that daemon."""
    if pid is not None:
        registration = _read(directory_of(mountpoint))
        if registration is None or registration.pid != pid:
            return
    _remove(mountpoint)


def _remove(mountpoint: Path) -> None:
    import shutil  # imports the compressors; most commands remove nothing

    shutil.rmtree(directory_of(mountpoint), ignore_errors=True)


def registration_of(mountpoint: Path) -> Registration | None:
    """Return the record of a mount's last daemon, or None; removes an ended mount's record."""
    registration = _read(directory_of(mountpoint))
    if registration is not None and not registration.is_alive():
        mount = mountinfo.find_mount(mountpoint)
        if (mount is None or not mount.is_fusefs) and peer(registration.socket) is None:
            unregister(mountpoint)
            return None
    return registration


def all_mounts() -> list[Registration]:
    """Return the records of this user's existing mounts, sorted by mountpoint."""
    found = (registration_of(Path(record.mountpoint)) for record in records())
    return sorted((record for record in found if record), key=lambda record: record.mountpoint)


def records() -> Iterator[Registration]:
    """Yield the records of all mounts, also those of dead daemons, without removing any."""
    for place in _places():
        try:
            directories = list(place.iterdir())
        except OSError:
            continue
        for directory in directories:
            if (registration := _read(directory)) is not None:
                yield registration


def _read(directory: Path) -> Registration | None:
    """Read the record in a directory, whose owner is not trusted; None without a valid record."""
    try:
        # O_NONBLOCK: opening a named pipe would block.
        fd = os.open(directory / "mount.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with files.closing(fd):
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            found = Registration(**json.loads(os.read(fd, _MAX_RECORD)))
        is_sound = isinstance(found.pid, int) and _hashed(Path(found.mountpoint)) == directory.name
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        # The mount is just beginning or ending, or is not ours.
        return None
    return found if is_sound else None
