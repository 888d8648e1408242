"""The command `fusefs`: mount, umount, status, warm, pin, drop, sync and others.

`mount` reads the settings (see `settings`), makes the checks that need no S3 and starts the daemon
(see `launch`). The other commands find the daemon in the registry (launch/registry.py). They answer
at once, even if the machine is busy or the mount hangs. Each command imports its modules when it
runs, because imports take most of the time of a short command.

Every failure is one line on standard error that begins with `fusefs: `. Exit status: 0 success, 1
failure, 2 the command line or a setting cannot be read. The command line is described in parser.py.

The commands' functions raise CommandError with a sentence for the user; ControlError if the mount
has ended, or its daemon does not answer or refuses; and OSError for files. `main` shows the errors.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fusefs.cli.parser import make_parser

if TYPE_CHECKING:
    from fusefs.cli import warm


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    _prepare_streams()
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        options = _parsed(arguments)
        status = _COMMANDS[options.command](options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as head(1), has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _complain(f"{where}{error.strerror or error}")
        return 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except Exception as error:
        status = _status_of(error)
        _complain(error)
        return status


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    try:
        return make_parser(arguments).parse_args(arguments)
    except SystemExit:
        sys.stdout.flush()  # raises BrokenPipeError if a help text has lost its reader
        raise


def _status_of(error: Exception) -> int:
    """Return the exit status for an error whose message is for the user; raise other errors."""
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
    from fusefs.settings.display import shown

    print(f"fusefs: {shown(' '.join(str(what).split()))}", file=sys.stderr)


def _settings_error(sentence: str) -> Exception:
    from fusefs.settings.mount import SettingsError

    return SettingsError(sentence)


# --- streams and signals ------------------------------------------------------


def _prepare_streams() -> None:
    """Make standard output able to print every name, in any locale.

    Closed streams are opened on /dev/null, or the next opened file would get a stream's number.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r+"))
    codecs.register_error("fusefs", _written)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="fusefs")


def _written(error: UnicodeError) -> tuple[str | bytes, int]:
    """Handle an encoding error for `codecs`: return (replacement, position to go on from)."""
    assert isinstance(error, UnicodeEncodeError)
    error.end = error.start + 1  # only one character of several in a row
    try:
        return codecs.lookup_error("surrogateescape")(error)  # a byte that is no text
    except UnicodeError:
        return codecs.backslashreplace_errors(error)


# --- the commands -------------------------------------------------------------


def _mount(options: argparse.Namespace) -> int:
    from fusefs.cli import mount

    return mount.mount(options, _complain)


def _upgrade(options: argparse.Namespace) -> int:
    from fusefs.cli import mount

    mount.upgrade(options)
    return 0


def _umount(options: argparse.Namespace) -> int:
    from fusefs.cli import umount
    from fusefs.launch import registry

    mountpoint = registry.resolve(options.mountpoint)
    umount.end_mount(mountpoint, is_forced=options.force, is_lazy=options.lazy)
    return 0


def _sync(options: argparse.Namespace) -> int:
    from fusefs.cli import sync

    sync.sync(options.path, options.timeout)
    return 0


def _warm(options: argparse.Namespace) -> int:
    from fusefs.cli import warm

    paths = options.paths
    if options.cancel:
        if options.manifest is not None or options.shard is not None:
            raise _settings_error("--cancel: takes only PATHs; the mountpoint cancels all jobs")
        warm.cancel(paths)
        return 0
    shard = None
    if options.shard is not None:
        try:
            shard = warm.shard(options.shard, os.environ)
        except ValueError as error:
            raise _settings_error(f"--shard: {error}") from None
    if options.manifest is None:
        return _fetch(warm.requests(paths, shard), is_waiting=options.wait)
    if len(paths) > 1:
        raise _settings_error("--manifest: takes one PATH, which the paths in it are relative to")
    request, bad = warm.manifest_request(options.manifest, paths[0], shard, _complain)
    return _fetch([request], is_waiting=options.wait) or min(bad, 1)


def _plan(options: argparse.Namespace) -> int:
    from fusefs.cli import plan

    path = options.path
    if options.end:
        plan.end(path, options.reader)
        return 0
    if options.file is None:
        raise _settings_error("FILE is missing; - is standard input")
    separator = b"\0" if options.null else b"\n"
    return 0 if plan.send(path, options.file, options.reader, separator, _complain) else 1


def _record(options: argparse.Namespace) -> int:
    from fusefs.cli import plan

    plan.record(options.path, options.file, "\0" if options.null else "\n")
    return 0


