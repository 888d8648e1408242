"""The contenders: the bare disk, the bare client, fusefs in its variants, the peers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.contenders.contender import BareClient, Contender, Native, Place
from bench.contenders.csi_node import CsiNode
from bench.contenders.fusefs import Fusefs
from bench.contenders.peers import Geesefs, Juicefs, MountpointS3, Rclone, S3fs

NATIVE = "native"
OBSTORE = "obstore"
KERNEL = "fusefs-kernel"
NO_PASSTHROUGH = "fusefs-nopt"
# With this one close waits only for the local disk; it is measured for writing only.
LOCAL = "fusefs-local"
# With the default of a writable mount; the others are read-only unless they are written to.
WRITABLE = "fusefs-writable"
PYFUSE3 = "fusefs-pyfuse3"
CSI = "fusefs-csi"
# Another version, from a checkout that a run names; in every row of fusefs-kernel.
BEFORE = "fusefs-before"
PEERS = ("mountpoint-s3", "geesefs", "rclone", "s3fs")
# Has its own format in the bucket, so only cached reads can be compared.
JUICEFS = "juicefs"


def _fusefs(*options: str, session: str = "kernel") -> Callable[[str, Place], Contender]:
    return lambda name, place: Fusefs(name, place, ["--session", session, *options])


def other_version(checkout: Path, place: Place) -> Contender:
    """Return fusefs as installed in the `.venv` of another checkout."""
    contender = Fusefs(BEFORE, place, ["--session", "kernel"], prefix=checkout / ".venv")
    contender.row_name = KERNEL
    return contender


# In the order of the table's columns.
CONTENDERS: dict[str, Callable[[str, Place], Contender]] = {
    NATIVE: Native,
    OBSTORE: BareClient,
    KERNEL: _fusefs(),
    NO_PASSTHROUGH: _fusefs("--passthrough", "off"),
    LOCAL: _fusefs("--durability", "local"),
    WRITABLE: _fusefs("--no-read-only"),  # the last of two options wins
    PYFUSE3: _fusefs(session="pyfuse3"),
    CSI: CsiNode,
    "mountpoint-s3": MountpointS3,
    "geesefs": Geesefs,
    "rclone": Rclone,
    "s3fs": S3fs,
    JUICEFS: Juicefs,
}
