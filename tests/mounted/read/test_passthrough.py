"""Files that the kernel reads by itself, opened in every other way at the same time.

Never an EIO, always the right bytes. Programs without a name to look up are in
test_nameless_opens.py.
"""

import contextlib
import hashlib
import mmap
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusefs.linux import mountinfo
from fusefs.linux.mount import READ_AHEAD_KIB
from tests.support.machine.libc import mapped
from tests.support.mounting import Mount, Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.sharing import (
    FEW,
    is_passthrough,
    python,
    read_all,
    read_by_page,
    requests,
    stamped,
    with_passthrough,
)

MIB = 1 << 20
SMALL = 300_000
LARGE = 24 * MIB


@states("Reads of a file that is whole in the cache never reach the daemon (passthrough).")
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_a_cached_file_is_read_without_the_daemon(
    passing: Mount, folder: Bucket, size: int
) -> None:
    folder.put("file", stamped(1, size))
    path = passing.path / folder.prefix / "file"
    read_all(path)
    with path.open("rb", buffering=0) as file:
        before = requests(passing)
        assert read_by_page(file.fileno()) == stamped(1, size)
        assert requests(passing) - before <= FEW


def test_one_file_opened_in_every_way_at_once(passing: Mount, folder: Bucket) -> None:
    data = stamped(1, LARGE)
    folder.put("file", data)
    path = passing.path / folder.prefix / "file"
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(path.open("rb", buffering=0))
        os.pread(served.fileno(), 4096, 0)
        early = stack.enter_context(mapped(path))
        read_all(path)
        late = stack.enter_context(path.open("rb", buffering=0))
        late_map = stack.enter_context(mapped(path))
        direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
        stack.callback(os.close, direct)
        nameless = os.open(path, os.O_PATH)
        stack.callback(os.close, nameless)
        again = [
            os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
            for fd in (served.fileno(), late.fileno(), direct, nameless)
        ]
        for fd in again:
            stack.callback(os.close, fd)
        code = "import os, sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read()[-4096:])"
        process = subprocess.run(
            ["python3", "-c", code, str(path)], check=True, capture_output=True
        )
        assert process.stdout == data[-4096:]
        with mmap.mmap(-1, 8192) as memory, memoryview(memory) as view:
            for at in random.Random(5).sample(range(0, LARGE - 8192, 4096), 40):
                expected = data[at : at + 8192]
                assert early.read(at, at + 8192) == expected
                assert late_map.read(at, at + 8192) == expected
                assert os.preadv(direct, [view], at) == 8192
                assert bytes(view) == expected
                for fd in (served.fileno(), late.fileno(), *again):
                    assert os.pread(fd, 8192, at) == expected
        inos = {os.fstat(fd).st_ino for fd in (served.fileno(), late.fileno(), direct, *again)}
        assert inos == {path.stat().st_ino}


@states(
    "A file that was opened before it was whole in the cache is read through the daemon until it"
    " is closed; every later open of it is passthrough."
)
def test_a_handle_from_before_the_fetch_keeps_no_other_from_passthrough(
    passing: Mount, folder: Bucket
) -> None:
    data = stamped(1, LARGE)
    folder.put("file", data)
    path = passing.path / folder.prefix / "file"
    with path.open("rb", buffering=0) as held:
        assert held.read(4096) == data[:4096]
        read_all(path)
        with path.open("rb", buffering=0) as later, path.open("rb", buffering=0) as last:
            assert is_passthrough(passing, later.fileno())
            assert is_passthrough(passing, last.fileno())
            assert not is_passthrough(passing, held.fileno())
            assert os.fstat(later.fileno()).st_ino == os.fstat(held.fileno()).st_ino
            assert os.fstat(held.fileno()) == os.fstat(later.fileno())
            passing.forget()
            assert os.pread(held.fileno(), LARGE, 0) == data
            assert os.pread(later.fileno(), LARGE, 0) == data


def test_opens_while_a_file_becomes_complete_all_read_the_right_bytes(
    passing: Mount, folder: Bucket
) -> None:
    data = stamped(1, LARGE)
    folder.put("file", data)
    path = passing.path / folder.prefix / "file"
    done = threading.Event()

    def reopen(seed: int) -> int:
        numbers = random.Random(seed)
        opens = 0
        while not done.is_set() or not opens:
            fd = os.open(path, os.O_RDONLY)
            try:
                at = numbers.randrange(0, LARGE - 4096)
                assert os.pread(fd, 4096, at) == data[at : at + 4096]
                opens += 1
            finally:
                os.close(fd)
        return opens

    with ThreadPoolExecutor(6) as threads:
        openers = [threads.submit(reopen, seed) for seed in range(6)]
        try:
            assert read_all(path, 64 << 10) == data
            assert read_all(path, 64 << 10) == data
        finally:
            done.set()
        assert all(opener.result() for opener in openers)


@contextlib.contextmanager
def overlay(lower: Path, directory: Path) -> Iterator[Path]:
    """A file system that lies over another, as a container's root does."""
    target, upper, work = (directory / name for name in ("over", "upper", "work"))
    for one in (target, upper, work):
        one.mkdir(parents=True)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    command = ["mount", "-t", "overlay", "-o", options, "overlay", str(target)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no overlay can be mounted here")
    try:
        yield target
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)


