"""The gRPC server on a Unix socket, with the common part of every call.

Each call is logged in one line. A handler of a service returns its response or raises an exception,
for which `csi.errors` has the gRPC status code.

Calls may take minutes (uploads, warming, deletions), and a node's kubelet makes many at the same
time. The server has more threads than the long calls that may run at a time, so quick calls never
wait for slow calls: above all Probe, without whose answer kubelet kills the container.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from csi.errors import (
    CsiError,
    InvalidArgumentError,
    UnavailableError,
    bounded,
    event_text,
    status_of,
)
from fusefs.store.errors import StoreError

DRIVER_NAME = "s3.csi.fusefs.dev"
# Number of long calls at a time. The provisioner has 100 workers each for creating and deleting.
MAX_CALLS = 100
QUICK_THREADS = 28
# Time limit for every call: a bit less than the two minutes that kubelet gives a call.
LONGEST_CALL_S = 110.0
# A call whose deadline is further away than this counts as a call without a deadline.
NO_DEADLINE_S = 86400.0
# Time between the end of a call's work and the caller's deadline.
MARGIN_S = 3.0
# Time for which calls may continue after SIGTERM; a pod has 30 s by default until SIGKILL.
GRACE_S = 20.0
# Time limit for gRPC's library to cut off the remaining calls.
CUT_OFF_S = 2.0

# Calls that may take long.
_BOUNDED = frozenset(
    (
        "CreateVolume",
        "DeleteVolume",
        "ControllerExpandVolume",
        "NodePublishVolume",
        "NodeUnpublishVolume",
    )
)

log = logging.getLogger(__name__)


class Service(Protocol):
    """A CSI service; `register` adds it to a server."""

    @property
    def register(self) -> Callable[[Any, grpc.Server], Any]: ...


Handler = Callable[[Any, grpc.ServicerContext], Any]


class Server:
    """A server of CSI services at `endpoint`, such as `unix:///path`, from `start` to `stop`."""

    def __init__(self, endpoint: str, services: Sequence[Service]) -> None:
        """Register the services; InvalidArgumentError if `endpoint` is no Unix socket's address."""
        self.path = socket_path(endpoint)
        self._server = grpc.server(
            ThreadPoolExecutor(MAX_CALLS + QUICK_THREADS, thread_name_prefix="call"),
            interceptors=[_Interceptor()],
        )
        for service in services:
            service.register(service, self._server)

    def start(self) -> None:
        """Begin to answer calls; raises OSError if the socket cannot be made."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # an earlier server's socket
            if stat.S_ISSOCK(self.path.lstat().st_mode):
                self.path.unlink()
        # Only this user and its group, which the sidecars have, may call.
        before = os.umask(0o007)
        try:
            self._server.add_insecure_port(f"unix:{self.path}")
        except RuntimeError as error:
            raise OSError(f"{self.path}: {error}") from error
        finally:
            os.umask(before)
        self._server.start()

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Refuse new calls; return when all calls have ended or, after `grace_s`, are cut off."""
        self._server.stop(grace_s).wait(grace_s + CUT_OFF_S)


def end_of(context: grpc.ServicerContext) -> float:
    """Return the time (monotonic) by which a call's work must end to be answered in time."""
    remaining_s = time_left(context)
    if remaining_s is None:
        remaining_s = LONGEST_CALL_S
    return time.monotonic() + max(0.0, min(remaining_s, LONGEST_CALL_S) - MARGIN_S)


def time_left(context: grpc.ServicerContext) -> float | None:
    """Return the seconds until a call's deadline, or None if it has no deadline.

    gRPC's documentation promises None for a call without a deadline, but its library returns some
    290 years, which is more than any wait in Python accepts.
    """
    remaining_s: float | None = context.time_remaining()
    return remaining_s if remaining_s is not None and remaining_s < NO_DEADLINE_S else None


def socket_path(endpoint: str) -> Path:
    """Return the path in `unix:///path`; raise InvalidArgumentError for any other endpoint."""
    path = endpoint.removeprefix("unix://")
    if not path.startswith("/") or len(os.fsencode(path)) > 107:  # the kernel's maximum
        raise InvalidArgumentError(
            f"{endpoint}: the endpoint has to be unix:///path, of at most 107 bytes"
        )
    return Path(path)


class _Interceptor(grpc.ServerInterceptor):
    def __init__(self) -> None:
        self._room = threading.BoundedSemaphore(MAX_CALLS)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        found = continuation(handler_call_details)
        if found is None or found.unary_unary is None:
            return found
        method = handler_call_details.method.rpartition("/")[2]
        handler = found.unary_unary

        def answer(request: Message, context: grpc.ServicerContext) -> Any:
            return self._answer(method, handler, request, context)

        return grpc.unary_unary_rpc_method_handler(
            answer, found.request_deserializer, found.response_serializer
        )

    def _answer(
        self, method: str, handler: Handler, request: Message, context: grpc.ServicerContext
    ) -> Any:
        began = time.monotonic()
        log.debug("%s begins", _line(method, _volume_of(request)))
        try:
            response = self._run(method, handler, request, context)
        except Exception as error:
            code, sentence = status_of(error)
            if not isinstance(error, CsiError | StoreError | NotImplementedError):
                # Without the message, which may quote a header with a token.
                place = (Exception, Exception(type(error).__name__), error.__traceback__)
                log.error("%s failed", method, exc_info=place)
            self._note_end(method, request, code, sentence, began)
            context.abort(code, event_text(sentence))
        self._note_end(method, request, grpc.StatusCode.OK, "", began)
        return response

    def _run(
        self, method: str, handler: Handler, request: Message, context: grpc.ServicerContext
    ) -> Any:
        if method not in _BOUNDED:
            return handler(request, context)
        if not self._room.acquire(blocking=False):
            raise UnavailableError(f"{MAX_CALLS} calls are under way")
        try:
            return handler(request, context)
        finally:
            self._room.release()

    def _note_end(
        self, method: str, request: Message, code: grpc.StatusCode, sentence: str, began: float
    ) -> None:
        volume = _volume_of(request)
        # Calls for no volume are frequent, and are logged only for debugging if they succeed.
        level = logging.INFO if volume or code is not grpc.StatusCode.OK else logging.DEBUG
        line = _line(method, volume, code.name, bounded(sentence))
        log.log(level, "%s (%.0f ms)", line, 1000 * (time.monotonic() - began))


def _volume_of(request: Message) -> str:
    return bounded(getattr(request, "volume_id", "") or getattr(request, "name", ""))


def _line(*parts: str) -> str:
    """Join the parts to one line; a caller's line feeds must not forge other lines of the log."""
    line = " ".join(filter(None, parts))
    return "".join(character if character.isprintable() else "?" for character in line)
