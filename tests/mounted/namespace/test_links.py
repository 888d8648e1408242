"""Hard links, and renames that replace nothing: what programs publish and lock by.

A script that means the same on a disk runs there, too.
"""

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.mounting import WRITABLE, Mount, Mounter, all_sent, cost, metadata
from tests.support.programs import rename_to_a_new_name
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import PATIENCE_S, python
from tests.support.survival.surviving import kill_serving
from tests.support.waiting import until

CONTENDERS = 8
PUBLISHING: dict[str, Callable[[Path, Path], None]] = {
    "link": os.link,
    "rename": rename_to_a_new_name,
}


@pytest.fixture(scope="module")
def root(module_mounter: Mounter) -> Mount:
    """A mount that the tests share; each has a directory of its own."""
    return module_mounter(WRITABLE, "--session", "kernel")


@pytest.fixture
def here(root: Mount, request: pytest.FixtureRequest) -> Path:
    path: Path = root.path / request.node.name
    path.mkdir()
    return path


def linked_script(here: Path) -> list[object]:
    """What programs see of files with two names."""
    seen: list[object] = []

    def note(call: Callable[[], object]) -> None:
        try:
            seen.append(call())
        except OSError as error:
            seen.append(errno.errorcode[error.errno or 0])

    (here / "old").write_bytes(b"content")
    (here / "old").chmod(0o640)
    os.chown(here / "old", 1234, 2345)
    os.utime(here / "old", ns=(5_000_000_007, 6_000_000_008))
    os.setxattr(here / "old", "user.color", b"blue")
    (here / "dir").mkdir()
    os.symlink("old", here / "symbolic")
    note(lambda: os.link(here / "old", here / "new"))
    note(lambda: os.link(here / "old", here / "dir" / "below"))
    note(lambda: os.link(here / "old", here / "new"))
    note(lambda: os.link(here / "none", here / "x"))
    note(lambda: os.link(here / "dir", here / "x"))
    note(lambda: os.link(here / "old", here / "dir"))
    note(lambda: os.link(here / "old", here / ("x" * 256)))
    note(lambda: os.link(here / "symbolic", here / "second", follow_symlinks=False))
    note(lambda: os.readlink(here / "second"))
    for name in ("old", "new", "dir/below"):
        found = (here / name).stat()
        seen += [found.st_nlink, os.path.samefile(here / "old", here / name)]
        seen += [found.st_size, found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns]
        seen += [os.getxattr(here / name, "user.color"), (here / name).read_bytes()]
    with (here / "open").open("w+b", buffering=0) as file:
        file.write(b"not closed yet")
        note(lambda: os.link(here / "open", here / "published"))
        note(lambda: (here / "published").read_bytes())
        os.unlink(here / "open")
        note(lambda: os.link(f"/proc/self/fd/{file.fileno()}", here / "x", follow_symlinks=True))
    note(lambda: (here / "published").read_bytes())
    os.unlink(here / "old")
    note(lambda: (here / "new").stat().st_nlink)
    os.rename(here / "new", here / "renamed")
    note(lambda: os.path.samefile(here / "renamed", here / "dir" / "below"))
    os.rename(here / "renamed", here / "new")
    note(lambda: (here / "new").read_bytes())
    seen.append(sorted(os.listdir(here)))
    return seen


@states(
    "A hard link is a copy of the object, with its attributes, made where there is nothing of the"
    " new name: EEXIST else."
)
def test_a_file_gets_a_second_name_as_on_a_disk(here: Path, tmp_path: Path, shared: Bucket) -> None:
    assert linked_script(here) == linked_script(tmp_path)
    assert stored(shared, f"{here.name}/published") == b"not closed yet"
    assert metadata(shared, f"{here.name}/new")["mtime"] == "6.000000008"


@states(
    "Names that a link has made are one file's, with one inode number and counted by `st_nlink`,"
    " until the first change of content or attributes through one of them: that is its alone, and"
    " it is a file by itself from then on.",
    "A name that the kernel forgets meanwhile, or that somebody else replaces, is a file by"
    " itself as well.",
)
def test_the_names_of_a_file_part_at_the_first_change(here: Path, root: Mount) -> None:
    def shown() -> list[tuple[int, int]]:
        found = [(here / name).stat() for name in "abc"]
        numbers = [one.st_ino for one in found]
        return [(numbers.index(one.st_ino), one.st_nlink) for one in found]

    changes: list[Callable[[Path], object]] = [
        lambda path: path.write_bytes(b"other"),
        lambda path: path.chmod(0o600),
        lambda path: os.truncate(path, 1),
        lambda path: os.setxattr(path, "user.a", b"x"),
    ]
    for change in changes:
        (here / "a").write_bytes(b"content")
        os.link(here / "a", here / "b")
        os.link(here / "b", here / "c")
        mode = (here / "a").stat().st_mode
        assert shown() == [(0, 3)] * 3
        kill_serving(root)
        with (here / "b").open("rb") as file:
            assert file.read() == b"content"
            assert shown() == [(0, 3)] * 3
            change(here / "b")
            assert shown() == [(0, 2), (1, 1), (0, 2)]
        assert [(here / name).read_bytes() for name in "ac"] == [b"content"] * 2
        assert (here / "c").stat().st_mode == mode
        for name in "abc":
            (here / name).unlink()


