"""What ordinary users may pass, read and run: root's own things are often closed to them."""

import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fusefs
from fusefs.linux import libc

NOBODY = 65534
MS_BIND = 4096
MS_REMOUNT = 32


def make_public_directory() -> Path:
    """Outside of pytest's own directory, which each run of pytest closes to other users."""
    directory = Path(tempfile.mkdtemp(prefix="fusefs-tests-"))
    directory.chmod(0o755)
    return directory


@contextmanager
def public_directory() -> Iterator[Path]:
    """A directory that every user may pass, gone at the end with what is in it."""
    directory = make_public_directory()
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@contextmanager
def public_python() -> Iterator[str]:
    """The path of an interpreter that every user may run.

    Bind-mounted read-only, so that no cleaning up can harm it.
    """
    prefix = make_public_directory()
    libc.mount(sys.base_prefix, str(prefix), "none", MS_BIND, "")
    try:
        libc.mount("none", str(prefix), "none", MS_BIND | MS_REMOUNT | libc.MS_RDONLY, "")
        yield f"{prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    finally:
        libc.umount(str(prefix), libc.MNT_DETACH)
        prefix.rmdir()


@contextmanager
def runnable_by_all() -> Iterator[tuple[list[str], dict[str, str]]]:
    """The command `fusefs` under such an interpreter, and the environment that it needs."""
    with public_python() as python:
        modules = (Path(fusefs.__file__).parents[1], sysconfig.get_path("purelib"))
        environment = {
            "PYTHONPATH": os.pathsep.join(map(os.fspath, modules)),
            "LD_LIBRARY_PATH": os.fspath(Path(python).parents[1] / "lib"),
        }
        yield (
            [python, "-c", "import sys; from fusefs.cli.main import main; sys.exit(main())"],
            environment,
        )
