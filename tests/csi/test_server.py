"""What every CSI call goes through: codes, the log, the socket, and the command."""

import contextlib
import errno
import logging
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from csi import errors, main
from csi.errors import InvalidArgumentError
from csi.generated import csi_pb2, csi_pb2_grpc
from csi.identity import IdentityService
from csi.server import MAX_CALLS, Server
from fusefs import __version__
from fusefs.linux import libc
from fusefs.linux.mountinfo import mount_above
from fusefs.store import errors as store_errors
from fusefs.store import unreachable
from fusefs.store.engine.engine import Completion
from fusefs.store.errors import ErrorCode
from tests.support.csi.calls import DEADLINE_S, Driver, mount_capability, refusal, serving
from tests.support.servers.s3_server import SECRET_KEY, S3Server
from tests.support.waiting import until

Code = grpc.StatusCode
TOKENS = "csi.storage.k8s.io/serviceAccount.tokens"
PUBLISH = csi_pb2.NodePublishVolumeRequest


class StandIn(csi_pb2_grpc.NodeServicer):
    """A node whose NodePublishVolume does what the test says."""

    register = staticmethod(csi_pb2_grpc.add_NodeServicer_to_server)

    def __init__(self) -> None:
        self.act: Callable[[], None] = lambda: None

    def NodePublishVolume(
        self, request: csi_pb2.NodePublishVolumeRequest, context: grpc.ServicerContext
    ) -> csi_pb2.NodePublishVolumeResponse:
        self.act()
        return csi_pb2.NodePublishVolumeResponse()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[StandIn, Driver]]:
    node = StandIn()
    with serving([IdentityService(), node]) as driver:
        yield node, driver


def test_an_event_is_the_same_each_time() -> None:
    for number in ("17F2B8", "a/b+c=="):
        mount = f"s3://b/p: access denied (request {number}), as access key A"
        assert errors.event_text(mount) == "s3://b/p: access denied, as access key A"
        claim = f"access denied (request {number}) on s3://b/p as access key A"
        assert errors.event_text(claim) == "access denied on s3://b/p as access key A"


def test_a_silent_port_may_be_a_network_policys() -> None:
    def cause(error: str, number: int = 0) -> str:
        fields = (0, {}, b"", 0, error, number, 0, "", 0.0, 0.0, 0.0)
        return unreachable.of_engine(
            Completion(*fields), "http://minio.storage:9000", None
        ).sentence

    assert "9000 in time (the port may be blocked by a NetworkPolicy)" in errors.event_text(
        f"s3://b/p: {cause('timeout')}, as anonymous"
    )
    refused = errors.event_text(cause("connect", errno.ECONNREFUSED))
    assert "refused" in refused
    assert "NetworkPolicy" not in refused


def fail_with(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def test_the_driver_says_who_it_is_and_what_it_has(served: tuple[StandIn, Driver]) -> None:
    identity = served[1].identity
    info = identity.GetPluginInfo(csi_pb2.GetPluginInfoRequest())
    assert (info.name, info.vendor_version) == ("s3.csi.fusefs.dev", __version__)
    answer = identity.GetPluginCapabilities(csi_pb2.GetPluginCapabilitiesRequest())
    service, expansion = answer.capabilities
    assert service.service.type == csi_pb2.PluginCapability.Service.CONTROLLER_SERVICE
    assert expansion.volume_expansion.type == csi_pb2.PluginCapability.VolumeExpansion.ONLINE
    assert not identity.Probe(csi_pb2.ProbeRequest()).HasField("ready")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidArgumentError("why"), Code.INVALID_ARGUMENT),
        (errors.VolumeNotFoundError("why"), Code.NOT_FOUND),
        (errors.AlreadyExistsError("why"), Code.ALREADY_EXISTS),
        (errors.FailedPreconditionError("why"), Code.FAILED_PRECONDITION),
        (errors.OutOfRangeError("why"), Code.OUT_OF_RANGE),
        (errors.AbortedError("why"), Code.ABORTED),
        (errors.UnavailableError("why"), Code.UNAVAILABLE),
        (errors.MountError("why", ErrorCode.DENIED), Code.PERMISSION_DENIED),
        (errors.UnauthenticatedError("why"), Code.UNAUTHENTICATED),
        (store_errors.AccessDeniedError("why"), Code.PERMISSION_DENIED),
        (store_errors.CredentialsError("why"), Code.UNAUTHENTICATED),
        (store_errors.UnsupportedError("why"), Code.FAILED_PRECONDITION),
        (store_errors.ThrottledError("why"), Code.UNAVAILABLE),
        (store_errors.UnreachableError("why"), Code.UNAVAILABLE),
        (OSError(errno.ENOSPC, "why"), Code.UNAVAILABLE),
    ],
)
def test_an_error_becomes_its_code_and_sentence(
    served: tuple[StandIn, Driver], error: Exception, code: grpc.StatusCode
) -> None:
    node, driver = served
    node.act = fail_with(error)
    assert refusal(driver.node.NodePublishVolume, PUBLISH(volume_id="v")) == (code, "why")


