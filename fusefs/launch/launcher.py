"""The launcher: starts a mount and waits until it is ready.

When `preflight` has found no obstacle, `start` runs the keeper (keeper/main.py), which starts
`python -m fusefs.daemon`; under pyfuse3 there is no keeper. The settings go to the standard
input as JSON; the daemon answers with one JSON line on the standard output, `{"ready": true}`
or `{"error": "...", "code": "..."}`, and closes it. Its standard error is the log. If a daemon
ends without that line, the last line of the log is shown.

After a failure nothing is left behind: the daemon is terminated, and a mount that
it had already made is unmounted.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from fusefs.cluster_cache import access
from fusefs.keeper import supervisor_protocol
from fusefs.keeper.exchange import parse
from fusefs.launch import control, log_location, registry, users
from fusefs.launch.preflight import LaunchError, refuse_mounted
from fusefs.linux import mountinfo, unmount
from fusefs.linux.files import closing, open_in_place, try_lock
from fusefs.linux.mount import READ_AHEAD_KIB, may_mount, mount_arguments
from fusefs.settings.mount import MountSettings
from fusefs.settings.types import SessionKind
from fusefs.store import customer_key
from fusefs.store.errors import ErrorCode

# -P keeps the working directory, which is "/", out of the module path.
DAEMON = [sys.executable, "-P", "-m", "fusefs.daemon"]
_PACKAGE_PARENT = os.fspath(Path(__file__).absolute().parents[2])
# The keeper runs without site-packages, to save memory.
KEEPER = [
    sys.executable,
    "-I",
    "-S",
    "-c",
    f"import sys; sys.path.insert(0, {_PACKAGE_PARENT!r});"
    " from fusefs.keeper.main import main; sys.exit(main())",
]
# Each backing id keeps a file open in the kernel; the daemon closes the least recently used ids
# before this limit is reached.
MOST_BACKING_IDS = 20_000


@dataclass(frozen=True, slots=True)
class SupervisorAddress:
    """The socket of the process that starts the daemons of mounts (keeper/supervisor_protocol.py).

    If no process listens there, the keeper waits if the supervisor `is_needed`; if not, the
    keeper starts the daemon itself.
    """

    socket: Path
    is_needed: bool


# The time that a start may take, in addition to the time for which S3 requests are retried.
START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 10.0


# --- starting -----------------------------------------------------------------


def start(
    settings: MountSettings,
    supervisor: SupervisorAddress | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
    deadline: float = math.inf,
) -> subprocess.Popen[bytes]:
    """Start the mount; when it answers, return its process: the keeper, or pyfuse3's daemon.

    The keeper gets `environment`. At `deadline` (monotonic seconds) the start is given up.

    Raises:
        NotUpError: the mount was not ready in time; nothing is left behind.
        LaunchError: the mount could not be started; nothing is left behind.
    """
    log_path = log_location.path_of(settings)
    with _claim(settings.mountpoint) as directory, log_location.opened(log_path) as log:
        log_start = log.seek(0, os.SEEK_END) if log_path is not None else 0
        process: subprocess.Popen[bytes] | None = None
        try:
            process = _spawn(settings, directory, log, supervisor, environment)
            _wait_until_ready(process, settings.retry_time + START_TIMEOUT_S, deadline)
        except _DiedError:
            assert process is not None
            _clean_up(process, settings.mountpoint)
            last_line = log_location.last_line(log_path, log_start) if log_path is not None else ""
            why = last_line or f"exit status {process.returncode}"
            raise LaunchError(f"the daemon ended while starting: {why}") from None
        except BaseException:  # Ctrl-C too leaves nothing behind
            if process is not None:
                _clean_up(process, settings.mountpoint)
            raise
    return process


def resume(
    settings: MountSettings,
    supervisor: SupervisorAddress,
    *,
    environment: Mapping[str, str] = os.environ,
    deadline: float = math.inf,
) -> subprocess.Popen[bytes] | None:
    """Start a new keeper for a mount without one, perhaps without daemon; return its process.

    Returns None if there is no mount, if it has a keeper, or if the supervisor holds no descriptor
    of it. The keeper gets `environment`; `deadline` (monotonic seconds) limits the start.

    Raises:
        LaunchError: no daemon came up; the descriptor store still holds the mount.
    """
    mountpoint = settings.mountpoint
    mount = mountinfo.find_mount(mountpoint)
    if mount is None or not mount.is_fusefs or control.peer(registry.keeper_socket(mountpoint)):
        return None
    path, number, fuse_fd = os.fspath(supervisor.socket), mount_number(mountpoint), None
    with contextlib.suppress(OSError):
        fuse_fd = supervisor_protocol.fetch(path, number, mount.connection)
    if fuse_fd is None:
        return None
    registration = registry.registration_of(mountpoint)
    with os.fdopen(fuse_fd), log_location.opened(log_location.path_of(settings)) as log:
        user = _choose_user(settings, environment)
        configuration = _keeper_configuration(_with_owner(settings), user, supervisor, environment)
        configuration["fuse_fd"] = fuse_fd
        # A daemon that no supervisor has started goes on without a keeper.
        configuration["goes_on"] = registration is not None and registration.is_alive()
        process = _popen(KEEPER, json.dumps(configuration), log, environment, (fuse_fd,))
    assert process.stdout is not None
    with process.stdout:
        try:
            _wait_until_ready(process, START_TIMEOUT_S, deadline)
        except _DiedError:
            raise LaunchError(f"no daemon came up for the held mount on {mountpoint}") from None
    print(f"fusefs: {mountpoint} had lost its keeper; it goes on", file=sys.stderr)
    return process


@contextlib.contextmanager
def _claim(mountpoint: Path) -> Iterator[int]:
    """Lock the mountpoint against other commands that mount there; yield its descriptor.

    If the mount is made before the open, the lock is on the mount's root instead of the
    directory, so the mountpoint is checked again after locking.
    """
    with closing(os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
        if not try_lock(directory):
            raise LaunchError(f"{mountpoint} is just being mounted by another command")
        if (place := os.readlink(f"/proc/self/fd/{directory}")) != os.fspath(mountpoint):
            raise LaunchError(f"{mountpoint} leads to {place} now; mount there if that is right")
        refuse_mounted(mountpoint)
        yield directory


class NotUpError(LaunchError):
    """The mount was not ready in time."""


class _DiedError(Exception):
    """The daemon closed its standard output without an answer."""


def _spawn(
    settings: MountSettings,
    directory: int,
    log: IO[bytes],
    supervisor: SupervisorAddress | None,
    environment: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    if settings.session == SessionKind.PYFUSE3:
        given = daemon_input(settings, users.current_user())
        return _popen(daemon_command(settings), given, log, environment)
    user = _choose_user(settings, environment)
    settings = _with_owner(settings)
    registry.hand_over(settings.mountpoint, user.uid, user.gid)
    cache = settings.cache_dir
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not user.is_own and cache.stat().st_uid != user.uid and not any(cache.iterdir()):
            with closing(open_in_place(cache, os.O_RDONLY | os.O_DIRECTORY)) as cache_fd:
                if not os.listdir(cache_fd):  # it may be another directory by now
                    os.fchown(cache_fd, user.uid, user.gid)
    except OSError as error:
        raise LaunchError(f"can't use the cache directory {cache}: {error.strerror}") from error
    configuration = _keeper_configuration(settings, user, supervisor, environment)
    configuration["claim"] = directory
    return _popen(KEEPER, json.dumps(configuration), log, environment, (directory,))


def _popen(
    command: Sequence[str],
    configuration: str,
    log: IO[bytes],
    environment: Mapping[str, str],
    pass_fds: tuple[int, ...] = (),
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        cwd="/",
        start_new_session=True,
        pass_fds=pass_fds,
        env={**environment, registry.RUNTIME_VARIABLE: os.fspath(registry.runtime_directory())},
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(configuration.encode())
    return process


def _choose_user(settings: MountSettings, environment: Mapping[str, str]) -> users.User:
    try:
        user = users.choose(settings, environment)
    except users.UserError as error:
        raise LaunchError(str(error)) from None
    if user.why and not user.is_own:
        print(f"fusefs: {user.why}", file=sys.stderr)
    return user


def _with_owner(settings: MountSettings) -> MountSettings:
    """Return the settings with `uid` and `gid`: by default those of the user who mounts."""
    return replace(
        settings,
        uid=os.geteuid() if settings.uid is None else settings.uid,
        gid=os.getegid() if settings.gid is None else settings.gid,
    )


def daemon_command(settings: MountSettings) -> list[str]:
    """Return the command line of a daemon; source and mountpoint only appear in its title."""
    return [*DAEMON, str(settings.source), os.fspath(settings.mountpoint)]


def daemon_input(
    settings: MountSettings, user: users.User | None, environment: Mapping[str, str] = os.environ
) -> str:
    """Return the standard input of a daemon that runs as `user`: settings and files, as JSON.

    AWS configuration files, which `environment` names, are passed by content if `user` is None or
    can't read them, or if their path is relative. Files that `user` can read are passed as paths,
    so that the daemon sees later changes.

    Raises:
        LaunchError: a file does not contain the secret that it should.
    """
    files = {
        name: path.read_text(errors="replace")
        for name, path in users.aws_files(environment)
        if user is None or not path.is_absolute() or not users.may_use(user, path, os.R_OK)
    }
    try:
        key = customer_key.find(settings.customer_key)
    except customer_key.CustomerKeyError as error:
        raise LaunchError(str(error)) from None
    if key is not None:
        files[customer_key.VARIABLE] = key.text
    try:
        files |= access.read(settings)
    except access.AccessError as error:
        raise LaunchError(f"cluster cache: {error}") from None
    return json.dumps({"settings": settings.as_texts(), "files": files})


def mount_number(mountpoint: Path) -> int:
    """Return the number under which the supervisor knows the mount on `mountpoint`."""
    return int(registry.keeper_socket(mountpoint).stem, 16)


def _keeper_configuration(
    settings: MountSettings,
    user: users.User,
    supervisor: SupervisorAddress | None,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Return the JSON object for a keeper's standard input; see keeper/main.py."""
    flags, data = mount_arguments(settings.mount_request)
    return {
        "mountpoint": os.fspath(settings.mountpoint),
        "source": str(settings.source),
        "mount_flags": flags,
        "mount_data": data,
        "read_ahead_kib": READ_AHEAD_KIB,
        "privileged": may_mount(),
        "uid": user.uid,
        "gid": user.gid,
        "groups": list(user.groups),
        "command": daemon_command(settings),
        "settings": daemon_input(settings, user, environment),
        "cache_dir": os.fspath(settings.cache_dir),
        "control": os.fspath(registry.new_keeper_socket(settings.mountpoint)),
        "number": mount_number(settings.mountpoint),
        "supervisor": supervisor and os.fspath(supervisor.socket),
        "is_supervisor_needed": supervisor is not None and supervisor.is_needed,
        "most_backing_ids": MOST_BACKING_IDS,
        "hang_s": settings.hang_timeout,
        "max_pause_s": settings.max_pause,
    }


