"""Where this user's mounts are on record; see registry.py.

Little is imported: the command needs it before it starts the keeper.
"""

from __future__ import annotations

import os

RUNTIME_VARIABLE = "FUSEFS_RUNTIME_DIRECTORY"


def runtime_path() -> str:
    """The runtime directory; it need not exist.

    A daemon runs as another user than the one who mounts, and gets the directory
    from the environment.
    """
    given = os.environ.get(RUNTIME_VARIABLE)
    if given:
        return given
    uid = os.geteuid()
    if uid == 0:
        return "/run/fusefs"
    base = os.environ.get("XDG_RUNTIME_DIR")
    return os.path.join(base, "fusefs") if base else f"/tmp/fusefs-{uid}"


def runtime_environment() -> dict[str, str]:
    """What a keeper's environment, and so its daemons', has to have."""
    return {RUNTIME_VARIABLE: runtime_path()}
