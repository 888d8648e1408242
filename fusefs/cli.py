"""The command `fusefs`: mount, umount, status, upgrade, keeper.

`mount` reads the settings (see `settings`), checks what can be told without
S3 and starts the daemon (see `launch`). `umount` and `status` find the daemon
through the record of mounts (see `mounts`) and need neither trio nor boto3, so
they answer at once, also when the machine is busy or the mount is wedged.

Every failure is one line on standard error that begins with `fusefs: `. Exit
status: 0 done, 1 it failed, 2 the command line or a setting cannot be read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fusefs import control, launch, mounts, report
from fusefs.kernel import unmount
from fusefs.settings import (
    FIXED,
    SETTINGS,
    Given,
    MountSettings,
    Setting,
    SettingsError,
    build,
    from_config,
    from_environment,
)

STATUS_TIMEOUT_S = 2.0
UMOUNT_TIMEOUT_S = 30.0
FORCE_TIMEOUT_S = 5.0
UPGRADE_TIMEOUT_S = 90.0

CONFIG_VARIABLE = "FUSEFS_CONFIG"


class CommandError(Exception):
    """The command failed; the message is one line for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except SettingsError as error:
        _complain(error)
        return 2
    except (
        CommandError,
        control.ControlError,
        launch.LaunchError,
        mounts.MountsError,
        unmount.UnmountError,
    ) as error:
        _complain(error)
        return 1
    except OSError as error:
        _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130


def _complain(what: object) -> None:
    print(f"fusefs: {' '.join(str(what).split())}", file=sys.stderr)


# --- the command line ---------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Complains in one line like everything else here, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        _complain(f"{message}; see {self.prog} --help")
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fusefs", description="An S3 bucket as a file system with a local cache.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_mount(commands)
    _add_umount(commands)
    _add_status(commands)
    _add_upgrade(commands)
    _add_keeper(commands)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when it is asked for: that takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"fusefs {version('fusefs')}")
        parser.exit()


def _add_mount(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "mount",
        help="mount a bucket",
        usage="%(prog)s s3://BUCKET[/PREFIX] MOUNTPOINT [options]",
        description="Mount a bucket, or what is below a prefix of it, on an empty directory. "
        "Returns when the mount answers and leaves a daemon in the background.",
        epilog="Each option can also be given in the environment (--cache-size is "
        'FUSEFS_CACHE_SIZE) and in a TOML file (cache-size = "50GiB"); an option wins over '
        "the environment and the environment over the file. Sizes: 50GiB, 1.5TB, 4096. "
        "Times: 60s, 500ms, 5m, 2h. Credentials come as for the AWS command line: environment, "
        "profile, SSO, web identity, instance metadata.",
    )
    parser.add_argument("source", metavar="s3://BUCKET[/PREFIX]", help="what to mount")
    parser.add_argument("mountpoint", metavar="MOUNTPOINT", help="an empty directory")
    parser.add_argument(
        "--config", metavar="PATH", help=f"read settings from this TOML file ({CONFIG_VARIABLE})"
    )
    _add_settings(parser, SETTINGS)
    parser.set_defaults(run=_mount)


def _add_settings(parser: argparse.ArgumentParser, settings: Sequence[Setting]) -> None:
    names = dict.fromkeys(setting.group for setting in settings)
    groups = {name: parser.add_argument_group(name) for name in names}
    for setting in settings:
        _add_setting(groups[setting.group], setting)


def _add_setting(group: argparse._ArgumentGroup, setting: Setting) -> None:
    # The text is kept as it is: settings.build reads it and knows what to say.
    text = f"{setting.help} (default: {setting.default})".replace("%", "%%")
    shared: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS, "help": text}
    if setting.is_switch:
        group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, **shared)
    else:
        group.add_argument(setting.flag, metavar=setting.kind.metavar, **shared)


def _add_umount(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "umount",
        help="end a mount",
        description="End a mount and wait until its daemon has gone.",
    )
    parser.add_argument("mountpoint", metavar="MOUNTPOINT")
    parser.add_argument(
        "--force",
        action="store_true",
        help="end a mount that does not answer: abort its connection, kill its daemon",
    )
    parser.add_argument(
        "--lazy", action="store_true", help="take it out of sight now, end it when it is unused"
    )
    parser.set_defaults(run=_umount)


def _add_status(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "status", help="show the mounts", description="Show one mount, or all of yours."
    )
    parser.add_argument("mountpoint", metavar="MOUNTPOINT", nargs="?")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=_status)


