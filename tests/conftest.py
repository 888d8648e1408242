"""What the tests share: one S3 server for all of them, a bucket and mounts for each."""

import compileall
import gc
import itertools
import os
import random
import signal
import sys
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import hypothesis
import pytest

from tests.support.machine.local_file import LocalFile, MakeFile
from tests.support.machine.ordinary_user import public_directory
from tests.support.mounting import WRITABLE, Mount, Mounter
from tests.support.servers import ceph_lacks, ceph_server
from tests.support.servers.buckets import Bucket, new_bucket
from tests.support.servers.ceph_server import CephServer
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import S3Server
from tests.support.sharing import mounting, with_passthrough
from tests.support.survival.keeping import Kept, kept_mount

TESTS = Path(__file__).parent
LOG_CHARS = 4000
_numbers = itertools.count()
# A test's process may fork after another test has served gRPC: in the child its library would
# begin threads of its own, whose descriptors the child closes.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
STORES = {"seaweedfs": S3Server, "ceph": CephServer}

# A shell has background jobs ignore SIGINT, and nohup has its program ignore SIGHUP. Programs
# inherit that, and a daemon would miss the signal that ends it. Handlers are not inherited: with
# one here, whatever the tests start has the default. (Python itself sees to SIGPIPE.)
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)

# Programs in Go (the S3 server, kubectl) collect garbage for 10 to 35% of their time otherwise.
os.environ.setdefault("GOGC", "400")

# Hundreds of processes import fusefs. Where they may not write what they have compiled, each
# compiles all of it: a mount takes 2.4 s of processor time in place of 0.9.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A failure is printed with what repeats it; `make storm` looks for more of them.
_ORDINARY = hypothesis.settings(max_examples=25, deadline=None, print_blob=True, database=None)
hypothesis.settings.register_profile("ordinary", _ORDINARY)
hypothesis.settings.register_profile("storm", _ORDINARY, max_examples=1000)
hypothesis.settings.load_profile("ordinary")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--store",
        choices=sorted(STORES),
        default="seaweedfs",
        help="the S3 server; with another one than the first, only tests that use it run",
    )
    parser.addoption("--seed", type=int, help="the seed of random tests, from a failure's output")


def pytest_configure(config: pytest.Config) -> None:
    # Until all tests are there, none of them is garbage: looking for it takes a third of the time.
    gc.disable()
    if not hasattr(config, "workerinput"):
        for package in ("fusefs", "csi"):
            compileall.compile_dir(TESTS.parent / package, quiet=2)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--store") == "seaweedfs":
        return
    used = [one for one in items if "s3" in getattr(one, "fixturenames", ())]
    for one in used:
        if why := ceph_lacks.reason(one.nodeid):
            one.add_marker(pytest.mark.skip(reason=f"Ceph: {why}"))
    config.hook.pytest_deselected(items=[one for one in items if one not in used])
    items[:] = used


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if os.geteuid() != 0 and item.get_closest_marker("root"):
        pytest.skip("needs root")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a failure, the ends of the logs that its mounts wrote."""
    report = yield
    if report.failed:
        used = getattr(item, "funcargs", {})
        logs = {*used["tmp_path"].glob("*.log")} if "tmp_path" in used else set()
        logs |= {one.log for one in used.values() if isinstance(one, Mount) and one.log.exists()}
        for log in sorted(logs):
            report.sections.append((log.name, log.read_text(errors="replace")[-LOG_CHARS:]))
    return report


@pytest.fixture(scope="session")
def s3(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[S3Server]:
    """A server for the whole run: a SeaweedFS, unless `--store` says otherwise."""
    name = request.config.getoption("--store")
    if name == "ceph" and (reason := ceph_server.missing()):
        pytest.fail(reason)
    with STORES[name](tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def bucket(s3: S3Server) -> Bucket:
    return new_bucket(s3)


@pytest.fixture(scope="module")
def shared(s3: S3Server) -> Bucket:
    """A bucket for all tests of a module."""
    return new_bucket(s3)


@pytest.fixture
def folder(shared: Bucket) -> Bucket:
    """A folder of the module's bucket, for one test alone."""
    return replace(shared, prefix=f"folder-{next(_numbers)}/")


@pytest.fixture(scope="module")
def faulty(s3: S3Server) -> Iterator[FaultyS3]:
    """A server before the real one that fails on demand; tests `clear` it."""
    with FaultyS3(s3.endpoint_url) as server:
        yield server


@pytest.fixture
def as_owner(s3: S3Server, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment has the server's credentials and nothing else of AWS's; faults end."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    yield
    faulty.clear()


@pytest.fixture
def dice(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers that differ from run to run; a failure shows the seed."""
    seed = request.config.getoption("--seed")
    if seed is None:
        seed = random.randrange(1 << 32)
    print(f"--seed {seed}")
    return random.Random(seed)


@pytest.fixture
def make_file(tmp_path: Path) -> Iterator[MakeFile]:
    """Makes files of random bytes: `make_file(size)`."""
    made: list[LocalFile] = []

    def make(size: int) -> LocalFile:
        made.append(LocalFile(tmp_path / f"file{len(made)}", size))
        return made[-1]

    yield make
    for file in made:
        os.close(file.fd)


@pytest.fixture
def mounter(bucket: Bucket, tmp_path: Path) -> Iterator[Mounter]:
    """Mounts the bucket; see `mounting`."""
    with mounting(bucket, tmp_path) as mount:
        yield mount


@pytest.fixture
def behind(mounter: Mounter, faulty: FaultyS3) -> Iterator[Mounter]:
    """As `mounter`, behind the faulty server, whose faults end with the test."""
    faulty.clear()
    yield partial(mounter, endpoint_url=faulty.endpoint_url)
    faulty.clear()


@pytest.fixture(scope="module")
def module_mounter(shared: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounter]:
    """Mounts the module's bucket, for as long as the module's tests take."""
    with mounting(shared, tmp_path_factory.mktemp("mounts")) as mount:
        yield mount


@pytest.fixture(scope="module")
def mount(module_mounter: Mounter) -> Mount:
    """A writable mount of the module's bucket; each test has a part of its own."""
    return module_mounter(WRITABLE)


@pytest.fixture
def passthrough(mounter: Mounter) -> Mounter:
    """As `mounter`, with passthrough on."""
    return lambda *options: with_passthrough(mounter(*options))


@pytest.fixture(scope="module")
def passing(module_mounter: Mounter) -> Mount:
    """A mount of the module's bucket that asks it at each open, with passthrough on."""
    return with_passthrough(module_mounter("--metadata-ttl", "0s"))


@pytest.fixture
def kept() -> Iterator[Kept]:
    """A keeper whose daemon is a stand-in; not started yet."""
    with kept_mount() as one:
        yield one


@pytest.fixture
def public_path() -> Iterator[Path]:
    """As `tmp_path`, and every user may pass."""
    with public_directory() as directory:
        yield directory
