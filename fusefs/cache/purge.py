"""Removes the content of a cache directory that is no longer used, and nothing outside of it.

    python -m fusefs.cache.purge look DIRECTORY
    python -m fusefs.cache.purge all DIRECTORY

`look` prints, as JSON, whether a mount uses the directory (`is_used`), and how many
files there hold changes that were never uploaded (`leftovers`): contents, removals,
attributes, renames, uploads to be aborted. `all` removes everything; the caller does
not call it on a directory with changes.

The caller runs this as the directory's owner, so it can't remove other users' files.
It opens each directory relative to its parent's descriptor, follows no link, and
enters no other file system.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from fusefs.cache.disk import IN_USE, STATE
from fusefs.linux.files import closing, try_lock

# More than the depth of the deepest directory: mounts, a mount, staging, a time.
_DEEPEST = 6
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | _NO_LINK


def find_obstacles(directory: Path) -> dict[str, object]:
    """Return the `is_used` and `leftovers` that `look` prints; raises OSError. Blocks."""
    is_used, leftovers = False, 0
    for part in _listed(directory):
        # Read-only mounts have no staging directory.
        if part.is_dir() and not part.is_symlink() and (part / IN_USE).is_file():
            is_used = is_used or _is_locked(part / IN_USE, os.O_RDONLY | _NO_LINK)
    for mount in _listed(directory / STATE):
        leftovers += sum(path.suffix == ".json" for path in _listed(mount / "renames"))
        for staging in _listed(mount / "staging"):
            if staging.is_dir() and not staging.is_symlink():
                is_used = is_used or _is_locked(staging, _FLAGS)
                leftovers += sum(map(_has_changes, _listed(staging)))
    return {"is_used": is_used, "leftovers": leftovers}


def _is_locked(path: Path, flags: int) -> bool:
    with closing(os.open(path, flags)) as fd:
        return not try_lock(fd)


def _has_changes(path: Path) -> bool:
    """True if an entry of a staging directory holds a change, not only data about other entries."""
    if path.name.isdecimal():
        return True
    is_about_others = path.name == "source" or path.suffix in (".json", ".new", ".safe")
    return not is_about_others and path.lstat().st_size > 0


def remove(directory: Path) -> None:
    """Remove the content of a cache directory; raises OSError if that fails. Blocks."""
    with closing(os.open(directory, _FLAGS)) as fd:
        _empty(fd, os.fstat(fd).st_dev, _DEEPEST)


def _empty(directory: int, device: int, depth: int) -> None:
    """Remove an open directory's content; OSError at a mount point, or below `depth` levels."""
    with os.scandir(directory) as entries:
        content = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in content:
        if not is_directory:
            os.unlink(name, dir_fd=directory)
            continue
        with closing(os.open(name, _FLAGS, dir_fd=directory)) as fd:
            if depth and os.fstat(fd).st_dev == device:
                _empty(fd, device, depth - 1)
        os.rmdir(name, dir_fd=directory)


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def main() -> int:
    """Run the command `look` or `all`; return the exit status."""
    what, directory = sys.argv[1], Path(sys.argv[2])
    try:
        if what == "look":
            print(json.dumps(find_obstacles(directory)))
        else:
            remove(directory)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
