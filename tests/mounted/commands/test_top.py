"""`fusefs top` and `fusefs profile` on real mounts."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.mounting import FUSEFS, LIMIT_S, Mount, Mounter, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.waiting import until


class Terminal:
    """A terminal of tmux that runs a command."""

    def __init__(self, socket: Path, *command: str) -> None:
        self._tmux = ["tmux", "-f", os.devnull, "-S", str(socket)]
        size = ["-x", "150", "-y", "45"]
        self._run("new-session", "-d", *size, *command)

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._tmux, *arguments], capture_output=True, text=True, check=False, timeout=60
        )
        return done.stdout

    @property
    def text(self) -> str:
        return self._run("capture-pane", "-p")

    def press(self, key: str) -> None:
        self._run("send-keys", key)

    @property
    def has_ended(self) -> bool:
        return not self._run("list-sessions")

    def end(self) -> None:
        self._run("kill-server")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not there")
    made: list[Terminal] = []

    def start(*command: str) -> Terminal:
        made.append(Terminal(tmp_path / "tmux", *command))
        return made[-1]

    yield start
    for one in made:
        one.end()


def start_top(*options: str) -> subprocess.Popen[str]:
    """One sample, for what is not a terminal."""
    command = [str(FUSEFS), "top", "--count", "1", *options]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def output_of(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    return out


def reader(mount: Mount, bucket: Bucket) -> Callable[[], None]:
    """Reads a little more at each call, what is cached and what is not."""
    numbers = itertools.count()

    def step() -> None:
        number = next(numbers)
        (mount.path / f"cold/{number % 100:03}").read_bytes()
        (mount.path / f"missing-{number}").exists()

    for number in range(100):
        bucket.put(f"cold/{number:03}", b"x" * 20_000)
    return step


def test_the_screen_the_lines_and_json_show_all_mounts(
    mounter: Mounter, bucket: Bucket, terminal: Callable[..., Terminal]
) -> None:
    mount = mounter()
    read = reader(mount, bucket)
    screen = terminal("env", "-u", "COLUMNS", "-u", "LINES", str(FUSEFS), "top")

    def shows(*words: str) -> Callable[[], bool]:
        def look() -> bool:
            read()
            time.sleep(0.1)
            return all(word in screen.text for word in words)

        return look

    # Other tests of this machine have mounts as well.
    own = str(mount.path)[-20:]
    # One after the other they would take as long again.
    plain = start_top()
    as_json = start_top("--json")
    until(shows("waited", "to upload", own, "q quit"), "the overview")
    chosen = f"what {mount.path} waits for"

    def choose() -> bool:
        if chosen not in screen.text:
            screen.press("Down")
            time.sleep(0.3)
        return chosen in screen.text

    until(choose, "the mount is chosen")
    screen.press("Enter")
    until(shows("requests of programs", "requests to S3", f"s3://{bucket.name}/"), "the detail")
    screen.press("b")
    until(shows("to upload"), "the overview again")
    screen.press("q")
    until(lambda: screen.has_ended, "the end")

    assert f"{mount.path}: read " in output_of(plain)
    [line] = output_of(as_json).splitlines()
    found = {one["volume"]: one for one in json.loads(line)["mounts"]}
    assert found[str(mount.path)]["is_up"]
    assert found[str(mount.path)]["source"] == f"s3://{bucket.name}/"
    assert "any" in found[str(mount.path)]["stalled"]


MIB = 1 << 20


def test_what_a_mount_did_is_counted_until_the_command_is_interrupted(
    bucket: Bucket, mounter: Mounter
) -> None:
    bucket.put("data/large", os.urandom(6 * MIB))
    mount = mounter("--session", "kernel", "--passthrough", "off", "--no-read-only")
    (mount.path / "before").write_bytes(b"x")
    with subprocess.Popen(
        [FUSEFS, "profile", mount.path, "--for", "60s", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr.readline() == "counting for 1 min; Ctrl-C ends it\n"
        (mount.path / "data" / "large").read_bytes()
        assert not (mount.path / "data" / "absent").exists()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    found = json.loads(out)
    interval_s = found["interval_s"]
    assert round(found["read_s"] * interval_s) == 6 * MIB
    assert round(found["opens"]["served"] * interval_s) == 1
    assert found["requests"]["lookup"]["per_s"] > 0
    assert found["requests"]["read"]["within_s"] > 0
    assert round(found["outcomes_s"]["refused"] * interval_s) >= 1
    assert "create" not in found["requests"]
    assert isinstance(found["advice"], list)
    text = fusefs("profile", mount.path, "--for", "0.1s").stdout
    assert text.startswith("requests    0 in 0.")
    assert text.endswith("advice      nothing stands out\n")


@states(
    "`fusefs status` shows how much of the last 10 seconds, minute and 5 minutes programs waited,"
    " and for what; what is fetched ahead and not waited for does not count."
)
def test_a_wait_for_a_late_answer_is_in_the_status(
    mounter: Mounter, bucket: Bucket, faulty: FaultyS3
) -> None:
    for name in ("slow", "ahead"):
        bucket.put(f"data/{name}", b"x" * 1000)
    faulty.clear()
    one = mounter(endpoint_url=faulty.endpoint_url)
    os.listdir(one.path / "data")
    late = faulty.add("GET", delay_s=1.0)
    fusefs("warm", "--wait", one.path / "data" / "ahead")
    assert "S3's first byte" not in fusefs("status", one.path).stdout
    (one.path / "data" / "slow").read_bytes()
    faulty.remove(late)
    text = fusefs("status", one.path).stdout
    for part in ("programs waited", "S3's first byte", "hint  ", "slowest  ", "of data/"):
        assert part in text
