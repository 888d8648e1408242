"""Conditions of changes: as headers, and what happens where one does not hold.

`Fence.over` sends a change with a strict condition. Where the server refuses it (412), a HEAD shows
by the token whether the object there is this very change, whose first answer was lost; else its
ETag is adopted, and the change is sent again over that.

Conditions are sent to each store, and relied on only where it is known to honour them
(store/probing.py). One that a store answers it does not implement is left out from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fusefs.store.capabilities import Capabilities
from fusefs.store.errors import ConflictError, NotFoundError, UnsupportedError
from fusefs.store.fencing import ChangeToken, TokenSource
from fusefs.store.interface import IF_ABSENT, Expect, IfMatch, ObjectInfo, Strict
from fusefs.store.s3.head import head
from fusefs.store.s3.requester import Requester

logger = logging.getLogger("fusefs.store")

# How often a change is repeated over what other clients put under its key meanwhile.
# After that it is sent without a condition, so that it comes to an end.
ADOPTIONS = 5
NOT_TRIED = "not tried yet"

T = TypeVar("T")


def strict(etag: str | None) -> Strict:
    """The condition that the object with this ETag is there (None: no object)."""
    return IF_ABSENT if etag is None else IfMatch(etag)


def condition_headers(condition: Strict) -> dict[str, str]:
    """The headers for a condition, with names in lower case."""
    if isinstance(condition, IfMatch):
        return {"if-match": condition.etag}
    return {"if-none-match": "*"} if condition == IF_ABSENT else {}


class Fence:
    """The conditions of one store's changes, which `requester` sends. Belongs to the event loop."""

    def __init__(self, requester: Requester) -> None:
        self.requester = requester
        self.tokens = TokenSource()
        self.capabilities = Capabilities()
        # Why nothing is known of the store, for people to read.
        self.why_unknown = NOT_TRIED
        # Conditions that the store does not implement, as people read them.
        self._unsupported: set[str] = set()

    @property
    def sends_md5(self) -> bool:
        """True if a body's MD5 goes with it: the store is not known to compare CRC32s."""
        return self.capabilities.checksums is not True

    def sent(self, operation: str, condition: Strict) -> Strict:
        """The condition of an operation such as "PUT"; None if the store does not implement it."""
        return None if _named(operation, condition) in self._unsupported else condition

    def relies_on(self, operation: str, condition: Strict) -> bool:
        """True if a condition is sent and the store is known to honour it."""
        return self.sent(operation, condition) is not None and bool(self.capabilities.conditions)

    async def send(
        self, operation: str, condition: Strict, send: Callable[[Strict], Awaitable[T]]
    ) -> T:
        """Have `send` make a change with a condition; without where the store implements none."""
        condition = self.sent(operation, condition)
        try:
            return await send(condition)
        except UnsupportedError:
            if condition is None:
                raise
        self._leave_out(operation, condition)
        return await send(None)

    def _leave_out(self, operation: str, condition: Strict) -> None:
        name = _named(operation, condition)
        logger.info("this store does not implement %s: it is left out", name)
        self._unsupported.add(name)

    def describe(self) -> dict[str, Any]:
        """The knowledge of the store, and its source, as plain data."""
        return {
            "known": self.capabilities.is_known,
            "missing": [*self.capabilities.missing, *sorted(self._unsupported)],
            "why": self.why_unknown,
        }

    async def over(
        self,
        key: str,
        expected: Expect,
        token: ChangeToken | None,
        operation: str,
        send: Callable[[Strict], Awaitable[ObjectInfo]],
    ) -> ObjectInfo:
        """Have `send` make a change over what is expected, or over what is there instead.

        `token` is the change's own, None if the object will not have it.

        Raises:
            ConflictError: an object with content is where a directory's marker was to be.
            StoreError: of `send`, but for a condition that does not hold.
        """
        etag = expected.etag
        for _ in range(ADOPTIONS):
            condition = strict(etag)
            try:
                return await self.send(operation, condition, send)
            except ConflictError:
                # Two writes at the same time, for the whole retry time.
                if self.sent(operation, condition) is None:
                    raise
            there = await self.find(key)
            if there is not None and token is not None and there.token == token:
                return there
            # The marker of a directory has no content.
            if there is not None and there.size and operation == "PUT" and key.endswith("/"):
                raise ConflictError(f"{key} is an object with content, which stays")
            current = there.etag if there is not None else None
            if current == etag:
                if etag is not None:
                    # The server refuses the ETag that it gives itself, as Ceph's gateway does.
                    self._leave_out(operation, condition)
                break
            logger.info("%s: another object is there by now; this change goes over it", key)
            etag = current
        else:
            logger.info("%s is replaced again and again: it is written without a condition", key)
        return await send(None)

    async def strictly(
        self, key: str, condition: Strict, send: Callable[[Strict], Awaitable[ObjectInfo]]
    ) -> ObjectInfo:
        """Have `send` make a change under a condition that nothing replaces.

        Ceph's gateway refuses a PUT over the very ETag that it gives, unless that has no quotes.

        Raises:
            ConflictError: it does not hold.
            StoreError: of `send`.
        """
        try:
            return await send(condition)
        except ConflictError:
            there = await self.find(key) if isinstance(condition, IfMatch) else None
            if there is None or condition != IfMatch(there.etag):
                raise
        return await send(IfMatch(there.etag.strip('"')))

    async def find(self, key: str) -> ObjectInfo | None:
        """The object under a key by a HEAD; None if there is none."""
        try:
            return (await head(self.requester, key))[0]
        except NotFoundError:
            return None


def _named(operation: str, condition: Strict) -> str:
    header = "If-None-Match" if condition == IF_ABSENT else "If-Match"
    return f"{header} of {operation}"
