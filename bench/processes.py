"""Processes that the bench starts or watches, and mounts that have to end.

A daemon is measured with all its descendants: memory is the sum of their peak resident sizes
(VmHWM), processor time is their total. Each program that is started here gets its own session, so
that a Ctrl-C at the terminal reaches only the bench, which then ends everything in order.

A mount that does not end when unmounted is aborted through the kernel's control file system before
it is detached: a detached mount whose daemon hangs leaves processes behind that nothing can kill.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STOP_WAIT_S = 10.0
START_WAIT_S = 30.0


class BenchError(Exception):
    """A measurement could not be made."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that a daemon and its descendants have used since they started."""

    peak_rss_bytes: int
    cpu_s: float


def usage_of(pid: int) -> Usage:
    """Return the peak memory and processor time of a process tree; zero when it is gone."""
    peak, ticks = 0, 0
    for member in _tree(pid):
        with contextlib.suppress(OSError):
            peak += _peak_rss(member)
            ticks += sum(int(field) for field in _stat_fields(member)[11:15])
    return Usage(peak, ticks / os.sysconf("SC_CLK_TCK"))


def all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def parent_of(pid: int) -> int:
    return int(_stat_fields(pid)[1])


def _tree(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        with contextlib.suppress(OSError):
            children.setdefault(parent_of(pid), []).append(pid)
    found = [root]
    for member in found:
        found += children.get(member, [])
    return found


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, which may contain spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


def _peak_rss(pid: int) -> int:
    return _bytes_in(Path(f"/proc/{pid}/status"), "VmHWM:")


def proportional_size(pid: int) -> int:
    """Return the present memory of a process (PSS), with its share of shared pages."""
    return _bytes_in(Path(f"/proc/{pid}/smaps_rollup"), "Pss:")


def _bytes_in(table: Path, name: str) -> int:
    """Return a number of kB in one of the kernel's tables, in bytes; zero if it is missing."""
    lines = map(str.split, table.read_text().splitlines())
    return next((int(fields[1]) * 1024 for fields in lines if fields[:1] == [name]), 0)


def start(argv: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a long-running program in its own session, with its output in `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(env),
            start_new_session=True,
        )


def capture(argv: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> str:
    """Run a program to its end and return its output.

    In any case, also after an interrupt, the program and its children are gone afterwards.

    Raises:
        BenchError: it failed, or did not end within `limit_s`.
    """
    what = " ".join(argv)[:120]
    process = open_reader(argv, env)
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"not within {limit_s:.0f} s: {what}") from error
    finally:
        kill_group(process)
    if process.returncode != 0:
        raise BenchError(f"{(errors or output).strip()[-300:]} (exit {process.returncode}: {what})")
    return output


def open_reader(argv: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a program in its own session, with pipes for its input and output."""
    return subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kill a program and its children; harmless if it has ended."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(STOP_WAIT_S)
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"process {process.pid} cannot be killed: its mount hangs") from error


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a program that `start` started: by SIGTERM, else by SIGKILL to its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_WAIT_S)
            return
    raise BenchError(f"process {process.pid} cannot be killed")


def wait_until(ready: Callable[[], bool], what: str, limit_s: float = START_WAIT_S) -> None:
    """Poll until `ready()` is true; raises BenchError after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() > deadline:
            raise BenchError(f"{what}: not within {limit_s:.0f} s")
        time.sleep(0.02)


def wait_gone(pid: int) -> None:
    """Wait for the end of an unmounted daemon; if it runs on, kill it and raise BenchError."""
    gone = Path(f"/proc/{pid}")
    try:
        wait_until(lambda: not gone.exists(), f"end of daemon {pid}")
    except BenchError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise


@contextlib.contextmanager
def scratch_directory(base: Path, prefix: str) -> Iterator[Path]:
    """Yield a new directory below `base`; remove it at the end, with all mounts in it."""
    base.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    try:
        (scratch / ".gitignore").write_text("*\n")
        yield scratch
    finally:
        for mountpoint in reversed(mounts_below(scratch)):
            unmount(mountpoint)
        shutil.rmtree(scratch)
        if not any(base.iterdir()):
            base.rmdir()


def tail(log: Path, lines: int = 3) -> str:
    """Return the last lines of a log, for an error message."""
    if not log.exists():
        return ""
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-lines:])


def is_mounted(mountpoint: Path) -> bool:
    return mountpoint in _mounts()


def mounts_below(directory: Path) -> list[Path]:
    return [mountpoint for mountpoint in _mounts() if directory in mountpoint.parents]


def _mounts() -> dict[Path, str]:
    """Return mountpoints with their MAJOR:MINOR, from mountinfo, because a stat could hang."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {Path(fields[4]): fields[2] for fields in map(str.split, lines)}


def unmount(mountpoint: Path) -> None:
    """End a mount, by force if it does not end at once. Without a mount, do nothing."""
    device = _mounts().get(mountpoint)
    if device is None:
        return
    with contextlib.suppress(subprocess.SubprocessError):
        _quietly(["fusermount3", "-u", str(mountpoint)])
    if not is_mounted(mountpoint):
        return
    with contextlib.suppress(OSError, subprocess.SubprocessError), _control() as control:
        (control / device.partition(":")[2] / "abort").write_text("1")
    with contextlib.suppress(subprocess.SubprocessError):
        _quietly(["fusermount3", "-u", "-z", str(mountpoint)])
    if is_mounted(mountpoint):
        raise BenchError(f"{mountpoint} cannot be unmounted")


def _quietly(argv: Sequence[str]) -> None:
    subprocess.run(argv, check=True, capture_output=True, timeout=STOP_WAIT_S)


@contextlib.contextmanager
def _control() -> Iterator[Path]:
    """Yield FUSE's control file system, which is mounted for the block if the system lacks it."""
    usual = Path("/sys/fs/fuse/connections")
    if any(usual.iterdir()):
        yield usual
        return
    with tempfile.TemporaryDirectory() as place:
        _quietly(["mount", "-t", "fusectl", "none", place])
        try:
            yield Path(place)
        finally:
            _quietly(["umount", place])
