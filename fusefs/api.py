"""What fusefs offers to other programs: the module that the CSI driver imports.

csi/daemons/ alone imports more: it does a part of the keepers' work, and has that of keeper/,
launch/ and linux/.

It has the settings of a mount, starting and unmounting it, requests to its daemon
and its keeper, the kernel's table of mounts, S3's errors, and what the container
of the daemons needs (descriptor store, supervisor protocol). Functions that need
a slow import (boto3's companions, the texts of the commands) import it when called.

All functions block; none of them touches a mount itself, which may be wedged.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusefs import __version__ as __version__
from fusefs.cluster_cache.access import AccessError as ClusterCacheAccessError
from fusefs.cluster_cache.access import read as check_cluster_cache
from fusefs.daemon.log_handlers import OneLineFormatter as OneLineFormatter
from fusefs.exporter.main import address_of as address_of
from fusefs.exporter.queries import Target as MetricsTarget
from fusefs.exporter.queries import target_at as metrics_target
from fusefs.launch import registry
from fusefs.launch.control import MALFORMED as MALFORMED
from fusefs.launch.control import ControlError as ControlError
from fusefs.launch.control import Message as Message
from fusefs.launch.control import NotAnsweringError as NotAnsweringError
from fusefs.launch.launcher import NotUpError as NotUpError
from fusefs.launch.launcher import SupervisorAddress as SupervisorAddress
from fusefs.launch.launcher import resume, start
from fusefs.launch.mount_requests import MountEndedError as MountEndedError
from fusefs.launch.mount_requests import daemon_pid as daemon_pid
from fusefs.launch.mount_requests import daemon_request as daemon_request
from fusefs.launch.mount_requests import keeper_pid as keeper_pid
from fusefs.launch.mount_requests import keeper_status as keeper_status
from fusefs.launch.preflight import LaunchError as LaunchError
from fusefs.launch.preflight import check
from fusefs.launch.registry import MountsError as MountsError
from fusefs.launch.registry import resolve as resolve_path
from fusefs.linux.files import replace as replace_file
from fusefs.linux.fuse_connection import abort as abort_connection
from fusefs.linux.libc import MNT_DETACH as MNT_DETACH
from fusefs.linux.libc import UMOUNT_NOFOLLOW as UMOUNT_NOFOLLOW
from fusefs.linux.libc import umount as umount
from fusefs.linux.mountinfo import KernelMount as KernelMount
from fusefs.linux.mountinfo import kernel_mounts as kernel_mounts
from fusefs.linux.processes import has_ended as has_ended
from fusefs.posix.nodes.names import PRIVATE as PRIVATE
from fusefs.settings.arguments import Parser as Parser
from fusefs.settings.display import human_duration as human_duration
from fusefs.settings.memory import LEAST as LEAST_MEMORY
from fusefs.settings.mount import Layer as Layer
from fusefs.settings.mount import MountSettings as MountSettings
from fusefs.settings.mount import RawValue as RawValue
from fusefs.settings.mount import SettingsError as SettingsError
from fusefs.settings.mount import build as build
from fusefs.settings.sources import split_options as split_options
from fusefs.settings.types import CONNECTIONS as CONNECTIONS
from fusefs.settings.types import DURATION as DURATION
from fusefs.settings.types import FREE_INODES as FREE_INODES
from fusefs.settings.types import MIB as MIB
from fusefs.settings.types import MIN_FREE as MIN_FREE
from fusefs.settings.types import SIZE as SIZE
from fusefs.settings.types import SWITCH as SWITCH
from fusefs.settings.types import URL as URL
from fusefs.settings.types import WORD as WORD
from fusefs.settings.types import Addressing as Addressing
from fusefs.settings.types import MinFree as MinFree
from fusefs.settings.types import MountSource as MountSource
from fusefs.settings.types import SettingType as SettingType
from fusefs.settings.types import at_least as at_least
from fusefs.settings.types import choice as choice
from fusefs.settings.types import parse_source as parse_source
from fusefs.store.customer_key import CustomerKey as CustomerKey
from fusefs.store.customer_key import CustomerKeyError as CustomerKeyError
from fusefs.store.customer_key import parse as parse_customer_key
from fusefs.store.errors import NO_CREDENTIALS as NO_CREDENTIALS
from fusefs.store.errors import AccessDeniedError as AccessDeniedError
from fusefs.store.errors import CredentialsError as CredentialsError
from fusefs.store.errors import ErrorCode as ErrorCode
from fusefs.store.errors import ExistsError as ExistsError
from fusefs.store.errors import NotFoundError as NotFoundError
from fusefs.store.errors import StaleVersionError as StaleVersionError
from fusefs.store.errors import StoreError as StoreError
from fusefs.store.errors import UnsupportedError as UnsupportedError
from fusefs.store.errors import from_code as from_code
from fusefs.store.errors import translate as translate
from fusefs.store.s3.special_buckets import AccessPoint as AccessPoint
from fusefs.store.s3.special_buckets import customer_key_obstacle as customer_key_obstacle
from fusefs.store.s3.special_buckets import obstacle as bucket_obstacle
from fusefs.store.s3.write_options import WriteOptions as WriteOptions

if TYPE_CHECKING:
    from fusefs.store.http.trust import Trust as Trust

# What is called otherwise here; "X as X" above offers a name as it is.
__all__ = [
    "LEAST_MEMORY",
    "ClusterCacheAccessError",
    "MetricsTarget",
    "abort_connection",
    "bucket_obstacle",
    "check_cluster_cache",
    "metrics_target",
    "parse_customer_key",
    "replace_file",
    "resolve_path",
]


# --- mounts -------------------------------------------------------------------


def start_mount(
    settings: MountSettings,
    supervisor: SupervisorAddress | None,
    environment: Mapping[str, str],
    deadline: float,
) -> subprocess.Popen[bytes]:
    """Start a mount where nothing is mounted; return its keeper when it answers.

    `environment` is the keeper's and the daemon's, `deadline` of the monotonic clock. After an
    error nothing of the mount is left.

    Raises:
        NotUpError: it was not up at `deadline`.
        LaunchError, MountsError: it could not be started; `LaunchError.code` says why.
        OSError: a directory cannot be used.
    """
    check(settings)
    return start(settings, supervisor, environment=environment, deadline=deadline)


def resume_mount(
    settings: MountSettings,
    supervisor: SupervisorAddress | None,
    environment: Mapping[str, str],
    deadline: float,
) -> subprocess.Popen[bytes] | None:
    """Go on with a mount that has lost its keeper, and perhaps its daemon; return the new keeper.

    None if it is no such mount. Otherwise as `start_mount`.
    """
    return resume(settings, supervisor, environment=environment, deadline=deadline)


def use_runtime_directory(directory: Path) -> None:
    """Have this process, and those it starts, find and register mounts below `directory`."""
    os.environ[registry.RUNTIME_VARIABLE] = os.fspath(directory)


def remove_registration(mountpoint: Path) -> None:
    """Remove the registration and the sockets of a mount that has ended."""
    registry.unregister(mountpoint)
    registry.keeper_socket(mountpoint).unlink(missing_ok=True)


# --- what `fusefs warm` shows -------------------------------------------------


def describe_warming(jobs: Sequence[Message]) -> str:
    """How far the warming jobs of a daemon's answer are, or how they ended, for people."""
    from fusefs.cli import status_report, warm

    if all(warm.has_ended(job) for job in jobs):
        return "; ".join(
            f"{job['path'] or '.'}: {status_report.warm_progress(job)}" for job in jobs
        )
    return status_report.progress(warm.together(list(jobs)))


