"""One bucket over S3: obstore for bytes, boto3 for everything else.

obstore (Rust) streams ranges without holding the GIL; its chunks are written
to the cache file as they come. Without TLS there is nothing that it could do
beside the kernel (store/http/exchange.py), and small ranges the event loop reads by itself
(reading.py), as it sends what is small (store/http/async_exchange.py). boto3 finds the credentials
the way its users expect; obstore asks it for credentials, and again before they
expire. What obstore can't do goes through boto3's connections, and what there
is much of without the rest of boto3 (store/http/client.py). Keys that obstore's paths
can't hold are read by boto3.

Both libraries block, so each of their requests runs in a thread. All have one
connection of the budget (connection_budget.py). Retries are ours, for all requests
alike: with full jitter, until `retry_time_s` has passed without progress. A
download that broke goes on at its next byte.

boto3 takes half a second to import, so that happens at the first request.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

import trio

from fusefs.store.capabilities import Capabilities
from fusefs.store.errors import (
    ConflictError,
    CredentialsError,
    Failure,
    NotFoundError,
    StaleVersionError,
    StoreError,
    ThrottledError,
)
from fusefs.store.fencing import ChangeToken, TokenSource, stamped
from fusefs.store.http.exchange import Answer
from fusefs.store.interface import (
    ChunkWriter,
    Condition,
    DeleteFailure,
    ListPage,
    ObjectInfo,
    ObjectVersion,
    PendingUpload,
    Strict,
    UploadState,
)
from fusefs.store.priority import Urgency, demanded
from fusefs.store.s3 import copy as copying
from fusefs.store.s3 import delete as deleting
from fusefs.store.s3 import head as requests
from fusefs.store.s3 import list as lister
from fusefs.store.s3 import multipart as upload
from fusefs.store.s3 import operations, parts, put, reading
from fusefs.store.s3.access import Access
from fusefs.store.s3.clients import Clients, S3Settings
from fusefs.store.s3.conditions import Fence
from fusefs.store.s3.connection_budget import Connections
from fusefs.store.s3.get import Attempt, AttemptError, Stream, Transfer
from fusefs.store.s3.multipart import S3Upload
from fusefs.store.s3.patience import Patience
from fusefs.store.s3.threads import Threads

logger = logging.getLogger("fusefs.store")

T = TypeVar("T")

CHECK_TIME_S = 5.0
# How long a refusal that has nothing to do with the credentials stands for the next ones.
EXPLAIN_EVERY_S = 5.0


class S3Store:
    """A bucket; see `fusefs.store.interface.Store` for the contract."""

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings
        self._connections = Connections(settings.max_connections)
        self.small_writes = trio.Semaphore(2 * settings.max_connections)
        # An abandoned thread keeps its place until its time-out.
        self._threads = Threads(2 * settings.max_connections)
        self._access = Access(settings)
        self._understood = -math.inf
        # When S3 last did what it was asked, or could not for want of an object; trio's seconds.
        self.answered = -math.inf
        # Called with the key of a change of which an attempt got no answer, or was given up:
        # the server may execute it at any later time.
        self.unanswered: Callable[[str], None] = lambda _key: None
        self.tokens = TokenSource()
        self.fence = Fence(self, settings.conditional_writes)
        # Whether `check` found nothing.
        self.is_prefix_empty = False
        self._counted: Counter[str] = Counter()
        # Whether a server's If-Match is to be relied on.
        self.has_if_match = True
        # The requests that try again because their credentials were refused.
        self._refused: set[Patience] = set()

    @property
    def principal(self) -> str:
        """Who reads, as a stable name without a secret; known after `check`."""
        assert self._access.principal is not None
        return self._access.principal

    @property
    def capabilities(self) -> Capabilities:
        """What the store is known to honour by now."""
        return self.fence.capabilities

    @property
    def sends_md5(self) -> bool:
        """Whether a body's MD5 goes with it: the store is not known to compare CRC32s."""
        return self.capabilities.checksums is not True

    def hurry(self) -> None:
        self._connections.look_again()

    def counters(self) -> dict[str, int]:
        names = ("gets", "heads", "lists", "bytes_fetched", "puts", "copies", "deletes",
                 "bytes_sent", "errors", "retries", "throttled")  # fmt: skip
        return {**{name: self._counted[name] for name in names},
                "awaiting_credentials": len(self._refused),
                "connections": self._connections.allowed}  # fmt: skip

    async def check(self, prefix: str) -> None:
        """See whether the bucket can be listed.

        Raises:
            StoreError: it can't; the message is one line for the user.
        """
        where = f"s3://{self.settings.bucket}/{prefix}"
        endpoint = self.settings.endpoint_url
        try:
            page = await self.retried("LIST", prefix, self._lister(prefix, "/", "", 1),
                                       retry_time_s=CHECK_TIME_S)  # fmt: skip
        except StoreError as error:
            at = f" at {endpoint}" if endpoint and endpoint not in str(error) else ""
            raise type(error)(f"can't read {where}{at}: {error}") from error
        self.is_prefix_empty = not (page.objects or page.prefixes)
        await self._try_objects(prefix)

    async def _try_objects(self, prefix: str) -> None:
        """Have obstore connect too, where its TLS or a proxy may refuse what boto3's do not."""
        clients = self._access.clients
        if clients is not None:
            async with self._connections.one(demanded):
                work = partial(clients.try_objects, f"{prefix}.fusefs")
                if await self._threads.run(Attempt().guarded(work)):
                    self._counted["heads"] += 1

    async def is_refused(self, prefix: str) -> bool | None:
        """Whether S3 refuses, with credentials that are fresh, to list a prefix.

        None if it does not tell: no answer, expired credentials, a wrong clock.
        """
        for _ in range(2):
            used = self._access.clients
            try:
                async with self._connections.one(demanded):
                    # As `check` asked: a policy may allow listings of just this kind.
                    await self._run("LIST", self._lister(prefix, "/", "", 1), None)
            except AttemptError as error:
                failure = error.failure
                if failure.has_expired:
                    self._access.renew()
                may_help = failure.is_refusal or failure.kind is CredentialsError
                if may_help and await self._access.has_renewed(used):
                    continue
                return failure.is_refusal or None
            self.answered = trio.current_time()
            return False
        return None

    async def aclose(self) -> None:
        """Give up the connections."""
        self._threads.close()
        self._access.close()

    async def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "/",
        start_after: str = "",
        max_keys: int = 1000,
    ) -> ListPage:
        work = self._lister(prefix, delimiter, start_after, max_keys)
        return await self.retried("LIST", prefix, work)

    def _lister(
        self, prefix: str, delimiter: str, start_after: str, max_keys: int
    ) -> Callable[[Clients], ListPage]:
        asked = lister.parameters(prefix, delimiter, start_after, max_keys)
        return lambda clients: clients.lister.page(asked)

    async def head(self, key: str) -> ObjectInfo:
        return (await requests.asked(self, key, demanded))[0]

    async def download(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        write: ChunkWriter,
        *,
        priority: Urgency = demanded,
        in_loop: bool = False,
    ) -> None:
        stream = Stream(version, start, stop, write, self._note_bytes)
        await reading.download(self, stream, priority, in_loop=in_loop)

    def _note_bytes(self, count: int) -> None:
        self._counted["bytes_fetched"] += count

    async def put_file(
        self,
        key: str,
        fd: int,
        size: int,
        *,
        metadata: Mapping[str, str],
        content_type: str | None,
        condition: Condition = None,
        token: ChangeToken | None = None,
    ) -> ObjectInfo:
        said = stamped(metadata, token or self.tokens.next())
        if size <= self.settings.part_size:
            return await put.put(self, key, fd, size, said, content_type, condition)
        return await parts.put(self, key, fd, size, said, content_type, condition)

    async def begin_upload(
        self, key: str, *, metadata: Mapping[str, str], content_type: str | None,
        token: ChangeToken | None = None,
    ) -> S3Upload:  # fmt: skip
        said = stamped(metadata, token or self.tokens.next())
        return await parts.begin(self, key, said, content_type)

    async def resume_upload(self, state: UploadState) -> S3Upload:
        return await parts.resume(self, state)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await upload.abort(self, key, upload_id)

    async def list_uploads(self, prefix: str) -> list[PendingUpload]:
        return await parts.pending(self, prefix)

    async def copy(
        self,
        source: ObjectInfo | ObjectVersion,
        key: str,
        *,
        metadata: Mapping[str, str] | None = None,
        keeps_mtime: bool = False,
        condition: Condition = None,
        token: ChangeToken | None = None,
        is_own: bool = False,
    ) -> ObjectInfo:
        return await copying.copy(
            self, source, key, metadata, token or self.tokens.next(),
            keeps_mtime=keeps_mtime, condition=condition, is_own=is_own,
        )  # fmt: skip

    async def delete(self, key: str, etag: str | None = None, *, adopts: bool = False) -> None:
        await deleting.delete(self, key, etag, adopts=adopts)

    async def delete_many(
        self, keys: Iterable[str], etags: Mapping[str, str] | None = None
    ) -> list[DeleteFailure]:
        return await deleting.delete_many(self, keys, etags or {})

    def note_sent(self, count: int) -> None:
        """Count bytes that S3 has taken."""
        self._counted["bytes_sent"] += count

    async def at_once(
        self,
        operation: str,
        key: str,
        *,
        headers: Mapping[str, str],
        body: bytes | bytearray | None = None,
        size: int = 0,
        priority: Urgency = demanded,
        condition: Strict = None,
        failed: Callable[[], None] = lambda: None,
    ) -> Answer | None:
        """Send a small PUT, COPY, HEAD, GET or DELETE from the event loop; return its answer.

        `size` is how many bytes it asks for, `condition` what `headers` demand.
        None if it is to be `retried` in a thread; it may have been done if
        `failed` was called.

        Raises:
            StoreError: that would not help.
        """
        clients = self._access.clients
        if clients is None:
            return None
        async with self._connections.one(priority):
            try:
                method = "PUT" if operation == "COPY" else operation
                answer = await clients.direct.send_now(
                    method, key, headers=headers, body=body, size=size
                )
                failure = None
            except AttemptError as error:
                self._note_unanswered(operation, key, error.failure)
                failure = requests.under(error.failure, condition)
                answer, failure = None, operations.considered(operation, failure)
            except trio.Cancelled:
                self._note_unanswered(operation, key)
                raise
        if answer is None and failure is None:
            return None
        self._counted[operations.COUNTERS[operation]] += 1
        if failure is None:
            self._connections.succeeded()
            self.answered = trio.current_time()
            return answer
        if failure.status < 400 and not failure.is_retryable:
            return None  # a redirect, which is botocore's
        self._react(operation, key, failure, None)
        # Without a code, and of credentials, it is found out what it means in the patient way.
        is_vague = not failure.code and failure.kind is not NotFoundError
        if not (is_vague or failure.kind is CredentialsError or failure.is_retryable):
            raise self.failed(operation, key, failure)
        failed()
        self._note_retry(operation, key, failure)
        await trio.sleep(Patience(self.settings.retry_time_s).pause_s())
        return None

    async def retried(
        self,
        operation: str,
        key: str,
        work: Callable[[Clients], T],
        priority: Urgency = demanded,
        *,
        transfer: Transfer | None = None,
        retry_time_s: float | None = None,
    ) -> T:
        """Run `work` in a thread with a connection, again and again while that may help.

        Raises:
            StoreError: it did not; there is one log line about it.
        """
        patience = Patience(retry_time_s or self.settings.retry_time_s)
        has_doubted = False
        try:
            while True:
                used = self._access.clients
                try:
                    async with self._connections.one(priority):
                        result = await self._run(operation, work, transfer)
                    self._connections.succeeded()
                    self.answered = trio.current_time()
                    return result
                except AttemptError as error:
                    self._note_unanswered(operation, key, error.failure)
                    failure = await self._explained(operation, key, error.failure)
                except trio.Cancelled:
                    self._note_unanswered(operation, key)
                    raise
                if (failure.status, failure.code) == (400, "") and not has_doubted:
                    # The credentials had expired, and have been renewed since.
                    has_doubted = True
                    failure = replace(failure, is_retryable=True, has_expired=True)
                if failure.kind is CredentialsError and not failure.is_retryable:
                    failure = replace(failure, is_retryable=await self._access.has_renewed(used))
                self._react(operation, key, failure, patience)
                if transfer is not None and transfer.has_progressed():
                    patience.renew()
                if not failure.is_retryable or not patience.is_left(failure.longest_s):
                    raise self.failed(operation, key, failure)
                self._note_retry(operation, key, failure)
                await trio.sleep(patience.pause_s())
        finally:
            self._refused.discard(patience)

    def _note_unanswered(self, operation: str, key: str, failure: Failure | None = None) -> None:
        """An attempt has failed with this, or was given up (None)."""
        has_no_answer = failure is None or failure.status in operations.NO_ANSWERS
        if has_no_answer and operations.is_change(operation):
            self.unanswered(key)

    async def _explained(self, operation: str, key: str, failure: Failure) -> Failure:
        """What an attempt's failure means to an operation, asked for where S3 did not say.

        The answer to a HEAD has no body, so it does not tell what is wrong with
        the credentials; that to a LIST does.
        """
        is_due = time.monotonic() - self._understood >= EXPLAIN_EVERY_S
        if not failure.code and (failure.status == 400 or (failure.status == 403 and is_due)):
            try:
                async with self._connections.one(demanded):
                    await self._run("LIST", self._lister(key, "", "", 1), None)
            except AttemptError as error:
                if error.failure.kind is CredentialsError:
                    return operations.considered(operation, error.failure)
            self._understood = time.monotonic()
        return operations.considered(operation, failure)

    def _note_retry(self, operation: str, key: str, failure: Failure) -> None:
        self._counted["retries"] += 1
        # What is throttled has a line a minute (rate.py).
        level = logging.DEBUG if failure.kind is ThrottledError else logging.INFO
        logger.log(level, "%s again: %s", operation, self._describe(key, failure))

    def _react(self, operation: str, key: str, failure: Failure, patience: Patience | None) -> None:
        """Do what an attempt that failed so asks for; `patience` is whose that goes on trying."""
        if issubclass(failure.kind, NotFoundError | StaleVersionError | ConflictError):
            self.answered = trio.current_time()
        if failure.has_expired:
            self._access.renew()
        if patience is not None and failure.kind is CredentialsError:
            self._refused.add(patience)
        elif patience is not None:
            self._refused.discard(patience)
        if failure.kind is ThrottledError:
            self._counted["throttled"] += 1
            self._connections.throttled()
            self._connections.rate.refused(f"{operation} {self._describe(key, failure)}")
        elif failure.status:
            self._connections.rate.succeeded()

    async def _run(
        self, operation: str, work: Callable[[Clients], T], transfer: Transfer | None
    ) -> T:
        """One attempt, in a thread; a cancelled one ends there on its own."""
        clients = self._access.clients or await self._access.connect()
        self._counted[operations.COUNTERS[operation]] += 1
        attempt = Attempt() if transfer is None else transfer.begin()
        try:
            return await self._threads.run(attempt.guarded(partial(work, clients)))
        except trio.Cancelled:
            await attempt.abandon()
            raise

    def failed(self, operation: str, key: str, failure: Failure) -> StoreError:
        """Log a request that failed for good."""
        # That a condition does not hold is what it was sent for.
        self._counted["errors"] += not issubclass(failure.kind, ConflictError)
        # A missing object is an answer, and lookups ask for many; so is a conflict.
        is_answer = issubclass(failure.kind, NotFoundError | ConflictError)
        level = logging.DEBUG if is_answer else logging.WARNING
        logger.log(level, "%s failed: %s", operation, self._describe(key, failure))
        sentence = failure.sentence
        if failure.request_id:
            sentence += f" (request {failure.request_id})"
        return failure.kind(sentence)

    def _describe(self, key: str, failure: Failure) -> str:
        return f"s3://{self.settings.bucket}/{key}: {failure.in_full}"
