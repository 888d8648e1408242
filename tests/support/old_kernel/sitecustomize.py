"""Makes the kernel one before Linux 6.9 for the daemons whose PYTHONPATH leads here.

Python imports this at its start. Of the kernel's first request, INIT, it takes the flags that
requests can be sent again and that mounts may be idmapped.
"""

import os
import struct

_INIT = 26
_HEADER = struct.Struct("<II")
_FLAGS2_AT, _LATER = 40 + 16, 1 << (39 - 32) | 1 << (40 - 32)
_readv = os.readv


def _read_init(fd: int, buffers: list[memoryview]) -> int:
    size = _readv(fd, buffers)
    if _HEADER.unpack_from(buffers[0])[1] == _INIT:
        os.readv = _readv
        [flags] = struct.unpack_from("<I", buffers[0], _FLAGS2_AT)
        struct.pack_into("<I", buffers[0], _FLAGS2_AT, flags & ~_LATER)
    return size


os.readv = _read_init  # type: ignore[assignment]
