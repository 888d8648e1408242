"""The choice of a daemon's user: an ordinary user if possible, so that the daemon is unprivileged.

That user must be able to read the files that the daemon needs: the program, the CA bundle, a
web identity token. If there is no user `fusefs`, the user is a uid without a name, used for this
cache directory alone, not `nobody`: other programs run as `nobody`, and could change cached data
and read keys. AWS configuration files need not be readable: the launcher passes the content of
those that the daemon's user can't read (see launcher.py).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import fusefs
from fusefs.launch import registry
from fusefs.settings.mount import MountSettings

# Packages that every daemon imports; their own imports are not checked.
_PACKAGES = ("trio", "botocore", "isal")
DEFAULT_USER = "fusefs"
# Uids for cache directories. No distribution, systemd, /etc/subuid or directory service assigns
# them by default, nor does the CSI driver; the second range is for user namespaces of 65,536 ids.
_OF_CACHES = (range(2_100_000_000, 2_140_000_000), range(60_706, 61_184))
_NOBODY = 65534
_ID_MAPS = ("/proc/self/uid_map", "/proc/self/gid_map")
NO_ID = 2**32 - 1  # chown(2) takes it for "no change"
_NUMBER = re.compile(r"[0-9]{1,10}")
# The variables that name AWS's configuration files, and their default paths.
AWS_FILES = {
    "AWS_CONFIG_FILE": "~/.aws/config",
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
}
# Configuration keys whose files or programs, in the home directory, are used while mounted.
_HOME_BOUND = ("sso_", "credential_process", "web_identity_token_file")


class UserError(Exception):
    """The daemon cannot run as the user that `--user` names; the message is for the terminal."""


@dataclass(frozen=True, slots=True)
class User:
    """The user of a daemon; `why` is the reason to share this user with other programs, or ""."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    why: str = ""

    @property
    def is_own(self) -> bool:
        return self.uid == os.geteuid()


def choose(settings: MountSettings, environment: Mapping[str, str] = os.environ) -> User:
    """Choose the daemon's user; `environment` names AWS's configuration files. Raises UserError."""
    if os.geteuid() != 0:
        if settings.user is not None:
            raise UserError("only root may use --user; drop it")
        return current_user()
    if settings.user is not None:
        user = _look_up(settings.user)
        if user is None:
            raise UserError(f"--user: there is no user {settings.user}")
        if not user.is_own and (why := _obstacle(user, settings, environment)):
            raise UserError(f"--user {user.name}: {why}")
        return user
    why = "no user id is free for the daemon"
    for user in filter(None, (_look_up(DEFAULT_USER), _user_of_cache(settings.cache_dir))):
        why = _obstacle(user, settings, environment) or _default_obstacle(settings, environment)
        if not why:
            return user
    return current_user(why)


def daemon_user(mountpoint: Path) -> User | None:
    """Return the user of a mount's daemon; None if the mount is not registered."""
    uid = registry.server_of(mountpoint)
    return None if uid is None else _look_up(str(uid))


def current_user(why: str = "") -> User:
    """Return the user of this process; `why` is the reason to use it for the daemon."""
    return User(str(os.geteuid()), os.geteuid(), os.getegid(), tuple(os.getgroups()), why)


def _look_up(name: str) -> User | None:
    try:
        entry = pwd.getpwuid(int(name)) if _NUMBER.fullmatch(name) else pwd.getpwnam(name)
    except (KeyError, OverflowError):
        is_number = _NUMBER.fullmatch(name) and 0 < int(name) < NO_ID
        return _nameless(int(name)) if is_number else None
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return User(entry.pw_name, entry.pw_uid, entry.pw_gid, groups)


def _nameless(number: int, why: str = "") -> User:
    """Return a user without a name, whose uid and gid are `number`."""
    return User(str(number), number, number, (), why)


