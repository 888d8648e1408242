"""Daemons that die one soon after the other: a standby takes over, and reads go on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.mounting import Mount, Mounter, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.tls import tls_door
from tests.support.sharing import in_storms
from tests.support.survival import survival_data as data
from tests.support.survival.surviving import filled as filled
from tests.support.survival.surviving import keeper_status, serving_pid
from tests.support.survival.surviving import survival as survival
from tests.support.waiting import until

APART_S = 0.3
MOST_KILLS = 400
SIZE = 64 << 10


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def with_standby(mount: Mount) -> dict[str, Any]:
    """The keeper's status once a daemon serves and a standby waits."""

    def look() -> dict[str, Any] | None:
        status = keeper_status(mount)
        return status if status["is_serving"] and status["standby"] else None

    found: dict[str, Any] = until(look, "a standby is there")
    return found


def expect_standby(mount: Mount) -> dict[str, Any]:
    """Kill daemons one soon after the other, until a standby waits."""

    def is_expected() -> bool:
        killed = serving_pid(mount)
        kill(killed)
        # The keeper may answer before it has seen the death.
        until(lambda: serving_pid(mount) != killed, "another daemon serves")
        return keeper_status(mount)["template"] is not None

    until(is_expected, "the keeper expects deaths")
    return with_standby(mount)


class Reader:
    """A thread that reads again and again, and counts how often; `error` is why it ended."""

    def __init__(self, read: Callable[[], None]) -> None:
        self.count = 0
        self.error: BaseException | None = None
        self._read = read
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._read()
                self.count += 1
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Reader:
        self._thread.start()
        until(lambda: self.count or self.error)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.error is None, self.error


def cached(mount: Mount) -> Callable[[], None]:
    """Opens and reads small files, which are in the cache after the first time."""
    dice = random.Random(1)
    numbers = range(20)

    def read() -> None:
        number = dice.choice(numbers)
        assert (mount.path / data.small_name(number)).read_bytes() == data.small(number)

    return read


def uncached(mount: Mount) -> Callable[[], None]:
    """Opens and reads large files here and there, for which the cache is too small."""
    dice = random.Random(2)

    def read() -> None:
        number, at = dice.randrange(data.LARGE_FILES), dice.randrange(data.LARGE_SIZE - SIZE)
        with (mount.path / data.large_name(number)).open("rb", buffering=0) as file:
            assert os.pread(file.fileno(), SIZE, at) == data.large(number, at, SIZE)

    return read


@states(
    "Reads go on while one daemon after the other is killed, 300 ms apart: after two deaths within"
    " 10 s a process waits that has only to take over. Where the machine needs longer for that,"
    " they go on in longer gaps."
)
@in_storms("at_least", 6, 300)
def test_reads_go_on_between_kills(survival: Mount, at_least: int) -> None:
    with Reader(cached(survival)) as small, Reader(uncached(survival)) as large:
        expect_standby(survival)
        apart_s = max(APART_S, 2 * time_to_go_on(survival, small, large))
        kills, gaps = 0, {small: 0, large: 0}
        while kills < at_least or min(gaps.values()) < 3:
            assert kills < MOST_KILLS, {"gaps with reads": list(gaps.values())}
            before = {reader: reader.count for reader in gaps}
            time.sleep(apart_s)
            for reader in gaps:
                gaps[reader] += reader.count > before[reader]
            kill(keeper_status(survival)["daemon"] or serving_pid(survival))
            kills += 1
        print(f"{kills} kills {apart_s:.2f} s apart, gaps with reads: {list(gaps.values())}")
    assert keeper_status(survival)["restarts"] >= kills // 2


def time_to_go_on(mount: Mount, *readers: Reader) -> float:
    """How long this machine takes from a daemon's death to the next reads."""
    status = with_standby(mount)
    before = [reader.count for reader in readers]
    start = time.monotonic()
    kill(status["daemon"])
    until(
        lambda: all(
            # One may have been answered already.
            reader.error or reader.count >= count + 2
            for reader, count in zip(readers, before, strict=True)
        )
    )
    return time.monotonic() - start


def test_a_standby_takes_over_with_the_mounts_settings_and_keys(survival: Mount) -> None:
    before = expect_standby(survival)
    environment = Path(f"/proc/{before['standby']}/environ").read_bytes()
    assert b"AWS_" not in environment
    fusefs("upgrade", survival.path, "--metadata-ttl", "7s", environment=survival.environment)
    after = with_standby(survival)
    assert after["standby"] != before["standby"]
    assert not Path(f"/proc/{before['standby']}").exists()
    assert f"standby pid {after['standby']}" in fusefs("status", survival.path).stdout
    kill(after["daemon"])
    uncached(survival)()
    assert serving_pid(survival) == after["standby"]
    assert survival.status()["metadata"]["ttl_s"] == 7
    assert survival.status()["s3"]["gets"] > 0


@contextlib.contextmanager
def over_tls(bucket: Bucket, mounter: Mounter, directory: Path) -> Iterator[Mount]:
    with tls_door(bucket.server.endpoint_url, directory) as door:
        yield mounter(
            "--session", "kernel", "--ca-bundle", str(door.authority), endpoint_url=door.url
        )


def test_a_standby_that_takes_over_reads_over_tls(
    bucket: Bucket, mounter: Mounter, tmp_path: Path
) -> None:
    contents = [os.urandom(2 << 20) for _ in range(3)]
    for number, content in enumerate(contents):
        bucket.put(f"large{number}", content)
    with over_tls(bucket, mounter, tmp_path) as mount:
        for number, content in enumerate(contents):
            standby = expect_standby(mount)["standby"]
            kill(serving_pid(mount))
            assert (mount.path / f"large{number}").read_bytes() == content
            assert serving_pid(mount) == standby
        assert "Python's connections" not in mount.log.read_text()
        mount.end()
