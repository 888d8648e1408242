"""Libraries that open their data through fsspec, on a real mount: `make test-fsspec`.

torch is not installed by that target, for its size: its test is skipped where it is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import sharing
from tests.support.servers.buckets import new_bucket
from tests.support.servers.s3_server import S3Server


@pytest.fixture(scope="module")
def url(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """That of a bucket which is mounted writable."""
    bucket = new_bucket(s3)
    directory: Path = tmp_path_factory.mktemp("libraries")
    with sharing.mounted(s3, f"s3://{bucket.name}/", directory, "--no-read-only"):
        yield f"fusefs://{bucket.name}"


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
    import fsspec
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


def test_checkpoint_of_torch(url: str) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    state = {"weight": torch.arange(100.0)}
    checkpoint.save(state, storage_writer=FsspecWriter(f"{url}/torch/step-1"), no_dist=True)
    found = {"weight": torch.zeros(100)}
    checkpoint.load(found, storage_reader=FsspecReader(f"{url}/torch/step-1"), no_dist=True)
    assert torch.equal(found["weight"], state["weight"])
