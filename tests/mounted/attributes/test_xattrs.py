"""Extended attributes on a writable mount: kept in the object's metadata as s3fs keeps them."""

import base64
import errno
import json
import os
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest

from fusefs.posix.directory.head_policy import SAMPLE
from fusefs.posix.nodes.object_metadata import LONGEST_TARGET
from tests.support.mounting import (
    WRITABLE,
    Mount,
    Mounter,
    all_sent,
    cost,
    fusefs,
    metadata,
    status,
)
from tests.support.programs import need
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, stored

# What s3fs 1.91 writes for two attributes, one of them with odd bytes.
S3FS = (
    "%7B%22user.bin%22%3A%22AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJ//78A%3D%3D%22"
    "%2C%22user.colour%22%3A%22cmVkK2JsdWUvPT8%3D%22%7D"
)
# Objects without attributes, in each of two folders.
PLAIN = 3 * SAMPLE
FOREIGN = {
    "s3fs": S3FS,
    "capability": "%7B%22security.capability%22%3A%22AAAA%22%2C%22user.a%22%3A%22MQ%3D%3D%22%7D",
    "torn": "%7B%22user.a",
    "list": "%5B1%2C2%5D",
    "deep": "[" * 1500,
}


@pytest.fixture(scope="module")
def mount(shared: Bucket, module_mounter: Mounter) -> Mount:
    for key, kept in FOREIGN.items():
        shared.put(key, b"x", Metadata={"xattr": kept, "mode": "33188"})
    for number in range(PLAIN):
        shared.put(f"found/{number:03}", bytes(LONGEST_TARGET + 1))
        shared.put(f"shown/{number:03}", bytes(LONGEST_TARGET + 1))
    # Else a walk that takes more than a second on a busy machine lists its folder again.
    return module_mounter(WRITABLE, "--metadata-ttl", "indefinite")


@pytest.fixture
def path(mount: Mount, request: pytest.FixtureRequest) -> Path:
    """A file of the test's own, with a few bytes."""
    path = mount.path / f"file-{request.node.name[:80]}"
    path.write_bytes(b"content")
    return path


def own(path: Path) -> dict[str, bytes]:
    """The attributes that programs have given a file."""
    return {name: os.getxattr(path, name) for name in os.listxattr(path)}


def test_attributes_are_set_listed_read_and_removed(path: Path) -> None:
    os.setxattr(path, "user.one", b"1")
    os.setxattr(path, "user.empty", b"")
    os.setxattr(path, "user.bytes", bytes(range(200)))
    os.setxattr(path, "user.one", b"other")
    assert own(path) == {"user.one": b"other", "user.empty": b"", "user.bytes": bytes(range(200))}
    os.removexattr(path, "user.one")
    assert "user.one" not in os.listxattr(path)


@states(
    "Extended attributes `user.*` are kept in the object's metadata (`xattr`), as s3fs writes them."
)
def test_the_object_keeps_them_as_s3fs_does(mount: Mount, path: Path, shared: Bucket) -> None:
    os.setxattr(path, "user.größe", b"\xff\xfb\xf0")
    all_sent(mount)
    kept = metadata(shared, path.name)["xattr"]
    assert kept.isascii()
    assert json.loads(unquote(kept)) == {"user.größe": base64.b64encode(b"\xff\xfb\xf0").decode()}


def test_what_s3fs_has_written_is_read(mount: Mount) -> None:
    assert own(mount.path / "s3fs") == {
        "user.bin": bytes(range(40)) + b"\xff\xfb\xf0",
        "user.colour": b"red+blue/=?",
    }


def test_what_is_no_users_attribute_is_hidden_and_kept(mount: Mount, shared: Bucket) -> None:
    path = mount.path / "capability"
    assert own(path) == {"user.a": b"1"}
    with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
        os.getxattr(path, "security.capability")
    os.setxattr(path, "user.b", b"2")
    assert "security.capability" in unquote(metadata(shared, "capability")["xattr"])


@pytest.mark.parametrize(
    ("name", "value", "flags", "number"),
    [
        ("user.there", b"", os.XATTR_CREATE, errno.EEXIST),
        ("user.none", b"", os.XATTR_REPLACE, errno.ENODATA),
        ("user.s3.etag", b"", 0, errno.EPERM),
        ("user.s3.mine", b"", 0, errno.EPERM),
        ("security.selinux", b"x", 0, errno.EOPNOTSUPP),
        ("trusted.overlay.opaque", b"y", 0, errno.EOPNOTSUPP),
        ("user.", b"x", 0, errno.EINVAL),
        ("user.large", bytes(1600), 0, errno.ENOSPC),
    ],
)
@states(
    "`user.s3.*` cannot be set (EPERM), attributes of other kinds are not kept "
    "(EOPNOTSUPP), and beyond the 2 KiB that an object has for metadata setting one is "
    "ENOSPC."
)
def test_what_cannot_be_set_is_reported(
    path: Path, shared: Bucket, name: str, value: bytes, flags: int, number: int
) -> None:
    os.setxattr(path, "user.there", b"1")
    fusefs("sync", path)
    before = metadata(shared, path.name)
    with pytest.raises(OSError, match=os.strerror(number)):
        os.setxattr(path, name, value, flags)
    assert metadata(shared, path.name) == before
    assert own(path) == {"user.there": b"1"}


