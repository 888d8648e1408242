"""`mount.fusefs` and `umount.fusefs`: the helpers of mount(8) and umount(8) for /etc/fstab.

    s3://bucket/prefix /data fusefs _netdev,allow_other,cache_size=100GiB 0 0

The options are the settings of `fusefs mount`, with the same names, with `_` or `-`. Options that
mount(8) and systemd handle themselves are accepted and ignored; unknown options are refused.
`credentials=FILE` names a file of AWS credentials and `home=DIR` a home directory, because systemd
mounts without an environment.

The exit status follows mount(8): 0 for success, 1 for a wrong command line, 32 for a failed mount.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import sys
from collections.abc import Callable, Sequence

from fusefs.cli import main as program
from fusefs.settings.mount import SETTINGS
from fusefs.settings.sources import split_options

SUCCESS = 0
USAGE = 1
FAILED = 32
# The helpers' exit status for an exit status of `fusefs`; FAILED for any other.
_STATUSES = {0: SUCCESS, 2: USAGE}

# Options that mount(8), fstab(5) or systemd.mount(5) handle, or that every fusefs mount has.
IGNORED = frozenset(
    (
        "defaults",
        "rw",
        "auto",
        "noauto",
        "nofail",
        "_netdev",
        "user",
        "users",
        "nouser",
        "owner",
        "group",
        "exec",
        "nosuid",
        "nodev",
        "async",
        "atime",
        "noatime",
        "relatime",
        "norelatime",
        "nodiratime",
        "lazytime",
        "nolazytime",
        "nostrictatime",
        "dirsync",
        "loud",
        "silent",
    )
)
_HANDLED = ("x-", "X-", "comment=")
VARIABLES = {"credentials": "AWS_SHARED_CREDENTIALS_FILE", "home": "HOME"}
_BY_KEY = {setting.key: setting for setting in SETTINGS}


class OptionError(ValueError):
    """Raised for an option that cannot be accepted; the message is one line."""


def mount() -> int:
    """Run `mount.fusefs SOURCE MOUNTPOINT [-sfnvrw] [-o OPTIONS]`; return the exit status."""
    return _reporting("mount.fusefs", _mount, sys.argv[1:])


def umount() -> int:
    """Run `umount.fusefs MOUNTPOINT [-nlfvr]`, which waits for uploads; return the exit status."""
    return _reporting("umount.fusefs", _umount, sys.argv[1:])


def _reporting(name: str, work: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    try:
        return work(arguments)
    except OptionError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return USAGE


def _mount(arguments: Sequence[str]) -> int:
    paths, letters, options = _parse(arguments)
    if os.geteuid() != 0:
        # mount(8) adds user=NAME if a user other than root calls it; the daemon runs as this user
        # in any case.
        options = [option for option in options if not option.startswith("user=")]
    if len(paths) != 2:
        raise OptionError("usage: mount.fusefs s3://BUCKET[/PREFIX] MOUNTPOINT [-o OPTIONS]")
    flags, variables = read_options(options, is_sloppy="s" in letters)
    if "r" in letters:
        flags.append("--read-only")
    if "f" in letters:  # fake: check everything, but do not mount
        return SUCCESS
    # systemd does not set HOME, where botocore looks for credentials.
    with contextlib.suppress(KeyError):  # a user who is not in /etc/passwd
        os.environ.setdefault("HOME", pwd.getpwuid(os.geteuid()).pw_dir)
    os.environ.update(variables)
    return _STATUSES.get(program.main(["mount", *paths, *flags]), FAILED)


def _umount(arguments: Sequence[str]) -> int:
    paths, letters, _ = _parse(arguments)
    if len(paths) != 1:
        raise OptionError("usage: umount.fusefs MOUNTPOINT [-nlfvr]")
    flags = [flag for letter, flag in (("l", "--lazy"), ("f", "--force")) if letter in letters]
    return FAILED if program.main(["umount", *flags, paths[0]]) else SUCCESS


def _parse(arguments: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Return the paths, the letters of all flags such as `-v`, and the options of `-o`."""
    paths: list[str] = []
    letters = ""
    options: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            paths.append(word)
        elif word[:2] in ("-o", "-t", "-N"):
            if not word[2:] and not rest:
                raise OptionError(f"{word} needs a value")
            value = word[2:] or rest.pop(0)
            options += split_options(value) if word[:2] == "-o" else []
        else:
            letters += word[1:]
    return paths, letters, [option for option in options if option]


def read_options(
    options: Sequence[str], *, is_sloppy: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Return the flags of `fusefs mount` for these options, and environment variables to set.

    Raises:
        OptionError: an option is unknown and not `is_sloppy`, or a value is invalid.
    """
    flags: list[str] = []
    variables: dict[str, str] = {}
    for option in options:
        name, separator, value = option.partition("=")
        key = name.replace("_", "-")
        if option in IGNORED or option.startswith(_HANDLED):
            continue
        if key == "foreground":
            if not is_sloppy:
                raise OptionError(
                    f"{option}: mount(8) waits for its helper to end; the unit fusefs@.service"
                    " stays"
                )
        elif option == "ro":
            flags.append("--read-only")
        elif name in VARIABLES and value:
            variables[VARIABLES[name]] = value
        elif key == "config" and value:
            flags += ["--config", value]
        elif key in _BY_KEY:
            flags += _flag(key, value if separator else None)
        elif not is_sloppy:
            raise OptionError(f"{name}: fusefs has no such option; man fusefs-mount lists all")
    return flags, variables


def _flag(key: str, value: str | None) -> list[str]:
    setting = _BY_KEY[key]
    if not setting.is_switch:
        if value is None:
            raise OptionError(f"{key}: needs a value, as {key}={setting.type.metavar}")
        return [f"{setting.flag}={value}"]
    if value in (None, "true", "on", "yes", "1"):
        return [setting.flag]
    if value in ("false", "off", "no", "0"):
        if key.startswith("no-"):  # no flag turns it off
            raise OptionError(f"{key}: is off unless it is given; leave it out")
        return [f"--no-{key}"]
    raise OptionError(f"{key}: {value!r} is neither true nor false")
