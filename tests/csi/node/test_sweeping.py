"""Caches of identities that no volume has any more: which go, and which stay."""

import fcntl
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from csi.identities import cache_gc
from csi.identities.cache_domains import CacheDomain, CacheDomains
from csi.identities.cache_gc import KEEP_IF_SCARCE_S, KEEP_S, REMOVAL, CacheCollector
from csi.volume.options import NodeShares
from fusefs.settings.types import MIN_FREE
from tests.support.machine.disks import small_disk
from tests.support.machine.ordinary_user import runnable_by_all

FIRST_UID = 1_900_000_000


@pytest.fixture(scope="module")
def runnable() -> Iterator[tuple[str, dict[str, str]]]:
    if os.geteuid() != 0:
        pytest.skip("only root gives directories away")
    with runnable_by_all() as (command, environment):
        yield command[0], environment


@pytest.fixture(autouse=True)
def as_anybody(runnable: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have processes of other users find the interpreter and what it imports."""
    python, environment = runnable
    monkeypatch.setattr("csi.identities.cache_gc.REMOVAL", [python, *REMOVAL[1:]])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def used() -> dict[str, int]:
    """The users of mounts, by their domains."""
    return {}


@pytest.fixture
def domains(public_path: Path, used: dict[str, int]) -> CacheDomains:
    return CacheDomains(public_path / "cache", FIRST_UID, FIRST_UID + 9, lambda: used)


class Node:
    """The mounts of a node, and who looks after its caches."""

    def __init__(self, domains: CacheDomains) -> None:
        self.domains = domains
        self.collector = CacheCollector(domains, shares("0%"))

    def domain(self, name: str, *, unused_s: float = 2 * KEEP_S) -> CacheDomain:
        """A domain with something in its cache, unless it is read from here on."""
        domain = self.domains.claim(self.domains.name_of(name))
        self.put(domain, "format", "catalog.sqlite3", "shared/objects/ab/abcdef.1", "mounts/m/log")
        self.age(domain, unused_s)
        return domain

    def put(self, domain: CacheDomain, *paths: str) -> None:
        for path in paths:
            file = domain.directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("cached")
        for directory, folders, files in os.walk(domain.directory):
            for one in (*folders, *files):
                os.chown(os.path.join(directory, one), domain.uid, domain.uid)

    def age(self, domain: CacheDomain, unused_s: float) -> None:
        then = domain.directory.stat().st_mtime - unused_s
        os.utime(domain.directory, (then, then))


def shares(min_free: str) -> NodeShares:
    return NodeShares(0, 0, None, MIN_FREE.read(min_free))


@pytest.fixture
def node(domains: CacheDomains) -> Node:
    return Node(domains)


def test_a_cache_that_no_pod_has_used_for_long_is_removed(node: Node) -> None:
    old, recent = node.domain("old"), node.domain("recent", unused_s=KEEP_S / 2)
    node.collector.collect()
    assert not old.directory.exists()
    assert (recent.directory / "shared/objects/ab/abcdef.1").exists()
    assert node.domains.leaving() == []
    assert node.domains.claim(node.domains.name_of("next")).uid == old.uid


def test_a_cache_that_cannot_be_removed_keeps_no_other(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    odd, old = node.domain("odd"), node.domain("old", unused_s=2 * KEEP_S - 60)
    remove = cache_gc._run

    def leave_something(what: str, directory: Path, uid: int) -> str | None:
        if uid == odd.uid and what == "all":  # a daemon that hangs writes there once more
            return ""
        return remove(what, directory, uid)

    monkeypatch.setattr(cache_gc, "_run", leave_something)
    for _ in range(2):
        node.collector.collect()
    assert not old.directory.exists()
    assert "not empty" in caplog.text
    monkeypatch.setattr(cache_gc, "_run", remove)
    node.collector.collect()
    assert node.domains.leaving() == []


def test_a_cache_that_a_mount_uses_stays_however_old_it_is(
    node: Node, used: dict[str, int]
) -> None:
    domain = node.domain("used")
    used[domain.name] = domain.uid
    node.collector.collect()
    used.clear()
    node.collector.collect()  # it counts from here on
    assert (domain.directory / "format").exists()


def test_no_cache_is_removed_while_a_mounts_is_not_known(node: Node, used: dict[str, int]) -> None:
    domain = node.domain("old")
    used["?key"] = domain.uid
    with pytest.raises(ValueError, match="not known"):
        node.collector.collect()
    assert domain.directory.exists()


def test_a_cache_that_is_claimed_again_stays(node: Node) -> None:
    old = node.domain("old")
    assert node.domains.claim(old.name) == old
    node.collector.collect()
    assert (old.directory / "format").exists()


@pytest.mark.parametrize("name", ["42", "removals", "attributes", "edited-42"])
def test_what_was_never_uploaded_stays_and_is_reported_once(
    node: Node, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    old = node.domain("old")
    staged = f"mounts/m/staging/17000000/{name}"
    node.put(old, staged, "mounts/m/staging/17000000/source")
    node.age(old, 2 * KEEP_S)
    with caplog.at_level(logging.WARNING, "csi"):
        node.collector.collect()
        node.age(old, 2 * KEEP_S)
        node.collector.collect()
    assert (old.directory / staged).read_text() == "cached"
    assert not (old.directory / "shared").exists()
    (record,) = caplog.records
    assert "1 files that were never uploaded" in record.getMessage()
    assert node.domains.claim(old.name).uid == old.uid


def test_no_mount_waits_for_a_cache_that_is_being_removed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed: list[str] = []
    remove = node.collector._finish

    def claim_and_remove(directory: Path) -> None:
        with open(node.domains.directory / "lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where a mount would wait
        claimed.append(node.domains.claim(node.domains.name_of("next")).name)
        remove(directory)

    monkeypatch.setattr(node.collector, "_finish", claim_and_remove)
    left = node.domain("left")
    node.put(left, "mounts/m/staging/17000000/42", "mounts/m/staging/17000000/source")
    node.age(left, 2 * KEEP_S)
    node.domain("old")
    node.collector.collect()
    assert len(claimed) == 2
    assert sorted(os.listdir(left.directory)) == ["format", "mounts"]
    assert node.domains.leaving() == []


def test_a_directory_that_a_daemon_still_looks_after_stays(node: Node) -> None:
    old = node.domain("old")
    node.put(old, "mounts/m/staging/17000000/source")
    node.age(old, 2 * KEEP_S)
    fd = os.open(old.directory / "mounts/m/staging/17000000", os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        node.collector.collect()
        assert (old.directory / "shared/objects/ab/abcdef.1").exists()
    finally:
        os.close(fd)
    node.collector.collect()
    assert not old.directory.exists()


def test_when_something_is_scarce_the_longest_unused_goes_first(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    ages = {"a": 3.0, "b": 2.0, "c": 0.5}
    made = {name: node.domain(name, unused_s=age * KEEP_IF_SCARCE_S) for name, age in ages.items()}
    node.collector.collect()
    assert all(domain.directory.exists() for domain in made.values())
    node.domains.lacks_uids = True
    node.collector.collect()
    assert [name for name, domain in made.items() if domain.directory.exists()] == ["b", "c"]
    monkeypatch.setattr(node.collector, "_is_scarce", lambda: True)
    node.collector.collect()
    assert [name for name, domain in made.items() if domain.directory.exists()] == ["c"]


def test_a_full_disk_is_scarce(public_path: Path) -> None:
    with small_disk(public_path / "disk", 4) as disk:
        os.chmod(disk, 0o711)
        node = Node(CacheDomains(disk / "cache", FIRST_UID, FIRST_UID + 9))
        node.collector = CacheCollector(node.domains, shares("50%"))
        old = node.domain("old", unused_s=2 * KEEP_IF_SCARCE_S)
        node.collector.collect()
        assert old.directory.exists()
        (disk / "other").write_bytes(bytes(3 << 20))
        node.collector.collect()
        assert not old.directory.exists()


def test_links_are_not_followed_and_nothing_of_others_goes(node: Node, public_path: Path) -> None:
    old = node.domain("old")
    outside = public_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    os.chown(outside, old.uid, old.uid)
    os.chown(outside / "file", old.uid, old.uid)
    for name in ("link", "mounts/link", "mounts/m/staging", "shared/objects/link"):
        (old.directory / name).symlink_to(outside)
    links = (("link", "."), ("mounts", "link"), ("mounts", "m", "staging"))
    assert not any(node.domains.has_files(old.name, *below) for below in links)
    node.age(old, 2 * KEEP_S)
    node.collector.collect()
    assert not old.directory.exists()
    assert (outside / "file").read_text() == "kept"


@pytest.fixture
def mounted_below() -> Iterator[Callable[[Path], Path]]:
    made: list[Path] = []

    def mount(path: Path) -> Path:
        path.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], check=False).returncode:
            pytest.skip("this container may not mount a tmpfs")
        made.append(path)
        (path / "file").write_text("kept")
        os.chmod(path, 0o777)
        return path

    yield mount
    for path in made:
        subprocess.run(["umount", "-l", path], check=True)


def test_nothing_goes_where_something_is_mounted(
    node: Node, mounted_below: Callable[[Path], Path]
) -> None:
    old = node.domain("old")
    mount = mounted_below(old.directory / "shared/objects/mount")
    node.age(old, 2 * KEEP_S)
    node.collector.collect()
    assert (mount / "file").read_text() == "kept"
    assert (old.directory / "format").exists()


def test_what_was_put_aside_by_a_process_that_was_killed_goes_later(node: Node) -> None:
    old = node.domain("old")
    with node.domains.alone():
        aside = node.domains.set_aside(old)
    # Until it is gone, no other identity has its uid.
    assert node.domains.claim(node.domains.name_of("next")).uid != old.uid
    # Another was killed before it gave a directory to the domain's user.
    unfinished = aside.with_name(f"{old.name}.1.leaving")
    unfinished.mkdir()
    node.collector.collect()
    assert not aside.exists()
    assert not unfinished.exists()
