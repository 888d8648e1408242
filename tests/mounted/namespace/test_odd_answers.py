"""Entries of listings, and answers about objects, that no server should send."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.semantics import states
from tests.support.servers.flat_s3 import FlatS3, Stored
from tests.support.servers.in_process import Answer, Headers
from tests.support.servers.s3_server import S3Server
from tests.support.sharing import mounted
from tests.support.writing import WRITABLE, status

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
def test_an_odd_entry_of_a_listing_is_hidden_and_the_others_are_there(
    s3: S3Server, tmp_path: Path
) -> None:
    with FlatS3() as server:
        for number, etag in enumerate(ODD):
            server.objects[f"d/odd{number}"] = Odd(b"odd", odd=etag)
        server.put("d/fine", b"fine")
        url = server.endpoint_url
        with mounted(s3, "s3://bucket/", tmp_path, WRITABLE, endpoint_url=url) as mount:
            pid = mount.pid
            # What is written for XML without the character that XML has not is an ETag.
            assert {"fine"} <= {*os.listdir(mount.path / "d")} <= {"fine", "odd1"}
            assert (mount.path / "d/fine").read_bytes() == b"fine"
            for number in (0, 2, 3):
                assert not (mount.path / f"d/odd{number}").exists()
            with pytest.raises(OSError, match="not empty"):
                (mount.path / "d").rmdir()
            with pytest.raises(OSError, match="Input/output error"):
                (mount.path / "d").rename(mount.path / "e")
            assert status(mount)["metadata"]["hidden_keys"] == 3
            assert mount.pid == pid


def test_odd_headers_of_an_object_end_one_request(s3: S3Server, tmp_path: Path) -> None:
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
        url = server.endpoint_url
        with mounted(s3, "s3://bucket/", tmp_path, WRITABLE, endpoint_url=url) as mount:
            pid = mount.pid
            for key in odd:
                path = mount.path / key
                for use in (
                    os.stat,
                    Path.read_bytes,
                    os.listxattr,
                    lambda one: os.chmod(one, 0o600),
                ):
                    try:
                        use(path)
                    except OSError:
                        assert key not in ("type", "meta", "version")
            assert mount.pid == pid
