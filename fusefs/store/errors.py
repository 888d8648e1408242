"""The errors of the bucket, each with an errno and a sentence.

`from_body` interprets the answers of S3, `translate` the exceptions of botocore, which finds the
credentials. Only an answer with status 404 is ever taken for a missing object.
"""

from __future__ import annotations

import enum
import errno
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar


class ErrorCode(enum.StrEnum):
    """The kind of an error, for programs that do not read its sentence for people."""

    INVALID = "invalid"  # no attempt can succeed with this configuration
    DENIED = "denied"
    CREDENTIALS = "credentials"
    UNSUPPORTED = "unsupported"
    UNAVAILABLE = "unavailable"  # another attempt may succeed


@dataclass(eq=False, repr=False)
class StoreError(Exception):
    """Failure of a request, or of one attempt of it; `errno` is for the system call.

    `status`, `s3_code` and `request_id` are those of S3's answer: 0 and "" if there was none.
    `is_retryable` says that another attempt may succeed, `has_expired` that new credentials may
    help. `longest_s` limits the time for which a retry is worthwhile. `region` is the bucket's
    region, if the request was sent to a wrong one, else "". `may_be_done` is True if S3 may have
    carried out the request in one of its attempts.

    A failure is kept as a copy (`dataclasses.replace`), because an error that was raised holds its
    traceback, and so the memory of the calls that it ended.
    """

    errno = errno.EIO
    code: ClassVar[ErrorCode] = ErrorCode.UNAVAILABLE

    sentence: str = ""
    status: int = 0
    s3_code: str = ""
    request_id: str = ""
    is_retryable: bool = False
    has_expired: bool = False
    longest_s: float = math.inf
    region: str = ""
    may_be_done: bool = False

    def __str__(self) -> str:
        return self.sentence

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sentence!r})"  # a copy has no `args`

    @property
    def in_full(self) -> str:
        """The sentence, followed by S3's status, code and request id."""
        detail = f"status {self.status} {self.s3_code}, request {self.request_id or 'unknown'}"
        return f"{self.sentence} [{detail}]"

    @property
    def is_refusal(self) -> bool:
        """True if S3 or the provider of the credentials refuses this identity."""
        is_about_time = self.s3_code in _EXPIRED or self.s3_code == "RequestTimeTooSkewed"
        is_no = self.status in (401, 403) or self.s3_code in _REJECTED
        return is_no and isinstance(self, AccessDeniedError) and not is_about_time

    def of_kind(self, kind: type[StoreError], **changes: Any) -> StoreError:
        """Return this failure as an error of the class `kind`, with other values of fields."""
        return kind(**{**asdict(self), **changes})


class NotFoundError(StoreError):
    """The object or the bucket does not exist (404)."""

    errno = errno.ENOENT


class AccessDeniedError(StoreError):
    """The credentials do not permit the request, or there are no credentials (401, 403)."""

    errno = errno.EACCES
    code = ErrorCode.DENIED


class CredentialsError(AccessDeniedError):
    """The credentials have expired or are rejected: new ones would help."""

    code = ErrorCode.CREDENTIALS


@dataclass(eq=False, repr=False)
class NoCredentialsError(CredentialsError):
    """There are no credentials."""

    sentence: str = (
        "no AWS credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY,"
        " name a --profile, or use --anonymous for a public bucket"
    )


@dataclass(eq=False, repr=False)
class SilentSourceError(CredentialsError):
    """The provider of credentials that a profile or the environment names does not answer."""

    sentence: str = (
        "the provider of the credentials does not answer: run the profile's credential_process"
        " by hand, or check whether the identity service can be reached"
    )


class MisconfiguredError(StoreError):
    """The bucket does not exist, or the settings make every request impossible."""

    code = ErrorCode.INVALID


class StaleVersionError(StoreError):
    """The object in the bucket is no longer the requested version (412)."""

    errno = errno.ESTALE


class ConflictError(StoreError):
    """A conditional write found another object than the condition demands (412)."""

    errno = errno.ESTALE


class ExistsError(ConflictError):
    """A write that must create a new object found an object already there (412)."""

    errno = errno.EEXIST


class UnsupportedError(StoreError):
    """The store does not implement the request (501)."""

    errno = errno.EOPNOTSUPP
    code = ErrorCode.UNSUPPORTED


class ArchivedError(StoreError):
    """The object is in an archive class and has to be restored first."""


class PartsError(StoreError):
    """S3 cannot make an object of an upload's parts; a new upload must be begun."""