@states(
    "Of two nodes that make one name by `link`, or by a rename that is to replace nothing, one gets"
    " EEXIST, where the store knows conditional writes and copies."
)
def test_of_two_mounts_one_publishes_a_name(mounter: Mounter) -> None:
    roots = [mounter(WRITABLE, cache=name).path for name in ("one", "other")]
    for way in PUBLISHING:
        for round in range(4):
            name = f"{way}-{round}"
            assert len(set(contend(roots, name, way, is_open=round % 2 > 0))) == 1


def contend(roots: list[Path], name: str, way: str, *, is_open: bool) -> list[bytes]:
    """Have threads publish one name, half of them on each mount; return what there is of it.

    That is what won, more than once if more have, and what each mount and the disk show.
    """
    start = threading.Barrier(CONTENDERS)
    won: list[bytes] = []

    def publish(number: int) -> None:
        root, content = roots[number % len(roots)], b"%d" % number
        with (root / f"{name}-{number}").open("wb", buffering=0) as file:
            file.write(content)
            if not is_open:
                file.close()
            start.wait()
            with contextlib.suppress(FileExistsError):
                PUBLISHING[way](root / f"{name}-{number}", root / name)
                won.append(content)

    with ThreadPoolExecutor(CONTENDERS) as pool:
        list(pool.map(publish, range(CONTENDERS)))
    for root in roots:
        until(lambda: name in os.listdir(root), "it is seen")  # noqa: B023
    return won + [(root / name).read_bytes() for root in roots]


@pytest.fixture
def through(behind: Mounter) -> Mount:
    """A mount whose requests may fail."""
    return behind("--session", "kernel", WRITABLE)


@pytest.mark.usefixtures("as_owner")
def test_a_name_is_published_once_when_the_daemon_dies(
    through: Mount, faulty: FaultyS3, bucket: Bucket
) -> None:
    """Its own copy is no other node's, also where the answer is lost, and another's is not its."""
    root = through.path

    def publish(way: str, name: str, before: Callable[[], object], *, is_open: bool) -> None:
        faulty.add("PUT" if is_open else "COPY", name, times=1, before=before, lose_answer=True)
        with (root / f"my-{name}").open("wb", buffering=0) as file:
            file.write(b"mine")
            if not is_open:
                file.close()
            PUBLISHING[way](root / f"my-{name}", root / name)

    for way, is_open in itertools.product(PUBLISHING, (False, True)):
        kind = f"{way}-{'open' if is_open else 'closed'}"
        publish(way, f"lost-{kind}", lambda: None, is_open=is_open)
        publish(way, f"killed-{kind}", lambda: kill_serving(through), is_open=is_open)
        for number, fate in enumerate((lambda: None, lambda: kill_serving(through))):
            name = f"theirs-{kind}-{number}"

            def come_first(name: str = name, fate: Callable[[], object] = fate) -> None:
                bucket.put(name, b"mine")
                fate()

            with pytest.raises(FileExistsError):
                publish(way, name, come_first, is_open=is_open)
            assert metadata(bucket, name) == {}
        assert stored(bucket, f"lost-{kind}") == stored(bucket, f"killed-{kind}") == b"mine"


@states(
    "A link waits for the bucket, also with `--durability local`, and of a file that was not"
    " uploaded yet it uploads the content under the new name."
)
def test_what_is_published_is_in_the_bucket_however_late_uploads_are(
    mounter: Mounter, bucket: Bucket
) -> None:
    options = ("--session", "kernel", WRITABLE, "--no-delete", "--durability", "local")
    mount = mounter(*options, "--metadata-ttl", "indefinite")
    root = mount.path
    (root / "file").write_bytes(b"content")
    assert cost(mount, lambda: os.link(root / "file", root / "link")) == {"puts": 1}
    assert stored(bucket, "link") == b"content"
    (root / "staged").write_bytes(b"content")
    assert cost(mount, lambda: rename_to_a_new_name(root / "staged", root / "new")) == {"puts": 1}
    assert stored(bucket, "new") == b"content"
    all_sent(mount)
    assert cost(mount, lambda: os.link(root / "file", root / "again")) == {"heads": 1, "copies": 1}
    assert keys(bucket) == ["again", "file", "link", "new"]


def test_a_store_that_ignores_conditions_is_asked_first(
    through: Mount, faulty: FaultyS3, bucket: Bucket
) -> None:
    bucket.put("file", b"content")
    root = through.path
    for operation in ("PUT", "COPY"):
        faulty.add(operation, with_header="if-none-match", code="NotImplemented")
    os.link(root / "file", root / "one")
    with (root / "open").open("wb") as file:
        file.write(b"more")
        file.flush()
        os.link(root / "open", root / "two")
        assert not (root / "three").exists()
        bucket.put("three", b"theirs")
        with pytest.raises(FileExistsError):
            os.link(root / "open", root / "three")
    assert not (root / "four").exists()
    bucket.put("four", b"theirs")
    with pytest.raises(FileExistsError):
        os.link(root / "file", root / "four")
    assert [stored(bucket, name) for name in ("one", "two", "three", "four")] == [
        b"content",
        b"more",
        b"theirs",
        b"theirs",
    ]


def test_a_link_is_whole_where_its_program_is_killed(
    through: Mount, faulty: FaultyS3, bucket: Bucket
) -> None:
    bucket.put("file", b"content")
    rule = faulty.add("COPY", times=1, stall=True)
    program = python(
        "import os, sys; os.link(sys.argv[1], sys.argv[1] + '2')", through.path / "file"
    )
    until(lambda: rule.used, "the copy is under way")
    program.kill()
    program.communicate(timeout=PATIENCE_S)
    faulty.remove(rule)
    until(lambda: "file2" in os.listdir(through.path), "the mount shows it")
    assert stored(bucket, "file2") == b"content"
