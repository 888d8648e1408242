"""The command `fusefs`: mount, umount, status, warm, pin, drop, sync, verify and others.

`mount` reads the settings (see `settings`), makes the checks that need no S3
and starts the daemon (see `launch`). The other commands find the daemon in the
registry (launch/registry.py). They answer at once, even when the machine is busy or
the mount is wedged: each imports what it needs when it runs, since most of the time
of a short command goes into imports.

Every failure is one line on standard error that begins with `fusefs: `. Exit
status: 0 success, 1 failure, 2 the command line or a setting cannot be read.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusefs.settings.arguments import Parser

if TYPE_CHECKING:
    from fusefs.cli import warm
    from fusefs.settings.types import Setting


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    _prepare_streams()
    if arguments is None:
        arguments = sys.argv[1:]
    options = _parser(arguments).parse_args(arguments)
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as head(1), has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except Exception as error:
        status = _status_of(error)
        _complain(error)
        return status


def _status_of(error: Exception) -> int:
    """The exit status for an error that is meant for the user; any other is raised."""
    from fusefs.launch import control, preflight, registry
    from fusefs.linux import unmount
    from fusefs.settings.mount import SettingsError

    if isinstance(error, SettingsError):
        return 2
    if isinstance(
        error,
        control.CommandError
        | control.ControlError
        | preflight.LaunchError
        | registry.MountsError
        | unmount.UnmountError,
    ):
        return 1
    raise error


def _complain(what: object) -> None:
    print(f"fusefs: {' '.join(str(what).split())}", file=sys.stderr)


# --- streams and signals ------------------------------------------------------


def _prepare_streams() -> None:
    """Make the standard streams usable: names that are not UTF-8 can be printed.

    A closed stream is opened on /dev/null, or the next opened file would get its number.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r+"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")


# --- the command line ---------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands, from which manual pages and completions are made."""
    return _parser()


