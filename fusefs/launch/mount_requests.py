"""Requests to the daemon and the keeper of the mount on a given mountpoint.

Each of the two processes listens on a Unix socket (see `control`) whose path depends
on the mountpoint (see `registry`). No function here accesses the mount itself, so all
of them work while the mount hangs.
"""

from __future__ import annotations

from pathlib import Path

from fusefs.launch import control, registry
from fusefs.launch.control import ControlError, Message, NotAnsweringError


class MountEndedError(ControlError):
    """No daemon is registered for the mountpoint: the mount has ended, or has not begun."""


def daemon_request(mountpoint: Path, message: Message, timeout_s: float) -> Message:
    """Send `message` to the mount's daemon and return the answer.

    Raises:
        MountEndedError: no daemon is registered for `mountpoint`.
        NotAnsweringError: there was no answer within `timeout_s` seconds.
        ControlError: the daemon refused the request.
    """
    registration = registry.registration_of(mountpoint)
    if registration is None:
        raise MountEndedError(f"the mount at {mountpoint} has ended")
    try:
        return control.exchange(registration.socket, message, timeout_s)
    except NotAnsweringError as error:
        raise NotAnsweringError(
            f"the daemon of {mountpoint} does not answer ({error}); fusefs status tells whether"
            " another one takes its place"
        ) from error


def keeper_request(mountpoint: Path, message: Message, timeout_s: float) -> Message:
    """Send `message` to the mount's keeper and return the answer.

    Raises:
        NotAnsweringError: there was no answer within `timeout_s` seconds.
        ControlError: the keeper refused the request.
    """
    return control.exchange(registry.keeper_socket(mountpoint), message, timeout_s)


def keeper_status(mountpoint: Path, timeout_s: float) -> Message:
    """Ask the keeper for `pid`, `daemon` (a pid), `connection` and more; raises ControlError."""
    return keeper_request(mountpoint, {"do": "status"}, timeout_s)


def keeper_pid(mountpoint: Path) -> int | None:
    """Return the pid of the listener on the keeper's socket, even if it hangs; None without one."""
    return control.peer(registry.keeper_socket(mountpoint))


def daemon_pid(mountpoint: Path) -> int | None:
    """Return the pid of the mount's registered daemon; None if there is none or it has died."""
    registration = registry.registration_of(mountpoint)
    return registration.pid if registration is not None and registration.is_alive() else None
