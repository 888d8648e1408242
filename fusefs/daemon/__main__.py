"""`python -m fusefs.daemon`: a mount's daemon; see main.py."""

import gc
import sys


def _start() -> int:
    gc.disable()  # as `main` does: what is imported stays, and is not to be looked through
    from fusefs.daemon.main import main

    return main()


sys.exit(_start())
