"""One program that saves, edits, renames and deletes files on a mount, while daemons come and go.

    python checkpointer.py DIRECTORY SEED JOURNAL

Whatever it does is written to JOURNAL, a file that is not on the mount, one JSON
object to a line (see `journal_of`): what is about to change, before, and what
was saved, when close or fsync has returned. On the line `hold` on its standard
input it comes to rest and prints as JSON what there has to be; with `go` it
goes on, and it ends with its standard input. A call that fails, or content
that is not what was written, ends it with a traceback.
"""

import hashlib
import json
import os
import random
import select
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

KEPT = 4
SIZES = (0, 100, 5_000, 50_000, 700_000)
LARGE = 9_000_000  # more than goes into one request


class Content(NamedTuple):
    """What a file has, or is to have: `size` bytes of noise with a number, and then `tail`."""

    number: int
    size: int
    tail: str = ""

    def bytes(self) -> bytes:
        return random.Random(self.number).randbytes(self.size) + self.tail.encode()

    def digest(self) -> str:
        return hashlib.sha256(self.bytes()).hexdigest()


class Journal(NamedTuple):
    """What is saved, and of what was not finished, all that it may have been to become."""

    saved: dict[str, Content]
    changing: dict[str, list[Content]]


def journal_of(path: Path) -> Journal:
    """Read a journal, of which the last line may be cut."""
    found = Journal({}, {})
    for line in path.read_bytes().split(b"\n")[:-1]:
        record = json.loads(line)
        for name, content in record["changing"].items():
            contents = found.changing.setdefault(name, [])
            if name in found.saved:
                contents.append(found.saved.pop(name))
            contents.append(Content(*content))
        for name, content in record["saved"].items():
            found.changing.pop(name, None)
            found.saved[name] = Content(*content)
        for name in record["gone"]:
            found.changing.pop(name, None)
    return found


