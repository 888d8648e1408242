"""Many processes that each make small requests: opens, reads of 4 KiB, walks.

Started as `python -m bench.programs.crowds SPEC`, with SPEC as for the readers. They are processes,
as a loader's workers are, and not threads, which would wait for each other.
"""

from __future__ import annotations

import json
import mmap
import os
import random
from pathlib import Path

from bench.programs.readers import PAGE, Result, main
from bench.programs.readers import walk as walk_alone
from bench.programs.together import ShortReadError, run_together


def opens(root: str, names_file: str, processes: int, each: int, warm_up: bool = True) -> Result:
    """Open and close small files, each process `each` times in its own order."""
    names = [f"{root}/{name}" for name in json.loads(Path(names_file).read_text())]

    def work(number: int) -> None:
        mine = random.Random(number).sample(names, len(names))
        for index in range(each):
            os.close(os.open(mine[index % len(mine)], os.O_RDONLY))

    if warm_up:
        for name in names:
            os.close(os.open(name, os.O_RDONLY))
    return {"seconds": [run_together(processes, work)], "opens": processes * each}


def pages(path: str, size: int, processes: int, each: int) -> Result:
    """Read 4 KiB with O_DIRECT at random offsets, each process `each` times."""

    def work(number: int) -> None:
        places = random.Random(number)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        buffers = [mmap.mmap(-1, PAGE)]
        for _ in range(each):
            if os.preadv(descriptor, buffers, PAGE * places.randrange(size // PAGE)) != PAGE:
                raise ShortReadError(path)
        os.close(descriptor)

    return {"seconds": [run_together(processes, work)], "reads": processes * each}


def walks(root: str, files: int, processes: int, warm_up: bool = True) -> Result:
    """Walk a tree with lstat, in all processes at the same time."""
    if warm_up:
        walk_alone(root, files)

    def work(_number: int) -> None:
        walk_alone(root, files)

    return {"seconds": [run_together(processes, work)], "files": processes * files}


if __name__ == "__main__":
    main(opens, pages, walks)
