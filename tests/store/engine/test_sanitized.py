"""The engine's other tests with the compiled part under AddressSanitizer and UBSan.

The threads' leaks are seen too: what their stacks allocated must be freed at the end. (CPython
does not free all of what it allocated, so leaks are looked for in stacks without it.)
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from fusefs.store.engine import _engine
from tests.support.servers import scripted

ROOT = Path(scripted.__file__).parents[3]
SOURCE = ROOT / "fusefs/store/engine/_engine.c"
FLAGS = ["-std=gnu11", "-O1", "-g", "-fno-omit-frame-pointer", "-fPIC", "-shared"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# Has the tests import the module at this path in place of the installed one.
PLUGIN = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("fusefs.store.engine._engine", {path!r})
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


def test_no_sanitizer_finds_anything(tmp_path: Path) -> None:
    asan = library("libasan.so")
    if asan is None:
        pytest.skip("needs gcc's libasan")
    built = tmp_path / Path(_engine.__file__).name
    include = f"-I{sysconfig.get_path('include')}"
    command = ["gcc", *FLAGS, *SANITIZERS, include, "-o", built, SOURCE, "-lcurl"]
    subprocess.run(command, check=True)
    (tmp_path / "sanitized.py").write_text(PLUGIN.format(path=str(built)))
    (tmp_path / "suppressions").write_text("leak:python\nleak:_ssl\nleak:ld-linux\n")
    environment = {
        **os.environ,
        "LD_PRELOAD": asan,
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=1:exitcode=42:quarantine_size_mb=64",
        "LSAN_OPTIONS": f"suppressions={tmp_path}/suppressions:print_suppressions=0",
    }
    tests = Path(__file__).parent
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
        ]
        + [str(tests / f"test_{name}.py") for name in ("engine", "hostile", "tls", "many")]
        + [f"--basetemp={tmp_path}/tests"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    print(run.stdout[-600:])
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-8000:]
