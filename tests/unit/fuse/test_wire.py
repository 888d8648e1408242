"""The wire structs against the kernel's own list of them."""

import json
import os
import struct
from pathlib import Path

import pytest

from fusefs.fuse import protocol
from fusefs.fuse.busy_poll import FIRST_PAUSE, LONGEST_NS, MOST_NS, BusyPoll
from fusefs.keeper import broker

ABI = json.loads((Path(__file__).parents[2] / "data" / "fuse-abi-7.45.json").read_text())
SIZES = {"uint64_t": 8, "int64_t": 8, "uint32_t": 4, "int32_t": 4, "uint16_t": 2, "uint8_t": 1}


def kernel_offsets(name: str) -> tuple[dict[str, int], int]:
    """The offset of each scalar field of the kernel's struct, and the struct's size."""
    offsets: dict[str, int] = {}
    at = 0
    for field in ABI["structs"][name]:
        if field["type"].startswith("struct"):
            at += kernel_offsets(field["type"].split()[1])[1]
            continue
        size = SIZES.get(field["type"], 0)
        offsets[field["name"]] = at
        at += size * int(field.get("array") or 1)
    return offsets, at


@pytest.mark.parametrize("layout", protocol.LAYOUTS, ids=lambda layout: layout.name)
def test_a_struct_has_the_kernels_offsets_and_size(layout: protocol.Layout) -> None:
    expected, size = kernel_offsets(layout.name)
    ours = layout.offsets()
    assert ours == {name: at for name, at in expected.items() if name in ours}
    if layout.name in ("fuse_entry_out", "fuse_attr_out"):
        size -= protocol.ATTR.size
    if layout.name == "fuse_dirent":
        assert ours.keys() | {"name"} == expected.keys()
    else:
        assert set(ours) == set(expected)
    assert layout.size == size


@pytest.mark.parametrize("opcode", protocol.Opcode)
def test_an_opcode_has_the_kernels_number(opcode: protocol.Opcode) -> None:
    assert ABI["enums"]["fuse_opcode"][f"FUSE_{opcode.name}"] == opcode


@pytest.mark.parametrize(
    ("flag", "prefix"),
    [(flag, "FUSE") for flag in protocol.Init] + [(flag, "FOPEN") for flag in protocol.Fopen],
)
def test_a_flag_has_the_kernels_value(flag: int, prefix: str) -> None:
    assert ABI["constants"][f"{prefix}_{flag.name}"] == flag


def test_the_resend_mark_is_the_kernels() -> None:
    assert ABI["constants"]["FUSE_UNIQUE_RESEND"] == protocol.UNIQUE_RESEND


def test_the_backing_ioctls_have_the_kernels_numbers() -> None:
    def iow(number: int, size: int) -> int:
        return (1 << 30) | (size << 16) | (ABI["constants"]["FUSE_DEV_IOC_MAGIC"] << 8) | number

    assert iow(1, broker.BACKING_MAP.size) == broker.DEV_IOC_BACKING_OPEN
    assert iow(2, struct.calcsize("=I")) == broker.DEV_IOC_BACKING_CLOSE


@pytest.fixture
def busy_poll(monkeypatch: pytest.MonkeyPatch) -> BusyPoll:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    return BusyPoll()


def poll_in_vain(busy_poll: BusyPoll, count: int) -> int:
    """Wait for a request that does not come; return how many of the waits were polled."""
    polled = 0
    for _ in range(count):
        if busy_poll.is_worth_it():
            busy_poll.account(1, 0, LONGEST_NS)
            polled += 1
    return polled


def test_polling_stops_where_no_request_comes(busy_poll: BusyPoll) -> None:
    # A loss is noticed after 2 ms of polling at the latest.
    first = poll_in_vain(busy_poll, 1000)
    assert first <= 2 * (MOST_NS // LONGEST_NS) * (1 + 1000 // FIRST_PAUSE)
    # The longer it was in vain, the rarer it is tried again.
    poll_in_vain(busy_poll, 20_000)
    assert poll_in_vain(busy_poll, 20_000) <= 20_000 // 20


def test_polling_begins_again_with_the_requests(busy_poll: BusyPoll) -> None:
    poll_in_vain(busy_poll, 1000)
    polled = 0
    for _ in range(10_000):
        if busy_poll.is_worth_it():
            busy_poll.account(1, 1, LONGEST_NS // 10)
            polled += 1
    assert polled > 5_000


def test_one_processor_is_not_polled_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    assert not BusyPoll().is_worth_it()
