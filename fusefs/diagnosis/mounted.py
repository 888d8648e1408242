"""Checks of an existing mount, by the status that its daemon and its keeper report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fusefs.diagnosis.findings import Finding, advice, ok, problem
from fusefs.diagnosis.subject import MountSubject
from fusefs.launch.control import MALFORMED
from fusefs.settings.display import human_duration, human_size

# Uploads that have waited for longer get advice; such an upload was retried several times.
OLD_UPLOAD_S = 600.0


def check(subject: MountSubject) -> Iterator[Finding]:
    """Yield findings about everything in the status of one mount."""
    try:
        yield from _check(subject)
    except MALFORMED as error:
        yield problem(
            "daemon",
            f"its status can't be read: {type(error).__name__}: {error}",
            "have a daemon of this version serve the mount: fusefs upgrade",
        )


def cached(subject: MountSubject) -> tuple[int, int]:
    """Return the bytes and the count of a mount's cached files; 0, 0 if they are unknown."""
    try:
        cache = subject.status["cache"]
        return int(cache["used_bytes"]), int(cache["files"])
    except MALFORMED:
        return 0, 0


def _check(subject: MountSubject) -> Iterator[Finding]:
    status = subject.status
    if "not_answering" in status:
        what_to_do = (
            "the keeper replaces a silent daemon within --hang-timeout; after that see the log, "
            "and end the mount with fusefs umount --force"
        )
        if "daemon" not in status:  # perhaps a mount of another container, whose users need it
            what_to_do = "run fusefs doctor as the user and in the container that mounted it"
        text = f"{subject.mountpoint} does not answer: {status['not_answering']}"
        yield problem("daemon", text, what_to_do)
        return
    pid = status["daemon"]["pid"]
    yield ok("daemon", f"pid {pid}, up {human_duration(status['daemon']['uptime_s'])}")
    yield from _features(status)
    yield from _keeper(status.get("keeper"))
    yield from _cache(status)
    yield from _cluster_cache(status.get("cluster_cache"))
    yield from _writing(status.get("writing") or {})
    access = status.get("access") or {}
    if access.get("refused_s") is not None:
        yield problem(
            "access",
            f"S3 has refused everything for {human_duration(access['refused_s'])}",
            "see the credentials below",
        )


def _features(status: dict[str, Any]) -> Iterator[Finding]:
    """Check what FUSE's INIT decided: passthrough is on, and the mount outlives its daemon."""
    passthrough, survival = status.get("passthrough", {}), status.get("survival", {})
    session = f"session {status.get('session', '?')}"
    if passthrough.get("on"):
        yield ok("passthrough", f"{session}: {passthrough.get('why', 'on')}")
    else:
        yield advice(
            "passthrough",
            f"{session}: off ({passthrough.get('why', '?')})",
            "cached reads are several times as fast with it: mount as root on Linux 6.9 or newer",
        )
    if survival.get("on"):
        yield ok("survival", "the mount outlives its daemon")
    else:
        yield advice(
            "survival",
            f"the mount ends with its daemon ({survival.get('why', '?')})",
            "the kernel session on Linux 6.9 or newer has this (--session kernel)",
        )


def _keeper(keeper: dict[str, Any] | None) -> Iterator[Finding]:
    if keeper is None:
        return
    restarts = keeper.get("restarts", 0)
    if not restarts:
        yield ok("restarts", "the daemon has not been restarted", restarts=0)
        return
    yield advice(
        "restarts",
        f"the daemon died, and was restarted, {restarts} times (the last change: "
        f"{keeper.get('last_reason', '?')})",
        "see the end of the mount's log, and send the output of fusefs report",
        restarts=restarts,
    )


def _cache(status: dict[str, Any]) -> Iterator[Finding]:
    cache, integrity = status.get("cache", {}), status.get("integrity", {})
    if cache.get("warning"):
        yield problem(
            "cache", str(cache["warning"]), "free space on the cache disk, or replace the disk"
        )
    faults = integrity.get("differed_files", 0), integrity.get("unreadable_files", 0)
    if any(faults):
        yield problem(
            "cached bytes",
            f"{faults[0]} cached files differed from their checksums, {faults[1]} could not be "
            "read; they were fetched again",
            "the cache disk or this machine's memory fails: see dmesg and smartctl -a, replace it",
            differed_files=faults[0],
            unreadable_files=faults[1],
        )


def _cluster_cache(found: dict[str, Any] | None) -> Iterator[Finding]:
    if found is None:
        return
    place, lookups, fills = found["place"], found["lookups"], found["fills"]
    if found["state"] != "closed":
        yield problem(
            "cluster cache",
            f"{place} is not in use: {found['why'] or 'it did not answer'}; S3 is read instead",
            "see whether its servers run, and its endpoint and credentials",
        )
    else:
        yield ok("cluster cache", f"{place} answers", hits=lookups["hits"])
    if lookups["bad"]:
        yield problem(
            "cluster cache",
            f"{lookups['bad']} blocks were damaged or forged; fusefs read S3 instead",
            "its disks fail, or a stranger writes to it: see docs/guides/cluster-cache.md",
            bad_blocks=lookups["bad"],
        )
    if fills["failed"]:
        yield advice(
            "cluster cache",
            f"{place} did not take {fills['failed']} blocks",
            "see whether it is full, and whether the credentials may write",
            failed_fills=fills["failed"],
        )
    if not found["is_signed"]:
        yield advice(
            "cluster cache",
            f"anyone who may write to {place} can change the data that this mount reads",
            "give all machines the same --cluster-cache-key",
        )


def _writing(writing: dict[str, Any]) -> Iterator[Finding]:
    pending = writing.get("pending") or []
    failed = [file for file in pending if file.get("error")]
    if failed:
        yield problem(
            "uploads",
            f"{failed[0]['key']} can't be uploaded: {failed[0]['error']}",
            "correct that; nothing is lost meanwhile, and fusefs sync tries again at once",
            files=writing.get("pending_files", len(pending)),
        )
    elif pending and pending[0]["since_s"] > OLD_UPLOAD_S:
        yield advice(
            "uploads",
            f"{writing['pending_files']} files ({human_size(writing['pending_bytes'])}) wait, the "
            f"oldest for {human_duration(pending[0]['since_s'])}",
            "see the throughput below, and whether a program holds the file open",
        )
    elif writing:
        yield ok("uploads", "nothing waits for long", files=writing.get("pending_files", 0))