# --- metrics ------------------------------------------------------------------


def serve_metrics(
    address: tuple[str, int], targets: Callable[[], list[MetricsTarget]], *collectors: Any
) -> Callable[[], None]:
    """Serve the metrics of mounts, and of more collectors, over HTTP; the result ends that.

    Needs prometheus_client.

    Raises:
        OSError: the address cannot be used.
    """
    from fusefs.exporter.collector import MountCollector, registry_of
    from fusefs.exporter.serving import serve

    return serve(*address, registry_of(MountCollector(targets), *collectors))


# --- S3 clients ---------------------------------------------------------------


def certificates_for(endpoint_url: str | None, bundle: str | None, configured: str) -> Trust | None:
    """The certificates that a mount of this endpoint trusts; None if it needs none.

    `bundle` is the path of a PEM file that was chosen, `configured` that of the
    AWS configuration. Keep the result as long as the client: its path may lie in memory.

    Raises:
        StoreError: the certificates cannot be used.
    """
    from fusefs.store.http import trust

    return trust.find_for(endpoint_url, bundle, configured)


def make_s3_client(make: Callable[[dict[str, Any]], Any], certificates: Trust | None) -> Any:
    """A boto3 client that uses the proxies that mounts use, and refuses foreign redirects.

    So a bucket that the client reaches is one that mounts reach. Its DeleteObjects is one
    that all stores take. `make` makes it
    with more parameters of botocore's `Config`.

    Raises:
        StoreError: a proxy of the environment cannot be used.
    """
    from fusefs.store.http import boto3_client, proxies

    path = certificates.path if certificates else None
    return boto3_client.make(make, proxies.Proxies.of(os.environ), path)
