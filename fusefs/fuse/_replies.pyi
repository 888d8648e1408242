from collections.abc import Callable

class ReplyThread:
    """Replies over `fd` with what the page cache has of files, at most `size` bytes each.

    `give_back` is called in the thread with the unique number, handle, offset and size of a READ
    that it has not answered. It starts with the first reply.
    """

    def __new__(
        cls, fd: int, size: int, give_back: Callable[[int, int, int, int], object]
    ) -> ReplyThread: ...
    def send(self, unique: int, fh: int, fd: int, offset: int, size: int, flags: int) -> bool:
        """Have a READ answered with bytes of the file `fd`; False if the thread can't take it."""

    def close(self) -> None:
        """Answer what was taken, and end the thread. Blocks shortly."""
