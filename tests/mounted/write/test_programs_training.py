"""How checkpoints are saved: each library's own sequence of calls, as strace shows it.

torch is not installed for the tests; with TRAINING_PYTHON (an interpreter that
has torch and safetensors) the libraries themselves run, too.
"""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounting import Mount
from tests.support.programs import check_what_is_left, mounted, run
from tests.support.servers.buckets import Bucket

REPOSITORY = Path(__file__).parents[3]
RECORD = 262_144
NEW = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC


@pytest.fixture(scope="module")
def mount(shared: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    """One writable mount for all tests; each works in a folder of its own."""
    with mounted(shared, tmp_path_factory.mktemp("training")) as mount:
        yield mount


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


def test_a_model_is_saved_under_a_temporary_name_and_replaces_the_last(
    mount: Mount, shared: Bucket
) -> None:
    folder = mount.path / "torch"
    folder.mkdir()
    for seed in range(3):
        torch_save(folder / "last.pt", tensors(seed))
        assert read_torch(folder / "last.pt") == tensors(seed)
    check_what_is_left(mount, shared, "torch")
    assert os.listdir(folder) == ["last.pt"]
    assert read_torch(folder / "last.pt") == tensors(2)


def test_safetensors_renames_a_file_that_it_has_open(mount: Mount, shared: Bucket) -> None:
    folder = mount.path / "safetensors"
    folder.mkdir()
    for seed in range(3):
        save_safetensors(folder / "model.safetensors", tensors(seed))
        os.chmod(folder / "model.safetensors", 0o644)
        assert (folder / "model.safetensors").read_bytes() == b"".join(tensors(seed))
    left = check_what_is_left(mount, shared, "safetensors")
    assert list(left) == ["model.safetensors"]
    assert left["model.safetensors"].mode == 0o644


def test_the_libraries_themselves_save_and_load(mount: Mount, shared: Bucket) -> None:
    python = os.environ.get("TRAINING_PYTHON")
    if python is None:
        pytest.skip("TRAINING_PYTHON names no interpreter that has torch")
    folder = mount.path / "libraries"
    run(python, "-m", "examples.training.checkpoints", folder, cwd=REPOSITORY)
    check_what_is_left(mount, shared, "libraries")