def test_an_unforeseen_error_is_retried_and_not_quoted(
    served: tuple[StandIn, Driver], caplog: pytest.LogCaptureFixture
) -> None:
    node, driver = served
    node.act = fail_with(ValueError("Invalid header value b'the-token'"))
    code, sentence = refusal(driver.node.NodePublishVolume, PUBLISH(volume_id="v"))
    assert (code, "ValueError" in sentence) == (Code.UNAVAILABLE, True)
    assert "the-token" not in sentence + caplog.text
    assert "test_server.py" in caplog.text  # where it happened


def test_a_key_makes_no_line_of_the_drivers_log() -> None:
    program = (
        "import logging; from csi.main import _set_up_log; _set_up_log('INFO');"
        r"logging.getLogger('csi.x').info('retained: %s', 'a\nERROR forged\x1b[2J')"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=True
    ).stderr
    assert shown.endswith(r"INFO csi.x: retained: a\x0aERROR forged\x1b[2J" + "\n")


def test_a_log_shows_no_secret_and_no_token(
    served: tuple[StandIn, Driver], caplog: pytest.LogCaptureFixture
) -> None:
    node, driver = served
    node.act = lambda: None
    caplog.set_level(logging.DEBUG, logger="csi")
    driver.node.NodePublishVolume(
        PUBLISH(
            volume_id="v",
            target_path="/pods/target",
            volume_capability=mount_capability(),
            secrets={"anything": "the-secret"},
            volume_context={TOKENS: '{"a": {"token": "the-token"}}', "bucket": "data"},
        )
    )
    assert "the-secret" not in caplog.text
    assert "the-token" not in caplog.text
    assert "NodePublishVolume v begins" in caplog.text
    assert "NodePublishVolume v OK" in caplog.text


def test_a_caller_cannot_write_lines_of_its_own(
    served: tuple[StandIn, Driver], caplog: pytest.LogCaptureFixture
) -> None:
    node, driver = served
    node.act = fail_with(InvalidArgumentError("no\nERROR forged"))
    caplog.set_level(logging.INFO, logger="csi")
    refusal(driver.node.NodePublishVolume, PUBLISH(volume_id="v\nERROR forged"))
    assert not any(line.startswith("ERROR forged") for line in caplog.text.splitlines())
    assert "NodePublishVolume v?ERROR forged INVALID_ARGUMENT" in caplog.text


class Waiting:
    """Calls that wait until the test lets them go on."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self._going_on = threading.Event()

    def __call__(self) -> None:
        self.begun.release()
        self._going_on.wait(DEADLINE_S)

    def let_go(self) -> None:
        self._going_on.set()


def test_a_probe_is_answered_while_all_calls_wait(served: tuple[StandIn, Driver]) -> None:
    node, driver = served
    node.act = waiting = Waiting()
    publish = driver.node.NodePublishVolume
    try:
        calls = [
            publish.future(PUBLISH(volume_id=f"v{number}"), timeout=DEADLINE_S)
            for number in range(MAX_CALLS)
        ]
        for _ in calls:
            assert waiting.begun.acquire(timeout=DEADLINE_S)
        driver.identity.Probe(csi_pb2.ProbeRequest(), timeout=DEADLINE_S)
        assert refusal(publish, PUBLISH(volume_id="one more"))[0] is Code.UNAVAILABLE
    finally:
        waiting.let_go()
    for call in calls:
        call.result()


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory with a short path."""
    with tempfile.TemporaryDirectory(prefix="csi-") as directory:
        yield Path(directory)


def test_only_the_owner_and_the_group_may_call(served: tuple[StandIn, Driver]) -> None:
    mode = served[1].path.stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o770


def test_a_socket_that_was_left_behind_is_replaced(short: Path) -> None:
    path = short / "csi.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    server = Server(f"unix://{path}", [IdentityService()])
    server.start()
    try:
        Driver(path).identity.Probe(csi_pb2.ProbeRequest(), timeout=DEADLINE_S)
    finally:
        server.stop(0)


