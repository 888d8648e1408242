"""Closes of descriptors that a file has several of: those of its writers wait for the bucket."""

import os
import shutil
import subprocess
from collections.abc import Callable

import pytest

from tests.support.mounting import WRITABLE, Mount, Mounter, all_sent, cost, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, keys, new_bucket, stored
from tests.support.servers.s3_server import S3Server
from tests.support.sharing import PATIENCE_S
from tests.support.waiting import until

SHELLS = [shell for shell in ("dash", "bash") if shutil.which(shell)]


def shell(mount: Mount, command: str, shell: str = SHELLS[0]) -> Callable[[], object]:
    return lambda: subprocess.run([shell, "-c", command], cwd=mount.path, check=True)


@states(
    "`cmd > file` puts what the command has written, and nothing before: while it runs, and if it"
    " is killed, the bucket has the file that was there. `touch` and `: > file` make an empty"
    " object before they return."
)
@pytest.mark.parametrize("name", SHELLS)
def test_a_shell_that_redirects_puts_what_was_written(
    mount: Mount, shared: Bucket, name: str
) -> None:
    for command in ("echo x > made", "cat > made </etc/hostname", "(echo y; echo z) > made"):
        (mount.path / "made").write_bytes(b"old")
        assert cost(mount, shell(mount, command, name)).get("puts") == 1, command
        assert stored(shared, "made") == (mount.path / "made").read_bytes() != b""


@pytest.mark.parametrize("command", ["touch empty", ": > empty", "true > empty"])
@pytest.mark.parametrize("is_there", [True, False])
def test_an_empty_file_is_in_the_bucket_at_once(
    mount: Mount, shared: Bucket, command: str, *, is_there: bool
) -> None:
    for name in SHELLS:
        (mount.path / "empty").unlink(missing_ok=True)
        if is_there and command != "touch empty":
            (mount.path / "empty").write_bytes(b"old")
        assert cost(mount, shell(mount, command, name))["puts"] == 1
        assert stored(shared, "empty") == b""


@pytest.mark.parametrize("is_python", [True, False])
def test_a_command_that_is_killed_leaves_the_old_object(
    mount: Mount, shared: Bucket, *, is_python: bool
) -> None:
    """Also where the program that has begun it closes the file before anything is written."""
    (mount.path / "kept").write_bytes(b"old")
    if is_python:
        with open(mount.path / "kept", "wb") as file:
            command = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file)
    else:
        command = subprocess.Popen(
            ["sh", "-c", "exec cat > kept"], cwd=mount.path, stdin=subprocess.PIPE
        )
    command.stdin.write(b"new")
    command.stdin.flush()
    while (mount.path / "kept").stat().st_size != len(b"new"):
        assert command.poll() is None
    assert stored(shared, "kept") == b"old"
    command.kill()
    command.communicate(timeout=PATIENCE_S)
    all_sent(mount)
    assert stored(shared, "kept") == b"old"


@states(
    "The close of a process that has written to a file waits for the bucket, whatever other"
    " descriptors there are; one that has merely inherited a descriptor does not wait, and uploads"
    " nothing."
)
def test_closes_of_children_that_have_not_written_cost_nothing(
    mount: Mount, shared: Bucket
) -> None:
    with open(mount.path / "log", "wb", buffering=0) as file:

        def fork() -> None:
            for number in range(10):
                file.write(b"%d" % number)
                child = os.fork()
                if not child:
                    os._exit(0)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

        assert "puts" not in cost(mount, fork)
        os.close(os.dup(file.fileno()))
        assert stored(shared, "log") == b"0123456789"
        assert cost(mount, lambda: subprocess.run(["echo", "!"], stdout=file, check=True)) == {
            "puts": 1
        }
        assert stored(shared, "log") == b"0123456789!\n"


