"""The errors of CSI calls, each with a gRPC status code and a sentence.

The code decides what the caller does next. After ABORTED, UNAVAILABLE, CANCELLED, DEADLINE_EXCEEDED
and RESOURCE_EXHAUSTED kubelet and the provisioner regard the operation as unfinished and call
again; after any other code they regard it as failed, clean up, and may never call again. So an
error that is not known to be final, unexpected exceptions included, is UNAVAILABLE.
"""

from __future__ import annotations

import re

import grpc

from fusefs.store.errors import ErrorCode, StoreError

# The status codes for errors of the store, or of a mount's daemon.
_STATUSES = {
    ErrorCode.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.DENIED: grpc.StatusCode.PERMISSION_DENIED,
    ErrorCode.CREDENTIALS: grpc.StatusCode.UNAUTHENTICATED,
    ErrorCode.UNSUPPORTED: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}


class CsiError(Exception):
    """A call failed; `code` is the gRPC status code, the message is for people."""

    code: grpc.StatusCode


class InvalidArgumentError(CsiError):
    """A field is missing, or has a value that this driver does not accept."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class VolumeNotFoundError(CsiError):
    """The volume does not exist, or is not published at the path."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExistsError(CsiError):
    """Another volume or mount already exists under this name or path."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPreconditionError(CsiError):
    """The volume's state, or the store, does not allow the call."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class OutOfRangeError(CsiError):
    """The requested size is not possible for a volume."""

    code = grpc.StatusCode.OUT_OF_RANGE


class AbortedError(CsiError):
    """Another call for the volume, or this call's own work, is still under way: call again."""

    code = grpc.StatusCode.ABORTED


class UnavailableError(CsiError):
    """The call failed this time and may succeed later: call again."""

    code = grpc.StatusCode.UNAVAILABLE


class ResourceExhaustedError(CsiError):
    """The node has no room for another mount or user at the moment."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class MountError(CsiError):
    """A mount could not be made; message and code are from the launcher or the mount's daemon."""

    def __init__(self, sentence: str, reason: ErrorCode) -> None:
        super().__init__(sentence)
        self.code = _STATUSES[reason]


class UnauthenticatedError(CsiError):
    """The credentials are rejected or missing."""

    code = grpc.StatusCode.UNAUTHENTICATED


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Return the status code and the message with which a call that raised `error` ends."""
    if isinstance(error, CsiError):
        return error.code, str(error) or error.code.name
    if isinstance(error, StoreError):
        return _STATUSES[error.code], str(error)
    if isinstance(error, NotImplementedError):
        return grpc.StatusCode.UNIMPLEMENTED, str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return grpc.StatusCode.UNAVAILABLE, f"{where}{error.strerror}"
    return grpc.StatusCode.UNAVAILABLE, f"the driver failed: {type(error).__name__}; see its log"


# A request's id in the store's messages.
_REQUEST_ID = re.compile(r" \(request [^\s()]+\)")
_NO_ANSWER = re.compile(r"no answer from \S+ in time")
# The maximum number of bytes of a Kubernetes event's text. gRPC drops a status whose text is over 8
# KiB once each non-ASCII byte is escaped as three.
_MOST = 1024
_GAP = " … "


def bounded(sentence: str) -> str:
    """Return the sentence; if it is over 1024 bytes, return only its beginning and its end."""
    text = sentence.encode(errors="replace")
    if len(text) <= _MOST:
        return sentence
    half = (_MOST - len(_GAP.encode())) // 2
    ends = (text[:half], text[-half:])
    return _GAP.join(end.decode(errors="ignore") for end in ends)


def event_text(sentence: str) -> str:
    """Return an error's sentence for the caller, which shows it in an event of a pod or a claim.

    The request id, which is in the driver's log, is left out: Kubelet counts events with equal
    texts as one event, but would keep an event for each id. If the store did not answer in time,
    the sentence names a NetworkPolicy as a possible cause.
    """
    sentence = _REQUEST_ID.sub("", sentence)
    return bounded(
        _NO_ANSWER.sub(
            lambda found: f"{found[0]} (the port may be blocked by a NetworkPolicy)", sentence
        )
    )