def _add_upgrade(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "upgrade",
        help="replace a mount's daemon by this version",
        description="Start this version's daemon, let the old one finish what it is answering, "
        "and hand the mount over; programs see a pause. The settings stay as they are but for "
        "those that are given. If the new daemon can't start, the old one goes on.",
    )
    parser.add_argument("mountpoint", metavar="MOUNTPOINT")
    _add_settings(parser, [setting for setting in SETTINGS if setting.name not in FIXED])
    parser.set_defaults(run=_upgrade)


def _add_keeper(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "keeper",
        help="hold the mounts of others",
        description="Hold the /dev/fuse descriptors of mounts made with --holder, so that they "
        "outlive their own keepers, too. Root's alone.",
    )
    parser.add_argument("--socket", metavar="PATH", required=True, help="where to listen")
    parser.set_defaults(run=_keeper)


# --- mount --------------------------------------------------------------------


def _mount(options: argparse.Namespace) -> int:
    settings = _settings(options, os.environ)
    launch.check(settings)
    if settings.foreground:
        return launch.run_foreground(settings)
    launch.start(settings)
    return 0


def _settings(options: argparse.Namespace, environment: Mapping[str, str]) -> MountSettings:
    given = {
        "source": Given(options.source, "SOURCE"),
        "mountpoint": Given(str(mounts.resolve(Path(options.mountpoint))), "MOUNTPOINT"),
    }
    given |= _flags(options)
    config = options.config or environment.get(CONFIG_VARIABLE)
    return build(given, from_environment(environment), from_config(Path(config)) if config else {})


def _flags(options: argparse.Namespace) -> dict[str, Given]:
    """The settings among the options of the command line."""
    given = {}
    for setting in SETTINGS:
        if hasattr(options, setting.name):
            value = getattr(options, setting.name)
            text = str(value).lower() if isinstance(value, bool) else value
            given[setting.name] = Given(text, setting.flag)
    return given


# --- upgrade, keeper ----------------------------------------------------------


def _upgrade(options: argparse.Namespace) -> int:
    mountpoint = mounts.resolve(Path(options.mountpoint))
    socket = mounts.keeper_socket(mountpoint)
    try:
        told = control.exchange(socket, {"do": "settings"}, STATUS_TIMEOUT_S)
    except control.NotAnsweringError:
        raise CommandError(f"{mountpoint} has no keeper: unmount it and mount it again") from None
    settings = MountSettings.from_json(json.loads(told["settings"])["settings"])
    request = {
        "do": "upgrade",
        "command": launch.DAEMON,
        "settings": launch.daemon_input(settings.changed(_flags(options))),
    }
    answer = control.exchange(socket, request, settings.retry_time + UPGRADE_TIMEOUT_S)
    print(f"{mountpoint}: pid {answer['pid']} serves it now, after {answer['pause_s']:.1f} s")
    return 0


def _keeper(options: argparse.Namespace) -> int:
    from fusefs.kernel import holder

    return holder.main(options.socket)


# --- umount -------------------------------------------------------------------


def _umount(options: argparse.Namespace) -> int:
    mountpoint = mounts.resolve(Path(options.mountpoint))
    mount = mounts.find_mount(mountpoint)
    registration = mounts.registration_of(mountpoint)
    if mount is None or not mount.is_fusefs:
        raise CommandError(f"{mountpoint} is not a mount of fusefs")
    if options.force:
        _end_by_force(mount, registration)
    else:
        _end(mountpoint, registration, is_lazy=options.lazy)
    return 0


def _end(mountpoint: Path, registration: mounts.Registration | None, *, is_lazy: bool) -> None:
    if registration and not registration.is_alive():
        registration = None
    keeper = _keeper_pid(mountpoint)
    try:
        unmount.umount_path(mountpoint, is_lazy=is_lazy)
    except unmount.UnmountError as error:
        if error.is_busy:
            raise CommandError(f"{mountpoint} is in use{_by_whom(mountpoint)}") from None
        raise CommandError(f"{mountpoint}: {error}") from None
    # A lazy end may be hours away: it comes when the last user has gone.
    if is_lazy:
        return
    for pid in (registration.pid if registration else None, keeper):
        if pid is not None and not _has_ended(pid, UMOUNT_TIMEOUT_S):
            raise CommandError(
                f"{mountpoint} is unmounted, but its process {pid} has not ended "
                f"within {UMOUNT_TIMEOUT_S:.0f} s"
            )


def _by_whom(mountpoint: Path) -> str:
    users = unmount.users_of(mountpoint)
    if not users:
        return "; close what uses it, or use --lazy"
    shown = ", ".join(f"{command} (pid {pid})" for pid, command in users[:5])
    more = f" and {len(users) - 5} more" if len(users) > 5 else ""
    return f" by {shown}{more}"


