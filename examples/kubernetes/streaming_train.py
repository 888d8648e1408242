"""Reads MDS shards below DATA_DIR with MosaicML's StreamingDataset, and trains on them.

`remote=None`: DATA_DIR is the data set itself, so nothing is copied or written there. Each sample
has `x` (32 floats, a NumPy array) and `y` (a class number). Ranks come from torchrun; without it
there is one.
"""

from __future__ import annotations

import os

import torch
from streaming import StreamingDataset
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

DATA_DIR = os.environ.get("DATA_DIR", "/data")
EPOCHS = int(os.environ.get("EPOCHS", "2"))
FEATURES, CLASSES, BATCH = 32, 10, 64


def main() -> None:
    world, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if world > 1:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    data = StreamingDataset(local=DATA_DIR, remote=None, shuffle=True, batch_size=BATCH)
    loader = DataLoader(data, batch_size=BATCH, num_workers=2)
    model: nn.Module = nn.Linear(FEATURES, CLASSES).to(device)
    trained = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(EPOCHS):
        samples = 0
        for batch in loader:
            loss = nn.functional.cross_entropy(
                trained(batch["x"].to(device)), batch["y"].to(device)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            samples += len(batch["y"])
        print(f"epoch {epoch} samples {samples} loss {loss.item():.4f}", flush=True)
    if world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
