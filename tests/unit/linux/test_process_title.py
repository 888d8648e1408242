"""What /proc shows of a process that says so."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import sys
from fusefs.linux.process_title import show_as
show_as(["/usr/bin/program", "-x", "\\udcff"], {"NAME": "a value", "EMPTY": ""})
for name in sys.argv[1:]:
    with open(f"/proc/self/{name}", "rb") as file:
        sys.stdout.buffer.write(file.read() + b"\\n")
"""


def test_a_process_shows_another_command_line_environment_and_name() -> None:
    shown = ["cmdline", "environ", "comm"]
    command = [sys.executable, "-c", SCRIPT, *shown]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    arguments, environment, name = done.stdout.split(b"\n")[:3]
    assert arguments == b"/usr/bin/program\0-x\0\xff\0"
    assert environment == b"NAME=a value\0EMPTY=\0"
    assert name == b"program"


def test_a_process_without_privilege_does_so_too() -> None:
    drop = "import os; os.geteuid() or os.setresuid(65534, 65534, 65534)\n"
    done = subprocess.run(
        [sys.executable, "-c", "import fusefs.linux.process_title\n" + drop + SCRIPT, "cmdline"],
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.startswith(b"/usr/bin/program\0")
