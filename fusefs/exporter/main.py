"""The command `fusefs metrics`: serves the metrics of this user's mounts, or writes a file.

The file, for node_exporter's textfile collector, is replaced atomically. All users may
read it, because node_exporter runs as another user.
"""

from __future__ import annotations

import argparse
import re
import signal
import threading

from fusefs.exporter.queries import mounts_of_user
from fusefs.launch.control import CommandError
from fusefs.linux import files

MISSING = (
    "the Python package prometheus_client is missing: install the wheel with its extra,"
    " pip install './fusefs_s3-….whl[metrics]'"
)
TEXTFILE_MODE = 0o644


def run(listen: tuple[str, int] | None, textfile: str | None) -> int:
    """Write `textfile`, or else serve on `listen` until a signal; return the exit status.

    Raises:
        CommandError: prometheus_client is missing, or the address can't be used.
        OSError: the file can't be written.
    """
    try:
        from prometheus_client import generate_latest

        from fusefs.exporter.collector import MountCollector, registry_of, serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "prometheus_client":
            raise
        raise CommandError(MISSING) from None
    registry = registry_of(MountCollector(mounts_of_user))
    if textfile is not None:
        files.replace(textfile, generate_latest(registry), mode=TEXTFILE_MODE)
        return 0
    assert listen is not None
    host, port = listen
    try:
        end = serve(host, port, registry)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise CommandError(
            f"can't listen on {host}:{port}: {why}; choose another --listen"
        ) from None
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    # Python runs signal handlers only in this thread, which therefore must wake up regularly.
    while not ending.wait(1.0):
        pass
    end()
    return 0


def address_of(text: str) -> tuple[str, int]:
    """Parse `ADDRESS:PORT`, `[ADDRESS]:PORT` or `:PORT` (all addresses) into host and port.

    Raises:
        argparse.ArgumentTypeError: the text has another form.
    """
    host, separator, port = text.rpartition(":")
    is_port = re.fullmatch(r"[0-9]{1,5}", port) is not None and int(port) <= 65535
    if not separator or not is_port or "/" in host:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 127.0.0.1:9811 or :9811")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise argparse.ArgumentTypeError(f"an IPv6 address goes into brackets, as in [::1]:{port}")
    return host, int(port)
