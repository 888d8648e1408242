"""`fusefs top` on real mounts."""

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import termios
import time
from typing import Any

from tests.support.mounting import FUSEFS, LIMIT_S, Mount, Mounter, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3


def start_top(*options: str) -> subprocess.Popen[str]:
    """One sample, if no option says otherwise, for what is not a terminal."""
    command = [str(FUSEFS), "top", "--count", "1", *options]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def output_of(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    return out


def test_the_screen_the_lines_and_json_show_all_mounts(mounter: Mounter, bucket: Bucket) -> None:
    mount = mounter()
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 5000, 500, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    for name in ("COLUMNS", "LINES"):  # as a worker of pytest has them
        environment.pop(name, None)
    with subprocess.Popen([FUSEFS, "top"], stdout=slave, env=environment) as screen:
        os.close(slave)
        # One after the other they would take as long again.
        plain, as_json = start_top(), start_top("--json")
        seen, deadline = "", time.monotonic() + LIMIT_S
        shown = f"{mount.path}  s3://{bucket.name}/\r\n  read "
        while shown not in seen and time.monotonic() < deadline:
            seen += os.read(master, 1 << 16).decode()
        screen.send_signal(signal.SIGINT)
        assert screen.wait(LIMIT_S) == 0
        assert shown in seen
    os.close(master)
    assert f"{mount.path}: read " in output_of(plain)
    [line] = output_of(as_json).splitlines()
    found = {one["volume"]: one for one in json.loads(line)["mounts"]}
    assert found[str(mount.path)]["is_up"]
    assert found[str(mount.path)]["source"] == f"s3://{bucket.name}/"
    assert "any" in found[str(mount.path)]["stalled"]


MIB = 1 << 20


def test_what_a_mount_does_in_a_longer_time_is_counted(bucket: Bucket, mounter: Mounter) -> None:
    bucket.put("data/large", os.urandom(6 * MIB))
    mount = mounter("--session", "kernel", "--passthrough", "off", "--no-read-only")
    (mount.path / "before").write_bytes(b"x")
    with start_top("--json", "--every", "0.5s", "--count", "100") as process:
        # The first sample is over: what follows is in one of the next.
        samples = [of_mount(process.stdout.readline(), mount)]
        (mount.path / "data" / "large").read_bytes()
        assert not (mount.path / "data" / "absent").exists()
        while round(sum(one["read_s"] * one["interval_s"] for one in samples)) < 6 * MIB:
            samples.append(of_mount(process.stdout.readline(), mount))
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 0
    assert round(sum(one["opens"]["served"] * one["interval_s"] for one in samples)) == 1
    assert any(one["requests"].get("lookup", {}).get("per_s", 0) > 0 for one in samples)
    assert any(one["requests"].get("read", {}).get("within_s", 0) > 0 for one in samples)
    assert not any("create" in one["requests"] for one in samples)


def of_mount(line: str, mount: Mount) -> dict[str, Any]:
    """One mount in a line of `fusefs top --json`."""
    found = {one["volume"]: one for one in json.loads(line)["mounts"]}
    return dict(found[str(mount.path)])


@states(
    "`fusefs status` shows how much of the last 10 seconds, minute and 5 minutes programs waited,"
    " and for what; what is fetched ahead and not waited for does not count."
)
def test_a_wait_for_a_late_answer_is_in_the_status(
    behind: Mounter, bucket: Bucket, faulty: FaultyS3
) -> None:
    for name in ("slow", "ahead"):
        bucket.put(f"data/{name}", b"x" * 1000)
    one = behind()
    os.listdir(one.path / "data")
    late = faulty.add("GET", delay_s=1.0)
    fusefs("warm", "--wait", one.path / "data" / "ahead")
    assert "S3's first byte" not in fusefs("status", one.path).stdout
    (one.path / "data" / "slow").read_bytes()
    faulty.remove(late)
    text = fusefs("status", one.path).stdout
    for part in ("programs waited", "S3's first byte", "hint  "):
        assert part in text
