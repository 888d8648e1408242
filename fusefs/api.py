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

from fusefs import __version__
from fusefs.cluster_cache.access import AccessError as ClusterCacheAccessError
from fusefs.cluster_cache.access import read as check_cluster_cache
from fusefs.daemon.log_handlers import OneLineFormatter
from fusefs.exporter.main import address_of
from fusefs.exporter.queries import Target as MetricsTarget
from fusefs.exporter.queries import target_at as metrics_target
from fusefs.launch import registry
from fusefs.launch.control import MALFORMED, ControlError, Message, NotAnsweringError
from fusefs.launch.launcher import NotUpError, SupervisorAddress, resume, start
from fusefs.launch.mount_requests import (
    MountEndedError,
    daemon_pid,
    daemon_request,
    keeper_pid,
    keeper_request,
    keeper_status,
)
from fusefs.launch.preflight import LaunchError, check
from fusefs.launch.registry import MountsError
from fusefs.launch.registry import resolve as resolve_path
from fusefs.linux.files import replace as replace_file
from fusefs.linux.libc import MNT_DETACH, UMOUNT_NOFOLLOW, umount
from fusefs.linux.mountinfo import KernelMount, kernel_mounts
from fusefs.linux.processes import has_ended
from fusefs.posix.nodes.names import PRIVATE
from fusefs.settings.memory import LEAST as LEAST_MEMORY
from fusefs.settings.mount import Layer, MountSettings, RawValue, SettingsError, build
from fusefs.settings.sources import split_options
from fusefs.settings.types import (
    CONNECTIONS,
    DURATION,
    MIB,
    MIN_FREE,
    SHARE,
    SIZE,
    SWITCH,
    URL,
    WORD,
    Addressing,
    MinFree,
    MountSource,
    SettingType,
    at_least,
    choice,
    parse_source,
)
from fusefs.store.customer_key import CustomerKey, CustomerKeyError
from fusefs.store.customer_key import parse as parse_customer_key
from fusefs.store.errors import (
    NO_CREDENTIALS,
    AccessDeniedError,
    CredentialsError,
    ErrorCode,
    ExistsError,
    NotFoundError,
    StaleVersionError,
    StoreError,
    UnsupportedError,
    from_code,
    translate,
)
from fusefs.store.s3.special_buckets import AccessPoint, customer_key_obstacle
from fusefs.store.s3.special_buckets import obstacle as bucket_obstacle
from fusefs.store.s3.write_options import WriteOptions

if TYPE_CHECKING:
    import argparse

    from fusefs.store.http.trust import Trust as Trust

__all__ = [
    "CONNECTIONS",
    "DURATION",
    "LEAST_MEMORY",
    "MALFORMED",
    "MIB",
    "MIN_FREE",
    "MNT_DETACH",
    "NO_CREDENTIALS",
    "PRIVATE",
    "SHARE",
    "SIZE",
    "SWITCH",
    "UMOUNT_NOFOLLOW",
    "URL",
    "WORD",
    "AccessDeniedError",
    "AccessPoint",
    "Addressing",
    "ClusterCacheAccessError",
    "ControlError",
    "CredentialsError",
    "CustomerKey",
    "CustomerKeyError",
    "ErrorCode",
    "ExistsError",
    "KernelMount",
    "LaunchError",
    "Layer",
    "Message",
    "MetricsTarget",
    "MinFree",
    "MountEndedError",
    "MountSettings",
    "MountSource",
    "MountsError",
    "NotAnsweringError",
    "NotFoundError",
    "NotUpError",
    "OneLineFormatter",
    "RawValue",
    "SettingType",
    "SettingsError",
    "StaleVersionError",
    "StoreError",
    "SupervisorAddress",
    "UnsupportedError",
    "WriteOptions",
    "__version__",
    "address_of",
    "at_least",
    "bucket_obstacle",
    "build",
    "certificates_for",
    "check_cluster_cache",
    "choice",
    "command_parser",
    "customer_key_obstacle",
    "daemon_pid",
    "daemon_request",
    "describe_duration",
    "describe_warming",
    "from_code",
    "has_ended",
    "keeper_pid",
    "keeper_request",
    "keeper_status",
    "kernel_mounts",
    "metrics_target",
    "parse_customer_key",
    "parse_source",
    "remove_registration",
    "replace_file",
    "resolve_path",
    "resume_mount",
    "serve_metrics",
    "split_options",
    "start_mount",
    "translate",
    "umount",
    "use_runtime_directory",
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
    keeper = start(settings, supervisor, environment=environment, deadline=deadline)
    assert isinstance(keeper, subprocess.Popen)  # there is no early one
    return keeper


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


def describe_duration(seconds: float) -> str:
    """A time span for people, as in `2 min 30 s`."""
    from fusefs.cli import status_report

    return status_report.human_duration(seconds)


# --- command lines ------------------------------------------------------------


def command_parser(program: str, description: str) -> argparse.ArgumentParser:
    """A parser that reports errors as the command `fusefs` does: in one line, with a suggestion."""
    from fusefs.settings.arguments import Parser

    return Parser(prog=program, description=description)


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
    from fusefs.store import many_deletes
    from fusefs.store.http import proxies, redirects

    path = certificates.path if certificates else None
    client = proxies.make_client(make, proxies.Proxies.of(os.environ), path)
    redirects.install(client)
    many_deletes.install(client)
    return client
