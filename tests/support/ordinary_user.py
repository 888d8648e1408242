"""An interpreter that every user may run: root's own is often in a home directory."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fusefs
from fusefs.kernel import libc

MS_BIND = 4096


@contextmanager
def runnable_by_all(directory: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The command `fusefs` under such an interpreter, and the environment that it needs."""
    prefix = directory / "python"
    prefix.mkdir()
    for parent in (directory, *directory.parents):
        if os.stat(parent).st_mode & 0o001 == 0:
            os.chmod(parent, 0o755)
    libc.mount(sys.base_prefix, os.fspath(prefix), "none", MS_BIND, "")
    try:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        modules = (Path(fusefs.__file__).parents[1], sysconfig.get_path("purelib"))
        environment = {
            "PYTHONPATH": os.pathsep.join(map(os.fspath, modules)),
            "LD_LIBRARY_PATH": os.fspath(prefix / "lib"),
        }
        start = "import sys; from fusefs.cli import main; sys.exit(main())"
        yield [os.fspath(prefix / "bin" / version), "-c", start], environment
    finally:
        libc.umount(os.fspath(prefix), libc.MNT_DETACH)
