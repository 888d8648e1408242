"""The FUSE wire format: the structs, opcodes and flags that the sessions use.

Source: the kernel's include/uapi/linux/fuse.h, interface 7.45; the tests
compare every size and offset below with a list generated from that header.
All integers are in the machine's byte order, and all struct fields are aligned
without implicit padding, so `=` formats of Python's `struct` describe them.

A request is `IN_HEADER`, then the struct of its opcode, then names or data. A
reply is `OUT_HEADER`, then the struct of its opcode. An error reply is only
`OUT_HEADER`, with a negative errno.
"""

from __future__ import annotations

import enum
import struct


class Layout:
    """One struct of the protocol; `description` is a list of `name:format` words."""

    __slots__ = ("fields", "name", "pack", "size", "unpack_from")

    def __init__(self, name: str, description: str) -> None:
        self.name = name
        self.fields = [tuple(word.split(":")) for word in description.split()]
        packed = struct.Struct("=" + "".join(code for _, code in self.fields))
        self.size = packed.size
        self.pack = packed.pack
        self.unpack_from = packed.unpack_from

    def offsets(self) -> dict[str, int]:
        """Return the offset of each field, in bytes, by name."""
        result, at = {}, 0
        for field, code in self.fields:
            result[field] = at
            at += struct.calcsize("=" + code)
        return result


IN_HEADER = Layout(
    "fuse_in_header", "len:I opcode:I unique:Q nodeid:Q uid:I gid:I pid:I total_extlen:H padding:H"
)
OUT_HEADER = Layout("fuse_out_header", "len:I error:i unique:Q")
INIT_IN = Layout("fuse_init_in", "major:I minor:I max_readahead:I flags:I flags2:I unused:44s")
# The struct up to `flags`, which is all that a kernel before interface 7.36 sends.
INIT_IN_SHORT = struct.Struct("=IIII")
INIT_OUT = Layout(
    "fuse_init_out",
    "major:I minor:I max_readahead:I flags:I max_background:H congestion_threshold:H max_write:I "
    "time_gran:I max_pages:H map_alignment:H flags2:I max_stack_depth:I request_timeout:H "
    "unused:22s",
)
ATTR = Layout(
    "fuse_attr",
    "ino:Q size:Q blocks:Q atime:q mtime:q ctime:q atimensec:I mtimensec:I ctimensec:I mode:I "
    "nlink:I uid:I gid:I rdev:I blksize:I flags:I",
)
# fuse_entry_out and fuse_attr_out without the fuse_attr at their end.
ENTRY_OUT_HEAD = Layout(
    "fuse_entry_out",
    "nodeid:Q generation:Q entry_valid:Q attr_valid:Q entry_valid_nsec:I attr_valid_nsec:I",
)
ATTR_OUT_HEAD = Layout("fuse_attr_out", "attr_valid:Q attr_valid_nsec:I dummy:I")
OPEN_IN = Layout("fuse_open_in", "flags:I open_flags:I")
OPEN_OUT = Layout("fuse_open_out", "fh:Q open_flags:I backing_id:i")
RELEASE_IN = Layout("fuse_release_in", "fh:Q flags:I release_flags:I lock_owner:Q")
READ_IN = Layout("fuse_read_in", "fh:Q offset:Q size:I read_flags:I lock_owner:Q flags:I padding:I")
WRITE_IN = Layout(
    "fuse_write_in", "fh:Q offset:Q size:I write_flags:I lock_owner:Q flags:I padding:I"
)
# The WRITE flag FUSE_WRITE_LOCKOWNER: `lock_owner` is valid.
WRITE_LOCKOWNER = 2
WRITE_OUT = Layout("fuse_write_out", "size:I padding:I")
FSYNC_IN = Layout("fuse_fsync_in", "fh:Q fsync_flags:I padding:I")
FLUSH_IN = Layout("fuse_flush_in", "fh:Q unused:I padding:I lock_owner:Q")
FALLOCATE_IN = Layout("fuse_fallocate_in", "fh:Q offset:Q length:Q mode:I padding:I")
CREATE_IN = Layout("fuse_create_in", "flags:I mode:I umask:I open_flags:I")
MKNOD_IN = Layout("fuse_mknod_in", "mode:I rdev:I umask:I padding:I")
MKDIR_IN = Layout("fuse_mkdir_in", "mode:I umask:I")
LINK_IN = Layout("fuse_link_in", "oldnodeid:Q")
RENAME_IN = Layout("fuse_rename_in", "newdir:Q")
RENAME2_IN = Layout("fuse_rename2_in", "newdir:Q flags:I padding:I")
SETATTR_IN = Layout(
    "fuse_setattr_in",
    "valid:I padding:I fh:Q size:Q lock_owner:Q atime:q mtime:q ctime:q atimensec:I mtimensec:I "
    "ctimensec:I mode:I unused4:I uid:I gid:I unused5:I",
)
DIRENT = Layout("fuse_dirent", "ino:Q off:Q namelen:I type:I")
STATFS = Layout(
    "fuse_kstatfs",
    "blocks:Q bfree:Q bavail:Q files:Q ffree:Q bsize:I namelen:I frsize:I padding:I spare:24s",
)
# The fields `size` and `flags`. FUSE_SETXATTR_EXT adds others, for access control lists only.
SETXATTR_IN_SHORT = struct.Struct("=II")
GETXATTR_IN = Layout("fuse_getxattr_in", "size:I padding:I")
GETXATTR_OUT = Layout("fuse_getxattr_out", "size:I padding:I")
FORGET_IN = Layout("fuse_forget_in", "nlookup:Q")
FORGET_ONE = Layout("fuse_forget_one", "nodeid:Q nlookup:Q")
BATCH_FORGET_IN = Layout("fuse_batch_forget_in", "count:I dummy:I")
INTERRUPT_IN = Layout("fuse_interrupt_in", "unique:Q")
NOTIFY_INVAL_INODE = Layout("fuse_notify_inval_inode_out", "ino:Q off:q len:q")
# Followed by `count` node ids.
NOTIFY_PRUNE = Layout("fuse_notify_prune_out", "count:I padding:I spare:Q")

