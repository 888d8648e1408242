"""Forks the daemons of a node's mounts from the supervisor, which has imported their modules.

Imports take most of the time of a daemon's start, and a third of its memory: a node that starts
many volumes has these costs only once.

No mount's process gets data of another mount. The supervisor reads neither settings nor keys nor
the environments that it passes on, so there is no secret in the memory that forked processes share.
Before a daemon reads anything, it changes its user, gives up all rights for good, closes foreign
descriptors and forbids inspection. The daemons of one supervisor have the same addresses of
libraries in memory and the same hash seed.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import resource
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fusefs.keeper import protocol, supervisor_protocol
from fusefs.linux.libc import forbid_inspection
from fusefs.linux.processes import Credentials, become_in_place, close_all_but, yield_memory

# The function that runs a daemon in its process and returns the exit status.
Serve = Callable[[], int]

# A daemon's name in the kernel's list of processes.
NAME = "fusefs.daemon"
# Of a user, whose fork bomb would hurt others: about 150 for each of 110 mounts of an identity.
MOST_THREADS = 16_384


def prepare() -> Serve:
    """Import the daemons' modules and return the function that runs a daemon. Blocks."""
    from fusefs.daemon.entry import main

    for name in ("botocore.client", "botocore.httpsession", "botocore.session"):
        importlib.import_module(name)
    gc.freeze()  # the collector would write to shared memory
    return main


def fork(
    serve: Serve,
    credentials: Credentials,
    channel: int,
    supervisor: int,
    stdin: int,
    stdout: int,
    environment: int,
) -> int:
    """Fork a daemon with these descriptors; return the daemon's pid.

    `channel` and `supervisor` are sockets to the keeper and to this process; `environment` is a
    file with the keeper's variables for the daemon, as a JSON object. Raises OSError if no process
    can be forked.
    """
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        close_all_but(channel, supervisor, environment)
        yield_memory()
        Path("/proc/self/comm").write_text(NAME)
        with suppress(ValueError):  # the limit is lower already
            resource.setrlimit(resource.RLIMIT_NPROC, (MOST_THREADS, MOST_THREADS))
        become_in_place(credentials)
        forbid_inspection()  # again, because a change of the user may have allowed it
        with open(environment, "rb") as file:
            given = dict(json.load(file))
        for name in given:
            if name.startswith(supervisor_protocol.INHERITED):
                os.environ[name] = given[name]
        os.environ[protocol.ENVIRONMENT] = str(channel)
        os.environ[supervisor_protocol.ENVIRONMENT] = str(supervisor)
        sys.stdin = os.fdopen(0)
        logging.getLogger().handlers.clear()  # a daemon logs in its own way
        status = serve()
        sys.stdout.flush()
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)
