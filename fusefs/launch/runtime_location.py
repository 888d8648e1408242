"""Where this user's mounts are on record; see registry.py.

Little is imported: the command needs it before it starts the keeper.
"""

from __future__ import annotations

import os

RUNTIME_VARIABLE = "FUSEFS_RUNTIME_DIRECTORY"
# Where it is for users without a session of their own, and for all that have one.
TEMPORARY = "/tmp"
SESSIONS = "/run/user"


def runtime_path() -> str:
    """The runtime directory for new mounts; it need not exist.

    A daemon runs as another user than the one who mounts, and gets the directory
    from the environment.
    """
    return runtime_paths()[0]


def runtime_paths() -> list[str]:
    """The runtime directories in which this user's mounts may be, that of new mounts first.

    Jobs of cron and of batch systems have no XDG_RUNTIME_DIR, or that of the machine from which
    they were sent, where the user's shell on this machine has one.
    """
    given = os.environ.get(RUNTIME_VARIABLE)
    if given:
        return [given]
    uid = os.geteuid()
    if uid == 0:
        return ["/run/fusefs"]
    base = os.environ.get("XDG_RUNTIME_DIR")
    own = [f"{base}/fusefs"] if base and os.path.isdir(base) else []
    return list(dict.fromkeys([*own, f"{TEMPORARY}/fusefs-{uid}", f"{SESSIONS}/{uid}/fusefs"]))


def runtime_environment() -> dict[str, str]:
    """What a keeper's environment, and so its daemons', has to have."""
    return {RUNTIME_VARIABLE: runtime_path()}