def _fetch(requests: Sequence[warm.WarmRequest], *, is_waiting: bool) -> int:
    """Start jobs of `fusefs warm` or `fusefs pin`, wait if asked to; return the exit status."""
    from fusefs.cli import status_report, warm
    from fusefs.settings.display import shown

    try:
        jobs = warm.start(requests)
        warm.accepted(jobs)  # a missing path is an error at once
        if not is_waiting:
            return 0
        ended = warm.wait(jobs)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        _complain("what has begun goes on; fusefs status shows it, fusefs warm --cancel ends it")
        return 130
    for request, job in ended.items():
        print(shown(f"{request.title}: {status_report.warm_progress(job)}"))
    return 0 if all(warm.is_complete(job) for job in ended.values()) else 1


def _pin(options: argparse.Namespace) -> int:
    from fusefs.cli import warm

    return _fetch(warm.requests(options.paths, is_pinned=True), is_waiting=not options.no_wait)


def _unpin(options: argparse.Namespace) -> int:
    from fusefs.cli import local_copies

    local_copies.unpin(options.paths)
    return 0


def _drop(options: argparse.Namespace) -> int:
    from fusefs.cli import local_copies

    drop = local_copies.give_up if options.unsent else local_copies.drop
    are_dropped = [drop(path) for path in options.paths]
    return 0 if all(are_dropped) else 1


def _status(options: argparse.Namespace) -> int:
    from fusefs.cli import status_report
    from fusefs.diagnosis import mount_status

    if options.settings:
        return _show_settings(options)
    if options.path is None:
        statuses = mount_status.all_statuses()
    elif place := _place_in_mount(options.path):
        from fusefs.cli import local_copies

        status = local_copies.status(*place)
        print(json.dumps(status, indent=2) if options.json else local_copies.as_text(status))
        return 0
    else:
        from fusefs.launch import registry

        statuses = [mount_status.mount_status(registry.resolve(options.path))]
    if options.json:
        print(json.dumps(statuses if options.path is None else statuses[0], indent=2))
    elif statuses:
        print("\n\n".join(status_report.as_text(status) for status in statuses))
    else:
        print("no mounts")
    return 0 if all(map(status_report.is_healthy, statuses)) else 1


def _show_settings(options: argparse.Namespace) -> int:
    from fusefs.cli.polling import ANSWER_TIMEOUT_S
    from fusefs.launch import mount_requests, registry

    mounts = [Path(one.mountpoint) for one in registry.all_mounts()]
    if options.path is not None:
        mounts = [registry.resolve(options.path)]
    answers = [
        mount_requests.daemon_request(mount, {"command": "settings"}, ANSWER_TIMEOUT_S)
        for mount in mounts
    ]
    if options.json:
        print(json.dumps([answer["settings"] for answer in answers], indent=2))
        return 0
    for mount, answer in zip(mounts, answers, strict=True):
        print(f"[{json.dumps(os.fspath(mount))}]")  # TOML has JSON's strings
        for name, text in answer["settings"].items():
            if name != "mountpoint":
                print(f"{name.replace('_', '-')} = {json.dumps(text)}")
    return 0


def _place_in_mount(path: Path) -> tuple[Path, str] | None:
    """Split a path into mountpoint and remainder; None for a mountpoint or a path in no mount."""
    from fusefs.cli import sync
    from fusefs.launch.control import CommandError

    with contextlib.suppress(CommandError):
        mountpoint, below = sync.find(path)
        if below:
            return mountpoint, below
    return None


def _doctor(options: argparse.Namespace) -> int:
    from fusefs.cli import doctor, mount

    return doctor.run(options, mount.flags(options), options.config)


def _report(options: argparse.Namespace) -> int:
    from fusefs.diagnosis import report
    from fusefs.launch import registry

    path = Path(options.output or time.strftime("fusefs-report-%Y%m%d-%H%M%S.tar.gz"))
    mountpoint = options.mountpoint
    report.write(path, registry.resolve(mountpoint) if mountpoint is not None else None)
    print(f"{path.absolute()}: please look through it before it leaves this machine")
    return 0


def _top(options: argparse.Namespace) -> int:
    from fusefs.top import main as top

    return top.run(
        is_plain=options.plain, is_json=options.json, count=options.count, every_s=options.every
    )


def _metrics(options: argparse.Namespace) -> int:
    from fusefs.exporter import main as exporter

    return exporter.run(options.listen, options.textfile)


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "mount": _mount,
    "umount": _umount,
    "status": _status,
    "warm": _warm,
    "plan": _plan,
    "record": _record,
    "pin": _pin,
    "unpin": _unpin,
    "drop": _drop,
    "sync": _sync,
    "doctor": _doctor,
    "report": _report,
    "metrics": _metrics,
    "top": _top,
    "upgrade": _upgrade,
}


if __name__ == "__main__":
    sys.exit(main())