def _end_by_force(mount: mounts.KernelMount, registration: mounts.Registration | None) -> None:
    """Abort the connection, take the mount away and see the daemon out.

    Without the right to abort (an ordinary user in a container) killing the
    daemon does the same, as nobody else holds the connection then.
    """
    failure: unmount.UnmountError | None = None
    try:
        unmount.abort_connection(mount.connection)
    except unmount.UnmountError as error:
        if registration is None:
            failure = error
    keeper = _keeper_pid(mount.mountpoint)
    unmount.umount_path(mount.mountpoint, is_lazy=True)
    if registration and registration.is_alive():
        _see_out(registration.pid)
    if keeper is not None:
        _see_out(keeper)
    mounts.unregister(mount.mountpoint)
    if failure is not None:
        raise failure


def _keeper_pid(mountpoint: Path) -> int | None:
    """The process that keeps a mount, if there is one."""
    socket = mounts.keeper_socket(mountpoint)
    try:
        return int(control.exchange(socket, {"do": "status"}, STATUS_TIMEOUT_S)["pid"])
    except control.ControlError:
        return control.peer(socket)


def _has_ended(pid: int, timeout_s: float) -> bool:
    """Wait until a process is gone; False if it is still there."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], timeout_s)[0])
    finally:
        os.close(process)


def _see_out(pid: int) -> None:
    """Wait until a process of the mount ends, and kill it if it does not."""
    if _has_ended(pid, FORCE_TIMEOUT_S):
        return
    os.kill(pid, signal.SIGKILL)
    if not _has_ended(pid, FORCE_TIMEOUT_S):
        raise CommandError(f"the process {pid} does not die; see the kernel log")


# --- status -------------------------------------------------------------------


def _status(options: argparse.Namespace) -> int:
    if options.mountpoint is None:
        statuses = _all_statuses()
    else:
        statuses = [_one_status(mounts.resolve(Path(options.mountpoint)))]
    if options.json:
        print(json.dumps(statuses if options.mountpoint is None else statuses[0], indent=2))
    elif statuses:
        print("\n\n".join(_as_text(status) for status in statuses))
    else:
        print("no mounts")
    return 0


def _all_statuses() -> list[dict[str, Any]]:
    registrations = mounts.all_mounts()
    known = {registration.mountpoint for registration in registrations}
    statuses = [_ask(registration) for registration in registrations]
    for mount in mounts.kernel_mounts():
        if mount.is_fusefs and str(mount.mountpoint) not in known:
            statuses.append(_unregistered(mount))
    return statuses


def _one_status(mountpoint: Path) -> dict[str, Any]:
    registration = mounts.registration_of(mountpoint)
    if registration is not None:
        return _ask(registration)
    mount = mounts.find_mount(mountpoint)
    if mount is None or not mount.is_fusefs:
        raise CommandError(f"{mountpoint} is not a mount of fusefs; fusefs status lists them")
    return _unregistered(mount)


def _ask(registration: mounts.Registration) -> dict[str, Any]:
    mountpoint = Path(registration.mountpoint)
    try:
        status = control.request(registration.socket, "status", STATUS_TIMEOUT_S)
    except control.ControlError as error:
        status = {
            "mountpoint": registration.mountpoint,
            "source": registration.source,
            "daemon": {"pid": registration.pid},
            "not_answering": str(error),
        }
    with contextlib.suppress(control.ControlError):
        socket = mounts.keeper_socket(mountpoint)
        status["keeper"] = control.exchange(socket, {"do": "status"}, STATUS_TIMEOUT_S)
    waiting = _waiting_in_kernel(mountpoint)
    if waiting is not None:
        status.setdefault("requests", {})["in_kernel"] = waiting
    return status


def _waiting_in_kernel(mountpoint: Path) -> int | None:
    """How many requests the kernel waits for an answer to, where it tells."""
    mount = mounts.find_mount(mountpoint)
    if mount is None:
        return None
    try:
        return int((unmount.FUSECTL / str(mount.connection) / "waiting").read_text())
    except (OSError, ValueError):
        return None


def _unregistered(mount: mounts.KernelMount) -> dict[str, Any]:
    is_ours = mount.owner in (None, os.geteuid())
    why = "it has ended; fusefs umount --force" if is_ours else f"it belongs to user {mount.owner}"
    return {
        "mountpoint": str(mount.mountpoint),
        "source": mount.source,
        "not_answering": why,
    }


def _as_text(status: Mapping[str, Any]) -> str:
    return report.render_silent(status) if "not_answering" in status else report.render(status)


if __name__ == "__main__":
    sys.exit(main())
