"""Real programs on a writable mount: what they left is there after mounting again, and in S3.

The sizes are small; with PROGRAMS_FULL in the environment they are those of real use.
"""

import contextlib
import mmap
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.mounting import Mount
from tests.support.programs import IS_FULL, check_what_is_left, names_and_contents, need, run, tree
from tests.support.servers.buckets import Bucket

FILES = 5000 if IS_FULL else 60


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tree of small files, a larger one, links, modes and old times."""
    root = tmp_path / "source"
    for number in range(FILES):
        path = root / f"part{number % 7}" / f"sub{number % 3}" / f"{number:05}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d\n" % number * (number % 500))
        os.utime(path, ns=(10**18 + number, 10**18 + number * 10**9))
    (root / "large.bin").write_bytes(os.urandom(3_000_001))
    (root / "tool").write_text("#!/bin/sh\nexit 7\n")
    (root / "tool").chmod(0o750)
    (root / "empty").mkdir()
    (root / "nothing").touch()
    (root / "link").symlink_to("part0/sub0/00000.txt")
    (root / "dangling").symlink_to("nowhere/at all")
    for name in ("large.bin", "tool", "nothing"):
        os.utime(root / name, (1_234_567_890, 1_234_567_890))
    return root


def test_git_clones_and_commits(mount: Mount, shared: Bucket, source: Path, tmp_path: Path) -> None:
    need("git")
    (tmp_path / "config").write_text(
        "[user]\nname = A\nemail = a@example.org\n[init]\ndefaultBranch = main\n[gc]\nauto = 0\n"
    )

    def git(*arguments: object, at: Path) -> str:
        return run("git", *arguments, cwd=at, GIT_CONFIG_GLOBAL=str(tmp_path / "config"))

    git("init", "-q", at=source)
    git("add", ".", at=source)
    git("commit", "-q", "-m", "first", at=source)
    clone = mount.path / "git"
    git("clone", "-q", f"file://{source}", clone, at=tmp_path)
    assert git("status", "--porcelain", at=clone) == ""
    (clone / "tool").write_text("#!/bin/sh\nexit 8\n")
    (clone / "new").write_text("new\n")
    (clone / "large.bin").unlink()
    assert git("status", "--porcelain", at=clone) == " D large.bin\n M tool\n?? new\n"
    git("add", "-A", at=clone)
    git("commit", "-q", "-m", "second", at=clone)
    git("checkout", "-q", "-b", "other", "HEAD~1", at=clone)
    git("checkout", "-q", "main", at=clone)
    git("gc", "-q", at=clone)
    check_what_is_left(mount, shared, "git")
    assert git("status", "--porcelain", at=clone) == ""
    git("fsck", "--strict", at=clone)
    git("fetch", "-q", clone, at=source)
    assert git("rev-parse", "FETCH_HEAD", at=source) == git("rev-parse", "HEAD", at=clone)


MONEY = 10_000
_TRANSFERS = """
import random, sqlite3, sys, time
dice = random.Random(5)
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA cache_size = 5")  # so that unfinished transactions are in the file, too
while True:
    db.execute("BEGIN IMMEDIATE")
    for _ in range(200):
        one, other, amount = dice.randrange(1000), dice.randrange(1000), dice.randrange(5)
        db.execute("UPDATE account SET money = money - ? WHERE id = ?", (amount, one))
        db.execute("UPDATE account SET money = money + ? WHERE id = ?", (amount, other))
    print("ready", flush=True)
    db.execute("COMMIT")
    print("done", flush=True)
