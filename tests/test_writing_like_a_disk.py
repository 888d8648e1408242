"""Random operations on a mount and on a directory of the local disk: the same comes out."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.conftest import Bucket
from tests.support.mounting import Mount

NAMES = st.sampled_from(["a", "b", "c", "d.x", "d"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
CONTENTS = st.integers(0, 40_000).flatmap(
    lambda size: st.integers(0, 255).map(lambda byte: bytes([byte]) * size)
)
EXAMPLES = int(os.environ.get("DISK_EXAMPLES", "12"))
STEPS = int(os.environ.get("DISK_STEPS", "40"))

SETTINGS = settings(
    deadline=None,
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    suppress_health_check=list(HealthCheck),
    # Each step waits for a server: to make an example smaller would take minutes.
    phases=[Phase.explicit, Phase.generate],
)


def outcome(call: Callable[[Path], object], root: Path) -> object:
    try:
        return call(root)
    except OSError as error:
        return errno_name(error)


def errno_name(error: OSError) -> str:
    return f"errno {error.errno}"


def tree(root: Path) -> dict[str, object]:
    """Everything below: contents of files, None for directories."""
    found: dict[str, object] = {}
    for directory, directories, files in os.walk(root):
        for name in directories:
            found[os.path.relpath(os.path.join(directory, name), root)] = None
        for name in files:
            path = os.path.join(directory, name)
            found[os.path.relpath(path, root)] = Path(path).read_bytes()
    return found


class Disks(RuleBasedStateMachine):
    """`mounted` and `plain` get the same operations."""

    mount: Mount
    bucket: Bucket
    scratch: Path
    numbers = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        number = next(self.numbers)
        self.prefix = f"example-{number}"
        self.mounted = self.mount.path / self.prefix
        self.plain = self.scratch / self.prefix
        self.mounted.mkdir()
        self.plain.mkdir()
        self.open: list[tuple[Any, Any]] = []

    def both(self, call: Callable[[Path], object]) -> None:
        expected, got = outcome(call, self.plain), outcome(call, self.mounted)
        assert got == expected

    @rule(path=PATHS, content=CONTENTS)
    def write(self, path: str, content: bytes) -> None:
        self.both(lambda root: (root / path).write_bytes(content))

    @rule(path=PATHS, content=CONTENTS)
    def append(self, path: str, content: bytes) -> None:
        def act(root: Path) -> int:
            with open(root / path, "ab") as file:
                return file.write(content)

        self.both(act)

    @rule(path=PATHS, offset=st.integers(0, 60_000), content=CONTENTS)
    def edit(self, path: str, offset: int, content: bytes) -> None:
        def act(root: Path) -> int:
            with open(root / path, "r+b") as file:
                file.seek(offset)
                return file.write(content)

        self.both(act)

    @rule(path=PATHS, size=st.integers(0, 60_000))
    def truncate(self, path: str, size: int) -> None:
        self.both(lambda root: os.truncate(root / path, size))

    @rule(path=PATHS)
    def create_exclusively(self, path: str) -> None:
        def act(root: Path) -> None:
            os.close(os.open(root / path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640))

        self.both(act)

    @rule(path=PATHS)
    def make_directory(self, path: str) -> None:
        self.both(lambda root: os.mkdir(root / path))

    @rule(path=PATHS)
    def remove_directory(self, path: str) -> None:
        self.both(lambda root: os.rmdir(root / path))

    @rule(path=PATHS)
    def unlink(self, path: str) -> None:
        self.both(lambda root: os.unlink(root / path))

    @rule(source=PATHS, to=PATHS)
    def rename(self, source: str, to: str) -> None:
        self.both(lambda root: os.rename(root / source, root / to))

    @rule(path=PATHS, mode=st.sampled_from([0o600, 0o644, 0o755]))
    def change_mode(self, path: str, mode: int) -> None:
        self.both(lambda root: os.chmod(root / path, mode))

    @rule(path=PATHS, time_ns=st.integers(10**17, 10**18))
    def change_time(self, path: str, time_ns: int) -> None:
        def act(root: Path) -> int | None:
            os.utime(root / path, ns=(time_ns, time_ns))
            return (root / path).stat().st_mtime_ns if (root / path).is_file() else None

        self.both(act)

    @rule(path=PATHS)
    def read(self, path: str) -> None:
        self.both(lambda root: (root / path).read_bytes())

    @rule(path=PATHS)
    def look(self, path: str) -> None:
        def act(root: Path) -> tuple[int, int]:
            found = os.stat(root / path)
            is_file = stat.S_ISREG(found.st_mode)
            return found.st_mode if is_file else 0, found.st_size if is_file else 0

        self.both(act)

    @rule(path=PATHS)
    def list_directory(self, path: str) -> None:
        self.both(lambda root: sorted(os.listdir(root / path)))

    @rule(path=PATHS, content=CONTENTS)
    def open_and_keep(self, path: str, content: bytes) -> None:
        """A file stays open for writing while other things happen to its name."""
        files = []
        for root in (self.plain, self.mounted):
            try:
                file = (root / path).open("wb", buffering=0)
                file.write(content)
                files.append(file)
            except OSError as error:
                files.append(errno_name(error))
        assert [isinstance(file, str) for file in files] in ([True, True], [False, False])
        if isinstance(files[0], str):
            assert files[0] == files[1]
        else:
            self.open.append((files[0], files[1]))

    @rule(content=CONTENTS)
    def write_on_and_close(self, content: bytes) -> None:
        if self.open:
            for file in self.open.pop():
                file.write(content)
                file.close()

    @invariant()
    def the_trees_are_the_same(self) -> None:
        assert tree(self.mounted) == tree(self.plain)

    def teardown(self) -> None:
        while self.open:
            for file in self.open.pop():
                file.close()
        expected = tree(self.plain)
        assert tree(self.mounted) == expected
        assert stored(self.bucket, self.prefix + "/") == {
            path: content for path, content in expected.items() if content is not None
        }
        shutil.rmtree(self.plain)


def stored(bucket: Bucket, prefix: str) -> dict[str, object]:
    """The objects below a prefix that are no directories' markers, read from S3."""
    found: dict[str, object] = {}
    pages = bucket.client.get_paginator("list_objects_v2")
    for page in pages.paginate(Bucket=bucket.name, Prefix=prefix):
        for one in page.get("Contents", []):
            if not one["Key"].endswith("/"):
                answer = bucket.client.get_object(Bucket=bucket.name, Key=one["Key"])
                found[one["Key"][len(prefix) :]] = answer["Body"].read()
    return found


def test_a_mount_behaves_like_a_disk(
    mounter: Callable[..., Mount], bucket: Bucket, tmp_path: Path
) -> None:
    if os.geteuid():
        pytest.skip("needs root")
    Disks.mount = mounter("--session", "kernel", "--no-read-only")
    Disks.bucket = bucket
    Disks.scratch = tmp_path / "plain"
    Disks.scratch.mkdir()
    run_state_machine_as_test(Disks, settings=SETTINGS)
