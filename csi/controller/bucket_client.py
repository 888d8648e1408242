"""The controller's requests to a bucket, sent with the mounts' `S3Store` from plain threads.

Requests are signed with the keys of a Secret, or else with the driver's credentials. A Secret's
SSE-C key is sent when records are read and written, because a bucket policy may demand it. Requests
go only to the store's own host, through the environment's proxy if there is one: neither redirects
nor the AWS configuration send them elsewhere.

All requests are sent from one event loop, in a thread that lives as long as the process.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import trio

from csi.controller.background import Progress
from csi.errors import InvalidArgumentError
from csi.identities.keys import AccessKeys
from csi.volume.stores import StoreSettings
from fusefs.store.customer_key import CustomerKey
from fusefs.store.engine.engine import Completion, Engine, MemorySink, open_engine
from fusefs.store.errors import (
    AccessDeniedError,
    CredentialsError,
    NoCredentialsError,
    NotFoundError,
    StoreError,
    UnsupportedError,
)
from fusefs.store.interface import IF_ABSENT, ObjectVersion
from fusefs.store.s3.address import Call
from fusefs.store.s3.settings import NO_OPTIONS, S3Settings, WriteOptions, customer_key_obstacle
from fusefs.store.s3.store import S3Store

# Size limit for a record, which has some hundred bytes: other writers may put any object there.
MOST_BYTES = 1 << 20
# The maximum number of keys on a listing's page.
PAGE = 1000
CONNECTIONS = 16
# The time for retries is short, because the caller calls again and sees the reason meanwhile.
RETRY_TIME_S = 3.0

T = TypeVar("T")

log = logging.getLogger(__name__)


class Bucket:
    """One bucket of a store. Any thread may use it. Every method blocks."""

    def __init__(
        self,
        store: StoreSettings,
        name: str,
        region: str | None,
        keys: AccessKeys | None,
        customer_key: CustomerKey | None = None,
        *,
        write_options: WriteOptions = NO_OPTIONS,
        progress: Progress | None = None,
    ) -> None:
        """Check the store's address. `progress` gets the name of each request that is sent.

        Raises:
            InvalidArgumentError: the address is forbidden, or would get the SSE-C key unencrypted.
            UnavailableError: the name of the store's host cannot be resolved now.
        """
        store.check_address()
        if customer_key is not None and store.endpoint_url is not None:
            obstacle = customer_key_obstacle(store.endpoint_url, None)
            if obstacle is not None:
                raise InvalidArgumentError(str(obstacle))
        self.name = name
        self.url = f"{store.name}://{name}"  # differs for buckets of other stores
        self._progress = progress or Progress()
        self._host = store.endpoint_url or store.name
        self._whose = "the Secret's keys" if keys else "the driver"
        self._store = store_of(store, name, region, keys, customer_key, write_options)

    def put_new(self, key: str, body: bytes) -> None:
        """Write an object that does not exist yet.

        Raises:
            ExistsError: the object exists.
        """
        headers = {"content-type": "application/json", "if-none-match": "*"}
        call = Call("PUT", "PUT", key, headers=headers, document=body)
        self._send(call, lambda _: None, condition=IF_ABSENT)

    def get(self, key: str) -> bytes:
        """Return an object's content.

        Raises:
            NotFoundError: there is no such object.
            OtherKeyError: the object is encrypted with an SSE-C key that the Secret does not have.
        """
        try:
            call = Call("GET", "GET", key, sink=MemorySink(MOST_BYTES))
            return self._send(call, lambda answer: answer.body)
        except StoreError as error:
            # The code of AWS and SeaweedFS for a GET without the SSE-C key that the object needs.
            # If the key is wrong, AWS answers AccessDenied, as it does when rights are missing.
            if error.s3_code in ("InvalidRequest", "InvalidArgument"):
                raise OtherKeyError(f"{error}: it may be encrypted with another key") from error
            raise

    def pages(self, prefix: str) -> Iterator[list[ObjectVersion]]:
        """Yield the objects below `prefix`, up to `PAGE` at a time. No page is empty.

        Raises:
            StoreError: the request failed, or the store lists keys with another prefix.
        """
        last, has_more = "", True
        while has_more:
            page = self._run(
                prefix,
                functools.partial(
                    self._store.list_page, delimiter="", start_after=last, max_keys=PAGE
                ),
                prefix,
            )
            if page.unnamed:  # the caller may delete every listed key
                raise StoreError(f"s3://{self.name}/{prefix}: the store lists other keys")
            if page.objects:
                yield [info.version for info in page.objects]
            last, has_more = page.last, page.next_token is not None

    def delete(self, key: str) -> None:
        """Delete one object, if it exists."""
        self._run(key, self._store.delete, key)

    def delete_all(self, keys: Sequence[str]) -> None:
        """Delete objects; after a StoreError some of them may be gone already."""
        for failed in self._run(keys[0], self._store.delete_many, keys):
            assert isinstance(failed.error, StoreError)
            raise self._explained(failed.error, failed.key)

    def abort_uploads(self, prefix: str) -> None:
        """Abort the unfinished multipart uploads below `prefix`.

        Unfinished uploads are not objects, so the log only gets a warning if the store cannot list
        them or refuses the request.
        """
        try:
            for upload in self._run(prefix, self._store.list_uploads, prefix):
                if upload.key.startswith(prefix):
                    self._run(prefix, self._store.abort_upload, upload.key, upload.upload_id)
        except (AccessDeniedError, UnsupportedError) as error:
            log.warning("unfinished uploads are left: %s", error)

    def _send(self, call: Call, accept: Callable[[Completion], T], **options: Any) -> T:
        sending = functools.partial(self._store.requester.send, **options)
        result: T = self._run(call.key, sending, call, accept)
        return result

    def _run(self, key: str, request: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Run `request` in the event loop; return its result. Errors name `key` and credentials."""
        self._progress.wait_for(f"{self._host} (s3://{self.name}/{key})")
        try:
            result: T = trio.from_thread.run(request, *arguments, trio_token=_event_loop()[0])
        except StoreError as error:
            raise self._explained(error, key) from error
        self._progress.wait_for("")
        return result

    def _explained(self, error: StoreError, key: str) -> StoreError:
        if isinstance(error, NoCredentialsError):
            return CredentialsError(
                "neither the class names a provisioner Secret nor has the driver credentials"
                " of its own"
            )
        kind = NoSuchBucketError if error.s3_code == "NoSuchBucket" else type(error)
        sentence = f"{error} on s3://{self.name}/{key} as {self._whose}"
        return error.of_kind(kind, sentence=sentence)


