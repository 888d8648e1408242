"""Thousands of requests that are cancelled at any time: none is lost, and nothing leaks."""

import contextlib
import ctypes
import gc
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from fusefs.store.engine.engine import Engine, FileBody, FileSink, MemorySink, Request, open_engine
from tests.support.servers.scripted import RESET, Received, answer
from tests.support.sharing import python

PROJECT = Path(__file__).parents[3]
BODY = random.Random(1).randbytes(700_000)
# Under a sanitizer (test_sanitized.py) each takes five times as long.
REQUESTS = 500 if "asan" in os.environ.get("LD_PRELOAD", "") else 3000
AT_A_TIME = 24


def script(request: Received) -> Iterator[bytes]:
    """Each request in its own way, as its URL says."""
    source = random.Random(request.line)
    kind = source.random()
    if kind < 0.05:
        yield RESET
    body = BODY[: source.choice([0, 100, 5000, len(BODY)])]
    yield answer(body)
    if kind < 0.1:
        yield b""


class Mallinfo(ctypes.Structure):
    """mallinfo2(3)."""

    _fields_ = tuple((f"f{i}", ctypes.c_size_t) for i in range(10))


def memory() -> int:
    """Bytes that malloc has handed out in this process, by mmap (hblkhd) or not (uordblks)."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return int(found.f4 + found.f7)


# In a process of its own: what it takes and holds open for connections is not the engine's.
SERVER = """
import collections, sys
from tests.store.engine.test_many import script
from tests.support.servers.scripted import scripted_server
with scripted_server(script) as server:
    server.requests = collections.deque(maxlen=0)
    print(server.url, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The server's URL."""
    environment = {name: text for name, text in os.environ.items() if name != "LD_PRELOAD"}
    with python(SERVER, cwd=PROJECT, env=environment) as process:
        yield process.stdout.readline().strip()


async def storm(
    engine: Engine, url: str, fd: int, folder: Path, count: int, seed: int
) -> Counter[str]:
    """Send requests of all kinds, and cancel every third one at some time."""
    outcomes: Counter[str] = Counter()
    numbers = iter(range(count))
    source = random.Random(seed)

    async def send() -> None:
        for number in numbers:
            sink = FileSink(fd, 0, 0, len(BODY), sums=True)
            new = FileSink(-1, 0, 0, 5000, sums=True, path=str(folder / str(number)))
            request = Request(
                source.choice(["GET", "PUT", "DELETE"]),
                f"{url}/{seed}/{number}",
                [("x", "y")],
                source.choice([None, b"", BODY[:5000], FileBody(fd, 0, 5000)]),
                source.choice([sink, new, MemorySink(len(BODY))]),
                progress=1 << 16,
            )
            outcomes["sent"] += 1
            limit_s = source.choice([0, 0.001, 0.01]) if number % 3 == 0 else 60
            transfer = engine.submit(request, lambda *_: None)
            with trio.move_on_after(limit_s):
                await transfer.completed()
            outcomes[transfer.completion.error or "none"] += 1
            outcomes["files"] += transfer.completion.error is None and request.sink == new
            outcomes["ended"] += 1

    async with trio.open_nursery() as nursery:
        for _ in range(AT_A_TIME):
            nursery.start_soon(send)
    return outcomes


async def _survives(tmp_path: Path, count: int) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, len(BODY))
    with serving() as url:
        open_files, used = [], []
        for seed in range(3):
            async with open_engine(AT_A_TIME) as engine:
                outcomes = await storm(engine, url, fd, tmp_path / "new", count // 3, seed)
            assert outcomes.pop("files") > count / 60
            assert not os.listdir(tmp_path / "new"), "of files that nobody took"
            assert outcomes["sent"] == outcomes["ended"] == count // 3
            assert outcomes["cancelled"] > count / 30
            assert outcomes["none"] > count / 9
            assert set(outcomes) <= {"sent", "ended", "none", "cancelled", "reset", "short"}
            open_files.append(len(os.listdir("/proc/self/fd")))
            used.append(memory())
    # A first round fills what is kept anyway, and a leak is one in each round.
    assert open_files[2] <= open_files[0]
    assert min(used[1] - used[0], used[2] - used[1]) < count * 30
    os.close(fd)


async def test_requests_that_are_cancelled_at_any_time(tmp_path: Path) -> None:
    await _survives(tmp_path, REQUESTS)


@pytest.mark.storm
async def test_a_hundred_thousand_requests(tmp_path: Path) -> None:
    await _survives(tmp_path, 100_000)
