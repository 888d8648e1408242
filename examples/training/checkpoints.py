"""Save and load checkpoints on a mount as training programs do; needs torch and safetensors.

    python -m examples.training.checkpoints DIRECTORY

One model is saved below DIRECTORY in each way, loaded again, and compared:

- `torch.save` to a temporary name, then `os.replace`;
- `safetensors`, which itself writes a temporary file and renames it while it is open;
- `torch.distributed.checkpoint`, of two processes, twice over;
- as the trainers of Hugging Face do: a directory of files under a temporary
  name, renamed when it is whole, and the oldest deleted when there are three.

What is left stays there, to be read by something else.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

RANKS = 2
KEPT = 3
PORT = int(os.environ.get("MASTER_PORT", "29512"))

Tensors = dict[str, Any]


def model(step: int) -> Tensors:
    """Tensors that tell the step: four layers of a mebibyte, and an odd one."""
    generator = torch.Generator().manual_seed(step)
    layers = {f"layer{n}": torch.randn(512, 512, generator=generator) for n in range(4)}
    return layers | {"bias": torch.randn(7, generator=generator), "step": torch.tensor(step)}


def check(found: Tensors, step: int) -> None:
    expected = model(step)
    assert found.keys() == expected.keys(), found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), (step, name)


def by_torch_save(root: Path) -> None:
    for step in range(3):
        torch.save(model(step), root / "last.pt.tmp")
        os.replace(root / "last.pt.tmp", root / "last.pt")
        check(torch.load(root / "last.pt"), step)
        check(torch.load(root / "last.pt", mmap=True), step)


def by_safetensors(root: Path) -> None:
    for step in range(3):
        save_file(model(step), root / "model.safetensors")
        check(load_file(root / "model.safetensors"), step)


def by_distributed_checkpoint(root: Path) -> None:
    torch.multiprocessing.spawn(_rank, (str(root),), nprocs=RANKS)


def _rank(rank: int, root: str) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{PORT}", rank=rank, world_size=RANKS)
    for step in (1, 2):
        own = {f"rank{rank}.{name}": tensor for name, tensor in model(step + rank).items()}
        # Each save replaces the files of the one before.
        dcp.save(own, checkpoint_id=os.path.join(root, "checkpoint"))
        read = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
        dcp.load(read, checkpoint_id=os.path.join(root, "checkpoint"))
        check({name.split(".")[1]: tensor for name, tensor in read.items()}, step + rank)
    dist.destroy_process_group()


def by_rotation(root: Path) -> None:
    for step in range(6):
        unfinished = root / f"tmp-checkpoint-{step}"
        unfinished.mkdir()
        save_file(model(step), unfinished / "model.safetensors")
        torch.save({"step": step}, unfinished / "optimizer.pt")
        (unfinished / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        os.rename(unfinished, root / f"checkpoint-{step}")
        directory = os.open(root, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
        kept = sorted(root.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        for old in kept[:-KEPT]:
            shutil.rmtree(old)
        for path in kept[-KEPT:]:
            number = json.loads((path / "trainer_state.json").read_text())["global_step"]
            check(load_file(path / "model.safetensors"), number)
            assert torch.load(path / "optimizer.pt") == {"step": number}
    assert len(list(root.iterdir())) == KEPT


WAYS: dict[str, Callable[[Path], None]] = {
    "torch.save": by_torch_save,
    "safetensors": by_safetensors,
    "torch.distributed.checkpoint": by_distributed_checkpoint,
    "rotation": by_rotation,
}


def main() -> None:
    root = Path(sys.argv[1])
    for name, way in WAYS.items():
        (root / name).mkdir(parents=True)
        way(root / name)
        print(f"{name}: ok", flush=True)


if __name__ == "__main__":
    main()
