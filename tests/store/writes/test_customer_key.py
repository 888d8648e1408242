"""Encryption with a customer's key: it goes with each request that needs it, and nowhere else."""

import base64
import hashlib
import os
from contextlib import suppress
from pathlib import Path

import pytest

from fusefs.store import customer_key
from fusefs.store.customer_key import CustomerKey, CustomerKeyError
from fusefs.store.errors import MisconfiguredError, UnsupportedError
from fusefs.store.interface import ObjectVersion, read_bytes
from fusefs.store.s3.access import Access
from fusefs.store.s3.settings import S3Settings
from fusefs.store.s3.store import S3Store
from tests.support.machine.local_file import MakeFile
from tests.support.mounting import Mounter, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_writing import PART, WAYS, opened, put

RAW = bytes(range(32))
TEXT = base64.b64encode(RAW).decode()
KEY = CustomerKey(TEXT)
HEADER = "x-amz-server-side-encryption-customer-"
SOURCE = "x-amz-copy-source-server-side-encryption-customer-"
NAMED = {
    "algorithm": "AES256",
    "key": TEXT,
    "key-md5": base64.b64encode(hashlib.md5(RAW).digest()).decode(),
}
WITH_KEY = {"GET", "HEAD", "PUT", "BEGIN", "PART", "COPY", "PART COPY", "COMPLETE", "PARTS"}


async def content_of(store: S3Store, version: ObjectVersion) -> bytes:
    return bytes(await read_bytes(store, version, 0, version.size))


def sent_with(faulty: FaultyS3, before: int) -> dict[str, list[dict[str, str]]]:
    """The headers of the requests since, by operation."""
    found: dict[str, list[dict[str, str]]] = {}
    for request in faulty.requests()[before:]:
        found.setdefault(request.operation, []).append(request.headers)
    return found


@states(
    "With `--customer-key` each object is encrypted by S3 with the key of that file, which goes"
    " with every request that reads or writes, over TLS or to this machine alone."
)
@pytest.mark.parametrize(("size", "operation"), [WAYS[0], WAYS[-1]], ids=["small", "parts"])
async def test_the_key_goes_with_each_request_that_reads_or_writes(
    bucket: Bucket, faulty: FaultyS3, make_file: MakeFile, size: int, operation: str
) -> None:
    before = len(faulty.requests())
    file = make_file(size)
    async with opened(bucket, faulty, customer_key=KEY) as store:
        info = await put(store, "made", file)
        assert await content_of(store, info.version) == os.pread(file.fd, size, 0)
        copied = await store.copy(info, "renamed")
        assert await content_of(store, copied.version) == os.pread(file.fd, size, 0)
        assert (await store.head("renamed")).size == size
        if operation == "PART":
            upload = await store.begin_upload("edited")
            with suppress(UnsupportedError):  # SeaweedFS copies no encrypted parts
                await upload.copy_part(1, info.version, 0, PART)
            await store.abort_upload("edited", upload.state.upload_id)
        await store.delete("made")
    sent = sent_with(faulty, before)
    assert {"GET", "HEAD", "COPY", operation} <= sent.keys()
    assert ("PART COPY" in sent) is (operation == "PART")
    for name, requests in sent.items():
        for headers in requests:
            present = {
                each.removeprefix(HEADER): headers[each]
                for each in headers
                if each.startswith(HEADER)
            }
            assert present == (NAMED if name in WITH_KEY else {}), name
            source = {each for each in headers if each.startswith(SOURCE)}
            assert bool(source) is name.endswith("COPY"), name


@pytest.mark.parametrize(
    ("url", "is_safe"),
    [
        ("https://s3.example.org", True),
        ("http://127.0.0.1:9000", True),
        ("http://localhost:9000", True),
        ("http://[::1]:9000", True),
        ("http://s3.example.org", False),
        ("http://10.0.0.1:9000", False),
    ],
)
def test_the_key_is_not_sent_in_the_clear_over_a_network(url: str, is_safe: bool) -> None:
    settings = S3Settings("bucket", endpoint_url=url, customer_key=KEY)
    if is_safe:
        assert Access(settings).url == url
    else:
        with pytest.raises(MisconfiguredError, match="over TLS alone"):
            Access(settings)


def test_the_key_is_not_shown() -> None:
    assert TEXT not in repr(S3Settings("bucket", customer_key=KEY))
    assert TEXT not in KEY.identity


def test_those_without_the_key_have_another_cache() -> None:
    place = {"endpoint_url": "http://127.0.0.1:9000"}
    with_key = Access(S3Settings("bucket", **place, customer_key=KEY))  # type: ignore[arg-type]
    without = Access(S3Settings("bucket", **place))  # type: ignore[arg-type]
    assert with_key.principal != without.principal


@pytest.mark.parametrize(
    ("content", "is_key"),
    [
        (RAW, True),
        (TEXT.encode(), True),
        (TEXT.encode() + b"\n", True),
        (b"", False),
        (RAW + b"\n", False),
        (b"not base64!", False),
        (base64.b64encode(RAW[:16]), False),
    ],
)
def test_a_file_has_32_bytes_or_their_base64(tmp_path: Path, content: bytes, is_key: bool) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    if is_key:
        assert customer_key.find(path) == KEY
    else:
        with pytest.raises(CustomerKeyError, match="is no key"):
            customer_key.find(path)


def test_a_mount_and_its_next_daemon_have_the_key_of_a_file_of_their_owner(
    mounter: Mounter, bucket: Bucket, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    path.write_text(TEXT)
    path.chmod(0o600)
    encrypted = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": RAW}
    for name in ("first", "second"):
        bucket.client.put_object(
            Bucket=bucket.name, Key=name, Body=name.encode() * 1000, **encrypted
        )
    mount = mounter("--customer-key", str(path), "--no-read-only")
    assert (mount.path / "first").read_bytes() == b"first" * 1000
    fusefs("upgrade", mount.path, environment=mount.environment)
    assert (mount.path / "second").read_bytes() == b"second" * 1000
    (mount.path / "made").write_bytes(b"made")
    answer = bucket.client.get_object(Bucket=bucket.name, Key="made", **encrypted)
    assert answer["Body"].read() == b"made"
    assert TEXT not in mount.log.read_text()
    for name in ("cmdline", "environ"):
        assert TEXT.encode() not in Path(f"/proc/{mount.pid}/{name}").read_bytes()


def test_a_mount_without_its_key_is_refused_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    place = ("s3://bucket", tmp_path / "mnt", "--cache-dir", tmp_path / "cache")
    failed = fusefs("mount", *place, "--customer-key", tmp_path / "none", check=False)
    assert failed.returncode != 0
    assert "cannot be read: No such file" in failed.stderr
