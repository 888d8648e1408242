"""`s3://` URLs of programs that cannot be edited, read through mounts."""

from __future__ import annotations

from typing import Any

from fsspec.registry import _registry, register_implementation

from fusefs.fsspec.filesystem import FusefsFileSystem

PROTOCOLS = ("s3", "s3a")


class MountedS3FileSystem(FusefsFileSystem):
    """As its base; options of s3fs (keys, endpoints) are for the fallback alone."""

    protocol = PROTOCOLS


_replaced: dict[str, Any] = {}


def install() -> None:
    """Have fsspec open `s3://` and `s3a://` through the mounts of this machine.

    Buckets that are not mounted are an error, or the fallback's (`FusefsFileSystem`). File
    systems that fsspec made before are not changed.
    """
    for name in PROTOCOLS:
        if _registry.get(name) is not MountedS3FileSystem:
            _replaced[name] = _registry.get(name)
        register_implementation(name, MountedS3FileSystem, clobber=True)


def uninstall() -> None:
    """Undo `install`."""
    for name, before in _replaced.items():
        if before is None:
            _registry.pop(name, None)  # fsspec finds its own again by name
        else:
            register_implementation(name, before, clobber=True)
    _replaced.clear()
