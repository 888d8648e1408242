"""The data that is read: the same files in a directory of the local disk and in the bucket.

`large/object.bin` is one big object, `shards/` has four of a quarter of its size, `small/` is a
training set of small files in folders of a hundred, `tree/` has many tiny files in a hundred
folders and `flat/` as many in one. Contents are random, so that no layer can compress or
deduplicate them. The local directory is made first and uploaded to the bucket; it is also the
contender with which all others are compared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import obstore

MIB = 1024 * 1024

LARGE = "large/object.bin"
# Together as large as the large object.
SHARDS = [f"shards/{number}.bin" for number in range(4)]
SMALL_SIZE = 100 * 1024
SMALL_FOLDER_FILES = 100
UPLOADS = 16
TREE_FOLDERS = 100


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes in bytes and the counts of files; the defaults are the full run's."""

    large: int = 1024 * MIB
    small: int = 2_000
    listed: int = 10_000
    checkpoint: int = 256 * MIB
    written: int = 1_000
    few: int = 200
    renamed: int = 2_000
    copied: int = 3_000
    removed: int = 5_000

    def quick(self) -> Sizes:
        """Return a quarter of each: enough to see that everything works and roughly how fast."""
        return Sizes(*(count // 4 for count in astuple(self)))


@dataclass(frozen=True, slots=True)
class DataSet:
    """The files below `root`; `names_file` lists those of `small/` for the readers."""

    root: Path
    names_file: Path
    sizes: Sizes

    def small_names(self) -> list[str]:
        return [
            f"d{number // SMALL_FOLDER_FILES:03}/f{number % SMALL_FOLDER_FILES:03}.bin"
            for number in range(self.sizes.small)
        ]

    def listed_names(self) -> list[str]:
        per_folder = self.sizes.listed // TREE_FOLDERS
        tree = [
            f"tree/d{folder:03}/f{number:03}.txt"
            for folder in range(TREE_FOLDERS)
            for number in range(per_folder)
        ]
        return tree + [f"flat/f{number:05}.txt" for number in range(self.sizes.listed)]

    def create(self) -> None:
        """Write all files, and sync them to the disk."""
        write_random(self.root / LARGE, self.sizes.large)
        for shard in SHARDS:
            write_random(self.root / shard, self.sizes.large // len(SHARDS))
        for name in self.small_names():
            write_random(self.root / "small" / name, SMALL_SIZE)
        for number, name in enumerate(self.listed_names()):
            # Sizes differ, so that a wrong listing is noticed.
            write_random(self.root / name, 16 + number % 64)
        self.names_file.write_text(json.dumps(self.small_names()))
        os.sync()

    def upload(self, store: Any) -> None:
        """Upload every file to the bucket under its own name."""
        small = [f"small/{name}" for name in self.small_names()]
        upload(store, self.root, [LARGE, *SHARDS, *small, *self.listed_names()])


def write_random(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for start in range(0, size, MIB):
            file.write(os.urandom(min(MIB, size - start)))


def upload(store: Any, root: Path, names: Sequence[str]) -> None:
    """Upload files below `root` to the bucket, each under its own name."""

    def put(name: str) -> None:
        obstore.put(store, name, root / name, chunk_size=16 * MIB)

    with ThreadPoolExecutor(UPLOADS) as pool:
        list(pool.map(put, names))
