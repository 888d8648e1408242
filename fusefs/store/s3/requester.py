"""Sending of one bucket's requests: connections, retries, credentials and counters.

`Requester.send` sends every request: it waits for a connection of the budget, signs the request
(address.py), has the engine send it, and judges the answer. A failed attempt is repeated, if that
may help, after a random pause (full jitter), until the retry time has passed without progress.
Everything runs in the event loop.

A failed attempt also affects other requests: throttling lowers the rate, expired credentials are
looked up again, and a change without an answer is noted, as the server may execute it later.
"""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, TypeVar

import trio

from fusefs.store import unreachable
from fusefs.store.admission.connection_budget import ConnectionBudget
from fusefs.store.engine.engine import Completion, Engine, Request, Sums
from fusefs.store.errors import (
    AccessDeniedError,
    ConflictError,
    CredentialsError,
    ExistsError,
    MisconfiguredError,
    NotFoundError,
    StaleVersionError,
    StoreError,
    ThrottledError,
    from_body,
    region_of,
)
from fusefs.store.http import redirects
from fusefs.store.interface import IF_ABSENT, Strict, Urgency, demanded
from fusefs.store.s3.access import Access, AccessSource
from fusefs.store.s3.address import Call
from fusefs.store.s3.list import list_call
from fusefs.store.s3.settings import S3Settings
from fusefs.telemetry.activity import ACTIVITY
from fusefs.telemetry.s3_requests import S3_REQUESTS, RequestClock, S3Requests, cause_of
from fusefs.telemetry.stalls import WaitCause, stage

logger = logging.getLogger("fusefs.store")

_LOCAL = ("sink-failed", "source-failed")

T = TypeVar("T")

FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 5.0
# Seconds for which a refusal that is not due to the credentials is not examined again.
EXPLAIN_EVERY_S = 5.0
# Seconds after a time-out in which only new connections are used. Idle ones are closed later.
DOUBTFUL_S = 10.0

_WRITES = {
    **dict.fromkeys(("PUT", "BEGIN UPLOAD", "PUT PART", "COMPLETE UPLOAD"), "puts"),
    **dict.fromkeys(("COPY", "COPY PART"), "copies"),
    **dict.fromkeys(("DELETE", "ABORT UPLOAD"), "deletes"),
}
# Counters of the operations, by their names in the log.
_COUNTERS = {
    **dict.fromkeys(("GET", "CLUSTER GET"), "gets"),
    "CLUSTER PUT": "puts",
    "HEAD": "heads",
    **dict.fromkeys(("LIST", "LIST PARTS", "LIST UPLOADS"), "lists"),
    **_WRITES,
}
_SHOWN = (
    *dict.fromkeys(_COUNTERS.values()),
    *("bytes_fetched", "bytes_sent", "errors", "retries", "throttled", "hedged", "hedged_won"),
)
# Statuses that do not mean that a change was refused: no answer (0), and failures of gateways, of
# which 520 to 527 are Cloudflare's.
_NO_ANSWERS = frozenset((0, 500, 502, 504, *range(520, 528)))


class RetryBudget:
    """The time for retries of one request (`time_s` seconds without progress), and the pauses."""

    def __init__(self, time_s: float) -> None:
        self._time_s = time_s
        self.may_be_done = False  # True once an attempt has failed
        self.has_moved = self.has_retried_400 = False
        self.restart()

    def restart(self) -> None:
        """Start the retry time anew: an attempt has made progress."""
        self._began = trio.current_time()
        self._end = self._began + self._time_s
        self._attempts = 0

    def note_sent(self) -> None:
        """Start the retry time at the first attempt's connection: queueing does not count."""
        if not self._attempts:
            self.restart()

    def has_time(self, longest_s: float = math.inf) -> bool:
        """True if there is time for a retry; a failure may limit that to `longest_s` of retries.

        The limit `longest_s` never prevents the first retry.
        """
        end = self._end if self._attempts == 0 else min(self._end, self._began + longest_s)
        return trio.current_time() < end

    def pause_s(self) -> float:
        """Count an attempt, and return the seconds to wait before the next one."""
        # Full jitter: clients that failed together do not retry together.
        self._attempts += 1
        longest = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2**self._attempts)
        return min(random.uniform(0, longest), max(0.0, self._end - trio.current_time()))


class Progress(Protocol):
    """Interface of a download, which keeps what each attempt has achieved."""

    def has_progressed(self) -> bool:
        """True if the last attempt achieved something that the next one need not repeat."""

    def arrived(self, received: int, sums: Sums) -> None:
        """Record that `received` bytes of the answer are in the file; `sums` has new checksums."""


# A function that sends a read request, perhaps twice, and reports its progress.
Hedge: TypeAlias = Callable[[Engine, Request], Awaitable[Completion]]


