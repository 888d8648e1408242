"""Two nodes and one bucket: what one has closed, the other opens, with default settings.

Two mounts with caches of their own stand for two nodes. S3 is 30 ms away, and one answer
of a hundred takes 300 ms. Each checkpoint library is imitated by its calls in their order,
without any pause: the other node looks as soon as it is told. docs/guides/several-nodes.md has the
same cases.
"""

import json
import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounted.write.test_programs import (
    REPOSITORY,
    save_rank,
    save_safetensors,
    tensors,
    torch_save,
)
from tests.support.mounting import WRITABLE, Mounter
from tests.support.programs import IS_FULL, run
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import read_all
from tests.support.waiting import until

ROUNDS = 20 if IS_FULL else 5
NEAR_S, FAR_S, FAR_SHARE = 0.03, 0.3, 0.01
RIGHT_AWAY = states(
    "What one node has closed another node opens, lists and finds right away, unless it relies on"
    " its last look at the directory."
)


@pytest.fixture(scope="module")
def roots(faulty: FaultyS3, module_mounter: Mounter) -> list[Path]:
    url = faulty.endpoint_url
    return [module_mounter(WRITABLE, endpoint_url=url, cache=cache).path for cache in "ab"]


@pytest.fixture
def nodes(
    roots: list[Path], folder: Bucket, faulty: FaultyS3, dice: random.Random, as_owner: None
) -> Iterator[tuple[Path, Path]]:
    """The test's folder on two mounts."""
    first, second = (root / folder.prefix for root in roots)
    first.mkdir()
    until(second.is_dir, "both see the folder")

    def wait() -> None:
        time.sleep(FAR_S if dice.random() < FAR_SHARE else NEAR_S)

    faulty.add(before=wait)
    yield first, second
    faulty.clear()


def last_checkpoint(run: Path) -> Path | None:
    """As transformers.trainer_utils.get_last_checkpoint."""
    is_one = re.compile(r"checkpoint-\d+").fullmatch
    found = [name for name in os.listdir(run) if is_one(name) and (run / name).is_dir()]
    return run / max(found, key=lambda name: int(name[11:])) if found else None


@RIGHT_AWAY
def test_a_trainer_restarts_from_the_last_checkpoint(nodes: tuple[Path, Path]) -> None:
    """Hugging Face's Trainer with a process on each node."""
    for root in nodes:
        (root / "run").mkdir(exist_ok=True)
    for step in range(1, ROUNDS + 1):
        records = tensors(step)
        folder = Path("run") / f"checkpoint-{step}"
        (nodes[0] / folder).mkdir()
        save_safetensors(nodes[0] / folder / "model.safetensors", records)
        for name in ("optimizer.pt", "scheduler.pt"):
            torch_save(nodes[0] / folder / name, records[:1])
        (nodes[0] / folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        for rank, root in enumerate(nodes):
            os.makedirs(root / folder, exist_ok=True)
            torch_save(root / folder / f"rng_state_{rank}.pth", records[:1])
        for root in reversed(nodes):
            found = last_checkpoint(root / "run")
            assert found == root / folder
            assert json.loads((found / "trainer_state.json").read_text())["global_step"] == step
            assert read_all(found / "model.safetensors") == b"".join(records)
            assert len(os.listdir(found)) == 6


def load_distributed(folder: Path) -> list[bytes]:
    """The metadata, and what each rank has written."""
    metadata = (folder / ".metadata").read_bytes()
    shards = [read_all(folder / f"__{rank}_0.distcp") for rank in range(2)]
    return [metadata, *(shard[-1:] for shard in shards)]


@pytest.mark.parametrize("where", ["anew", "in place"])
def test_a_distributed_checkpoint_loads_on_both_nodes(nodes: tuple[Path, Path], where: str) -> None:
    """torch.distributed.checkpoint with a process on each node."""
    for step in range(1, ROUNDS + 1):
        folder = Path("dcp") if where == "in place" else Path(f"dcp-{step}")
        for root in nodes:  # torch warns if there is one
            assert (root / folder / ".metadata").exists() == (where == "in place" and step > 1)
        for rank in (1, 0):
            save_rank(nodes[rank] / folder, rank, [bytes([step]) * 100_000])
        with (nodes[0] / folder / ".metadata.tmp").open("wb") as file:
            file.write(bytes([step]))
            os.fsync(file.fileno())
        (nodes[0] / folder / ".metadata.tmp").rename(nodes[0] / folder / ".metadata")
        for root in reversed(nodes):
            assert load_distributed(root / folder) == [bytes([step])] * 3


@RIGHT_AWAY
def test_a_checkpoint_that_is_replaced_in_place_is_of_one_step(nodes: tuple[Path, Path]) -> None:
    """Lightning's last.ckpt and what belongs to it."""
    here, there = nodes
    (here / "last").mkdir()
    for step in range(1, ROUNDS + 1):
        for name in ("meta.json", "weights.ckpt", "optimizer.ckpt"):
            with (here / "last" / name).open("wb") as file:
                file.write(b"%d " % step * 1000)
        found = {read_all(path).split()[0] for path in sorted((there / "last").iterdir())}
        assert found == {b"%d" % step}


@RIGHT_AWAY
def test_nodes_that_write_one_file_in_turn_read_each_other(nodes: tuple[Path, Path]) -> None:
    (nodes[0] / "turn").write_bytes(b"0")
    for number in range(1, 2 * ROUNDS + 1):
        root = nodes[number % 2]
        assert int((root / "turn").read_bytes()) == number - 1
        (root / "turn").write_bytes(b"%d" % number)


@states(
    "A name that does not exist is looked for again after a second; for a temporary one, and for a"
    " program that makes one file after the other without a pause, also in a directory that is"
    " changing."
)
def test_a_file_that_is_waited_for_is_seen_within_two_seconds(nodes: tuple[Path, Path]) -> None:
    """Also where nothing has changed for some time."""
    here, there = nodes
    (here / "flags").mkdir()

    def seen_after_s(name: str) -> float:
        for _ in range(120):
            assert not (there / "flags" / name).exists()
            time.sleep(0.1)
        (here / "flags" / name).write_bytes(b"x")
        closed = time.monotonic()
        while not (there / "flags" / name).exists():
            time.sleep(0.02)
        return time.monotonic() - closed

    # On a busy machine a look and its requests may take a second themselves.
    assert any(seen_after_s(name) < 2 for name in ("done", "again", "at last"))


def test_the_libraries_themselves_go_on_from_what_both_nodes_have_saved(
    nodes: tuple[Path, Path],
) -> None:
    python = os.environ.get("TRAINING_PYTHON")
    if python is None:
        pytest.skip("TRAINING_PYTHON names no interpreter that has torch")
    (nodes[0] / "libraries").mkdir()
    assert (nodes[1] / "libraries").is_dir()
    folders = [root / "libraries" for root in nodes]
    shown = run(python, "-m", "examples.training.two_nodes", *folders, ROUNDS, cwd=REPOSITORY)
    for name in ("torch", "transformers", "lightning"):
        assert f"{name}: {ROUNDS} of {ROUNDS}\n" in shown or f"{name}: not installed\n" in shown
    assert f"torch: {ROUNDS} of {ROUNDS}\n" in shown
