"""Makes new data sets look a day old, because nobody trains on data uploaded a moment ago.

A mount checks objects that were modified within the last hour more often than older ones
(docs/several-nodes.md). The server's filer is told by its gRPC service that the objects of a bucket
were modified a day ago (SeaweedFS, weed/pb/filer.proto).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

AGE_S = 86_400
THREADS = 8

# The fields that are needed here; a message keeps the fields that it does not know.
_FIELDS: dict[str, tuple[tuple[str, int, str], ...]] = {
    "FuseAttributes": (("mtime", 2, "int64"),),
    "Entry": (
        ("name", 1, "string"),
        ("is_directory", 2, "bool"),
        ("attributes", 4, "FuseAttributes"),
    ),
    "ListEntriesRequest": (("directory", 1, "string"),),
    "ListEntriesResponse": (("entry", 1, "Entry"),),
    "UpdateEntryRequest": (("directory", 1, "string"), ("entry", 2, "Entry")),
    "UpdateEntryResponse": (),
}
_PACKAGE = "filer_pb"


def age(filer: str, bucket: str) -> None:
    """Set the mtime of all objects of a bucket to `AGE_S` ago; `filer` is its gRPC address.

    Raises:
        grpc.RpcError: the filer refuses or does not answer.
    """
    with grpc.insecure_channel(filer) as channel, ThreadPoolExecutor(THREADS) as threads:
        service = _Filer(channel)
        for folder, entries in service.folders(f"/buckets/{bucket}"):
            list(threads.map(service.age, repeat(folder), entries))


class _Filer:
    """The two calls of the filer that are needed."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._messages = _messages()
        self._mtime = int(time.time()) - AGE_S
        service = f"/{_PACKAGE}.SeaweedFiler"
        answers = self._messages
        self._list = channel.unary_stream(
            f"{service}/ListEntries", _bytes_of, answers["ListEntriesResponse"].FromString
        )
        self._update = channel.unary_unary(
            f"{service}/UpdateEntry", _bytes_of, answers["UpdateEntryResponse"].FromString
        )

    def folders(self, folder: str) -> Iterator[tuple[str, list[Any]]]:
        """Yield a folder with its objects, and all folders below it with theirs."""
        request = self._messages["ListEntriesRequest"](directory=folder)
        entries = [answer.entry for answer in self._list(request)]
        yield folder, [entry for entry in entries if not entry.is_directory]
        for entry in entries:
            if entry.is_directory:
                yield from self.folders(f"{folder}/{entry.name}")

    def age(self, folder: str, entry: Any) -> None:
        entry.attributes.mtime = self._mtime
        self._update(self._messages["UpdateEntryRequest"](directory=folder, entry=entry))


def _bytes_of(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _messages() -> dict[str, Any]:
    """Make the classes of the messages, by name."""
    file = descriptor_pb2.FileDescriptorProto(name="filer.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            described = message.field.add(name=field, number=number, label=1)
            if kind in _FIELDS:
                described.type, described.type_name = described.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                described.type = getattr(described, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    descriptors = (pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _FIELDS)
    return {found.name: message_factory.GetMessageClass(found) for found in descriptors}
