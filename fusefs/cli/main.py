"""The command `fusefs`: mount, umount, sync, warm, verify, status, upgrade, keeper.

`mount` reads the settings (see `settings`), checks what can be told without
S3 and starts the daemon (see `launch`). `umount` and `status` find the daemon
through the record of mounts (see `mounts`) and need neither trio nor boto3, so
they answer at once, also when the machine is busy or the mount is wedged.

Every failure is one line on standard error that begins with `fusefs: `. Exit
status: 0 done, 1 it failed, 2 the command line or a setting cannot be read.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fusefs.cli import status as overview
from fusefs.cli import status_report, surroundings, sync, umount, verify, warm
from fusefs.launch import control, launcher, preflight, registry, users
from fusefs.launch.control import CommandError
from fusefs.linux import unmount
from fusefs.settings.arguments import Parser
from fusefs.settings.mount import (
    FIXED,
    SETTINGS,
    Given,
    MountSettings,
    SettingsError,
    build,
)
from fusefs.settings.sources import from_config, from_environment
from fusefs.settings.types import DURATION, Setting

STATUS_TIMEOUT_S = 2.0
UPGRADE_TIMEOUT_S = 90.0

CONFIG_VARIABLE = "FUSEFS_CONFIG"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    surroundings.prepare_streams()
    options = _parser().parse_args(arguments)
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever reads it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SettingsError as error:
        _complain(error)
        return 2
    except (
        CommandError,
        control.ControlError,
        preflight.LaunchError,
        registry.MountsError,
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


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="fusefs", description="An S3 bucket as a file system with a local cache.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_mount(commands)
    _add_umount(commands)
    _add_sync(commands)
    _add_warm(commands)
    _add_verify(commands)
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


def _add_mount(commands: argparse._SubParsersAction[Parser]) -> None:
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
    if setting.is_switch and setting.flag.startswith("--no-"):
        # argparse would take the name itself for a denial.
        group.add_argument(setting.flag, action="store_true", **shared)
    elif setting.is_switch:
        group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, **shared)
    else:
        group.add_argument(setting.flag, metavar=setting.kind.metavar, **shared)


def _add_umount(commands: argparse._SubParsersAction[Parser]) -> None:
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


def _add_sync(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "sync",
        help="wait until the bucket has what was written",
        description="Have everything at or below PATH uploaded, and wait for it. Fails if "
        "something can't be; that stays on the local disk and is tried again.",
    )
    parser.add_argument("path", metavar="PATH", help="a mount, or what is in one")
    parser.add_argument(
        "--timeout", metavar="DURATION", help="wait no longer (default: as long as it takes)"
    )
    parser.set_defaults(run=_sync)


def _add_warm(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "warm",
        help="fetch files into the cache before they are read",
        description="Have a mount fetch files, and all below directories, into its cache, as much "
        "as there is room for. What is there is passed over. Returns when the daemon has accepted "
        "it; fusefs status shows how far it is.",
    )
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a mount, or what is in one")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--wait",
        action="store_true",
        help="wait until all is there; fails if something can't be",
    )
    how.add_argument("--cancel", action="store_true", help="fetch no more of it")
    parser.set_defaults(run=_warm)


def _add_verify(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "verify",
        help="compare cached copies with their checksums",
        description="Read what is cached at or below PATH from the disk and compare it with the "
        "checksums of what was stored. What differs is dropped and fetched again from the bucket; "
        "fails if something can't be.",
    )
    parser.add_argument("path", metavar="PATH", help="a mount, or what is in one")
    parser.set_defaults(run=_verify)


def _add_status(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "status", help="show the mounts", description="Show one mount, or all of yours."
    )
    parser.add_argument("mountpoint", metavar="MOUNTPOINT", nargs="?")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=_status)


def _add_upgrade(commands: argparse._SubParsersAction[Parser]) -> None:
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


def _add_keeper(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "keeper",
        help="hold the mounts of others",
        description="Hold the /dev/fuse descriptors of mounts made with --descriptor-store, so "
        "that they outlive their own keepers, too. Root's alone.",
    )
    parser.add_argument("--socket", metavar="PATH", required=True, help="where to listen")
    parser.set_defaults(run=_keeper)


# --- mount --------------------------------------------------------------------


def _mount(options: argparse.Namespace) -> int:
    settings = _settings(options, os.environ)
    if launcher.resume(settings):
        return 0
    preflight.check(settings)
    for warning in preflight.warnings():
        _complain(f"warning: {warning}")
    with surroundings.ended_like_by_ctrl_c():
        if settings.foreground:
            return launcher.run_foreground(settings)
        launcher.start(settings)
    return 0


def _settings(options: argparse.Namespace, environment: Mapping[str, str]) -> MountSettings:
    given = {
        "source": Given(options.source, "what to mount"),
        "mountpoint": Given(str(_mountpoint(options)), "the mountpoint"),
    }
    given |= _flags(options)
    config = options.config or environment.get(CONFIG_VARIABLE)
    return build(given, from_environment(environment), from_config(Path(config)) if config else {})


def _mountpoint(options: argparse.Namespace) -> Path:
    if not options.mountpoint:  # an unset variable of a script is not the working directory
        raise SettingsError("the mountpoint: the path is empty")
    return registry.resolve(Path(options.mountpoint))


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
    mountpoint = _mountpoint(options)
    socket = registry.keeper_socket(mountpoint)
    try:
        told = control.exchange(socket, {"do": "settings"}, STATUS_TIMEOUT_S)
    except control.NotAnsweringError:
        raise CommandError(f"{mountpoint} has no keeper: unmount it and mount it again") from None
    settings = MountSettings.from_json(json.loads(told["settings"])["settings"])
    request = {
        "do": "upgrade",
        "command": launcher.DAEMON,
        "settings": launcher.daemon_input(
            settings.changed(_flags(options)), users.serving(mountpoint)
        ),
    }
    answer = control.exchange(socket, request, settings.retry_time + UPGRADE_TIMEOUT_S)
    print(f"{mountpoint}: pid {answer['pid']} serves it now, after {answer['pause_s']:.1f} s")
    return 0


def _keeper(options: argparse.Namespace) -> int:
    from fusefs.keeper import fd_store

    return fd_store.main(options.socket)


# --- umount, sync, warm, verify, status -----------------------------------------------------


def _umount(options: argparse.Namespace) -> int:
    mountpoint = _mountpoint(options)
    umount.end_mount(mountpoint, is_forced=options.force, is_lazy=options.lazy)
    return 0


def _sync(options: argparse.Namespace) -> int:
    timeout_s = math.inf
    if options.timeout is not None:
        try:
            timeout_s = DURATION.read(options.timeout)
        except ValueError as error:
            raise SettingsError(f"--timeout: {error}") from None
    sync.sync(Path(options.path), timeout_s, sync.shown())
    return 0


def _warm(options: argparse.Namespace) -> int:
    paths = [Path(path) for path in options.paths]
    if options.cancel:
        warm.cancel(paths)
        return 0
    places = warm.warm(paths)
    try:
        warm.accepted(places)  # a path that is not there is an error at once
        if not options.wait:
            return 0
        jobs = warm.wait(places)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        _complain("it goes on; fusefs status shows how far it is, fusefs warm --cancel ends it")
        return 130
    for place, job in jobs.items():
        print(f"{warm.path_of(place)}: {status_report.warmth(job)}")
    return 0 if all(warm.is_warm(job) for job in jobs.values()) else 1


def _verify(options: argparse.Namespace) -> int:
    path = Path(options.path)
    return 0 if verify.report(path, verify.verify(path)) else 1


def _status(options: argparse.Namespace) -> int:
    if options.mountpoint is None:
        statuses = overview.all_statuses()
    else:
        statuses = [overview.one_status(_mountpoint(options))]
    if options.json:
        print(json.dumps(statuses if options.mountpoint is None else statuses[0], indent=2))
    elif statuses:
        print("\n\n".join(overview.as_text(status) for status in statuses))
    else:
        print("no mounts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
