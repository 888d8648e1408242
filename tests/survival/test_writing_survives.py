"""What was saved is saved, whoever is killed meanwhile: the daemon, the keeper, or both."""

import errno
import hashlib
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.support.mounting import LIMIT_S, Mount, fusefs
from tests.support.programs import WRITABLE
from tests.support.servers.buckets import Bucket
from tests.support.survival.checkpointer import Journal, journal_of
from tests.support.survival.surviving import keeper_status, kill_everything, serving_pid, signal_all
from tests.support.waiting import until

pytestmark = [pytest.mark.storm, pytest.mark.root]

ROUNDS = 200
PROGRAMS = 3
VICTIMS = (("daemon",), ("daemon",), ("daemon", "pid"), ("pid",))


@dataclass
class Objects:
    """What a bucket has, read by S3 alone; what has not changed is not read again.

    A digest is known by the ETag that came with the bytes: between a LIST and
    a GET the object may have been replaced.
    """

    bucket: Bucket
    _known: dict[tuple[str, str], str] = field(default_factory=dict)

    def digests(self) -> dict[str, str]:
        """{key: SHA-256} without the markers of directories, and what is gone when it is read."""
        found = {}
        pages = self.bucket.client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=self.bucket.name):
            for one in page.get("Contents", []):
                key = one["Key"]
                if not key.endswith("/"):
                    digest = self._known.get((key, one["ETag"])) or self.digest(key)
                    if digest is not None:
                        found[key] = digest
        return found

    def digest(self, key: str) -> str | None:
        """SHA-256 of what is there under a key; None if there is nothing."""
        read = self._read(key)
        if read is None:
            return None
        etag, content = read
        return self._known.setdefault((key, etag), hashlib.sha256(content).hexdigest())

    def content(self, key: str) -> bytes | None:
        read = self._read(key)
        return None if read is None else read[1]

    def _read(self, key: str) -> tuple[str, bytes] | None:
        """ETag and bytes of one version, from one answer."""
        client = self.bucket.client
        try:
            answer = client.get_object(Bucket=self.bucket.name, Key=key)
        except client.exceptions.NoSuchKey:
            return None
        return answer["ETag"], answer["Body"].read()

    def uploads(self) -> list[object]:
        """The multipart uploads that are under way."""
        answer = self.bucket.client.list_multipart_uploads(Bucket=self.bucket.name)
        uploads: list[object] = answer.get("Uploads", [])
        return uploads


@dataclass
class Program:
    """One `checkpointer.py` at work below the directory `name`."""

    name: str
    process: subprocess.Popen[str]
    journal_path: Path

    def journal(self) -> Journal:
        return journal_of(self.journal_path)

    def say(self, word: str) -> None:
        assert self.process.poll() is None, self.process.communicate()[1]
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def held(self) -> dict[str, str]:
        """What there has to be, {key: SHA-256}, once it has come to rest."""
        # A descriptor's number may be beyond what select(2) takes.
        output = select.poll()
        output.register(self.process.stdout)
        assert output.poll(1000 * LIMIT_S), f"{self.name} hangs"
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=LIMIT_S)[1]
        return {f"{self.name}/{path}": digest for path, digest in json.loads(line).items()}


@contextmanager
def at_work(mount: Mount, scratch: Path) -> Iterator[list[Program]]:
    programs = []
    try:
        for seed in range(PROGRAMS):
            name, journal = f"run-{seed}", scratch / f"journal-{seed}"
            journal.touch()
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.support.survival.checkpointer",
                    mount.path / name,
                    str(seed),
                    journal,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            programs.append(Program(name, process, journal))
        yield programs
    finally:
        for program in programs:
            program.process.kill()
            program.process.communicate()


def kill_some(mount: Mount, victims: tuple[str, ...]) -> None:
    status = keeper_status(mount)
    signal_all([status[victim] for victim in victims if status[victim]], signal.SIGKILL)


def expect_saved(programs: list[Program], objects: Objects) -> None:
    """Whatever was saved, and no program changes, is in the bucket at this moment."""
    before = {program.name: program.journal().saved for program in programs}
    found = objects.digests()
    for program in programs:
        after = program.journal().saved
        for path, content in before[program.name].items():
            if after.get(path) == content:
                assert found.get(f"{program.name}/{path}") == content.digest(), path


