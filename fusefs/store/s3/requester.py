"""Requests of one bucket with everything they share: connections, retries, credentials, counters.

A small request is tried once from the event loop (`send_now`). What that can't
do runs in a thread (`with_retries`), again and again with full jitter, until
the retry time has passed without progress. Both take a connection of the
budget (connection_budget.py) for each attempt.

Beside the request itself a failed attempt has consequences for all others:
throttling lowers the rate, expired credentials are looked up again, and a
change without an answer is reported, for the server may execute it later.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import trio

from fusefs.store import renewal
from fusefs.store.admission.connection_budget import ConnectionBudget
from fusefs.store.admission.hedging import Hedging
from fusefs.store.errors import (
    AttemptError,
    ConflictError,
    CredentialsError,
    Failure,
    MisconfiguredError,
    NotFoundError,
    StaleVersionError,
    StoreError,
    ThrottledError,
    UnreachableError,
)
from fusefs.store.http.answers import Answer
from fusefs.store.http.exchange import ANSWER_LIMIT_S
from fusefs.store.http.threads import AbandonedError, Attempt, Progress, Threads, Transfer
from fusefs.store.interface import (
    ListPage,
    Strict,
    UploadLog,
    Urgency,
    demanded,
)
from fusefs.store.s3 import list as listing
from fusefs.store.s3.clients import Clients, ClientSource, S3Settings
from fusefs.store.s3.conditions import for_condition
from fusefs.telemetry.activity import ACTIVITY
from fusefs.telemetry.s3_requests import S3_REQUESTS, RequestClock, S3Requests, cause_of, clocked
from fusefs.telemetry.stalls import WaitCause, stage

logger = logging.getLogger("fusefs.store")

T = TypeVar("T")

FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 5.0
# How long a refusal that has nothing to do with the credentials stands for the next ones.
EXPLAIN_EVERY_S = 5.0
# How long one attempt of a request takes at most whose answer is no object. Its thread has
# ended before that, unless it is in a library, which waits as long as a byte comes now and then.
ATTEMPT_LIMIT_S = ANSWER_LIMIT_S + 60.0

_WRITES = {
    "PUT": "puts",
    "BEGIN UPLOAD": "puts",
    "PUT PART": "puts",
    "COMPLETE UPLOAD": "puts",
    "COPY": "copies",
    "COPY PART": "copies",
    "DELETE": "deletes",
    "ABORT UPLOAD": "deletes",
}
# Operations, by their names in the log, and what they count as.
_COUNTERS = {
    "GET": "gets",
    "CLUSTER GET": "gets",
    "CLUSTER PUT": "puts",
    "HEAD": "heads",
    "LIST": "lists",
    "LIST PARTS": "lists",
    "LIST UPLOADS": "lists",
    **_WRITES,
}
_SHOWN = (
    *dict.fromkeys(_COUNTERS.values()),
    "bytes_fetched",
    "bytes_sent",
    "errors",
    "retries",
    "throttled",
    "hedged",
    "hedged_won",
)
# What takes as long as there are bytes: they are watched on their way (exchange.py, get.py).
_OF_BYTES = frozenset(("GET", "CLUSTER GET", "PUT", "PUT PART", "CLUSTER PUT"))
_ENDLESS = Failure(UnreachableError, "the answer has no end", is_retryable=True)
# What does not say that a change was refused: no answer (0), and gateways' own failures,
# of which 520 to 527 are Cloudflare's.
_NO_ANSWERS = frozenset((0, 500, 502, 504, *range(520, 528)))


class RetryBudget:
    """How long to retry a request (`time_s` seconds without progress), and how long to pause."""

    def __init__(self, time_s: float, clock: Callable[[], float] = trio.current_time) -> None:
        self._time_s = time_s
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Begin anew: an attempt has made progress."""
        self._began = self._clock()
        self._end = self._began + self._time_s
        self._attempts = 0

    def note_sent(self) -> None:
        """An attempt has a connection: before the first, the request waited for others alone."""
        if not self._attempts:
            self.restart()

    def has_time(self, longest_s: float = math.inf) -> bool:
        """Whether to retry; `longest_s` is for how long this failure is worth a retry.

        However long the first attempt took, there is a second.
        """
        end = self._end if self._attempts == 0 else min(self._end, self._began + longest_s)
        return self._clock() < end

    def pause_s(self) -> float:
        """The seconds to wait before the next attempt."""
        # Full jitter: clients that failed together do not come back together.
        self._attempts += 1
        longest = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2**self._attempts)
        return min(random.uniform(0, longest), max(0.0, self._end - self._clock()))


