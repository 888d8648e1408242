"""Modes, owners and times on a writable mount: as programs set them, as the bucket keeps them."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.support.mounting import WRITABLE, Mount, Mounter, all_sent, cost, metadata
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, stored
from tests.support.waiting import until

# What other programs write. s3fs tells modes in decimal and, in older versions, whole seconds.
FOREIGN: dict[str, tuple[bytes, dict[str, str]]] = {
    "s3fs": (
        b"hello\n",
        {
            "mode": "33256",
            "uid": "12",
            "gid": "34",
            "mtime": "1500000000.123456789",
            "atime": "1500000001",
            "ctime": "1500000002.5",
        },
    ),
    "s3fs-old": (b"", {"mode": "33188", "uid": "1", "gid": "1", "mtime": "1500000000"}),
    "s3fs-link": (b"s3fs", {"mode": "41471", "uid": "0", "gid": "0", "mtime": "1500000000"}),
    "rclone": (b"hi\n", {"mtime": "1400000000.987654321"}),
    "rclone-old": (b"hi\n", {"mtime": "-5.500000000"}),
    # With --metadata: modes in octal.
    "rclone-metadata": (
        b"hi\n",
        {
            "mode": "100640",
            "uid": "5",
            "gid": "6",
            "mtime": "1400000000.987654321",
            "atime": "2026-11-21T10:40:04.98976901Z",
            "btime": "2026-11-21T10:40:04.937769008Z",
        },
    ),
    # S3 Files, FSx for Lustre and DataSync.
    "aws": (
        b"hello\n",
        {
            "file-permissions": "0100640",
            "file-owner": "21",
            "file-group": "22",
            "file-mtime": "1595002920123456789ns",
            "file-atime": "1595002930000000000ns",
            "user-agent": "aws-fsx-lustre",
        },
    ),
    "aws-link": (b"aws", {"file-permissions": "0120777", "file-owner": "0", "file-group": "0"}),
    # Storage Gateway: no type, and milliseconds.
    "aws-gateway": (b"hi\n", {"file-permissions": "0751", "file-mtime": "1595002920123"}),
    "both": (b"hi\n", {"mode": "33188", "file-permissions": "0100600", "file-owner": "21"}),
    "foreign": (b"x", {"md5chksum": "nVSBKDIZo+lIcZYqpQ", "mode": "nonsense", "uid": "-1"}),
    "setuid": (b"x", {"mode": str(stat.S_IFREG | 0o6755)}),
    "device": (b"x", {"mode": str(stat.S_IFCHR | 0o600)}),
}


@pytest.fixture(scope="module")
def mount(shared: Bucket, module_mounter: Mounter) -> Mount:
    for key, (content, metadata_of) in FOREIGN.items():
        shared.put(key, content, Metadata=metadata_of)
    for number in range(60):
        shared.put(f"many/{number:02}", b"x", Metadata={"mode": str(stat.S_IFREG | 0o600)})
    return module_mounter(WRITABLE, "--metadata-ttl", "indefinite")


@pytest.fixture
def path(mount: Mount, request: pytest.FixtureRequest) -> Path:
    """A file of the test's own, with ten bytes."""
    path = mount.path / f"file-{request.node.name[:80]}"
    path.write_bytes(b"0123456789")
    return path


@pytest.mark.parametrize(
    ("name", "mode", "owner", "mtime_ns"),
    [
        ("s3fs", stat.S_IFREG | 0o750, (12, 34), 1_500_000_000_123_456_789),
        ("s3fs-old", stat.S_IFREG | 0o644, (1, 1), 1_500_000_000 * 10**9),
        ("s3fs-link", stat.S_IFLNK | 0o777, (0, 0), 1_500_000_000 * 10**9),
        ("rclone-metadata", stat.S_IFREG | 0o640, (5, 6), 1_400_000_000_987_654_321),
        ("rclone", stat.S_IFREG | 0o644, (os.geteuid(), os.getegid()), 1_400_000_000_987_654_321),
        ("rclone-old", stat.S_IFREG | 0o644, (os.geteuid(), os.getegid()), -5_500_000_000),
        ("aws", stat.S_IFREG | 0o640, (21, 22), 1_595_002_920_123_456_789),
        (
            "aws-gateway",
            stat.S_IFREG | 0o751,
            (os.geteuid(), os.getegid()),
            1_595_002_920_123_000_000,
        ),
    ],
)
def test_an_object_shows_what_the_program_that_wrote_it_set(
    mount: Mount, name: str, mode: int, owner: tuple[int, int], mtime_ns: int
) -> None:
    found = (mount.path / name).lstat()
    assert (found.st_mode, (found.st_uid, found.st_gid)) == (mode, owner)
    assert found.st_mtime_ns == mtime_ns


