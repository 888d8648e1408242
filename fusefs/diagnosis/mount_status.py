"""Collects the status of mounts: the answers of daemons and keepers, and the kernel's data.

`fusefs status`, `fusefs doctor` and `fusefs report` show the status, whose form is in
docs/reference/status-json.md. No function can hang: requests have a time-out, and everything else
is read from /proc and /sys.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from fusefs.launch import control, registry
from fusefs.launch.control import CommandError
from fusefs.launch.mount_requests import keeper_status
from fusefs.linux import mountinfo
from fusefs.linux.fuse_connection import FUSECTL

ANSWER_TIMEOUT_S = 2.0
ENDED = "the daemon has died; fusefs mount mounts anew, fusefs umount --force unmounts"
NOT_REGISTERED = "not registered here: another container's mount, or just starting or ending"


def all_statuses() -> list[dict[str, Any]]:
    """Return the status of every fusefs mount that this process sees."""
    registrations = registry.all_mounts()
    statuses = [_status_of(registration) for registration in registrations]
    known = {registration.mountpoint for registration in registrations}
    mounted = [mount for mount in mountinfo.kernel_mounts() if mount.is_fusefs]
    # A bind mount has the same device as the registered mount that it shows.
    shown = {mount.device for mount in mounted if str(mount.mountpoint) in known}
    return statuses + [_unregistered(mount) for mount in mounted if mount.device not in shown]


def mount_status(mountpoint: Path) -> dict[str, Any]:
    """Return the status of the mount at `mountpoint`; CommandError if fusefs has none there."""
    if (registration := registry.registration_of(mountpoint)) is not None:
        return _status_of(registration)
    mount = mountinfo.find_mount(mountpoint)
    if mount is None or not mount.is_fusefs:
        raise CommandError(f"{mountpoint} is not a mount of fusefs; fusefs status lists them")
    return _unregistered(mount)


def _status_of(registration: registry.Registration) -> dict[str, Any]:
    mountpoint = Path(registration.mountpoint)
    try:
        status = control.request(registration.socket, "status", ANSWER_TIMEOUT_S)
    except control.ControlError as error:
        status = {
            "mountpoint": registration.mountpoint,
            "source": registration.source,
            "daemon": {"pid": registration.pid},
            "not_answering": str(error) if registration.is_alive() else ENDED,
        }
    with contextlib.suppress(control.ControlError):
        status["keeper"] = keeper_status(mountpoint, ANSWER_TIMEOUT_S)
        if status.get("not_answering") == ENDED:
            status["not_answering"] = "the daemon has died; the keeper is starting another"
    if (waiting := _waiting_in_kernel(mountpoint)) is not None:
        requests = status.get("requests")
        known = requests if isinstance(requests, dict) else {}  # may differ in another version
        status["requests"] = {**known, "in_kernel": waiting}
    return status


def _waiting_in_kernel(mountpoint: Path) -> int | None:
    """Return the kernel's count of unanswered requests (fusectl); None if it is not readable."""
    mount = mountinfo.find_mount(mountpoint)
    if mount is None:
        return None
    try:
        return int(Path(FUSECTL, str(mount.connection), "waiting").read_text())
    except (OSError, ValueError):
        return None


def _unregistered(mount: mountinfo.KernelMount) -> dict[str, Any]:
    is_ours = mount.owner in (None, os.geteuid())
    why = NOT_REGISTERED if is_ours else f"the mount belongs to user {mount.owner}"
    known = {"mountpoint": str(mount.mountpoint), "source": mount.source}
    if not is_ours and os.geteuid() == 0 and mount.owner is not None:
        try:  # root may access the sockets of other users
            if (socket := registry.socket_of(mount.mountpoint, mount.owner)) is not None:
                return control.request(socket, "status", ANSWER_TIMEOUT_S) | known
        except control.ControlError as error:
            return {**known, "not_answering": f"{why}; {error}"}
    return {**known, "not_answering": why, "is_foreign": True}
