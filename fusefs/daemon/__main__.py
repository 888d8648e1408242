"""`python -m fusefs.daemon`: a mount's daemon; see entry.py."""

import ctypes.util
import gc
import sys

_find_library = ctypes.util.find_library


def _known_library(name: str) -> str | None:
    return "libpthread.so.0" if name == "pthread" else _find_library(name)


if __name__ == "__main__":
    gc.disable()  # as `main` does: what is imported stays, and is not to be looked through
    # To name its threads trio looks for this library as it is imported, with a process
    # (`ldconfig -p`) that takes as long as a twentieth of all imports.
    ctypes.util.find_library = _known_library
    from fusefs.linux.process_title import set_title

    if len(sys.argv) == 3:  # before the kernel forbids it, with all looks at this process
        set_title("daemon", *sys.argv[1:])
    from fusefs.daemon.entry import main

    sys.exit(main())
