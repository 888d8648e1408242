"""Checksums: CRC32s of sent and cached bytes, and comparison with the checksums that S3 stores.

CRC32 is computed by ISA-L (94 GB/s for a mebibyte in the processor's cache; zlib has 1 to 5).

S3 returns checksums only to a GET of the whole object that asks for them, not with a range
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html). AWS computes
a CRC64NVME for objects sent without one. The checksum of a multipart upload may be composed of the
checksums of its parts; it is not compared then. CRC32C and CRC64NVME are computed only by awscrt.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Mapping
from typing import Any

from isal.isal_zlib import crc32 as _crc32

# ISA-L releases the interpreter lock to sum more than 5 KiB; that costs more than a short sum. So
# up to _SLICED bytes are summed in slices (256 KiB: 19 µs; in one call 3 µs).
_SLICED = 256 << 10
_SLICE = 4096
# The header with which a request asks for checksums.
ASKING = {"x-amz-checksum-mode": "ENABLED"}
_PREFIX = "x-amz-checksum-"
_SIZES = {"crc32": 4, "crc32c": 4, "crc64nvme": 8}


def crc32(data: bytes | bytearray | memoryview, crc: int = 0) -> int:
    """Return the CRC32 of `data`, continuing from `crc`, the CRC32 of the data before it."""
    size = len(data)
    if size <= _SLICE or size > _SLICED:
        return _crc32(data, crc)
    view = memoryview(data)
    for at in range(0, size, _SLICE):
        crc = _crc32(view[at : at + _SLICE], crc)
    return crc


def mismatch(
    headers: Mapping[str, str], content: Callable[[], bytes], crc: int | None = None
) -> str | None:
    """Return the name of a checksum in an answer's headers that the content contradicts, or None.

    A checksum that can't be computed counts as right. `crc` is the content's CRC32, if known.
    """
    if headers.get(_PREFIX + "type", "FULL_OBJECT").upper() != "FULL_OBJECT":
        return None
    for name, size in _SIZES.items():
        expected = _decoded(headers.get(_PREFIX + name, ""), size)
        if expected is None:
            continue
        # awscrt is imported where it is needed: that takes 50 ms, in the event loop, and 3 MiB.
        compute = crc32 if name == "crc32" else _of_awscrt(name)
        if compute is None:
            continue
        found = crc if name == "crc32" and crc is not None else compute(content())
        if found.to_bytes(size, "big") != expected:
            return name.upper()
    return None


def _decoded(text: str, size: int) -> bytes | None:
    """Decode a checksum of `size` bytes; None if the text is no such checksum."""
    if not text:
        return None
    try:
        value = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return value if len(value) == size else None


@functools.cache
def _of_awscrt(name: str) -> Callable[[Any], int] | None:
    try:
        from awscrt import checksums
    except ImportError:
        return None
    # Older versions of awscrt lack some of the functions.
    compute: Callable[[Any], int] | None = getattr(checksums, name, None)
    return compute