def _parser(arguments: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The parser for a command line; without one, for all of them.

    Only where the settings of mounts are options of the command are they read.
    """
    parser = Parser(
        prog="fusefs", description="Mount an S3 bucket as a file system with a local cache."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    # Without its name argparse would make up a help text to find it in.
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", prog="fusefs"
    )
    _add_mount(commands, has_options=arguments is None or "mount" in arguments)
    _add_umount(commands)
    _add_status(commands)
    _add_warm(commands)
    _add_pin(commands)
    _add_unpin(commands)
    _add_drop(commands)
    _add_sync(commands)
    _add_verify(commands)
    _add_doctor(commands, has_options=arguments is None or "doctor" in arguments)
    _add_profile(commands)
    _add_report(commands)
    _add_metrics(commands)
    _add_top(commands)
    _add_upgrade(commands, has_options=arguments is None or "upgrade" in arguments)
    _add_keeper(commands)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when it is printed, because the look-up is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"fusefs {version('fusefs')}")
        parser.exit()


def _add_mount(commands: argparse._SubParsersAction[Parser], *, has_options: bool) -> None:
    parser = commands.add_parser(
        "mount",
        help="mount a bucket",
        usage="%(prog)s s3://BUCKET[/PREFIX] MOUNTPOINT [options]",
        description="Mount a bucket, or the part of it below a prefix, on an empty directory. "
        "The command returns when the mount answers; a daemon serves it in the background.",
        epilog="Each option is also an environment variable (--cache-size is "
        'FUSEFS_CACHE_SIZE) and a key of the TOML file (cache-size = "50GiB"); options win over '
        "the environment, the environment over the file. Sizes: 50GiB, 1.5TB, 4096. "
        "Times: 60s, 500ms, 5m, 2h. Credentials come from the same places as for the AWS command "
        "line: environment, profile, SSO, web identity, instance metadata.",
    )
    parser.add_argument(
        "source", metavar="s3://BUCKET[/PREFIX]", help="the bucket or prefix to mount"
    )
    parser.add_argument("mountpoint", metavar="MOUNTPOINT", help="an empty directory")
    if has_options:
        from fusefs.settings.mount import SETTINGS
        from fusefs.settings.sources import CONFIG_VARIABLE

        help_text = f"read settings from this TOML file ({CONFIG_VARIABLE})"
        parser.add_argument("--config", metavar="PATH", help=help_text)
        _add_settings(parser, SETTINGS)
    parser.set_defaults(run=_mount)


def _add_settings(parser: argparse.ArgumentParser, settings: Sequence[Setting]) -> None:
    names = dict.fromkeys(setting.group for setting in settings)
    groups = {name: parser.add_argument_group(name) for name in names}
    for setting in settings:
        _add_setting(groups[setting.group], setting)


def _add_setting(group: argparse._ArgumentGroup, setting: Setting) -> None:
    # argparse passes the text on unread: settings.build reads it, with better messages.
    text = f"{setting.help} (default: {setting.default})".replace("%", "%%")
    shared: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS, "help": text}
    if setting.is_switch and setting.flag.startswith("--no-"):
        # BooleanOptionalAction would take the flag itself for a negation.
        group.add_argument(setting.flag, action="store_true", **shared)
    elif setting.is_switch:
        group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, **shared)
    else:
        group.add_argument(setting.flag, metavar=setting.type.metavar, **shared)


def _add_umount(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "umount",
        help="unmount",
        description="Unmount, and wait until uploads are done and the daemon has ended.",
    )
    parser.add_argument("mountpoint", metavar="MOUNTPOINT")
    parser.add_argument(
        "--force",
        action="store_true",
        help="end a mount that does not answer: abort its connection and kill its daemon",
    )
    parser.add_argument(
        "--lazy",
        action="store_true",
        help="detach the mount now; it ends when its last user is gone",
    )
    parser.set_defaults(run=_umount)


def _add_sync(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "sync",
        help="upload written files and wait for it",
        description="Upload every written file at or below PATH, and wait for that. "
        "Fails if a file cannot be uploaded; the file stays on the local disk and is retried.",
    )
    parser.add_argument(
        "path", metavar="PATH", help="a mountpoint, or a file or directory in a mount"
    )
    parser.add_argument(
        "--timeout", metavar="DURATION", help="maximum time to wait (default: no limit)"
    )
    parser.set_defaults(run=_sync)


_PATTERNS = (
    "A PATH may be a pattern (in quotes, or the shell expands it): '*', '?' and '[...]' match "
    "within a name, '**' any number of directories."
)


def _add_warm(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "warm",
        help="fetch files into the cache before they are read",
        usage="%(prog)s [--wait] [--shard I/N] PATH...\n"
        "       %(prog)s [--wait] [--shard I/N] --manifest FILE [PATH]\n"
        "       %(prog)s --cancel PATH...",
        description="Fetch files, and all files below directories, into the cache, as far as it "
        "has room. Files that are cached already are skipped. The command returns when the "
        f"daemon has accepted the job; fusefs status shows its progress. {_PATTERNS}",
    )
    parser.add_argument(
        "paths", metavar="PATH", nargs="*", help="a mountpoint, or a file or directory in a mount"
    )
    parser.add_argument(
        "--manifest",
        metavar="FILE",
        help="fetch what this file lists, a path on each line: absolute, relative to PATH "
        "(default: the mountpoint of the only mount) or an s3:// URI of the mount's bucket; - is "
        "standard input. Empty lines and those that begin with # are skipped",
    )
    parser.add_argument(
        "--shard",
        metavar="I/N",
        help="fetch one of N disjoint parts of the files, of about equal numbers; I counts from 0",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--wait",
        action="store_true",
        help="wait until the job has ended; fails if a file is not in the cache then",
    )
    how.add_argument(
        "--cancel",
        action="store_true",
        help="cancel the jobs at and below PATH; the mountpoint stands for all jobs",
    )
    parser.set_defaults(run=_warm)


def _add_pin(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "pin",
        help="fetch files into the cache and keep them there",
        description="Fetch files, and all files below directories, and never evict them until "
        "fusefs unpin. Pins outlive the daemon and the mount: every mount of the bucket that uses "
        "the cache respects them. A new version of a pinned object is kept once it was read, or "
        f"fetched by another fusefs pin. Fails if not everything could be fetched. {_PATTERNS}",
    )
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", help="a mountpoint, or a file or directory in a mount"
    )
    parser.add_argument(
        "--no-wait",
        action="store_true",
        help="return when the daemon has accepted the job; fusefs status shows its progress",
    )
    parser.set_defaults(run=_pin)


def _add_unpin(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "unpin",
        help="let pinned files be evicted",
        description="Let the files that are pinned at and below PATH be evicted when the cache "
        "needs their room. Pins that fusefs pin is still fetching are cancelled.",
    )
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a path that is pinned, or above")
    parser.set_defaults(run=_unpin)


def _add_drop(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "drop",
        help="remove cached copies of files from the local disk",
        description="Remove the cached copies of files, and of all files below directories; the "
        "bucket keeps them. Copies of files that programs have open stay, and so does what is not "
        "in the bucket yet. The command names files in use, and fails if a copy stays because it "
        f"is in use or pinned. {_PATTERNS}",
    )
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", help="a mountpoint, or a file or directory in a mount"
    )
    parser.add_argument(
        "--force", action="store_true", help="drop pinned copies as well; they stay pinned"
    )
    parser.set_defaults(run=_drop)


def _add_verify(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "verify",
        help="compare cached copies with their checksums",
        description="Read the cached copies of all files at or below PATH and compare them with "
        "their checksums. A copy that differs is dropped and fetched again from the bucket; the "
        "command fails if that is not possible.",
    )
    parser.add_argument(
        "path", metavar="PATH", help="a mountpoint, or a file or directory in a mount"
    )
    parser.set_defaults(run=_verify)


def _add_status(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "status",
        help="show the mounts, or how much of a path is on the local disk",
        description="Show one mount, or all mounts of this user, or of a file or directory in a "
        f"mount how much is on the local disk, and how much is pinned. {_PATTERNS}",
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        help="a mountpoint, or a file or directory in a mount (default: all mounts)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=_status)


def _add_doctor(commands: argparse._SubParsersAction[Parser], *, has_options: bool) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check the machine, a mount or a bucket, and show what to do",
        description="Check what a mount needs: the kernel, /dev/fuse, privileges and the cache "
        "disk; of a mount or a bucket also names, TLS, the clock, credentials, latency and "
        "throughput. Exit status 0: nothing is wrong (there may be advice), 1: something is.",
    )
    parser.add_argument(
        "target",
        metavar="MOUNTPOINT | s3://BUCKET[/PREFIX]",
        nargs="?",
        help="a mount, which is checked with its own settings, or a bucket (default: the machine)",
    )
    parser.add_argument(
        "--permissions",
        action="store_true",
        help="write, copy and delete objects of one byte to see what the credentials allow",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--config", metavar="PATH", help="read settings from this TOML file")
    if has_options:
        from fusefs.settings.mount import SETTINGS

        wanted = ("cache_dir", "cache_size", "min_free", "read_only", "no_delete")
        chosen = [one for one in SETTINGS if one.group == "S3" or one.name in wanted]
        _add_settings(parser, chosen)
    parser.set_defaults(run=_doctor)


def _add_metrics(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "metrics",
        help="metrics of all mounts of this user, for Prometheus",
        description="Serve the metrics of all mounts of this user at http://ADDRESS:PORT/metrics "
        "until ended, or write them to a file once. Needs the extra metrics "
        "(pip install 'fusefs[metrics]').",
    )
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--listen", metavar="ADDRESS:PORT", help="serve there; :PORT is all addresses")
    how.add_argument(
        "--textfile",
        metavar="FILE",
        help="replace this file in one step, for node_exporter's textfile collector",
    )
    parser.set_defaults(run=_metrics)


def _add_profile(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "profile",
        help="log what programs do on a mount, and summarize it",
        description="Log each request that reaches the daemon of a mount (when, how long it took, "
        "where the answer came from, operation, key, range), and end with a summary and advice. "
        "Reads of files that are open for passthrough do not reach the daemon. Ctrl-C ends early.",
    )
    parser.add_argument("mountpoint", metavar="MOUNTPOINT")
    parser.add_argument(
        "--for", dest="duration", metavar="DURATION", default="60s", help="how long (default: 60s)"
    )
    parser.add_argument("--summary", action="store_true", help="show the summary alone")
    parser.add_argument(
        "--json", action="store_true", help="print requests and, last, the summary as JSON lines"
    )
    parser.set_defaults(run=_profile)


def _add_top(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "top",
        help="a live view of all mounts: rates, what readers wait for, uploads",
        description="Show all mounts of this user each second: rates, where bytes come from, what "
        "readers wait for, requests to S3, uploads and jobs of fusefs warm. Without a terminal it "
        "prints lines. The screen needs the extra top (pip install 'fusefs[top]').",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--plain", action="store_true", help="print a line for each mount")
    how.add_argument("--json", action="store_true", help="print a JSON object each second")
    parser.add_argument(
        "--count", type=int, metavar="N", help="end after N updates (default: no limit)"
    )
    parser.set_defaults(run=_top)


def _add_report(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "report",
        help="write an archive for a bug report",
        description="Write versions, settings, status, counters, stacks and the end of the log of "
        "one mount, or of all mounts of this user, to an archive that only you can read. Secrets "
        "are left out.",
    )
    parser.add_argument(
        "mountpoint", metavar="MOUNTPOINT", nargs="?", help="a mount (default: all mounts)"
    )
    parser.add_argument(
        "--output", metavar="FILE", help="the archive (default: fusefs-report-TIME.tar.gz)"
    )
    parser.add_argument(
        "--redact",
        action="store_true",
        help="replace keys, buckets, hosts and paths by hashes as well",
    )
    parser.set_defaults(run=_report)


def _add_upgrade(commands: argparse._SubParsersAction[Parser], *, has_options: bool) -> None:
    parser = commands.add_parser(
        "upgrade",
        help="replace the daemon of a mount by this version",
        description="Start a daemon of this version, let the old one finish its requests, and hand "
        "the mount over; programs see a short pause. Options change settings, the others keep "
        "their values. If the new daemon cannot start, the old one goes on.",
    )
    parser.add_argument("mountpoint", metavar="MOUNTPOINT")
    if has_options:
        from fusefs.settings.mount import FIXED, SETTINGS

        _add_settings(parser, [setting for setting in SETTINGS if setting.name not in FIXED])
    parser.set_defaults(run=_upgrade)


def _add_keeper(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "keeper",
        help="hold the descriptors of mounts",
        description="Hold the /dev/fuse descriptors of mounts made with --descriptor-store, so "
        "that these mounts outlive their own keepers, too. For root only.",
    )
    parser.add_argument("--socket", metavar="PATH", required=True, help="the socket to listen on")
    parser.set_defaults(run=_keeper)


# --- the commands -------------------------------------------------------------


def _mount(options: argparse.Namespace) -> int:
    from fusefs.cli import mount

    return mount.mount(options, _complain)


def _profile(options: argparse.Namespace) -> int:
    from fusefs.cli import profile, sync
    from fusefs.settings.types import DURATION
    from fusefs.telemetry.access_summary import Access

    mountpoint = sync.mountpoint(options.mountpoint)
    try:
        seconds = DURATION.read(options.duration)
    except ValueError as error:
        raise _settings_error(f"--for: {error}") from None
    form = profile.json_line if options.json else profile.line

    def begun() -> None:
        print(f"recording for {options.duration}; Ctrl-C ends it", file=sys.stderr, flush=True)

    def show(access: Access) -> None:
        if not options.summary:
            print(form(access))

    summary, took_s = profile.profile(mountpoint, seconds, begun, show)
    around = profile.surroundings(mountpoint)
    if options.json:
        print(json.dumps(profile.as_json(summary, took_s, around)))
    else:
        print(profile.report(summary, took_s, around))
    return 0


def _upgrade(options: argparse.Namespace) -> int:
    from fusefs.cli import mount

    mount.upgrade(options)
    return 0


def _settings_error(sentence: str) -> Exception:
    from fusefs.settings.mount import SettingsError

    return SettingsError(sentence)


def _keeper(options: argparse.Namespace) -> int:
    from fusefs.keeper import fd_store

    return fd_store.main(options.socket)


def _umount(options: argparse.Namespace) -> int:
    from fusefs.cli import sync, umount

    mountpoint = sync.mountpoint(options.mountpoint)
    umount.end_mount(mountpoint, is_forced=options.force, is_lazy=options.lazy)
    return 0


def _sync(options: argparse.Namespace) -> int:
    from fusefs.cli import sync

    timeout_s = float("inf")
    if options.timeout is not None:
        from fusefs.settings.types import DURATION

        try:
            timeout_s = DURATION.read(options.timeout)
        except ValueError as error:
            raise _settings_error(f"--timeout: {error}") from None
    sync.sync(Path(options.path), timeout_s, sync.progress_display())
    return 0


def _warm(options: argparse.Namespace) -> int:
    from fusefs.cli import warm

    paths = [Path(path) for path in options.paths]
    if not paths and not options.manifest:
        raise _settings_error("PATH or --manifest is missing")
    if options.cancel:
        warm.cancel(paths)
        return 0
    shard = None
    if options.shard is not None:
        try:
            shard = warm.shard(options.shard)
        except ValueError as error:
            raise _settings_error(f"--shard: {error}") from None
    if options.manifest is None:
        return _fetch(warm.orders(paths, shard), is_waiting=options.wait)
    if len(paths) > 1:
        raise _settings_error("--manifest: its paths are relative to one PATH at most")
    base = paths[0] if paths else None
    order, bad = warm.manifest_order(options.manifest, base, shard, _complain)
    return _fetch([order], is_waiting=options.wait) or min(bad, 1)


def _fetch(orders: Sequence[warm.Order], *, is_waiting: bool) -> int:
    """Have daemons do jobs of `fusefs warm` or `fusefs pin`."""
    from fusefs.cli import status_report, warm

    jobs = warm.start(orders)
    try:
        warm.accepted(jobs)  # a missing path is an error at once
        if not is_waiting:
            return 0
        ended = warm.wait(jobs)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        _complain("the job goes on; fusefs status shows its progress, fusefs warm --cancel ends it")
        return 130
    for order, job in ended.items():
        print(f"{order.title}: {status_report.warmth(job)}")
    return 0 if all(warm.is_complete(job) for job in ended.values()) else 1


def _pin(options: argparse.Namespace) -> int:
    from fusefs.cli import warm

    orders = warm.orders([Path(path) for path in options.paths], is_pinned=True)
    return _fetch(orders, is_waiting=not options.no_wait)


def _unpin(options: argparse.Namespace) -> int:
    from fusefs.cli import local_copies

    local_copies.unpin([Path(path) for path in options.paths])
    return 0


def _drop(options: argparse.Namespace) -> int:
    from fusefs.cli import local_copies

    paths = [Path(path) for path in options.paths]
    are_dropped = [local_copies.drop(path, is_forced=options.force) for path in paths]
    return 0 if all(are_dropped) else 1


def _verify(options: argparse.Namespace) -> int:
    from fusefs.cli import verify

    path = Path(options.path)
    return 0 if verify.report(path, verify.verify(path)) else 1


def _status(options: argparse.Namespace) -> int:
    from fusefs.cli import status as overview
    from fusefs.cli import sync

    if options.path is None:
        statuses = overview.all_statuses()
    else:
        if options.path and (place := _place_in_mount(Path(options.path))):
            return _path_status(*place, is_json=options.json)
        statuses = [overview.mount_status(sync.mountpoint(options.path))]
    if options.json:
        print(json.dumps(statuses if options.path is None else statuses[0], indent=2))
    elif statuses:
        print("\n\n".join(overview.as_text(status) for status in statuses))
    else:
        print("no mounts")
    return 0


def _place_in_mount(path: Path) -> tuple[Path, str] | None:
    """The mountpoint of a path in a mount, and the path below it; None if it is no such path."""
    from fusefs.cli import sync
    from fusefs.launch.control import CommandError

    with contextlib.suppress(CommandError):
        mountpoint, below = sync.find(path)
        if below:
            return mountpoint, below
    return None


def _path_status(mountpoint: Path, below: str, *, is_json: bool) -> int:
    from fusefs.cli import local_copies

    status = local_copies.status(mountpoint, below)
    print(json.dumps(status, indent=2) if is_json else local_copies.as_text(status))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from fusefs.cli import doctor, mount
    from fusefs.settings.sources import CONFIG_VARIABLE

    config = options.config or os.environ.get(CONFIG_VARIABLE)
    return doctor.run(options, mount.flags(options), config)


def _report(options: argparse.Namespace) -> int:
    from fusefs.cli import report

    return report.run(options.mountpoint, options.output, redacts=options.redact)


def _top(options: argparse.Namespace) -> int:
    from fusefs.top import main as top

    return top.run(is_plain=options.plain, is_json=options.json, count=options.count)


def _metrics(options: argparse.Namespace) -> int:
    from fusefs.exporter import main as exporter

    return exporter.run(options.listen, options.textfile)


if __name__ == "__main__":
    sys.exit(main())
