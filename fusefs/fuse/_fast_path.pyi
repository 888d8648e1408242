from collections import OrderedDict
from collections.abc import Callable
from mmap import mmap

from fusefs.cache.cached_file import CacheFile
from fusefs.posix.nodes.handles import FileHandle, HandleTable
from fusefs.posix.nodes.inode import Inode
from fusefs.posix.operations import Operations
from fusefs.store.interface import ObjectVersion

class FastPath:
    requests: int
    spent: int
    polled: int
    hits: int
    polled_ns: int
    period: int

    def __init__(
        self,
        fd: int,
        request: mmap,
        reply: mmap,
        operations: Operations,
        inodes: dict[int, Inode],
        handles: HandleTable,
        open_files: dict[int, FileHandle],
        restored: dict[int, int],
        name_of: Callable[[ObjectVersion], str],
        files: dict[str, CacheFile],
        backing_ids: OrderedDict[CacheFile, int],
        checked_at_open: int,
    ) -> None: ...
    def serve(self, log: object, most: int, poll_ns: int, /) -> int: ...
    def take(
        self,
    ) -> (
        tuple[
            list[tuple[int, int]],
            list[tuple[int, float]],
            list[tuple[Inode | None, CacheFile, int, int, int, int, int]],
            int,
            list[tuple[int, int]],
            int,
        ]
        | None
    ): ...
