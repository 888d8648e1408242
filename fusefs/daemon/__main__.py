"""The program `python -m fusefs.daemon`: a mount's daemon; see entry.py."""

import ctypes.util
import gc
import sys

if __name__ == "__main__":
    gc.disable()  # imported objects stay, and need not be scanned (see entry.py)
    # trio, when imported, looks for libpthread to name its threads, by a process (`ldconfig -p`)
    # that takes a twentieth of the time of all imports.
    find = ctypes.util.find_library
    ctypes.util.find_library = lambda name: "libpthread.so.0" if name == "pthread" else find(name)
    from fusefs.linux.process_title import set_title

    if len(sys.argv) == 3:  # before `forbid_inspection`, after which the kernel refuses it
        set_title("daemon", *sys.argv[1:])
    from fusefs.daemon.entry import main

    sys.exit(main())
