"""Lists of paths: for `fusefs warm --manifest FILE`, and for too many paths for one request.

A line is a path: relative to a directory of the mount, absolute, or the s3:// URI of an object of
the mount's bucket. Empty lines and lines that begin with `#` are ignored. The daemon gets one line
for each line of the file, so that its line numbers are those of the file.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

from fusefs.cli import sync
from fusefs.cli.polling import ANSWER_TIMEOUT_S
from fusefs.launch import registry
from fusefs.launch.control import CommandError
from fusefs.launch.mount_requests import daemon_request
from fusefs.linux import mountinfo

# Bytes of a list in one request, which has at most 256 KiB: JSON makes up to six bytes of one.
PIECE = 40_000


class LineError(Exception):
    """A line of a list is not a path in the mount; the message says why."""


def send(mountpoint: Path, lines: Iterable[str]) -> str:
    """Send the daemon a list of paths relative to `mountpoint`; return the list's new name."""
    name = secrets.token_hex(16)
    offset, size = 0, 0
    piece: list[str] = []

    def flush() -> None:
        message = {"command": "warm list", "list": name, "offset": offset, "lines": "".join(piece)}
        daemon_request(mountpoint, message, ANSWER_TIMEOUT_S)

    for line in lines:
        piece.append(f"{line}\n")
        size += len(line.encode()) + 1
        if size >= PIECE:
            flush()
            offset, piece, size = offset + size, [], 0
    flush()
    return name


def has_line(path: str) -> bool:
    """True if a path can be a line of a list: it is not empty, is UTF-8 and has no newline."""
    # Python's strings have surrogates for bytes that are not UTF-8.
    is_text = not any("\ud800" <= character <= "\udfff" for character in path)
    return bool(path) and "\n" not in path and is_text


class Manifest:
    """Converts the lines of one manifest to paths relative to the mountpoint of one mount.

    Relative lines are below `base`, a directory given relative to the mountpoint. With `is_text`,
    lines may be comments, and paths may have spaces around them.
    """

    def __init__(self, mountpoint: Path, base: str, *, is_text: bool = True) -> None:
        registration = registry.registration_of(mountpoint)
        if registration is None:
            raise CommandError(f"{mountpoint} is not a mount of fusefs; fusefs status lists them")
        self.mountpoint = mountpoint
        self._base = base
        self._is_text = is_text
        self._source = registration.source
        self._mounts = mountinfo.kernel_mounts()
        below = f"{str(mountpoint).rstrip('/')}/"
        self._has_nested = any(mount.path.startswith(below) for mount in self._mounts)

    def paths(self, lines: Iterable[bytes], refuse: Callable[[int, str], None]) -> Iterable[str]:
        """Yield each line's path, or "" for a line without a path.

        `refuse` gets the number of each bad line, counted from 1, and the reason.
        """
        for number, line in enumerate(lines, 1):
            text = line.strip(b" \t\r\n") if self._is_text else line
            if not text or (self._is_text and text.startswith(b"#")):
                yield ""
                continue
            try:
                yield self._path(text.decode())
            except UnicodeDecodeError:
                refuse(number, "it is not UTF-8, and no object has such a name")
                yield ""
            except LineError as error:
                refuse(number, str(error))
                yield ""

    def _path(self, text: str) -> str:
        if text.startswith("s3://"):
            bucket = self._source.removeprefix("s3://")
            path = text.removeprefix("s3://")
            if not path.startswith(bucket) or path == bucket:
                raise LineError(f"{text} is not below {self._source}")
            return path.removeprefix(bucket).removesuffix("/")
        if text.startswith("/"):
            relative = os.path.relpath(os.path.normpath(text), self.mountpoint)
            if relative.startswith("../"):
                relative = self._through_links(text)
        else:
            relative = os.path.normpath(os.path.join(self._base, text))
        if relative == ".." or relative.startswith("../"):
            raise LineError(f"{text} is not in the mount {self.mountpoint}")
        self._refuse_nested(text, relative)
        if relative == ".":
            raise LineError(f"{text} is the whole mount: name it on the command line")
        if self._is_text and not has_line(relative):
            raise LineError(f"{text} is in {self._base!r}, which a line of a list cannot name")
        return relative

    def _refuse_nested(self, text: str, relative: str) -> None:
        if not self._has_nested:
            return
        found = mountinfo.reached(str(self.mountpoint / relative), self._mounts)
        if found is not None and found.mountpoint != self.mountpoint:
            raise LineError(f"{text} is in the mount {found.mountpoint}, not in {self.mountpoint}")

    def _through_links(self, text: str) -> str:
        """Return a path that leads to the mount through symbolic links, relative to the mount."""
        try:
            mountpoint, below = sync.find(Path(text))
        except CommandError as error:
            raise LineError(str(error)) from None
        if mountpoint != self.mountpoint:
            raise LineError(f"{text} is not in the mount {self.mountpoint}")
        return below or "."