LAYOUTS = [value for value in list(globals().values()) if isinstance(value, Layout)]


class Opcode(enum.IntEnum):
    """The requests of the protocol: `enum fuse_opcode` of Linux's include/uapi/linux/fuse.h."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    IOCTL = 39
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    TMPFILE = 51


class Init(enum.IntFlag):
    """The flags that INIT negotiates: `flags` in the low 32 bits, `flags2` in the high 32 bits."""

    ASYNC_READ = 1 << 0
    ATOMIC_O_TRUNC = 1 << 3
    BIG_WRITES = 1 << 5
    DO_READDIRPLUS = 1 << 13
    ASYNC_DIO = 1 << 15
    PARALLEL_DIROPS = 1 << 18
    MAX_PAGES = 1 << 22
    CACHE_SYMLINKS = 1 << 23
    HANDLE_KILLPRIV_V2 = 1 << 28
    INIT_EXT = 1 << 30
    PASSTHROUGH = 1 << 37
    HAS_RESEND = 1 << 39
    ALLOW_IDMAP = 1 << 40


class Setattr(enum.IntFlag):
    """The bits of SETATTR's `valid` (FATTR_*): the fields to be changed."""

    MODE = 1 << 0
    UID = 1 << 1
    GID = 1 << 2
    SIZE = 1 << 3
    MTIME = 1 << 5
    FH = 1 << 6
    MTIME_NOW = 1 << 8


class Fopen(enum.IntFlag):
    """The flags of OPEN's reply (FOPEN_*), which tell the kernel how to treat an open file."""

    DIRECT_IO = 1 << 0
    KEEP_CACHE = 1 << 1
    CACHE_DIR = 1 << 3
    NOFLUSH = 1 << 5
    PASSTHROUGH = 1 << 7


MAJOR = 7
MINOR = 45
# The first interface with FUSE_READDIRPLUS, parallel directory operations and
# 64-byte INIT replies that this code relies on (Linux 4.20, with max_pages).
OLDEST_MINOR = 28

# The only notifications in use.
NOTIFY_INVAL_INODE_CODE = 2
NOTIFY_RESEND_CODE = 7
NOTIFY_INC_EPOCH_CODE = 8
NOTIFY_PRUNE_CODE = 9

ROOT_ID = 1
UNIQUE_RESEND = 1 << 63
