from typing import TypeAlias

from fusefs.store.engine import engine

# The fields of a `Completion`; headers are "name\\0value\\0...", and the engine's own error is
# followed by the CURLcode.
Outcome: TypeAlias = tuple[
    int, bytes, bytes, int, str | None, int, int, int, str, bool, float, float, float
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
