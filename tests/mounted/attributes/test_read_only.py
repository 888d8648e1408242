"""Links and executables on read-only mounts: what they are on a disk, for few requests."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mounting import Mounter, cost
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket

Describe = Callable[[os.stat_result], dict[str, str]]
FOLDERS = 10


def as_s3fs(found: os.stat_result) -> dict[str, str]:
    return {"mode": str(found.st_mode), "uid": str(found.st_uid), "gid": str(found.st_gid)}


def as_datasync(found: os.stat_result) -> dict[str, str]:
    return {
        "file-permissions": f"{found.st_mode:07o}",
        "file-owner": str(found.st_uid),
        "file-group": str(found.st_gid),
        "file-mtime": f"{found.st_mtime_ns}ns",
    }


def upload(bucket: Bucket, root: Path, describe: Describe) -> None:
    """Put a tree into a bucket as a program does that keeps attributes."""
    for directory, folders, names in os.walk(root):
        for name in [*names, *folders]:
            path = Path(directory, name)
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode):
                is_link = stat.S_ISLNK(found.st_mode)
                content = os.fsencode(path.readlink()) if is_link else path.read_bytes()
                bucket.put(str(path.relative_to(root)), content, Metadata=describe(found))


def shown(root: Path) -> dict[str, tuple[int, str | None]]:
    """The modes of everything below a directory, and the targets of links."""
    found = {}
    for directory, folders, names in os.walk(root):
        for name in [*names, *folders]:
            path = Path(directory, name)
            mode = path.lstat().st_mode
            target = os.readlink(path) if stat.S_ISLNK(mode) else None
            found[str(path.relative_to(root))] = mode, target
    return found


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A Hugging Face cache and a virtual environment, on the local disk."""
    root = tmp_path / "tree"
    model = root / "hub/models--org--name"
    for folder in ("blobs", "refs", "snapshots/1234/onnx"):
        (model / folder).mkdir(parents=True)
    (model / "refs/main").write_text("1234")
    for number, name in enumerate(("config.json", "model.safetensors", "onnx/model.onnx")):
        blob = f"{number:064x}"
        (model / "blobs" / blob).write_bytes(b'{"name": "x"}' if not number else bytes(10_000))
        up = "../" * (2 + name.count("/"))
        (model / "snapshots/1234" / name).symlink_to(f"{up}blobs/{blob}")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], check=True)
    for size in (0, 6000):  # one that may be a link by its size, and one that may not
        script = root / f"venv/bin/hello{size}"
        script.write_text("#!/bin/sh\necho hello\n" + "#" * size)
        script.chmod(0o755)
    return root


@pytest.mark.parametrize("describe", [as_s3fs, as_datasync])
@states(
    "On a read-only mount symbolic links and modes are the objects' as well: the smallest file "
    "of a folder and the youngest have a HEAD, and where these say nothing the others are taken to "
    "say nothing, and so are those of the folders beside it, if written within ten minutes of "
    "these."
)
def test_a_read_only_mount_shows_what_the_disk_shows(
    mounter: Mounter, bucket: Bucket, tree: Path, describe: Describe
) -> None:
    upload(bucket, tree, describe)
    mount = mounter("--metadata-ttl", "1h")
    for root in (mount.path, tree):
        snapshot = root / "hub/models--org--name/snapshots/1234"
        assert (snapshot / "config.json").read_bytes() == b'{"name": "x"}'
        assert (snapshot / "onnx/model.onnx").stat().st_size == 10_000
        prefix = subprocess.check_output(
            [root / "venv/bin/python", "-c", "import sys; print(sys.prefix)"]
        )
        assert prefix.decode().strip() == str(root / "venv")
        for size in (6000, 0):
            assert os.access(root / f"venv/bin/hello{size}", os.X_OK)
            assert subprocess.check_output([root / f"venv/bin/hello{size}"]) == b"hello\n"
    on_disk = {name: one for name, one in shown(tree).items() if not stat.S_ISDIR(one[0])}
    on_mount = {name: one for name, one in shown(mount.path).items() if not stat.S_ISDIR(one[0])}
    assert on_mount == on_disk


@states(
    "A link that was taken for a file is followed all the same when it is opened, and shown as a "
    "link from then on; a program that may not read or execute a file makes the mount ask for its "
    "mode."
)
def test_a_wrong_assumption_does_not_last(mounter: Mounter, bucket: Bucket) -> None:
    for name in ("plain", "other"):
        bucket.put(f"set/00/{name}", b"x")
    bucket.put("set/z/a", b"x")
    bucket.put("set/z/link", b"../00/plain", Metadata={"mode": str(stat.S_IFLNK | 0o777)})
    script = b"#!/bin/sh\necho hello\n" + b"#" * 6000
    bucket.put("set/z/script", script, Metadata={"mode": str(stat.S_IFREG | 0o755)})
    mount = mounter("--metadata-ttl", "1h")
    folder = mount.path / "set"
    for path in sorted(folder.rglob("*")):
        path.lstat()
    assert not (folder / "z/link").is_symlink()
    assert subprocess.check_output([folder / "z/script"]) == b"hello\n"
    assert (folder / "z/script").stat().st_mode == stat.S_IFREG | 0o755
    assert (folder / "z/link").is_symlink()  # for its folder has attributes after all
    assert (folder / "z/link").read_bytes() == b"x"


def test_a_link_that_was_taken_for_a_file_is_followed(mounter: Mounter, bucket: Bucket) -> None:
    for name in ("plain", "other"):
        bucket.put(f"set/00/{name}", b"x")
    for name in ("a", "b"):
        bucket.put(f"set/z/{name}", b"../00/plain", Metadata={"mode": str(stat.S_IFLNK | 0o777)})
    mount = mounter("--metadata-ttl", "1h")
    folder = mount.path / "set"
    for name in ("plain", "other"):
        (folder / "00" / name).lstat()
    assert stat.S_ISREG((folder / "z/a").lstat().st_mode)
    assert (folder / "z/a").read_bytes() == b"x"
    assert (folder / "z/a").is_symlink()
    assert (folder / "z/b").is_symlink()


def test_folders_without_attributes_cost_a_few_requests(mounter: Mounter, bucket: Bucket) -> None:
    for number in range(FOLDERS):
        for name in ("1", "2", "3"):
            bucket.put(f"small/{number:02}/{name}", b"x" * number)
        bucket.put(f"large/{number:02}/1", bytes(5000))
    mount = mounter()
    read = cost(mount, lambda: [path.read_bytes() for path in each(mount.path / "large", "1")])
    assert read.get("heads", 0) <= 2
    first = cost(mount, lambda: shown(mount.path / "small/00"))
    assert first["heads"] <= 2
    assert "heads" not in cost(mount, lambda: shown(mount.path / "small"))


def each(folder: Path, name: str) -> list[Path]:
    return [folder / f"{number:02}" / name for number in range(FOLDERS)]