@states(
    "Of a file that is opened, appended to and closed again and again, with pauses of less than"
    " that, the first four closes wait for the bucket, and the others for the local disk alone;"
    " the bucket has it after three times as long as the appending has lasted, a minute at most"
    " (more for large files, as above). If the node is lost that is lost; `fsync` waits for the"
    " bucket."
)
def test_a_log_that_is_appended_to_again_and_again_is_not_sent_each_time(
    mount: Mount, shared: Bucket
) -> None:
    """As TensorBoard's own writer does."""
    path = mount.path / "events"
    path.write_bytes(bytes(100_000))

    def append() -> None:
        for number in range(200):
            with path.open("ab") as file:
                file.write(b"%d\n" % number)
            if number == 3:
                assert stored(shared, "events") == path.read_bytes()

    assert cost(mount, append)["puts"] < 10
    assert stored(shared, "events") != path.read_bytes()
    all_sent(mount)
    assert stored(shared, "events") == path.read_bytes()
    with path.open("ab", buffering=0) as file:
        file.write(b"last")
        os.fsync(file.fileno())
        assert stored(shared, "events") == path.read_bytes()


@pytest.fixture(scope="module")
def by_path(s3: S3Server, module_mounter: Mounter) -> tuple[Mount, Bucket]:
    options = ("--session", "kernel", WRITABLE, "--durability=local:runs/**,bucket:strict/**")
    bucket = new_bucket(s3)
    for name in ("runs", "strict"):
        bucket.put(f"{name}/", b"")
    return module_mounter(*options, bucket=bucket, cache="by-path"), bucket


@states(
    "`--durability` is `auto`, `bucket` or `local`, or for some paths MODE:PATTERN: of"
    " `auto,local:runs/**` what is below `runs` has local durability. Of several patterns that"
    " match a path the last one decides."
)
def test_durability_is_chosen_by_path(by_path: tuple[Mount, Bucket]) -> None:
    mount, bucket = by_path
    (mount.path / "models").mkdir()

    def close_all(name: str) -> Callable[[], object]:
        return lambda: [(mount.path / name / str(n)).write_bytes(b"x") for n in range(8)]

    assert cost(mount, close_all("models"))["puts"] == 8
    until(lambda: all_sent(mount) or "puts" not in cost(mount, close_all("runs")), "no PUT")
    shown = fusefs("status", mount.path).stdout
    assert "; durability auto,local:runs/**,bucket:strict/**" in shown
    all_sent(mount)
    assert stored(bucket, "runs/7") == b"x"


@states(
    "With `--durability bucket` (which the default, `auto`, is but for files that are appended to"
    " and temporary ones) every close waits for the bucket."
)
def test_with_bucket_durability_every_append_and_temporary_file_is_in_the_bucket(
    by_path: tuple[Mount, Bucket],
) -> None:
    mount, bucket = by_path
    with (mount.path / "strict/file.tmp").open("xb") as file:
        file.write(b"content")
    assert stored(bucket, "strict/file.tmp") == b"content"
    path = mount.path / "strict/log"
    for number in range(10):
        with path.open("ab") as file:
            file.write(b"%d" % number)
        assert stored(bucket, "strict/log") == path.read_bytes()


@states(
    "A closed file that is renamed from a path of local durability to another path, by itself or"
    " with its directory, is in the bucket under its new name when the rename returns; so far as"
    " it had not been uploaded that is one PUT."
)
def test_a_file_that_leaves_the_local_paths_is_in_the_bucket(by_path: tuple[Mount, Bucket]) -> None:
    mount, bucket = by_path
    (mount.path / "runs/a").mkdir()

    def write_and_rename(written: str, renamed: str, to: str) -> Callable[[], object]:
        def call() -> None:
            (mount.path / written).write_bytes(b"weights")
            (mount.path / renamed).rename(mount.path / to)

        return call

    requests = cost(mount, write_and_rename("runs/tmp", "runs/tmp", "model"))
    assert stored(bucket, "model") == b"weights"
    assert (requests["puts"], requests.get("copies")) == (1, None)
    write_and_rename("runs/a/model", "runs/a", "kept")()
    assert stored(bucket, "kept/model") == b"weights"
    assert not [key for key in keys(bucket) if key.startswith("runs/") and "model" in key]
