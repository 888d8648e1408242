"""What the bucket of the survival tests holds, computed by whoever writes and whoever checks it.

Imports nothing of ours: the checking programs start by the dozen.
"""

import random

LARGE_FILES = 3
LARGE_SIZE = 24 << 20
HELD = LARGE_FILES  # one more large file, that somebody always has open
SMALL_FILES = 200
FOLDER = 100
TREE_FILES = 500

_PATTERN = random.Random("survival").randbytes(1 << 20)


def large(number: int, at: int, size: int) -> bytes:
    """A mebibyte of noise again and again, each time with its own number in front."""
    parts = []
    while size:
        block, start = divmod(at, len(_PATTERN))
        stop = min(len(_PATTERN), start + size)
        head = f"{number:08}{block:08}".encode()
        whole = head[start : min(16, stop)] if start < 16 else b""
        parts.append(whole + _PATTERN[max(16, start) : stop] if stop > 16 else whole)
        at += stop - start
        size -= stop - start
    return b"".join(parts)


def small(number: int) -> bytes:
    return f"{number:08}".encode() + _PATTERN[number : number + 20_000]


def large_name(number: int) -> str:
    return f"large/{number:04}.bin"


def small_name(number: int) -> str:
    return f"small/{number % 10}/{number:06}"


def tree_name(number: int) -> str:
    return f"tree/{number // FOLDER:04}/{number:06}.txt"


def tree_size(number: int) -> int:
    return number % 5