class ThrottledError(StoreError):
    """S3 throttled a request for longer than the retry time (429, 503)."""


class UnreachableError(StoreError):
    """S3 gave no usable answer (time-out, 5xx, bad certificate); retries failed or can't help."""


_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_CHECK = "check the credentials"
_REJECTED = {
    "InvalidAccessKeyId": f"the store does not know the access key: {_CHECK}",
    "SignatureDoesNotMatch": "the secret key does not match the access key",
    "InvalidToken": f"the session token is not valid: {_CHECK}",
    "InvalidIdentityToken": f"the identity token is not accepted: {_CHECK}",
    "IDPRejectedClaim": "the credentials are rejected",
}
_SLOW_DOWN = (ThrottledError, "S3 asks to slow down", True)
# KMS.ThrottlingException comes with status 400.
_SLOW_DOWN_CODES = (
    *("SlowDown", "TooManyRequests", "TooManyRequestsException", "RequestLimitExceeded"),
    *("ServiceUnavailable", "Throttling", "ThrottlingException", "KMS.ThrottlingException"),
)
_DAMAGED = (UnreachableError, "what was sent did not arrive as it was", True)
_DAMAGED_CODES = (
    *("BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"),
    *("IncompleteBody", "RequestTimeout"),
)
_COLLIDED = (ConflictError, "another write of it is under way", True)
_UNSUPPORTED = (UnsupportedError, "this store does not implement that", False)
_STALE = (StaleVersionError, "the object has been replaced", False)
_DENIED = (AccessDeniedError, "access denied", False)
PROXY_PASSWORD = "the proxy wants a user and a password, or refuses those that it got"
_ARCHIVED = (ArchivedError, "it is archived: restore it before it can be read", False)
_INVALID_NAME = "the name of the bucket is not valid"
# By S3's error code, whatever the status: kind, sentence, and True if a retry may succeed.
_BY_CODE: dict[str, tuple[type[StoreError], str, bool]] = {
    **dict.fromkeys(_SLOW_DOWN_CODES, _SLOW_DOWN),
    **dict.fromkeys(_DAMAGED_CODES, _DAMAGED),
    # Two writes of one key at the same time.
    "ConditionalRequestConflict": _COLLIDED,
    "OperationAborted": _COLLIDED,
    "NotImplemented": _UNSUPPORTED,
    "InvalidBucketName": (MisconfiguredError, _INVALID_NAME, False),
    "InvalidPart": (PartsError, "the bucket does not have all the parts that it took", False),
    "InvalidObjectState": _ARCHIVED,
    # The credentials' provider or an administrator will renew them.
    **dict.fromkeys(_EXPIRED, (CredentialsError, "the credentials have expired", True)),
    **{code: (CredentialsError, sentence, False) for code, sentence in _REJECTED.items()},
}
# The same by status, for answers without such a code. A HEAD's answer has no body, and so no code.
_BY_STATUS: dict[int, tuple[type[StoreError], str, bool]] = {
    401: _DENIED,
    403: _DENIED,
    404: (NotFoundError, "there is no such object", False),
    407: (UnreachableError, PROXY_PASSWORD, False),
    # Sent by a proxy if a request arrived too slowly, or while the connection was closing.
    408: (UnreachableError, "S3 failed with status 408", True),
    412: _STALE,
    416: _STALE,
    429: _SLOW_DOWN,
    501: _UNSUPPORTED,
    503: _SLOW_DOWN,
}
# Sentences for codes whose kind follows from the status.
_SENTENCES = {
    "NoSuchBucket": "there is no such bucket",
    "NoSuchUpload": "the upload was completed or aborted",
    "EntityTooLarge": "it is larger than the store allows",
    "MetadataTooLarge": "the metadata are larger than the store allows",
    "PermanentRedirect": "the bucket is in another region: set --region",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set --region",
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
}
# The usual status of error codes that are given for single keys, without a status.
_STATUSES = {
    "AccessDenied": 403,
    "InternalError": 500,
    "SlowDown": 503,
    "ServiceUnavailable": 503,
    "NoSuchKey": 404,
    "NoSuchUpload": 404,
    "PreconditionFailed": 412,
}


def from_status(status: int, code: str, request_id: str) -> StoreError:
    """Return the failure that an HTTP status and an S3 error code stand for."""
    usual = (StoreError, f"S3 answered with status {status} {code}".strip(), False)
    if status >= 500:
        usual = (UnreachableError, f"S3 failed with status {status}", True)
    kind, sentence, may_pass = _BY_CODE.get(code) or _BY_STATUS.get(status) or usual
    sentence = _SENTENCES.get(code, sentence)
    return kind(sentence, status, code, request_id, may_pass, has_expired=code in _EXPIRED)