@states(
    "They are read as well as S3 Files, FSx for Lustre, DataSync and Storage Gateway write them "
    "(`file-permissions`, `file-owner`, `file-group`, `file-mtime`): an object keeps its form "
    "when it changes, and new ones get that form with `--attribute-form aws`."
)
def test_an_object_keeps_the_form_of_its_attributes(mount: Mount, shared: Bucket) -> None:
    assert (mount.path / "aws-link").read_bytes() == b"hello\n"
    before = metadata(shared, "aws")
    os.chmod(mount.path / "aws", 0o751)
    os.chmod(mount.path / "both", 0o751)
    all_sent(mount)
    described = metadata(shared, "aws")
    described.pop("fusefs-change")
    assert described == before | {"file-permissions": "0100751"}
    both = metadata(shared, "both")
    assert (both["mode"], both["file-permissions"]) == (str(0o100751), "0100751")
    os.rename(mount.path / "aws-gateway", mount.path / "renamed")
    (mount.path / "renamed").write_bytes(b"new")
    rewritten = metadata(shared, "renamed")
    assert rewritten["file-permissions"] == "0100751"
    assert rewritten["file-mtime"].endswith("ns")
    assert "mode" not in rewritten
    os.rename(mount.path / "renamed", mount.path / "aws-gateway")


def test_new_objects_get_the_form_of_the_mount(mounter: Mounter, bucket: Bucket) -> None:
    bucket.put("plain", b"x")
    bucket.put("s3fs", b"x", Metadata={"mode": "33188"})
    mount = mounter(WRITABLE, "--attribute-form", "aws")
    (mount.path / "dir").mkdir()
    (mount.path / "dir/file").write_bytes(b"x")
    os.symlink("file", mount.path / "dir/link")
    os.chmod(mount.path / "s3fs", 0o600)
    modified_ns = (mount.path / "plain").stat().st_mtime_ns
    os.rename(mount.path / "plain", mount.path / "renamed")
    os.chmod(mount.path / "dir/file", 0o750)
    all_sent(mount)
    for key, expected in (("dir/file", "0100750"), ("dir/link", "0120777")):
        described = metadata(bucket, key)
        assert described["file-permissions"] == expected
        assert described["file-owner"] == str(os.geteuid())
        assert "mode" not in described
    assert metadata(bucket, "s3fs")["mode"] == str(0o100600)
    assert metadata(bucket, "renamed")["file-mtime"] == f"{modified_ns}ns"


@states(
    "Other metadata of an object stays when attributes change, and goes when the content "
    "is rewritten."
)
def test_other_metadata_stays_when_attributes_change_and_goes_with_the_content(
    mount: Mount, shared: Bucket
) -> None:
    path = mount.path / "foreign"
    os.chmod(path, 0o600)
    all_sent(mount)
    assert metadata(shared, "foreign")["md5chksum"] == FOREIGN["foreign"][1]["md5chksum"]
    with open(path, "ab") as file:
        file.write(b"more")
    assert stored(shared, "foreign") == b"xmore"
    assert "md5chksum" not in metadata(shared, "foreign")


@states("Set-id bits are never kept, whoever sets them.")
def test_set_id_bits_are_never_kept(mount: Mount, path: Path, shared: Bucket) -> None:
    os.chmod(path, 0o6751)
    assert stat.S_IMODE(path.stat().st_mode) == 0o751
    os.chmod(path, 0o1751)
    assert stat.S_IMODE(path.stat().st_mode) == 0o1751
    all_sent(mount)
    assert metadata(shared, path.name)["mode"] == str(stat.S_IFREG | 0o1751)


@states("Setting what is already so asks the bucket nothing.")
def test_what_changes_nothing_asks_the_bucket_nothing(mount: Mount, path: Path) -> None:
    found = path.stat()

    def set_the_same() -> None:
        os.chmod(path, stat.S_IMODE(found.st_mode))
        os.chown(path, found.st_uid, found.st_gid)
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))

    assert cost(mount, set_the_same) == {}
    assert path.stat().st_mtime_ns == found.st_mtime_ns


@states("An access time is accepted and not kept.")
def test_an_access_time_is_accepted_and_not_kept(mount: Mount, path: Path) -> None:
    before = path.stat().st_mtime_ns
    touch = ["touch", "-a", "-d", "@12345", path]
    assert cost(mount, lambda: subprocess.run(touch, check=True)) == {}
    assert (path.stat().st_mtime_ns, path.stat().st_atime_ns) == (before, before)