def expect_all(programs: list[Program], objects: Objects, mount: Mount) -> None:
    """When all are at rest there is what they have written, and nothing else."""
    for program in programs:
        program.say("hold")
    expected: dict[str, str] = {}
    for program in programs:
        expected |= program.held()
    come_to_rest(mount)
    assert objects.digests() == expected
    until(lambda: not objects.uploads(), "a multipart upload is left")


@pytest.mark.parametrize("durability", ["bucket", "local"])
def test_what_was_saved_is_there_while_daemons_and_keepers_are_killed(
    mounter: Callable[..., Mount], bucket: Bucket, tmp_path: Path, durability: str
) -> None:
    mount = mounter("--session", "kernel", "--durability", durability, *WRITABLE)
    dice = random.Random(11)
    victims = itertools.cycle(VICTIMS)
    rounds = ROUNDS if durability == "bucket" else ROUNDS // 2
    objects = Objects(bucket)
    with at_work(mount, tmp_path) as programs:
        for round in range(rounds):
            # Before anything can be changed again, or after some changes.
            time.sleep(dice.uniform(0.1, dice.choice((0.9, 2.5))))
            kill_some(mount, next(victims))
            if durability == "bucket":
                expect_saved(programs, objects)
            if round % 4 == 3:
                expect_all(programs, objects, mount)
                for program in programs:
                    program.say("go")
            serving_pid(mount)
        expect_all(programs, objects, mount)
        mount.end()
        expected = objects.digests()
        mount.start()
        assert {key: digest(mount.path / key) for key in expected} == expected


def test_what_was_saved_is_there_after_everything_has_died(
    mounter: Callable[..., Mount], bucket: Bucket, tmp_path: Path
) -> None:
    """As when a machine loses its processes: the programs see errors, and another mount goes on."""
    mount = mounter("--session", "kernel", *WRITABLE)
    dice = random.Random(12)
    objects = Objects(bucket)
    for round in range(ROUNDS // 8):
        scratch = tmp_path / str(round)
        scratch.mkdir()
        with at_work(mount, scratch) as programs:
            until(lambda: all(one.journal().saved for one in programs), "no program begins")
            time.sleep(dice.uniform(0.1, 1.0))
            kill_everything(mount)
            for program in programs:
                assert program.process.wait(LIMIT_S) == 1, "it saw no error"
        mount.start()
        come_to_rest(mount)
        found = objects.digests()
        for program in programs:
            check_what_is_left(program, found, objects)
        until(lambda: not objects.uploads(), "a multipart upload is left")
        for program in programs:
            new = mount.path / f"{program.name}-of-round-{round}"
            until(partial(is_renamed, mount.path / program.name, new), "nothing is put back")
    mount.end()


def is_renamed(old: Path, new: Path) -> bool:
    """Rename a directory; False if a late request has undone a change below it.

    As its names come again each round, a delete of the last daemon may be such a request.
    """
    try:
        os.rename(old, new)
    except OSError as error:
        # SeaweedFS removes the emptied folders of an attempt that failed a moment later.
        if error.errno not in (errno.EIO, errno.ENOTEMPTY):
            raise
        return False
    return True


def come_to_rest(mount: Mount) -> None:
    """Wait for all uploads, and for renames that an earlier daemon had begun.

    Those go on in the background: until then their objects are listed under
    both names, and go one after the other.
    """
    fusefs("sync", mount.path)
    until(lambda: not mount.status()["writing"]["renames"], "a rename is not finished")


def check_what_is_left(program: Program, found: dict[str, str], objects: Objects) -> None:
    """What was saved is there; what was not finished has the beginning of what it was to get."""
    saved, changing = program.journal()
    prefix = f"{program.name}/"
    for path, content in saved.items():
        assert found.get(prefix + path) == content.digest(), path
    for key in found:
        path = key.removeprefix(prefix)
        if path != key and path not in saved:
            data = objects.content(key)
            assert data is not None
            assert any(one.bytes().startswith(data) for one in changing[path]), path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
