"""How the kernel is to treat an open file."""

from __future__ import annotations

import pytest

from fusefs.fuse import protocol, read_handlers
from fusefs.fuse.protocol import Fopen
from fusefs.fuse.read_handlers import drops_pages, open_out
from fusefs.posix.types import OpenResult


@pytest.mark.parametrize(
    ("release", "does"),
    [
        ("4.20.0", False),
        ("5.14.0-503.11.1.el9_5.x86_64", False),
        ("6.1.176", False),
        ("6.18", False),
        ("6.18.2-arch1", False),
        ("6.18.3", True),
        ("6.18.44-cloud", True),
        ("6.19.0-rc1", True),
        ("7.0.1", True),
        ("unknown", False),
    ],
)
def test_kernels_that_drop_pages_of_what_is_written_past_them_are_known(
    release: str, *, does: bool
) -> None:
    assert drops_pages(release) == does


@pytest.mark.parametrize("does", [True, False])
def test_what_is_written_goes_past_the_pages_of_a_kernel_that_drops_them(
    monkeypatch: pytest.MonkeyPatch, *, does: bool
) -> None:
    monkeypatch.setattr(read_handlers, "_DROPS_PAGES", does)
    reply = open_out(OpenResult(1, keep_cache=True, may_write=True, is_direct=True))
    _, flags, _ = protocol.OPEN_OUT.unpack_from(reply)
    assert flags == (Fopen.DIRECT_IO if does else Fopen.KEEP_CACHE)
