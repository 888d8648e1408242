"""fsspec's view of mounted buckets: paths are `bucket/key`, files are files of the mount.

`open` returns Python's own file objects, so that `fileno`, `mmap` and `os.fsync` work, and
what is cached is read at the disk's speed. Only "there is no such file" counts as missing:
any other error reaches the program, which would otherwise take a mount in trouble for an
empty one and begin anew.

What fsspec's own base class does well above these methods (`find`, `glob`, `get`, `put`,
`pipe`) it does here as well.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import math
import os
import secrets
import shutil
import stat
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import PurePosixPath
from typing import Any, TypeVar, cast

from fsspec.callbacks import DEFAULT_CALLBACK, Callback
from fsspec.core import has_magic
from fsspec.spec import AbstractFileSystem
from fsspec.utils import tokenize

from fusefs.fsspec.mounts import PLACES, NotMountedError
from fusefs.linux import libc, mountinfo

# Reads of one call that run at the same time: one thread waits for each.
READS = 32
FALLBACK = "FUSEFS_FALLBACK"
_ETAG = "user.s3.etag"
# Of an entry that was removed meanwhile, and of a link that leads nowhere.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

T = TypeVar("T")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _or_elsewhere(method: _Method) -> _Method:
    """Have the fallback do what is about a path that no mount has."""

    @functools.wraps(method)
    def call(self: FusefsFileSystem, path: Any, *args: Any, **kwargs: Any) -> Any:
        other = self._elsewhere(path)
        if other is None:
            return method(self, path, *args, **kwargs)
        # Of the instance: those of asynchronous file systems have their methods there. They do
        # not know this one's URLs.
        return getattr(other, method.__name__)(self._strip_protocol(path), *args, **kwargs)

    return cast(_Method, call)


class FusefsFileSystem(AbstractFileSystem):
    """Mounted buckets as an fsspec file system; `fusefs://bucket/key`.

    With `fallback="s3fs"` (or the variable FUSEFS_FALLBACK) what no mount has is read and
    written through s3fs, which gets all other options; any other fsspec protocol will do as well.

    Raises (all methods):
        NotMountedError: no mount of this machine has the path, and there is no fallback.
        OSError: as the mount says.
    """

    protocol: str | tuple[str, ...] = "fusefs"
    root_marker = ""
    local_file = True  # `fsspec.open_local` gives paths
    cachable = True

    def __init__(self, fallback: str | None = None, **storage_options: Any) -> None:
        super().__init__(**storage_options)
        self._fallback_name = fallback or os.environ.get(FALLBACK) or None
        self._fallback_options = storage_options
        self._fallback: AbstractFileSystem | None = None

    @property
    def fsid(self) -> str:
        return "fusefs"

    # --- where a path is ---

    def local_path(self, path: str, *, for_writing: bool = False) -> str:
        """The file that stands for a path: for what wants a path and not a URL.

        Raises:
            FileNotFoundError: no file can have this key.
        """
        path = self._strip_protocol(path)
        place = PLACES.find(path, for_writing=for_writing)
        key = path[len(place.location) :]
        if key and any(part in ("", ".", "..") for part in key.split("/")):
            raise FileNotFoundError(errno.ENOENT, "no file name can express this key", path)
        return place.local(path)

    def _elsewhere(self, path: Any) -> AbstractFileSystem | None:
        """The fallback, if it has the path."""
        if self._fallback_name is None:
            return None
        path = self._strip_protocol(path)
        if not path or any(place.has(path) for place in PLACES.all()):
            return None
        if self._fallback is None:
            self._fallback = _other(self._fallback_name, self._fallback_options)
        return self._fallback

    def _refuse_root(self, path: str) -> None:
        """See that a path is below its mount's root: that one is not removed or renamed."""
        path = self._strip_protocol(path)
        if not path or PLACES.find(path).location == f"{path}/":
            raise OSError(errno.EBUSY, "it is the root of a mount", path)

    def _refuse_same(self, path1: str, source: Any, path2: str) -> None:
        """See that `path2` is another file than `path1`, which is open as `source`."""
        is_same = self._strip_protocol(path1) == self._strip_protocol(path2)
        if not is_same and self._elsewhere(path1) is self._elsewhere(path2) is None:
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(self.local_path(path2, for_writing=True))
                is_same = os.path.samestat(found, os.fstat(source.fileno()))
        if is_same:
            raise shutil.SameFileError(errno.EINVAL, "it is the same file", path2)

    def invalidate_cache(self, path: str | None = None) -> None:
        if self._fallback is not None:
            self._fallback.invalidate_cache(None if path is None else self._strip_protocol(path))
        super().invalidate_cache(path)

    # --- looking ---

    @_or_elsewhere
    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        _refuse_version(kwargs)
        path = self._strip_protocol(path)
        if not path:
            return {"name": "", "size": 0, "type": "directory"}
        local = self.local_path(path)
        facts = _facts(path, _stat(local))
        if facts["type"] == "file":
            facts["ETag"] = _etag(local)  # a request of its own
        return facts

    @_or_elsewhere
    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if not path:
            buckets = sorted({place.location.partition("/")[0] for place in PLACES.all()})
            found = [{"name": name, "size": 0, "type": "directory"} for name in buckets]
        else:
            found = self._entries(path)
        return found if detail else [one["name"] for one in found]

    def _entries(self, path: str) -> list[dict[str, Any]]:
        local = self.local_path(path)
        places = PLACES.all()
        found = []
        try:
            entries = os.scandir(local)
        except NotADirectoryError:
            return [self.info(path)]
        with entries:
            for entry in entries:
                name = f"{path}/{entry.name}"
                if not any(place.has(name) for place in places):
                    continue  # something else is mounted there
                try:
                    found.append(_facts(name, _stat_entry(entry)))
                except OSError as error:
                    if error.errno not in _GONE:
                        raise
        return sorted(found, key=lambda one: str(one["name"]))

    def exists(self, path: str, **_: Any) -> bool:
        return self._type(path) is not None

    def isfile(self, path: str) -> bool:
        return self._type(path) == "file"

    def isdir(self, path: str) -> bool:
        return self._type(path) == "directory"

    def _type(self, path: str) -> str | None:
        path = self._strip_protocol(path)
        try:
            if not path or self._elsewhere(path) is not None:
                return str(self.info(path)["type"])
            return str(_facts(path, _stat(self.local_path(path)))["type"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def walk(
        self,
        path: str,
        maxdepth: int | None = None,
        topdown: bool = True,
        on_error: Any = "omit",
        **kwargs: Any,
    ) -> Any:
        if on_error == "omit":
            on_error = _raise_unless_missing
        return super().walk(path, maxdepth, topdown, on_error, **kwargs)

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, **kwargs: Any
    ) -> Any:
        # The fallback's own finds keys that no walk comes to (`a//b`), and its `rm` removes them.
        other, plain = self._elsewhere(path), self._strip_protocol(path)
        if other is None or any(place.location.startswith(f"{plain}/") for place in PLACES.all()):
            return super().find(path, maxdepth=maxdepth, withdirs=withdirs, **kwargs)
        return other.find(plain, maxdepth=maxdepth, withdirs=withdirs, **kwargs)

    def expand_path(
        self, path: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any
    ) -> list[str]:
        # A name with a wildcard in it means that file where it exists, and not those that match:
        # what `find` and `ls` have given is removed, and nothing else.
        given = [path] if isinstance(path, str | os.PathLike) else path
        paths: list[str] = [self._strip_protocol(one) for one in given]
        exact = [one for one in paths if has_magic(one) and self._is_mounted_file(one)]
        found = set(exact)
        if recursive:
            for one in exact:
                found.update(self.find(one, maxdepth=maxdepth, withdirs=True))
        rest = [one for one in paths if one not in found]
        if rest or not found:
            found.update(super().expand_path(rest, recursive, maxdepth, **kwargs))
        return sorted(found)

    def _is_mounted_file(self, path: str) -> bool:
        """Whether a mount has something of this very name."""
        return any(place.has(path) for place in PLACES.all()) and self.exists(path)

    @_or_elsewhere
    def created(self, path: str) -> datetime:
        return self.modified(path)  # an object has no other time

    @_or_elsewhere
    def modified(self, path: str) -> datetime:
        modified: datetime = self.info(path)["LastModified"]
        return modified

    def ukey(self, path: str) -> str:
        info = self.info(path)
        known = (info.get("ETag"), info["size"]) if info.get("ETag") else sorted(info.items())
        return str(tokenize(info["name"], known))

    def checksum(self, path: str) -> int:
        return int(self.ukey(path), 16)

    # --- reading ---

    @_or_elsewhere
    def _open(self, path: str, mode: str = "rb", autocommit: bool = True, **kwargs: Any) -> Any:
        _refuse_version(kwargs)
        if mode == "rb":
            return MountedFile.of(self.local_path(path))
        local = self.local_path(path, for_writing=True)
        if autocommit and "r" in mode:  # "r+b", which makes no file
            return open(local, mode)
        if autocommit:
            return _with_parents(local, lambda: open(local, mode))
        if mode not in ("wb", "xb"):
            raise ValueError(f"a transaction has no mode {mode!r}: write whole files in it")
        return _with_parents(local, lambda: UncommittedFile(local, is_exclusive=mode == "xb"))

    @_or_elsewhere
    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        _refuse_version(kwargs)
        [found] = _read(self.local_path(path), [(start, end)])
        if isinstance(found, Exception):
            raise found
        return found

    def cat(
        self, path: Any, recursive: bool = False, on_error: str = "raise", **kwargs: Any
    ) -> Any:
        paths = self.expand_path(path, recursive=recursive)
        paths = [one for one in paths if not (recursive and self.isdir(one))]
        is_one = isinstance(path, str) and paths == [self._strip_protocol(path)]
        if is_one:
            return self.cat_file(paths[0], **kwargs)

        def read(one: str) -> bytes | Exception:
            return _caught(lambda: bytes(self.cat_file(one, **kwargs)))

        results = dict(zip(paths, _in_threads(read, paths), strict=True))
        if on_error == "omit":
            return {key: one for key, one in results.items() if not isinstance(one, Exception)}
        _raise_first(results.values(), on_error)
        return results

    def cat_ranges(
        self,
        paths: Sequence[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        if not isinstance(paths, list):
            raise TypeError("paths is to be a list")
        starts = starts if isinstance(starts, list | tuple) else [starts] * len(paths)
        ends = ends if isinstance(ends, list | tuple) else [ends] * len(paths)
        if len(starts) != len(paths) or len(ends) != len(paths):
            raise ValueError("there are not as many starts and ends as paths")

        results: list[Any] = [None] * len(paths)

        def read(numbers: Sequence[int]) -> None:
            """Ranges of one file, which is opened once."""
            path = paths[numbers[0]]
            ranges = [(starts[number], ends[number]) for number in numbers]
            found = _caught(lambda: self._ranges_of(path, ranges, **kwargs))
            for place, number in enumerate(numbers):
                results[number] = found if isinstance(found, Exception) else found[place]

        _in_threads(read, _shares(paths))
        _raise_first(results, on_error)
        return results

    def _ranges_of(
        self, path: str, ranges: Sequence[tuple[Any, Any]], **kwargs: Any
    ) -> list[bytes | Exception]:
        other = self._elsewhere(path)
        if other is None:
            _refuse_version(kwargs)
            return _read(self.local_path(path), ranges)
        # By their names: the fallback may have other parameters before them, as s3fs does.
        path = self._strip_protocol(path)
        return [
            _caught(partial(other.cat_file, path, start=start, end=end, **kwargs))
            for start, end in ranges
        ]

    # --- changing ---

    @_or_elsewhere
    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        local = self.local_path(path, for_writing=True)
        make = os.makedirs if create_parents else os.mkdir
        make(local)

    @_or_elsewhere
    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(self.local_path(path, for_writing=True), exist_ok=exist_ok)

    @_or_elsewhere
    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        with self.open(path, "xb" if mode == "create" else "wb", **kwargs) as file:
            file.write(value)

    def put_file(
        self,
        lpath: str,
        rpath: str,
        callback: Callback = DEFAULT_CALLBACK,
        mode: str = "overwrite",
        **kwargs: Any,
    ) -> None:
        if mode != "create":
            super().put_file(lpath, rpath, callback=callback, **kwargs)
        elif (other := self._elsewhere(rpath)) is not None:
            target = self._strip_protocol(rpath)
            other.put_file(lpath, target, callback=callback, mode=mode, **kwargs)
        elif os.path.isdir(lpath):
            self.makedirs(rpath)
        else:
            with open(lpath, "rb") as source, self.open(rpath, "xb", **kwargs) as target:
                callback.set_size(os.fstat(source.fileno()).st_size)
                while piece := source.read(1 << 20):
                    target.write(piece)
                    callback.relative_update(len(piece))

    @_or_elsewhere
    def rmdir(self, path: str) -> None:
        self._refuse_root(path)
        os.rmdir(self.local_path(path, for_writing=True))

    @_or_elsewhere
    def rm_file(self, path: str) -> None:
        os.remove(self.local_path(path, for_writing=True))

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        if maxdepth is not None:
            for one in self.expand_path(path, recursive=recursive, maxdepth=maxdepth):
                if not self.isdir(one):  # what is deeper stays, and so do directories
                    self.rm_file(one)
            return
        removed: set[str] = set()
        for one in self.expand_path(path):
            if recursive and any(str(above) in removed for above in PurePosixPath(one).parents):
                continue  # it has gone with a directory above it
            removed.add(one)
            other = self._elsewhere(one)
            if other is not None:
                other.rm(one, recursive=recursive)
            else:
                self._remove(one, is_recursive=recursive)

    def _remove(self, path: str, *, is_recursive: bool) -> None:
        local = self.local_path(path, for_writing=True)
        if not os.path.isdir(local) or os.path.islink(local):
            os.remove(local)
            return
        if not is_recursive:
            raise IsADirectoryError(
                errno.EISDIR, "a directory is removed with recursive=True", path
            )
        self._refuse_root(path)
        _refuse_mounts_below(local, path)
        shutil.rmtree(local)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
            return
        with self.open(path1, "rb") as source:
            self._refuse_same(path1, source, path2)  # which "wb" would empty
            with self.open(path2, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)

    def mv(
        self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **_: Any
    ) -> None:
        is_elsewhere = self._elsewhere(path1) is not None or self._elsewhere(path2) is not None
        if is_elsewhere or maxdepth is not None or isinstance(path1, list):
            if path1 != path2:  # fsspec's own would remove what is deeper as well
                self.copy(path1, path2, recursive=recursive, maxdepth=maxdepth, on_error="raise")
                self.rm(path1, recursive=recursive, maxdepth=maxdepth)
            return
        self._refuse_root(path1)
        source = self.local_path(path1, for_writing=True)
        target = self.local_path(path2, for_writing=True)
        os.stat(source)
        _refuse_mounts_below(source, path1)  # between two mounts, moving copies and removes
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _move(source, target)

    @_or_elsewhere
    def touch(self, path: str, truncate: bool = True, **_: Any) -> None:
        local = self.local_path(path, for_writing=True)
        with _with_parents(local, lambda: open(local, "wb" if truncate else "ab")):
            os.utime(local)


class MountedFile(io.BufferedReader):
    """A file that is read."""

    @classmethod
    def of(cls, local: str) -> MountedFile:
        raw = io.FileIO(local)
        return cls(raw, max(os.fstat(raw.fileno()).st_blksize, io.DEFAULT_BUFFER_SIZE))

    @property
    def size(self) -> int:
        """How many bytes it has; fsspec's file objects tell it."""
        return os.fstat(self.fileno()).st_size


class UncommittedFile(io.BufferedWriter):
    """A file of a transaction: it has its name from `commit` on."""

    def __init__(self, local: str, *, is_exclusive: bool) -> None:
        directory, name = os.path.split(local)
        self._local = local
        self._is_exclusive = is_exclusive
        beginning = os.fsencode(name)[:200].decode(errors="ignore")  # names have 255 bytes
        self._temporary = os.path.join(directory, f".{beginning}.{secrets.token_hex(8)}")
        super().__init__(io.FileIO(self._temporary, "x"))

    def commit(self) -> None:
        """Have it under its name; it is closed.

        Raises:
            FileExistsError: it was opened with "xb", and there is such a file.
        """
        self.close()
        if self._is_exclusive:
            libc.rename_new(self._temporary, self._local)
        else:
            os.replace(self._temporary, self._local)

    def discard(self) -> None:
        """Have it nowhere."""
        try:
            self.close()
        finally:
            os.remove(self._temporary)


def _refuse_version(options: dict[str, Any]) -> None:
    if options.get("version_id"):
        raise ValueError("a mount shows the latest version of each object alone")


def _facts(path: str, found: os.stat_result) -> dict[str, Any]:
    """What fsspec shows of a file: sizes are in bytes, `mtime` is in seconds since the epoch."""
    is_directory = stat.S_ISDIR(found.st_mode)
    kind = "directory" if is_directory else "file" if stat.S_ISREG(found.st_mode) else "other"
    return {
        "name": path,
        "size": 0 if is_directory else found.st_size,
        "type": kind,
        "mtime": found.st_mtime,
        "LastModified": datetime.fromtimestamp(found.st_mtime, UTC),
        "mode": found.st_mode,
        "uid": found.st_uid,
        "gid": found.st_gid,
        "ino": found.st_ino,
        "nlink": found.st_nlink,
    }


def _stat(local: str) -> os.stat_result:
    """What a path stands for; a link that leads nowhere is the link itself."""
    try:
        return os.stat(local)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return os.lstat(local)


def _stat_entry(entry: os.DirEntry[str]) -> os.stat_result:
    """What a directory's entry stands for; a link to a directory is the link itself.

    What walks through directories would come to those above again, as often as there are links.
    """
    found = entry.stat()
    is_followed = not (entry.is_symlink() and stat.S_ISDIR(found.st_mode))
    return found if is_followed else entry.stat(follow_symlinks=False)


def _move(source: str, target: str) -> None:
    """As `shutil.move`, which copies and removes whatever cannot be renamed, for any reason."""
    into = target
    if os.path.isdir(target) and not os.path.samefile(source, target):
        into = os.path.join(target, os.path.basename(source))
        if os.path.lexists(into):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), into)
    try:
        os.rename(source, into)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.move(source, target)


def _refuse_mounts_below(local: str, path: str) -> None:
    """See that nothing else is mounted in a directory: its files are not the bucket's."""
    above = os.path.realpath(local) + "/"
    if any(mount.path.startswith(above) for mount in mountinfo.kernel_mounts()):
        raise OSError(errno.EBUSY, "something else is mounted in it", path)


def _etag(local: str) -> str | None:
    """The object's ETag; None of what is not in the bucket yet."""
    try:
        return os.getxattr(local, _ETAG).decode()
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return None
        raise


def _with_parents(local: str, work: Callable[[], T]) -> T:
    """Do what makes a file; with the directories above it, for a bucket has none."""
    try:
        return work()
    except FileNotFoundError:
        os.makedirs(os.path.dirname(local), exist_ok=True)
        return work()


def _shares(paths: Sequence[str]) -> list[list[int]]:
    """The numbers of the ranges that one thread reads after the other, all of one path.

    There are about as many shares as threads; who reads many ranges of a file has each n-th,
    so that neighbours are read at the same time.
    """
    numbers: dict[str, list[int]] = defaultdict(list)
    for number, path in enumerate(paths):
        numbers[path].append(number)
    shares = []
    for those in numbers.values():
        count = math.ceil(READS * len(those) / len(paths))
        shares += [those[first::count] for first in range(min(count, len(those)))]
    return shares


def _read(local: str, ranges: Sequence[tuple[int | None, int | None]]) -> list[bytes | Exception]:
    """Ranges [start, end) of a file, or why one can't be read; negative numbers count from its end.

    Raises:
        OSError: the file can't be opened.
    """
    fd = os.open(local, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        return [_caught(partial(_read_range, fd, size, one)) for one in ranges]
    finally:
        os.close(fd)


def _read_range(fd: int, size: int, limits: tuple[int | None, int | None]) -> bytes:
    start, stop, _ = slice(*limits).indices(size)
    pieces = []
    while start < stop:
        piece = os.pread(fd, stop - start, start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _in_threads(work: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """The results of `work` for each item, in their order."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(READS, len(items))) as pool:
        return list(pool.map(work, items))


def _caught(work: Callable[[], T]) -> T | Exception:
    try:
        return work()
    except Exception as error:  # handed to the caller, who chooses
        return error


def _raise_first(results: Any, on_error: str) -> None:
    if on_error == "raise":
        for result in results:
            if isinstance(result, Exception):
                raise result


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _other(name: str, options: dict[str, Any]) -> AbstractFileSystem:
    """The file system for what no mount has.

    Raises:
        NotMountedError: it cannot be used.
    """
    # Whoever asks for an asynchronous file system wraps this one, which is not.
    options = {key: one for key, one in options.items() if key not in ("asynchronous", "loop")}
    if name != "s3fs":
        import fsspec

        return fsspec.filesystem(name, **options)
    try:
        # Not by its protocol, which may be this very class's (s3_urls.py).
        from s3fs import S3FileSystem
    except ImportError:
        raise NotMountedError("", "the fallback s3fs is not installed: pip install s3fs") from None
    return S3FileSystem(**options)
