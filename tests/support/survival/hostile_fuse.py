"""A FUSE server that lets files be opened and then answers nothing any more.

Arguments: the mountpoint, the owner's uid, and how long attributes are
valid, in seconds. It says `ready` when the mount is there, and the mount's
connection ends with this process.
"""

import errno
import os
import select
import stat
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from fusefs.fuse import protocol
from fusefs.fuse.protocol import Opcode
from fusefs.linux import libc

FILE = 2


def attributes(nodeid: int, uid: int) -> bytes:
    mode = stat.S_IFDIR | 0o777 if nodeid == protocol.ROOT_ID else stat.S_IFREG | 0o666
    return protocol.ATTR.pack(nodeid, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, uid, uid, 0, 4096, 0)


def answer(opcode: int, nodeid: int, body: bytes, uid: int, valid_s: int) -> bytes | None:
    if opcode == Opcode.INIT:
        _, _, readahead, *_ = protocol.INIT_IN.unpack_from(body)
        return protocol.INIT_OUT.pack(
            protocol.MAJOR, protocol.MINOR, readahead, 0, 16, 12, 1 << 17, 1, 0, 0, 0, 0, 0, b""
        )
    if opcode == Opcode.LOOKUP:
        return protocol.ENTRY_OUT_HEAD.pack(FILE, 0, 3600, valid_s, 0, 0) + attributes(FILE, uid)
    if opcode == Opcode.GETATTR and nodeid == protocol.ROOT_ID:
        return protocol.ATTR_OUT_HEAD.pack(3600, 0, 0) + attributes(nodeid, uid)
    if opcode == Opcode.OPEN:
        return protocol.OPEN_OUT.pack(1, 0, 0)
    return None


def main() -> None:
    mountpoint, uid, valid_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    fd = os.open("/dev/fuse", os.O_RDWR)
    libc.mount(
        "hostile", mountpoint, "fuse", 0, f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other"
    )
    print("ready", flush=True)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while True:
        poll.poll()
        try:
            request = os.read(fd, 1 << 18)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return
            continue
        _, opcode, unique, nodeid, *_ = protocol.IN_HEADER.unpack_from(request)
        data = answer(opcode, nodeid, request[protocol.IN_HEADER.size :], uid, valid_s)
        if data is not None:
            os.write(
                fd, protocol.OUT_HEADER.pack(protocol.OUT_HEADER.size + len(data), 0, unique) + data
            )


if __name__ == "__main__":
    main()