"""


def test_sqlite_rolls_back_what_a_killed_program_had_not_committed(
    mount: Mount, shared: Bucket
) -> None:
    folder = mount.path / "sqlite"
    folder.mkdir()
    path = folder / "accounts.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        db.execute("CREATE TABLE account (id INTEGER PRIMARY KEY, money INTEGER, pad TEXT)")
        db.execute("BEGIN")
        rows = ((number, MONEY // 1000, "x" * 200) for number in range(1000))
        db.executemany("INSERT INTO account VALUES (?, ?, ?)", rows)
        db.execute("COMMIT")
    for _ in range(20 if IS_FULL else 2):
        program = [sys.executable, "-c", _TRANSFERS, path]
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as transfers:
            for output in transfers.stdout:
                if output == "done\n":
                    break
            transfers.stdout.readline()
            os.kill(transfers.pid, signal.SIGKILL)
        with contextlib.closing(sqlite3.connect(path)) as db:
            assert db.execute("SELECT sum(money), count(*) FROM account").fetchone() == (
                MONEY,
                1000,
            )
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with contextlib.closing(sqlite3.connect(path)) as db:
        held = db.execute("SELECT * FROM account ORDER BY id").fetchall()
    check_what_is_left(mount, shared, "sqlite")
    assert os.listdir(folder) == ["accounts.db"]
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT * FROM account ORDER BY id").fetchall() == held


def test_tar_unpacks_what_it_then_finds_to_be_the_same(
    mount: Mount, shared: Bucket, source: Path, tmp_path: Path
) -> None:
    need("tar")
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        archive.add(source, ".")
    folder = mount.path / "tar"
    folder.mkdir()
    run("tar", "xf", tmp_path / "all.tar", "-C", folder)
    run("tar", "df", tmp_path / "all.tar", "-C", folder, "--exclude=.")
    assert check_what_is_left(mount, shared, "tar") == tree(source)
    run("tar", "cf", tmp_path / "again.tar", "-C", folder, ".")
    (tmp_path / "again").mkdir()
    run("tar", "xf", tmp_path / "again.tar", "-C", tmp_path / "again")
    assert tree(tmp_path / "again") == tree(source)


def test_rsync_transfers_nothing_the_second_time(
    mount: Mount, shared: Bucket, source: Path
) -> None:
    need("rsync")
    folder = mount.path / "rsync"
    sync = ("rsync", "-a", "--itemize-changes", f"{source}/", folder)
    run(*sync)
    assert run(*sync) == ""
    assert check_what_is_left(mount, shared, "rsync") == tree(source)
    # The server of the tests forgets what belongs to a directory's marker.
    assert run(*sync, "--omit-dir-times") == ""
    with (source / "large.bin").open("r+b") as file:
        file.write(b"changed")
    (source / "nothing").unlink()
    output = run(*sync, "--delete", "--inplace", "--no-whole-file").splitlines()
    assert [line for line in output if not line.startswith(".d")] == [
        "*deleting   nothing",
        ">f..t...... large.bin",
    ]
    assert tree(folder) == tree(source)


def test_pip_installs_a_package_that_can_be_imported(
    mount: Mount, shared: Bucket, tmp_path: Path
) -> None:
    wheel = tmp_path / "parcel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for number in range(FILES // 10):
            archive.writestr(f"parcel/part{number}.py", f"NUMBER = {number}\n")
        archive.writestr("parcel/__init__.py", "from .part3 import NUMBER\n")
        archive.writestr(
            "parcel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: parcel\nVersion: 1.0\n"
        )
        archive.writestr(
            "parcel-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("parcel-1.0.dist-info/RECORD", "")
    folder = mount.path / "pip"
    options = ("-q", "--no-index", "--no-deps", "--disable-pip-version-check")
    install = (sys.executable, "-m", "pip", "install", *options, "--target", folder, wheel)
    run(*install)
    use = (sys.executable, "-c", "import parcel; print(parcel.__file__, parcel.NUMBER)")
    assert run(*use, PYTHONPATH=str(folder)) == f"{folder}/parcel/__init__.py 3\n"
    run(*install, "--upgrade")
    check_what_is_left(mount, shared, "pip")
    assert run(*use, PYTHONPATH=str(folder)) == f"{folder}/parcel/__init__.py 3\n"


@pytest.mark.parametrize("way", ["no", "yes"])
def test_an_editor_saves(mount: Mount, shared: Bucket, way: str) -> None:
    """By renaming the old file and writing a new one, and by writing into a copied one."""
    need("vim")
    folder = mount.path / f"vim-{way}"
    folder.mkdir()
    (folder / "config.json").write_text('{"rate": 0.1}\n' * 100)
    (folder / "config.json").chmod(0o640)
    edit = f"set backup writebackup backupskip= backupcopy={way} fsync"
    commands = ("-c", edit, "-c", "%s/0.1/0.25/", "-c", "wq")
    run("vim", "-u", "NONE", "-es", *commands, folder / "config.json")
    left = check_what_is_left(mount, shared, folder.name)
    assert sorted(left) == ["config.json", "config.json~"]
    assert (folder / "config.json").read_text() == '{"rate": 0.25}\n' * 100
    assert (folder / "config.json~").read_text() == '{"rate": 0.1}\n' * 100
    assert left["config.json"].mode == 0o640


REPOSITORY = Path(__file__).parents[3]
RECORD = 262_144
NEW = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC


def tensors(seed: int) -> list[bytes]:
    return [bytes([seed, number]) * (RECORD // 2) for number in range(4)]


def torch_save(path: Path, records: list[bytes]) -> None:
    """A zip file: for each tensor its head, its bytes and its checksum in one call."""
    fd = os.open(f"{path}.tmp", NEW, 0o666)
    for record in records:
        os.writev(fd, [b"PK\3\4" + bytes(60), record])
    os.write(fd, b"PK\5\6" + bytes(1000))
    os.close(fd)
    os.replace(f"{path}.tmp", path)


def read_torch(path: Path) -> list[bytes]:
    """As torch.load(mmap=True): the directory at the end first, then by a private mapping."""
    with path.open("rb") as file:
        file.seek(-1004, os.SEEK_END)
        assert file.read(4) == b"PK\5\6"
        size = os.fstat(file.fileno()).st_size
        view = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    heads = range(0, size - 1004, 64 + RECORD)
    return [view[head + 64 : head + 64 + RECORD] for head in heads]


def save_safetensors(path: Path, records: list[bytes]) -> None:
    """An exclusive temporary file of its final size, renamed while it is open, not synced."""
    temporary = path.parent / f".tmp{os.getpid()}"
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, sum(map(len, records)))
    for record in records:
        os.write(fd, record)
    os.rename(temporary, path)
    os.close(fd)


def save_rank(folder: Path, rank: int, records: list[bytes]) -> None:
    """What each rank of torch.distributed.checkpoint does; the first writes the metadata, too."""
    os.makedirs(folder, exist_ok=True)
    fd = os.open(folder / f"__{rank}_0.distcp", NEW, 0o666)
    for record in records:
        os.write(fd, b"PK\3\4" + bytes(700))
        os.write(fd, record)
    os.fsync(fd)
    os.close(fd)


def test_checkpoints_are_renamed_when_they_are_whole_and_the_oldest_deleted(
    mount: Mount, shared: Bucket
) -> None:
    root = mount.path / "rotation"
    root.mkdir()
    for step in range(5):
        unfinished = root / f"tmp-checkpoint-{step}"
        unfinished.mkdir()
        save_safetensors(unfinished / "model.safetensors", tensors(step))
        torch_save(unfinished / "optimizer.pt", tensors(step))
        (unfinished / "state.json").write_text(f'{{"step": {step}}}')
        os.rename(unfinished, root / f"checkpoint-{step}")
        for old in sorted(root.glob("checkpoint-*"))[:-2]:
            shutil.rmtree(old)
        assert read_torch(root / f"checkpoint-{step}" / "optimizer.pt") == tensors(step)
        # And what replaces the last one.
        torch_save(root / "last.pt", tensors(step))
        assert read_torch(root / "last.pt") == tensors(step)
        save_safetensors(root / "last.safetensors", tensors(step))
        os.chmod(root / "last.safetensors", 0o644)
        assert (root / "last.safetensors").read_bytes() == b"".join(tensors(step))
    left = check_what_is_left(mount, shared, "rotation")
    names = ("model.safetensors", "optimizer.pt", "state.json")
    assert {path for path in left if "/" in path} == {
        f"checkpoint-{step}/{name}" for step in (3, 4) for name in names
    }
    assert {path for path in left if "." in path and "/" not in path} == {
        "last.pt",
        "last.safetensors",
    }
    assert left["last.safetensors"].mode == 0o644
    assert read_torch(root / "last.pt") == tensors(4)
    assert (root / "checkpoint-4" / "state.json").read_text() == '{"step": 4}'


def test_the_libraries_themselves_save_and_load(mount: Mount, shared: Bucket) -> None:
    python = os.environ.get("TRAINING_PYTHON")
    if python is None:
        pytest.skip("TRAINING_PYTHON names no interpreter that has torch")
    folder = mount.path / "libraries"
    run(python, "-m", "examples.training.checkpoints", folder, cwd=REPOSITORY)
    check_what_is_left(mount, shared, "libraries")


def test_files_are_copied_moved_and_removed_by_the_shell(
    mount: Mount, shared: Bucket, source: Path
) -> None:
    folder = mount.path / "shell"
    folder.mkdir()
    run("cp", "-a", source, folder / "one")
    run("mv", folder / "one", folder / "two")
    run("cp", "-r", folder / "two", folder / "three")
    run("mv", folder / "two" / "part1", folder / "moved")
    run("rm", "-r", folder / "three" / "part2")
    run("sh", "-c", "echo one > log; echo two >> log; sed -i s/one/1/ log", cwd=folder)
    run("sh", "-c", "find two -name '*1.txt' -delete; truncate -s 10 two/large.bin", cwd=folder)
    left = names_and_contents(check_what_is_left(mount, shared, "shell"))
    expected = names_and_contents(tree(source))
    assert (folder / "log").read_text() == "1\ntwo\n"
    assert {path[6:]: one for path, one in left.items() if path.startswith("moved/")} == {
        path[6:]: one for path, one in expected.items() if path.startswith("part1/")
    }
    assert {path[6:] for path in left if path.startswith("three/")} == {
        path for path in expected if not path.startswith("part2")
    }
