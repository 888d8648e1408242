"""Real keepers with a stand-in for the daemon, each ended for sure."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusefs.keeper import protocol, supervisor_protocol
from fusefs.linux import unmount
from fusefs.linux.fuse_connection import is_disconnected
from fusefs.linux.mount import stack_depth
from fusefs.linux.mountinfo import connection_at
from fusefs.linux.sockets import peer_of
from tests.support.machine.ordinary_user import public_directory
from tests.support.waiting import until

PROJECT = Path(__file__).parents[3]
STANDIN = PROJECT / "tests" / "support" / "survival" / "standin_daemon.py"
LIMIT_S = 60.0
PIDFD_GETFD = 438  # pidfd_getfd(2)
# What the stand-in answers to who reads "held", once it may.
HELD = b"held content"

needs_root = pytest.mark.root
needs_passthrough = pytest.mark.skipif(
    tuple(int(part) for part in os.uname().release.split(".")[:2]) < (6, 9),
    reason="this kernel has no FUSE passthrough (Linux 6.9 or later has)",
)
needs_fuse = pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")


def keeper_command(python: str, policy: dict[str, float]) -> list[str]:
    """The keeper's program, with other values of its policy's constants."""
    program = (
        f"import sys; sys.path.insert(0, {os.fspath(PROJECT)!r}); "
        f"from fusefs.keeper import main, policy; vars(policy).update({policy!r}); "
        "sys.exit(main.main())"
    )
    return [python, "-I", "-S", "-c", program]


class Kept:
    """One mount and its keeper, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mountpoint = directory / "mnt"
        self.cache = directory / "cache"
        self.facts_directory = directory / "facts"
        self.hold = directory / "hold"
        self.control = directory / "control.sock"
        self.log = directory / "log"
        self.log.touch()
        for path in (self.mountpoint, self.cache, self.facts_directory):
            path.mkdir(exist_ok=True)
            path.chmod(0o777)
        self.connection: int | None = None
        self.process: subprocess.Popen[bytes]
        self.command = [sys.executable, str(STANDIN)]
        self._started: list[subprocess.Popen[bytes]] = []
        self.policy: dict[str, float] = {}
        self.settings: dict[str, Any] = {}
        self.configuration: dict[str, Any] = {}

    def start(
        self,
        behaviour: dict[str, Any] | None = None,
        *,
        command: list[str] | None = None,
        is_expected_to_serve: bool = True,
        user: int | None = None,
        more_settings: dict[str, Any] | None = None,
        **overrides: Any,
    ) -> str:
        """Start the keeper, as `user` if given; returns what came on its standard output."""
        program = command or self.command
        self.settings = {
            "behaviour": behaviour or {},
            "mountpoint": str(self.mountpoint),
            "cache": str(self.cache),
            "facts": str(self.facts_directory),
            "hold": str(self.hold),
            "stack_depth": stack_depth(self.cache),
        } | (more_settings or {})
        self.configuration = {
            "mountpoint": str(self.mountpoint),
            "source": "standin",
            "mount_data": "rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other",
            "mount_flags": 2 | 4,
            "privileged": True,
            "uid": os.geteuid(),
            "gid": os.getegid(),
            "groups": [],
            "command": [*program, self._mark],
            "cache_dir": str(self.cache),
            "control": str(self.control),
            "most_backing_ids": 100,
            "hang_s": 30.0,
            "max_pause_s": 300.0,
            "keeper_command": [
                *keeper_command(program[0] if user else sys.executable, self.policy),
                self._mark,
            ],
        } | overrides
        self.settings["keeper"] = self.configuration
        answer = self._launch(user=user)
        if is_expected_to_serve:
            assert answer == '{"ready": true}\n', (answer, self.log_text())
            self.connection = self.status()["connection"]
        return answer

    def resume(self, fuse_fd: int, **overrides: Any) -> None:
        """Start another keeper for the mount, which has none, with its descriptor."""
        self.configuration |= {"fuse_fd": fuse_fd, **overrides}
        answer = self._launch(pass_fds=[fuse_fd])
        assert answer == '{"ready": true}\n', (answer, self.log_text())

    def _launch(self, **options: Any) -> str:
        given = self.configuration | {"settings": json.dumps(self.settings)}
        user = options.get("user")
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.configuration["keeper_command"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                group=user,
                extra_groups=None if user is None else [],
                **options,
            )
        self._started.append(self.process)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with self.process.stdin as stdin:
            stdin.write(json.dumps(given).encode())
        with self.process.stdout as stdout:
            return stdout.read().decode()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(LIMIT_S)
            sock.connect(str(self.control))
            sock.sendall(json.dumps(request).encode() + b"\n")
            answer: dict[str, Any] = json.loads(sock.makefile().readline())
        return answer

    def status(self) -> dict[str, Any]:
        return self.ask({"do": "status"})

    def facts(self, pid: int) -> dict[str, Any]:
        """What the daemon `pid` has on record, once it has come that far."""
        path = self.facts_directory / str(pid)
        until(path.exists)
        facts: dict[str, Any] = json.loads(path.read_text())
        return facts

    def process_of(self, state: int) -> int:
        """The daemon that got `state` in WELCOME, once there is one."""

        def look() -> int | None:
            for path in self.facts_directory.iterdir():
                if path.suffix != ".new" and json.loads(path.read_text())["state"] == state:
                    return int(path.name)
            return None

        pid: int = until(look)
        return pid

    def attack_facts(self) -> dict[str, Any]:
        """The facts of the first daemon, once its attack is over."""
        pid = self.process_of(protocol.FRESH)
        until(lambda: "attack" in self.facts(pid))
        return self.facts(pid)

    def served_by_another_than(self, pid: int) -> dict[str, Any]:
        """The status once another daemon serves."""

        def look() -> dict[str, Any] | None:
            with contextlib.suppress(OSError, ValueError):
                status = self.status()
                if status["is_serving"] and status["daemon"] not in (None, pid):
                    return status
            return None

        found: dict[str, Any] = until(look)
        return found

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def connection_now(self) -> int | None:
        return connection_at(str(self.mountpoint))

    def upgrade(self, behaviour: dict[str, Any], command: list[str] | None = None) -> Any:
        request = {
            "do": "upgrade",
            "command": command or self.configuration["command"],
            "settings": json.dumps(self.settings | {"behaviour": behaviour}),
        }
        # The daemon says that it is ready a moment before its keeper knows that it serves.
        until(lambda: self.status()["is_serving"])
        return self.ask(request)

    def kill_daemon(self) -> int:
        pid: int = self.status()["daemon"]
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_keeper(self) -> dict[str, Any]:
        """Kill the keeper alone; returns the status by its successor."""
        before = self.status()
        handle = os.pidfd_open(before["pid"])
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)

        def succeeded() -> dict[str, Any] | None:
            with contextlib.suppress(OSError, ValueError):
                status = self.status()
                if status["pid"] == before["broker"] and status["broker"]:
                    return status
            return None

        status: dict[str, Any] = until(succeeded)
        assert status["daemon"] == before["daemon"]
        return status

    def abort(self) -> None:
        assert self.connection is not None
        unmount.abort_connection(self.connection)

    def wait(self) -> int:
        """The keeper's exit status."""
        return self.process.wait(LIMIT_S)

    def umount(self) -> None:
        unmount.umount_path(self.mountpoint)

    def processes(self) -> list[int]:
        """All that are left of the keeper, its brokers and its daemons."""
        mark = os.fsencode(self._mark)
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    arguments = (entry / "cmdline").read_bytes().split(b"\0")
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if mark in arguments and state != "Z":
                        found.append(int(entry.name))
        return found

    @property
    def _mark(self) -> str:
        """An argument without effect; it tells our processes from all others."""
        return f"kept-in={self.directory}"

    def clean_up(self) -> None:
        """Whatever the test did: no mount and no process afterwards."""
        print(self.log_text())  # pytest shows it where a test failed
        connection = self.connection_now()
        if connection is None and any(map(holds_a_connection, self.processes())):
            connection = self.connection  # detached; otherwise it may be another one's by now
        if connection:
            with contextlib.suppress(unmount.UnmountError):
                unmount.abort_connection(connection)
        while self.connection_now() is not None:
            unmount.umount_path(self.mountpoint, is_lazy=True)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not self.processes())
        for process in self._started:
            process.wait(LIMIT_S)


