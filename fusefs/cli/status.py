"""What `fusefs status` shows: the answers of daemons and keepers, and of the kernel for the rest.

Nothing here waits for a mount: the sockets have a time-out, and everything
else is read from /proc and /sys.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusefs.cli import status_report
from fusefs.launch import control, registry
from fusefs.launch.control import CommandError
from fusefs.linux import unmount

ANSWER_TIMEOUT_S = 2.0
ENDED = "it has ended; fusefs mount mounts anew, fusefs umount --force takes it away"
NOT_ON_RECORD = "not on record here: another container's, or just beginning or ending"


def all_statuses() -> list[dict[str, Any]]:
    registrations = registry.all_mounts()
    statuses = [_ask(registration) for registration in registrations]
    known = {registration.mountpoint for registration in registrations}
    mounted = [mount for mount in registry.kernel_mounts() if mount.is_fusefs]
    # Bind mounts have the device of what they show.
    shown = {mount.device for mount in mounted if str(mount.mountpoint) in known}
    return statuses + [_unregistered(mount) for mount in mounted if mount.device not in shown]


def one_status(mountpoint: Path) -> dict[str, Any]:
    registration = registry.registration_of(mountpoint)
    if registration is not None:
        return _ask(registration)
    mount = registry.find_mount(mountpoint)
    if mount is None or not mount.is_fusefs:
        raise CommandError(f"{mountpoint} is not a mount of fusefs; fusefs status lists them")
    return _unregistered(mount)


def _ask(registration: registry.Registration) -> dict[str, Any]:
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
        socket = registry.keeper_socket(mountpoint)
        status["keeper"] = control.exchange(socket, {"do": "status"}, ANSWER_TIMEOUT_S)
        if status.get("not_answering") == ENDED:
            status["not_answering"] = "it has ended; the keeper is starting another"
    waiting = _waiting_in_kernel(mountpoint)
    if waiting is not None:
        status.setdefault("requests", {})["in_kernel"] = waiting
    return status


def _waiting_in_kernel(mountpoint: Path) -> int | None:
    """How many requests the kernel waits for an answer to, where it tells."""
    mount = registry.find_mount(mountpoint)
    if mount is None:
        return None
    try:
        return int((unmount.FUSECTL / str(mount.connection) / "waiting").read_text())
    except (OSError, ValueError):
        return None


def _unregistered(mount: registry.KernelMount) -> dict[str, Any]:
    is_ours = mount.owner in (None, os.geteuid())
    why = NOT_ON_RECORD if is_ours else f"it belongs to user {mount.owner}"
    return {
        "mountpoint": str(mount.mountpoint),
        "source": mount.source,
        "not_answering": why,
    }


def as_text(status: Mapping[str, Any]) -> str:
    return (
        status_report.render_silent(status)
        if "not_answering" in status
        else status_report.render(status)
    )
