"""Directories that change while they are mounted: when a program sees it, and what never."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from tests.support.machine.libc import DirectoryStream
from tests.support.mounting import WRITABLE, Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.flat_s3 import ListingServer
from tests.support.sharing import read_all
from tests.support.waiting import until

TTL_S = 1


@pytest.fixture(scope="module")
def at_once(module_mounter: Mounter) -> Path:
    """A mount that asks the bucket at each open, with a folder for each test."""
    return module_mounter("--metadata-ttl", "0s").path


@pytest.fixture(scope="module")
def for_a_second(shared: Bucket, module_mounter: Mounter) -> Path:
    """A mount that relies for TTL_S on what it was told, with a folder for each test."""
    for key in ("changing/changes", "changing/goes", "listed/file"):
        shared.put(key, b"old")
    return module_mounter("--metadata-ttl", f"{TTL_S}s").path


def seen(path: Path) -> bytes | None:
    try:
        return read_all(path)
    except FileNotFoundError:
        return None


@states("A change in the bucket is seen when `--metadata-ttl` has passed, at the latest.")
def test_a_change_is_seen_when_the_ttl_has_passed(for_a_second: Path, shared: Bucket) -> None:
    """Also by programs that look all the time, and so renew whatever is kept."""
    root = for_a_second / "changing"

    def look() -> tuple[bytes | None, bytes | None, bytes | None, list[str]]:
        files = (seen(root / name) for name in ("changes", "goes", "comes"))
        return (*files, sorted(os.listdir(root)))

    assert look() == (b"old", b"old", None, ["changes", "goes"])
    shared.put("changing/changes", b"newer")
    shared.delete("changing/goes")
    shared.put("changing/comes", b"new")
    # Some seconds for the way of an answer to the kernel on a busy machine.
    deadline = time.monotonic() + TTL_S + 3
    while time.monotonic() < deadline:
        look()
        time.sleep(0.05)
    assert look() == (b"newer", None, b"new", ["changes", "comes"])
    assert (root / "changes").stat().st_size == 5


def test_listing_a_directory_again_renews_no_attributes(for_a_second: Path, shared: Bucket) -> None:
    root = for_a_second / "listed"
    assert os.listdir(root) == ["file"]
    assert (root / "file").stat().st_size == 3
    shared.put("listed/file", b"newer")
    changed = time.monotonic()
    while time.monotonic() < changed + TTL_S - 0.5:
        os.listdir(root)
        time.sleep(0.05)
    time.sleep(max(0.0, changed + TTL_S + 3 - time.monotonic()))
    assert (root / "file").stat().st_size == 5


@states("With `--metadata-ttl 0s` every open asks the bucket, and sees a change at once.")
def test_a_ttl_of_zero_sees_every_change_at_once(at_once: Path, shared: Bucket) -> None:
    path = at_once / "d" / "file"
    for number in range(5):
        data = b"%d" % number * (number + 1)
        shared.put("d/file", data)
        assert read_all(path) == data
        assert path.stat().st_size == len(data)
        assert os.listdir(at_once / "d") == ["file"]
        shared.delete("d/file")
        assert seen(path) is None


@states("With `--metadata-ttl indefinite` what was once listed is used for ever.")
def test_an_indefinite_ttl_asks_never_again(mounter: Mounter, bucket: Bucket) -> None:
    bucket.put("d/file", b"old")
    here = mounter("--metadata-ttl", "indefinite")
    assert read_all(here.path / "d" / "file") == b"old"
    bucket.put("d/file", b"newer")
    bucket.put("d/new", b"")
    here.forget()
    before = here.status()["s3"]
    assert read_all(here.path / "d" / "file") == b"old"
    assert (here.path / "d" / "file").stat().st_size == 3
    assert seen(here.path / "d" / "new") is None
    assert here.status()["s3"] == before


@states(
    "`--metadata-ttl` is a time, or for some paths TIME:PATTERN, as `--durability` has it: of"
    " `60s,indefinite:data/**` what is below `data` is used for ever."
)
def test_a_ttl_is_for_some_paths(mounter: Mounter, bucket: Bucket) -> None:
    for folder in ("data", "others"):
        bucket.put(f"{folder}/deep/file", b"old")
    root = mounter("--metadata-ttl", "0s,indefinite:data/**").path
    for folder in ("data", "others"):
        assert read_all(root / folder / "deep" / "file") == b"old"
        bucket.put(f"{folder}/deep/file", b"newer")
    assert read_all(root / "data" / "deep" / "file") == b"old"
    assert read_all(root / "others" / "deep" / "file") == b"newer"


def test_a_file_becomes_a_directory_and_back(at_once: Path, shared: Bucket) -> None:
    name = at_once / "kinds" / "name"
    for _ in range(3):
        shared.put("kinds/name", b"a file")
        assert read_all(name) == b"a file"
        shared.delete("kinds/name")
        shared.put("kinds/name/inside", b"in a directory")
        assert os.listdir(name) == ["inside"]
        assert read_all(name / "inside") == b"in a directory"
        shared.delete("kinds/name/inside")


@states("A directory ends with its last object, unless it has a marker.")
def test_a_directory_ends_with_its_last_object(mounter: Mounter) -> None:
    """On a server that only lists, for SeaweedFS keeps empty directories."""
    with ListingServer(["d/only", "marked/", "marked/only", "other"]) as server:
        url = server.endpoint_url
        mount = mounter("--anonymous", "--metadata-ttl", "0s", endpoint_url=url)
        assert os.listdir(mount.path) == ["d", "marked", "other"]
        assert os.listdir(mount.path / "d") == ["only"]
        for key in ("d/only", "marked/only"):
            del server.objects[key]
        assert not (mount.path / "d").exists()
        assert os.listdir(mount.path / "marked") == []
        assert os.listdir(mount.path) == ["marked", "other"]


@states(
    "A directory that is opened again shows what is there now, within the metadata TTL.",
    "`rewinddir` asks again as well where the metadata TTL is under 10 s;"
    " with a longer one the kernel may repeat what it has.",
)
def test_a_directory_opened_again_or_rewound_shows_new_names(
    mounter: Mounter, bucket: Bucket
) -> None:
    bucket.put("d/first", b"")
    path = mounter("--metadata-ttl", "300ms").path / "d"
    with DirectoryStream(path) as stream:
        assert "first" in stream.names()
        bucket.put("d/second", b"")
        until(lambda: os.listdir(path) == ["first", "second"], "the new name")
        bucket.put("d/third", b"")

        def again() -> bool:
            stream.rewind()
            return "third" in stream.names()

        until(again, "the new name")


def test_readers_of_a_directory_that_changes_see_each_name_at_most_once(
    at_once: Path, shared: Bucket
) -> None:
    stay = {f"stays-{n:02d}" for n in range(20)}
    for name in stay:
        shared.put("many/" + name, b"")
    done = threading.Event()

    def change() -> None:
        n = 0
        while not done.is_set():
            shared.put(f"many/comes-{n % 10}", b"")
            shared.delete(f"many/comes-{(n + 5) % 10}")
            n += 1

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(30):
            names = os.listdir(at_once / "many")
            assert len(set(names)) == len(names)
            assert stay <= set(names)
    finally:
        done.set()
        changer.join()


@states(
    "`rmdir`, and a rename over a directory, look into the bucket: what another node has put there"
    " since it was listed makes them fail (ENOTEMPTY), and is listed from then on."
)
def test_what_another_node_has_put_into_a_directory_keeps_it(mounter: Mounter) -> None:
    here, there = mounter(WRITABLE).path, mounter(WRITABLE, cache="there").path
    for name in ("removed", "replaced", "over"):
        (here / name).mkdir()
        assert os.listdir(here / name) == []
    for full, change in (
        ("removed", lambda: (here / "removed").rmdir()),
        ("replaced", lambda: (here / "over").rename(here / "replaced")),
    ):
        (there / full / "theirs").write_bytes(b"theirs")
        with pytest.raises(OSError, match="not empty") as refused:
            change()
        assert refused.value.errno == errno.ENOTEMPTY
        assert os.listdir(here / full) == ["theirs"]
        (here / full / "theirs").unlink()
        change()
    assert os.listdir(here) == ["replaced"]
