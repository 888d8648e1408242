"""Save distributed checkpoints from two nodes, and load them on both; needs torch.

    python -m examples.training.two_nodes DIRECTORY OTHER [ROUNDS]

The directories are one directory of a bucket, mounted twice. Each rank of
`torch.distributed.checkpoint` saves through its own mount, and loads what both have saved
as soon as the save has returned: into a new directory each time, and into the same one.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

PORT = int(os.environ.get("MASTER_PORT", "29513"))
SIZE = 100_000


def _rank(rank: int, roots: list[str], rounds: int) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{PORT}", rank=rank, world_size=len(roots))
    for step in range(rounds):
        for name in (f"step-{step}", "last"):
            place = os.path.join(roots[rank], name)
            dcp.save({f"rank{rank}": torch.full((SIZE,), step)}, checkpoint_id=place)
            found = {f"rank{other}": torch.full((SIZE,), -1) for other in range(len(roots))}
            dcp.load(found, checkpoint_id=place)
            for other, tensor in found.items():
                assert bool((tensor == step).all()), (rank, place, other, tensor[0])
    dist.destroy_process_group()


def main() -> None:
    roots, rounds = sys.argv[1:3], int((sys.argv[3:] or ["5"])[0])
    torch.multiprocessing.spawn(_rank, (roots, rounds), nprocs=len(roots))
    print(f"torch.distributed.checkpoint: {rounds} of {rounds}", flush=True)


if __name__ == "__main__":
    main()
