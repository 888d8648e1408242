"""Checks of the bucket: permissions, latency and throughput with a mount's credentials.

Requests are sent by the same code as a daemon's, with the same connections and TLS. Reading needs
only a listing and an object. Permissions to change the bucket are tried only on request, with
objects of one byte below a name that no mount lists (store/capabilities.py), which are deleted at
the end.
"""

from __future__ import annotations

import itertools
import os
import secrets
import statistics
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import trio

from fusefs.diagnosis.findings import Finding, advice, ok, problem, skipped
from fusefs.linux.files import closing
from fusefs.settings.display import human_size
from fusefs.store.capabilities import PROBE_NAME
from fusefs.store.errors import (
    AccessDeniedError,
    ArchivedError,
    CredentialsError,
    NotFoundError,
    StoreError,
    ThrottledError,
    UnreachableError,
)
from fusefs.store.interface import ObjectInfo, read_bytes
from fusefs.store.s3.settings import S3Settings
from fusefs.store.s3.store import S3Store, open_store

RETRY_TIME_S = 3.0
LIMIT_S = 30.0
LATENCY_SAMPLES = 8
# The median above which latency gets advice: a byte from the same region takes 10 to 100 ms.
SLOW_ANSWER_S = 0.25
RANGE_BYTES = 8 << 20
MOST_BYTES = 512 << 20
THROUGHPUT_S = 2.0
READERS = 16
SLOW_BYTES_S = 100e6
# If fewer bytes arrive, no large answer arrives: the buffers of the connections alone hold more.
STUCK_BYTES = 64 << 10
# The smallest object for measuring throughput: a smaller one would measure only the latency.
LEAST_MEASURED = 1 << 20
# The maximum number of archived objects before the reads are skipped.
MOST_ARCHIVED = 8
# AWS' names for the permissions of each kind of request.
_ACTIONS = {
    "list": "s3:ListBucket",
    "get": "s3:GetObject",
    "put": "s3:PutObject",
    "copy": "s3:GetObject and s3:PutObject",
    "delete": "s3:DeleteObject",
    "multipart": "s3:PutObject and s3:AbortMultipartUpload",
}
# The consequence for a mount if a kind of request is refused.
_NEEDED_FOR = {
    "list": "nothing can be mounted",
    "get": "no file can be read",
    "put": "no file can be written",
    "copy": "no file can be renamed",
    "delete": "no file can be removed or renamed",
    "multipart": "no large file can be written",
}


async def check(
    settings: S3Settings, prefix: str, *, tries_permissions: bool, may_write: bool
) -> list[Finding]:
    """Return all findings within 70 s; try changes only if `tries_permissions` and `may_write`."""
    findings: list[Finding] = []
    async with open_store(replace(settings, retry_time_s=RETRY_TIME_S)) as store:
        with trio.move_on_after(LIMIT_S) as scope:
            await _read_some(store, prefix, findings.append)
        if scope.cancelled_caught:
            findings.append(
                problem(
                    "bucket",
                    f"the checks took more than {LIMIT_S:.0f} s",
                    "S3 answers too slowly: see DNS and connections above",
                )
            )
        elif tries_permissions:
            findings += await _permissions(store, prefix, may_write=may_write)
    return findings


# --- reading ------------------------------------------------------------------


async def _read_some(store: S3Store, prefix: str, add: Callable[[Finding], None]) -> None:
    try:
        await store.check(prefix)
        page = await store.list_page(prefix, delimiter="", sorts=False)
    except StoreError as error:
        add(_refused("list", error))
        return
    add(ok("list", f"s3://{store.settings.bucket}/{prefix} can be listed"))
    if not page.is_ordered:
        add(
            advice(
                "list",
                "the store lists in no order: a folder of more than 1,000 entries is listed whole,"
                " and sorted here, before its first name is shown",
                "keep such folders small, or raise --metadata-ttl",
            )
        )
    found = [info for info in page.objects if info.size]
    if not found:
        add(skipped("get", "there is no object to read"))
        return
    for info in sorted(found, key=lambda info: -info.size)[:MOST_ARCHIVED]:
        try:
            add(await _latency(store, info))
            add(await _throughput(store, info))
            return
        except ArchivedError:
            continue
        except StoreError as error:
            add(_refused("get", error))
            return
    add(skipped("get", "the largest objects of the first page are archived"))


def _refused(what: str, error: StoreError) -> Finding:
    return problem(what, f"{error}: {_NEEDED_FOR[what]}", _remedy(what, error))


def _remedy(what: str, error: StoreError) -> str:
    """Return advice about a refused request, by its kind `what` (as in `_ACTIONS`) and error."""
    match error:
        case CredentialsError():
            return "renew or correct the credentials; a finding above names their source"
        case AccessDeniedError():
            return (
                f"allow {_ACTIONS[what]} to this identity (policies of identity, bucket and key), "
                "and see the findings above"
            )
        case ThrottledError():
            return "the store refuses further requests for now: find out what else sends it many"
        case UnreachableError():
            return "check the state of the store, and the findings above about the network"
    return "correct what the sentence names"