def test_truncating_a_closed_file_is_one_upload(mount: Mount, path: Path, shared: Bucket) -> None:
    assert cost(mount, lambda: os.truncate(path, 4)) == {"puts": 1}
    assert stored(shared, path.name) == b"0123"
    os.truncate(path, 6)
    assert path.read_bytes() == stored(shared, path.name) == b"0123\0\0"


def test_attributes_of_an_open_file_go_up_with_its_content(
    mount: Mount, path: Path, shared: Bucket
) -> None:
    def rewrite() -> None:
        with open(path, "wb", buffering=0) as file:
            file.write(b"new")
            os.fchmod(file.fileno(), 0o640)
            os.fchown(file.fileno(), 3, 4)
            os.utime(file.fileno(), ns=(5, 10**18 + 7))

    assert cost(mount, rewrite) == {"puts": 1}
    kept = metadata(shared, path.name)
    assert (kept["mode"], kept["uid"], kept["gid"]) == (str(stat.S_IFREG | 0o640), "3", "4")
    assert kept["mtime"] == "1000000000.000000007"
    assert path.stat().st_mtime_ns == 10**18 + 7


def test_a_write_after_a_set_time_has_a_time_of_its_own(path: Path) -> None:
    with open(path, "r+b", buffering=0) as file:
        os.utime(file.fileno(), (1, 1))
        assert os.fstat(file.fileno()).st_mtime == 1
        file.write(b"later")
        written = os.fstat(file.fileno()).st_mtime_ns
        assert written > 10**18
    assert path.stat().st_mtime_ns == written


def test_an_open_file_shows_the_size_and_blocks_that_it_has(path: Path) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.write(bytes(70_000))
        found = path.stat()
        assert (found.st_size, found.st_blocks * 512 >= 65_536) == (70_000, True)
        os.ftruncate(file.fileno(), 1 << 30)
        assert os.fstat(file.fileno()).st_size == 1 << 30
        assert os.fstat(file.fileno()).st_blocks * 512 < 1 << 20
        os.ftruncate(file.fileno(), 3)
    assert (path.stat().st_size, path.stat().st_blocks) == (3, 1)


def test_a_symbolic_link_has_times_and_an_owner_of_its_own(mount: Mount, path: Path) -> None:
    link = mount.path / "a-link"
    link.symlink_to(path.name)
    before = path.stat()
    os.utime(link, ns=(1, 10**18), follow_symlinks=False)
    os.chown(link, 9, 10, follow_symlinks=False)
    found = link.lstat()
    assert (found.st_mtime_ns, found.st_uid, found.st_gid) == (10**18, 9, 10)
    assert stat.S_ISLNK(found.st_mode)
    assert os.readlink(link) == path.name
    assert path.stat() == before


def test_the_root_of_a_bucket_takes_attributes_while_it_is_mounted(
    mount: Mount, shared: Bucket
) -> None:
    before = mount.path.stat()
    os.utime(mount.path, (1, 2))
    os.chmod(mount.path, 0o711)
    assert (mount.path.stat().st_mtime, stat.S_IMODE(mount.path.stat().st_mode)) == (2, 0o711)
    os.chmod(mount.path, stat.S_IMODE(before.st_mode))


@states(
    "If somebody else replaces or removes the object before that, the attributes are given up, "
    "and the log says so."
)
def test_what_somebody_else_has_replaced_is_not_changed(
    mount: Mount, path: Path, shared: Bucket
) -> None:
    shared.put(path.name, b"theirs", Metadata={"mode": str(stat.S_IFREG | 0o604)})
    os.chmod(path, 0o640)
    all_sent(mount)
    assert stored(shared, path.name) == b"theirs"
    assert metadata(shared, path.name)["mode"] == str(stat.S_IFREG | 0o604)
    until(lambda: path.read_bytes() == b"theirs", "the mount shows the other one")
    until(lambda: stat.S_IMODE(path.stat().st_mode) == 0o604, "its attributes are shown")
    assert "its attributes are given up" in mount.log.read_text()


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK])
def test_no_special_file_can_be_made(mount: Mount, kind: int) -> None:
    with pytest.raises(PermissionError):
        os.mknod(mount.path / "special", kind | 0o600, os.makedev(1, 3))


def test_a_regular_file_can_be_made_by_mknod(mount: Mount, shared: Bucket) -> None:
    os.mknod(mount.path / "made", 0o604)
    assert metadata(shared, "made")["mode"] == str(stat.S_IFREG | 0o604)
    with pytest.raises(FileExistsError):
        os.mknod(mount.path / "made", 0o604)
