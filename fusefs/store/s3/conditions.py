"""Conditions of changes: their headers, and the handling of conditions that do not hold.

`Fence.over` sends a change with a strict condition. If the server refuses it (412), a HEAD shows
the object that is there. If the object has this change's token, the first answer was lost; else the
change is sent again, on the condition that the key has that object's ETag.

Conditions are sent to every store, but relied on only if the store is known to honour them
(store/probing.py). A condition that the store does not implement is omitted from then on.
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

# Number of times that a change is repeated over another client's object. After that it is sent
# without a condition, so that it comes to an end.
ADOPTIONS = 5
NOT_TRIED = "not tried yet"

T = TypeVar("T")


def condition_headers(condition: Strict) -> dict[str, str]:
    """Return the headers of a condition, with names in lower case."""
    if condition is None:
        return {}
    return {"if-none-match": "*"} if condition.etag is None else {"if-match": condition.etag}


class Fence:
    """Sends one store's changes with their conditions. Belongs to the event loop."""

    def __init__(self, requester: Requester) -> None:
        self.requester = requester
        self.tokens = TokenSource()
        self.capabilities = Capabilities()
        # The reason why the store's capabilities are unknown, for people.
        self.why_unknown = NOT_TRIED
        # Conditions that the store does not implement, as people read them.
        self._unsupported: set[str] = set()

    @property
    def sends_md5(self) -> bool:
        """True if bodies are sent with an MD5: the store is not known to compare CRC32s."""
        return self.capabilities.checksums is not True

    def sent(self, operation: str, condition: Strict) -> Strict:
        """Return the condition to send: None if the store does not implement it for `operation`."""
        return None if _named(operation, condition) in self._unsupported else condition

    def relies_on(self, operation: str, condition: Strict) -> bool:
        """True if `condition` is sent with `operation` and the store is known to honour it."""
        return self.sent(operation, condition) is not None and bool(self.capabilities.conditions)

    async def send(
        self, operation: str, condition: Strict, send: Callable[[Strict], Awaitable[T]]
    ) -> T:
        """Call `send` with `condition`; on a store that does not implement it, `send` gets None."""
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
        """Describe as plain data what the store supports, and why a capability is unknown."""
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
        """Make a change of `key` by `send`, over the expected object or any other that is there.

        `send` makes one attempt on a condition. `token` is the change's own, or None if the new
        object will not have a token of this change.

        Raises:
            ConflictError: the change is a directory's marker, but the key has content.
            StoreError: from `send`, except for a condition that does not hold.
        """
        etag = expected.etag
        for _ in range(ADOPTIONS):
            condition = IfMatch(etag)
            try:
                return await self.send(operation, condition, send)
            except ConflictError:
                # Without a condition, two writes have collided for the whole retry time.
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
                    # The server refuses the object's own ETag, as Ceph's gateway does.
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
        """Make a change of `key` by `send` on this condition alone (None: unconditionally).

        Ceph's gateway may refuse the ETag that a HEAD shows: then it is sent again without quotes.

        Raises:
            ConflictError: the condition does not hold.
            StoreError: from `send`.
        """
        try:
            return await send(condition)
        except ConflictError:
            there = await self.find(key) if condition not in (None, IF_ABSENT) else None
            if there is None or condition != IfMatch(there.etag):
                raise
        return await send(IfMatch(there.etag.strip('"')))

    async def find(self, key: str) -> ObjectInfo | None:
        """Return the object at a key, by a HEAD; None if there is none."""
        try:
            return (await head(self.requester, key))[0]
        except NotFoundError:
            return None


def _named(operation: str, condition: Strict) -> str:
    header = "If-None-Match" if condition == IF_ABSENT else "If-Match"
    return f"{header} of {operation}"
