"""Renames on a mount: what the kernel has open or cached goes along, and kills do no harm."""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mounting import WRITABLE, Mount, Mounter, cost, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import content
from tests.support.survival.surviving import kill_everything, kill_serving
from tests.support.waiting import until

pytestmark = pytest.mark.root

OPTIONS = ("--session", "kernel", WRITABLE)
MIB = 1 << 20


@pytest.fixture(scope="module")
def writable(shared: Bucket, module_mounter: Mounter) -> Mount:
    shared.put("tree/of/files/one", b"1")
    return module_mounter(*OPTIONS, "--metadata-ttl", "indefinite")


def keys(bucket: Bucket, prefix: str) -> list[str]:
    page = bucket.client.list_objects_v2(Bucket=bucket.name, Prefix=prefix)
    return [one["Key"] for one in page.get("Contents", [])]


@states("What was cached is read from the cache after a rename, of a file or of a directory.")
def test_what_was_saved_by_rename_is_read_from_the_cache(writable: Mount, shared: Bucket) -> None:
    data = content("model", 3 * MIB)
    path = writable.path / "model"
    path.write_bytes(b"old")
    writable.path.joinpath("model.tmp").write_bytes(data)
    taken = cost(writable, lambda: os.replace(writable.path / "model.tmp", path))
    assert taken["puts"] == 1
    assert cost(writable, lambda: path.read_bytes()) == {}
    assert path.read_bytes() == data
    assert keys(shared, "model") == ["model"]


def test_a_file_that_is_read_by_passthrough_is_opened_again_after_a_rename(writable: Mount) -> None:
    data = content("held", 3 * MIB)
    os.makedirs(writable.path / "run-1")
    (writable.path / "run-1" / "held").write_bytes(data)
    with open(writable.path / "run-1" / "held", "rb", buffering=0) as held:
        assert held.read(MIB) == data[:MIB]
        os.rename(writable.path / "run-1", writable.path / "run-2")
        assert held.read(MIB) == data[MIB : 2 * MIB]
        moved = writable.path / "run-2" / "held"
        assert cost(writable, lambda: moved.read_bytes()) == {}
        os.rename(moved, writable.path / "kept")
        with open(writable.path / "kept", "rb", buffering=0) as again:
            assert again.read() == data
            assert held.read(MIB) == data[2 * MIB :]
            assert os.fstat(again.fileno()).st_ino == os.fstat(held.fileno()).st_ino


def test_names_cost_few_requests(writable: Mount) -> None:
    top = writable.path / "few"
    top.mkdir()  # in a directory of others' a name that is new takes a LIST, or not
    inner = top / "inner"
    assert cost(writable, inner.mkdir) == {"puts": 1}
    assert cost(writable, lambda: (inner / "a").write_bytes(b"a")) == {"puts": 1}
    (inner / "b").write_bytes(b"b")
    assert cost(writable, lambda: os.rename(inner / "a", inner / "c")) == {
        "copies": 1,
        "deletes": 1,
    }
    assert cost(writable, lambda: os.unlink(inner / "b")) == {"deletes": 1}
    assert cost(writable, lambda: os.unlink(inner / "c")) == {"deletes": 1}
    assert cost(writable, inner.rmdir) == {"deletes": 1, "lists": 1}
    assert cost(writable, top.rmdir) == {"deletes": 1, "lists": 1}


@states(
    "The rename of a directory that a daemon or a machine died over is finished; at every "
    "moment each file is there under its old name or its new one."
)
def test_a_directory_is_renamed_while_daemons_are_killed(
    behind: Callable[..., Mount], bucket: Bucket, faulty: FaultyS3
) -> None:
    """Once in the middle of the copies, once in the middle of the deletes."""
    expected = {f"{number:02}": b"%d" % number for number in range(40)}
    for name, data in expected.items():
        bucket.put(f"old/{name}", data)
    mount = behind(*OPTIONS)
    pauses = [
        faulty.add("COPY", "new/20", times=1, stall=True),
        faulty.add("DELETE MANY", times=1, stall=True),
    ]
    with open(mount.path / "old" / "07", "rb", buffering=0) as held:
        renaming = threading.Thread(
            target=os.rename, args=(mount.path / "old", mount.path / "new"), daemon=True
        )
        renaming.start()
        for pause in pauses:
            until(lambda pause=pause: pause.used > 0, "the rename has not come that far")
            kill_serving(mount)
            pause.release()
        renaming.join(60)
        assert not renaming.is_alive()
        assert held.read() == b"7"
    assert sorted(os.listdir(mount.path)) == ["new"]
    assert {path.name: path.read_bytes() for path in (mount.path / "new").iterdir()} == expected
    assert keys(bucket, "") == [f"new/{name}" for name in expected]
    made = [request.key for request in faulty.requests("COPY")]
    assert len(made) < 1.8 * len(expected), "what was copied was copied again"


@states(
    "It waits as well for renames of directories there that are not finished, also those that an"
    " earlier mount had begun."
)
def test_the_next_mount_finishes_a_rename_and_sync_waits_for_it(
    behind: Callable[..., Mount], bucket: Bucket, faulty: FaultyS3
) -> None:
    """As after a crash of the machine: no program requests it again."""
    names = sorted(map(str, range(50)))
    for name in names:
        bucket.put(f"old/{name}", name.encode())
    mount = behind(*OPTIONS)
    pause = faulty.add("COPY", "new/5", times=1, stall=True)
    renaming = threading.Thread(target=rename_or_fail, args=(mount.path, "old", "new"), daemon=True)
    renaming.start()
    until(lambda: pause.used > 0, "nothing is copied")
    kill_everything(mount)
    mount.force()
    pause.release()
    renaming.join(60)
    mount.start()
    fusefs("sync", mount.path)
    assert keys(bucket, "old/") == []
    assert keys(bucket, "new/") == [f"new/{name}" for name in names]
    assert not mount.status()["writing"]["renames"]
    assert sorted(os.listdir(mount.path)) == ["new"]


def rename_or_fail(root: Path, old: str, new: str) -> None:
    with contextlib.suppress(OSError):
        os.rename(root / old, root / new)
