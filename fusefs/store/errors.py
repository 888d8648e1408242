"""What can go wrong with the bucket, as an errno and a sentence.

`translate` is the one place that reads the exceptions of boto3 and obstore.
Only an answer with status 404 is ever taken for a missing object: to a
training job, a time-out that looks like a missing file is a lost sample.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass


class StoreError(Exception):
    """S3 could not do what was asked; `errno` says how a system call answers."""

    errno = errno.EIO


class NotFoundError(StoreError):
    """The object or the bucket does not exist (404)."""

    errno = errno.ENOENT


class AccessDeniedError(StoreError):
    """The credentials do not allow it, or there are none (401, 403)."""

    errno = errno.EACCES


class StaleVersionError(StoreError):
    """The object in the bucket is no longer the version that was asked for (412)."""

    errno = errno.ESTALE


class ArchivedError(StoreError):
    """The object is in an archive class and has to be restored first."""


class ThrottledError(StoreError):
    """S3 asked to slow down for longer than the retry time (429, 503)."""


class UnreachableError(StoreError):
    """No answer in the retry time: connection refused, time-outs, 5xx."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt: what it means, and what S3 said about it.

    `status` is 0 where there was no answer; `code` and `request_id` are S3's.
    """

    kind: type[StoreError]
    sentence: str
    status: int = 0
    code: str = ""
    request_id: str = ""
    is_retryable: bool = False

    def error(self) -> StoreError:
        return self.kind(self.sentence)


_THROTTLING = {
    "SlowDown", "TooManyRequests", "TooManyRequestsException", "Throttling",
    "ThrottlingException", "RequestLimitExceeded", "ServiceUnavailable",
}  # fmt: skip
# Credentials that botocore or the bucket's administrator will renew.
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}

_SENTENCES = {
    "NoSuchBucket": "there is no such bucket",
    "InvalidAccessKeyId": "the access key is not known there: check the credentials",
    "SignatureDoesNotMatch": "the secret key does not match the access key",
    "InvalidBucketName": "that is not a valid name for a bucket",
    "PermanentRedirect": "the bucket is in another region: set --region",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set --region",
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
    **dict.fromkeys(_EXPIRED, "the credentials have expired"),
}


def from_status(status: int, code: str, request_id: str) -> Failure:
    """What an answer with this HTTP status and S3 error code means."""

    def failure(kind: type[StoreError], sentence: str, *, is_retryable: bool = False) -> Failure:
        sentence = _SENTENCES.get(code, sentence)
        return Failure(kind, sentence, status, code, request_id, is_retryable)

    if code in _EXPIRED:
        return failure(AccessDeniedError, "", is_retryable=True)
    if code == "InvalidObjectState":
        return failure(ArchivedError, "it is archived: restore it before it can be read")
    if status == 429 or code in _THROTTLING:
        return failure(ThrottledError, "S3 asks to slow down", is_retryable=True)
    if status >= 500:
        return failure(UnreachableError, f"S3 failed with status {status}", is_retryable=True)
    if status == 404:
        return failure(NotFoundError, "there is no such object")
    if status in (412, 416):
        return failure(StaleVersionError, "the object has been replaced")
    if status in (401, 403):
        return failure(AccessDeniedError, "access denied")
    return failure(StoreError, f"S3 answered with status {status} {code}".strip())


def translate(error: Exception) -> Failure | None:
    """What an exception of boto3 or obstore means; None if it is not one of theirs."""
    return _from_botocore(error) or _from_obstore(error)


def _from_botocore(error: Exception) -> Failure | None:
    # Imported by whoever raised the error; importing it first costs half a second.
    from botocore import exceptions

    if isinstance(error, exceptions.ClientError):
        told = error.response
        status = int(told.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code = str(told.get("Error", {}).get("Code", ""))
        request_id = str(told.get("ResponseMetadata", {}).get("RequestId", ""))
        return from_status(status, code, request_id)
    if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        return Failure(
            AccessDeniedError,
            "no AWS credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY,"
            " name a --profile, or use --anonymous for a public bucket",
        )
    if isinstance(error, exceptions.HTTPClientError):
        return Failure(UnreachableError, f"no connection: {error}", is_retryable=True)
    if isinstance(error, exceptions.BotoCoreError):
        return Failure(StoreError, str(error))
    return None


_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_REQUEST_ID = re.compile(r"<RequestId>([^<]*)</RequestId>")


def _from_obstore(error: Exception) -> Failure | None:
    from obstore.exceptions import BaseError

    # obstore's NotFoundError is Python's FileNotFoundError.
    if not isinstance(error, BaseError | FileNotFoundError):
        return None
    text = str(error)
    status, code, request_id = (
        match[1] if match else "" for match in (p.search(text) for p in _PATTERNS)
    )
    if status:
        return from_status(int(status), code, request_id)
    if isinstance(error, FileNotFoundError):
        return Failure(NotFoundError, "there is no such object", 404)
    first_line = text.partition("\n")[0]
    return Failure(UnreachableError, f"no answer: {first_line}", is_retryable=True)


_PATTERNS = (_STATUS, _CODE, _REQUEST_ID)
