"""What the tests of real programs share: how they are run, and what they left.

What is below a directory is compared as plain data: {path: Entry}. It is read
from a mount or a disk by `tree`, and from S3 alone by `in_bucket`.
"""

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.mounting import Mount
from tests.support.servers.buckets import Bucket

# The full size of each workload, in place of the one that is quick.
IS_FULL = "PROGRAMS_FULL" in os.environ
LIMIT_S = 1200 if IS_FULL else 600
WRITABLE = ("--no-read-only",)
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


class Entry(NamedTuple):
    """One name: `content` is a file's SHA-256, a link's target, nothing for a directory."""

    kind: str
    content: str = ""
    mode: int = 0
    mtime_ns: int = 0


Tree = dict[str, Entry]


def need(program: str) -> str:
    """The program's path; the test is skipped where there is none."""
    places = os.pathsep.join((f"{sys.prefix}/bin", os.environ.get("PATH", os.defpath)))
    path = shutil.which(program, path=places)
    if path is None:
        pytest.skip(f"there is no {program} here")
    return path


def run(*command: object, cwd: Path | None = None, status: int = 0, **more: str) -> str:
    """Run a program to its end; return what it wrote, errors included."""
    # An empty home of its own: no configuration of the machine's, and a place for caches (rclone).
    with tempfile.TemporaryDirectory(prefix="fusefs-tests-home-") as home:
        quiet = {"HOME": home, "LC_ALL": "C", "GIT_CONFIG_NOSYSTEM": "1"}
        # Nor an AWS configuration: rclone ends if there is an AWS_CA_BUNDLE.
        ours = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        result = subprocess.run(
            [str(one) for one in command],
            cwd=cwd,
            env={**ours, **quiet, **more},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    assert result.returncode == status, f"{command[0]}: {result.stdout[-2000:]}"
    return result.stdout


def rename_to_a_new_name(source: Path, to: Path) -> None:
    """renameat2 with RENAME_NOREPLACE."""
    names = (os.fsencode(source), os.fsencode(to))
    if _libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], 1):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def tree(root: Path) -> Tree:
    """Everything below a directory, which is read completely."""
    return dict(_walk(root, ""))


def _walk(root: Path, prefix: str) -> Iterator[tuple[str, Entry]]:
    for one in sorted(os.scandir(root / prefix), key=lambda one: one.name):
        path = prefix + one.name
        found = one.stat(follow_symlinks=False)
        mode = stat.S_IMODE(found.st_mode)
        if one.is_symlink():
            yield path, Entry("link", os.readlink(root / path))
        elif one.is_dir():
            yield path, Entry("directory")
            yield from _walk(root, path + "/")
        else:
            content = (root / path).read_bytes()
            assert len(content) == found.st_size, path
            yield path, Entry("file", digest(content), mode, found.st_mtime_ns)


def names_and_contents(found: Tree) -> Tree:
    """A tree without what two copies of it may differ in."""
    return {path: Entry(one.kind, one.content, one.mode) for path, one in found.items()}


def times_of_contents(found: Tree) -> dict[str, int]:
    """When files were written that have something written to them."""
    nothing = digest(b"")
    return {path: one.mtime_ns for path, one in found.items() if one.content != nothing}


def in_bucket(bucket: Bucket, prefix: str) -> Tree:
    """The tree that S3 alone tells of, without times."""
    found: Tree = {}
    pages = bucket.client.get_paginator("list_objects_v2")
    for page in pages.paginate(Bucket=bucket.name, Prefix=prefix):
        for one in page.get("Contents", []):
            path = one["Key"][len(prefix) :]
            parts = path.split("/")[:-1]
            for depth in range(1, len(parts) + 1):
                found["/".join(parts[:depth])] = Entry("directory")
            if not path.endswith("/") and path:
                found[path] = _object(bucket, one["Key"])
    return found


def _object(bucket: Bucket, key: str) -> Entry:
    answer = bucket.client.get_object(Bucket=bucket.name, Key=key)
    content, mode = answer["Body"].read(), int(answer["Metadata"].get("mode", stat.S_IFREG | 0o644))
    if stat.S_ISLNK(mode):
        return Entry("link", content.decode())
    return Entry("file", digest(content), stat.S_IMODE(mode))


def different(before: Tree, after: Tree) -> dict[str, tuple[Entry | None, Entry | None]]:
    """What differs between two trees, by path."""
    return {
        path: (before.get(path), after.get(path))
        for path in sorted({*before, *after})
        if before.get(path) != after.get(path)
    }


def check_what_is_left(mount: Mount, bucket: Bucket, folder: str) -> Tree:
    """Mount again, and compare what was seen before with it and with the bucket."""
    before = tree(mount.path / folder)
    mount.end()
    mount.start()
    after = tree(mount.path / folder)
    assert not (odd := different(names_and_contents(before), names_and_contents(after))), odd
    assert times_of_contents(after) == times_of_contents(before)
    assert in_bucket(bucket, f"{folder}/") == names_and_contents(before)
    assert not bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads")
    return after
