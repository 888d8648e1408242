"""What Ceph's S3 gateway does otherwise than others, and the gateway itself where it is installed.

Each of its ways is shown with the proxy as well, so that it is covered without Ceph.
"""

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fusefs.store.errors import NotFoundError, UnsupportedError
from fusefs.store.interface import IfMatch, ObjectVersion
from fusefs.store.s3 import copy, multipart
from fusefs.store.s3.store import S3Store
from tests.support.machine.local_file import MakeFile
from tests.support.mounting import Mount, Mounter
from tests.support.programs import WRITABLE
from tests.support.semantics import states
from tests.support.servers import ceph_server
from tests.support.servers.buckets import Bucket, keys, new_bucket, stored
from tests.support.servers.ceph_server import CephServer
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import S3Server
from tests.support.store_writing import KEYS, PART, digest, each_way, opened, put
from tests.support.waiting import until

# What the gateway answers to a completion: done, but of which ETag it does not say.
COMPLETED = b"<CompleteMultipartUploadResult><ETag></ETag></CompleteMultipartUploadResult>"
# What it answers to a repeated request when another object is there, or the upload is unknown.
STUCK = {"code": "InternalError", "status": 500}
LARGE = 20 << 20  # more than goes into one request


@pytest.fixture(scope="module")
def ceph(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The gateway."""
    if isinstance(s3, CephServer):
        yield s3
        return
    if reason := ceph_server.missing():
        pytest.skip(reason)
    with CephServer(tmp_path_factory.mktemp("ceph")) as server:
        yield server


@pytest.fixture
def ceph_bucket(ceph: S3Server) -> Bucket:
    return new_bucket(ceph)


async def test_a_completion_without_an_etag_is_done_also_where_others_replace_the_object(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, make_file: MakeFile
) -> None:
    file = make_file(2 * PART)
    rule = faulty.add("COMPLETE", is_done=True, status=200, body=COMPLETED)
    other: list[str] = []
    faulty.add("HEAD", times=1, before=lambda: other.append(bucket.put("file", b"other")))
    info = await put(store, "file", file)
    assert (rule.used, store.counters()["retries"]) == (1, 0)
    # It was ours, and is not any more.
    assert info.etag != (await store.head("file")).etag == other[0]


async def test_a_completion_that_can_not_end_is_given_up(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, make_file: MakeFile
) -> None:
    """Its first answer was lost, and somebody else has replaced the object since."""
    faulty.add("COMPLETE", times=1, lose_answer=True)
    stuck = faulty.add("COMPLETE", before=lambda: bucket.put("file", b"other"), **STUCK)
    with pytest.raises(NotFoundError, match="completed or aborted"):
        await put(store, "file", make_file(2 * PART))
    assert stuck.used == 1
    assert stored(bucket, "file") == b"other"


async def test_a_completion_that_fails_while_the_upload_is_there_is_tried_again(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, make_file: MakeFile
) -> None:
    file = make_file(2 * PART)
    faulty.add("COMPLETE", times=2, **STUCK)
    await put(store, "file", file)
    assert store.counters()["retries"] == 2
    assert digest(stored(bucket, "file")) == digest(file.data)


async def test_a_server_that_compares_an_etag_without_its_quotes_gets_it_so(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, make_file: MakeFile
) -> None:
    etag = bucket.put("file", b"before")
    faulty.add("PUT", code="PreconditionFailed", times=1)
    await put(store, "file", make_file(10), IfMatch(etag))
    sent = [one.headers["if-match"] for one in faulty.requests("PUT")]
    assert sent == [etag, etag.strip('"')]


def test_an_upload_of_which_parts_are_refused_is_made_anew(
    mounter: Mounter, bucket: Bucket, faulty: FaultyS3
) -> None:
    faulty.clear()
    mount = mounter(*WRITABLE, endpoint_url=faulty.endpoint_url)
    faulty.add("COMPLETE", times=1, code="InvalidPart", status=400)
    data = os.urandom(LARGE)
    (mount.path / "file").write_bytes(data)
    assert stored(bucket, "file") == data
    assert bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads", []) == []


@states(
    "A large file whose upload the store has lost, or has completed without an answer and the"
    " object was replaced since, is sent again; with `--conflict fail` it is kept as"
    " NAME.conflict-HOST-TIME."
)
@pytest.mark.parametrize("conflict", ["overwrite", "fail"])
def test_an_upload_that_can_not_be_completed_is_made_anew_or_kept_apart(
    mounter: Mounter, bucket: Bucket, faulty: FaultyS3, conflict: str
) -> None:
    """As the conflict policy has it; either way it ends, and so does the mount."""
    faulty.clear()
    bucket.put("file", b"before")
    mount = mounter(*WRITABLE, "--conflict", conflict, endpoint_url=faulty.endpoint_url)
    data = os.urandom(LARGE)
    faulty.add("COMPLETE", times=1, lose_answer=True)
    faulty.add("COMPLETE", times=1, before=lambda: bucket.put("file", b"other"), **STUCK)
    if conflict == "overwrite":
        (mount.path / "file").write_bytes(data)
        assert stored(bucket, "file") == data
    else:
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            (mount.path / "file").write_bytes(data)
        (apart,) = (key for key in keys(bucket) if key.startswith("file.conflict-"))
        assert (stored(bucket, "file"), stored(bucket, apart)) == (b"other", data)
    mount.end()
    assert bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads", []) == []


@each_way
@pytest.mark.parametrize("compares", [True, False, None])
async def test_a_body_goes_with_its_md5_unless_checksums_are_compared(
    store: S3Store,
    faulty: FaultyS3,
    make_file: MakeFile,
    size: int,
    operation: str,
    compares: bool | None,
) -> None:
    store.fence.capabilities = replace(store.fence.capabilities, checksums=compares)
    for key in KEYS:
        await put(store, key, make_file(size))
    sent = faulty.requests(operation)
    assert len(sent) >= len(KEYS)
    assert all(("content-md5" in request.headers) == (not compares) for request in sent)


@pytest.fixture
def ceph_mount(ceph_bucket: Bucket, mounter: Mounter) -> Mount:
    return mounter(*WRITABLE, bucket=ceph_bucket)


def test_two_mounts_race_for_a_file_and_both_end(
    mounter: Mounter, ceph_bucket: Bucket, tmp_path: Path
) -> None:
    """The completions of both are sent again and again, in any order."""
    with FaultyS3(ceph_bucket.server.endpoint_url) as proxy:
        proxy.add("COMPLETE", times=4, lose_answer=True)
        mounts = [
            mounter(
                *WRITABLE, bucket=ceph_bucket, endpoint_url=proxy.endpoint_url, cache=f"cache{n}"
            )
            for n in range(2)
        ]
        contents = [os.urandom(LARGE) for _ in mounts]
        files = [(mount.path / "file").open("wb") for mount in mounts]
        for file, data in zip(files, contents, strict=True):
            file.write(data)
        for file in files:
            file.close()
        for mount in mounts:
            mount.end()
    assert stored(ceph_bucket, "file") in contents
    uploads = ceph_bucket.client.list_multipart_uploads(Bucket=ceph_bucket.name)
    assert uploads.get("Uploads", []) == []


def test_a_large_file_that_is_cut_short_before_it_is_closed_arrives(
    ceph_mount: Mount, ceph_bucket: Bucket
) -> None:
    """The gateway completes no upload of which parts are left out."""
    data = os.urandom(2 * LARGE)
    with (ceph_mount.path / "file").open("wb") as file:
        file.write(data)
        file.flush()
        until(lambda: ceph_mount.status()["s3"]["bytes_sent"] > LARGE)
        file.truncate(LARGE // 2)
    assert stored(ceph_bucket, "file") == data[: LARGE // 2]
    uploads = ceph_bucket.client.list_multipart_uploads(Bucket=ceph_bucket.name)
    assert uploads.get("Uploads", []) == []


async def test_a_copy_is_of_the_named_object_and_not_of_one_with_a_similar_name(
    ceph_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway decodes the source of a copied part twice."""
    monkeypatch.setattr(copy, "COPY_LIMIT", PART)
    monkeypatch.setattr(multipart, "COPY_PART", PART)
    data = os.urandom(2 * PART)
    etag = ceph_bucket.put("a%20b", data)
    ceph_bucket.put("a b", os.urandom(2 * PART))
    async with opened(ceph_bucket, ceph_bucket.server) as store:
        await store.copy(ObjectVersion("a%20b", etag, len(data)), "copy")
        assert stored(ceph_bucket, "copy") == data
        upload = await store.begin_upload("edited")
        with pytest.raises(UnsupportedError):
            await upload.copy_part(1, ObjectVersion("a%20b", etag, len(data)), 0, PART)
        await store.abort_upload("edited", upload.state.upload_id)
