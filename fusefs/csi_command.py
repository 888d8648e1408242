"""Entry point of `fusefs-csi`: puts the CSI driver's package on the path.

The folder csi/ is beside fusefs/ in the source tree. The wheel has it below fusefs/_driver/, so
that nothing is installed under so common a name as `csi`: only this command's process sees it.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Run the driver's command line, and return its exit status."""
    sys.path.insert(0, str(Path(__file__).parent / "_driver"))
    from csi import main as command

    return command.main()
