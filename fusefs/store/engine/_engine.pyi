from typing import TypeAlias

from fusefs.store.engine import engine

# A transfer's end: status, headers ("name\\0value\\0..."), body, received, the engine's own error,
# CURLcode, errno, proxy_status, detail, may_have_been_executed, and the monotonic times of
# submission, connection, first and last byte.
Outcome: TypeAlias = tuple[
    int, bytes, bytes, int, str | None, int, int, int, bytes, bool, float, float, float, float
]

class Transfer:
    @property
    def status(self) -> int: ...
    def take_file(self) -> int: ...

class Engine:
    def __init__(
        self,
        small_workers: int,
        large_workers: int,
        max_connections: int,
        transfer_type: type[Transfer],
        /,
    ) -> None: ...
    eventfd: int
    def submit(self, transfer: Transfer, request: tuple[object, ...], /) -> None: ...
    def cancel(self, transfer: Transfer, /) -> None: ...
    def collect(
        self,
    ) -> tuple[list[tuple[engine.Transfer, Outcome]], list[tuple[engine.Transfer, int, bytes]]]: ...
    def close(self) -> None: ...