class ChangeUnderWay:
    """A change of some keys; `is_doubtful` once an attempt was cancelled or got no answer."""

    __slots__ = ("is_doubtful", "keys")

    def __init__(self, keys: Container[str]) -> None:
        self.keys = keys
        self.is_doubtful = False


class Requester:
    """Sends one bucket's requests, counted in `requests`. Belongs to the event loop."""

    def __init__(
        self, settings: S3Settings, engine: Engine, requests: S3Requests = S3_REQUESTS
    ) -> None:
        """`engine` may be shared with other stores; its nursery runs this requester's tasks."""
        self.settings = settings
        self._requests = requests
        # The storage class of objects written here.
        self.storage_class = settings.write_options.storage_class or "STANDARD"
        self.connections = ConnectionBudget(settings.max_connections, engine.nursery)
        # The connections that may transfer large bodies, which take buffers.
        streams = min(settings.max_streams, settings.max_connections)
        self._streams = ConnectionBudget(streams, engine.nursery, self.connections)
        # The number of small bodies in memory at a time; other bodies are on the disk. Uploads for
        # which no program waits take at most half of it (daemon/main.py).
        self.small_bodies = trio.Semaphore(4 * streams)
        self.engine = engine
        self.source = AccessSource(settings, engine.nursery)
        self.counted: Counter[str] = Counter()
        # Time (trio's seconds) of S3's last answer: a success, or an error like 404 or 412.
        self.last_answer = -math.inf
        # The last failed attempt, with its time; and the time at which the first of the failed
        # attempts since `last_answer` was sent.
        self._last_failure: tuple[StoreError, float] | None = None
        self._failing_since = math.inf
        # The changes whose callers want to know if the server may still execute them later.
        self.changes: set[ChangeUnderWay] = set()
        self._last_explained = self._timed_out = -math.inf

    def counters(self) -> dict[str, int]:
        """Return the numbers of requests and bytes since the start, by their names in `status`.

        `connections` is not a sum: it is the number of requests that may run at once now.
        """
        return {
            **{name: self.counted[name] for name in _SHOWN},
            "connections": self.connections.allowed,
        }

    def last_error(self) -> dict[str, Any] | None:
        """Describe the last failed attempt and its age `ago_s`; None if no attempt has failed.

        `since_s` is the time without an answer (a 404 or 412 is an answer), None if S3 answers.
        """
        if self._last_failure is None:
            return None
        (failure, at), now = self._last_failure, trio.current_time()
        since_s = now - self._failing_since if self._failing_since < math.inf else None
        return {"what": failure.sentence, "ago_s": now - at, "since_s": since_s}

    def reprioritize(self) -> None:
        """Let waiting requests whose priority has risen go before others."""
        self._streams.reprioritize()
        self.connections.reprioritize()

    async def send(
        self,
        call: Call | Callable[[], Awaitable[Call]],
        accept: Callable[[Completion], T],
        *,
        priority: Urgency = demanded,
        condition: Strict = None,
        retry_time_s: float | None = None,
        progress: Progress | None = None,
        hedge: Hedge | None = None,
        judge: Callable[[StoreError], Awaitable[StoreError]] | None = None,
    ) -> T:
        """Send a request, with retries while they may help; return the result of `accept`.

        `call` may be a function that makes each attempt's `Call`. `accept` reads an answer with a
        status below 300, and raises StoreError if the answer is not as it should be. `condition` is
        the one in the headers; `judge` may replace the failure of an attempt; `hedge` sends a read
        request, perhaps twice. `retry_time_s` is used instead of the setting, if not None.

        Raises:
            StoreError: all attempts failed; one log line says so.
            Exception: any exception of `accept`, `progress` or the sink's file.
        """
        budget = RetryBudget(retry_time_s or self.settings.retry_time_s)
        while True:
            one = await call() if callable(call) else call
            used, sent = self.source.access, trio.current_time()
            try:
                answer = await self.attempt(
                    one, priority, progress=progress, hedge=hedge, begun=budget.note_sent
                )
                result = accept(answer)
            except StoreError as error:
                self._note_unanswered(one, error)
                failure = for_condition(error, condition)
            except trio.Cancelled:
                self._note_unanswered(one)
                raise
            else:
                self.connections.note_success()
                self._note_answer()
                return result
            if judge is not None:
                failure = await judge(failure)
            failure = await self._weigh(one, failure, used, budget)
            self._react(one, failure, sent)
            if progress is not None and progress.has_progressed():
                budget.restart()
            if not failure.is_retryable or not budget.has_time(failure.longest_s):
                raise self.failed(one, failure, may_be_done=budget.may_be_done)
            budget.may_be_done = True
            self.counted["retries"] += not failure.region
            # Throttling is logged once a minute (rate.py).
            level = logging.DEBUG if isinstance(failure, ThrottledError) else logging.INFO
            logger.log(level, "%s again: %s", one.operation, self._describe(one, failure))
            with stage(_cause_of_pause(one.operation, failure)):
                await trio.sleep(0 if failure.region else budget.pause_s())

    async def attempt(
        self,
        call: Call,
        priority: Urgency = demanded,
        *,
        progress: Progress | None = None,
        hedge: Hedge | None = None,
        begun: Callable[[], None] = lambda: None,
    ) -> Completion:
        """Send a request once; return its answer, which has a status below 300.

        `begun` is called once the request has a connection. A cancelled request may be executed.

        Raises:
            StoreError: there was no such answer.
            OSError: the sink's file, or that of the body, can't be used.
        """
        ACTIVITY.note()
        stream = self._streams.lease(priority, call.key) if call.is_large else nullcontext()
        async with stream, self.connections.lease(priority, call.key):
            begun()
            access = self.source.access
            if access is None or access.ends_in():
                with stage(WaitCause.CREDENTIALS):
                    access = await self.source.connect()
            offset_s = access.clock.offset_s
            # After a time-out the network may have lost all connections without a word.
            is_fresh = trio.current_time() - self._timed_out < DOUBTFUL_S
            self.counted[_COUNTERS[call.operation]] += 1
            clock, code = RequestClock(call.operation, self._requests), "cancelled"
            sent = time.monotonic()

            def arrived(received: int, sums: Sums) -> None:
                clock.first_byte()
                if progress is not None:
                    progress.arrived(received, sums)

            try:
                request = access.address.request(call, access.keys, is_fresh=is_fresh)
                if hedge is None:
                    completion = await self.engine.send(request, arrived)
                else:
                    completion = await hedge(self.engine, request)
                if completion.first_byte_s:
                    clock.first_byte(sent + completion.first_byte_s)
                if completion.error == "timeout":
                    self._timed_out = trio.current_time()
                check(completion, call, access, offset_s)
                code = "200"
                return completion
            except StoreError as error:
                code = str(error.status or "none")
                raise
            except ValueError as error:
                raise StoreError("no header of a request can say that") from error
            finally:
                clock.end(code)

    async def _weigh(
        self, call: Call, failure: StoreError, used: Access | None, budget: RetryBudget
    ) -> StoreError:
        """Return the failure, made retryable if other credentials or another region may help."""
        if failure.region and not budget.has_moved and self.source.relocate(failure.region, used):
            budget.has_moved = True
            return replace(failure, is_retryable=True)
        if failure.region:
            where = f"the bucket is in the region {failure.region}: set --region"
            failure = replace(failure, sentence=where, region="")
        failure = classify(call.operation, await self._explain(call, failure))
        if (failure.status, failure.s3_code) == (400, "") and not budget.has_retried_400:
            # The credentials may have expired, and been renewed since.
            budget.has_retried_400 = True
            failure = replace(failure, is_retryable=True, has_expired=True)
        if isinstance(failure, CredentialsError) and not failure.is_retryable:
            with stage(WaitCause.CREDENTIALS):
                has_renewed = await self.source.has_renewed(used)
            failure = replace(failure, is_retryable=has_renewed)
        return failure

    async def _explain(self, call: Call, failure: StoreError) -> StoreError:
        """Send a LIST if a 400 or 403 has no error code: a HEAD's answer has no body for a code.

        Return the LIST's failure if it says that S3 rejects the credentials, else `failure`.
        """
        is_due = trio.current_time() - self._last_explained >= EXPLAIN_EVERY_S
        if not failure.s3_code and (failure.status == 400 or (failure.status == 403 and is_due)):
            try:
                await self.attempt(list_call(call.key, "", "", 1))
            except StoreError as error:
                if isinstance(error, CredentialsError):
                    return replace(error, region="")
            self._last_explained = trio.current_time()
        return failure

    def failed(self, call: Call, failure: StoreError, *, may_be_done: bool = False) -> StoreError:
        """Count and log a failed request, perhaps done by S3 (`may_be_done`); return its error."""
        # A missing object is a usual answer to lookups, and a condition that does not hold is what
        # the condition is for.
        is_answer = isinstance(failure, NotFoundError | ConflictError)
        self.counted["errors"] += not is_answer
        level = logging.DEBUG if is_answer else logging.WARNING
        logger.log(level, "%s failed: %s", call.operation, self._describe(call, failure))
        request = f" (request {failure.request_id})" if failure.request_id else ""
        may_be_done = may_be_done or failure.is_retryable
        return replace(failure, sentence=failure.sentence + request, may_be_done=may_be_done)

    def _note_unanswered(self, call: Call, failure: StoreError | None = None) -> None:
        """Set `is_doubtful` of the key's changes if S3 gave no answer (no `failure`: cancelled)."""
        # S3's own 503 has a code; a gateway's may mean that the connection to S3 was lost.
        codeless = failure is not None and failure.status == 503 and not failure.s3_code
        is_lost = failure is None or failure.status in _NO_ANSWERS or codeless
        if call.operation in _WRITES and is_lost:
            for change in self.changes:
                change.is_doubtful |= call.key in change.keys

    def _note_answer(self) -> None:
        self.last_answer, self._failing_since = trio.current_time(), math.inf

    def _react(self, call: Call, failure: StoreError, sent: float) -> None:
        """Update counters, credentials and rate after the failure of an attempt sent at `sent`."""
        if isinstance(failure, NotFoundError | StaleVersionError | ConflictError):
            self._note_answer()
        elif not failure.region:
            self._last_failure = failure, trio.current_time()
            # An identity may be denied one object, or all writes, and still read others.
            if type(failure) is not AccessDeniedError or call.operation == "LIST":
                self._failing_since = min(self._failing_since, sent)
        if failure.has_expired:
            self.source.renew()
        if isinstance(failure, ThrottledError):
            self.counted["throttled"] += 1
            self.connections.note_throttled()
            self.connections.rate.note_refused(f"{call.operation} {self._describe(call, failure)}")
        elif failure.status:
            self.connections.rate.note_success()

    def _describe(self, call: Call, failure: StoreError) -> str:
        return f"s3://{self.settings.bucket}/{call.key}: {failure.in_full}"


