"""Imports before and after their time.

A template (keeper/template.py) has all imports done, and notices changed files. A daemon does
the rare ones when its mount answers.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import site
import sys
from collections.abc import Iterable

from fusefs.keeper import template
from fusefs.store.s3 import clients

# What only some answers of S3 need; the functions that do import it.
_REST = ("email.utils", "html")


def import_rest() -> None:
    """Import what a mount's start need not wait for. Blocks.

    Later it could fail, where no descriptor is left.

    Raises:
        OSError, ImportError: as an import does.
    """
    for name in _REST:
        importlib.import_module(name)


def serve(purpose: str) -> None:
    """Serve as a template; return in a forked process that is to be a daemon. Blocks.

    A standby is of its keeper's mount, and has all rights that its daemon has.
    """
    if purpose == template.FOR_DAEMONS:
        template.keep_users_alone()
    program = _program()
    installed = _identities(program)
    # What fails here fails again when it is needed, and is reported then.
    with contextlib.suppress(Exception):
        import_rest()
        clients.prepare()
    gc.freeze()  # so that less of the shared memory is written to
    template.serve(lambda: _identities(program) != installed)


def _program() -> list[str]:
    """The files of this program, and the directories of the packages that it uses."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "fusefs"]
    files = [str(module.__file__) for module in modules if getattr(module, "__file__", None)]
    return [sys.executable, *site.getsitepackages(), *files]


def _identities(paths: Iterable[str]) -> list[tuple[int, int, int] | None]:
    """Inode, size and modification time of each file; None where there is none."""
    return [_identity(path) for path in paths]


def _identity(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
