"""Adds 1 to the number in a file, again and again, with the locks of TensorStore's file driver.

`lock_by_rename.py FILE COUNT`: the lock is FILE.lock, which is locked with flock, written and
renamed to FILE. A program that waited for the lock has the renamed file then, and notices by its
number that it is not what FILE.lock stands for.
"""

import fcntl
import os
import sys


def locked(path: str) -> int:
    """Open and lock the file that a path stands for."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        opened = os.fstat(fd)
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            if os.path.samestat(opened, os.stat(path)):
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)


def main() -> None:
    path, count = sys.argv[1], int(sys.argv[2])
    for _ in range(count):
        fd = locked(path + ".lock")
        with open(path, encoding="ascii") as file:
            number = int(file.read())
        os.ftruncate(fd, 0)
        os.write(fd, b"%d" % (number + 1))
        os.fsync(fd)
        os.rename(path + ".lock", path)
        os.close(fd)


if __name__ == "__main__":
    main()
