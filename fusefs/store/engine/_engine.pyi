from collections.abc import Mapping
from typing import NamedTuple

from fusefs.store.engine import engine
from fusefs.store.engine.engine import Request

class Completion(NamedTuple):
    """The end of a request.

    `status` is 0 and `headers` are empty if no answer came; names of headers are in lower case.
    `body` is that of a MemorySink, or the document of an answer that is not 2xx. `received` bytes
    of the body are in the sink, also after an error.

    `error` is None if the whole answer is in the sink, or one of: resolve, connect, proxy,
    certificate, tls, timeout, low-speed, reset, short, protocol (network and server);
    too-large, range, etag, size (an answer that the sink must not have); sink-full (ENOSPC,
    EDQUOT), sink-failed, source-failed (`errno` says why, 0: the file is too short); memory;
    cancelled. A status of 300 and more stands, whatever comes after the headers. `detail` is
    libcurl's sentence, `proxy_status` the answer to CONNECT, or 0. `may_have_been_executed` is
    True if a byte of the request was sent and no whole answer came.

    Times are seconds since `send`, 0 for what did not happen.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    received: int
    error: str | None
    errno: int
    proxy_status: int
    detail: str
    may_have_been_executed: bool
    connected_s: float
    first_byte_s: float
    last_byte_s: float

class Transfer:
    @property
    def has_begun(self) -> bool:
        """True once the headers of the answer have come."""

class Engine:
    def __init__(self, small_workers: int, large_workers: int, max_connections: int, /) -> None: ...
    def fileno(self) -> int: ...
    def submit(self, transfer: Transfer, request: Request, /) -> None: ...
    def cancel(self, transfer: Transfer, /) -> None: ...
    def collect(
        self,
    ) -> tuple[
        list[tuple[engine.Transfer, Completion]],
        list[tuple[engine.Transfer, int, list[tuple[int, int, int]]]],
    ]: ...
    def counters(self) -> dict[str, int]: ...
    def is_open(self) -> bool: ...
    def close(self) -> None: ...

def crc32(data: bytes | bytearray | memoryview, crc: int = 0, /) -> int: ...
def crc32_of_file(fd: int, offset: int, length: int, /) -> int: ...
