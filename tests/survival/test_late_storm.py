"""Programs at work while requests are held back at random and daemons are killed.

A round: programs write, rename, remove, make directories and change modes; some
of their requests lose their connection and are executed later. When the programs
rest, the bucket has to come to what was acknowledged, and to stay so.
"""

import contextlib
import fnmatch
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.mounting import Mount
from tests.support.programs import WRITABLE
from tests.support.servers.buckets import new_bucket
from tests.support.servers.faulty_s3 import FaultyS3, Hold, Request, Rule
from tests.support.servers.s3_server import S3Server
from tests.support.survival.surviving import keeper_status, kill_everything, serving_pid

pytestmark = pytest.mark.storm

ROUNDS = 500
# How long a request is held back at most.
HOLD_S = 30.0
# Programs of a mount, and mounts that are at work at a time.
PROGRAMS = 4
MOUNTS = 16
LIMIT_S = 180.0
# Requested here, while nothing else runs.
UMASK = os.umask(0o022)
os.umask(UMASK)
# The mode of an object on which no program has set one.
UNSET = 0o644
# How long the programs of a round are at work.
WORK_S = 2.5
CHANGES = ("PUT", "COPY", "DELETE", "DELETE MANY")
# Of how many changes one is held back.
ONE_OF = 6


@dataclass
class Content:
    """A file's bytes and mode."""

    data: bytes
    mode: int


@dataclass
class Program:
    """A program that works below `directory`, and what was acknowledged: files and directories.

    `doubtful` are the names that it changed when it saw an error, whose state
    no promise covers.
    """

    directory: Path
    dice: random.Random
    files: dict[str, Content] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    # What it did, for people who look for a fault.
    history: list[str] = field(default_factory=list)

    def work(self, until: float) -> None:
        """Change something again and again; ends at an error of the mount's end."""
        steps = [self._write] * 4 + [self._rename] * 2 + [self._unlink] * 2 + [self._chmod] * 2
        steps += [self._mkdir, self._rmdir]
        while time.monotonic() < until:
            touched: set[str] = set()
            step, begun = self.dice.choice(steps), time.time()
            try:
                step(touched)
            except OSError as error:
                self._note(begun, f"{step.__name__} {sorted(touched)}: {error}")
                self.doubtful |= touched
                return
            self._note(begun, f"{step.__name__} {sorted(touched)}")

    def _note(self, begun: float, what: str) -> None:
        modes = {name: f"{content.mode:o}" for name, content in sorted(self.files.items())}
        self.history.append(f"{clock(begun)} to {clock(time.time())} {what} -> {modes}")

    def _name(self) -> str:
        return self.dice.choice("abcd")

    def _some_file(self) -> str | None:
        return self.dice.choice(sorted(self.files)) if self.files else None

    def _write(self, touched: set[str]) -> None:
        name = self._name()
        touched.add(name)
        data = f"{name} {next(self.numbers)} {self.dice.random()}".encode() * 20
        (self.directory / name).write_bytes(data)
        mode = self.files[name].mode if name in self.files else 0o666 & ~UMASK
        self.files[name] = Content(data, mode)

    def _rename(self, touched: set[str]) -> None:
        old, new = self._some_file(), self._name()
        if old is not None and old != new:
            touched |= {old, new}
            os.rename(self.directory / old, self.directory / new)
            self.files[new] = self.files.pop(old)

    def _unlink(self, touched: set[str]) -> None:
        name = self._some_file()
        if name is not None:
            touched.add(name)
            os.unlink(self.directory / name)
            del self.files[name]

    def _chmod(self, touched: set[str]) -> None:
        name = self._some_file()
        if name is not None:
            touched.add(name)
            mode = self.dice.choice((0o600, 0o640, 0o644, 0o660, 0o666))
            os.chmod(self.directory / name, mode)
            self.files[name].mode = mode

    def _mkdir(self, touched: set[str]) -> None:
        name = self.dice.choice("xy")
        if name not in self.directories:
            touched.add(name + "/")
            os.mkdir(self.directory / name)
            self.directories.add(name)

    def _rmdir(self, touched: set[str]) -> None:
        if self.directories:
            name = self.dice.choice(sorted(self.directories))
            touched.add(name + "/")
            os.rmdir(self.directory / name)
            self.directories.remove(name)


