"""One program that uses a mount and checks every answer, while daemons come and go.

    python survivor.py ROLE DIRECTORY SEED

DIRECTORY is the mount; its contents are those of `survival_data.py`. It says
when it begins, works until its standard input ends, for one round at least, and
prints how many rounds it made. A call that fails or a wrong answer ends it with
a traceback.
"""

import mmap
import os
import random
import select
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import survival_data as data

# Between two looks; several of these programs would else take all processors from the daemon.
PAUSE_S = 0.01


def is_to_end() -> bool:
    return bool(select.select([0], [], [], PAUSE_S)[0])


def stream(root: Path, dice: random.Random) -> int:
    """Read a large file from its beginning to its end."""
    number = dice.randrange(data.LARGE_FILES)
    at = 0
    with open(root / data.large_name(number), "rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            assert chunk == data.large(number, at, len(chunk)), (number, at)
            at += len(chunk)
            if is_to_end():
                return 1
    assert at == data.LARGE_SIZE, at
    return 1


def small(root: Path, dice: random.Random) -> int:
    for number in dice.sample(range(data.SMALL_FILES), 50):
        content = (root / data.small_name(number)).read_bytes()
        assert content == data.small(number), number
    return 50


def walk(root: Path, _dice: random.Random) -> int:
    found = {}
    for directory, _, names in os.walk(root / "tree", onerror=_raise):
        for name in names:
            path = os.path.join(directory, name)
            assert path not in found, path
            found[path] = os.lstat(path).st_size
        if is_to_end():
            return 1
    expected = {
        str(root / data.tree_name(number)): data.tree_size(number)
        for number in range(data.TREE_FILES)
    }
    assert found == expected, sorted(found.items() ^ expected.items())[:5]
    return 1


def _raise(error: OSError) -> None:
    raise error


def hold(root: Path, dice: random.Random, read: Callable[[int, int], bytes], number: int) -> int:
    """Check what is read at random from something that stays open."""
    rounds = 0
    while not rounds or not is_to_end():
        at = dice.randrange(data.LARGE_SIZE - 65536)
        assert read(at, 65536) == data.large(number, at, 65536), at
        rounds += 1
    return rounds


def main() -> None:
    role, root, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    dice = random.Random(seed)
    print("at work", flush=True)
    held = root / data.large_name(data.HELD)
    if role in ("served", "passthrough", "mapped"):
        with open(held if role != "served" else root / data.large_name(0), "rb") as file:
            if role == "mapped":
                view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                rounds = hold(root, dice, lambda at, size: view[at : at + size], data.HELD)
            else:
                number = data.HELD if role == "passthrough" else 0
                fd = file.fileno()
                rounds = hold(root, dice, lambda at, size: os.pread(fd, size, at), number)
    else:
        rounds = 0
        act = {"stream": stream, "small": small, "walk": walk}[role]
        while not rounds or not is_to_end():
            rounds += act(root, dice)
    print(rounds)


if __name__ == "__main__":
    main()
