"""`fusefs unpin`, `fusefs drop` and `fusefs status PATH`: requests about the local disk's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusefs.cli import polling, sync
from fusefs.launch.control import CommandError
from fusefs.launch.mount_requests import daemon_request
from fusefs.settings.display import counted, human_size, shown

# Prefixes of the keys in a job's state that `fusefs status PATH --json` leaves out.
OF_JOBS = ("has_ended", "why", "in_use", "dropped")

Job = dict[str, Any]


def unpin(paths: Sequence[Path]) -> None:
    """Remove the pins at and below these paths; raise CommandError for paths without pins."""
    wrong = []
    for path in paths:
        mountpoint, below = sync.find(path)
        message = {"command": "unpin", "path": below}
        answer = polling.finish(mountpoint, message, lambda _: "removing pins")
        if answer["why"]:
            raise CommandError(f"{path}: {answer['why']}")
        if answer["above"]:
            above = ", ".join(str(mountpoint / pin) for pin in answer["above"])
            wrong.append(f"{path} is pinned as a part of {above}, which can be unpinned")
        elif not answer["pins"]:
            wrong.append(f"{path} is not pinned")
    if wrong:
        more = f" and {len(wrong) - 3:,} more" if len(wrong) > 3 else ""
        raise CommandError("; ".join(wrong[:3]) + more)


def drop(path: Path) -> bool:
    """Remove cached copies at and below a path; print counts; False if pinned or used ones stay."""
    mountpoint, below = sync.find(path)
    job = polling.finish(mountpoint, {"command": "drop", "path": below}, _progress)
    if job["why"]:
        raise CommandError(f"{path}: {job['why']}")
    texts = [f"{_files(job, 'dropped_')} dropped"]
    is_pinned = bool(job["pinned_files"])
    if is_pinned:
        texts.append(f"{_files(job, 'pinned_')} pinned (fusefs unpin)")
    if job["in_use_files"]:
        more = job["in_use_files"] - len(job["in_use"])
        names = ", ".join(job["in_use"]) + (f" and {more:,} more" if more else "")
        texts.append(f"{_files(job, 'in_use_')} in use: {names}")
    if job["pending_files"]:
        texts.append(f"{_files(job, 'pending_')} not in the bucket yet")
    print(shown(f"{path}: {'; '.join(texts)}"))
    return not is_pinned and not job["in_use_files"]


def give_up(path: Path) -> bool:
    """Give up changes below a path that wait for upload; print counts; False if open files stay."""
    mountpoint, below = sync.find(path)
    files, in_use, remaining = 0, 0, 1
    while remaining:
        message = {"command": "give up", "path": below}
        answer = daemon_request(mountpoint, message, polling.SILENCE_S)
        files += answer["files"]
        in_use, remaining = len(answer["in_use"]), answer["remaining"]
    kept = f"; what was written is in {answer['kept']}, as edited-N" if files else ""
    busy = f"; {in_use:,} in use, which stay: {', '.join(answer['in_use'][:5])}" if in_use else ""
    print(shown(f"{path}: {counted(files, 'file')} given up{kept}{busy}"))
    return not in_use


def status(mountpoint: Path, below: str) -> Job:
    """Return counts and bytes of the files at and below a path in a mount, and of local copies."""
    job = polling.finish(mountpoint, {"command": "path status", "path": below}, _progress)
    path = mountpoint / below
    if job["why"]:
        raise CommandError(f"{path}: {job['why']}")
    facts = {name: fact for name, fact in job.items() if not name.startswith(OF_JOBS)}
    return facts | {"path": str(path)}


def as_text(job: Job) -> str:
    local = f"{_files(job, 'local_')} whole"
    if job["partial_files"]:
        local += f"; {_files(job, 'partial_')} of them in parts"
    rows = [("files", _files(job, "")), ("local", local), ("pinned", _pinned(job))]
    if job["downloading_files"]:
        rows.append(("arriving", f"{_files(job, 'downloading_')} to come"))
    if job["pending_files"]:
        rows.append(("pending", f"{_files(job, 'pending_')}, not in the bucket yet"))
    return "\n".join([shown(job["path"]), *(f"  {label:<10}{text}" for label, text in rows)])


def _pinned(job: Job) -> str:
    if job["is_pinned"]:
        return f"yes; {_files(job, 'pinned_')} here"
    if job["pins"]:
        return f"{counted(job['pins'], 'path')} below; {_files(job, 'pinned_')} here"
    return "no"


def _files(job: Job, kind: str) -> str:
    return f"{counted(job[f'{kind}files'], 'file')}, {human_size(job[f'{kind}bytes'])}"


def _progress(job: Job) -> str:
    return f"{job['files']:,} files listed"
