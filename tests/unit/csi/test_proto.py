"""proto/ says what the interfaces are: names, numbers, types and marks.

tests/data/csi-1.12.0.txt is the part of CSI 1.12.0 that the driver serves, a
line for each thing, and pluginregistration-v1.txt kubelet's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from csi.generated import csi_pb2, pluginregistration_pb2

DATA = Path(__file__).parents[2] / "data"
SCALARS = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_INT64: "int64",
}


class Teller:
    """A file's descriptor, in the words of the data."""

    def __init__(self, file: FileDescriptor) -> None:
        self._file = file

    def lines(self) -> Iterator[str]:
        for extension in self._file.extensions_by_name.values():
            kind, of = SCALARS[extension.type], extension.containing_type.full_name
            yield f"extension {extension.name} {extension.number} {kind} of {of}"
        for service in self._file.services_by_name.values():
            for rpc in service.methods:
                types = f"{self._short(rpc.input_type)} {self._short(rpc.output_type)}"
                yield f"rpc {service.name}.{rpc.name} {types}{self._marks(rpc)}"
        for message in self._file.message_types_by_name.values():
            yield from self._message(message)

    def _message(self, message: Descriptor) -> Iterator[str]:
        if message.GetOptions().map_entry:
            return
        name = self._short(message)
        yield f"message {name}{self._marks(message)}"
        for field in message.fields:
            one_of = f" in {field.containing_oneof.name}" if field.containing_oneof else ""
            what = f"{field.number} {self._type(field)}{one_of}"
            yield f"field {name}.{field.name} {what}{self._marks(field)}"
        for enum in message.enum_types:
            for value in enum.values:
                yield f"value {name}.{enum.name}.{value.name} {value.number}{self._marks(value)}"
        for inner in message.nested_types:
            yield from self._message(inner)

    def _type(self, field: FieldDescriptor) -> str:
        kind: Any = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            key, value = (self._type(part) for part in kind.fields)
            return f"map<{key}, {value}>"
        kind = kind or field.enum_type
        name = SCALARS[field.type] if kind is None else self._short(kind)
        return f"repeated {name}" if field.is_repeated else name

    def _short(self, kind: Any) -> str:
        return str(kind.full_name).removeprefix(self._file.package + ".")

    def _marks(self, what: Any) -> str:
        options = what.GetOptions()
        marks = sorted(
            extension.name
            for extension in self._file.extensions_by_name.values()
            if extension.containing_type is options.DESCRIPTOR and options.Extensions[extension]
        )
        return f" [{' '.join(marks)}]" if marks else ""


@pytest.mark.parametrize(
    ("module", "data"),
    [(csi_pb2, "csi-1.12.0.txt"), (pluginregistration_pb2, "pluginregistration-v1.txt")],
)
def test_the_interface_is_that_of_the_specification(module: Any, data: str) -> None:
    lines = set(Teller(module.DESCRIPTOR).lines())
    assert lines == set((DATA / data).read_text().splitlines())


def test_every_field_with_secrets_is_marked() -> None:
    """Logs rely on the mark."""
    for message in csi_pb2.DESCRIPTOR.message_types_by_name.values():
        for field in message.fields:
            if field.name == "secrets":
                assert field.GetOptions().Extensions[csi_pb2.csi_secret], message.name
