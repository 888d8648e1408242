"""Statements of docs/semantics.md without a module of their own: attributes, errors, the cache."""

import errno
import os
import time

import pytest

from tests.support.mounting import WRITABLE, Mount, Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.flat_s3 import ListingServer
from tests.support.sharing import content, error_of, read_all

MIB = 1 << 20
DATA = content("file", 100_003)


@pytest.fixture(scope="module")
def still(shared: Bucket, module_mounter: Mounter) -> Mount:
    """A mount of a bucket that does not change."""
    shared.put("d/file", DATA, ContentType="text/x-test")
    shared.put("d/large", content("large", 3 * MIB))
    shared.put("empty", b"")
    return module_mounter()


@states(
    "A file's size and modification time are its object's; `st_atime` and `st_ctime` are the same"
    " time."
)
def test_size_and_times_are_the_objects(still: Mount, shared: Bucket) -> None:
    answer = shared.client.head_object(Bucket=shared.name, Key="d/file")
    status = (still.path / "d" / "file").stat()
    assert status.st_size == len(DATA)
    assert int(status.st_mtime) == int(answer["LastModified"].timestamp())
    assert status.st_mtime_ns == status.st_ctime_ns == status.st_atime_ns


@states(
    "A directory's times are those of the last change that this mount made to its entries,"
    " else what was set, else the time of the mount, for S3 keeps none."
)
def test_a_directory_is_as_old_as_the_mount(mounter: Mounter, bucket: Bucket) -> None:
    bucket.put("d/file", b"")
    before = time.time_ns()
    root = mounter().path
    after = time.time_ns()
    shown = [
        moment
        for status in (root.stat(), (root / "d").stat(), root.stat())
        for moment in (status.st_mtime_ns, status.st_ctime_ns, status.st_atime_ns)
    ]
    assert len(set(shown)) == 1
    assert before <= shown[0] <= after


