"""The code that dataclasses and attrs generate, kept compiled between starts.

Both write the source of a handful of functions for each class and compile it when the class is
made: 390 texts, and a sixth of the processor time of a daemon's imports, since Python keeps the
bytecode of modules alone. So their calls of `exec` and `compile` are answered from a file beside
the package's bytecode while a daemon imports. A text is found by its hash, so what is found is
what would be compiled, whatever versions are installed; where there is no file, or none that this
interpreter has written, each text is compiled as ever.

The file is written as Python writes bytecode: where that may be, by whoever imports and may write
there. That is the daemon which `fusefs mount` starts early, which still has the command's user.
Where the bytecode is not compared with the sources (PEP 552), as in the image and the Debian
package, the installation is not Python's to change, and nothing is written: there the file comes
with it, made by `python -m fusefs.daemon.generated_code`.
"""

from __future__ import annotations
import __future__

import builtins
import contextlib
import marshal
import os
import sys
from _blake2 import blake2b  # hashlib takes 3 ms more, before there is anything to be gained
from _frozen_importlib_external import MAGIC_NUMBER
from collections.abc import Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any

_FUTURES = 0
for _name in __future__.all_feature_names:
    _FUTURES |= getattr(__future__, _name).compiler_flag
# The bytes of a sum: what `marshal` makes of damaged data may end the interpreter.
_SUM = 16
_TIMESTAMPS = bytes(4)  # the flags of bytecode that is compared with the time of its source


class GeneratedCode:
    """The compiled texts in the file `path`, and those that were not there."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._known = _read(path)
        self._new: dict[bytes, bytes] = {}

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Have dataclasses and attrs compile through this meanwhile."""
        import dataclasses

        # Names of a module come before those that are built in.
        answered: list[tuple[ModuleType, str, Any]] = [(dataclasses, "exec", self._exec)]
        with contextlib.suppress(ImportError):  # a module of attrs that any version may rename
            import attr._make

            answered.append((attr._make, "compile", self._compile))
        for module, name, function in answered:
            vars(module)[name] = function
        try:
            yield
        finally:
            for module, name, _ in answered:
                del vars(module)[name]

    def save(self) -> None:
        """Write the file if there is anything new and it is Python's to write."""
        if not self._new or sys.dont_write_bytecode or not _is_pythons(os.path.dirname(self._path)):
            return
        with contextlib.suppress(OSError):
            self.write()

    def write(self) -> None:
        """Write the file.

        Raises:
            OSError: it can't be written; the one before is left.
        """
        temporary = f"{self._path}.{os.getpid()}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            with open(fd, "wb") as file:
                plain = marshal.dumps(dict(sorted((self._known | self._new).items())))
                file.write(MAGIC_NUMBER + _sum(plain) + plain)
            os.replace(temporary, self._path)
        except OSError:
            os.unlink(temporary)
            raise

    def _exec(self, source: Any, names: dict[str, Any], results: Mapping[str, object]) -> None:
        if isinstance(source, str):
            source = self._code(source, "<string>", sys._getframe(1))
        exec(source, names, results)

    def _compile(self, source: Any, filename: str, mode: str, *rest: Any, **named: Any) -> Any:
        is_plain = isinstance(source, str) and mode == "exec" and not rest and not named
        # The __hash__ of attrs has a number that is another one in each process.
        if is_plain and "def __hash__" not in source:
            return self._code(source, filename, sys._getframe(1))
        return builtins.compile(source, filename, mode, *rest, **named)

    def _code(self, source: str, filename: str, caller: Any) -> CodeType:
        # What is compiled has the `from __future__` of the module that calls.
        flags = caller.f_code.co_flags & _FUTURES
        text = f"{flags}\0{sys.flags.optimize}\0{filename}\0{source}".encode()
        key = _sum(text)
        found = self._known.get(key)
        if found is not None:
            code: CodeType = marshal.loads(found)
            return code
        compiled: CodeType = builtins.compile(source, filename, "exec", flags, dont_inherit=True)
        self._new[key] = marshal.dumps(compiled)
        return compiled


def beside_bytecode() -> GeneratedCode:
    """The file of this package and this interpreter."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    name = f"generated-code.{sys.implementation.cache_tag}"
    return GeneratedCode(os.path.join(package, "__pycache__", name))


def _read(path: str) -> dict[bytes, bytes]:
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return {}
    if not data.startswith(MAGIC_NUMBER):
        return {}
    plain = data[len(MAGIC_NUMBER) + _SUM :]
    if data[len(MAGIC_NUMBER) : -len(plain)] != _sum(plain):
        return {}
    known: dict[bytes, bytes] = marshal.loads(plain)
    return known


def _sum(data: bytes) -> bytes:
    return blake2b(data, digest_size=_SUM).digest()


def _is_pythons(directory: str) -> bool:
    """True if the bytecode there is such as Python writes by itself."""
    own = os.path.join(directory, f"__init__.{sys.implementation.cache_tag}.pyc")
    try:
        with open(own, "rb") as file:
            return file.read(8)[4:] == _TIMESTAMPS
    except OSError:
        return False


def _make() -> None:
    code = beside_bytecode()
    with code.used():
        import fusefs.daemon.main  # noqa: F401
    code.write()


if __name__ == "__main__":
    _make()