class Requester:
    """Sends one bucket's requests, which `requests` counts. Belongs to the event loop."""

    def __init__(self, settings: S3Settings, requests: S3Requests = S3_REQUESTS) -> None:
        self.settings = settings
        self._requests = requests
        # Of what is written here.
        self.storage_class = settings.write_options.storage_class or "STANDARD"
        self.connections = ConnectionBudget(settings.max_connections)
        # Of these, the ones that take a thread, and with it buffers of a few MiB.
        streams = min(settings.max_streams, settings.max_connections)
        self._streams = ConnectionBudget(streams, self.connections)
        # So many small bodies are in memory at a time; those of the others are on the disk.
        self.small_bodies = trio.Semaphore(2 * streams)
        # An abandoned thread keeps its place until its time-out.
        self._threads = Threads(2 * streams)
        self.source = ClientSource(settings)
        self.counted: Counter[str] = Counter()
        # When S3 last fulfilled a request, or could not for want of an object; trio's seconds.
        self.last_answer = -math.inf
        # Called with the key of a change of which an attempt got no answer, or was cancelled:
        # the server may execute it at any later time.
        self.on_unanswered: Callable[[str], None] = lambda _key: None
        # What the store begins by itself, to make one object of.
        self.upload_log = UploadLog()
        self._last_explained = -math.inf
        # The requests that are retried because their credentials were refused.
        self._refused: set[RetryBudget] = set()

    def counters(self) -> dict[str, int]:
        """As `Store.counters`."""
        return {
            **{name: self.counted[name] for name in _SHOWN},
            "awaiting_credentials": len(self._refused),
            "connections": self.connections.allowed,
        }

    def reprioritize(self) -> None:
        """Ask the requests that wait for their priorities again: one has risen."""
        self._streams.reprioritize()
        self.connections.reprioritize()

    def close(self) -> None:
        """Close the connections and end the threads."""
        self._threads.close()
        self.source.close()

    async def send_now(
        self,
        operation: str,
        key: str,
        *,
        headers: Mapping[str, str],
        body: bytes | bytearray | None = None,
        size: int = 0,
        priority: Urgency = demanded,
        condition: Strict = None,
        on_failure: Callable[[], None] = lambda: None,
        hedge: Hedging | None = None,
    ) -> Answer | None:
        """Send a small PUT, COPY, HEAD, GET or DELETE from the event loop; return its answer.

        `size` is how many bytes the answer's body has, `condition` what `headers`
        demand; a request that only reads may have a `hedge`. None if it is to be sent
        `with_retries`; it may have been done if `on_failure` was called.

        Raises:
            StoreError: that would not help.
        """
        clients = self.source.clients
        if clients is None:
            return None
        method = "PUT" if operation == "COPY" else operation
        send = partial(
            clients.direct.send_now,
            method,
            key,
            headers=headers,
            body=body,
            size=size,
            hedge=hedge,
        )
        async with self.connections.lease(priority, key):
            answer, failure = await self.attempt_now(operation, key, send, condition)
        if answer is None and failure is None:
            return None
        if failure is None:
            self.connections.note_success()
            self.last_answer = trio.current_time()
            ACTIVITY.note()
            return answer
        if failure.status < 400 and not failure.is_retryable:
            return None  # a redirect, which botocore follows
        self._react(operation, key, failure, None)
        # Without a code, and of credentials, `with_retries` finds out what it means.
        is_vague = not failure.code and failure.kind is not NotFoundError
        if not (is_vague or failure.kind is CredentialsError or failure.is_retryable):
            raise self.failed(operation, key, failure)
        on_failure()
        self._note_retry(operation, key, failure)
        with stage(_cause_of_pause(operation, failure)):
            await trio.sleep(RetryBudget(self.settings.retry_time_s).pause_s())
        return None

    async def attempt_now(
        self,
        operation: str,
        key: str,
        send: Callable[..., Awaitable[Answer | None]],
        condition: Strict = None,
    ) -> tuple[Answer | None, Failure | None]:
        """Make one attempt in the event loop: its answer, or why it failed.

        Neither if it can't be made there. `send` takes what to call at the first byte
        as `begun`.

        Raises:
            AbandonedError: as `send` does: its answer is not wanted any more.
        """
        clock, code = RequestClock(operation, self._requests), "none"
        try:
            answer = await send(begun=clock.first_byte)
            if answer is not None:
                code = "200"
                self.counted[_COUNTERS[operation]] += 1
            else:
                code = ""
            return answer, None
        except AttemptError as error:
            code = _code(error)
            self.counted[_COUNTERS[operation]] += 1
            self._note_unanswered(operation, key, error.failure)
            return None, classify(operation, for_condition(error.failure, condition))
        except (trio.Cancelled, AbandonedError):
            code = "cancelled"
            self._note_unanswered(operation, key)
            raise
        finally:
            clock.end(code)

    async def with_retries(
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
        send = partial(self.once, operation, work, priority, transfer, key)
        return await self.retried(
            operation, key, send, progress=transfer, retry_time_s=retry_time_s
        )

    async def retried(
        self,
        operation: str,
        key: str,
        send: Callable[[RetryBudget], Awaitable[T]],
        *,
        progress: Progress | None = None,
        retry_time_s: float | None = None,
    ) -> T:
        """Call `send`, which makes one attempt, again and again while that may help.

        It takes the budget, whose time begins once the first attempt has a connection.

        Raises:
            StoreError: it did not; there is one log line about it.
        """
        budget = RetryBudget(retry_time_s or self.settings.retry_time_s)
        has_retried_400 = False
        try:
            while True:
                used = self.source.clients
                try:
                    result = await send(budget)
                    self.connections.note_success()
                    self.last_answer = trio.current_time()
                    return result
                except AttemptError as error:
                    self._note_unanswered(operation, key, error.failure)
                    failure = await self._explain(operation, key, error.failure)
                except trio.Cancelled:
                    self._note_unanswered(operation, key)
                    raise
                if (failure.status, failure.code) == (400, "") and not has_retried_400:
                    # The credentials had expired, and have been renewed since.
                    has_retried_400 = True
                    failure = replace(failure, is_retryable=True, has_expired=True)
                if failure.kind is CredentialsError and not failure.is_retryable:
                    with stage(WaitCause.CREDENTIALS):
                        has_renewed = await self.source.has_renewed(used)
                    failure = replace(failure, is_retryable=has_renewed)
                self._react(operation, key, failure, budget)
                if progress is not None and progress.has_progressed():
                    budget.restart()
                if not failure.is_retryable or not budget.has_time(failure.longest_s):
                    raise self.failed(operation, key, failure)
                self._note_retry(operation, key, failure)
                with stage(_cause_of_pause(operation, failure)):
                    await trio.sleep(budget.pause_s())
        finally:
            self._refused.discard(budget)

    async def once(
        self,
        operation: str,
        work: Callable[[Clients], T],
        priority: Urgency = demanded,
        transfer: Transfer | None = None,
        key: str = "",
        budget: RetryBudget | None = None,
    ) -> T:
        """One attempt in a thread, with a connection; cancelled, it ends there on its own.

        `key` is that of the object which it is about, `budget` that of several attempts.

        Raises:
            AttemptError: it failed.
        """
        ACTIVITY.note()
        async with self.connected(operation, priority, key, budget) as clients:
            attempt = Attempt() if transfer is None else transfer.begin()
            return await self.in_thread(operation, attempt, partial(work, clients))

    @asynccontextmanager
    async def connected(
        self, operation: str, priority: Urgency, key: str, budget: RetryBudget | None = None
    ) -> AsyncIterator[Clients]:
        """A connection for one attempt, which is counted here and noted in `budget`.

        Raises:
            AttemptError: there are no credentials.
        """
        async with (
            self._streams.lease(priority, key),
            self.connections.lease(priority, key),
        ):
            if budget is not None:
                budget.note_sent()
            clients = self.source.clients
            if clients is None or renewal.is_due(clients.credentials):
                with stage(WaitCause.CREDENTIALS):
                    clients = await self.source.connect()
            self.counted[_COUNTERS[operation]] += 1
            yield clients

    async def in_thread(self, operation: str, attempt: Attempt, work: Callable[[], T]) -> T:
        """Make an attempt in a thread; cancelled, it ends there on its own.

        Raises:
            AttemptError: it failed.
        """
        clock, code = RequestClock(operation, self._requests), "none"
        limit_s = math.inf if operation in _OF_BYTES else ATTEMPT_LIMIT_S
        try:
            with trio.move_on_after(limit_s):
                result = await self._threads.run(clocked(clock, attempt.guarded(work)))
                code = "200"
                return result
            await attempt.abandon()
            raise AttemptError(_ENDLESS)
        except AttemptError as error:
            code = _code(error)
            raise
        except trio.Cancelled:
            code = "cancelled"
            await attempt.abandon()
            raise
        except Exception:  # it was given up, or a local file fails (`Attempt.locally`): not S3
            code = "cancelled"
            raise
        finally:
            # The first was counted when it got its connection (`connected`).
            self.counted[_COUNTERS[operation]] += max(0, clock.sent - 1)
            clock.end(code)

    def failed(self, operation: str, key: str, failure: Failure) -> StoreError:
        """The error of a request that failed for good, which is counted and logged here."""
        # A missing object is an answer that many lookups get; that a condition does not hold is
        # what it was sent for.
        is_answer = issubclass(failure.kind, NotFoundError | ConflictError)
        self.counted["errors"] += not is_answer
        level = logging.DEBUG if is_answer else logging.WARNING
        logger.log(level, "%s failed: %s", operation, self._describe(key, failure))
        request = f" (request {failure.request_id})" if failure.request_id else ""
        return failure.kind(failure.sentence + request)

    def _note_unanswered(self, operation: str, key: str, failure: Failure | None = None) -> None:
        """An attempt has failed with this, or was cancelled (None)."""
        if operation in _WRITES and (failure is None or failure.status in _NO_ANSWERS):
            self.on_unanswered(key)

    async def _explain(self, operation: str, key: str, failure: Failure) -> Failure:
        """What a failed attempt means to an operation; where S3 gave no code, a LIST finds out.

        The answer to a HEAD has no body, so it has no code that says what is wrong
        with the credentials; that to a LIST has.
        """
        is_due = trio.current_time() - self._last_explained >= EXPLAIN_EVERY_S
        if not failure.code and (failure.status == 400 or (failure.status == 403 and is_due)):
            try:
                await self.once("LIST", list_work(key, "", "", 1))
            except AttemptError as error:
                if error.failure.kind is CredentialsError:
                    return classify(operation, error.failure)
            self._last_explained = trio.current_time()
        return classify(operation, failure)

    def _note_retry(self, operation: str, key: str, failure: Failure) -> None:
        self.counted["retries"] += 1
        # Throttling has a line a minute (rate.py).
        level = logging.DEBUG if failure.kind is ThrottledError else logging.INFO
        logger.log(level, "%s again: %s", operation, self._describe(key, failure))

    def _react(
        self, operation: str, key: str, failure: Failure, budget: RetryBudget | None
    ) -> None:
        """Do what a failed attempt calls for; `budget` is that of the request that goes on."""
        if issubclass(failure.kind, NotFoundError | StaleVersionError | ConflictError):
            self.last_answer = trio.current_time()
        if failure.has_expired:
            self.source.renew()
        if budget is not None and failure.kind is CredentialsError:
            self._refused.add(budget)
        elif budget is not None:
            self._refused.discard(budget)
        if failure.kind is ThrottledError:
            self.counted["throttled"] += 1
            self.connections.note_throttled()
            self.connections.rate.note_refused(f"{operation} {self._describe(key, failure)}")
        elif failure.status:
            self.connections.rate.note_success()

    def _describe(self, key: str, failure: Failure) -> str:
        return f"s3://{self.settings.bucket}/{key}: {failure.in_full}"


def _code(error: AttemptError) -> str:
    """The status with which S3 refused a request, for its times."""
    return str(error.failure.status or "none")


def _cause_of_pause(operation: str, failure: Failure) -> int:
    """What a request waits for that is to be sent again."""
    if failure.kind is ThrottledError:
        return WaitCause.THROTTLED
    return WaitCause.CREDENTIALS if failure.kind is CredentialsError else cause_of(operation)


def classify(operation: str, failure: Failure) -> Failure:
    """What a failure means to a certain operation."""
    if operation == "LIST" and failure.kind is NotFoundError:
        # A LIST asks for no object.
        return replace(failure, kind=MisconfiguredError, sentence="there is no such bucket")
    if operation == "DELETE" and failure.code == "NoSuchBucket":
        return replace(failure, kind=StoreError)  # which does not say that it is deleted
    if operation in _WRITES and failure.kind is CredentialsError:
        # What has been written must not be lost because an administrator rotates keys.
        return replace(failure, is_retryable=True, has_expired=True)
    return failure


def list_work(
    prefix: str, delimiter: str, start_after: str, max_keys: int, token: str = ""
) -> Callable[[Clients], ListPage]:
    """What lists one page in a thread; as `Store.list_page`, or from a continuation token on."""
    parameters = listing.parameters(prefix, delimiter, start_after, max_keys, token)
    return lambda clients: clients.lister.page(parameters)
