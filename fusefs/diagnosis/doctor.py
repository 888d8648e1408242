"""The checks of `fusefs doctor`: of the machine, and of a mount and its bucket.

Without a mount or a bucket, the machine and the answers of all mounts of this user are checked. No
check can hang: no file of a mount is accessed, and requests to daemons and to S3 have time-outs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import trio

from fusefs.daemon.setup import s3_settings
from fusefs.diagnosis import bucket, cache_disk, credentials, machine, mounted, network
from fusefs.diagnosis import subject as subjects
from fusefs.diagnosis.findings import Finding, Level, skipped
from fusefs.settings.mount import MountSettings
from fusefs.store.customer_key import CustomerKeyError


def check(
    settings: MountSettings,
    mountpoint: Path | None = None,
    *,
    has_bucket: bool = False,
    tries_permissions: bool = False,
) -> Iterator[Finding]:
    """Check machine and cache disk; and the mount at `mountpoint`, or the bucket, or all mounts.

    For a mount, `settings` are used only if the mount's own settings are not known. Raises
    CommandError if `mountpoint` is not a mount of fusefs.
    """
    subject = subjects.find(mountpoint) if mountpoint is not None else None
    if subject is not None:
        settings = subject.settings or replace(settings, source=subjects.source_of(subject))
    yield from machine.check(allow_other=settings.allow_other)
    if subject is None:
        yield from cache_disk.check(settings)
        if has_bucket:
            yield from _check_bucket(settings, tries_permissions=tries_permissions)
            return
        for each in subjects.find_all():
            for finding in mounted.check(each):
                yield replace(finding, text=f"{each.mountpoint}: {finding.text}")
        return
    yield from mounted.check(subject)
    size, files = mounted.cached(subject)
    yield from cache_disk.check(settings, cached_bytes=size, cached_files=files)
    if subject.settings is None:
        yield skipped(
            "settings",
            "this mount has no keeper that tells them; its endpoint, certificates and credentials"
            f" are this shell's (give --endpoint-url and others with {settings.source} instead)",
        )
    with subjects.as_daemon(subject):
        yield from _check_bucket(settings, tries_permissions=tries_permissions)


def _check_bucket(settings: MountSettings, *, tries_permissions: bool) -> Iterator[Finding]:
    try:
        s3 = s3_settings(settings)
    except CustomerKeyError as error:
        yield Finding("customer key", Level.PROBLEM, str(error), "name a file with a whole key")
        return
    is_reachable = True
    for found in network.check(s3):
        yield found
        is_reachable = is_reachable and not (
            found.level is Level.PROBLEM and found.check in (network.CONNECTION, network.TLS)
        )
    finding, access = credentials.check(s3)
    yield finding
    if access is None:
        return
    if not is_reachable:
        yield skipped("list", "S3 can't be reached")
        return
    may_write = not settings.read_only and not settings.no_delete

    async def check() -> list[Finding]:
        return await bucket.check(
            s3, settings.source.prefix, tries_permissions=tries_permissions, may_write=may_write
        )

    try:
        yield from trio.run(check)
    except BaseExceptionGroup as group:  # from trio's nurseries
        if group.subgroup(KeyboardInterrupt) is None:
            raise
        raise KeyboardInterrupt from None
