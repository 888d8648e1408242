"""The bucket that holds the blocks: short requests that are sent once.

What fails there is not sent again: S3 has the same bytes. GETs have time-outs of their own,
shorter than those of S3; what is stored may take longer, for no reader waits for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import trio

from fusefs.cluster_cache.block import StoredBlock
from fusefs.store.errors import (
    AttemptError,
    ConflictError,
    CredentialsError,
    Failure,
    StoreError,
    UnreachableError,
)
from fusefs.store.http.async_exchange import Late
from fusefs.store.http.threads import Attempt
from fusefs.store.interface import Priority, Urgency
from fusefs.store.s3.clients import S3Settings
from fusefs.store.s3.requester import Requester, list_work
from fusefs.store.s3.store import S3Store
from fusefs.telemetry.s3_requests import CLUSTER_REQUESTS

if TYPE_CHECKING:
    from fusefs.store.s3.clients import Clients

GET, PUT = "CLUSTER GET", "CLUSTER PUT"
# For a connection, and for the next bytes of an answer; S3 is requested before (policy.py).
GET_TIMEOUT_S = 1.0
PUT_CONNECT_TIMEOUT_S = 2.0
PUT_TIMEOUT_S = 5.0
# For all of a block.
PUT_LIMIT_S = 20.0
# Before it is stored again where another node does that, which may fail.
COLLIDED_S = 0.5
# At a time, of all that stores.
PUTS = 8
# What the event loop has the time to receive, to check and to write to the local disk.
SMALL = 257 << 10
# What the event loop has the time to sign and to send: a thread costs it twice as much as that.
SMALL_PUT = 128 << 10
_TOO_SLOW = Failure(UnreachableError, "it takes too long")
_NOT_UNDERSTOOD = Failure(StoreError, "it answers in a way that is not understood")


def _prefetch() -> Priority:
    return Priority.PREFETCH


def _range(start: int, stop: int) -> dict[str, str]:
    return {"range": f"bytes={start}-{stop - 1}"}


@contextmanager
def _renewing(requester: Requester) -> Iterator[None]:
    """Have the next request look for other credentials where these are refused."""
    try:
        yield
    except AttemptError as error:
        if error.failure.has_expired or error.failure.kind is CredentialsError:
            requester.source.renew()
        raise


class BlockBucket:
    """The blocks below a prefix of a bucket. Belongs to the event loop."""

    def __init__(self, settings: S3Settings, prefix: str) -> None:
        self._gets = Requester(
            replace(settings, connect_timeout_s=GET_TIMEOUT_S, read_timeout_s=GET_TIMEOUT_S),
            CLUSTER_REQUESTS,
        )
        self._store = S3Store(
            replace(
                settings,
                connect_timeout_s=PUT_CONNECT_TIMEOUT_S,
                read_timeout_s=PUT_TIMEOUT_S,
                retry_time_s=PUT_TIMEOUT_S,
                max_connections=PUTS,
                max_streams=PUTS,
            ),
            CLUSTER_REQUESTS,
        )
        self._puts = self._store.requester
        self._prefix = prefix

    async def open(self) -> None:
        """See whether the bucket can be listed; has to have been done before anything else.

        Raises:
            AttemptError: it can't.
        """
        work = list_work(self._prefix, "/", "", 1)
        for requester in (self._gets, self._puts):
            await requester.once("LIST", work)

    def close(self) -> None:
        """Close the connections."""
        self._gets.close()
        self._puts.close()

    def hurry(self) -> None:
        """As `Store.hurry`."""
        self._gets.reprioritize()

    async def get(
        self,
        name: str,
        start: int,
        stop: int,
        take: Callable[[memoryview], None],
        *,
        sent: Callable[[], None],
        priority: Urgency,
    ) -> None:
        """Hand the bytes [start, stop) of a stored block on to `take`, as they come, in a thread.

        `sent` is called once there is a connection for the request.

        Raises:
            AttemptError: there is no such block, or no answer, or the answer broke off.
            Exception: whatever `take` raises.
        """
        key = self._prefix + name
        with _renewing(self._gets):
            async with self._gets.connected(GET, priority, key) as clients:
                sent()
                attempt = Attempt()

                def take_locally(chunk: memoryview) -> None:
                    attempt.locally(partial(take, chunk))

                def work() -> None:
                    download = clients.direct.download
                    headers = _range(start, stop)
                    if not download(key, headers, stop - start, lambda _: None, take_locally):
                        raise AttemptError(_NOT_UNDERSTOOD)

                await self._gets.in_thread(GET, attempt, work)

    async def get_now(
        self, name: str, start: int, stop: int, *, late: Late, priority: Urgency
    ) -> memoryview | None:
        """Read a small range of a stored block in the event loop.

        None if it is not small, or no connection is free for it. An answer that is not there
        in time is handed to `late`.

        Raises:
            AttemptError: there is no such block, or no answer, or the answer broke off.
            Exception: whatever `late` raises.
        """
        requester, key, size = self._gets, self._prefix + name, stop - start
        clients = requester.source.clients
        has_room = requester.connections.has_room_now(priority)
        if size > SMALL or not has_room or clients is None:
            return None
        send = partial(
            clients.direct.send_now, "GET", key, headers=_range(start, stop), size=size, late=late
        )
        with _renewing(requester):
            async with requester.connections.lease(priority, key):
                answer, failure = await requester.attempt_now(GET, key, send)
            if failure is not None:
                raise AttemptError(failure)
        return None if answer is None else memoryview(answer.content)[:size]

    async def put(self, name: str, body: StoredBlock, *, overwrites: bool) -> bool:
        """Store a block; False if there is one already. Only with `overwrites` it is replaced.

        Where that takes too long, or is cancelled, the body is released: a thread may still be
        sending it, to a server that takes it slowly, and another one may wait for its turn.

        Raises:
            AttemptError: it was not stored.
        """
        key = self._prefix + name
        headers = {} if overwrites else {"if-none-match": "*"}

        def work(clients: Clients) -> bool:
            try:
                # Without a checksum of the whole: each frame has its own.
                answer = clients.direct.send("PUT", key, headers=headers, body=body)
            except AttemptError as error:
                if not overwrites and error.failure.status == 412:
                    return False
                raise
            if answer is None:
                raise AttemptError(_NOT_UNDERSTOOD)
            return True

        with trio.move_on_after(PUT_LIMIT_S), _renewing(self._puts):
            try:
                while True:
                    try:
                        is_stored = None
                        if len(body) <= SMALL_PUT:
                            is_stored = await self._put_now(key, headers, body)
                        if is_stored is None:
                            is_stored = await self._puts.once(PUT, work, _prefetch, key=key)
                        return is_stored
                    except AttemptError as error:
                        if error.failure.kind is not ConflictError:
                            raise
                    await trio.sleep(COLLIDED_S)
            except trio.Cancelled:
                body.release()
                raise
        raise AttemptError(_TOO_SLOW)

    async def _put_now(self, key: str, headers: dict[str, str], body: StoredBlock) -> bool | None:
        """As `put`, in the event loop, without a thread; None if that can't be done now."""
        requester = self._puts
        clients = requester.source.clients
        if clients is None:
            return None
        send = partial(clients.direct.send_now, "PUT", key, headers=headers, body=body.whole())
        async with requester.connections.lease(_prefetch, key):
            answer, failure = await requester.attempt_now(PUT, key, send)
        if failure is not None:
            if headers and failure.status == 412:
                return False
            raise AttemptError(failure)
        return None if answer is None else True

    async def names(self, prefix: str) -> AsyncIterator[list[tuple[str, int]]]:
        """The names and sizes of the stored blocks below a prefix, page by page.

        Raises:
            StoreError: they can't be listed.
        """
        last = ""
        while True:
            page = await self._store.list_page(
                self._prefix + prefix, delimiter="", start_after=last
            )
            yield [(info.key.removeprefix(self._prefix), info.size) for info in page.objects]
            if page.next_token is None:
                return
            last = page.last

    async def delete(self, names: list[str]) -> set[str]:
        """Delete blocks; returns those that could not be deleted.

        Raises:
            StoreError: none could.
        """
        failures = await self._store.delete_many(self._prefix + name for name in names)
        return {failure.key.removeprefix(self._prefix) for failure in failures}