def holds_a_connection(pid: int) -> bool:
    """True if a process has a descriptor of a FUSE connection that has not ended."""
    with devices_of(pid) as fds:
        return not all(map(is_disconnected, fds))


@contextlib.contextmanager
def devices_of(pid: int) -> Iterator[list[int]]:
    """Copies of the descriptors of /dev/fuse that a process has."""
    with contextlib.ExitStack() as copies:
        fds: list[int] = []
        with contextlib.suppress(OSError), open(os.pidfd_open(pid), "rb") as process:
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(path) == "/dev/fuse":
                        numbers = (process.fileno(), int(path.name), 0)
                        fd = ctypes.CDLL(None).syscall(PIDFD_GETFD, *numbers)
                        if fd >= 0:
                            copies.callback(os.close, fd)
                            fds.append(fd)
        yield fds


@contextlib.contextmanager
def device_of(kept: Kept) -> Iterator[int]:
    """A copy of the keeper's descriptor of /dev/fuse."""
    with devices_of(kept.status()["pid"]) as fds:
        yield fds[0]


@contextlib.contextmanager
def kept_mount() -> Iterator[Kept]:
    """Not started yet, and gone at the end whatever happened."""
    with public_directory() as directory:
        one = Kept(directory)
        try:
            yield one
        finally:
            one.clean_up()


@contextlib.contextmanager
def blocked_reader(kept: Kept) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for the answer to a READ."""
    kept.hold.touch()
    reader = subprocess.Popen(
        ["cat", str(kept.mountpoint / "held")], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        until(lambda: kept.status()["in_flight"] == 1)
        yield reader
    finally:
        kept.hold.unlink(missing_ok=True)
        reader.kill()
        reader.wait(LIMIT_S)


def listener_at(path: Path | str) -> int:
    """The pid of the supervisor that listens there, or 0."""
    with contextlib.suppress(OSError), supervisor_protocol.connect(os.fspath(path)) as sock:
        return peer_of(sock)[0]
    return 0


def put_through(kept: Kept, size: int = 300_000) -> bytes:
    """Make the file that is passed through; returns its content."""
    content = os.urandom(size)
    (kept.cache / "through").write_bytes(content)
    return content


def error_of(path: Path) -> int | None:
    """The errno with which reading the file fails, if it does."""
    try:
        path.read_bytes()
    except OSError as error:
        return error.errno
    return None


def capabilities(pid: int) -> int:
    """The effective ones, as a mask."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("CapEff:")[2].split()[0], 16)
