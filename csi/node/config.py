"""The administrator's settings for a node: directories, users, and limits for each mount.

The node's budget of memory and connections is the limit for one mount times the maximum number of
mounts; for disks the setting is the free space that caches have to leave.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from csi.errors import FailedPreconditionError
from csi.identities.cluster_caches import ClusterCaches, read_cluster_caches
from csi.identities.credentials import POD_IDENTITY_AGENT
from csi.node.pod_records import InlineBounds
from csi.volume.options import NodeShares
from fusefs.exporter.main import address_of
from fusefs.launch.launcher import SupervisorAddress
from fusefs.launch.registry import resolve as resolve_path
from fusefs.linux.mountinfo import kernel_mounts, mount_above
from fusefs.settings.memory import LEAST as LEAST_MEMORY
from fusefs.settings.types import (
    CONNECTIONS,
    MIB,
    MIN_FREE,
    SIZE,
    SettingType,
    at_least,
    whole_number,
)

# The socket of `fusefs-csi daemons`, below the state directory.
SUPERVISOR = "daemons.sock"
# Directories below the state directory: the registry of mounts, and the driver's records.
RUNTIME = "fusefs"
MOUNT_RECORDS = "mounts"
POD_RECORDS = "pods"

LOCK = "driver.lock"

CACHE = Path("/var/cache/fusefs")

log = logging.getLogger(__name__)

_MEMORY_SYSTEMS = ("tmpfs", "ramfs")
# The default uids are unused on a usual machine: systemd's documentation of uids leaves them free.
FIRST_UID, LAST_UID = 1_900_000_000, 1_900_009_999
_MOST_UIDS = 100_000
# The largest value of limits: a node cannot have more mounts or inline volumes.
_MOST = 1_000_000


@dataclass(frozen=True, slots=True)
class NodeConfiguration:
    """Settings of the node service. `uids` are the first and the last uid of cache domains."""

    node_id: str
    kubelet_directory: Path
    state_directory: Path
    mounts_directory: Path
    cache_directory: Path
    uids: tuple[int, int]
    shares: NodeShares
    most_volumes: int
    inline_bounds: InlineBounds
    daemons: str = "either"
    pod_identity_agent: str = POD_IDENTITY_AGENT
    cache_host_path: Path | None = None
    cluster_caches: ClusterCaches = field(default_factory=ClusterCaches)

    @property
    def supervisor(self) -> SupervisorAddress:
        """The address of the supervisor, `fusefs-csi daemons`."""
        return SupervisorAddress(self.state_directory / SUPERVISOR, self.daemons == "there")

    def prepare(self) -> None:
        """Make the directories of state and mounts, and check the cache's disk.

        Raises:
            FailedPreconditionError: secrets would be on a disk, or the cache on the system's disk.
            OSError: a directory cannot be made.
        """
        self.state_directory.mkdir(parents=True, exist_ok=True)
        self.state_directory.chmod(0o711)
        holding = mount_above(self.state_directory)
        if holding is None or holding.filesystem not in _MEMORY_SYSTEMS:
            raise FailedPreconditionError(
                f"--state-dir {self.state_directory}: credentials are kept there, so it has to be"
                " on a tmpfs, like /run"
            )
        self.mounts_directory.mkdir(parents=True, exist_ok=True)
        if self.cache_host_path is not None:
            check_disk(self.cache_directory, self.cache_host_path)


def be_the_only_driver(state: Path) -> None:
    """Lock the node's state directory; wait for the end of another driver that has the lock.

    Two drivers, which overlapping node pools or a forced deletion of a pod can cause, would each
    end mounts that the other driver is just making. The lock ends with this process. Raises OSError
    if the lock's file cannot be made.
    """
    fd = os.open(state / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.error("another driver serves this node; waiting for its end")
        fcntl.flock(fd, fcntl.LOCK_EX)


def check_disk(directory: Path, host_path: Path) -> None:
    """Raise FailedPreconditionError unless the cache `directory` is mounted from a disk of its own.

    `directory` is a bind mount of `host_path`; mountinfo names its root: the path of the mounted
    directory within its file system. On the system's disk this ends with the whole `host_path`; on
    a disk mounted at or above `host_path` it is "/", or only the last part of `host_path`. So where
    the host itself binds a directory of another disk to `host_path`, the directory's path on that
    disk must not end with `host_path`. Device numbers do not help: the container does not see the
    system's root, and kubelet's directory may be on either disk.
    """
    roots = [mount.root for mount in kernel_mounts() if mount.mountpoint == directory]
    if not roots:
        raise FailedPreconditionError(
            f"--cache-dir {directory}: is no mountpoint, so no disk can be found at {host_path} of"
            " the host (--cache-host-path)"
        )
    if roots[-1].endswith(str(host_path)):
        raise FailedPreconditionError(
            f"--cache-dir {directory}: no disk is mounted at {host_path} of the host or above it,"
            " so the cache would fill the system's disk (--cache-host-path)"
        )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `fusefs-csi node`."""
    group = parser.add_argument_group("node")
    group.add_argument("--node-id", required=True, metavar="NAME", help="this node's name")
    _add_places(group)
    _add_limits(group)
    group.add_argument(
        "--metrics",
        type=address_of,
        metavar="ADDRESS:PORT",
        help="serve metrics for Prometheus at http://ADDRESS:PORT/metrics; :PORT is all addresses",
    )


