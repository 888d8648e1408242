"""Trains on a mount whose cache holds half of the files, and prints each epoch's utilisation.

    python planned.py /data/train [--plan]     # with --plan, the mount knows the sampler's order

A sleep stands for the accelerator's step; an epoch is timed from its first sample on.
"""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import fusefs

STEP_S, EPOCHS = 0.05, 4


class Files(Dataset):
    paths = sorted(path for path in Path(sys.argv[1]).rglob("*") if path.is_file())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.paths[index].read_bytes()), dtype=torch.uint8)


sampler = DistributedSampler(Files(), num_replicas=1, rank=0, seed=0)
if "--plan" in sys.argv:
    sampler = fusefs.PlannedSampler(sampler, Files.paths)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    samples = iter(DataLoader(Files(), sampler=sampler, batch_size=None, num_workers=4))
    next(samples)
    began = time.monotonic()
    steps = sum(time.sleep(STEP_S) is None for _ in samples)
    print(f"{steps * STEP_S / (time.monotonic() - began):.1%}", flush=True)
