"""The other tests of compiled parts that have threads, under AddressSanitizer and UBSan.

Leaks are seen too: what the compiled part and its libraries allocated must be freed at the end.
(CPython does not free all of what it allocated itself. So the stack of an allocation is cut before
the interpreter's frames, and the module's name is without "cpython".)
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from fusefs.fuse import _replies
from fusefs.store.engine import _engine
from tests.support.servers import scripted

ROOT = Path(scripted.__file__).parents[3]
FLAGS = ["-std=gnu11", "-O1", "-g", "-fno-omit-frame-pointer", "-fPIC", "-shared"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# Has the tests import the module at this path in place of the installed one.
PLUGIN = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location({name!r}, {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.modules[spec.name] = module
"""


def library(name: str) -> str | None:
    """The path of a library of gcc's, None if it is not installed."""
    gcc = shutil.which("gcc")
    if gcc is None:
        return None
    found = subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True)
    path = found.stdout.strip()
    return path if os.path.isabs(path) else None


TESTS = [f"tests/store/engine/test_{name}.py" for name in ("engine", "hostile", "tls", "many")]
TESTS += ["tests/unit/fuse/test_replies.py"]


def test_no_sanitizer_finds_anything(tmp_path: Path) -> None:
    asan = library("libasan.so")
    if asan is None:
        pytest.skip("needs gcc's libasan")
    plugin = ""
    for module in (_engine, _replies):
        built = tmp_path / f"{module.__name__.rpartition('.')[2]}.so"
        source = ROOT / f"{module.__name__.replace('.', '/')}.c"
        include = f"-I{sysconfig.get_path('include')}"
        command = ["gcc", *FLAGS, *SANITIZERS, include, "-o", built, source, "-lcurl", "-lz"]
        subprocess.run(command, check=True)
        plugin += PLUGIN.format(name=module.__name__, path=str(built))
    (tmp_path / "sanitized.py").write_text(plugin)
    (tmp_path / "suppressions").write_text("leak:python\nleak:_ssl\nleak:ld-linux\n")
    environment = {
        **os.environ,
        "LD_PRELOAD": asan,
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=1:exitcode=42:quarantine_size_mb=64:malloc_context_size=2",
        "LSAN_OPTIONS": f"suppressions={tmp_path}/suppressions:print_suppressions=0",
    }
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "sanitized",
            "--durations=5",
            "-k",
            "not version",
            f"--basetemp={tmp_path}/tests",
            *TESTS,
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    print(run.stdout[-600:])
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-8000:]
