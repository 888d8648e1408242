"""A training job of the standard library alone: `train.py make-data|train DIRECTORY`.

`make-data` writes CSV files below DIRECTORY/data, unless they are there. `train` fits a logistic
regression to them and writes a checkpoint after each epoch to DIRECTORY/checkpoints; started
again, it goes on after the newest. Nothing here knows that the directory is a bucket.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from pathlib import Path

FILES, ROWS, EPOCHS, RATE = 8, 500, 5, 0.1


def make_data(directory: Path) -> None:
    """Points of a plane, of class 1 above the line y = 2x - 0.5."""
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(FILES):
        path = directory / f"part-{number:03}.csv"
        if not path.exists():
            source = random.Random(number)
            points = [(source.uniform(-1, 1), source.uniform(-1, 1)) for _ in range(ROWS)]
            path.write_text("".join(f"{x},{y},{int(y > 2 * x - 0.5)}\n" for x, y in points))


def read(directory: Path) -> list[list[float]]:
    return [
        [float(field) for field in line.split(",")]
        for path in sorted(directory.glob("*.csv"))
        for line in path.read_text().splitlines()
    ]


def save(weights: list[float], path: Path) -> None:
    """Write under another name, then rename: a checkpoint is whole or not there."""
    temporary = path.with_name(f".{path.name}")
    with open(temporary, "w") as file:
        json.dump(weights, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def train(data: Path, checkpoints: Path) -> None:
    checkpoints.mkdir(parents=True, exist_ok=True)
    found = sorted(checkpoints.glob("epoch-*.json"))
    weights = json.loads(found[-1].read_text()) if found else [0.0, 0.0, 0.0]
    if found:
        print(f"going on after {found[-1].name}", flush=True)
    for epoch in range(len(found), EPOCHS):
        loss, rows = 0.0, read(data)
        random.Random(epoch).shuffle(rows)
        for x, y, label in rows:
            p = 1 / (1 + math.exp(-(weights[0] * x + weights[1] * y + weights[2])))
            loss -= math.log(p if label else 1 - p)
            for number, value in enumerate((x, y, 1.0)):
                weights[number] += RATE * (label - p) * value
        save(weights, checkpoints / f"epoch-{epoch:03}.json")
        print(f"epoch {epoch} rows {len(rows)} loss {loss / len(rows):.4f}", flush=True)


if __name__ == "__main__":
    command, root = sys.argv[1], Path(sys.argv[2])
    if command == "make-data":
        make_data(root / "data")
    else:
        train(root / "data", root / "checkpoints")
