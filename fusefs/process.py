"""What a daemon's process needs before it does anything: its input, its log, its limits."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import resource
import signal

from fusefs.settings import MountSettings


def set_up(settings: MountSettings) -> None:
    """Log to standard error, which the launcher opened; allow many descriptors."""
    _set_up_logging(settings)
    # The keeper asks a daemon that is silent where it hangs; works in a busy loop, too.
    faulthandler.register(signal.SIGUSR1)
    _raise_descriptor_limit()
    # Files are created for this user alone, whatever the shell's umask is.
    os.umask(0o077)


def read_input(text: str) -> MountSettings:
    """The settings that the launcher wrote, and the AWS configuration as files of this process."""
    told = json.loads(text)
    for variable, content in told["files"].items():
        # In memory alone: it holds secrets.
        fd = os.memfd_create(variable)
        os.write(fd, content.encode())
        os.environ[variable] = f"/proc/self/fd/{fd}"
    return MountSettings.from_json(told["settings"])


def _raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _set_up_logging(settings: MountSettings) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    logging.getLogger("fusefs").setLevel(settings.log_level.upper())
    root.setLevel(logging.WARNING)
