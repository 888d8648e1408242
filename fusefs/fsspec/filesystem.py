"""fsspec's view of buckets: paths are `bucket/key`, files are files of this machine's mounts.

Files in a mount are read and written by fsspec's `LocalFileSystem`, so that `fileno`, `mmap` and
`os.fsync` work and cached files are read at the disk's speed; s3fs handles keys that no mount has.
This class chooses between the two, and translates names.

Only a missing file (ENOENT, ENOTDIR) counts as missing: any other error reaches the program, which
would otherwise think that a failing mount is empty, and begin anew.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any, TypeVar

from fsspec.core import has_magic
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from fusefs.fsspec.mounts import PLACES, NotMountedError
from fusefs.linux import mountinfo

# Simultaneous reads of one call, each in its own thread.
READS = 32
# A bucket has no directories that would have to be made first.
_LOCAL = LocalFileSystem(auto_mkdir=True)

T = TypeVar("T")


def _handed_on(name: str, *, for_writing: bool = False) -> Any:
    """Make a method that calls the method `name` of the path's file system, mount or s3fs."""

    def method(self: FusefsFileSystem, path: str, *args: Any, **kwargs: Any) -> Any:
        fs, at = self._at(path, for_writing=for_writing)
        return getattr(fs, name)(at, *args, **kwargs)

    return method


