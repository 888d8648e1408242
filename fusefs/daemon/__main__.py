"""`python -m fusefs.daemon`: a mount's daemon; see main.py."""

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # as `main` does: what is imported stays, and is not to be looked through
    from fusefs.linux.process_title import set_title

    if len(sys.argv) == 3:  # before the kernel forbids it, with all looks at this process
        set_title("daemon", *sys.argv[1:])
    from fusefs.daemon.main import main

    sys.exit(main())
