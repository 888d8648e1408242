"""What programs do while one request of theirs is held back, and what the bucket has to have then.

A row has its own directory, from which its names and keys count. `change` sends the request that
is held back; `then` is acknowledged after it, before that request is executed. The bucket has
KEY=CONTENT then, with :MODE where that counts. `-` is nothing.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Sent in parts.
LARGE = bytes(range(256)) * (9 << 12)
CONTENTS = {"": b"", "1": b"first content", "2": b"second content", "L": LARGE, "LL": 2 * LARGE}
# Where the store honours conditions the late requests of the rows with a star have no effect at
# all. The others make or remove what has the ETag that is expected, or bring back what was deleted.
TABLE = """
  name                      held back      before     change        then        in the bucket
* put-then-put              PUT a          -          put a 1       put a 2     a=2
  put-then-unlink           PUT a          -          put a 1       unlink a    -
  put-then-rename           PUT a          -          put a 1       rename a b  b=1
  save-by-rename            PUT tmp        put a 1    put tmp 2     rename tmp a  a=2
* put-then-renamed-over     PUT a          put b 2    put a 1       rename b a  a=2
* rename-copy-then-put      COPY b         put a 1    rename a b    put b 2     b=2
* rename-copy-equal-source  COPY b         put a 1    rename a b    put b 2, put a 1  a=1 b=2
* rename-delete-then-made   DELETE a       put a 1    rename a b    put a 2     a=2 b=1
* unlink-then-made          DELETE a       put a 1    unlink a      put a 2     a=2
  unlink-then-made-equal    DELETE a       put a 1    unlink a      put a 1     a=1
* large-complete            COMPLETE a     -          put a L       put a 2     a=2
  large-then-unlink         COMPLETE a     -          put a L       unlink a    -
* large-part                PART a         -          put a L       put a 2     a=2
* large-part-copy           PART COPY a    put a LL   edit a        put a 2     a=2
* put-then-large            PUT a          -          put a 1       put a L     a=L
  chmod-then-chmod          COPY a         put a 1    chmod a 600   chmod a 640  a=1:640
* chmod-then-put            COPY a         put a 1    chmod a 600   put a 2     a=2:600
  mkdir-then-rmdir          PUT d/         -          mkdir d       rmdir d     -
  rmdir-then-mkdir          DELETE d/      mkdir d    rmdir d       mkdir d     d/=
* tree-copy-then-put        COPY e/a       put d/a 1  rename d e    put e/a 2   e/= e/a=2
* tree-deletes-then-made    DELETE MANY *  put d/a 1  rename d e    put d/a 2   d/= d/a=2 e/= e/a=1
  tree-deletes-then-equal  DELETE MANY *  put d/a 1  rename d e    put d/a 1   d/= d/a=1 e/= e/a=1
  lock-then-unlink          PUT a          -          lock a        unlink a    -
  symlink-then-unlink       PUT a          -          symlink a to  unlink a    -
"""


@dataclass(frozen=True)
class Row:
    """One row; `key` is a pattern below the row's directory, as are the keys of `expected`."""

    name: str
    operation: str
    key: str
    before: str
    change: str
    then: str
    expected: dict[str, bytes]
    modes: dict[str, int]


def act(directory: Path, steps: str) -> None:
    """Make the calls of a column, one after the other."""
    for step in steps.split(", ") if steps != "-" else []:
        call, name, *more = step.split()
        CALLS[call](directory / name, *more)


def _put(path: Path, content: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(CONTENTS[content])


def _edit(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"edited")


def _chmod(path: Path, mode: str) -> None:
    path.chmod(int(mode, 8))
    # Attributes are sent a second later, or when a program waits for them.
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


CALLS: dict[str, Callable[..., object]] = {
    "put": _put,
    "edit": _edit,
    "chmod": _chmod,
    "lock": lambda path: path.touch(exist_ok=False),  # O_EXCL
    "mkdir": Path.mkdir,
    "rename": lambda path, to: path.rename(path.with_name(to)),
    "rmdir": Path.rmdir,
    "symlink": Path.symlink_to,
    "unlink": Path.unlink,
}


def _row(line: str) -> Row:
    name, held, before, change, then, bucket = re.split("  +", line)
    operation, _, key = held.rpartition(" ")
    found = re.findall(r"(\S+)=(\w*)(?::(\w+))?", bucket)
    expected = {key: CONTENTS[content] for key, content, _ in found}
    modes = {key: int(mode, 8) for key, _, mode in found if mode}
    return Row(name, operation, key, before, change, then, expected, modes)


LINES = TABLE.strip("\n").splitlines()[1:]
ROWS = [_row(line[2:]) for line in LINES]
FENCED = {row.name for row, line in zip(ROWS, LINES, strict=True) if line[0] == "*"}