def test_a_cache_in_a_container_s_own_file_system_is_passed_through(
    mounter: Mounter, bucket: Bucket, tmp_path: Path
) -> None:
    bucket.put("file", stamped(1, SMALL))
    (tmp_path / "lower").mkdir()
    with overlay(tmp_path / "lower", tmp_path / "one") as over:
        mount = mounter("--session", "kernel", cache=str(over / "cache"))
        assert mount.status()["passthrough"]["on"]
        assert read_all(mount.path / "file") == stamped(1, SMALL)
        with (mount.path / "file").open("rb", buffering=0) as file:
            assert is_passthrough(mount, file.fileno())
            assert read_by_page(file.fileno()) == stamped(1, SMALL)
        mount.end()


def test_a_cache_on_an_overlay_of_several_file_systems_is_read_through_the_daemon(
    mounter: Mounter, bucket: Bucket, tmp_path: Path
) -> None:
    bucket.put("file", stamped(1, SMALL))
    (tmp_path / "lower").mkdir()
    with (
        overlay(tmp_path / "lower", tmp_path / "one") as over,
        overlay(over, tmp_path / "two") as twice,
    ):
        mount = mounter("--session", "kernel", cache=str(twice / "cache"))
        passthrough = mount.status()["passthrough"]
        assert not passthrough["on"]
        assert passthrough["why"] == "the cache is on an overlay of several file systems"
        for _ in range(2):
            assert read_all(mount.path / "file") == stamped(1, SMALL)
        mount.end()


@states(
    "Reading a passthrough file or its mapping needs no daemon.",
    "A file that is read by passthrough is read on while there is no daemon, without a pause.",
)
def test_reads_go_on_while_the_daemon_is_stopped(passing: Mount, folder: Bucket) -> None:
    data = stamped(1, LARGE)
    folder.put("file", data)
    path = passing.path / folder.prefix / "file"
    read_all(path)
    # In a process of its own, which may be killed if it hangs.
    code = """
import mmap, os, sys, hashlib
fd = os.open(sys.argv[1], os.O_RDONLY)
view = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
print("open", flush=True)
sys.stdin.readline()
size = int(sys.argv[2])
print(hashlib.sha256(os.pread(fd, size, 0)).hexdigest(), flush=True)
print(hashlib.sha256(view[:]).hexdigest(), flush=True)
"""
    reader = python(code, path, LARGE)
    daemon = passing.pid
    try:
        assert reader.stdout.readline() == "open\n"
        passing.forget()
        os.kill(daemon, signal.SIGSTOP)
        reader.stdin.write("go\n")
        reader.stdin.flush()
        lines: list[str] = []
        listener = threading.Thread(
            target=lambda: lines.extend(reader.stdout.readline() for _ in range(2))
        )
        listener.start()
        listener.join(30)
        # No other file has taken its place either.
        assert Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon, signal.SIGCONT)
        reader.kill()
        reader.communicate()
    assert lines == [hashlib.sha256(data).hexdigest() + "\n"] * 2


FILES, SIZE = 40, 20_000
# An object that is new would be looked up again before each open.
OPTIONS = ("--session", "kernel", "--metadata-ttl", "indefinite")


@pytest.fixture(scope="module")
def here(shared: Bucket, module_mounter: Mounter) -> Mount:
    shared.put("file", b"x" * 1000)
    for number in range(FILES):
        shared.put(f"warm/{number}", stamped(number, SIZE))
    return module_mounter(*OPTIONS)


@pytest.mark.root
def test_the_kernel_reads_further_ahead_than_it_does_by_itself(here: Mount) -> None:
    mount = mountinfo.find_mount(here.path)
    setting = Path(f"/sys/class/bdi/{mount.device}/read_ahead_kb")
    assert int(setting.read_text()) == READ_AHEAD_KIB == 1024


def test_closing_a_handle_that_cannot_write_asks_the_daemon_to_flush_nothing(here: Mount) -> None:
    path = here.path / "file"
    path.read_bytes()
    before = requests(here)
    for _ in range(100):
        os.close(os.open(path, os.O_RDONLY))
    # An OPEN and a RELEASE each.
    assert requests(here) - before <= 200 + FEW


@pytest.fixture
def warm(here: Mount) -> list[Path]:
    """Files that are in the cache."""
    with_passthrough(here)
    paths = [here.path / f"warm/{number}" for number in range(FILES)]
    for path in paths:
        read_all(path)
    return paths


def test_warm_opens_are_answered_by_compiled_code(here: Mount, warm: list[Path]) -> None:
    before = here.status()
    for _ in range(3):
        for number, path in enumerate(warm):
            assert path.read_bytes() == stamped(number, SIZE)
    after = here.status()
    assert after["requests"]["compiled"] > before["requests"]["compiled"] + 3 * FILES
    opens = after["cache"]["passthrough_opens"] - before["cache"]["passthrough_opens"]
    assert opens >= 3 * FILES


def test_what_compiled_code_has_opened_the_next_daemon_goes_on_with(
    here: Mount, warm: list[Path]
) -> None:
    """Files that were open when the daemon was killed are read and closed under the next one."""
    files = [path.open("rb", buffering=0) for path in warm]
    pid = here.pid
    os.kill(pid, signal.SIGKILL)
    for number, file in enumerate(files):
        assert file.read() == stamped(number, SIZE)
        file.close()
    for number, path in enumerate(warm):
        assert path.read_bytes() == stamped(number, SIZE)
    assert here.pid != pid
