"""The command line of `fusefs`: a table of the commands with their arguments and help.

main.py has a function for each command, found by the command's name. The settings of mounts are
imported only for commands with options for settings, because the import would take most of the time
of a short command.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fusefs import __version__
from fusefs.settings.arguments import Parser

if TYPE_CHECKING:
    from fusefs.settings.types import Setting

# The positional and the keyword arguments for a call of `add_argument`.
_Argument = tuple[tuple[str, ...], dict[str, Any]]


class _Command(NamedTuple):
    """One command. Of its arguments `alternatives`, a user may give only one.

    With `must_choose` one is required. `add_settings` adds options that are settings of mounts.
    """

    name: str
    help: str
    description: str
    arguments: tuple[_Argument, ...] = ()
    alternatives: tuple[_Argument, ...] = ()
    must_choose: bool = False
    add_settings: Callable[[Parser], None] | None = None
    usage: str | None = None
    epilog: str | None = None


def make_parser(arguments: Sequence[str] | None = None) -> Parser:
    """Make the parser for a command line.

    The parser knows only the command that `arguments` begin with. If they begin with no command, it
    knows all commands; if `arguments` is None, it knows all commands with their settings.
    """
    parser = Parser(
        prog="fusefs", description="Mount an S3 bucket as a file system with a local cache."
    )
    version = f"fusefs {__version__}"
    names = ("-V", "--version")
    parser.add_argument(*names, action="version", version=version, help="show the version")
    # Without `prog` argparse would format a help text, only for the program's name in it.
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", prog="fusefs", dest="command"
    )
    wanted = [command for command in _COMMANDS if arguments and command.name == arguments[0]]
    for command in wanted or _COMMANDS:
        _add_command(commands, command, has_settings=arguments is None or command.name in arguments)
    return parser


def _add_command(
    commands: argparse._SubParsersAction[Parser], command: _Command, *, has_settings: bool
) -> None:
    parser = commands.add_parser(
        command.name,
        help=command.help,
        description=command.description,
        usage=command.usage,
        epilog=command.epilog,
    )
    for names, options in command.arguments:
        parser.add_argument(*names, **options)
    if command.alternatives:
        group = parser.add_mutually_exclusive_group(required=command.must_choose)
        for names, options in command.alternatives:
            group.add_argument(*names, **options)
    if has_settings and command.add_settings is not None:
        command.add_settings(parser)


# --- settings as options --------------------------------------------------------


def _add_mount_settings(parser: Parser) -> None:
    from fusefs.settings.mount import SETTINGS
    from fusefs.settings.sources import CONFIG_VARIABLE, DEFAULT_CONFIG

    help_text = (
        f"read settings from this TOML file ({CONFIG_VARIABLE}, or {DEFAULT_CONFIG}); a table with"
        " the name of the mountpoint is for that mount"
    )
    parser.add_argument("--config", metavar="PATH", help=help_text)
    _add_settings(parser, SETTINGS)


def _add_doctor_settings(parser: Parser) -> None:
    from fusefs.settings.mount import SETTINGS

    wanted = ("cache_dir", "cache_size", "min_free", "read_only", "no_delete")
    _add_settings(parser, [one for one in SETTINGS if one.group == "S3" or one.name in wanted])


def _add_upgrade_settings(parser: Parser) -> None:
    from fusefs.settings.mount import FIXED, SETTINGS

    changeable = [setting for setting in SETTINGS if setting.name not in FIXED]
    # No defaults are shown, because a setting that is not given keeps its value.
    _add_settings(parser, changeable, shows_defaults=False)
    for setting in SETTINGS:
        if setting.name in FIXED:  # so that `upgrade` refuses it with a better message
            _add_setting(parser, setting, argparse.SUPPRESS)


def _add_settings(
    parser: Parser, settings: Sequence[Setting], *, shows_defaults: bool = True
) -> None:
    names = dict.fromkeys(setting.group for setting in settings)
    groups = {name: parser.add_argument_group(name) for name in names}
    for setting in settings:
        default = f" (default: {setting.default})" if shows_defaults else ""
        _add_setting(groups[setting.group], setting, f"{setting.help}{default}")


def _add_setting(group: argparse._ActionsContainer, setting: Setting, text: str) -> None:
    # argparse does not convert the text: settings.build does, with better messages.
    shared: dict[str, Any] = {
        "dest": setting.name,
        "default": argparse.SUPPRESS,
        "help": text.replace("%", "%%"),
    }
    if setting.is_switch and setting.flag.startswith("--no-"):
        # BooleanOptionalAction would treat the flag itself as a negation.
        group.add_argument(setting.flag, action="store_true", **shared)
    elif setting.is_switch:
        group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, **shared)
    else:
        group.add_argument(setting.flag, metavar=setting.type.metavar, **shared)


# --- the commands ---------------------------------------------------------------


def _argument(*names: str, **options: Any) -> _Argument:
    return names, options


def _given(text: str) -> str:
    if not text:  # probably a script's unset variable; a Path would be the working directory
        raise argparse.ArgumentTypeError("the path is empty")
    return text


def _path(text: str) -> Path:
    return Path(_given(text))


def _duration(text: str) -> float:
    from fusefs.settings.types import DURATION  # most commands have no duration

    try:
        return DURATION.read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _address(text: str) -> tuple[str, int]:
    from fusefs.exporter.main import address_of  # only one command has an address

    return address_of(text)


def _switch(name: str, text: str) -> _Argument:
    return _argument(name, action="store_true", help=text)


_A_PATH = "a mountpoint, or a file or directory in a mount"
_MOUNTPOINT = _argument("mountpoint", type=_path, metavar="MOUNTPOINT")
_PATH = _argument("path", type=_path, metavar="PATH", help=_A_PATH)
_PATHS = _argument("paths", type=_path, metavar="PATH", nargs="+", help=_A_PATH)
_JSON = _switch("--json", "print JSON, for programs")
_PATTERNS = (
    "A PATH may be a pattern (in quotes, or the shell expands it): '*', '?' and '[...]' match "
    "within a name, '**' any number of directories."
)

_COMMANDS = (
    _Command(
        "mount",
        "mount a bucket",
        "Mount a bucket, or the part of it below a prefix, on an empty directory. "
        "The command returns when the mount answers; a daemon serves it in the background.",
        (
            _argument(
                "source", metavar="s3://BUCKET[/PREFIX]", help="the bucket or prefix to mount"
            ),
            _argument("mountpoint", type=_path, metavar="MOUNTPOINT", help="an empty directory"),
        ),
        add_settings=_add_mount_settings,
        usage="%(prog)s s3://BUCKET[/PREFIX] MOUNTPOINT [options]",
        epilog="Each option is also an environment variable (--cache-size is "
        'FUSEFS_CACHE_SIZE) and a key of the TOML file (cache-size = "50GiB"); options win '
        "over the environment, the environment over the file. Sizes: 50GiB, 1.5TB, 4096. "
        "Times: 60s, 500ms, 5m, 2h. Credentials come from the same places as for the AWS "
        "command line: environment, profile, SSO, web identity, instance metadata.",
    ),
    _Command(
        "umount",
        "unmount",
        "Unmount, and wait until uploads are done and the daemon has ended. Exit status 0: every "
        "written file is in the bucket; else the command names the files that are not.",
        (
            _MOUNTPOINT,
            _switch(
                "--force",
                "end a mount that does not answer: abort its connection and kill its daemon",
            ),
            _switch("--lazy", "detach the mount now; it ends when its last user is gone"),
        ),
    ),
    _Command(
        "status",
        "show the mounts, or how much of a path is on the local disk",
        "Show the state of one mount, or of all mounts of this user. For a file or directory in "
        "a mount, show how much of it is on the local disk, and how much is pinned. "
        f"{_PATTERNS} Exit status of mounts: 0 if each answers, reaches S3 and has no upload that "
        "fails, else 1.",
        (
            _argument(
                "path",
                type=_path,
                metavar="PATH",
                nargs="?",
                help=f"{_A_PATH} (default: all mounts)",
            ),
            _JSON,
            _switch("--settings", "show the settings that are in effect, as a settings file"),
        ),
    ),
    _Command(
        "warm",
        "fetch files into the cache before they are read",
        "Fetch files, and all files below directories, into the cache, as far as it "
        "has room. Files that are cached already are skipped. The command returns when the "
        f"daemon has accepted the job; fusefs status shows its progress. {_PATTERNS}",
        (
            _PATHS,
            _argument(
                "--manifest",
                metavar="FILE",
                help="fetch what this file lists, a path on each line: absolute, relative to PATH "
                "or an s3:// URI of the mount's bucket; - is standard input. Empty lines and those "
                "that begin with # are skipped",
            ),
            _argument(
                "--shard",
                metavar="I/N",
                help="fetch one of N disjoint parts of the files, of about equal numbers; I counts "
                "from 0, and N alone takes it from $JOB_COMPLETION_INDEX",
            ),
        ),
        (
            _switch(
                "--wait", "wait until the job has ended; fails if a file is not in the cache then"
            ),
            _switch("--cancel", "cancel the jobs at and below PATH; with the mountpoint, all jobs"),
        ),
        usage="%(prog)s [--wait] [--shard I/N] PATH...\n"
        "       %(prog)s [--wait] [--shard I/N] --manifest FILE PATH\n"
        "       %(prog)s --cancel PATH...",
    ),
    _Command(
        "plan",
        "tell a mount what will be read next, in which order",
        "Give a mount the list of files that a program will read, in the order of reading: it "
        "fetches each before its turn, and keeps what is used again soonest. A line is a path, "
        "relative to PATH, absolute, or an s3:// URI of the mount's bucket; after a tab it may "
        "have its reader's name, as each reader has an order of its own, and after another tab a "
        "range, START-STOP, of bytes. fusefs status shows how far ahead the mount is. A new plan "
        "replaces the reader's last one.",
        (
            _PATH,
            _argument(
                "file",
                metavar="FILE",
                nargs="?",
                help="the list; - is standard input, which may still grow",
            ),
            _argument(
                "--reader",
                metavar="NAME",
                default="",
                help="the reader of the lines that name none (a rank, say)",
            ),
        ),
        (
            _switch("--null", "entries are paths as they are, each with a NUL byte at its end"),
            _switch("--end", "forget the reader's plan"),
        ),
    ),
    _Command(
        "record",
        "write down which files programs open, as a plan for the next run",
        "Write the paths that are opened in a mount to a file, until Ctrl-C; fusefs plan takes it.",
        (_PATH, _argument("file", metavar="FILE", help="the file to write")),
        (_switch("--null", "end paths with a NUL byte instead of a newline"),),
    ),
    _Command(
        "pin",
        "fetch files into the cache and keep them there",
        "Fetch files, and all files below directories, and never evict them until "
        "fusefs unpin. Pins outlive the daemon and the mount: every mount of the bucket that uses "
        "the cache respects them. A new version of a pinned object is kept once it was read, or "
        f"fetched by another fusefs pin. Fails if not everything could be fetched. {_PATTERNS}",
        (
            _PATHS,
            _switch(
                "--no-wait",
                "return when the daemon has accepted the job; fusefs status shows its progress",
            ),
        ),
    ),
    _Command(
        "unpin",
        "let pinned files be evicted",
        "Let the files that are pinned at and below PATH be evicted when the cache "
        f"needs their room. Pins that fusefs pin is still fetching are cancelled. {_PATTERNS}",
        (
            _argument(
                "paths",
                type=_path,
                metavar="PATH",
                nargs="+",
                help="a pinned path, or a directory above",
            ),
        ),
    ),
    _Command(
        "drop",
        "remove cached copies of files from the local disk",
        "Remove the cached copies of files, and of all files below directories; the "
        "bucket keeps them. Copies of files that programs have open stay, and so does what is not "
        "in the bucket yet. The command names files in use, and fails if a copy stays because it "
        f"is in use or pinned. {_PATTERNS}",
        (_PATHS,),
        (
            _switch(
                "--unsent",
                "give up files that could not be uploaded: the mount shows the bucket's versions "
                "again. The written data stays in the cache directory, but no mount uses it",
            ),
        ),
    ),
    _Command(
        "sync",
        "upload written files and wait for it",
        "Upload every written file at or below PATH, and wait for that. "
        "Fails if a file cannot be uploaded; the file stays on the local disk and is retried.",
        (
            _PATH,
            _argument(
                "--timeout",
                type=_duration,
                metavar="DURATION",
                default=math.inf,
                help="maximum time to wait (default: no limit)",
            ),
        ),
    ),
    _Command(
        "doctor",
        "check the machine, a mount or a bucket, and show what to do",
        "Check what a mount needs: the kernel, /dev/fuse, privileges and the cache "
        "disk; of a mount or a bucket also names, TLS, the clock, credentials, latency and "
        "throughput. Exit status 0: nothing is wrong (there may be advice), 1: something is.",
        (
            _argument(
                "target",
                type=_given,
                metavar="MOUNTPOINT | s3://BUCKET[/PREFIX]",
                nargs="?",
                help="a mount, which is checked with its own settings, or a bucket (default: the "
                "machine)",
            ),
            _switch(
                "--permissions",
                "write, copy and delete objects of one byte to see what the credentials allow",
            ),
            _JSON,
            _argument("--config", metavar="PATH", help="read settings from this TOML file"),
        ),
        add_settings=_add_doctor_settings,
    ),
    _Command(
        "report",
        "write an archive for a bug report",
        "Write versions, settings, status and the end of the log of one mount, or of all mounts "
        "of this user, to an archive that only you can read. Secrets are left out.",
        (
            _argument(
                "mountpoint",
                type=_path,
                metavar="MOUNTPOINT",
                nargs="?",
                help="a mount (default: all mounts)",
            ),
            _argument(
                "--output", metavar="FILE", help="the archive (default: fusefs-report-TIME.tar.gz)"
            ),
        ),
    ),
    _Command(
        "metrics",
        "metrics of all mounts of this user, for Prometheus",
        "Serve the metrics of all mounts of this user at http://ADDRESS:PORT/metrics "
        "until ended, or write them to a file once. Needs the extra metrics "
        "(pip install './fusefs_s3-….whl[metrics]').",
        alternatives=(
            _argument(
                "--listen",
                type=_address,
                metavar="ADDRESS:PORT",
                help="serve there; :PORT is all addresses",
            ),
            _argument(
                "--textfile",
                metavar="FILE",
                help="replace this file in one step, for node_exporter's textfile collector",
            ),
        ),
        must_choose=True,
    ),
    _Command(
        "top",
        "a live view of all mounts: rates, what readers wait for, uploads",
        "Show what all mounts of this user do, each second or over a longer time, with advice. "
        "Without a terminal it prints a line for each mount. Reads of files that are open for "
        "passthrough do not reach the daemon.",
        (
            _argument(
                "--every",
                type=_duration,
                metavar="DURATION",
                default=1.0,
                help="time between updates, and that they are about (default: 1s)",
            ),
            _argument(
                "--count", type=int, metavar="N", help="end after N updates (default: no limit)"
            ),
        ),
        (
            _switch("--plain", "print a line for each mount"),
            _switch("--json", "print a JSON object each second"),
        ),
    ),
    _Command(
        "upgrade",
        "replace the daemon of a mount by this version",
        "Start a daemon of this version, let the old one finish its requests, and hand "
        "the mount over; programs see a short pause. Options change settings, the others keep "
        "their values; --read-only, --cache-dir and a few more cannot be changed while mounted. "
        "If the new daemon cannot start, the old one goes on.",
        (_MOUNTPOINT,),
        add_settings=_add_upgrade_settings,
    ),
)
