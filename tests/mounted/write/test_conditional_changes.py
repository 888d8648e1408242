"""A mount's changes carry conditions; what it tries for that, and what follows from it."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fusefs.store.capabilities import PROBE_NAME
from tests.support.mounting import WRITABLE, Mount, Mounter, fusefs, status
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("as_owner")]

PROBES = f"{PROBE_NAME}/*"


@pytest.fixture
def mount(mounter: Mounter, faulty: FaultyS3) -> Callable[..., Mount]:
    """Mounts through the proxy, writable."""

    def begin(*options: str, **places: str) -> Mount:
        made = mounter(WRITABLE, *options, endpoint_url=faulty.endpoint_url, **places)
        faulty.clear()
        return made

    return begin


@pytest.fixture(scope="module")
def root(module_mounter: Mounter, faulty: FaultyS3) -> Path:
    """Such a mount for tests that need none of their own."""
    return module_mounter(WRITABLE, endpoint_url=faulty.endpoint_url).path


@pytest.fixture
def place(root: Path, folder: Bucket) -> Path:
    """The test's folder there."""
    path = root / folder.prefix
    path.mkdir()
    return path


def conditions(faulty: FaultyS3, operation: str, key: str) -> list[str]:
    """Which condition each request of a kind carried for a key."""
    names = ("if-match", "if-none-match")
    return [
        next((name for name in names if name in one.headers), "none")
        for one in faulty.requests(operation, key)
    ]


def is_probed(mount: Mount) -> bool:
    known: bool = status(mount)["conditions"]["known"]
    return known


@states(
    "Changes carry a condition about what they replace, so that one that is executed late does not"
    " undo a later change of the content, where the store honours conditions, unless a removal of"
    " the same content is executed late before it."
)
def test_changes_carry_conditions(place: Path, faulty: FaultyS3) -> None:
    file = place / "file"
    file.write_bytes(b"one")
    file.write_bytes(b"two")
    assert conditions(faulty, "PUT", "*/file") == ["if-none-match", "if-match"]
    file.rename(place / "new")
    assert conditions(faulty, "COPY", "*/new") == ["if-none-match"]
    assert conditions(faulty, "DELETE", "*/file") == ["if-match"]
    (place / "new").unlink()
    assert conditions(faulty, "DELETE", "*/new") == ["if-match"]
    (place / "dir").mkdir()
    (place / "dir").rmdir()
    assert conditions(faulty, "PUT", "*/dir/") == ["if-none-match"]
    assert conditions(faulty, "DELETE", "*/dir/") == ["if-match"]
    (place / "large").write_bytes(bytes(9 << 20))
    assert conditions(faulty, "COMPLETE", "*/large") == ["if-none-match"]


@states(
    "A file that another client has put under a name stays when a removal or a rename of this"
    " mount's file of that name is repeated because its answer was lost."
)
def test_a_repeated_delete_removes_nothing_of_anothers(
    place: Path, faulty: FaultyS3, folder: Bucket
) -> None:
    for name, change in (
        ("removed", lambda: (place / "removed").unlink()),
        ("renamed", lambda: (place / "renamed").rename(place / "other")),
    ):
        (place / name).write_bytes(b"ours")
        put = partial(folder.put, name, b"theirs")
        faulty.add("DELETE", f"*/{name}", lose_answer=True, times=1)
        faulty.add("DELETE", f"*/{name}", times=1, before=put)
        change()
        assert stored(folder, name) == b"theirs"
    assert stored(folder, "other") == b"ours"


def test_what_replaces_a_file_while_its_directory_is_renamed_stays(
    place: Path, faulty: FaultyS3, folder: Bucket
) -> None:
    (place / "old").mkdir()
    for name in ("a", "b"):
        (place / "old" / name).write_bytes(b"ours")
    faulty.add("DELETE MANY", times=1, before=lambda: folder.put("old/b", b"theirs"))
    (place / "old").rename(place / "new")
    assert sorted(os.listdir(place / "new")) == ["a", "b"]
    until(lambda: "old/a" not in keys(folder))
    assert stored(folder, "old/b") == b"theirs"
    assert stored(folder, "new/b") == b"ours"


@states(
    "A writable mount tries once a day what the store honours, with a few requests for an"
    " object below `.fusefs-probe`, a name that no mount shows and that cannot be created;"
    " `fusefs status` shows what was found."
)
def test_what_the_store_honours_is_tried_once_and_shown(
    mount: Callable[..., Mount], mounter: Mounter, faulty: FaultyS3, bucket: Bucket
) -> None:
    made = mounter(WRITABLE, endpoint_url=faulty.endpoint_url)
    assert is_probed(made)
    assert [one.operation for one in faulty.requests("P*", PROBES)] == ["PUT", "PUT"]
    assert keys(bucket, with_probes=True) == []
    assert "conditions  honoured (probed)" in fusefs("status", made.path).stdout
    assert os.listdir(made.path) == []
    for directory in ("", "below/"):
        if directory:
            (made.path / directory).mkdir()
        with pytest.raises(OSError, match="Invalid argument"):
            (made.path / directory / ".fusefs-probe").write_bytes(b"")
    made.end()
    again = mount()
    assert is_probed(again)
    (again.path / "file").write_bytes(b"x")
    assert faulty.requests(key=PROBES) == []


