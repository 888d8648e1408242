"""The entry point of `fusefs-csi`, which puts the CSI driver's package on Python's path.

The folder csi/ is beside fusefs/ in the source tree. The wheel has csi/ below fusefs/_driver/, so
that no package of such a common name is installed: only this command's process can import it.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Run the driver's command line, and return its exit status."""
    sys.path.insert(0, str(Path(__file__).parent / "_driver"))
    from csi import main as command

    return command.main()
