"""Entries of listings, and answers about objects, that no server should send."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import trio

from fusefs.diagnosis import bucket
from fusefs.store.s3.settings import S3Settings
from tests.support.machine.libc import DirectoryStream
from tests.support.mounting import WRITABLE, Mount, Mounter, fusefs, status
from tests.support.semantics import states
from tests.support.servers.flat_s3 import FlatS3, Stored
from tests.support.servers.in_process import Answer, Headers

ODD = ('"a\nb"', '"a\0b"', '"\u20ac"', f'"{"x" * (64 << 10)}"')


@dataclass(frozen=True)
class Odd(Stored):
    """An object with another ETag than others have."""

    odd: str = ""

    @property
    def etag(self) -> str:
        return self.odd


class OddServer(FlatS3):
    """Answers about the objects in `odd` with headers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.odd: dict[str, dict[str, str]] = {}

    def get(self, key: str, headers: Headers) -> Answer:
        code, shown, data = super().get(key, headers)
        return code, shown | self.odd.get(key, {}), data


@states(
    "What the store tells of an object has to make sense: an entry of a listing without a usable "
    "ETag, size or time is hidden."
)
def test_an_odd_entry_of_a_listing_is_hidden_and_the_others_are_there(mounter: Mounter) -> None:
    with FlatS3() as server:
        for number, etag in enumerate(ODD):
            server.objects[f"d/odd{number}"] = Odd(b"odd", odd=etag)
        server.put("d/fine", b"fine")
        mount = mounter(WRITABLE, endpoint_url=server.endpoint_url)
        pid = mount.pid
        assert os.listdir(mount.path / "d") == ["fine"]
        assert (mount.path / "d/fine").read_bytes() == b"fine"
        for number in range(len(ODD)):
            assert not (mount.path / f"d/odd{number}").exists()
        with pytest.raises(OSError, match="not empty"):
            (mount.path / "d").rmdir()
        with pytest.raises(OSError, match="Input/output error"):
            (mount.path / "d").rename(mount.path / "e")
        assert status(mount)["metadata"]["hidden_keys"] == len(ODD)
        assert mount.pid == pid


def test_odd_headers_of_an_object_end_one_request(mounter: Mounter) -> None:
    odd = {
        "etag": {"ETag": '"a\nb"'},
        "long": {"ETag": f'"{"x" * (64 << 10)}"'},
        "type": {"Content-Type": "a\x01b", "x-amz-storage-class": "\xe9" * 300},
        "time": {"Last-Modified": "Mon, 01 Jan 0001 00:00:00 +2359"},
        "meta": {"x-amz-meta-mode": "9" * 5000, "x-amz-meta-xattr": "%ff", "x-amz-meta-a": "\x01"},
        # Headers of 64 KiB and more, as "long" has, fail the request.
        "version": {"x-amz-version-id": "\xff" * (32 << 10)},
    }
    with OddServer() as server:
        assert isinstance(server, OddServer)
        for key, headers in odd.items():
            server.put(key, key.encode())
            server.objects[key] = replace(server.objects[key], headers={"x-amz-meta-mode": "33188"})
            server.odd[key] = headers
        mount = mounter(WRITABLE, endpoint_url=server.endpoint_url)
        pid = mount.pid
        for key in odd:
            path = mount.path / key
            for use in (os.stat, Path.read_bytes, os.listxattr, lambda one: os.chmod(one, 0o600)):
                try:
                    use(path)
                except OSError:
                    assert key not in ("type", "meta", "version")
        assert mount.pid == pid


FILES, FOLDERS, PAGE = 130, 20, 25
NAMES = sorted([f"{n:03}" for n in range(FILES)] + [f"d{n:02}" for n in range(FOLDERS)])


@pytest.fixture(scope="module")
def server() -> Iterator[FlatS3]:
    with FlatS3(is_ordered=False, page=PAGE) as server:
        for top in ("large", "streamed", "moved", "changed"):
            for number in range(FILES):
                server.put(f"{top}/{number:03}", str(number).encode())
            for number in range(FOLDERS):
                server.put(f"{top}/d{number:02}/one", b"1")
                server.put(f"{top}/d{number:02}/two", b"2")
        yield server


@pytest.fixture(scope="module")
def mount(server: FlatS3, module_mounter: Mounter) -> Mount:
    return module_mounter(WRITABLE, endpoint_url=server.endpoint_url)


@states(
    "Where a store lists in no order (Storj, for one), a directory of more than a page is "
    "listed whole and sorted on the local disk before its first name is shown; the log, "
    "`fusefs status` and `fusefs doctor` say so."
)
def test_a_folder_is_listed_whole(mount: Mount, server: FlatS3) -> None:
    path = mount.path / "large"
    before = server.lists
    assert os.listdir(path) == NAMES
    assert server.lists - before <= 2 + (FILES + FOLDERS) // PAGE + 2
    assert (path / "087").read_bytes() == b"87"
    assert not (path / "absent").exists()
    seen = {where: sorted(files) for where, _, files in os.walk(path)}
    assert len(seen) == 1 + FOLDERS
    assert all(seen[f"{path}/d{number:02}"] == ["one", "two"] for number in range(FOLDERS))
    assert mount.status()["metadata"]["sorted_listings"] >= 1
    assert "for the store has no order" in fusefs("status", mount.path).stdout
    assert mount.log.read_text().count("this store lists in no order") == 1
    settings = S3Settings("bucket", endpoint_url=server.endpoint_url, anonymous=True)
    check = partial(bucket.check, settings, "", tries_permissions=False, may_write=False)
    assert any("lists in no order" in finding.text for finding in trio.run(check))


def test_a_place_in_a_stream_is_found_again(mount: Mount) -> None:
    with DirectoryStream(mount.path / "streamed") as stream:
        before = [stream.read() for _ in range(85)]
        position = stream.tell()
        rest = stream.names()
        assert len(before) + len(rest) == 2 + len(NAMES)
        stream.seek(position)
        assert stream.names() == rest


def test_a_folder_is_renamed_with_all_that_it_has(mount: Mount, server: FlatS3) -> None:
    old = {key: one for key, one in server.contents().items() if key.startswith("moved/")}
    (mount.path / "moved").rename(mount.path / "there")
    there = {key: one for key, one in server.contents().items() if key.startswith("there/")}
    assert there == {key.replace("moved", "there", 1): one for key, one in old.items()}
    assert not [key for key in server.objects if key.startswith("moved/")]
    assert os.listdir(mount.path / "there") == NAMES


def test_what_is_made_and_removed_is_shown_at_once(mount: Mount) -> None:
    """Also where the listing that later pages come from is older."""
    path = mount.path / "changed"
    assert os.listdir(path) == NAMES
    (path / "0005").write_bytes(b"new")
    (path / "125").unlink()
    expected = sorted([*NAMES, "0005"])
    expected.remove("125")
    assert os.listdir(path) == expected
    (path / "0005").unlink()
    (path / "125").write_bytes(b"125")
    assert os.listdir(path) == NAMES