def clock(at: float) -> str:
    """Seconds since the epoch, as logs have them."""
    return f"{time.strftime('%H:%M:%S', time.localtime(at))}.{int(at % 1 * 1000):03}"


class SometimesRule(Rule):
    """Fits one of so many changes, by a random number."""

    dice: random.Random
    is_on = True

    def fits(self, request: Request) -> bool:
        is_change = any(fnmatch.fnmatchcase(request.operation, name) for name in CHANGES)
        return self.is_on and is_change and self.dice.randrange(ONE_OF) == 0


class Lane:
    """One mount, its proxy and its bucket, round after round."""

    def __init__(self, s3: S3Server, directory: Path, seed: int, conditions: str) -> None:
        self.seed = seed
        self.dice = random.Random(f"{seed} {conditions}")
        self.bucket = new_bucket(s3)
        self.proxy = FaultyS3(s3.endpoint_url)
        self.conditions = conditions
        self.proxy.ignores_conditions = conditions == "off"
        (directory / "mnt").mkdir(parents=True)
        self.mount = Mount(
            f"s3://{self.bucket.name}/",
            directory / "mnt",
            directory / "cache",
            self.proxy.endpoint_url,
            self.bucket.server.environment,
            directory / "log",
            ("--session", "kernel", *WRITABLE),
        )
        self.programs: list[Program] = []
        self.undone: list[str] = []
        self.kills = self.held = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with self.proxy:
            try:
                self.mount.start()
                for number in range(PROGRAMS):
                    path = self.mount.path / f"program-{number}"
                    path.mkdir()
                    self.programs.append(Program(path, random.Random(f"{self.seed} {number}")))
                yield
                self.mount.end()
            finally:
                self.proxy.clear()
                self.mount.clean_up()

    def round(self, number: int) -> None:
        """Have the programs work, and see what has become of it."""
        hold = Hold(
            lambda: self.dice.uniform(0, HOLD_S), hangs_up=lambda: self.dice.uniform(0, 0.8)
        )
        rule = SometimesRule(hold=hold)
        rule.dice = random.Random(f"{self.seed} {number}")
        with self.proxy._lock:
            self.proxy._rules.append(rule)
        is_last = self.dice.random() < 0.15
        deadline = time.monotonic() + WORK_S
        with ThreadPoolExecutor(PROGRAMS) as pool:
            works = [pool.submit(program.work, deadline) for program in self.programs]
            self._kill_some(deadline, everything=is_last)
            for work in works:
                work.result(LIMIT_S)
        rule.is_on = False
        if is_last:
            self.mount.force()
            self.mount.start()
            for program in self.programs:
                self._recover(program)
        self._expect_acknowledged(hold, number)
        self.proxy.remove(rule)

    def _kill_some(self, deadline: float, *, everything: bool) -> None:
        kills = self.dice.randrange(3)
        for _ in range(kills):
            time.sleep(self.dice.uniform(0.1, WORK_S / 2))
            if time.monotonic() < deadline and (pid := keeper_status(self.mount)["daemon"]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.kills += 1
        time.sleep(max(0.0, deadline - time.monotonic()))
        if everything:
            # In the middle of what takes longer than the programs were to work.
            serving_pid(self.mount)
            kill_everything(self.mount)
            self.kills += 1

    def _recover(self, program: Program) -> None:
        """What was in doubt is made anew, so that it is promised."""
        for name in sorted(program.doubtful):
            path = program.directory / name.removesuffix("/")
            if name.endswith("/"):
                # That it is not there yet would promise nothing: its request may be under way.
                program.directories.discard(name[:-1])
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path)
                os.rmdir(path)
            else:
                path.write_bytes(f"after {name} {next(program.numbers)}".encode())
                os.chmod(path, 0o604)
                program.files[name] = Content(path.read_bytes(), 0o604)
        program.doubtful.clear()

    def _expect_acknowledged(self, hold: Hold, number: int) -> None:
        """The bucket comes to what was acknowledged, after all requests were executed."""
        deadline = time.monotonic() + LIMIT_S
        is_executed = False
        while True:
            is_executed = is_executed or all(one.done.is_set() for one in hold.held)
            wrong = self._wrong()
            if self.conditions == "on":
                # A late removal of what has the same ETag lets a late creation through.
                removed = {f"content {one.key}" for one in hold.held if one.operation == "DELETE"}
                found = [one for one in wrong if one.startswith("content") and one not in removed]
                self.undone += [f"round {number}: {one}" for one in found]
            if is_executed and not wrong:
                break
            if time.monotonic() > deadline:
                self._explain(hold, wrong)
                raise AssertionError(f"seed {self.seed}, round {number}: {wrong}")
            time.sleep(0.3)
        self.held += len(hold.held)

    def _explain(self, hold: Hold, wrong: list[str]) -> None:
        """Print what was done and requested where something is wrong."""
        for program in self.programs:
            prefix = program.directory.name + "/"
            names = {one.partition(" ")[2].removeprefix(prefix) for one in wrong if prefix in one}
            if not names:
                continue
            print(f"{prefix} last did:", *program.history[-40:], sep="\n  ")
            for name in sorted(names):
                path = program.directory / name
                print(f"{path}: mode here {path.lstat().st_mode:o}" if path.exists() else path)
            for one in self.proxy.requests(key=f"{prefix}*")[-150:]:
                headers = {
                    text: one.headers[text]
                    for text in sorted(one.headers)
                    if text.startswith(("x-amz-meta-", "x-amz-copy", "if-"))
                }
                print(clock(one.at), one.operation, one.key, headers)
            for held in hold.held:
                print("held:", held.operation, held.key, held.status, clock(held.done_at))

    def _wrong(self) -> list[str]:
        """What the bucket has otherwise than was acknowledged."""
        wrong = []
        client = self.bucket.client
        listed = client.list_objects_v2(Bucket=self.bucket.name).get("Contents", [])
        keys = {one["Key"] for one in listed}
        for program in self.programs:
            prefix = program.directory.name + "/"
            own = {key.removeprefix(prefix) for key in keys if key.startswith(prefix)} - {""}
            wanted = set(program.files) | {f"{name}/" for name in program.directories}
            wrong += [f"gone {prefix}{name}" for name in wanted - own]
            wrong += [f"back {prefix}{name}" for name in own - wanted]
            for name in own & set(program.files):
                expected = program.files[name]
                try:
                    answer = client.get_object(Bucket=self.bucket.name, Key=prefix + name)
                except client.exceptions.NoSuchKey:
                    wrong.append(f"gone {prefix}{name}")
                    continue
                if answer["Body"].read() != expected.data:
                    wrong.append(f"content {prefix}{name}")
                elif int(answer["Metadata"].get("mode", UNSET)) & 0o777 != expected.mode:
                    wrong.append(f"mode {prefix}{name}")
        return wrong


@pytest.mark.parametrize("conditions", ["on", "off"])
def test_nothing_that_was_acknowledged_stays_undone(
    s3: S3Server, tmp_path: Path, conditions: str
) -> None:
    if os.geteuid() or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and /dev/fuse")
    rounds = iter(range(count := -(-ROUNDS // 2)))
    lock = threading.Lock()
    lanes = [Lane(s3, tmp_path / str(seed), seed, conditions) for seed in range(MOUNTS)]
    done = 0

    def run(lane: Lane) -> None:
        nonlocal done
        with lane.running():
            while True:
                with lock:
                    number = next(rounds, None)
                if number is None:
                    return
                lane.round(number)
                with lock:
                    done += 1
                    print(f"{done} rounds, {lane.held} held, {lane.kills} kills", flush=True)

    with ThreadPoolExecutor(MOUNTS) as pool:
        for ended in [pool.submit(run, lane) for lane in lanes]:
            ended.result()
    assert done == count
    assert not [one for lane in lanes for one in lane.undone]
    assert sum(lane.held for lane in lanes)
