"""Blocks: what the cluster cache holds of objects, how they are named and how they are checked.

A block is up to 8 MiB of one version of an object. It is stored as *frames*, up to 256 KiB of
the object's bytes each, behind each of which stands a tag: a CRC32, and an HMAC with the key
of the domain. So any range of frames can be fetched and checked without the rest, and a reader
has its first bytes before the last have come.

Name and tags are made with the key: only who has it can tell what a block is of, and a block
that somebody else has written is never served. Tags cover the block's name and the frame's
number as well: no block can stand for another, and no frame.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from fusefs.store.checksum import crc32
from fusefs.store.interface import ObjectVersion

BLOCK = 8 << 20
FRAME = 256 << 10
_CRC_SIZE, _MAC_SIZE = 4, 16
TAG = _CRC_SIZE + _MAC_SIZE

# Part of every name: another layout is another block.
_FORMAT = b"fusefs block 1"
_NUMBER = struct.Struct(">I")


class BadBlockError(Exception):
    """A block that is not as it was stored, or was not stored by this domain."""


# A tuple: each small file that is fetched makes some of these.
class BlockId(NamedTuple):
    """One of a version's blocks, by its number; its name in the cache takes a hash."""

    version: ObjectVersion
    number: int

    @property
    def start(self) -> int:
        return self.number * BLOCK

    @property
    def stop(self) -> int:
        return min((self.number + 1) * BLOCK, self.version.size)


def block_ids(version: ObjectVersion, start: int, stop: int) -> list[BlockId]:
    """The blocks that have some of the bytes [start, stop) of a version."""
    return [BlockId(version, number) for number in range(start // BLOCK, -(-stop // BLOCK))]


@dataclass(frozen=True, slots=True)
class Block:
    """The bytes [start, stop) of a version; `name` is its key in the cache, below the prefix."""

    name: str
    start: int
    stop: int

    def stored_range(self, start: int, stop: int) -> tuple[int, int]:
        """The range of the stored block that has the frames of the object's [start, stop)."""
        first, last = self._frame_at(start), self._frame_at(stop - 1)
        end = min(self.start + (last + 1) * FRAME, self.stop)
        return first * (FRAME + TAG), end - self.start + (last + 1) * TAG

    def frames(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Number, start and stop of each frame that has some of the object's [start, stop)."""
        for number in range(self._frame_at(start), self._frame_at(stop - 1) + 1):
            at = self.start + number * FRAME
            yield number, at, min(at + FRAME, self.stop)

    def _frame_at(self, position: int) -> int:
        return (position - self.start) // FRAME


class Domain:
    """The blocks of one bucket's objects, as those name and check them who have a key.

    `key` is a secret that all nodes of the domain share; empty, anybody can write blocks that
    pass. All blocks are below `prefix`, which is the same where key, endpoint and bucket are.
    """

    def __init__(self, endpoint: str, bucket: str, key: bytes) -> None:
        self._naming = hmac.digest(key, b"names", "sha256")
        # Copied for each frame: to begin with the key costs as much again.
        self._tagging = hmac.new(hmac.digest(key, b"tags", "sha256"), b"", "sha256")
        self.prefix = f"v1/{self._hash(_plain(endpoint), bucket)[:16]}/"

    def block(self, version: ObjectVersion, position: int) -> Block:
        """The block that has a byte of a version."""
        return self.named(BlockId(version, position // BLOCK))

    def named(self, block: BlockId) -> Block:
        """A block with its name."""
        version = block.version
        of_version = self._hash(*version[:2], str(version.size))
        name = f"{self.prefix}{of_version}/{block.number:06}"
        return Block(name, block.start, block.stop)

    def tag(self, block: Block, number: int, data: bytes | memoryview) -> bytes:
        """The tag behind a frame."""
        return self._crc(block, number, data) + self._mac(block, number, data)

    def verify(
        self, block: Block, number: int, data: bytes | memoryview, tag: bytes | memoryview
    ) -> None:
        """See that a frame is what was stored.

        Raises:
            BadBlockError: it is not.
        """
        if self._crc(block, number, data) != bytes(tag[:_CRC_SIZE]):
            raise BadBlockError(f"{block.name}: frame {number} was changed since it was stored")
        if not hmac.compare_digest(self._mac(block, number, data), bytes(tag[_CRC_SIZE:])):
            raise BadBlockError(f"{block.name}: frame {number} was stored with another key")

    def stored(self, block: Block, data: bytes | bytearray) -> bytes:
        """Make a block as it is stored of the object's bytes: the body of a PUT."""
        view, pieces = memoryview(data), list[bytes | memoryview]()
        for number, start, stop in block.frames(block.start, block.stop):
            frame = view[start - block.start : stop - block.start]
            pieces += (frame, self.tag(block, number, frame))
        return b"".join(pieces)

    def _mac(self, block: Block, number: int, data: bytes | memoryview) -> bytes:
        check = self._tagging.copy()
        check.update(_place(block, number))
        check.update(data)
        return check.digest()[:_MAC_SIZE]

    def _crc(self, block: Block, number: int, data: bytes | memoryview) -> bytes:
        return crc32(data, crc32(_place(block, number))).to_bytes(_CRC_SIZE, "big")

    def _hash(self, *parts: str) -> str:
        # Each with its length: no two lists of parts are one text.
        encoded = [part.encode("utf-8", "surrogateescape") for part in parts]
        text = b"".join(_NUMBER.pack(len(part)) + part for part in encoded)
        digest = hmac.new(self._naming, _FORMAT + text, hashlib.sha256).hexdigest()
        return digest[:40]


def _place(block: Block, number: int) -> bytes:
    return block.name.encode() + _NUMBER.pack(number)


def _plain(endpoint: str) -> str:
    """An endpoint as it is written most simply: nodes that write it otherwise share blocks."""
    scheme, host, path, _, _ = urlsplit(endpoint)
    usual = {"http": ":80", "https": ":443"}.get(scheme, "")
    host = host.lower().removesuffix(usual)
    return f"{scheme}://{host}{path.rstrip('/')}" if endpoint else ""


class FrameReader:
    """Takes what arrives of a stored block and gives the object's bytes, frame by frame.

    `start` and `stop` are the range that is wanted; what is before and behind it in its frames
    is checked and left out.
    """

    def __init__(self, domain: Domain, block: Block, start: int, stop: int) -> None:
        self._domain = domain
        self._block = block
        self._wanted = start, stop
        self._frames = block.frames(start, stop)
        self._current = next(self._frames, None)
        self._buffer = bytearray()

    @property
    def is_complete(self) -> bool:
        return self._current is None

    def feed(self, chunk: bytes | memoryview) -> Iterator[tuple[int, memoryview]]:
        """The offset and the bytes of each frame that the chunk completes.

        Raises:
            BadBlockError: a frame is not what was stored.
        """
        rest = memoryview(chunk)
        while self._current is not None and rest:
            number, start, stop = self._current
            size = stop - start
            if not self._buffer and len(rest) >= size + TAG:
                frame, rest = rest[: size + TAG], rest[size + TAG :]
            else:
                missing = size + TAG - len(self._buffer)
                self._buffer += rest[:missing]
                rest = rest[missing:]
                if len(self._buffer) < size + TAG:
                    return
                frame, self._buffer = memoryview(self._buffer), bytearray()
            self._domain.verify(self._block, number, frame[:size], frame[size:])
            self._current = next(self._frames, None)
            low, high = max(start, self._wanted[0]), min(stop, self._wanted[1])
            yield low, frame[low - start : high - start]