def _wait_until_ready(daemon: subprocess.Popen[bytes], timeout_s: float, deadline: float) -> None:
    assert daemon.stdout is not None
    line = _read_line(daemon.stdout, min(timeout_s, deadline - time.monotonic()))
    daemon.stdout.close()
    try:
        answer = parse(line)
    except control.ControlError:
        raise LaunchError(f"the daemon answered {line[:200]!r} instead of JSON") from None
    if "error" in answer:
        try:
            code = ErrorCode(answer.get("code", ErrorCode.UNAVAILABLE))
        except ValueError:  # unknown to this version
            code = ErrorCode.UNAVAILABLE
        raise LaunchError(str(answer["error"]), code)
    for warning in answer.get("warnings", ()):
        print(f"fusefs: warning: {warning}", file=sys.stderr)


def _read_line(answer: IO[bytes], timeout_s: float) -> bytes:
    """Read the daemon's line; raises _DiedError for EOF, NotUpError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(answer, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise NotUpError(f"the mount did not come up within {timeout_s:.0f} s")
            chunk = os.read(answer.fileno(), 1 << 16)
            if not chunk:
                raise _DiedError
            line += chunk
            if len(line) > 1 << 16:
                raise LaunchError("the daemon's answer is too long")
    return line


def _clean_up(daemon: subprocess.Popen[bytes], mountpoint: Path) -> None:
    """Terminate the daemon, and detach and unregister the mount that it may have made."""
    daemon.terminate()
    try:
        daemon.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
    assert daemon.stdout is not None
    daemon.stdout.close()
    mount = mountinfo.find_mount(mountpoint)
    if mount is not None and mount.is_fusefs:
        with contextlib.suppress(unmount.UnmountError):
            unmount.umount_path(mountpoint, is_lazy=True)
    with contextlib.suppress(subprocess.TimeoutExpired):
        daemon.wait(END_TIMEOUT_S)
    registry.unregister(mountpoint)
