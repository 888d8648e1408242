"""Who may do what through a mount: other users, permission bits, and changes, all refused."""

import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.machine.ordinary_user import NOBODY
from tests.support.mounting import WRITABLE, Mount, Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, new_bucket
from tests.support.servers.s3_server import S3Server
from tests.support.sharing import read_all
from tests.support.waiting import until

NAMES = ("mode", "uid", "gid")


def as_nobody(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a command as an ordinary user."""
    ids = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    return subprocess.run(
        ["setpriv", *ids, *map(str, command)], check=False, capture_output=True, text=True
    )


@pytest.fixture
def tmp_path(public_path: Path) -> Path:
    """Where the mounts are."""
    return public_path


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv"
)


@needs_root
def test_another_user_is_refused(mounter: Mounter, bucket: Bucket) -> None:
    bucket.put("file", b"secret")
    here = mounter("--file-mode", "0666", "--dir-mode", "0777")
    result = as_nobody("cat", here.path / "file")
    assert (result.returncode, "Permission denied" in result.stderr) == (1, True)


@needs_root
@states("With `--allow-other` the permission bits decide who may read.")
def test_another_user_is_let_in_by_allow_other_as_far_as_the_mode_says(
    mounter: Mounter, bucket: Bucket
) -> None:
    bucket.put("file", b"public")
    here = mounter("--allow-other")
    assert as_nobody("cat", here.path / "file").stdout == "public"
    assert as_nobody("ls", here.path).stdout == "file\n"


@needs_root
def test_mode_bits_are_enforced(mounter: Mounter, bucket: Bucket) -> None:
    bucket.put("d/file", b"private")
    here = mounter("--allow-other", "--file-mode", "0600", "--dir-mode", "0711")
    assert "Permission denied" in as_nobody("cat", here.path / "d" / "file").stderr
    assert "Permission denied" in as_nobody("ls", here.path / "d").stderr
    assert as_nobody("stat", here.path / "d" / "file").returncode == 0
    assert read_all(here.path / "d" / "file") == b"private"


@needs_root
@states("Owner, group and permissions are those of `--uid`, `--gid`, `--file-mode`, `--dir-mode`.")
def test_uid_gid_and_modes_are_what_the_options_say(mounter: Mounter, bucket: Bucket) -> None:
    bucket.put("d/file", b"mine")
    here = mounter(
        "--allow-other", "--uid", NOBODY, "--gid", 4321, "--file-mode", "0400", "--dir-mode", "0500"
    )
    file, directory = (here.path / "d" / "file").stat(), (here.path / "d").stat()
    assert (file.st_uid, file.st_gid, file.st_mode & 0o7777) == (NOBODY, 4321, 0o400)
    assert (directory.st_uid, directory.st_gid, directory.st_mode & 0o7777) == (NOBODY, 4321, 0o500)
    assert as_nobody("cat", here.path / "d" / "file").stdout == "mine"


@pytest.fixture(scope="module")
def tree(s3: S3Server, module_mounter: Mounter) -> Mount:
    """A file and an empty directory, mounted as without options."""
    bucket = new_bucket(s3)
    bucket.put("readme.txt", b"readme")
    bucket.put("marker/", b"")
    return module_mounter(bucket=bucket)


def test_without_options_files_belong_to_the_one_who_mounted(tree: Mount) -> None:
    file, directory = (tree.path / "readme.txt").stat(), tree.path.stat()
    assert (file.st_uid, file.st_gid, file.st_mode) == (os.geteuid(), os.getegid(), 0o100644)
    assert (directory.st_uid, directory.st_mode) == (os.geteuid(), 0o40755)


CHANGES: dict[str, Callable[[Path], Any]] = {
    "create": lambda root: (root / "new").open("xb"),
    "open for writing": lambda root: (root / "readme.txt").open("r+b"),
    "open for appending": lambda root: (root / "readme.txt").open("ab"),
    "truncate by open": lambda root: (root / "readme.txt").open("wb"),
    "truncate": lambda root: os.truncate(root / "readme.txt", 0),
    "unlink": lambda root: os.unlink(root / "readme.txt"),
    "mkdir": lambda root: os.mkdir(root / "new"),
    "rmdir": lambda root: os.rmdir(root / "marker"),
    "rename": lambda root: os.rename(root / "readme.txt", root / "renamed"),
    "link": lambda root: os.link(root / "readme.txt", root / "linked"),
    "symlink": lambda root: os.symlink("readme.txt", root / "linked"),
    "chmod": lambda root: os.chmod(root / "readme.txt", 0o600),
    "chown": lambda root: os.chown(root / "readme.txt", 1, 1),
    "utimens": lambda root: os.utime(root / "readme.txt", (1, 1)),
    "setxattr": lambda root: os.setxattr(root / "readme.txt", "user.mine", b"1"),
    "removexattr": lambda root: os.removexattr(root / "readme.txt", "user.s3.key"),
    "mknod": lambda root: os.mknod(root / "fifo", stat.S_IFIFO | 0o600),
    "temporary file": lambda root: os.open(root, os.O_TMPFILE | os.O_RDWR),
}


@states("On a read-only mount every change is refused with EROFS.")
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_erofs(tree: Mount, change: str) -> None:
    with pytest.raises(OSError, match="Read-only file system") as caught:
        CHANGES[change](tree.path)
    assert caught.value.errno == errno.EROFS


@states("On a read-only mount `access` grants no one the right to write.")
def test_access_denies_writing(tree: Mount) -> None:
    assert os.access(tree.path / "readme.txt", os.R_OK)
    assert not os.access(tree.path / "readme.txt", os.W_OK)
    assert not os.access(tree.path, os.W_OK)


def flags_of(path: Path) -> set[str]:
    """The kernel's flags of a mount."""
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return set(next(fields[5] for fields in lines if fields[4] == str(path)).split(","))


def test_the_mount_has_the_flags_that_keep_it_harmless(tree: Mount) -> None:
    assert {"ro", "nosuid", "nodev"} <= flags_of(tree.path)


@pytest.fixture(scope="module")
def writable(shared: Bucket, module_mounter: Mounter) -> Path:
    """A mount for writing, with a shared group."""
    own = {"uid": "7", "gid": "8", "mode": str(stat.S_IFREG | 0o644)}
    shared.put("directory/of-another-mount", b"", Metadata=own)
    options = ("--session", "kernel", WRITABLE, "--shared-group", "--gid", "4321")
    return module_mounter(*options).path


@states("The mount is `nosuid` and `nodev`, and `ro` if it is made with `--read-only`.")
def test_a_mount_for_writing_is_nosuid_and_nodev_too(writable: Path) -> None:
    assert {"rw", "nosuid", "nodev"} <= flags_of(writable)


@states(
    "With `--shared-group` everything belongs to the group of `--gid`, whatever its object says,"
    " and that group may do with it what its owner may, unless it is its owner's alone (0600,"
    " 0700)."
)
def test_everything_belongs_to_a_shared_group(writable: Path) -> None:
    directory = writable / "directory"
    (directory / "made").mkdir(mode=0o750)
    (directory / "private").touch(mode=0o600)
    (directory / "link").symlink_to("file")
    names = ("of-another-mount", "made", "private", "link")
    shown = [(directory / name).lstat() for name in names]
    assert [stat.S_IMODE(one.st_mode) for one in shown] == [0o664, 0o770, 0o600, 0o777]
    assert {one.st_gid for one in shown} == {4321}
    assert shown[0].st_uid == 7


@states(
    "Of `--uid`, `--gid`, `--file-mode`, `--dir-mode` and `--shared-group` nothing is written into"
    " objects; what a program makes, or sets with chmod and chown, is."
)
@pytest.mark.parametrize("form", ["s3fs", "aws"])
def test_the_options_of_a_mount_are_written_into_no_object(
    mounter: Mounter, bucket: Bucket, form: str
) -> None:
    for name in ("appended", "chmod", "chown", "dated"):
        bucket.put(f"directory/{name}", b"")
    options = ("--uid", "1234", "--gid", "4321", "--file-mode", "666", "--dir-mode", "777")
    flags = ("--no-read-only", "--shared-group", "--attribute-form", form)
    path = mounter(*flags, *options).path / "directory"
    with (path / "appended").open("ab") as file:
        file.write(b"more")
    (path / "chmod").chmod(0o640)
    os.chown(path / "chown", 5, -1)
    os.utime(path / "dated", (1, 1))
    path.joinpath("made").touch(mode=0o640)
    names = NAMES
    if form == "aws":
        names = ("file-permissions", "file-owner", "file-group")

    def written(name: str) -> set[str]:
        found = bucket.client.head_object(Bucket=bucket.name, Key=f"directory/{name}")["Metadata"]
        assert not {"1234", "4321"} & set(found.values())
        return {usual for usual, key in zip(NAMES, names, strict=True) if key in found}

    until(lambda: written("chmod") == {"mode"}, "its mode is written")
    until(lambda: written("chown") == {"uid"}, "its owner is written")
    assert written("appended") == written("dated") == set()
    assert written("made") == set(NAMES)
    assert {(path / name).stat().st_gid for name in os.listdir(path)} == {4321}