def test_a_probe_is_hidden_while_it_is_there(mount: Callable[..., Mount], bucket: Bucket) -> None:
    bucket.put(".fusefs-probe/1/object", b"?")
    bucket.put("dir/.fusefs-probe/1/object", b"?")
    made = mount()
    assert os.listdir(made.path) == ["dir"]
    assert os.listdir(made.path / "dir") == []
    assert status(made)["metadata"]["hidden_keys"] == 0


@states(
    "Where the mount is read-only, has `--no-delete`, or may not write, nothing is tried:"
    " conditions are sent, and nothing relies on them."
)
@pytest.mark.parametrize(
    ("options", "why"), [(("--read-only",), "a read-only mount"), (("--no-delete",), "--no-delete")]
)
def test_a_mount_that_may_not_write_or_delete_tries_nothing(
    mounter: Mounter, faulty: FaultyS3, options: tuple[str, ...], why: str
) -> None:
    writable = () if "--read-only" in options else (WRITABLE,)
    made = mounter(*writable, *options, endpoint_url=faulty.endpoint_url)
    assert f"conditions  not known ({why})" in fusefs("status", made.path).stdout
    assert faulty.requests(key=PROBES) == []


def test_a_bucket_that_refuses_to_be_written_is_tried_with_one_request(
    mounter: Mounter, faulty: FaultyS3
) -> None:
    faulty.add(key=PROBES, code="AccessDenied")
    made = mounter(WRITABLE, endpoint_url=faulty.endpoint_url)
    assert "access denied" in status(made)["conditions"]["why"]
    assert len(faulty.requests(key=PROBES)) == 1


@states(
    "`--conflict fail` is refused where the store is known to ignore conditions; a mount that is"
    " served already goes on, and logs an error."
)
def test_conflict_fail_is_refused_where_it_cannot_hold(
    mounter: Mounter, faulty: FaultyS3, tmp_path: Path
) -> None:
    faulty.ignores_conditions = True
    with pytest.raises(AssertionError, match="can't hold: this store ignores") as why:
        mounter(WRITABLE, "--conflict", "fail", endpoint_url=faulty.endpoint_url)
    assert "mount with --conflict overwrite" in str(why.value)
    assert not os.path.ismount(tmp_path / "mnt0")


@states(
    "Where the store is known to ignore conditions, the log warns that O_EXCL may not hold between"
    " mounts."
)
def test_a_store_that_ignores_what_o_excl_needs_is_warned_about(
    mounter: Mounter, faulty: FaultyS3
) -> None:
    faulty.ignores_conditions = True
    made = mounter(WRITABLE, endpoint_url=faulty.endpoint_url)
    until(lambda: "create a file with O_EXCL" in made.log.read_text())
    assert "conditions  probed; not honoured: conditions" in fusefs("status", made.path).stdout


def test_a_store_that_ignores_every_condition_is_written_as_before(
    mount: Callable[..., Mount], faulty: FaultyS3, bucket: Bucket
) -> None:
    root = mount().path
    faulty.ignores_conditions = True
    (root / "dir").mkdir()
    (root / "dir" / "file").write_bytes(b"one")
    (root / "dir" / "file").write_bytes(b"two")
    (root / "dir").rename(root / "other")
    (root / "other" / "file").rename(root / "file")
    (root / "other").rmdir()
    assert stored(bucket, "file") == b"two"
    assert keys(bucket) == ["file"]


def test_a_renamed_directory_gets_its_markers_first_each_by_one_request(
    place: Path, folder: Bucket, faulty: FaultyS3
) -> None:
    """Copies make directories on some servers; a marker that comes after is refused first."""
    (place / "old" / "a" / "b").mkdir(parents=True)
    for where in ("old", "old/a", "old/a/b"):
        (place / where / "file").write_bytes(b"content")
    faulty.clear()
    os.rename(place / "old", place / "new")
    requests = faulty.requests(key=f"{folder.prefix}new/*")
    made = [(one.operation, one.key.removeprefix(folder.prefix)) for one in requests]
    assert made[:3] == [("PUT", "new/"), ("PUT", "new/a/"), ("PUT", "new/a/b/")]
    copies = [(what, key) for what, key in made if what == "COPY"]
    assert sorted(copies) == [
        ("COPY", "new/a/b/file"),
        ("COPY", "new/a/file"),
        ("COPY", "new/file"),
    ]
    assert [key for what, key in made if what == "PUT"] == ["new/", "new/a/", "new/a/b/"]
    until(lambda: not any(key.startswith("old/") for key in keys(folder)), "all is done")
