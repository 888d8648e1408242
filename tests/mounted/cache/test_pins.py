"""What is kept on the local disk: `fusefs pin`, `unpin`, `drop`, `status PATH`, manifests."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounting import FUSEFS, Mount, Mounter, fetched, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import read_all, stamped
from tests.support.survival.surviving import replace_daemon
from tests.support.waiting import until

MIB = 1 << 20
SIZE = 5_000
# Writes a file, and closes it when its standard input has ended.
WRITER = """\
import sys
with open(sys.argv[1], "wb", buffering=0) as file:
    file.write(sys.stdin.buffer.read(int(sys.argv[2])))
    print("written", flush=True)
    sys.stdin.read()
"""


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return fusefs(*map(str, arguments), check=False)


def local(path: Path) -> dict[str, Any]:
    return dict(json.loads(fusefs("status", "--json", str(path)).stdout))


@pytest.fixture(scope="module")
def tree(shared: Bucket) -> Bucket:
    for number in range(12):
        shared.put(f"tree/d{number % 3}/f{number}.bin", stamped(number, SIZE))
    shared.put("tree/note.txt", b"text")
    for number in range(70):
        shared.put(f"many/f{number}", b"x")
    return shared


@states(
    "What `fusefs pin` names is fetched whole and never evicted before `fusefs unpin`, whichever "
    "mount of the cache directory needs room, and whether the daemon or the mount was replaced "
    "since."
)
def test_what_is_pinned_stays_when_other_files_need_the_room(
    mounter: Mounter, bucket: Bucket
) -> None:
    for number in range(6):
        bucket.put(f"kept/f{number}", stamped(number, MIB))
        bucket.put(f"other/f{number}", stamped(number, 2 * MIB))
    here = mounter("--cache-size", "10MiB")
    result = run("pin", here.path / "kept")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{here.path}/kept: 6 files, 6.0 MiB in the cache\n"
    assert "pinned      1 path\n" in fusefs("status", here.path).stdout
    here.end()
    here.start()
    assert run("warm", here.path / "other", "--wait").returncode == 1
    for number in range(6):
        assert read_all(here.path / f"other/f{number}") == stamped(number, 2 * MIB)
    before = fetched(here)
    for number in range(6):
        assert read_all(here.path / f"kept/f{number}") == stamped(number, MIB)
    assert fetched(here) == before
    status = local(here.path / "kept")
    assert (status["local_files"], status["pinned_files"], status["is_pinned"]) == (6, 6, True)

    assert run("unpin", here.path / "kept/f0").returncode == 1  # it is a part of a pin
    assert run("unpin", here.path / "kept").returncode == 0
    assert "kept is not pinned" in run("unpin", here.path / "kept").stderr
    assert run("warm", here.path / "other", "--wait").returncode == 1
    assert local(here.path / "kept")["local_files"] < 6


@states("`fusefs pin` fails if what it names does not fit, and says how much does not.")
def test_a_pin_that_does_not_fit_fails_and_makes_room_by_evicting_the_rest(
    mounter: Mounter, bucket: Bucket
) -> None:
    for number in range(6):
        bucket.put(f"f{number}", stamped(number, 2 * MIB))
    here = mounter("--cache-size", "9MiB")
    for number in (4, 5):
        read_all(here.path / f"f{number}")
    assert run("pin", *(here.path / f"f{number}" for number in range(4))).returncode == 0
    assert local(here.path / "f5")["local_files"] == 0
    result = run("pin", here.path / "f4")
    assert result.returncode == 1
    assert "no room for 2.0 MiB of 1 file in the cache (9.0 MiB)" in result.stdout
    assert run("pin", here.path / "no-such").returncode == 1
    assert local(here.path / "*")["pins"] == 0
    assert here.status()["pins"]["paths"] == 5
    assert run("unpin", here.path / "f[0-3]").returncode == 0
    assert "is not pinned" in run("unpin", here.path / "f[0-3]").stderr
    assert here.status()["pins"]["paths"] == 1


@states(
    "A pin names a path: a newer version of a pinned object is kept instead of the older one "
    "once it was read, or fetched by another `fusefs pin`."
)
def test_a_new_version_of_a_pinned_object_is_pinned(mounter: Mounter, bucket: Bucket) -> None:
    bucket.put("changing", stamped(1, SIZE))
    here = mounter("--metadata-ttl", "0s")
    assert run("pin", here.path / "changing").returncode == 0
    bucket.put("changing", stamped(2, SIZE))
    status = local(here.path / "changing")
    assert (status["local_files"], status["pinned_files"]) == (0, 0)
    assert run("pin", here.path / "changing").returncode == 0
    status = local(here.path / "changing")
    assert (status["local_files"], status["pinned_files"]) == (1, 1)


@states(
    "`fusefs drop` removes local copies and nothing that a program has open, that is pinned or "
    "that the bucket does not have yet."
)
def test_a_drop_spares_what_is_open_and_what_is_pinned(here: Mount) -> None:
    assert run("warm", here.path / "tree", "--wait").returncode == 0
    assert run("pin", here.path / "tree/d0").returncode == 0
    with open(here.path / "tree/d1/f1.bin", "rb") as held:
        held.read(1)
        result = run("drop", here.path / "tree")
        assert result.returncode == 1
        assert "8 files, 34.2 KiB dropped" in result.stdout
        assert "4 files, 19.5 KiB pinned" in result.stdout
        assert "1 file, 4.9 KiB in use: tree/d1/f1.bin" in result.stdout
        assert held.read() == stamped(1, SIZE)[1:]
    status = local(here.path / "tree")
    assert (status["files"], status["local_files"], status["pinned_files"]) == (13, 5, 4)
    assert run("unpin", here.path / "tree/d0").returncode == 0
    assert run("drop", here.path / "tree").returncode == 0
    assert local(here.path / "tree")["local_files"] == 0
    assert here.status()["cache"]["evicted_files"] == 0


def test_what_is_not_uploaded_is_shown_and_not_dropped(mounter: Mounter, bucket: Bucket) -> None:
    here = mounter("--no-read-only", "--durability", "local", bucket=bucket)
    # By a process of its own: what is started here closes a descriptor of ours, which uploads.
    writing = [sys.executable, "-c", WRITER, str(here.path / "new"), str(SIZE)]
    with subprocess.Popen(writing, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        writer.stdin.write(stamped(1, SIZE))
        writer.stdin.flush()
        assert writer.stdout.readline() == b"written\n"
        assert local(here.path / "new")["pending_files"] == 1
        assert run("drop", here.path / "new").returncode == 0
        assert keys(bucket) == []
    fusefs("sync", here.path)
    assert stored(bucket, "new") == stamped(1, SIZE)


@states(
    "`fusefs status PATH` tells of a path how many files and bytes there are and how many of them "
    "are in the cache, whole or in parts, and makes no node for the kernel."
)
def test_the_status_of_a_path(mounter: Mounter, tree: Bucket) -> None:
    here = mounter(bucket=tree)
    nodes = here.status()["metadata"]["nodes"]
    assert run("warm", here.path / "tree/d1", "--wait").returncode == 0
    text = fusefs("status", here.path / "tree").stdout
    assert "files     13 files, 58.6 KiB" in text
    assert "local     4 files, 19.5 KiB whole" in text
    assert "pinned    no" in text
    assert local(here.path / "tree/*.txt")["files"] == 1
    assert here.status()["metadata"]["nodes"] == nodes
    result = run("status", here.path / "no-such")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"fusefs: {here.path}/no-such: there is no such file or directory in the bucket\n"
    )


@states("`fusefs warm --shard I/N` fetches a part of the files; the N parts are disjoint and all.")
def test_patterns_and_shards_are_fetched(here: Mount) -> None:
    result = run("warm", "--wait", here.path / "tree/**/*.txt")
    assert (result.returncode, "1 file, 4 B" in result.stdout) == (0, True)
    result = run("warm", here.path / "tree/*.none")
    assert (result.returncode, "nothing in the bucket matches" in result.stderr) == (1, True)
    for number in range(3):
        result = run("warm", "--wait", "--shard", f"{number}/3", here.path / "tree")
        assert (result.returncode, f"tree (shard {number}/3): " in result.stdout) == (0, True)
    jobs = here.status()["warming"][-3:]
    assert sum(job["files"] for job in jobs) == 13
    assert sum(job["fetched_bytes"] for job in jobs) == 12 * SIZE
    assert local(here.path / "tree")["local_files"] == 13
    assert "numbered from 0" in run("warm", "--shard", "3/3", here.path).stderr


@states("`fusefs warm --manifest` names each line that stands for no file, and fetches the others.")
def test_a_manifest_is_fetched_and_its_bad_lines_are_named(
    here: Mount, tree: Bucket, tmp_path: Path
) -> None:
    lines = [
        "# a comment",
        "",
        "tree/d0/f0.bin",
        f"{here.path}/tree/d1",
        f"s3://{tree.name}/tree/note.txt",
        "s3://another-bucket/file",
        "../outside",
        "tree/d2/none",
    ]
    manifest = tmp_path / "train.txt"
    manifest.write_text("\n".join(lines))
    result = run("warm", "--wait", "--manifest", manifest, here.path)
    assert result.returncode == 1
    assert f"{manifest}:6: s3://another-bucket/file is not below s3://{tree.name}/" in result.stderr
    assert f"{manifest}:7: ../outside is not in the mount {here.path}" in result.stderr
    assert "6 files, 24.4 KiB in the cache" in result.stdout
    assert "1 file can't be read: line 8: tree/d2/none (there is no such file" in result.stdout
    assert local(here.path / "tree")["local_files"] == 6
    given = ("warm", "--wait", "--manifest", "-", "--shard", "0/1", here.path / "tree")
    done = subprocess.run([FUSEFS, *given], input="d2\n", capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "standard input (shard 0/1): 4 files" in done.stdout


def test_many_paths_are_one_job(here: Mount) -> None:
    result = run("pin", *(here.path / f"many/f{number}" for number in range(70)))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"70 paths of {here.path}: 70 files, 70 B in the cache\n"
    assert here.status()["pins"]["paths"] == 70


def test_the_next_daemon_goes_on_with_a_list_and_a_pin(
    behind: Mounter, tree: Bucket, faulty: FaultyS3, tmp_path: Path
) -> None:
    here = behind("--session", "kernel", bucket=tree)
    stalled = faulty.add("GET", key="tree/*", stall=True)
    manifest = tmp_path / "list"
    manifest.write_text("".join(f"tree/d0/f{number}.bin\n" for number in (0, 3, 6)))
    assert run("warm", "--manifest", manifest, here.path).returncode == 0
    assert run("pin", "--no-wait", here.path / "tree/d1").returncode == 0
    until(lambda: here.status()["pins"]["paths"] == 1, "the pin")
    replace_daemon(here)
    faulty.remove(stalled)
    until(lambda: local(here.path / "tree")["local_files"] == 7, "the rest of both")
    assert local(here.path / "tree")["pinned_files"] == 4
    assert run("unpin", here.path).returncode == 0
    assert here.status()["pins"]["paths"] == 0