class Program:
    """Its files by path, as they have to be; every change of them goes by the journal."""

    def __init__(self, root: Path, dice: random.Random, journal: Path) -> None:
        self.root = root
        self.dice = dice
        self.files: dict[str, Content] = {}
        self.steps = 0
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def tell(
        self,
        changing: dict[str, Content] | None = None,
        saved: dict[str, Content] | None = None,
        gone: list[str] | None = None,
    ) -> None:
        record = {"changing": changing or {}, "saved": saved or {}, "gone": gone or []}
        os.write(self._journal, json.dumps(record).encode() + b"\n")
        self.files |= saved or {}

    def forget(self, paths: list[str]) -> None:
        self.tell(gone=paths)
        for path in paths:
            del self.files[path]

    def some(self) -> str | None:
        """One of the files, if there is any."""
        return self.dice.choice(sorted(self.files)) if self.files else None

    def content(self, *sizes: int) -> Content:
        return Content(self.dice.getrandbits(40), self.dice.choice(sizes or SIZES))

    def write(self, path: str, content: Content, *, sync: bool = False) -> None:
        """Write a file from its start."""
        self.tell(changing={path: content})
        with (self.root / path).open("wb", buffering=0) as file:
            data = content.bytes()
            for at in range(0, len(data), 200_000):
                file.write(data[at : at + 200_000])
            if sync:
                os.fsync(file.fileno())
                self.tell(saved={path: content})
        self.tell(saved={path: content})

    def rename(self, moves: dict[str, str], source: str, to: str) -> None:
        """Rename a file, or a directory of which all files are among the moves."""
        contents = {new: self.files[old] for old, new in moves.items()}
        self.tell(changing={**{old: self.files[old] for old in moves}, **contents})
        os.rename(self.root / source, self.root / to)
        self.tell(saved=contents)
        self.forget(list(moves))

    def checkpoint(self) -> None:
        """A directory under a temporary name, renamed when it is whole; the oldest goes."""
        unfinished, name = f"step-{self.steps:05}.tmp", f"step-{self.steps:05}"
        (self.root / unfinished / "sub").mkdir(parents=True)
        for rank in ("rank0", "rank1", "sub/rank2"):
            part = f"{unfinished}/{rank}.part"
            self.write(part, self.content(), sync=self.dice.random() < 0.5)
            self.rename({part: f"{unfinished}/{rank}"}, f"{part}", f"{unfinished}/{rank}")
        moves = {path: f"{name}/{path[len(unfinished) + 1 :]}" for path in self.below(unfinished)}
        self.rename(moves, unfinished, name)
        kept = sorted(path.name for path in self.root.glob("step-*"))
        for old in kept[:-KEPT]:
            paths = self.below(old)
            self.tell(changing={path: self.files[path] for path in paths})
            shutil.rmtree(self.root / old)
            self.forget(paths)

    def below(self, directory: str) -> list[str]:
        return [path for path in self.files if path.startswith(directory + "/")]

    def replace(self) -> None:
        """Save under a temporary name and replace what is there."""
        content = self.content(*SIZES, LARGE) if self.dice.random() < 0.1 else self.content()
        self.write("best.tmp", content)
        self.rename({"best.tmp": "best"}, "best.tmp", "best")

    def overwrite(self) -> None:
        path = self.some()
        if path is not None:
            self.write(path, self.content())

    def log(self) -> None:
        old = self.files.get("log", Content(0, 0))
        new = old._replace(tail=f"{old.tail}step {self.steps}\n")
        self.tell(changing={"log": new})
        with (self.root / "log").open("a") as file:
            file.write(f"step {self.steps}\n")
        self.tell(saved={"log": new})

    def extend(self) -> None:
        """Add to a file through a descriptor that can read as well."""
        path = self.some()
        if path is not None and path != "log":
            old = self.files[path]
            new = old._replace(tail=f"{old.tail}{self.steps};")
            self.tell(changing={path: new})
            with (self.root / path).open("r+b", buffering=0) as file:
                data = old.bytes()
                assert file.read() == data, path
                file.seek(len(data))
                file.write(f"{self.steps};".encode())
                os.fsync(file.fileno())
                self.tell(saved={path: new})

    def lock(self) -> None:
        """An exclusive file that goes away again, and one that is deleted while it is open."""
        self.tell(changing={"lock": Content(0, 0, "mine")})
        fd = os.open(self.root / "lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.write(fd, b"mine")
        if self.dice.random() < 0.5:
            os.close(fd)
            os.unlink(self.root / "lock")
        else:
            os.unlink(self.root / "lock")
            os.write(fd, b"still mine")
            os.close(fd)
        self.tell(gone=["lock"])

    def move(self) -> None:
        """Give one file of a checkpoint a name of its own."""
        path = self.some()
        if path is not None and path.startswith("step-"):
            self.rename({path: "moved"}, path, "moved")

    def delete(self) -> None:
        path = self.some()
        if path is not None:
            self.tell(changing={path: self.files[path]})
            os.unlink(self.root / path)
            self.forget([path])

    def check(self) -> None:
        """What was written is what is read, of some files, and of no others."""
        for path in self.dice.sample(sorted(self.files), min(4, len(self.files))):
            found = hashlib.sha256((self.root / path).read_bytes()).hexdigest()
            assert found == self.files[path].digest(), path
        names = [one for one in self.files if "/" not in one]
        found_names = [one.name for one in os.scandir(self.root) if not one.is_dir()]
        differing = set(found_names) ^ set(names)
        assert sorted(found_names) == sorted(names), (differing, len(found_names), len(names))

    def step(self) -> None:
        acts: list[Callable[[], None]] = [
            self.checkpoint,
            self.replace,
            self.overwrite,
            self.log,
            self.extend,
            self.lock,
            self.move,
            self.delete,
        ]
        self.steps += 1
        self.dice.choices(acts, (4, 2, 1, 2, 2, 1, 1, 1))[0]()
        self.check()


def order() -> str:
    """The next line, of which no more is read: `select` has to see what follows."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return ""
        line += byte
    return line.decode().strip()


def main() -> None:
    program = Program(Path(sys.argv[1]), random.Random(int(sys.argv[2])), Path(sys.argv[3]))
    program.root.mkdir()
    while True:
        if select.select([0], [], [], 0)[0]:
            if order() != "hold":
                return
            files = {path: content.digest() for path, content in program.files.items()}
            print(json.dumps(files), flush=True)
            if order() != "go":
                return
        program.step()


if __name__ == "__main__":
    main()
