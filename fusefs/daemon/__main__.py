"""`python -m fusefs.daemon`: as keepers of earlier versions start a daemon."""

import sys

from fusefs.daemon.main import main

sys.exit(main())
