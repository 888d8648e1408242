"""The controller's requests to a bucket, by boto3, with every failure as a `StoreError`.

Requests are signed with the keys of a Secret, or else with the driver's credentials. A Secret's
key of SSE-C goes with what reads and writes records, as a bucket's policy may demand.
They go only to the store's own host, through the environment's proxy where there is one:
neither redirects nor the AWS configuration send them elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from csi.controller import boto3_client
from csi.controller.background import Progress
from csi.errors import InvalidArgumentError
from csi.identities.keys import AccessKeys
from csi.volume.stores import StoreSettings
from fusefs.settings.types import Addressing
from fusefs.store.customer_key import CustomerKey
from fusefs.store.errors import (
    NO_CREDENTIALS,
    AccessDeniedError,
    CredentialsError,
    ExistsError,
    NotFoundError,
    StaleVersionError,
    StoreError,
    UnsupportedError,
    from_code,
    translate,
)
from fusefs.store.http import trust
from fusefs.store.http.proxies import Proxies
from fusefs.store.s3.special_buckets import customer_key_obstacle

if TYPE_CHECKING:
    from fusefs.store.http.trust import Trust

DEFAULT_REGION = "us-east-1"
# The maximum number of keys of a LIST page and of a DeleteObjects request.
PAGE = 1000
# Of a record, which has some hundred; whoever writes into the bucket may put any object there.
MOST_BYTES = 1 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One object of a listing; `etag` is quoted, as S3 gives it."""

    key: str
    etag: str


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
        pays: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """`pays`: the requests agree to be paid for (Requester Pays); `progress` is told of them.

        Raises:
            InvalidArgumentError, UnavailableError: as `StoreSettings.check_address` does, or the
                key of SSE-C would be sent in the clear.
            StoreError: certificates or proxies that were named can't be used.
        """
        store.check_address()
        if customer_key is not None and store.endpoint_url is not None:
            obstacle = customer_key_obstacle(store.endpoint_url, None)
            if obstacle is not None:
                raise InvalidArgumentError(obstacle.sentence)
        self.name = name
        self.url = f"{store.name}://{name}"  # unlike those of other stores
        self._progress = progress or Progress()
        self._host = store.endpoint_url or store.name
        self._whose = "the Secret's keys" if keys else "the driver"
        self._client, self._trust = make_client(
            store,
            region or store.region,
            keys,
            customer_key,
            pays=pays,
            is_access_point=name.startswith("arn:"),
        )

    def put_new(self, key: str, body: bytes, **parameters: Any) -> None:
        """Write an object that is not there, with these parameters of boto3's as well.

        Raises:
            ExistsError: it is.
        """
        with self._translated(key):
            try:
                self._client.put_object(
                    Bucket=self.name,
                    Key=key,
                    Body=body,
                    IfNoneMatch="*",
                    ContentType="application/json",
                    **parameters,
                )
            except Exception as error:
                if translate(error).kind is StaleVersionError:
                    raise ExistsError(f"s3://{self.name}/{key} exists") from error
                raise

    def get(self, key: str) -> bytes:
        """An object's content, of which at most `MOST_BYTES` are read.

        Raises:
            NotFoundError: there is none.
            OtherKeyError: it is encrypted with a key of SSE-C that the Secret does not have.
        """
        with self._translated(key):
            body = self._client.get_object(Bucket=self.name, Key=key)["Body"]
            with contextlib.closing(body):
                return bytes(body.read(MOST_BYTES))

    def expiry_rule(self, key: str) -> str:
        """The id of the lifecycle rule that removes `key` some day; "" if none can be seen.

        https://docs.aws.amazon.com/AmazonS3/latest/API/API_LifecycleRule.html
        """
        try:
            with self._translated(key):
                answer = self._client.get_bucket_lifecycle_configuration(Bucket=self.name)
        except StoreError:  # there are none, or these credentials may not see them
            return ""
        for rule in answer["Rules"]:
            given = rule.get("Filter") or rule
            given = given.get("And", given)
            is_all = given.keys().isdisjoint(("Tag", "Tags", "ObjectSizeGreaterThan"))
            expires = not rule.get("Expiration", {}).keys().isdisjoint(("Days", "Date"))
            if rule["Status"] == "Enabled" and expires and is_all:
                prefix = given.get("Prefix") or ""
                if key.startswith(prefix):
                    return rule.get("ID") or f"of the prefix {prefix!r}"
        return ""

    def pages(self, prefix: str) -> Iterator[list[ListedObject]]:
        """The objects below `prefix`, up to `PAGE` at a time. No page is empty.

        Raises:
            StoreError: the store does not answer, or lists keys with another prefix.
        """
        token: dict[str, Any] = {}
        while True:
            with self._translated(prefix):
                answer = self._client.list_objects_v2(
                    Bucket=self.name, Prefix=prefix, MaxKeys=PAGE, **token
                )
            found = [ListedObject(item["Key"], item["ETag"]) for item in answer.get("Contents", [])]
            # The caller may delete every listed key.
            if not all(item.key.startswith(prefix) for item in found):
                raise StoreError(f"s3://{self.name}/{prefix}: the store lists other keys")
            if found:
                yield found
            if not answer.get("IsTruncated"):
                return
            token = {"ContinuationToken": answer["NextContinuationToken"]}

    def delete(self, key: str) -> None:
        """Delete one object, if it is there."""
        with self._translated(key):
            self._client.delete_object(Bucket=self.name, Key=key)

    def delete_all(self, keys: Sequence[str]) -> None:
        """Delete up to `PAGE` objects. After a failure some may be gone."""
        # XML cannot contain control characters, URLs can.
        printable = [key for key in keys if key.isprintable()]
        for key in keys:
            if not key.isprintable():
                self.delete(key)
        if not printable:
            return
        with self._translated(printable[0]):
            answer = self._client.delete_objects(
                Bucket=self.name,
                Delete={"Objects": [{"Key": key} for key in printable], "Quiet": True},
            )
        for refused in answer.get("Errors", []):
            failure = from_code(refused.get("Code", ""))
            if failure.status != 404:
                whom = f"s3://{self.name}/{refused.get('Key', '')}"
                raise failure.kind(f"{failure.sentence} on {whom} as {self._whose}")

    def abort_uploads(self, prefix: str) -> None:
        """Abort the unfinished multipart uploads below `prefix`.

        They are not objects: a store that cannot list them, or refuses to, only
        gets a warning in the log.
        """
        try:
            with self._translated(prefix):
                for key, upload_id in self._uploads(prefix):
                    self._client.abort_multipart_upload(
                        Bucket=self.name, Key=key, UploadId=upload_id
                    )
        except (AccessDeniedError, UnsupportedError) as error:
            log.warning("unfinished uploads are left: %s", error)

    def _uploads(self, prefix: str) -> list[tuple[str, str]]:
        pages = self._client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self.name, Prefix=prefix
        )
        found = [upload for page in pages for upload in page.get("Uploads", [])]
        return [(part["Key"], part["UploadId"]) for part in found if part["Key"].startswith(prefix)]

    @contextlib.contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        """Raise errors as StoreError with the key, the credentials' owner and the request id."""
        self._progress.wait_for(f"{self._host} (s3://{self.name}/{key})")
        try:
            yield
            self._progress.wait_for("")
        except StoreError:
            raise
        except Exception as error:
            failure = translate(error)
            if failure is NO_CREDENTIALS:
                raise CredentialsError(
                    "neither the class names a provisioner Secret nor has the driver credentials"
                    " of its own"
                ) from error
            sentence = f"{failure.sentence} on s3://{self.name}/{key} as {self._whose}"
            if failure.request_id:
                sentence += f", request {failure.request_id}"
            if _lacks_key(error, failure.code):
                raise OtherKeyError(f"{sentence}: it may be encrypted with another key") from error
            if failure.code == "NoSuchBucket":
                raise NoSuchBucketError(sentence) from error
            raise failure.kind(sentence) from error