def _add(
    group: argparse._ArgumentGroup,
    flag: str,
    kind: Callable[[str], object],
    default: object,
    metavar: str,
    text: str,
    otherwise: str = "%(default)s",
) -> None:
    group.add_argument(
        flag, type=kind, default=default, metavar=metavar, help=f"{text} (default: {otherwise})"
    )


def _add_places(group: argparse._ArgumentGroup) -> None:
    """Add the flags for directories, users, cluster caches, daemons and Pod Identity."""
    kubelet = Path("/var/lib/kubelet")
    add = partial(_add, group)
    add("--kubelet-dir", Path, kubelet, "DIR", "kubelet's directory, with all target paths")
    add(
        "--mounts-dir",
        Path,
        kubelet / "plugins/s3.csi.fusefs.dev/mounts",
        "DIR",
        "directory for the mounts that are bound to target paths",
    )
    add("--cache-dir", Path, CACHE, "DIR", "directory for cached objects")
    add_host_path_flag(group)
    group.add_argument(
        "--cluster-caches",
        type=Path,
        metavar="FILE",
        help="file that maps cache domains of volumes to cluster caches (TOML)",
    )
    add(
        "--uid-range",
        _uids,
        f"{FIRST_UID}-{LAST_UID}",
        "FIRST-LAST",
        "users that daemons run as, one for each identity and bucket",
    )
    group.add_argument(
        "--daemons",
        choices=("there", "either"),
        default="either",
        help="where the mounts' daemons run: there, in `fusefs-csi daemons`, for which mounts wait;"
        " or either, there if it runs, else in this container (default: %(default)s)",
    )
    add(
        "--pod-identity-agent",
        str,
        POD_IDENTITY_AGENT,
        "URL",
        "where EKS Pod Identity's agent gives credentials for the tokens of pods",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    """Add the flags for limits of a mount, a pod, a namespace and the caches."""
    add = partial(_add, group)
    add(
        "--max-volumes",
        _value_of(whole_number(1, _MOST)),
        100,
        "N",
        "maximum number of mounts; times the limits of a mount, it is the node's budget",
    )
    for whose, most in (("pod", 8), ("namespace", 32)):
        add(
            f"--max-inline-per-{whose}",
            _value_of(whole_number(1, _MOST)),
            most,
            "N",
            f"maximum number of inline volumes that one {whose} may have on a node",
        )
    add(
        "--memory-limit",
        _value_of(at_least(LEAST_MEMORY, SIZE)),
        256 * MIB,
        "SIZE",
        "memory that the daemon of a mount may use",
        SIZE.show(256 * MIB),
    )
    add(
        "--max-connections",
        _value_of(CONNECTIONS),
        128,
        "N",
        "maximum number of simultaneous S3 requests of a mount",
    )
    add(
        "--cache-size",
        _value_of(SIZE),
        None,
        "SIZE",
        "maximum size of the cache of one identity",
        "what the disk allows",
    )
    add("--min-free", _value_of(MIN_FREE), "20%", "SIZE|N%", "disk space that caches leave free")


def add_host_path_flag(group: argparse._ActionsContainer) -> None:
    """Add `--cache-host-path`, which every process that writes to the cache has."""
    group.add_argument(
        "--cache-host-path",
        type=Path,
        metavar="PATH",
        help="the path that --cache-dir has on the host: start only if a disk is mounted there or"
        " above it, so that the cache never fills the system's disk",
    )


def _uids(text: str) -> tuple[int, int]:
    first, separator, last = text.partition("-")
    if not separator or not first.isdecimal() or not last.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1900000000-1900009999")
    if not 0 < int(first) <= int(last) < 2**32 - 2 or int(last) - int(first) >= _MOST_UIDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of at most {_MOST_UIDS} users")
    return int(first), int(last)


def _value_of(kind: SettingType[Any]) -> Callable[[str], Any]:
    """Return a parser of settings of type `kind` for argparse, which raises argparse's error."""

    def read(text: str) -> object:
        try:
            return kind.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def configuration_of(arguments: argparse.Namespace) -> NodeConfiguration:
    """Return the configuration from a command line.

    Raises:
        ConfigurationError: the file of cluster caches, or one that it names, cannot be used.
    """
    return NodeConfiguration(
        arguments.node_id,
        Path(os.path.abspath(arguments.kubelet_dir)),
        resolve_path(arguments.state_dir),
        resolve_path(arguments.mounts_dir),
        resolve_path(arguments.cache_dir),
        arguments.uid_range,
        NodeShares(
            arguments.memory_limit,
            arguments.max_connections,
            arguments.cache_size,
            arguments.min_free,
        ),
        arguments.max_volumes,
        InlineBounds(arguments.max_inline_per_pod, arguments.max_inline_per_namespace),
        arguments.daemons,
        arguments.pod_identity_agent,
        arguments.cache_host_path,
        read_cluster_caches(arguments.cluster_caches),
    )