@pytest.mark.parametrize(
    ("name", "number"), [("user.none", errno.ENODATA), ("user.s3.key", errno.EPERM)]
)
def test_what_is_not_there_or_not_ours_cannot_be_removed(
    path: Path, name: str, number: int
) -> None:
    with pytest.raises(OSError, match=os.strerror(number)):
        os.removexattr(path, name)


def test_setting_the_same_again_asks_the_bucket_nothing(mount: Mount, path: Path) -> None:
    os.setxattr(path, "user.a", b"1")
    fusefs("sync", mount.path)  # what the first one waits with, to be one request with others
    assert cost(mount, lambda: os.setxattr(path, "user.a", b"1")) == {}


def test_they_survive_all_that_happens_to_a_file(mount: Mount, path: Path, shared: Bucket) -> None:
    os.setxattr(path, "user.a", b"1")
    os.chmod(path, 0o600)
    os.utime(path, (1, 2))
    with open(path, "ab") as file:
        file.write(b"more")
    path.write_bytes(b"rewritten")
    renamed = mount.path / "renamed"
    path.rename(renamed)
    assert own(renamed) == {"user.a": b"1"}
    mount.end()
    mount.start()
    assert own(renamed) == {"user.a": b"1"}
    assert stored(shared, "renamed") == b"rewritten"


def test_a_file_that_is_being_written_goes_up_with_them(
    mount: Mount, path: Path, shared: Bucket
) -> None:
    def rewrite() -> None:
        with open(path, "wb", buffering=0) as file:
            file.write(b"new")
            os.setxattr(file.fileno(), "user.open", b"o")
            assert os.getxattr(path, "user.open") == b"o"

    assert cost(mount, rewrite) == {"puts": 1}
    assert "user.open" in unquote(metadata(shared, path.name)["xattr"])


def test_a_file_that_is_in_no_bucket_yet_has_no_etag(mount: Mount) -> None:
    with open(mount.path / "new", "wb"):
        assert os.getxattr(mount.path / "new", "user.s3.key") == b"new"
        with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
            os.getxattr(mount.path / "new", "user.s3.content_type")


def test_directories_have_them_and_the_root_too(mount: Mount) -> None:
    directory = mount.path / "directory"
    directory.mkdir()
    for path in (directory, mount.path):
        os.setxattr(path, "user.a", b"1")
        assert own(path) == {"user.a": b"1"}


@pytest.mark.parametrize(
    "copy", [("rsync", "-aXA"), ("cp", "--preserve=all"), ("cp", "--preserve=mode,xattr")]
)
@states(
    "They are not listed, for no program can set them: `rsync -X` and "
    "`cp --preserve=xattr` copy what is listed."
)
def test_programs_copy_them(
    mount: Mount, path: Path, tmp_path: Path, copy: tuple[str, ...]
) -> None:
    """From the mount to the mount, and to a disk and back."""
    need(copy[0])
    os.setxattr(path, "user.a", b"1")
    on_disk, back = tmp_path / "on-disk", mount.path / f"back-{path.name}"
    for source, target in ((path, f"{path}-2"), (path, on_disk), (on_disk, back)):
        done = subprocess.run([*copy, source, target], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert own(Path(target)) == {"user.a": b"1"}


@states(
    "`ls -l`, which requests `security.selinux` and the access control list of each file, "
    "sends S3 no more requests than `find -size`."
)
def test_ls_asks_the_bucket_nothing_for_a_file(mount: Mount) -> None:
    all_sent(mount)  # what other tests have changed
    os.listdir(mount.path)
    found = cost(mount, lambda: run("find", mount.path / "found", "-size", "+1M"))
    shown = cost(mount, lambda: run("ls", "-l", mount.path / "shown"))
    listed = cost(mount, lambda: [os.listxattr(one) for one in (mount.path / "shown").iterdir()])
    assert set(shown) <= set(found)
    assert all(shown[kind] <= found[kind] <= SAMPLE + 2 for kind in shown)
    assert listed.keys() <= {"lists"}  # of what a walk may come to next
    compiled = mount.status()["requests"]["compiled"]
    run("ls", "-l", mount.path / "shown")
    if compiled is not None:
        assert mount.status()["requests"]["compiled"] - compiled >= 2 * PLAIN


def run(*command: object) -> None:
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


def test_writes_ask_for_no_capabilities(mount: Mount, path: Path) -> None:
    with open(path, "r+b", buffering=0) as file:
        before = status(mount)["requests"]["total"]
        for _ in range(200):
            file.write(b"x")
        assert status(mount)["requests"]["total"] - before < 210