def from_code(code: str) -> StoreError:
    """Return the failure for an error code without a status, as DeleteObjects gives by key."""
    return from_status(_STATUSES.get(code, 400), code, "")


def translate(error: Exception) -> StoreError:
    """Return the failure for an exception: the store's own, botocore's, or an unforeseen one."""
    if isinstance(error, StoreError):
        return replace(error)
    if (known := _from_botocore(error)) is not None:
        return known
    if isinstance(error, OSError) and error.filename is not None:
        return StoreError(f"{error.filename}: {error.strerror}")
    # An unforeseen exception of a library (about a missing header, say) ends one request, not the
    # mount.
    what = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return StoreError(f"S3 can't be used: {what}{_one_line(error)}")


def _from_botocore(error: Exception) -> StoreError | None:
    # Imported late, as it takes half a second; done already if botocore raised the error.
    from botocore import exceptions

    if isinstance(error, exceptions.ClientError):
        failure = _from_answer(error.response)
        if error.operation_name == "AssumeRoleWithWebIdentity" and type(failure) is StoreError:
            # Token services other than AWS's STS have codes of their own for a rejected token.
            what = f"{_REJECTED['InvalidIdentityToken']} ({failure.s3_code or failure.status})"
            return failure.of_kind(CredentialsError, sentence=what)
        return failure
    if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        return NoCredentialsError()
    if isinstance(error, exceptions.ProfileNotFound):
        return AccessDeniedError(f"there is no AWS profile {error.kwargs['profile']!r}")
    if isinstance(error, exceptions.HTTPClientError | exceptions.ConnectionError):
        sentence = f"no answer from the provider of the credentials: {_one_line(error)}"
        is_retryable = not isinstance(error, exceptions.SSLError)
        return UnreachableError(sentence, is_retryable=is_retryable)
    if isinstance(
        error,
        exceptions.SSOError
        | exceptions.TokenRetrievalError
        | exceptions.CredentialRetrievalError
        | exceptions.MetadataRetrievalError
        | exceptions.RefreshWithMFAUnsupportedError,
    ):
        return CredentialsError(f"no credentials: {_one_line(error)}", is_retryable=True)
    if isinstance(error, exceptions.ParamValidationError) and "bucket name" in str(error):
        return MisconfiguredError(_INVALID_NAME)
    if isinstance(error, exceptions.BotoCoreError):
        return StoreError(f"the AWS configuration can't be used: {_one_line(error)}")
    return None


def _from_answer(response: Mapping[str, Any]) -> StoreError:
    """Return the failure in an answer that botocore has parsed."""
    answer = response.get("ResponseMetadata", {})
    code = str(response.get("Error", {}).get("Code") or "")
    if code.isdigit():  # botocore's substitute where the answer has no body
        code = ""
    header = answer.get("HTTPHeaders", {}).get("x-amz-request-id", "")
    request_id = str(answer.get("RequestId") or header)
    return from_status(int(answer.get("HTTPStatusCode", 0)), code, request_id)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(": ")


_CODE = re.compile(r"<Code>([^<]*)</Code>")
_REQUEST_ID = re.compile(r"<RequestId>([^<]*)</RequestId>")
_REGION = re.compile(r"<Region>([a-z0-9-]+)</Region>")
# Statuses of answers to a request that was signed for, or sent to, a wrong region.
_ELSEWHERE = frozenset((301, 302, 307, 400))
_REGION_NAME = re.compile(r"[a-z0-9-]{1,64}")


def from_body(status: int, text: str, request_id: str = "") -> StoreError:
    """Return the failure that a status and S3's error document in `text` stand for."""
    code, document_id = (
        match[1] if (match := p.search(text)) else "" for p in (_CODE, _REQUEST_ID)
    )
    return from_status(status, code, document_id or request_id)


def region_of(status: int, headers: Mapping[str, str], text: str) -> str:
    """Return the bucket's region from the header (AWS) or document of a refusal; "" if unnamed."""
    if status not in _ELSEWHERE:
        return ""
    found = headers.get("x-amz-bucket-region", "")
    if not found and (match := _REGION.search(text)):
        found = match[1]
    return found if _REGION_NAME.fullmatch(found) else ""
