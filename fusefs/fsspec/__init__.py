"""`fusefs://bucket/key` for programs that open their data through fsspec.

`FusefsFileSystem` finds the mount of a bucket on this machine and works on its files.
"""

from __future__ import annotations

from fusefs.fsspec.filesystem import FusefsFileSystem
from fusefs.fsspec.mounts import NotMountedError

__all__ = ["FusefsFileSystem", "NotMountedError"]
