"""Checks of the machine: the kernel's features, /dev/fuse, privileges.

The checks need no mount, no bucket and no network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from fusefs.diagnosis.findings import Finding, advice, ok, problem
from fusefs.launch import preflight
from fusefs.linux.mount import may_mount

# The first Linux versions with each feature: FUSE_PASSTHROUGH and FUSE_HAS_RESEND
# (include/uapi/linux/fuse.h, protocol 7.40), FUSE_NOTIFY_PRUNE (7.45).
PASSTHROUGH = (6, 9)
RESEND = (6, 9)
PRUNE = (6, 18)


def check(*, allow_other: bool) -> Iterator[Finding]:
    """Make all checks of the machine."""
    yield kernel(os.uname().release)
    yield _device()
    yield _privileges(allow_other=allow_other)
    for warning in preflight.warnings():
        yield advice("time-outs", warning, "set it to 0 or to more than 600 with sysctl -w")


def kernel(release: str) -> Finding:
    """Return a finding about the features of a kernel of this release (`uname -r`)."""
    version = _version(release)
    lacking = [
        name
        for name, first in (
            ("passthrough (cached files at the disk's speed)", PASSTHROUGH),
            ("resend (mounts that outlive their daemon)", RESEND),
            ("pruning of names that nothing uses", PRUNE),
        )
        if version < first
    ]
    figures = {
        "release": release,
        "passthrough": version >= PASSTHROUGH,
        "resend": version >= RESEND,
        "prune": version >= PRUNE,
    }
    if not lacking:
        return ok("kernel", f"Linux {release} has passthrough, resend and pruning", **figures)
    needed = PASSTHROUGH if version < PASSTHROUGH else PRUNE
    return advice(
        "kernel",
        f"Linux {release} lacks {', '.join(lacking)}",
        f"fusefs works without; boot Linux {needed[0]}.{needed[1]} or newer",
        **figures,
    )


def _version(release: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _device() -> Finding:
    try:
        preflight.check_device()
    except preflight.LaunchError as error:
        text, _, what_to_do = str(error).partition("; ")
        return problem("/dev/fuse", text, what_to_do)
    return ok("/dev/fuse", "can be opened")


def _privileges(*, allow_other: bool) -> Finding:
    try:
        preflight.check_privileges(None, allow_other=allow_other)
    except preflight.LaunchError as error:
        text, _, what_to_do = str(error).partition("; ")
        return problem("privileges", text, what_to_do or "give what is missing")
    if may_mount():
        return ok("privileges", "may mount, and register files for passthrough", mounts=True)
    return advice(
        "privileges",
        "mounts through fusermount3, without passthrough",
        "mount as root for passthrough; the daemon then runs as an ordinary user",
        mounts=False,
    )