def test_what_is_no_socket_is_never_removed(short: Path) -> None:
    path = short / "csi.sock"
    path.write_text("precious")
    with pytest.raises(OSError, match="csi"):
        Server(f"unix://{path}", [IdentityService()]).start()
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    "endpoint", ["", "tcp://127.0.0.1:1", "unix://relative", "unix:///" + "x" * 107]
)
def test_an_endpoint_is_a_unix_socket(endpoint: str) -> None:
    with pytest.raises(InvalidArgumentError):
        Server(endpoint, [])


def command(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(Path(sys.prefix) / "bin" / "fusefs-csi"), *arguments],
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def creating(path: Path, store: str, bucket: str) -> tuple[Driver, Any]:
    """A driver's socket, once it listens, and a call that has begun."""
    until(path.exists, "it listens")
    driver = Driver(path)
    request = csi_pb2.CreateVolumeRequest(
        name="pvc-1",
        volume_capabilities=[mount_capability()],
        parameters={"store": store, "bucket": bucket},
        secrets={
            "accessKeyId": "fusefs-access",
            "secretAccessKey": SECRET_KEY,
            "sessionToken": "the-session-token",
        },
    )
    create = driver.controller.CreateVolume
    return driver, create.future(request, timeout=DEADLINE_S, wait_for_ready=True)


def test_the_command_serves_until_it_is_terminated(short: Path, s3: S3Server) -> None:
    stores = short / "stores.toml"
    stores.write_text(f'[stores.minio]\nendpoint-url = "{s3.endpoint_url}"\n')
    path = short / "csi.sock"
    where = (f"--endpoint=unix://{path}", f"--stores={stores}", "--cluster-id=c")
    process = command("controller", *where, "--log-level=debug")
    try:
        driver, call = creating(path, "minio", s3.new_bucket())
        call.exception()  # what becomes of the token is the store's affair
        driver.close()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert not path.exists()
    assert "CreateVolume pvc-1" in log
    assert SECRET_KEY not in log
    assert "the-session-token" not in log


def test_the_command_ends_though_a_call_goes_on(short: Path) -> None:
    program = """
import sys
from csi import main, server
server.Server.stop.__defaults__ = (0.0,)  # no time for calls to end
sys.exit(main.main())
"""
    path, stores = short / "csi.sock", short / "stores.toml"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        stores.write_text(f'[stores.silent]\nendpoint-url = "{url}"\n')
        arguments = ["controller", "--endpoint", f"unix://{path}", "--stores", str(stores)]
        process = subprocess.Popen([sys.executable, "-c", program, *arguments])
        try:
            driver, call = creating(path, "silent", "bucket")
            asking, _ = silent.accept()
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
            asking.close()
            call.cancel()
            driver.close()
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("arguments", "status", "what"),
    [
        (("controller", "--endpoint", "unix:///tmp/x", "--stores", "/no/such"), 2, "/no/such"),
        (("controller", "--endpoint", "tcp://:1"), 2, "unix:///path"),
        (("controller",), 2, "--endpoint"),
        (("node", "--endpoint", "unix:///tmp/x"), 2, "--node-id"),
    ],
)
def test_a_bad_command_line_is_reported_in_a_line(
    arguments: tuple[str, ...],
    status: int,
    what: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert status_of(caplog, *arguments) == status
    assert what in capsys.readouterr().err.splitlines()[-1]


def status_of(caplog: pytest.LogCaptureFixture, *arguments: str) -> int | str | None:
    """The exit status of the command, which ends by itself."""
    for package in ("csi", "fusefs"):
        caplog.set_level(logging.WARNING, package)  # the level of now is back after the test
    try:
        return main.main(arguments)
    except SystemExit as end:
        return end.code


def test_credentials_are_not_kept_on_a_disk(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nor on one that is mounted on top of a tmpfs."""
    with contextlib.ExitStack() as places:
        directory, disk = (
            places.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")) for _ in range(2)
        )
        if mount_above(Path(directory)).filesystem == "tmpfs":
            pytest.skip("/var/tmp is in memory")
        for mount in (["-t", "tmpfs", "tmpfs"], ["--bind", disk]):
            done = subprocess.run(["mount", *mount, directory], capture_output=True, check=False)
            if done.returncode == 0:  # root may
                places.callback(libc.umount, directory, libc.UMOUNT_NOFOLLOW)
        endpoint = f"unix://{directory}/csi.sock"
        given = ("node", "--endpoint", endpoint, "--node-id", "n", "--state-dir", directory)
        assert status_of(caplog, *given) == 1
    assert "tmpfs" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("package", ["grpc", "google.protobuf"])
def test_an_installation_without_the_drivers_packages_says_what_to_install(package: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; from csi.main import main; main()"
    process = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert process.returncode == 1
    [line] = process.stderr.splitlines()
    assert package in line
    assert "pip install './fusefs_s3-….whl[csi]'" in line
