"""Extended attributes: properties of the object, and attributes set by programs.

The attributes `user.s3.*` are properties of the object, for programs that request them by name.
They are read-only and hence not listed: a program that copies a file with its attributes sets all
listed ones. All other `user.*` attributes are kept in the object's metadata, which is small (see
object_metadata.py), and are known only on a writable mount. Attributes outside `user.*` have a
meaning for the kernel, and a bucket's content must not give anybody rights on this machine. So no
file has such an attribute, and the answer needs no HEAD: `ls -l` asks for two of them per file.
"""

from __future__ import annotations

import errno

from fusefs.posix.metadata.head_cache import HeadCache
from fusefs.posix.nodes.inode_table import Inode, InodeTable
from fusefs.posix.types import Answer, answered
from fusefs.store.contract import Store
from fusefs.store.interface import ObjectInfo

VERSION = "user.s3.version_id"
OURS = "user.s3."
USER = "user."
# The flags of setxattr(2).
CREATE, REPLACE = 1, 2

Pairs = tuple[tuple[str, bytes], ...]


class Xattrs:
    """The extended attributes of all inodes of one mount. Belongs to the event loop."""

    def __init__(
        self, store: Store, inodes: InodeTable, head_cache: HeadCache, endpoint: str
    ) -> None:
        self._endpoint = endpoint
        self._store = store
        self._inodes = inodes
        self._head_cache = head_cache

    def get(self, inode: Inode, name: str) -> Answer[bytes]:
        """Return the value of an attribute; ENODATA if the file has none of this name."""
        if name.startswith(OURS):
            return self._of_object(inode, name)
        if _is_settable(name) and self._head_cache.lacks(inode):
            return self._get_learned(inode, name)
        value = dict(self._head_cache.meta(inode).xattrs).get(name)
        if value is None or not _is_settable(name):
            raise OSError(errno.ENODATA, name)
        return value

    async def _get_learned(self, inode: Inode, name: str) -> bytes:
        await self._head_cache.learn(inode)
        return await answered(self.get(inode, name))

    def names(self, inode: Inode) -> Answer[tuple[str, ...]]:
        """Return the names of attributes that programs have set; needs no HEAD after a stat."""
        if self._head_cache.needs_head(inode):
            return self._names_shown(inode)
        known = self._head_cache.meta(inode).xattrs
        return tuple(name for name, _ in known if _is_settable(name))

    async def _names_shown(self, inode: Inode) -> tuple[str, ...]:
        await self._head_cache.show(inode)
        known = self._head_cache.meta(inode).xattrs
        return tuple(name for name, _ in known if _is_settable(name))

    # Properties of the object

    def _of_object(self, inode: Inode, name: str) -> Answer[bytes]:
        info = inode.info
        if name == "user.s3.key":
            return self._inodes.key(inode).encode()
        if name == "user.s3.endpoint" and self._endpoint:
            return self._endpoint.encode()
        # A file that is not in the bucket yet has no other property.
        if info is None or not info.etag:
            raise OSError(errno.ENODATA, name)
        if name == "user.s3.etag":
            return info.etag.encode()
        if name == "user.s3.storage_class":
            return info.storage_class.encode()
        if name not in ("user.s3.content_type", VERSION):
            raise OSError(errno.ENODATA, name)
        if info.content_type is None:
            return self._get_later(inode, name)
        return _headed(info, name)

    async def _get_later(self, inode: Inode, name: str) -> bytes:
        """Get a property by a HEAD, and keep the answer; ESTALE if the object was replaced."""
        info = await self._store.head(inode.object.key)
        if info.version != inode.object.version:
            raise OSError(errno.ESTALE, "the object has been replaced")
        inode.info = info
        return _headed(info, name)


def changed(
    old: Pairs, name: str, value: bytes | None, flags: int = 0, *, is_repeated: bool = False
) -> Pairs:
    """Return the attributes `old` with one of them set or, if `value` is None, removed.

    If the kernel repeats the request (`is_repeated`), a change made already is no error.

    Raises:
        OSError: EPERM, EOPNOTSUPP or EINVAL for a name that cannot be set; EEXIST or
            ENODATA if `flags` require it; ENODATA for the removal of a missing attribute.
    """
    if name.startswith(OURS):
        raise OSError(errno.EPERM, "the bucket tells this attribute")
    if not name.startswith(USER):
        raise OSError(errno.EOPNOTSUPP, "only user attributes are kept")
    if not _is_settable(name):
        raise OSError(errno.EINVAL, "no name for an attribute")
    is_there = any(known == name for known, _ in old)
    if not is_repeated:
        if is_there and flags & CREATE:
            raise OSError(errno.EEXIST, name)
        if not is_there and (value is None or flags & REPLACE):
            raise OSError(errno.ENODATA, name)
    if value is None:
        return tuple(pair for pair in old if pair[0] != name)
    return tuple({**dict(old), name: value}.items())


def _is_settable(name: str) -> bool:
    return name.startswith(USER) and name > USER and not name.startswith(OURS) and "\0" not in name


def _headed(info: ObjectInfo, name: str) -> bytes:
    value = info.version_id if name == VERSION else info.content_type
    if value is None:
        raise OSError(errno.ENODATA, name)
    return value.encode()
