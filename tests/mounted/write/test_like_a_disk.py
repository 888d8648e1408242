"""Random operations on a mount and on a directory of the local disk: the same comes out.

Each operation is done on both, and what it returns, or the error, has to be the
same. What its names show is compared after each, everything now and then and
at the end: by the mount, by the mount made again, and by S3 alone.
"""

import contextlib
import errno
import itertools
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from tests.support.mounting import Mount, Mounter, fusefs
from tests.support.programs import WRITABLE, in_bucket, rename_to_a_new_name, tree
from tests.support.servers.buckets import Bucket
from tests.support.sharing import in_storms

NAMES = st.sampled_from(["a", "b", "b.x"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
SIZES = st.one_of(st.integers(0, 10), st.integers(0, 70_000))
CONTENTS = st.builds(lambda size, byte: bytes([byte]) * size, SIZES, st.integers(0, 255))
MODES = st.sampled_from([0o600, 0o644, 0o755, 0o1777, 0o400])
ACCESS = st.sampled_from([os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
# Times that are set are older than any that a write or the server gives.
OLDEST_NS, NEWEST_NS = 10**17, 10**18
ATTRIBUTES = ["user.a", "user.b"]
OPEN_AT_MOST = 6

SETTINGS = settings(
    stateful_step_count=200,
    suppress_health_check=list(HealthCheck),
    # Making the example smaller takes minutes, and the time limit would hide what differed.
    phases=[Phase.explicit, Phase.generate],
)


def outcome(call: Callable[[Path], object], root: Path) -> object:
    try:
        return call(root)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def shown(found: os.stat_result) -> tuple[object, ...]:
    """What of a file's attributes has to be the same."""
    if stat.S_ISDIR(found.st_mode):
        return (found.st_mode,)
    time_ns = found.st_mtime_ns if found.st_mtime_ns <= NEWEST_NS else "later"
    owner = (found.st_uid, found.st_gid)
    if stat.S_ISLNK(found.st_mode):
        return found.st_mode, found.st_size, owner
    return found.st_mode, found.st_size, owner, time_ns


def look(root: Path, path: str) -> object:
    """Everything that a name shows."""
    place = root / path
    found = os.lstat(place)
    if stat.S_ISLNK(found.st_mode):
        return shown(found), os.readlink(place)
    if stat.S_ISDIR(found.st_mode):
        return shown(found), sorted(os.listdir(place))
    return shown(found), place.read_bytes()


def attributes_of(root: Path) -> dict[str, object]:
    """What everything below shows, contents aside."""
    found = {}
    for directory, directories, files in os.walk(root):
        for name in directories + files:
            path = os.path.join(directory, name)
            found[os.path.relpath(path, root)] = shown(os.lstat(path))
    return found


def of_files(found: dict[str, Any]) -> dict[str, Any]:
    return {path: facts for path, facts in found.items() if not stat.S_ISDIR(facts[0])}


@dataclass
class Handles:
    """One open file on both; `first` is what it had when it was opened as `path`."""

    plain: int
    mounted: int
    flags: int
    first: bytes
    path: str


class Disks(RuleBasedStateMachine):
    """`mounted` and `plain` get the same operations."""

    mount: Mount
    bucket: Bucket
    scratch: Path
    has_attributes: bool
    numbers = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        number = next(self.numbers)
        for root in (self.mount.path, self.scratch):
            # SeaweedFS deletes what gets the name of a removed folder, 150 s later (support.md).
            shutil.rmtree(root / f"example-{number - 10}", ignore_errors=True)
        self.prefix = f"example-{number}"
        self.mounted = self.mount.path / self.prefix
        self.plain = self.scratch / self.prefix
        self.mounted.mkdir()
        self.plain.mkdir()
        self.open: list[Handles] = []

    def both(self, call: Callable[[Path], object], *paths: str) -> None:
        """Do something on both, and look at the names that it may have changed."""
        before = self.numbers_of(paths)
        expected, got = outcome(call, self.plain), outcome(call, self.mounted)
        assert got == expected
        now = self.numbers_of(paths)
        assert {number: now[number] for number in before.keys() & now} == {
            number: before[number] for number in before.keys() & now
        }
        assert len(set(now.values())) == len(now)
        for path in paths:
            expected = outcome(lambda root, path=path: look(root, path), self.plain)
            got = outcome(lambda root, path=path: look(root, path), self.mounted)
            assert got == expected, path

    def numbers_of(self, paths: tuple[str, ...]) -> dict[int, int]:
        """The mount's inode numbers by the disk's, of files that have one of these names or none.

        A number that the disk gives to another file would be one that was free before.
        """
        found = [(os.fstat(one.plain).st_ino, os.fstat(one.mounted).st_ino) for one in self.open]
        for path in paths:
            one, other = (
                outcome(lambda root, path=path: os.lstat(root / path).st_ino, root)
                for root in (self.plain, self.mounted)
            )
            if isinstance(one, int) and isinstance(other, int):
                found.append((one, other))
        assert len(set(found)) == len(dict(found))
        return dict(found)

    @rule(path=PATHS, content=CONTENTS)
    def write(self, path: str, content: bytes) -> None:
        self.both(lambda root: (root / path).write_bytes(content), path)

    @rule(path=PATHS, content=CONTENTS)
    def append(self, path: str, content: bytes) -> None:
        def act(root: Path) -> int:
            with open(root / path, "ab") as file:
                return file.write(content)

        self.both(act, path)

    @rule(path=PATHS, offset=SIZES, content=CONTENTS)
    def edit(self, path: str, offset: int, content: bytes) -> None:
        def act(root: Path) -> int:
            with open(root / path, "r+b") as file:
                file.seek(offset)
                return file.write(content)

        self.both(act, path)

    @rule(path=PATHS, size=SIZES)
    def truncate(self, path: str, size: int) -> None:
        if outcome(lambda root: os.stat(root / path).st_size, self.plain) != size:
            # Where nothing changes, file systems differ in whether it has been written.
            self.both(lambda root: os.truncate(root / path, size), path)

    @rule(path=PATHS, flag=st.sampled_from([os.O_EXCL, os.O_TRUNC, 0]), mode=MODES)
    def create(self, path: str, flag: int, mode: int) -> None:
        def act(root: Path) -> None:
            os.close(os.open(root / path, os.O_CREAT | os.O_WRONLY | flag, mode))

        self.both(act, path)

    @rule(path=PATHS, content=CONTENTS)
    def save_by_rename(self, path: str, content: bytes) -> None:
        def act(root: Path) -> None:
            temporary = root / f"{path}.tmp"
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.replace(temporary, root / path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)

        self.both(act, path)

    @rule(path=PATHS, mode=st.sampled_from([0o700, 0o755]))
    def make_directory(self, path: str, mode: int) -> None:
        self.both(lambda root: os.mkdir(root / path, mode), path)

    @rule(path=PATHS)
    def remove_directory(self, path: str) -> None:
        self.both(lambda root: os.rmdir(root / path), path)

    @rule(path=PATHS)
    def unlink(self, path: str) -> None:
        self.both(lambda root: os.unlink(root / path), path)

    @rule(source=PATHS, to=PATHS)
    def rename(self, source: str, to: str) -> None:
        self.both(lambda root: os.rename(root / source, root / to), source, to)

    @rule(source=PATHS, to=PATHS)
    def rename_to_a_new_name(self, source: str, to: str) -> None:
        self.both(lambda root: rename_to_a_new_name(root / source, root / to), source, to)

    @rule(path=PATHS, to=PATHS)
    def make_link(self, path: str, to: str) -> None:
        self.both(lambda root: os.symlink(to, root / path), path)

    @rule(path=PATHS, mode=MODES)
    def change_mode(self, path: str, mode: int) -> None:
        self.both(lambda root: os.chmod(root / path, mode), path)

    @rule(path=PATHS, uid=st.sampled_from([-1, 0, 12]), gid=st.sampled_from([-1, 0, 34]))
    def change_owner(self, path: str, uid: int, gid: int) -> None:
        self.both(lambda root: os.chown(root / path, uid, gid, follow_symlinks=False), path)

    @rule(path=PATHS, time_ns=st.integers(OLDEST_NS, NEWEST_NS))
    def change_time(self, path: str, time_ns: int) -> None:
        self.both(lambda root: os.utime(root / path, ns=(time_ns, time_ns)), path)

    @precondition(lambda self: self.has_attributes)
    @rule(path=PATHS, name=st.sampled_from(ATTRIBUTES), value=st.binary(max_size=40))
    def set_attribute(self, path: str, name: str, value: bytes) -> None:
        self.both(lambda root: os.setxattr(root / path, name, value))
        self.get_attributes(path)

    @precondition(lambda self: self.has_attributes)
    @rule(path=PATHS, name=st.sampled_from(ATTRIBUTES))
    def remove_attribute(self, path: str, name: str) -> None:
        self.both(lambda root: os.removexattr(root / path, name))
        self.get_attributes(path)

    @precondition(lambda self: self.has_attributes)
    @rule(path=PATHS)
    def get_attributes(self, path: str) -> None:
        def act(root: Path) -> object:
            names = [name for name in os.listxattr(root / path) if name in ATTRIBUTES]
            return {name: os.getxattr(root / path, name) for name in names}

        self.both(act)

    @precondition(lambda self: len(self.open) < OPEN_AT_MOST)
    @rule(
        path=PATHS,
        access=ACCESS,
        more=st.sampled_from([0, os.O_CREAT, os.O_TRUNC | os.O_CREAT, os.O_APPEND]),
    )
    def open_file(self, path: str, access: int, more: int) -> None:
        """A file stays open while other things happen to its name."""
        if access == os.O_RDONLY:
            more = 0
        fds = [outcome(lambda root: os.open(root / path, access | more), self.plain)]
        fds.append(outcome(lambda root: os.open(root / path, access | more), self.mounted))
        if not isinstance(fds[0], int) or not isinstance(fds[1], int):
            assert fds[0] == fds[1], path
            return
        if os.path.isdir(self.plain / path):
            for fd in fds:
                os.close(fd)
            return
        first = Path(f"/proc/self/fd/{fds[0]}").read_bytes()
        self.open.append(Handles(fds[0], fds[1], access | more, first, path))

    def compare_handles(self, plain: int) -> None:
        """All that have one file open see the same of it, whatever was done through which."""
        mine = os.fstat(plain)
        handles = [one for one in self.open if os.fstat(one.plain).st_ino == mine.st_ino]
        if mine.st_nlink:
            return
        shown_by = [os.fstat(one.mounted) for one in handles]
        assert {one.st_nlink for one in shown_by} == {0}
        assert len({one.st_ino for one in shown_by}) == 1
        time_ns = mine.st_mtime_ns
        for one in shown_by:
            assert (one.st_mode, one.st_uid, one.st_gid) == (mine.st_mode, mine.st_uid, mine.st_gid)
            assert (
                (one.st_mtime_ns == time_ns)
                if time_ns <= NEWEST_NS
                else (one.st_mtime_ns > NEWEST_NS)
            )

    @rule(path=PATHS, flag=st.sampled_from([os.O_RDONLY, os.O_WRONLY, os.O_RDWR]), mode=MODES)
    def remove_while_open_twice(self, path: str, flag: int, mode: int) -> None:
        """One reads, the other may write, and then the name goes."""
        if len(self.open) > OPEN_AT_MOST - 2 or not (self.plain / path).is_file():
            return
        before = len(self.open)
        self.open_file(path, os.O_RDONLY, 0)
        self.open_file(path, flag, 0)
        self.unlink(path)
        for one in self.open[before:]:
            self.compare_handles(one.plain)
            self.both(lambda _root: None, path)
            os.fchmod(one.plain, mode)
            os.fchmod(one.mounted, mode)
            self.compare_handles(one.plain)

    def both_open(self, number: int, call: Callable[[int], object]) -> None:
        one = self.open[number % len(self.open)]
        expected = outcome(lambda _: call(one.plain), self.plain)
        got = outcome(lambda _: call(one.mounted), self.mounted)
        assert got == expected

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 5), offset=SIZES, content=CONTENTS)
    def write_open(self, number: int, offset: int, content: bytes) -> None:
        self.both_open(number, lambda fd: os.pwrite(fd, content, offset))

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 5), size=SIZES)
    def truncate_open(self, number: int, size: int) -> None:
        self.both_open(number, lambda fd: os.ftruncate(fd, size))

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 5), offset=SIZES, size=SIZES)
    def allocate(self, number: int, offset: int, size: int) -> None:
        self.both_open(number, lambda fd: os.posix_fallocate(fd, offset, size + 1))

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 5))
    def sync(self, number: int) -> None:
        self.both_open(number, os.fsync)

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 5))
    def read_open(self, number: int) -> None:
        one = self.open[number % len(self.open)]
        if one.flags & os.O_ACCMODE == os.O_RDONLY:
            # A file that the kernel reads by itself stays as it was opened.
            now = os.pread(one.plain, 1 << 20, 0)
            assert os.pread(one.mounted, 1 << 20, 0) in (now, one.first)
        else:
            self.both_open(number, lambda fd: os.pread(fd, 1 << 20, 0))
            self.both_open(number, lambda fd: shown(os.fstat(fd)))

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 5), mode=MODES, time_ns=st.integers(OLDEST_NS, NEWEST_NS))
    def change_open(self, number: int, mode: int, time_ns: int) -> None:
        one = self.open[number % len(self.open)]
        self.both_open(number, lambda fd: os.fchmod(fd, mode))
        self.both_open(number, lambda fd: os.fchown(fd, mode % 7, -1))
        self.both_open(number, lambda fd: os.utime(fd, ns=(time_ns, time_ns)))
        self.compare_handles(one.plain)
        self.both(lambda _root: None, one.path)

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 5))
    def close(self, number: int) -> None:
        one = self.open.pop(number % len(self.open))
        os.close(one.plain)
        os.close(one.mounted)

    @rule()
    def compare_everything(self) -> None:
        self.compare(tree(self.mounted))

    def compare(self, got: dict[str, Any]) -> None:
        assert contents(got) == contents(tree(self.plain))
        assert attributes_of(self.mounted) == attributes_of(self.plain)

    def teardown(self) -> None:
        while self.open:
            self.close(0)
        self.compare(tree(self.mounted))
        fd = os.open(self.mounted, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(fd)  # of many removals the bucket hears a moment later
        os.close(fd)
        # Closes of a file that is appended to again and again wait for the local disk alone.
        fusefs("sync", self.mounted)
        assert contents(in_bucket(self.bucket, self.prefix + "/")) == contents(tree(self.plain))


def contents(found: dict[str, Any]) -> dict[str, Any]:
    return {path: (one.kind, one.content) for path, one in found.items()}


def can_set_attributes(path: Path) -> bool:
    path.touch()
    try:
        os.setxattr(path, "user.a", b"")
    except OSError:
        return False
    finally:
        path.unlink()
    return True


@pytest.mark.root
@in_storms("examples", 2, 100)
def test_a_mount_behaves_like_a_disk(
    mounter: Mounter, bucket: Bucket, tmp_path: Path, examples: int
) -> None:
    mount = mounter(*WRITABLE)
    (tmp_path / "plain").mkdir()

    class Machine(Disks):
        has_attributes = all(map(can_set_attributes, (mount.path / "x", tmp_path / "x")))

    Machine.mount, Machine.bucket, Machine.scratch = mount, bucket, tmp_path / "plain"
    run_state_machine_as_test(Machine, settings=settings(SETTINGS, max_examples=examples))
    before = attributes_of(mount.path)
    mount.end()
    mount.start()
    assert contents(tree(mount.path)) == contents(tree(tmp_path / "plain"))
    # The server of the tests forgets what belongs to a directory's marker.
    assert of_files(attributes_of(mount.path)) == of_files(before)
    assert not bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads")
