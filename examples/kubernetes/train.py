"""Training as ordinary PyTorch: files below DATA_DIR in, checkpoints in CHECKPOINT_DIR out.

Nothing here knows that the directories are a bucket. Each `*.pt` file holds a
dictionary of two tensors, `x` (n by 32) and `y` (n class numbers). Ranks come
from torchrun, a PyTorchJob or Open MPI; without any there is one. A checkpoint
appears whole under its name, or not at all; a new start goes on from the newest.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

DATA_DIR = Path(os.environ.get("DATA_DIR", "/data"))
CHECKPOINT_DIR = Path(os.environ.get("CHECKPOINT_DIR", "/checkpoints"))
EPOCHS = int(os.environ.get("EPOCHS", "3"))
FEATURES, CLASSES, KEPT = 32, 10, 3


def from_environment(*names: str, default: int) -> int:
    return int(next((os.environ[name] for name in names if name in os.environ), default))


RANK = from_environment("RANK", "OMPI_COMM_WORLD_RANK", default=0)
WORLD = from_environment("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", default=1)
LOCAL = from_environment("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", default=0)


class Files(Dataset[tuple[Tensor, Tensor]]):
    """Each item is one file, read when the loader wants it."""

    def __init__(self, directory: Path) -> None:
        self.paths = sorted(directory.rglob("*.pt"))
        if not self.paths:
            raise SystemExit(f"no *.pt below {directory}")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        batch = torch.load(self.paths[index], map_location="cpu", weights_only=True)
        return batch["x"], batch["y"]


def save(state: dict[str, object], epoch: int) -> None:
    """Write under another name, then rename: no program ever reads half a checkpoint."""
    temporary = CHECKPOINT_DIR / f".epoch-{epoch:05}.pt"
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(CHECKPOINT_DIR / f"epoch-{epoch:05}.pt")
    for old in sorted(CHECKPOINT_DIR.glob("epoch-*.pt"))[:-KEPT]:
        old.unlink()


def newest(device: torch.device) -> int:
    """The last epoch of which every rank has a checkpoint; -1 if there is none."""
    found = sorted(CHECKPOINT_DIR.glob("epoch-*.pt"))
    epoch = torch.tensor(int(found[-1].stem.partition("-")[2]) if found else -1, device=device)
    if WORLD > 1:
        torch.distributed.all_reduce(epoch, torch.distributed.ReduceOp.MIN)
    return int(epoch)


def main() -> None:
    global CHECKPOINT_DIR
    device = torch.device("cuda", LOCAL) if torch.cuda.is_available() else torch.device("cpu")
    model: nn.Module = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES)).to(
        device
    )
    optimizer = torch.optim.Adam(model.parameters())
    if WORLD > 1:
        # Where the ranks share one directory, each has its own in it.
        CHECKPOINT_DIR = CHECKPOINT_DIR / f"rank-{RANK}"
        torch.distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", rank=RANK, world_size=WORLD
        )
    CHECKPOINT_DIR.mkdir(parents=True, exist_ok=True)
    last = newest(device)
    if last >= 0:
        path = CHECKPOINT_DIR / f"epoch-{last:05}.pt"
        state = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    trained = DistributedDataParallel(model) if WORLD > 1 else model
    files = Files(DATA_DIR)
    sampler = DistributedSampler(files, WORLD, RANK)
    loader = DataLoader(files, batch_size=None, sampler=sampler, num_workers=2)
    for epoch in range(last + 1, EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(trained(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, epoch)
        print(f"rank {RANK} epoch {epoch} loss {loss.item():.4f}", flush=True)
    if WORLD > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
