"""Trains on files of a mount whose cache has room for half of them, and says how busy it was.

    python planned.py /data/train           # what the mount makes of a random order
    python planned.py /data/train --plan    # the mount knows the order

`--plan` is the one line that gives the mount the sampler's order. A sleep stands for the
accelerator's step; utilisation is the share of an epoch that is computed, from its first sample on.
"""

import argparse
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import fusefs


class Files(Dataset):
    def __init__(self, directory: Path) -> None:
        self.paths = sorted(path for path in directory.rglob("*") if path.is_file())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.paths[index].read_bytes()), dtype=torch.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--step", type=float, default=0.05, help="seconds")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    dataset = Files(options.directory)
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=0)
    if options.plan:
        sampler = fusefs.PlannedSampler(sampler, dataset.paths)
    loader = DataLoader(
        dataset, sampler=sampler, batch_size=None, num_workers=4, persistent_workers=True
    )
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        samples, computed = iter(loader), 0.0
        next(samples)
        began = time.monotonic()
        for _sample in samples:
            start = time.monotonic()
            time.sleep(options.step)
            computed += time.monotonic() - start
        print(f"{computed / (time.monotonic() - began):.1%}", flush=True)


if __name__ == "__main__":
    main()
