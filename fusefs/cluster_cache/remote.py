"""The bucket that stores the blocks: short requests, each sent once.

A failed request is not repeated, as S3 has the same bytes. GETs have shorter time-outs than those
to S3; PUTs may take longer, as no reader waits for them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import trio

from fusefs.store.engine.engine import Engine, FileSink, MemorySink, Sums
from fusefs.store.errors import ConflictError, CredentialsError, StoreError, UnreachableError
from fusefs.store.interface import Priority, Urgency
from fusefs.store.s3.address import Call
from fusefs.store.s3.list import list_call
from fusefs.store.s3.requester import Requester
from fusefs.store.s3.settings import S3Settings
from fusefs.telemetry.s3_requests import CLUSTER_REQUESTS

GET, PUT = "CLUSTER GET", "CLUSTER PUT"
# Time-out of a GET's connection and next bytes; S3 is requested earlier (policy.py).
GET_TIMEOUT_S = 1.0
PUT_CONNECT_TIMEOUT_S = 2.0
PUT_TIMEOUT_S = 5.0
# Time-out of the PUT of a whole block.
PUT_LIMIT_S = 20.0
# Pause before a PUT is repeated that collided with another node's PUT, which may fail.
COLLIDED_S = 0.5
# PUTs at a time, of the filler and of jobs.
PUTS = 8
# A range of at most this size, which is more than a frame with its tag, is received whole.
SMALL = 257 << 10


@contextmanager
def _renewing(requester: Requester) -> Iterator[None]:
    """Renew the credentials if a request in the `with` body is refused because of them."""
    try:
        yield
    except StoreError as error:
        if error.has_expired or isinstance(error, CredentialsError):
            requester.source.renew()
        raise


class _Stream:
    """Receives a GET's answer in memory, as its `Progress`; `read` passes on what has arrived."""

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("fusefs-block", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
            self._view = memoryview(mmap.mmap(self.fd, size))
        except BaseException:
            os.close(self.fd)
            raise
        self._size = 0
        self._is_over = False
        self._changed = trio.Event()

    def close(self) -> None:
        os.close(self.fd)

    def has_progressed(self) -> bool:
        return False  # the request is not repeated

    def arrived(self, received: int, sums: Sums) -> None:
        self._size = received
        self._changed.set()

    def end(self) -> None:
        """Make `read` return after the bytes that have arrived, as no more will come."""
        self._is_over = True
        self._changed.set()

    async def read(self, take: Callable[[memoryview], Awaitable[None]]) -> None:
        """Pass the bytes to `take` as they arrive, until `end` is called."""
        at = 0
        while at < self._size or not self._is_over:
            if at == self._size:
                self._changed = trio.Event()
                await self._changed.wait()
                continue
            chunk, at = self._view[at : self._size], self._size
            await take(chunk)


class BlockBucket:
    """Requests for the blocks below a prefix of the bucket. Belongs to the event loop."""

    def __init__(self, settings: S3Settings, prefix: str, engine: Engine) -> None:
        self._gets = Requester(
            replace(settings, connect_timeout_s=GET_TIMEOUT_S, read_timeout_s=GET_TIMEOUT_S),
            engine,
            CLUSTER_REQUESTS,
        )
        self._puts = Requester(
            replace(
                settings,
                connect_timeout_s=PUT_CONNECT_TIMEOUT_S,
                read_timeout_s=PUT_TIMEOUT_S,
                retry_time_s=PUT_TIMEOUT_S,
                max_connections=PUTS,
                max_streams=PUTS,
            ),
            engine,
            CLUSTER_REQUESTS,
        )
        self._prefix = prefix

    async def open(self) -> None:
        """Check that the bucket can be listed; must succeed before any other call.

        Raises:
            StoreError: the bucket can't be listed.
        """
        for requester in (self._gets, self._puts):
            await requester.attempt(list_call(self._prefix, "/", "", 1))

    def hurry(self) -> None:
        """Reconsider the order of GETs that wait for a connection: a priority has risen."""
        self._gets.reprioritize()

    async def get(
        self,
        name: str,
        start: int,
        stop: int,
        take: Callable[[memoryview], Awaitable[None]],
        *,
        sent: Callable[[], None],
        priority: Urgency,
    ) -> None:
        """Pass the bytes [start, stop) of a stored block to `take`, a large range as it arrives.

        `sent` is called as soon as the request has a connection.

        Raises:
            StoreError: there is no such block, or no answer, or the answer broke off.
            Exception: any exception of `take`.
        """
        key, size = self._prefix + name, stop - start
        headers = {"range": f"bytes={start}-{stop - 1}"}
        with _renewing(self._gets):
            if size <= SMALL:
                call = Call(GET, "GET", key, headers=headers, sink=MemorySink(size))
                answer = await self._gets.attempt(call, priority, begun=sent)
                await take(memoryview(answer.body))
                return
            with closing(_Stream(size)) as stream:
                sink = FileSink(stream.fd, 0, start, size)
                call = Call(GET, "GET", key, headers=headers, sink=sink)
                await self._stream(call, stream, take, sent, priority)

    async def _stream(
        self,
        call: Call,
        stream: _Stream,
        take: Callable[[memoryview], Awaitable[None]],
        sent: Callable[[], None],
        priority: Urgency,
    ) -> None:
        failure: Exception | None = None

        async def request() -> None:
            nonlocal failure
            try:
                await self._gets.attempt(call, priority, progress=stream, begun=sent)
            except (StoreError, OSError) as error:
                failure = error
            stream.end()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(request)
            try:
                await stream.read(take)
            except Exception as error:  # raised below, because the nursery would wrap it
                failure = error
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def put(self, name: str, body: bytes, *, overwrites: bool) -> bool:
        """Store a block; without `overwrites`, return False if a block of this name exists.

        Raises:
            StoreError: the block could not be stored, or not in time.
        """
        # No checksum of the whole block is sent: each frame has its own.
        headers = {} if overwrites else {"if-none-match": "*"}
        call = Call(PUT, "PUT", self._prefix + name, headers=headers, body=body)
        with trio.move_on_after(PUT_LIMIT_S), _renewing(self._puts):
            while True:
                try:
                    await self._puts.attempt(call, lambda: Priority.PREFETCH)
                    return True
                except StoreError as error:
                    if headers and error.status == 412:
                        return False
                    if not isinstance(error, ConflictError):
                        raise
                await trio.sleep(COLLIDED_S)
        raise UnreachableError("it takes too long")
