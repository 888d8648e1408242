"""A process is killed in the very step in which a renamed directory's files get their new names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from fusefs.posix.namespace.rename_job import RenameJob, RenameJobs
from tests.support.survival.fate import Fate, fate_of_records
from tests.support.survival.mortal_mount import DiedError, MortalMount, Process
from tests.unit.posix.renaming.test_renaming_meanwhile import (
    chmod,
    finished,
    killed,
    overwrite,
)

MOST_POINTS = 40


@pytest.fixture
def fate(monkeypatch: pytest.MonkeyPatch) -> Fate:
    """From the begin of that step on."""
    fate = fate_of_records(monkeypatch)
    fate.at = None
    note = RenameJobs._note

    def note_or_die(self: RenameJobs, renaming: RenameJob, *, is_switching: bool = False) -> None:
        fate.step()
        note(self, renaming, is_switching=is_switching)
        if is_switching:
            fate.left = fate.at

    monkeypatch.setattr(RenameJobs, "_note", note_or_die)
    return fate


async def die(mount: MortalMount, point: int, fate: Fate) -> tuple[tuple[int, int], bool]:
    """Returns handles of a/x and of a new file, and whether the rename took place before."""
    is_done = False
    try:
        async with mount.serving() as process:
            await process.listing("a")
            handle = await process.open("a/x", os.O_RDWR)
            await process.load("a/s/w")
            new = await process.create("a/new", b"new")
            fate.at = point
            await process.rename("a", "b")
            is_done = True
            raise DiedError
    except* DiedError:
        pass
    fate.left = fate.at = None
    return (handle, new), is_done


async def change_all(process: Process, handle: int, new: int) -> None:
    await process.write(handle, 0, b"2")
    await process.close(handle)
    await process.close(new)
    await overwrite(process, "b/y", b"3")
    await chmod(process, "b/z", 0o600)
    await process.unlink("b/s/w")


async def test_what_is_changed_after_a_kill_has_its_new_name_alone(
    tmp_path: Path, fate: Fate
) -> None:
    for point in range(MOST_POINTS):
        mount = MortalMount(tmp_path / str(point), cache=tmp_path / "cache")
        for key in ("a/", "a/s/w", "a/x", "a/y", "a/z"):
            mount.store.put(key, key[-1].encode() if key[-1] != "/" else b"")
        handles, is_done = await die(mount, point, fate)
        async with mount.serving() as process:
            with trio.fail_after(10):
                await change_all(process, *handles)
            await finished(process)
            assert sorted(await process.listing("b")) == ["new", "s", "x", "y", "z"]
        expected = {"b/new": b"new", "b/x": b"2", "b/y": b"3", "b/z": b"z"}
        assert mount.store.contents() == expected, point
        assert (mount.store.objects["b/z"].info.metadata or {})["mode"] == str(0o100600)
        if is_done:
            return
    pytest.fail("it was never done")


async def test_what_is_made_under_the_old_name_since_stays_there(
    tmp_path: Path, fate: Fate
) -> None:
    """The process that has finished that step is killed as well."""
    mount = MortalMount(tmp_path)
    for name in "xyz":
        mount.store.put(f"a/{name}", name.encode())
    mount.store.put("a/s/w", b"w")
    await die(mount, 0, fate)
    async with killed(mount) as (process, _):
        await process.node("b/x")
    mount.store.put("a/other", b"of another node")
    async with mount.serving() as process:
        await finished(process)
        assert await process.listing("a") == ["other"]
    contents = mount.store.contents()
    assert contents.pop("a/other") == b"of another node"
    assert all(key.startswith("b/") for key in contents)