def _cause_of_pause(operation: str, failure: StoreError) -> int:
    """Return the `WaitCause` under which the pause before a retry is counted."""
    if isinstance(failure, ThrottledError):
        return WaitCause.THROTTLED
    return WaitCause.CREDENTIALS if isinstance(failure, CredentialsError) else cause_of(operation)


def for_condition(failure: StoreError, condition: Strict) -> StoreError:
    """Return a copy of the failure, as a ConflictError if `condition` did not hold."""
    is_gone = condition != IF_ABSENT and failure.s3_code == "NoSuchKey"
    if condition is None or not (failure.status == 412 or is_gone):
        return replace(failure)
    if condition == IF_ABSENT:
        return failure.of_kind(ExistsError, sentence="there is an object already")
    return failure.of_kind(ConflictError, sentence="the object has been replaced")


def classify(operation: str, failure: StoreError) -> StoreError:
    """Return the failure with its meaning for `operation`: a LIST's 404 is a missing bucket."""
    if operation == "LIST" and isinstance(failure, NotFoundError):
        # A LIST asks for no object.
        return failure.of_kind(MisconfiguredError, sentence="there is no such bucket")
    if operation == "DELETE" and failure.s3_code == "NoSuchBucket":
        return failure.of_kind(StoreError)  # this does not mean that the object is deleted
    if operation in _WRITES and isinstance(failure, CredentialsError):
        # Written data must not be lost because an administrator rotates keys.
        return replace(failure, is_retryable=True, has_expired=True)
    return failure


