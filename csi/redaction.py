"""Messages as a log may show them: without secrets and tokens.

What is secret is read from the interface: fields marked `csi_secret` in
proto/csi.proto. Kubelet also puts tokens of service accounts into maps without
that mark, so a map's value is hidden if its key speaks of a secret.
"""

from __future__ import annotations

import json
import re
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from csi.generated import csi_pb2

HIDDEN = "***"
# The generated stubs know extensions only as descriptors.
_IS_SECRET: Any = csi_pb2.csi_secret
_SECRET_KEY = re.compile(r"token|secret|password|credential|customer.?key", re.IGNORECASE)


def redacted(message: Message) -> str:
    """`message` on one line, as JSON; field names are the interface's."""
    return json.dumps(_fields(message), ensure_ascii=False)


def _fields(message: Message) -> dict[str, Any]:
    return {field.name: _value(field, value) for field, value in message.ListFields()}


def _value(field: FieldDescriptor, value: Any) -> Any:
    is_secret = bool(field.GetOptions().Extensions[_IS_SECRET])
    if _is_map(field):
        return {
            key: HIDDEN if is_secret or _SECRET_KEY.search(key) else str(item)
            for key, item in sorted(value.items())
        }
    if is_secret:
        return HIDDEN
    if field.is_repeated:
        return [_single(field, item) for item in value]
    return _single(field, value)


def _single(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return _fields(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known else value
    return value


def _is_map(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return kind is not None and kind.GetOptions().map_entry
