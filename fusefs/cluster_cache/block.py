"""Blocks of objects as the cluster cache stores them: their layout, names and checks.

A block is up to 8 MiB of one version of an object. It is stored as *frames* of up to 256 KiB of the
object's bytes, each followed by a tag: a CRC32, and an HMAC with the key of the domain. So any
range of frames can be fetched and checked without the rest, and a reader gets its first bytes
before the last ones have arrived.

Names and tags are made with the key: only nodes with the key can tell which object a block belongs
to, and a block that was written without the key is never served. A tag also covers the block's name
and the frame's number, so no block or frame can be passed off as another.
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

# Part of every name: a block of another layout has another name.
_FORMAT = b"fusefs block 1"
_NUMBER = struct.Struct(">I")


class BadBlockError(Exception):
    """A block differs from what was stored, or was not stored by this domain."""


# A tuple for speed: each small file that is fetched makes some of these.
class BlockId(NamedTuple):
    """Identity of a block: a version and the block's number; `Domain.named` computes its name."""

    version: ObjectVersion
    number: int

    @property
    def start(self) -> int:
        return self.number * BLOCK

    @property
    def stop(self) -> int:
        return min((self.number + 1) * BLOCK, self.version.size)


def block_ids(version: ObjectVersion, start: int, stop: int) -> list[BlockId]:
    """Return the blocks that contain some of the bytes [start, stop) of a version."""
    return [BlockId(version, number) for number in range(start // BLOCK, -(-stop // BLOCK))]


@dataclass(frozen=True, slots=True)
class Block:
    """The block with the bytes [start, stop) of a version; `name` is its key below the prefix."""

    name: str
    start: int
    stop: int

    def stored_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range in the stored block of the frames with the object's [start, stop)."""
        first, last = self._frame_at(start), self._frame_at(stop - 1)
        end = min(self.start + (last + 1) * FRAME, self.stop)
        return first * (FRAME + TAG), end - self.start + (last + 1) * TAG

    def frames(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (number, start, stop) of each frame with bytes of the object's [start, stop)."""
        for number in range(self._frame_at(start), self._frame_at(stop - 1) + 1):
            at = self.start + number * FRAME
            yield number, at, min(at + FRAME, self.stop)

    def _frame_at(self, position: int) -> int:
        return (position - self.start) // FRAME


class Domain:
    """Names, tags and checks the blocks of one bucket's objects, with one key.

    `key` is a secret that all nodes of the domain share; with an empty key, anybody can write valid
    blocks. All blocks are below `prefix`, which depends on key, endpoint and bucket.
    """

    def __init__(self, endpoint: str, bucket: str, key: bytes) -> None:
        self._naming = hmac.digest(key, b"names", "sha256")
        # Copied for each frame: starting from the key would cost twice as much.
        self._tagging = hmac.new(hmac.digest(key, b"tags", "sha256"), b"", "sha256")
        self.prefix = f"v1/{self._hash(_plain(endpoint), bucket)[:16]}/"

    def block(self, version: ObjectVersion, position: int) -> Block:
        """Return the block that contains the byte `position` of a version."""
        return self.named(BlockId(version, position // BLOCK))

    def named(self, block: BlockId) -> Block:
        """Compute the name of the block with this `BlockId`; return the `Block`."""
        version = block.version
        of_version = self._hash(*version[:2], str(version.size))
        return Block(f"{self.prefix}{of_version}/{block.number:06}", block.start, block.stop)

    def tag(self, block: Block, number: int, data: bytes | memoryview) -> bytes:
        """Return the tag to store after frame `number`, which has the bytes `data`."""
        return self._crc(block, number, data) + self._mac(block, number, data)

    def verify(
        self, block: Block, number: int, data: bytes | memoryview, tag: bytes | memoryview
    ) -> None:
        """Check a frame against its tag.

        Raises:
            BadBlockError: the frame is not what was stored.
        """
        if self._crc(block, number, data) != bytes(tag[:_CRC_SIZE]):
            raise BadBlockError(f"{block.name}: frame {number} was changed since it was stored")
        if not hmac.compare_digest(self._mac(block, number, data), bytes(tag[_CRC_SIZE:])):
            raise BadBlockError(f"{block.name}: frame {number} was stored with another key")

    def stored(self, block: Block, data: bytes | bytearray) -> bytes:
        """Return the body of the PUT that stores a block: `data` in frames, each with its tag."""
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
        # With the length before each part, different lists of parts give different texts.
        encoded = [part.encode("utf-8", "surrogateescape") for part in parts]
        text = b"".join(_NUMBER.pack(len(part)) + part for part in encoded)
        return hmac.new(self._naming, _FORMAT + text, hashlib.sha256).hexdigest()[:40]


def _place(block: Block, number: int) -> bytes:
    return block.name.encode() + _NUMBER.pack(number)


def _plain(endpoint: str) -> str:
    """Normalize an endpoint's spelling, so that nodes with other spellings share the blocks."""
    scheme, host, path, _, _ = urlsplit(endpoint)
    host = host.lower().removesuffix({"http": ":80", "https": ":443"}.get(scheme, ""))
    return f"{scheme}://{host}{path.rstrip('/')}" if endpoint else ""


class FrameReader:
    """Converts a stored block, as it arrives, to the object's bytes, frame by frame.

    Only the bytes [start, stop) are returned; the rest of their frames is checked and dropped.
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
        """Yield the offset in the object and the bytes of each frame that the chunk completes.

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
