"""What processes of torch do in libraries.py: they are started anew, and import this module."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator

import fsspec
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

WHOLE = torch.arange(24_000.0).reshape(240, 100)


def save_rows(rank: int, world: int, meeting: str, url: str) -> None:
    """Save WHOLE, of which each process has some rows."""
    _in_group(rank, world, meeting)
    mesh = init_device_mesh("cpu", (world,))
    state = {"weight": distribute_tensor(WHOLE, mesh, [Shard(0)])}
    checkpoint.save(state, storage_writer=FsspecWriter(url))
    dist.destroy_process_group()


def load_columns(rank: int, world: int, meeting: str, url: str) -> None:
    """Load it as columns, and compare it."""
    _in_group(rank, world, meeting)
    mesh = init_device_mesh("cpu", (world,))
    state = {"weight": distribute_tensor(torch.zeros(WHOLE.shape), mesh, [Shard(1)])}
    checkpoint.load(state, storage_reader=FsspecReader(url))
    assert torch.equal(state["weight"].full_tensor(), WHOLE)
    dist.destroy_process_group()


def _in_group(rank: int, world: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)


class Samples(Dataset[torch.Tensor]):
    """Files that each have one sample."""

    def __init__(self, urls: list[str]) -> None:
        self._urls = urls
        self._files = fsspec.filesystem("fusefs")

    def __len__(self) -> int:
        return len(self._urls)

    def __getitem__(self, number: int) -> torch.Tensor:
        with self._files.open(self._urls[number]) as file:
            return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)


class Tars(IterableDataset[tuple[str, bytes]]):
    """The members of tar files, each of which is read as one stream by one worker."""

    def __init__(self, urls: list[str]) -> None:
        self._urls = urls

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        worker = get_worker_info()
        for url in self._urls[worker.id :: worker.num_workers]:
            with fsspec.open(url, "rb") as file, tarfile.open(fileobj=file, mode="r|") as tar:
                for member in tar:
                    content = tar.extractfile(member)
                    assert content is not None
                    yield member.name, content.read()
