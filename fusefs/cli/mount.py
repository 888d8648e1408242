"""`fusefs mount` and `fusefs upgrade`, which start and replace a mount's daemon."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from fusefs.launch import control, launcher, preflight, registry, users
from fusefs.launch.control import CommandError
from fusefs.launch.foreground import Foreground
from fusefs.launch.mount_requests import keeper_pid, keeper_request
from fusefs.linux.log_line import FORMAT_VARIABLE
from fusefs.settings.display import shown
from fusefs.settings.mount import FIXED, SETTINGS, MountSettings, RawValue, SettingsError, build
from fusefs.settings.sources import config_of, from_environment, mistyped
from fusefs.settings.types import SessionKind

# Long for busy machines; on other machines a keeper answers at once.
SETTINGS_TIMEOUT_S = 15.0
UPGRADE_TIMEOUT_S = 90.0


def mount(options: argparse.Namespace, warn: Callable[[object], None]) -> int:
    """Mount as the command line says, and return the exit status."""
    chosen = settings(options, os.environ)
    os.environ[FORMAT_VARIABLE] = chosen.log_format  # for all processes of the mount
    preflight.check(chosen)
    for warning in [*mistyped(os.environ), *preflight.warnings()]:
        warn(f"warning: {warning}")
    with _signals_interrupt():
        process = launcher.start(chosen)
        if chosen.foreground:
            has_keeper = chosen.session != SessionKind.PYFUSE3
            return Foreground(process, chosen.mountpoint, has_keeper=has_keeper).run()
    return 0


def upgrade(options: argparse.Namespace) -> None:
    """Replace a mount's daemon by a daemon of this version; `options` may change its settings."""
    changes, place = flags(options), registry.resolve(options.mountpoint)
    for name, value in changes.items():
        if name in FIXED:
            raise SettingsError(f"{value.origin}: cannot be changed while mounted")
    try:
        answer = keeper_request(place, {"do": "settings"}, SETTINGS_TIMEOUT_S)
    except control.NotAnsweringError:
        raise CommandError(
            f"{place} has no keeper that answers, which an upgrade needs; unmount it and mount it"
            " again"
        ) from None
    # `from_texts` ignores unknown settings: the new version may be older.
    present = MountSettings.from_texts(json.loads(answer["settings"])["settings"])
    request = {
        "do": "upgrade",
        "command": launcher.daemon_command(present),
        "settings": launcher.daemon_input(
            present.changed(changes),
            users.daemon_user(place),
            {**_files_of_mount(place), **os.environ},
        ),
    }
    try:
        answer = keeper_request(place, request, present.retry_time + UPGRADE_TIMEOUT_S)
    except control.NotAnsweringError:
        raise CommandError(f"{place}: the upgrade goes on; fusefs status shows it") from None
    print(f"{shown(str(place))}: daemon {answer['pid']} took over; pause {answer['pause_s']:.1f} s")


def _files_of_mount(place: Path) -> dict[str, str]:
    """Return AWS_CONFIG_FILE and AWS_SHARED_CREDENTIALS_FILE from the keeper's environment.

    This command may lack them if /etc/fstab (`credentials=FILE`) or a service made the mount.
    """
    from fusefs.diagnosis.subject import environment_of  # `fusefs mount` does not need it

    pid = keeper_pid(place)
    made = environment_of(pid) if pid is not None else None
    return {
        name: path
        for name, path in (made or {}).items()
        # A relative path is of no use without its directory.
        if name in users.AWS_FILES and os.path.isabs(path)
    }


def settings(options: argparse.Namespace, environment: Mapping[str, str]) -> MountSettings:
    """Build a mount's settings from the command line, the environment and the settings file."""
    layer = {
        "source": RawValue(options.source, "the source"),
        "mountpoint": RawValue(str(registry.resolve(options.mountpoint)), "the mountpoint"),
    }
    layer |= flags(options)
    file = config_of(options.config, environment, layer["mountpoint"].text)
    return build(layer, from_environment(environment), file)


def flags(options: argparse.Namespace) -> dict[str, RawValue]:
    """Return the mount settings that the command line gives, by their names in `MountSettings`."""
    layer = {}
    for setting in SETTINGS:
        if hasattr(options, setting.name):
            value = getattr(options, setting.name)
            text = str(value).lower() if isinstance(value, bool) else value
            layer[setting.name] = RawValue(text, setting.flag)
    return layer


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM and SIGHUP in the block, so that the block cleans up."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
