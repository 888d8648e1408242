from collections.abc import Callable

class ReplyThread:
    """A thread that answers READs over `fd` with bytes of files in the page cache, up to `size`.

    `give_back` is called in the thread with the unique number, handle, offset and size of a READ
    that it could not answer. The thread starts with the first `send`.
    """

    def __new__(
        cls, fd: int, size: int, give_back: Callable[[int, int, int, int], object]
    ) -> ReplyThread: ...
    def send(self, unique: int, fh: int, fd: int, offset: int, size: int, flags: int) -> bool:
        """Queue a READ to answer with bytes of the file `fd`; False if the thread can't take it."""

    def close(self) -> None:
        """Answer the queued READs, and end the thread. Blocks shortly."""
