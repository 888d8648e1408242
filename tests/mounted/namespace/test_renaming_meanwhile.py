"""Programs below a directory whose rename takes long: they read on, and their changes wait."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mounted.namespace.test_renaming import OPTIONS, keys
from tests.support.mounting import Mount, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.survival.surviving import kill_serving
from tests.support.waiting import until

pytestmark = pytest.mark.root

# The kernel has the other requests for a directory wait behind a change in it: each its own.
CHANGES: dict[str, Callable[[Path], object]] = {
    "create": lambda top: (top / "create" / "new").write_bytes(b"new"),
    "mkdir": lambda top: (top / "mkdir" / "new").mkdir(),
    "unlink": lambda top: (top / "unlink" / "file").unlink(),
    "rename": lambda top: (top / "rename" / "file").rename(top / "rename" / "moved"),
    "chmod": lambda top: (top / "chmod" / "file").chmod(0o600),
}


class Renaming:
    """A mount whose `old` is being renamed to `new`, and held up before something is deleted."""

    def __init__(self, mount: Mount, bucket: Bucket, faulty: FaultyS3) -> None:
        faulty.clear()
        for name in (*CHANGES, "read", "write"):
            bucket.put(f"old/{name}/file", name.encode())
        self.mount, self.bucket, self.path = mount, bucket, mount.path
        self.pause = faulty.add("COPY", "new/unlink/file", times=1, stall=True)
        self.deletes = faulty.add("DELETE MANY", times=1, stall=True)
        self._threads: list[threading.Thread] = []
        self.errors: list[OSError] = []

    def start(self, act: Callable[[], object]) -> None:
        thread = threading.Thread(target=self._run, args=(act,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _run(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            self.errors.append(error)

    def begin(self) -> None:
        self.start(lambda: os.rename(self.path / "old", self.path / "new"))
        until(lambda: self.pause.used > 0, "nothing is copied")

    def until_waiting(self, count: int) -> None:
        def is_waiting() -> bool:
            renames = self.mount.status().get("writing", {}).get("renames")
            return bool(renames) and renames[0]["waiting"] == count

        until(is_waiting, "the changes do not wait")

    def end(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def renaming(mounter: Callable[..., Mount], bucket: Bucket, faulty: FaultyS3) -> Renaming:
    mount = mounter(*OPTIONS, endpoint_url=faulty.endpoint_url)
    return Renaming(mount, bucket, faulty)


@pytest.mark.parametrize("is_killed", [False, True])
@states(
    "While a directory is renamed programs read on below its old and its new name; what creates,"
    " removes or renames something there, sets attributes, or has to be uploaded waits until the"
    " rename is finished, also if the daemon dies meanwhile, and `fusefs status` names it."
)
def test_changes_wait_for_the_rename_of_their_directory(
    renaming: Renaming, is_killed: bool
) -> None:
    old, new = renaming.path / "old", renaming.path / "new"
    for name in CHANGES:
        os.listdir(old / name)
    written = os.open(old / "write" / "file", os.O_RDWR)
    # The kernel has lookups of the two names themselves wait for its rename.
    read = os.open(old / "read", os.O_RDONLY)
    renaming.begin()
    for change in CHANGES.values():
        renaming.start(lambda change=change: change(old))
    os.write(written, b"W")  # goes on; its close waits
    renaming.start(lambda: os.close(written))
    before = keys(renaming.bucket, "old/")
    for pause in (renaming.pause, renaming.deletes):
        until(lambda pause=pause: pause.used > 0, "the rename has not come that far")
        if is_killed:
            kill_serving(renaming.mount)
        renaming.until_waiting(len(CHANGES) + 1)
        assert os.listdir(read) == ["file"]
        with open(os.open("file", os.O_RDONLY, dir_fd=read), "rb") as file:
            assert file.read() == b"read"
        assert keys(renaming.bucket, "old/") == before
        text = fusefs("status", renaming.path).stdout
        assert f"{len(CHANGES) + 1} changes of this mount waiting for it: " in text
        pause.release()
    renaming.end()
    os.close(read)
    assert renaming.errors == []
    assert keys(renaming.bucket, "old/") == []
    found = set(keys(renaming.bucket, "new/"))
    made = {"create/new", "mkdir/new/", "rename/moved", "write/file", "chmod/file"}
    assert {f"new/{name}" for name in made} <= found
    assert not {"new/unlink/file", "new/rename/file"} & found
    assert (new / "write" / "file").read_bytes() == b"Write"
    assert (new / "chmod" / "file").stat().st_mode & 0o777 == 0o600
    assert not old.exists()


@states("A program that is killed while it waits for a rename has changed nothing.")
def test_a_program_that_waits_for_a_rename_can_be_killed(renaming: Renaming) -> None:
    renaming.begin()
    program = "import sys; open(sys.argv[1], 'x')"
    target = renaming.path / "old" / "create" / "new"
    with subprocess.Popen([sys.executable, "-c", program, target]) as process:
        renaming.until_waiting(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM
    renaming.until_waiting(0)
    renaming.pause.release()
    renaming.deletes.release()
    renaming.end()
    assert keys(renaming.bucket, "new/create/") == ["new/create/file"]
