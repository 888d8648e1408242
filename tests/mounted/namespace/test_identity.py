"""A file keeps its inode number, and no other file gets it: the same on a mount as on a disk."""

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.mounting import Mount
from tests.support.programs import WRITABLE
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.survival.surviving import replace_daemon
from tests.support.waiting import until

LOCK = Path(__file__).parents[2] / "support" / "lock_by_rename.py"


@pytest.fixture(params=["disk", "mount"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A new directory on a disk, or on the mount."""
    if request.param == "disk":
        return tmp_path
    mount: Mount = request.getfixturevalue("mount")
    return Path(tempfile.mkdtemp(dir=mount.path))


class Files:
    """Files whose numbers are looked at by name and through descriptors, by what they hold.

    Descriptors keep a disk from giving the number of a removed file to a new one.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.count = itertools.count()
        self.numbers: dict[str, int] = {}
        self.fds: dict[str, int] = {}

    def make(self, path: str) -> str:
        """Make or replace a file, and tell what it is called from now on."""
        call = f"file {next(self.count)}"
        (self.root / path).write_text(call)
        self.fds[call] = os.open(self.root / path, os.O_RDONLY)
        return call

    def check(self) -> None:
        """Each file has the number that it had, by each way to it, and no other one's."""
        for call, fd in self.fds.items():
            assert os.fstat(fd).st_ino == self.numbers.setdefault(call, os.fstat(fd).st_ino), call
        for directory, _, names in os.walk(self.root):
            shown = {entry.name: entry.inode() for entry in os.scandir(directory)}
            for name in names:
                path = Path(directory, name)
                assert path.stat().st_ino == shown[name] == self.numbers[path.read_text()], path
        assert len(set(self.numbers.values())) == len(self.numbers)

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)


@pytest.fixture
def files(place: Path) -> Iterator[Files]:
    files = Files(place)
    yield files
    files.close()


def change_names(files: Files) -> Iterator[None]:
    """Every way in which a file gets, changes and loses a name."""
    root = files.root
    for name in ("log", "log.tmp", "a", "b"):
        files.make(name)
    yield
    os.replace(root / "log.tmp", root / "log")
    files.make("log.tmp")
    yield
    os.replace(root / "log.tmp", root / "log")
    files.make("log.tmp")
    yield
    for old, new in (("a", "third"), ("b", "a"), ("third", "b")):
        os.rename(root / old, root / new)
    yield
    os.unlink(root / "a")
    files.make("a")
    yield
    (root / "d" / "deep").mkdir(parents=True)
    files.make("d/deep/file")
    files.make("d/file")
    yield
    os.rename(root / "d", root / "e")
    (root / "d" / "deep").mkdir(parents=True)
    files.make("d/deep/file")
    files.make("d/file")
    yield
    os.rename(root / "e" / "deep" / "file", root / "d" / "deep" / "file")
    os.rename(root / "d", root / "f")
    os.rename(root / "e", root / "d")
    yield
    os.rename(root / "log", root / "log.1")
    os.rename(root / "log.1", root / "log")
    yield


@states(
    "A file keeps its inode number when it, or a directory above it, is renamed here; whatever is"
    " made here under a name that another file had gets another one."
)
def test_a_number_belongs_to_a_file_and_not_to_a_name(files: Files) -> None:
    for _ in change_names(files):
        files.check()


def test_a_directory_keeps_its_number(place: Path) -> None:
    (place / "d" / "below").mkdir(parents=True)
    numbers = [(place / name).stat().st_ino for name in ("d", "d/below")]
    os.rename(place / "d", place / "e")
    (place / "d" / "below").mkdir(parents=True)
    assert [(place / name).stat().st_ino for name in ("e", "e/below")] == numbers
    assert not {(place / name).stat().st_ino for name in ("d", "d/below")} & set(numbers)


def forget(mount: Mount) -> None:
    """Have the kernel forget all that is not open."""
    nodes = mount.status()["metadata"]["nodes"]
    mount.forget()
    until(lambda: mount.status()["metadata"]["nodes"] < nodes, "a forget")


@states(
    "So it is also while nothing has the file open, and after the daemon's death or an upgrade."
)
@pytest.mark.parametrize("event", [forget, replace_daemon])
def test_numbers_stay_whatever_the_kernel_or_the_daemon_forgets(
    mount: Mount, event: Callable[[Mount], None]
) -> None:
    """Some files are open, and the others are known by their numbers alone."""
    files = Files(Path(tempfile.mkdtemp(dir=mount.path)))
    with contextlib.closing(files):
        for _ in change_names(files):
            files.check()
        for call in list(files.fds)[::2]:
            os.close(files.fds.pop(call))
        event(mount)
        files.check()
        os.unlink(files.root / "a")
        os.replace(files.root / "b", files.root / "log")
        for name in ("a", "b"):
            files.make(name)
        files.check()


def test_a_lock_that_gets_its_file_s_name_is_not_taken_for_another(place: Path) -> None:
    """As TensorStore locks: what is written to the lock file becomes the file by a rename."""
    (place / "file").write_text("0")
    programs = [subprocess.Popen([sys.executable, LOCK, place / "file", "12"]) for _ in range(3)]
    assert [program.wait(180) for program in programs] == [0, 0, 0]
    assert (place / "file").read_text() == "36"


@states(
    "A file that another node has replaced keeps its number; one that another node has renamed has"
    " that of its new name."
)
def test_the_number_of_a_file_that_another_node_changed(
    mounter: Callable[..., Mount], bucket: Bucket
) -> None:
    bucket.put("file", b"old")
    path = mounter("--metadata-ttl", "0s", *WRITABLE).path / "file"
    first = path.stat().st_ino
    bucket.put("file", b"newer")
    assert (path.stat().st_size, path.stat().st_ino) == (5, first)
    bucket.client.delete_object(Bucket=bucket.name, Key="file")
    bucket.put("other", b"newer")
    assert path.with_name("other").stat().st_ino != first