class NoSuchBucketError(NotFoundError):
    """There is no such bucket in the store."""


class OtherKeyError(StoreError):
    """An object that only those with another key of SSE-C can read."""


def _lacks_key(error: Exception, code: str) -> bool:
    """True if a GET was refused because it came without the key that an object needs.

    To one with another key AWS answers with AccessDenied, as to one without rights.
    """
    is_get = getattr(error, "operation_name", "") == "GetObject"
    return is_get and code in ("InvalidRequest", "InvalidArgument")  # AWS' code, and SeaweedFS'


@functools.lru_cache(maxsize=64)
def make_client(
    store: StoreSettings,
    region: str | None,
    keys: AccessKeys | None,
    customer_key: CustomerKey | None = None,
    *,
    pays: bool = False,
    is_access_point: bool = False,
) -> tuple[Any, Trust | None]:
    """boto3's client of a store, the same for the same arguments, and what it trusts.

    Raises:
        StoreError: certificates or proxies that were named can't be used.
    """
    import boto3
    from botocore.config import Config

    session = boto3.Session(
        aws_access_key_id=keys.access_key_id if keys else None,
        aws_secret_access_key=keys.secret_access_key if keys else None,
        aws_session_token=keys.session_token if keys else None,
        region_name=region,
    )
    addressing = _addressing(store, is_access_point=is_access_point)
    options: dict[str, Any] = {
        "connect_timeout": 5,
        "read_timeout": 20,
        # The caller retries, and sees the reason meanwhile.
        "retries": {"total_max_attempts": 3, "mode": "standard"},
        "s3": {"addressing_style": addressing.value},
        "ignore_configured_endpoint_urls": True,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "max_pool_connections": 16,
        "user_agent_extra": "fusefs-csi",
    }
    ca_bundle = str(store.ca_bundle) if store.ca_bundle else None
    configured = session._session.get_config_variable("ca_bundle")
    trusted = trust.find_for(store.endpoint_url, ca_bundle, configured)

    def make(parameters: dict[str, Any]) -> Any:
        return session.client(
            "s3",
            endpoint_url=store.endpoint_url,
            region_name=session.region_name or DEFAULT_REGION,
            verify=trusted.path if trusted else None,
            config=Config(**options, **parameters),
        )

    client = boto3_client.make(make, Proxies.of(os.environ), trusted.path if trusted else None)
    if customer_key is not None:
        headers = customer_key.headers(is_copy=False)
        for operation in ("GetObject", "PutObject"):
            client.meta.events.register(
                f"before-call.s3.{operation}", lambda params, **_: params["headers"].update(headers)
            )
    if pays:
        client.meta.events.register("before-call.s3", _agree_to_pay)
    return client, trusted


def _addressing(store: StoreSettings, *, is_access_point: bool) -> Addressing:
    if is_access_point:  # which has a host of its own, and no path stands for it
        return Addressing.AUTO
    if store.addressing is Addressing.AUTO and store.endpoint_url is not None:
        return Addressing.PATH
    return store.addressing


def _agree_to_pay(params: dict[str, Any], **_: Any) -> None:
    params["headers"]["x-amz-request-payer"] = "requester"
