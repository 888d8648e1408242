"""One program that saves checkpoints on a mount, while daemons come and go.

    python checkpointer.py DIRECTORY SEED

Each checkpoint is a directory of a few files, written under a temporary name
and renamed; the oldest is deleted when there are five. It works until its
standard input ends and then prints, as JSON, {path: SHA-256} of every file
that it left. A call that fails ends it with a traceback.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import shutil
import sys
from pathlib import Path

KEPT = 5


def save(root: Path, name: str, dice: random.Random) -> dict[str, str]:
    """Write one checkpoint; return what was closed."""
    unfinished = root / f"{name}.tmp"
    unfinished.mkdir()
    written = {}
    for rank in range(3):
        content = dice.randbytes(dice.choice([100, 50_000, 700_000]))
        temporary = unfinished / f"rank{rank}.part"
        with temporary.open("wb", buffering=0) as file:
            for at in range(0, len(content), 200_000):
                file.write(content[at : at + 200_000])
            if rank == 1:
                os.fsync(file.fileno())
        temporary.rename(unfinished / f"rank{rank}")
        written[f"{name}/rank{rank}"] = hashlib.sha256(content).hexdigest()
    unfinished.rename(root / name)
    with (root / "log").open("a") as log:
        log.write(f"{name}\n")
    return written


def main() -> None:
    root, dice = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    root.mkdir()
    kept: list[tuple[str, dict[str, str]]] = []
    lines = []
    while not select.select([0], [], [], 0)[0]:
        name = f"step-{len(lines):05}"
        kept.append((name, save(root, name, dice)))
        lines.append(f"{name}\n")
        if len(kept) > KEPT:
            shutil.rmtree(root / kept.pop(0)[0])
        for _, files in kept:
            for path, digest in files.items():
                assert hashlib.sha256((root / path).read_bytes()).hexdigest() == digest, path
        assert (root / "log").read_text() == "".join(lines)
    files = {path: digest for _, some in kept for path, digest in some.items()}
    files["log"] = hashlib.sha256("".join(lines).encode()).hexdigest()
    print(json.dumps(files))


if __name__ == "__main__":
    main()
