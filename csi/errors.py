"""The errors of calls, as a gRPC status code and a sentence.

The code decides what the caller does next. After ABORTED, UNAVAILABLE,
CANCELLED and DEADLINE_EXCEEDED kubelet and the provisioner take the operation
for unfinished and call again; after any other code they take it for failed,
clean up, and may never call again. So what is not known to be final, an
unexpected exceptions included, is UNAVAILABLE.
"""

from __future__ import annotations

import re

import grpc

from fusefs.store.errors import ErrorCode, StoreError

# What an error of the store, or of a mount's daemon, means to the caller.
_STATUSES = {
    ErrorCode.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.DENIED: grpc.StatusCode.PERMISSION_DENIED,
    ErrorCode.CREDENTIALS: grpc.StatusCode.UNAUTHENTICATED,
    ErrorCode.UNSUPPORTED: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}


class CsiError(Exception):
    """A call cannot be answered; `code` says what that means, the message is for people."""

    code: grpc.StatusCode


class InvalidArgumentError(CsiError):
    """A field is missing, or has a value that this driver does not take."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class VolumeNotFoundError(CsiError):
    """There is no such volume, or not at that path."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExistsError(CsiError):
    """Something else was made earlier under this name or path."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPreconditionError(CsiError):
    """The volume's state, or the store, does not allow it."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class OutOfRangeError(CsiError):
    """No volume can have this size."""

    code = grpc.StatusCode.OUT_OF_RANGE


class AbortedError(CsiError):
    """Another call for the volume, or its work, is under way: call again."""

    code = grpc.StatusCode.ABORTED


class UnavailableError(CsiError):
    """It did not work this time: call again."""

    code = grpc.StatusCode.UNAVAILABLE


class ResourceExhaustedError(CsiError):
    """The node has no room for it at the moment."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class MountError(CsiError):
    """A mount could not be made, for a reason that its daemon gives."""

    def __init__(self, sentence: str, reason: ErrorCode) -> None:
        super().__init__(sentence)
        self.code = _STATUSES[reason]


class UnauthenticatedError(CsiError):
    """The credentials are rejected, or there are none."""

    code = grpc.StatusCode.UNAUTHENTICATED


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """The status that a call ends with that raised `error`."""
    if isinstance(error, CsiError):
        return error.code, str(error) or error.code.name
    if isinstance(error, StoreError):
        return _STATUSES[error.code], str(error)
    if isinstance(error, NotImplementedError):
        return grpc.StatusCode.UNIMPLEMENTED, str(error)
    return grpc.StatusCode.UNAVAILABLE, f"the driver failed: {type(error).__name__}; see its log"


# As the store's errors give it.
_REQUEST_ID = re.compile(r" \(request [^\s()]+\)")
_NO_ANSWER = re.compile(r"no answer from \S+ in time")
# The most bytes that Kubernetes takes for the text of an event. gRPC drops a status whose text
# has over 8 KiB, after each byte that is not ASCII has become three.
_MOST = 1024
_GAP = " … "


def bounded(sentence: str) -> str:
    """A sentence of at most 1024 bytes: of what is longer, as it quotes a value, both ends."""
    text = sentence.encode(errors="replace")
    if len(text) <= _MOST:
        return sentence
    half = (_MOST - len(_GAP.encode())) // 2
    ends = (text[:half], text[-half:])
    return _GAP.join(end.decode(errors="ignore") for end in ends)


def event_text(sentence: str) -> str:
    """The sentence of an error as a caller gets it, which becomes an event of a pod or a claim.

    Kubelet counts equal events and keeps each different one, so the id of a request,
    which is in the driver's log, is left out. A connection that is dropped without an
    answer is what a network policy does.
    """
    sentence = _REQUEST_ID.sub("", sentence)
    return bounded(
        _NO_ANSWER.sub(
            lambda found: f"{found[0]} (the port may be blocked by a NetworkPolicy)", sentence
        )
    )