class NoSuchBucketError(NotFoundError):
    """There is no such bucket in the store."""


class OtherKeyError(StoreError):
    """The object is encrypted with another SSE-C key than the one in use."""


@functools.lru_cache(maxsize=64)
def store_of(
    store: StoreSettings,
    name: str,
    region: str | None,
    keys: AccessKeys | None,
    customer_key: CustomerKey | None = None,
    write_options: WriteOptions = NO_OPTIONS,
) -> S3Store:
    """Return the store for a bucket; equal arguments give the same store."""
    settings = S3Settings(
        name,
        store.endpoint_url,
        region or store.region,
        keys=keys.environment() if keys else None,
        addressing=store.addressing,
        max_connections=CONNECTIONS,
        retry_time_s=RETRY_TIME_S,
        connect_timeout_s=5.0,
        ca_bundle=str(store.ca_bundle) if store.ca_bundle else None,
        write_options=write_options,
        customer_key=customer_key,
        ignores_configured_endpoints=True,
    )
    return S3Store(settings, _event_loop()[1])


_starting = threading.Lock()


def _event_loop() -> tuple[trio.lowlevel.TrioToken, Engine]:
    """Return the event loop of all requests and its engine; the first call starts them."""
    with _starting:
        return _started()


@functools.cache
def _started() -> tuple[trio.lowlevel.TrioToken, Engine]:
    started: Future[tuple[trio.lowlevel.TrioToken, Engine]] = Future()

    async def run() -> None:
        async with open_engine(CONNECTIONS) as engine:
            started.set_result((trio.lowlevel.current_trio_token(), engine))
            await trio.sleep_forever()

    threading.Thread(target=trio.run, args=(run,), name="s3", daemon=True).start()
    return started.result()