@states("`st_blocks` is the size in blocks of 512 bytes, whether or not the file is in the cache.")
def test_blocks_are_those_of_a_file_without_holes(still: Mount) -> None:
    path = still.path / "d" / "file"
    before = path.stat().st_blocks
    read_all(path)
    still.forget()
    assert before == path.stat().st_blocks == -(-len(DATA) // 512)
    assert (still.path / "empty").stat().st_blocks == 0


@states(
    "Files have one link, but for the names of hard links, and directories two; an open file that"
    " was removed or replaced here has none."
)
def test_link_counts(still: Mount, mounter: Mounter, bucket: Bucket) -> None:
    bucket.put("file", b"x")
    bucket.put("other", b"x")
    writable = mounter(WRITABLE).path
    with (writable / "file").open("rb") as file, (writable / "other").open("rb") as other:
        assert os.fstat(file.fileno()).st_nlink == os.fstat(other.fileno()).st_nlink == 1
        (writable / "new").write_bytes(b"x")
        (writable / "file").unlink()
        (writable / "new").rename(writable / "other")
        assert os.fstat(file.fileno()).st_nlink == os.fstat(other.fileno()).st_nlink == 0
        assert (writable / "other").stat().st_nlink == 1
    assert (still.path / "d" / "file").stat().st_nlink == 1
    assert (still.path / "d").stat().st_nlink == 2


@states("Reading changes no access time.")
def test_reading_changes_no_access_time(still: Mount) -> None:
    path = still.path / "d" / "file"
    before = path.stat().st_atime_ns
    read_all(path)
    still.forget()
    assert path.stat().st_atime_ns == before


@states(
    "Extended attributes tell of the object: `user.s3.key`, `user.s3.etag`,"
    " `user.s3.storage_class`, `user.s3.content_type` and, where the bucket keeps versions,"
    " `user.s3.version_id`."
)
def test_extended_attributes_tell_of_the_object(still: Mount, shared: Bucket) -> None:
    path = still.path / "d" / "file"
    answer = shared.client.head_object(Bucket=shared.name, Key="d/file")
    told = ("key", "etag", "storage_class", "content_type")
    assert {f"user.s3.{name}": os.getxattr(path, f"user.s3.{name}") for name in told} == {
        "user.s3.key": b"d/file",
        "user.s3.etag": answer["ETag"].encode(),
        "user.s3.storage_class": b"STANDARD",
        "user.s3.content_type": b"text/x-test",
    }


def test_a_bucket_with_versions_tells_the_version(mounter: Mounter, bucket: Bucket) -> None:
    bucket.client.put_bucket_versioning(
        Bucket=bucket.name, VersioningConfiguration={"Status": "Enabled"}
    )
    answer = bucket.client.put_object(Bucket=bucket.name, Key="file", Body=b"x")
    path = mounter().path / "file"
    assert os.getxattr(path, "user.s3.version_id") == answer["VersionId"].encode()
    read_all(path)


@states(
    "`user.s3.key` is the full key, also below a mounted prefix, and `user.s3.endpoint` the S3"
    " endpoint, where the mount was given one; a directory has no other."
)
def test_the_key_attribute_is_the_full_key(mounter: Mounter, bucket: Bucket) -> None:
    bucket.put("data/d/file", b"x")
    root = mounter(prefix="data/").path
    assert os.getxattr(root / "d" / "file", "user.s3.key") == b"data/d/file"
    assert os.getxattr(root / "d", "user.s3.key") == b"data/d/"
    for path in (root, root / "d", root / "d" / "file"):
        assert os.getxattr(path, "user.s3.endpoint").decode() == bucket.server.endpoint_url
    with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
        os.getxattr(root / "d", "user.s3.etag")


@states("Any other extended attribute is ENODATA.")
@pytest.mark.parametrize("name", ["user.other", "security.capability", "system.posix_acl_access"])
def test_any_other_extended_attribute_is_not_there(still: Mount, name: str) -> None:
    with pytest.raises(OSError, match=r"No data available|Operation not supported") as caught:
        os.getxattr(still.path / "d" / "file", name)
    # The kernel itself answers for access control lists, which this file system has none of.
    is_acl = name.startswith("system.")
    assert caught.value.errno in ((errno.EOPNOTSUPP, errno.ENODATA) if is_acl else (errno.ENODATA,))


@states("`statfs` shows 2^60 bytes, all free: a bucket has no end.")
def test_statfs_shows_an_endless_disk(still: Mount) -> None:
    shown = os.statvfs(still.path)
    assert shown.f_blocks * shown.f_frsize == 1 << 60
    assert shown.f_blocks == shown.f_bfree == shown.f_bavail
    assert shown.f_namemax == 255


@states("A file has no holes: SEEK_DATA finds data anywhere, SEEK_HOLE the end.")
def test_a_file_has_no_holes_however_little_is_cached(still: Mount) -> None:
    size = 3 * MIB
    with (still.path / "d" / "large").open("rb", buffering=0) as file:
        for offset in (0, 1, 2 * MIB, size - 1):
            assert os.lseek(file.fileno(), offset, os.SEEK_DATA) == offset
            assert os.lseek(file.fileno(), offset, os.SEEK_HOLE) == size
        with pytest.raises(OSError, match="No such device or address"):
            os.lseek(file.fileno(), size, os.SEEK_DATA)


@states(
    "A missing object is ENOENT, access denied by S3 is EACCES, a replaced or deleted one ESTALE"
    " on an open file."
)
def test_what_s3_answers_becomes_an_errno(mounter: Mounter) -> None:
    """Of a server that lists files and refuses to hand them out."""
    with ListingServer(["d/one", "d/two"]) as server:
        mount = mounter("--anonymous", "--retry-time", "1s", endpoint_url=server.endpoint_url)
        path = mount.path / "d" / "one"
        cases = {
            (403, "AccessDenied"): errno.EACCES,
            (403, "InvalidObjectState"): errno.EIO,
            (500, "InternalError"): errno.EIO,
            (503, "SlowDown"): errno.EIO,
            (404, "NoSuchKey"): errno.ENOENT,
        }
        got = {}
        for refusal in cases:
            server.refusal = refusal
            if refusal[0] == 404:
                del server.objects["d/one"]
            got[refusal] = error_of(lambda: read_all(path))
        assert got == cases