async def _latency(store: S3Store, info: ObjectInfo) -> Finding:
    """Measure the time of GETs of one byte, until the end of the answer."""
    taken = []
    for _ in range(LATENCY_SAMPLES):
        began = trio.current_time()
        await read_bytes(store, info.version, 0, 1)
        taken.append(trio.current_time() - began)
    median, worst = statistics.median(taken), max(taken)
    text = f"a byte takes {1e3 * median:.0f} ms (median), {1e3 * worst:.0f} ms (longest)"
    figures = {"median_seconds": median, "longest_seconds": worst}
    if median > SLOW_ANSWER_S:
        return advice(
            "latency",
            text,
            "mount a bucket in the region of this machine; without a proxy, if there is one",
            **figures,
        )
    return ok("latency", text, **figures)


async def _throughput(store: S3Store, info: ObjectInfo) -> Finding:
    """Measure the throughput of parallel reads of ranges of one object."""
    if info.size < LEAST_MEASURED:
        return skipped("throughput", "there is no object of 1 MiB or more on the first page")
    rounds = itertools.repeat(range(0, info.size, RANGE_BYTES), READERS)
    offsets = itertools.islice(itertools.chain.from_iterable(rounds), MOST_BYTES // RANGE_BYTES)
    done = 0
    began = trio.current_time()

    async def read() -> None:
        nonlocal done
        for start in offsets:
            stop = min(start + RANGE_BYTES, info.size)
            await read_bytes(store, info.version, start, stop)
            done += stop - start

    with trio.move_on_after(THROUGHPUT_S):
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(READERS):
                    nursery.start_soon(read)
        except* StoreError as group:
            raise group.exceptions[0] from None
    took_s = trio.current_time() - began
    rate = done / took_s
    text = f"{rate / 1e6:,.0f} MB/s over {READERS} connections ({human_size(done)})"
    figures = {"bytes_per_second": rate, "bytes": done, "seconds": took_s}
    if done < STUCK_BYTES:
        return problem(
            "throughput",
            f"small answers arrive, but only {human_size(done)} of large ones in {took_s:.0f} s",
            "check the MTU of the path to S3 (ping -M do -s 1472 HOST), firewalls and proxies",
            **figures,
        )
    if rate < SLOW_BYTES_S:
        return advice(
            "throughput",
            text,
            "find out whether this machine's network, a proxy or the store limits it: run the same "
            "check on another machine",
            **figures,
        )
    return ok("throughput", text, **figures)


# --- permissions --------------------------------------------------------------


async def _permissions(store: S3Store, prefix: str, *, may_write: bool) -> list[Finding]:
    """Try each kind of request that a writable mount sends; none unless `may_write`."""
    if not may_write:
        return [skipped("permissions", "a read-only mount, or --no-delete: nothing is written")]
    with closing(os.memfd_create("fusefs-doctor", os.MFD_CLOEXEC)) as fd:
        os.write(fd, b"?")
        trial = _Trial(store, f"{prefix}{PROBE_NAME}/{secrets.token_hex(8)}/", fd)
        with trio.move_on_after(LIMIT_S) as scope:
            findings = [await _tried(what, one) for what, one in trial.steps()]
        if scope.cancelled_caught:
            with suppress(StoreError):
                await trial.clean_up()
            return [problem("permissions", "S3 did not answer in time", "see the findings above")]
        return findings


async def _tried(what: str, attempt: Callable[[], Awaitable[object]]) -> Finding:
    try:
        await attempt()
    except StoreError as error:
        if isinstance(error, NotFoundError):
            return skipped(f"may {what}", "the test object does not exist")
        return replace(_refused(what, error), check=f"may {what}")
    return ok(f"may {what}", "allowed")


class _Trial:
    """Trial requests that write, read, copy and delete one object and upload another in parts."""

    def __init__(self, store: S3Store, own: str, fd: int) -> None:
        self._store = store
        self._own = own
        self._fd = fd

    def steps(self) -> list[tuple[str, Callable[[], Awaitable[object]]]]:
        """Return the trials' kinds and functions; earlier trials make the objects of later ones."""
        return [
            ("put", self._put),
            ("get", self._get),
            ("copy", self._copy),
            ("multipart", self._multipart),
            ("delete", self.clean_up),
        ]

    async def _put(self) -> ObjectInfo:
        return await self._store.put_file(f"{self._own}object", self._fd, 1)

    async def _get(self) -> None:
        info = await self._store.head(f"{self._own}object")
        await read_bytes(self._store, info.version, 0, 1)

    async def _copy(self) -> None:
        await self._store.copy(await self._store.head(f"{self._own}object"), f"{self._own}copy")

    async def _multipart(self) -> None:
        """Complete one multipart upload, and abort another."""
        for is_completed in (True, False):
            upload = await self._store.begin_upload(f"{self._own}parts")
            try:
                await upload.send(self._fd, [1], 1)
                if is_completed:
                    await upload.complete(1)
            finally:
                if not is_completed:
                    state = upload.state
                    await self._store.abort_upload(state.key, state.upload_id)

    async def clean_up(self) -> None:
        """Delete all objects of this trial; raise StoreError if some may be left."""
        with trio.CancelScope(shield=True) as scope:
            for name in ("object", "copy", "parts"):
                scope.deadline = trio.current_time() + RETRY_TIME_S
                with suppress(NotFoundError):
                    await self._store.delete(self._own + name)
        if scope.cancelled_caught:
            raise UnreachableError("S3 did not answer in time")
