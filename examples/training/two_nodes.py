"""Save checkpoints from two nodes, and go on from them on both; needs torch.

    python -m examples.training.two_nodes DIRECTORY OTHER [ROUNDS]

The directories are one directory of a bucket, mounted twice; each rank works in its own. What is
installed of these is tried, and each rank compares what it finds with what was saved:

- `torch.distributed.checkpoint` saves, and loads as soon as the save has returned: into a new
  directory each time, and into the same one;
- the Trainer of `transformers` is restarted from its last checkpoint, which the first rank saves;
- `lightning` is restarted from `last.ckpt`, which is written over each time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

PORT = int(os.environ.get("MASTER_PORT", "29513"))
SIZE = 100_000
WIDTH = 64


def by_dcp(root: str, rounds: int) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(rounds):
        for name in (f"step-{step}", "last"):
            place = os.path.join(root, name)
            dcp.save({f"rank{rank}": torch.full((SIZE,), step)}, checkpoint_id=place)
            found = {f"rank{other}": torch.full((SIZE,), -1) for other in range(ranks)}
            dcp.load(found, checkpoint_id=place)
            for other, tensor in found.items():
                assert bool((tensor == step).all()), (rank, place, other, tensor[0])
    dist.destroy_process_group()


def by_trainer(root: str, rounds: int) -> None:
    """Train two steps in each round, as a job does that is restarted after each."""
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Model(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self) -> None:
            super().__init__(PretrainedConfig())
            self.layer = torch.nn.Linear(WIDTH, WIDTH)
            self.post_init()

        def _init_weights(self, _module: Any) -> None: ...

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            found = self.layer(x)
            return {"loss": ((found - labels) ** 2).mean(), "logits": found}

    data = [{"x": row, "labels": row} for row in torch.randn(256, WIDTH)]
    place = os.path.join(root, "trainer")
    os.makedirs(place, exist_ok=True)
    for step in range(2, 2 * rounds + 1, 2):
        last = get_last_checkpoint(place)
        assert os.path.basename(last or "checkpoint-0") == f"checkpoint-{step - 2}", (step, last)
        arguments = TrainingArguments(
            place, max_steps=step, save_steps=2, use_cpu=True, ddp_backend="gloo", report_to=[]
        )
        trainer = Trainer(Model(), arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=last)
        assert trainer.state.global_step == step
        weights = trainer.accelerator.unwrap_model(trainer.model).layer.weight.detach()
        found = [torch.zeros_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(found, weights)
        assert all(torch.equal(weights, other) for other in found)
        dist.barrier()
    dist.destroy_process_group()


def by_lightning(root: str, rounds: int) -> None:
    """Train an epoch in each round, as a job does that is restarted after each."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(lightning.LightningModule):
        began_at = -1

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(WIDTH, WIDTH)

        def training_step(self, batch: Any, _index: int) -> Any:
            return ((self.layer(batch) - batch) ** 2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

        def on_train_start(self) -> None:
            self.began_at = self.trainer.current_epoch

    place = os.path.join(root, "lightning")
    os.makedirs(place, exist_ok=True)
    for epoch in range(rounds):
        model = Model()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            num_nodes=2,
            strategy="ddp",
            max_epochs=epoch + 1,
            callbacks=[ModelCheckpoint(place, "{epoch}", save_last=True, save_top_k=-1)],
            logger=False,
            default_root_dir=place,
        )
        trainer.fit(
            model,
            torch.utils.data.DataLoader(torch.randn(32, WIDTH), batch_size=4),
            ckpt_path="last" if epoch else None,
        )
        dist.barrier()
        assert model.began_at == epoch, (epoch, model.began_at)
        saved = torch.load(os.path.join(place, "last.ckpt"), weights_only=False)
        assert saved["epoch"] == epoch, (epoch, saved["epoch"])
        dist.barrier()
    dist.destroy_process_group()


WAYS: dict[str, Callable[[str, int], None]] = {
    "torch": by_dcp,
    "transformers": by_trainer,
    "lightning": by_lightning,
}


def _rank(rank: int, name: str, roots: list[str], rounds: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "NODE_RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(len(roots)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(PORT),
    }
    torch.manual_seed(1)
    WAYS[name](roots[rank], rounds)


def main() -> None:
    roots, rounds = sys.argv[1:3], int((sys.argv[3:] or ["5"])[0])
    for name in WAYS:
        if find_spec(name) is None:
            print(f"{name}: not installed", flush=True)
            continue
        torch.multiprocessing.spawn(_rank, (name, roots, rounds), nprocs=len(roots))
        print(f"{name}: {rounds} of {rounds}", flush=True)


if __name__ == "__main__":
    main()