def _user_of_cache(directory: Path) -> User | None:
    """Return a cache directory's user; None if the user namespace has no uid for it.

    The owner of its content stays its user, if that is nameless or `nobody`. Otherwise the uid is
    a hash of the path.
    """
    owner = _owner_of_content(directory)
    if owner is not None and any(owner in numbers for numbers in _OF_CACHES):
        return _nameless(owner)
    if owner == _NOBODY:
        # No chown: files may wait for upload, and the user nobody could have prepared links.
        why = (
            f"{directory} belongs to the user nobody, who may run other programs too; once"
            " `fusefs status` shows nothing to upload, unmount it and remove the directory"
        )
        return _nameless(owner, why)
    digest = int.from_bytes(hashlib.sha256(os.fsencode(directory)).digest())
    for numbers in _OF_CACHES:
        number = numbers[digest % len(numbers)]
        if all(_is_mapped(number, table) for table in _ID_MAPS):
            return _nameless(number)
    return None


def _is_mapped(number: int, table: str) -> bool:
    """True if the id map `table` of this process's user namespace contains `number`."""
    lines = (map(int, line.split()) for line in Path(table).read_text().splitlines())
    return any(first <= number < first + count for first, _, count in lines)


def _obstacle(user: User, settings: MountSettings, environment: Mapping[str, str]) -> str:
    """Return the reason why a user cannot serve this mount, or ""."""
    owner = _owner_of_content(settings.cache_dir)
    if owner not in (None, user.uid):
        return f"the cache directory {settings.cache_dir} belongs to user {owner}"
    needed = [*_program(), (existing(settings.cache_dir.parent), os.X_OK)]
    token = environment.get("AWS_WEB_IDENTITY_TOKEN_FILE")
    needed += [(Path(path), os.R_OK) for path in (settings.ca_bundle, token) if path]
    for path, mode in needed:
        if not may_use(user, path, mode):
            return f"{user.name} cannot use {path}"
    return ""


def _program() -> Iterator[tuple[Path, int]]:
    """Yield the paths that a daemon needs to start, each with the access mode that it needs."""
    link = Path(sys.executable)
    while link.is_symlink():  # a virtual environment's
        yield link.parent, os.X_OK
        link = link.parent / os.readlink(link)
    yield link, os.X_OK
    if sys.prefix != sys.base_prefix:
        yield Path(sys.prefix, "pyvenv.cfg"), os.R_OK
    yield Path(os.__file__), os.R_OK
    yield Path(fusefs.__file__).parent, os.R_OK | os.X_OK
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.has_location and spec.origin is not None:
            yield Path(spec.origin).parent, os.R_OK | os.X_OK
            yield Path(spec.origin), os.R_OK


def _default_obstacle(settings: MountSettings, environment: Mapping[str, str]) -> str:
    for variable, path in aws_files(environment):
        text = path.read_text(errors="replace")
        if any(word in text for word in _HOME_BOUND) and not settings.anonymous:
            return f"{variable}'s {path} renews credentials in the home directory"
    return ""


def aws_files(environment: Mapping[str, str] = os.environ) -> list[tuple[str, Path]]:
    """Return the existing AWS configuration files as pairs of environment variable and path."""
    found = []
    for variable, default in AWS_FILES.items():
        path = Path(os.path.expanduser(environment.get(variable) or default))
        if path.is_file():
            found.append((variable, path))
    return found


def _owner_of_content(directory: Path) -> int | None:
    """Return the uid of a directory's owner; None if it is empty, missing or can't be read."""
    try:
        return directory.stat().st_uid if any(directory.iterdir()) else None
    except OSError:
        return None


def existing(path: Path) -> Path:
    """Return a path if it exists, else its nearest existing parent."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def may_use(user: User, path: Path, mode: int) -> bool:
    """True if the modes of a path and its parents allow a user the access `mode`."""
    resolved = path.resolve()
    is_reachable = all(_grants(user, directory, os.X_OK) for directory in resolved.parents)
    return is_reachable and _grants(user, resolved, mode)


def _grants(user: User, path: Path, mode: int) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    bits = stat.S_IMODE(found.st_mode)
    if user.uid == 0:
        return True
    if found.st_uid == user.uid:
        bits >>= 6
    elif found.st_gid == user.gid or found.st_gid in user.groups:
        bits >>= 3
    return bits & mode == mode
