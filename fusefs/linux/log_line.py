"""The form of log lines, which the keeper, daemons and the CSI driver share.

    2026-11-28T15:15:19.298+0000 WARNING fusefs.store: PUT failed: …

With FUSEFS_LOG_FORMAT=json the line is a JSON object. If standard error is the journal, the line
begins with its priority in angle brackets (sd-daemon(3)), which journald removes: `journalctl -p
err` finds errors. The keeper imports this module, so it is small.
"""

from __future__ import annotations

import os
import time

FORMAT_VARIABLE = "FUSEFS_LOG_FORMAT"
# By syslog(3)'s numbers.
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}


def line(level: str, name: str, message: str, at: float | None = None, trace: str = "") -> str:
    """Format a line without newline, dated `at` (epoch seconds) or now; `trace` is appended."""
    seconds = time.time() if at is None else at
    local = time.localtime(seconds)
    date, zone = time.strftime("%Y-%m-%dT%H:%M:%S", local), time.strftime("%z", local)
    stamp = f"{date}.{int(seconds * 1000) % 1000:03}{zone}"
    prefix = f"<{_PRIORITIES.get(level, 6)}>" if _is_journal() else ""
    if os.environ.get(FORMAT_VARIABLE) == "json":
        import json  # rarely needed

        fields = {"time": stamp, "level": level.lower(), "logger": name, "message": message}
        return prefix + json.dumps(fields | ({"trace": trace} if trace else {}))
    return f"{prefix}{stamp} {level} {name}: {message}" + (f"\n{trace}" if trace else "")


def _is_journal() -> bool:
    """True if standard error is the journal's socket, by JOURNAL_STREAM (systemd.exec(5))."""
    stream = os.environ.get("JOURNAL_STREAM")
    if not stream:
        return False
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return stream == f"{status.st_dev}:{status.st_ino}"
