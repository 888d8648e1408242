"""The package's compiled parts: what is missing to build them is said in one line."""

import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def test_a_missing_compiler_is_one_clear_line(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--force"]
    command += ["--build-temp", str(tmp_path / "temp"), "--build-lib", str(tmp_path / "lib")]
    environment = {**os.environ, "CC": str(tmp_path / "no-gcc")}
    build = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert build.returncode != 0
    assert "Traceback" not in build.stderr
    assert build.stderr.splitlines()[-1] == (
        "setup: fusefs needs gcc and the headers of Python and of libcurl 7.87 or newer"
        " (Debian: gcc libc6-dev python3-dev libcurl4-openssl-dev)"
    )