class FusefsFileSystem(AbstractFileSystem):
    """Buckets as an fsspec file system; `fusefs://bucket/key`.

    The options are those of s3fs, which handles keys that no mount of this machine has.

    Raises (all methods):
        NotMountedError: no mount of this machine has the path, and s3fs is not installed.
        OSError: the error of the mount or of S3.
    """

    protocol = "fusefs"
    root_marker = ""
    local_file = True  # `fsspec.open_local` gives paths

    def local_path(self, path: str, *, for_writing: bool = False) -> str:
        """Return a path's local file; FileNotFoundError if no file name can express its key."""
        path = self._strip_protocol(path)
        place = PLACES.find(path, for_writing=for_writing, endpoint=self._endpoint)
        key = path[len(place.location) :]
        if key and any(part in ("", ".", "..") for part in key.split("/")):
            raise FileNotFoundError(errno.ENOENT, "no file name can express this key", path)
        return place.local(path)

    @property
    def _endpoint(self) -> str | None:
        """The endpoint that s3fs would use; None if none is configured."""
        options = {**self.storage_options.get("client_kwargs", {}), **self.storage_options}
        named = options.get("endpoint_url") or os.environ.get("AWS_ENDPOINT_URL_S3")
        return named or os.environ.get("AWS_ENDPOINT_URL")

    def _at(self, path: str, *, for_writing: bool = False) -> tuple[AbstractFileSystem, str]:
        """Return a path's file system and name there; OSError if `for_writing` and read-only."""
        path = self._strip_protocol(path)
        try:
            return _LOCAL, self.local_path(path, for_writing=for_writing)
        except NotMountedError:
            try:
                from s3fs import S3FileSystem
            except ImportError:
                raise NotMountedError(path) from None
            # The listings cache is off because a mount, too, shows others' changes. An asynchronous
            # caller wraps this file system, which is synchronous.
            options = {"use_listings_cache": False, **self.storage_options}
            return S3FileSystem(**{**options, "asynchronous": False, "loop": None}), path

    def _below_root(self, path: str) -> tuple[AbstractFileSystem, str]:
        """Return the file system and name as `_at` does, for a path to remove or rename.

        Raises:
            OSError: the path is a mount's root, or something else is mounted in it.
        """
        fs, at = self._at(path, for_writing=True)
        if fs is _LOCAL:
            path = self._strip_protocol(path)
            if PLACES.find(path, endpoint=self._endpoint).location == f"{path}/":
                raise OSError(errno.EBUSY, "it is the root of a mount", path)
            above = os.path.realpath(at) + "/"
            if any(mount.path.startswith(above) for mount in mountinfo.kernel_mounts()):
                raise OSError(errno.EBUSY, "something else is mounted in it", path)
        return fs, at

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if not path:
            return {"name": "", "size": 0, "type": "directory"}
        fs, at = self._at(path)
        facts: dict[str, Any] = fs.info(at)
        return facts | {"name": path}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        entries = sorted(self._entries(self._strip_protocol(path)), key=lambda one: one["name"])
        return entries if detail else [one["name"] for one in entries]

    def _entries(self, path: str) -> list[dict[str, Any]]:
        places = PLACES.all()
        if not path:
            buckets = {place.location.partition("/")[0] for place in places}
            return [{"name": name, "size": 0, "type": "directory"} for name in buckets]
        fs, at = self._at(path)
        entries: list[dict[str, Any]] = fs.ls(at, detail=True)
        if fs is not _LOCAL:
            return entries
        for entry in entries:
            entry["name"] = path + entry["name"].removeprefix(at.rstrip("/"))
        # A directory on which something else is mounted is not part of the bucket.
        return [one for one in entries if any(place.has(one["name"]) for place in places)]

    def exists(self, path: str, **_: Any) -> bool:
        return self._type(path) is not None

    def isfile(self, path: str) -> bool:
        return self._type(path) == "file"

    def isdir(self, path: str) -> bool:
        return self._type(path) == "directory"

    def _type(self, path: str) -> str | None:
        try:
            return str(self.info(path)["type"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def walk(self, path: str, *args: Any, on_error: Any = "omit", **kwargs: Any) -> Any:
        if on_error == "omit":
            on_error = _raise_unless_missing
        return super().walk(path, *args, on_error=on_error, **kwargs)

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, **kwargs: Any
    ) -> Any:
        path = self._strip_protocol(path)
        if path and not any(place.location.startswith(f"{path}/") for place in PLACES.all()):
            fs, at = self._at(path)
            if fs is not _LOCAL:  # s3fs also finds keys that no walk reaches (`a//b`)
                return fs.find(at, maxdepth=maxdepth, withdirs=withdirs, **kwargs)
        return super().find(path, maxdepth=maxdepth, withdirs=withdirs, **kwargs)

    def expand_path(
        self, path: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any
    ) -> list[str]:
        # A path with a wildcard means the file of exactly this name, if there is one, and not the
        # names that match it: so only files that `find` and `ls` returned are removed.
        given = [path] if isinstance(path, str | os.PathLike) else path
        paths: list[str] = [self._strip_protocol(one) for one in given]
        found = {one for one in paths if has_magic(one) and self.exists(one)}
        for one in list(found) if recursive else ():
            found.update(self.find(one, maxdepth=maxdepth, withdirs=True))
        rest = [one for one in paths if one not in found]
        if rest or not found:
            found.update(super().expand_path(rest, recursive, maxdepth, **kwargs))
        return sorted(found)

    modified = _handed_on("modified")
    cat_file = _handed_on("cat_file")
    mkdir = _handed_on("mkdir", for_writing=True)
    makedirs = _handed_on("makedirs", for_writing=True)
    touch = _handed_on("touch", for_writing=True)
    rm_file = _handed_on("rm_file", for_writing=True)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        fs, at = self._at(path, for_writing=mode != "rb")
        return fs._open(at, mode, **kwargs)

    def cat(
        self, path: Any, recursive: bool = False, on_error: str = "raise", **kwargs: Any
    ) -> Any:
        paths = self.expand_path(path, recursive=recursive)
        paths = [one for one in paths if not (recursive and self.isdir(one))]
        if isinstance(path, str) and paths == [self._strip_protocol(path)]:
            return self.cat_file(paths[0], **kwargs)
        found = _in_threads(lambda one: self.cat_file(one, **kwargs), paths, on_error)
        omits = on_error == "omit"
        pairs = zip(paths, found, strict=True)
        return {key: one for key, one in pairs if not (omits and isinstance(one, Exception))}

    def cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        starts = starts if isinstance(starts, list | tuple) else [starts] * len(paths)
        ends = ends if isinstance(ends, list | tuple) else [ends] * len(paths)
        results: list[Any] = [None] * len(paths)

        def read(numbers: Sequence[int]) -> None:
            # An open takes longer than a read; s3fs must fetch the ranges only.
            with self.open(paths[numbers[0]], cache_type="none", **kwargs) as file:
                for number in numbers:
                    start, stop, _ = slice(starts[number], ends[number]).indices(file.size)
                    file.seek(start)
                    results[number] = file.read(max(0, stop - start))

        shares = _shares(paths)
        for share, error in zip(shares, _in_threads(read, shares, on_error), strict=True):
            for number in share:
                results[number] = error if results[number] is None else results[number]
        return results

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        with self.open(path, "xb" if mode == "create" else "wb", **kwargs) as file:
            file.write(value)

    def rmdir(self, path: str) -> None:
        fs, at = self._below_root(path)
        fs.rmdir(at)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        expands = recursive and maxdepth is not None
        removed: set[str] = set()
        for one in self.expand_path(path, recursive=expands, maxdepth=maxdepth):
            if maxdepth is not None and self.isdir(one):
                continue  # deeper files and all directories stay
            if recursive and any(str(above) in removed for above in PurePosixPath(one).parents):
                continue  # already removed with a directory above it
            removed.add(one)
            fs, at = self._below_root(one)
            fs.rm(at, recursive=recursive)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
            return
        (fs, at), (other, target) = self._at(path1), self._at(path2, for_writing=True)
        if fs is not other:
            with fs.open(at, "rb") as source, other.open(target, "wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
        elif fs is _LOCAL:
            _LOCAL.makedirs(_LOCAL._parent(target), exist_ok=True)
            shutil.copyfile(at, target)  # fsspec's method treats any error as a missing file
        else:
            fs.cp_file(at, target, **kwargs)

    def mv(
        self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **_: Any
    ) -> None:
        if maxdepth is None and isinstance(path1, str):
            (fs, at), (other, target) = self._below_root(path1), self._at(path2, for_writing=True)
            if fs is other is _LOCAL and _is_renamed(at, target):
                return
        if path1 != path2:  # fsspec's method would remove deeper files as well
            self.copy(path1, path2, recursive=True, maxdepth=maxdepth, on_error="raise")
            self.rm(path1, recursive=True, maxdepth=maxdepth)


def _is_renamed(source: str, target: str) -> bool:
    """Rename `source` to `target`, or into the directory `target`; False if mounts differ.

    `shutil.move`, as `LocalFileSystem` uses it, copies if a rename fails for any reason.
    """
    os.stat(source)
    if os.path.isdir(target):
        target = os.path.join(target, os.path.basename(source))
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    _LOCAL.makedirs(_LOCAL._parent(target), exist_ok=True)
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno == errno.EXDEV:
            return False
        raise
    return True


def _shares(paths: list[str]) -> list[list[int]]:
    """Group indexes of `paths` by path, for a thread each; at most 1/READS of all in a group."""
    numbers: dict[str, list[int]] = {}
    for number, path in enumerate(paths):
        numbers.setdefault(path, []).append(number)
    most = math.ceil(len(paths) / READS)
    return [
        those[first : first + most]
        for those in numbers.values()
        for first in range(0, len(those), most)
    ]


def _in_threads(read: Callable[[Any], T], items: Sequence[Any], on_error: str) -> list[Any]:
    """Call `read` on items in threads; exceptions are results unless `on_error` is "raise"."""

    def caught(item: Any) -> T | Exception:
        try:
            return read(item)
        except Exception as error:
            if on_error == "raise":
                raise
            return error

    with ThreadPoolExecutor(READS) as pool:
        return list(pool.map(caught, items))


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
