"""What a template (keeper/template.py) of this program imports, and how it is told from another."""

from __future__ import annotations

import contextlib
import gc
import os
import site
import sys
from collections.abc import Iterable

from fusefs.keeper import template
from fusefs.store.s3 import clients


def serve() -> None:
    """Be a template; return in a process that is to be a daemon. Blocks."""
    program = _program()
    installed = _look_at(program)
    # What fails here fails again when it is needed, and is told then.
    with contextlib.suppress(Exception):
        clients.prepare()
    gc.freeze()  # so that less of the memory is written to, which is shared
    template.serve(lambda: _look_at(program) != installed)


def _program() -> list[str]:
    """The files of this program, and the directories of the packages that it uses."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "fusefs"]
    files = [str(module.__file__) for module in modules if getattr(module, "__file__", None)]
    return [sys.executable, *site.getsitepackages(), *files]


def _look_at(paths: Iterable[str]) -> list[tuple[int, int, int] | None]:
    """What tells each of the files from another of its name; None where there is none."""
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            found.append(None)
        else:
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return found
