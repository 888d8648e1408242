"""A training job that reads and sleeps, as DLIO does, without its framework.

`python -m bench.programs.trainer SPEC`, with SPEC a JSON object: the arguments of `train`. Each
line on stdin asks for an epoch: a JSON object with the seconds of computation for a step and the
seed of the order. The answer is a line with the epoch's times and counts.

Worker processes read like those of PyTorch's DataLoader: forked once, each with a queue of batches
to read, two of them ahead, and one queue for all results, which the trainer takes in order. Data
that was read is dropped, as in DLIO. A step computes by sleeping.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader, FileIO
from multiprocessing.queues import Queue
from typing import Any

from bench.programs.together import ShortReadError

AHEAD = 2
# Size of the reads of numpy from an archive's member, and of TensorFlow from a file of records.
CHUNK = 256 * 1024


@dataclass(frozen=True, slots=True)
class Batch:
    """`count` records of each file in `paths`, from record `first` on."""

    paths: list[str]
    first: int
    count: int


class Records:
    """Reads batches; a file of many records stays open for the next batch."""

    def __init__(self, kind: str, size: int) -> None:
        self._kind = kind
        self._size = size
        self._file: BufferedReader[FileIO] | None = None

    def read(self, batch: Batch) -> int:
        """Read a batch; return the bytes of its records.

        Raises:
            ShortReadError: a record has another size than it should have.
        """
        if self._kind == "tfrecord":
            return sum(self._read_frames(path, batch) for path in batch.paths)
        load = _load_npz if self._kind == "npz" else _load_whole
        return sum(self._checked(path, load(path)) for path in batch.paths)

    def _read_frames(self, path: str, batch: Batch) -> int:
        """Read TFRecords: a length of 8 bytes, its checksum (4), the record, its checksum (4)."""
        file = self._at(path, batch.first)
        for _ in range(batch.count):
            length = int.from_bytes(file.read(12)[:8], "little")
            self._checked(path, len(file.read(length)))
            file.read(4)
        return batch.count * self._size

    def _at(self, path: str, record: int) -> BufferedReader[FileIO]:
        """Return the file, positioned at a record; it stays open from batch to batch."""
        if self._file is None or self._file.name != path or record == 0:
            if self._file is not None:
                self._file.close()
            self._file = BufferedReader(FileIO(path), CHUNK)
            self._file.seek(record * (self._size + 16))
        return self._file

    def _checked(self, path: str, size: int) -> int:
        if size != self._size:
            raise ShortReadError(f"{path}: a record of {size} of {self._size} bytes")
        return size


def _load_npz(path: str) -> int:
    """Load an archive's array as numpy does, including the check of its CRC32; return its bytes."""
    with zipfile.ZipFile(path) as archive, archive.open("x.npy") as member:
        return sum(map(len, iter(lambda: member.read(CHUNK), b"")))


def _load_whole(path: str) -> int:
    with open(path, "rb") as file:
        return len(file.read())


def train(
    root: str, names: list[str], kind: str, size: int, per_file: int, batch: int, workers: int
) -> None:
    """Train an epoch for each line of stdin."""
    context = multiprocessing.get_context("fork")
    tasks: list[Queue[tuple[int, Batch]]] = [context.Queue() for _ in range(workers)]
    results: Queue[tuple[int, int]] = context.Queue()
    for queue in tasks:
        arguments = (queue, results, kind, size)
        context.Process(target=_work, args=arguments, daemon=True).start()
    paths = [f"{root}/{name}" for name in names]
    for line in sys.stdin:
        order = json.loads(line)
        random.Random(order["seed"]).shuffle(paths)
        batches = list(_batches(paths, per_file, batch, workers))
        print(json.dumps(_epoch(batches, tasks, results, order["compute_s"])), flush=True)


def _work(
    tasks: Queue[tuple[int, Batch]], results: Queue[tuple[int, int]], kind: str, size: int
) -> None:
    records = Records(kind, size)
    while True:
        number, batch = tasks.get()
        try:
            results.put((number, records.read(batch)))
        except (OSError, ShortReadError, zipfile.BadZipFile) as error:
            print(f"worker: {error}", file=sys.stderr, flush=True)
            results.put((number, 0))


def _batches(paths: list[str], per_file: int, batch: int, workers: int) -> Iterator[Batch]:
    """Yield an epoch's batches in order; of N workers, each reads every Nth batch.

    A file of many records is read by one worker, from its beginning to its end.
    """
    if per_file == 1:
        for start in range(0, len(paths), batch):
            yield Batch(paths[start : start + batch], 0, 1)
        return
    for start in range(0, len(paths), workers):
        mine = paths[start : start + workers]
        for first in range(0, per_file, batch):
            for path in mine:
                yield Batch([path], first, min(batch, per_file - first))


def _epoch(
    batches: list[Batch],
    tasks: list[Queue[tuple[int, Batch]]],
    results: Queue[tuple[int, int]],
    compute_s: float,
) -> dict[str, Any]:
    """Run one epoch; the first step, which waits for the workers to begin, is not counted."""
    sent = read = 0
    ready: dict[int, int] = {}
    computed = begun = 0.0
    for number in range(len(batches)):
        while sent < len(batches) and sent < number + AHEAD * len(tasks):
            tasks[sent % len(tasks)].put((sent, batches[sent]))
            sent += 1
        while number not in ready:
            done, size = results.get()
            if not size:
                raise ShortReadError("a worker could not read its batch")
            ready[done] = size
        read += ready.pop(number)
        start = time.monotonic()
        time.sleep(compute_s)
        stop = time.monotonic()
        if number == 0:
            begun = stop
        else:
            computed += stop - start
    seconds = time.monotonic() - begun
    return {"computed_s": computed, "seconds": seconds, "steps": len(batches), "bytes": read}


if __name__ == "__main__":
    train(**json.loads(sys.argv[1]))
