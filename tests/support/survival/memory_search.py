"""Looks for bytes in another process's memory, as its debugger could."""

from pathlib import Path


def is_in_memory(pid: int, wanted: bytes) -> bool:
    """True if `wanted` is anywhere in the memory that a process can write, or has written."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for start, stop in _writable(pid):
            memory.seek(start)
            try:
                content = memory.read(stop - start)
            except OSError:  # a mapping without pages behind it
                continue
            if wanted in content:
                return True
    return False


def _writable(pid: int) -> list[tuple[int, int]]:
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        place, rights, *_ = line.split()
        if rights.startswith("rw"):
            start, _, stop = place.partition("-")
            found.append((int(start, 16), int(stop, 16)))
    return found
