"""What a daemon needs of a session, whichever of the two it is."""

from __future__ import annotations

from typing import Protocol

from fusefs.fuse.session import Waiting


class RunningSession(Protocol):
    """A session that answers requests until its mount ends.

    `survival` says whether and why the mount outlives this process.
    """

    name: str

    @property
    def requests(self) -> int: ...
    @property
    def waiting(self) -> list[Waiting]: ...
    @property
    def survival(self) -> tuple[bool, str]: ...
    async def run(self) -> bool: ...
