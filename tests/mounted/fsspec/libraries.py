"""Libraries that open their data through fsspec, on a real mount: `make test-fsspec`.

torch is not installed by that target, for its size: its tests are skipped where it is missing.
"""

import importlib
import io
import tarfile
from pathlib import Path

import fsspec
import pytest

from tests.support.mounting import WRITABLE, Mounter
from tests.support.servers.buckets import Bucket


@pytest.fixture(scope="module")
def url(shared: Bucket, module_mounter: Mounter) -> str:
    """That of a bucket which is mounted writable."""
    module_mounter(WRITABLE)
    return f"fusefs://{shared.name}"


def test_pandas(url: str) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"a": range(1000), "b": [f"row {number}" for number in range(1000)]})
    frame.to_csv(f"{url}/pandas/table.csv", index=False)
    assert pandas.read_csv(f"{url}/pandas/table.csv").equals(frame)
    frame.to_parquet(f"{url}/pandas/table.parquet")
    assert pandas.read_parquet(f"{url}/pandas/table.parquet").equals(frame)


def test_pyarrow(url: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.dataset as dataset
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    path = url.removeprefix("fusefs://")
    system = PyFileSystem(FSSpecHandler(fsspec.filesystem("fusefs")))
    table = pyarrow.table({"part": [0, 1] * 500, "value": list(range(1000))})
    dataset.write_dataset(
        table, f"{path}/arrow", filesystem=system, format="parquet", partitioning=["part"]
    )
    found = dataset.dataset(
        f"{path}/arrow", filesystem=system, format="parquet", partitioning=["part"]
    )
    assert sorted(found.to_table(columns=["value"])["value"].to_pylist()) == list(range(1000))


def test_datasets_of_hugging_face(url: str) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": [f"line {number}" for number in range(100)]})
    data.save_to_disk(f"{url}/datasets/saved")
    again = datasets.load_from_disk(f"{url}/datasets/saved")
    assert again["text"][:] == data["text"][:]


def test_zarr(url: str) -> None:
    zarr = pytest.importorskip("zarr")
    numpy = pytest.importorskip("numpy")
    data = numpy.arange(10_000).reshape(100, 100)
    array = zarr.open(f"{url}/zarr/array", mode="w", shape=(100, 100), chunks=(30, 30), dtype="i8")
    array[:] = data
    assert (zarr.open(f"{url}/zarr/array", mode="r")[:] == data).all()


def test_checkpoint_of_torch_in_the_background(url: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch import distributed
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    meeting = f"file://{tmp_path}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        for step in range(2):  # the second replaces the first
            state = {"weight": torch.arange(1000.0) + step, "optimizer": {"step": step}}
            writer = FsspecWriter(f"{url}/torch/background")
            checkpoint.async_save(state, storage_writer=writer).result()
            found = {"weight": torch.zeros(1000), "optimizer": {"step": -1}}
            reader = FsspecReader(f"{url}/torch/background")
            checkpoint.load(found, storage_reader=reader)
            assert torch.equal(found["weight"], state["weight"])
            assert found["optimizer"] == {"step": step}
    finally:
        distributed.destroy_process_group()


def test_state_of_torch_as_a_file_and_mapped(url: str) -> None:
    torch = pytest.importorskip("torch")
    state = {"weight": torch.arange(1_000_000.0), "step": 3}
    with fsspec.open(f"{url}/torch/model.pt", "wb") as file:
        torch.save(state, file)
    with fsspec.open(f"{url}/torch/model.pt", "rb") as file:
        assert torch.equal(torch.load(file)["weight"], state["weight"])
    path = fsspec.filesystem("fusefs").local_path(f"{url}/torch/model.pt")
    found = torch.load(path, mmap=True)
    assert torch.equal(found["weight"], state["weight"])
    found["weight"][0] = 5.0
    assert torch.load(path, mmap=True)["weight"][0] == 0.0, "the map is the program's own"


class Samples:
    """Files that each have one sample. Workers that are spawned import this module."""

    def __init__(self, urls: list[str]) -> None:
        self._urls = urls
        self._files = fsspec.filesystem("fusefs")

    def __len__(self) -> int:
        return len(self._urls)

    def __getitem__(self, number: int) -> int:
        content: bytes = self._files.cat_file(self._urls[number])
        assert content == content[:1] * 1000
        return content[0]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_torch(url: str, method: str) -> None:
    torch = pytest.importorskip("torch")
    files = fsspec.filesystem("fusefs")
    urls = [f"{url}/{method}/{number}" for number in range(40)]
    files.pipe({one: bytes([number]) * 1000 for number, one in enumerate(urls)})
    loader = torch.utils.data.DataLoader(
        Samples(urls),
        batch_size=4,
        shuffle=True,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=True,
    )
    for _ in range(2):
        assert sorted(int(one) for batch in loader for one in batch) == list(range(40))


@pytest.fixture(scope="module")
def tars(url: str) -> tuple[list[str], dict[str, bytes]]:
    """The URLs of four tar files, and what is in them."""
    contents = {f"{number:03}.txt": f"{number} ".encode() * 5000 for number in range(100)}
    for shard in range(4):
        with (
            fsspec.open(f"{url}/tars/{shard}.tar", "wb") as file,
            tarfile.open(fileobj=file, mode="w|") as tar,
        ):
            for name in list(contents)[shard::4]:
                member = tarfile.TarInfo(name)
                member.size = len(contents[name])
                tar.addfile(member, io.BytesIO(contents[name]))
    paths = fsspec.filesystem("fusefs").glob(f"{url}/tars/*.tar")
    return [f"fusefs://{path}" for path in paths], contents


def test_webdataset(
    tars: tuple[list[str], dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    webdataset = pytest.importorskip("webdataset")
    urls, contents = tars
    # As docs/guides/python.md has it: it knows no fsspec by itself.
    schemes = importlib.import_module("webdataset.gopen").gopen_schemes
    monkeypatch.setitem(
        schemes, "fusefs", lambda url, mode="rb", *_, **__: fsspec.open(url, mode).open()
    )
    found = {
        f"{one['__key__']}.txt": one["txt"]
        for one in webdataset.WebDataset(urls, shardshuffle=False)
    }
    assert found == contents
