"""What programs do while one request of theirs is held back, and what the bucket has to have then.

A row has its own directory. `change` is what sends the request that is held
back, `then` what is acknowledged after it, before that request is executed.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

V1, V2, V3 = b"first content", b"second content", b"third content"
# Sent in parts.
LARGE = bytes(range(256)) * (9 << 12)

Step = Callable[[Path], object]


@dataclass(frozen=True)
class Row:
    """One row; `key` is a pattern below the row's directory, as are the keys of `expected`."""

    name: str
    operation: str
    key: str
    change: Step
    then: Step
    expected: dict[str, bytes]
    before: Step = lambda _directory: None
    mode: tuple[str, int] | None = None


def _write(name: str, data: bytes) -> Step:
    def act(directory: Path) -> None:
        (directory / name).write_bytes(data)

    return act


def _rename(old: str, new: str) -> Step:
    return lambda directory: os.rename(directory / old, directory / new)


def _unlink(name: str) -> Step:
    return lambda directory: os.unlink(directory / name)


def _mkdir(name: str) -> Step:
    return lambda directory: os.mkdir(directory / name)


def _rmdir(name: str) -> Step:
    return lambda directory: os.rmdir(directory / name)


def _chmod(name: str, mode: int) -> Step:
    def act(directory: Path) -> None:
        os.chmod(directory / name, mode)
        # Attributes are sent a second later, or when a program waits for them.
        fd = os.open(directory / name, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    return act


def _lock(name: str) -> Step:
    def act(directory: Path) -> None:
        os.close(os.open(directory / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))

    return act


def _edit(name: str) -> Step:
    def act(directory: Path) -> None:
        with (directory / name).open("r+b") as file:
            file.write(b"edited")

    return act


def _each(*steps: Step) -> Step:
    def act(directory: Path) -> None:
        for step in steps:
            step(directory)

    return act


# Where the store honours conditions these late requests have no effect at all. The others
# make or remove what has the ETag that is expected, or bring back what was deleted.
FENCED = {
    "put-then-put",
    "put-then-renamed-over",
    "rename-copy-then-put",
    "rename-copy-and-equal-source",
    "rename-delete-then-made",
    "unlink-then-made",
    "put-then-large",
    "chmod-then-put",
    "tree-copy-then-put",
    "tree-deletes-then-made",
    "large-complete",
    "large-part",
    "large-part-copy",
}
ROWS = [
    Row("put-then-put", "PUT", "a", _write("a", V1), _write("a", V2), {"a": V2}),
    Row("put-then-unlink", "PUT", "a", _write("a", V1), _unlink("a"), {}),
    Row("put-then-rename", "PUT", "a", _write("a", V1), _rename("a", "b"), {"b": V1}),
    Row(
        "save-by-rename",
        "PUT",
        "tmp",
        _write("tmp", V2),
        _rename("tmp", "a"),
        {"a": V2},
        before=_write("a", V1),
    ),
    Row(
        "put-then-renamed-over",
        "PUT",
        "a",
        _write("a", V1),
        _rename("b", "a"),
        {"a": V2},
        before=_write("b", V2),
    ),
    Row(
        "rename-copy-then-put",
        "COPY",
        "b",
        _rename("a", "b"),
        _write("b", V2),
        {"b": V2},
        before=_write("a", V1),
    ),
    Row(
        "rename-copy-and-equal-source",
        "COPY",
        "b",
        _rename("a", "b"),
        _each(_write("b", V2), _write("a", V1)),
        {"a": V1, "b": V2},
        before=_write("a", V1),
    ),
    Row(
        "rename-delete-then-made",
        "DELETE",
        "a",
        _rename("a", "b"),
        _write("a", V2),
        {"a": V2, "b": V1},
        before=_write("a", V1),
    ),
    Row(
        "unlink-then-made",
        "DELETE",
        "a",
        _unlink("a"),
        _write("a", V2),
        {"a": V2},
        before=_write("a", V1),
    ),
    Row(
        "unlink-then-made-equal",
        "DELETE",
        "a",
        _unlink("a"),
        _write("a", V1),
        {"a": V1},
        before=_write("a", V1),
    ),
    Row("large-complete", "COMPLETE", "a", _write("a", LARGE), _write("a", V2), {"a": V2}),
    Row("large-part", "PART", "a", _write("a", LARGE), _write("a", V2), {"a": V2}),
    Row(
        "large-part-copy",
        "PART COPY",
        "a",
        _edit("a"),
        _write("a", V2),
        {"a": V2},
        before=_write("a", 2 * LARGE),
    ),
    Row("put-then-large", "PUT", "a", _write("a", V1), _write("a", LARGE), {"a": LARGE}),
    Row(
        "chmod-then-chmod",
        "COPY",
        "a",
        _chmod("a", 0o600),
        _chmod("a", 0o640),
        {"a": V1},
        before=_write("a", V1),
        mode=("a", 0o640),
    ),
    Row(
        "chmod-then-put",
        "COPY",
        "a",
        _chmod("a", 0o600),
        _write("a", V2),
        {"a": V2},
        before=_write("a", V1),
        mode=("a", 0o600),
    ),
    Row("mkdir-then-rmdir", "PUT", "d/", _mkdir("d"), _rmdir("d"), {}),
    Row(
        "rmdir-then-mkdir",
        "DELETE",
        "d/",
        _rmdir("d"),
        _mkdir("d"),
        {"d/": b""},
        before=_mkdir("d"),
    ),
    Row(
        "tree-copy-then-put",
        "COPY",
        "e/a",
        _rename("d", "e"),
        _write("e/a", V2),
        {"e/": b"", "e/a": V2},
        before=_each(_mkdir("d"), _write("d/a", V1)),
    ),
    Row(
        "tree-deletes-then-made",
        "DELETE MANY",
        "*",
        _rename("d", "e"),
        _each(_mkdir("d"), _write("d/a", V2)),
        {"d/": b"", "d/a": V2, "e/": b"", "e/a": V1},
        before=_each(_mkdir("d"), _write("d/a", V1)),
    ),
    Row("lock-then-unlink", "PUT", "a", _lock("a"), _unlink("a"), {}),
    Row(
        "symlink-then-unlink",
        "PUT",
        "a",
        lambda directory: os.symlink("to", directory / "a"),
        _unlink("a"),
        {},
    ),
]