def check(completion: Completion, call: Call, access: Access, signed_offset_s: float) -> None:
    """Check that S3 did what was requested.

    `signed_offset_s` is the offset of the store's clock at the signature.

    Raises:
        StoreError: S3 did not do it.
        OSError: the local file of the sink or the body can't be used.
    """
    error, address = completion.error, access.address
    if completion.status >= 300:
        raise _refusal(completion, access, signed_offset_s)
    if error is None:
        return
    if error == "too-large" and call.method == "GET" and call.key:
        return  # it is another object than the one that was expected; its body is empty
    if error in _LOCAL:
        if not completion.errno:
            raise StoreError("the file became shorter while it was sent")
        raise OSError(completion.errno, os.strerror(completion.errno))
    raise unreachable.of_engine(completion, address.origin, address.route.proxy)


def _refusal(completion: Completion, access: Access, signed_offset_s: float) -> StoreError:
    status, headers = completion.status, completion.headers
    text = completion.body.decode(errors="replace")
    failure = from_body(status, text, headers.get("x-amz-request-id", ""))
    region, origin = region_of(status, headers, text), access.address.origin
    if status in redirects.REDIRECTS and not redirects.is_aws(origin):
        where = redirects.complaint(headers.get("location"), origin, knows_region=bool(region))
        if where is not None:
            return StoreError(where, status)
    is_off = access.clock.corrects(status, failure.s3_code, headers, signed_offset_s)
    if is_off and access.credentials is not None:
        return replace(failure, is_retryable=True)
    return replace(failure, region=region) if region and region != access.region else failure
