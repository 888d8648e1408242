"""Extended attributes: what an object has beside its bytes, as `user.s3.*`."""

from __future__ import annotations

import errno

from fusefs.posix.answers import Answer, waiting
from fusefs.posix.inodes import Inode, InodeTable
from fusefs.store.base import ObjectInfo, Store

NAMES = ("user.s3.key", "user.s3.etag", "user.s3.storage_class", "user.s3.content_type")
VERSION = "user.s3.version_id"


class Xattrs:
    """The attributes of all inodes of one mount. Belongs to the event loop."""

    def __init__(self, store: Store, inodes: InodeTable) -> None:
        self._store = store
        self._inodes = inodes

    def get(self, inode: Inode, name: str) -> Answer[bytes]:
        """The value of one attribute.

        Raises:
            OSError: ENODATA, there is none of this name.
        """
        info = inode.info
        if name == "user.s3.key":
            return self._inodes.key(inode).encode()
        if info is not None and name == "user.s3.etag":
            return info.etag.encode()
        if info is not None and name == "user.s3.storage_class":
            return info.storage_class.encode()
        if info is not None and name in ("user.s3.content_type", VERSION):
            if info.content_type is None:
                return waiting(self._get_later(inode, name))
            return _headed(info, name)
        raise OSError(errno.ENODATA, name)

    def names(self, inode: Inode) -> tuple[str, ...]:
        """The names that every object has; asks nothing, since `ls -l` asks for every file."""
        if inode.info is None:
            return NAMES[:1]
        return NAMES if inode.info.version_id is None else (*NAMES, VERSION)

    async def _get_later(self, inode: Inode, name: str) -> bytes:
        """Ask for what no listing tells; remembered if it is about the same version."""
        assert inode.info is not None
        info = await self._store.head(inode.info.key)
        if info.version != inode.info.version:
            raise OSError(errno.ESTALE, "the object has been replaced")
        inode.info = info
        return _headed(info, name)


def _headed(info: ObjectInfo, name: str) -> bytes:
    value = info.version_id if name == VERSION else info.content_type
    if value is None:
        raise OSError(errno.ENODATA, name)
    return value.encode()
