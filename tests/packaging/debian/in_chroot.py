"""`make test-deb`: the package is built, and lives through its whole life in a fresh Debian.

Needs root, debootstrap, a package mirror and a quarter of an hour, so the suite leaves it out.
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs import __version__
from tests.support.packaging import debian_root
from tests.support.packaging.debian_root import DebianRoot
from tests.support.packaging.image import PROJECT
from tests.support.servers.buckets import Bucket

TREES = "/usr/lib/fusefs"
# Reads all files again and again, writes one, and counts its rounds.
PROGRAM = """
import itertools, os, pathlib, sys
mount, counter = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
expected = {f"file{number}": bytes([number]) * 300_000 for number in range(8)}
for done in itertools.count(1):
    for name, content in expected.items():
        assert (mount / name).read_bytes() == content, name
    assert set(os.listdir(mount)) >= set(expected)
    own = mount / f"own-{counter.name}"
    own.write_text(str(done))
    assert own.read_text() == str(done)
    counter.write_text(str(done))
"""
# The daemon of root's mount; there is no pgrep in so small a system.
KILL = """
for process in /proc/[0-9]*; do
    if grep -qs "fusefs daemon" $process/cmdline && [ "$(stat -c %U $process)" = fusefs ]; then
        kill -9 "${process#/proc/}"
    fi
done
"""
AS_USER = "setpriv --reuid 4000 --regid 4000 --init-groups env HOME=/home/someone"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two revisions, the second of which is the newer one."""
    # Before minutes have passed.
    assert shutil.which("debootstrap"), "debootstrap is missing: make test-deb installs it"
    made = []
    for revision in ("1", "2"):
        directory = tmp_path_factory.mktemp(f"revision{revision}")
        build = PROJECT / "packaging/deb/build.py"
        command = [sys.executable, build, "--revision", revision, "--output", directory]
        subprocess.run(command, check=True)
        made.append(next(directory.glob("*.deb")))
    return made


@pytest.fixture
def root(tmp_path: Path, packages: list[Path]) -> Iterator[DebianRoot]:
    directory = tmp_path / "root"
    debian_root.make(directory, "bookworm")
    with DebianRoot(directory) as inside:
        for number, package in enumerate(packages, 1):
            (directory / f"tmp/{number}.deb").write_bytes(package.read_bytes())
        yield inside


class Load:
    """A program that uses a mount; `is_well` says that it goes on and has seen no error."""

    def __init__(self, root: DebianRoot, mountpoint: str, uid: int) -> None:
        self._root = root
        self._name = f"rounds-{uid}"
        (root.directory / "tmp/program.py").write_text(PROGRAM)
        user = f"setpriv --reuid {uid} --regid {uid} --clear-groups" if uid else ""
        program = f"{user} python3 /tmp/program.py {mountpoint} /tmp/{self._name}"
        root.run(f"{program} >/tmp/{self._name}.log 2>&1 & echo $! >/tmp/{self._name}.pid")

    def goes_on(self) -> None:
        """Wait until it has used the mount again."""
        before = self._rounds()
        deadline = time.monotonic() + 60
        while self._rounds() < before + 2:
            log = (self._root.directory / f"tmp/{self._name}.log").read_text()
            assert log == ""
            assert time.monotonic() < deadline, "the program stands still"
            time.sleep(0.1)

    def end(self) -> None:
        self._root.run(f"kill $(cat /tmp/{self._name}.pid)")

    def _rounds(self) -> int:
        try:
            return int((self._root.directory / f"tmp/{self._name}").read_text() or 0)
        except FileNotFoundError:
            return 0


def trees_of_daemons(root: DebianRoot) -> list[str]:
    """The version's tree that each daemon runs from."""
    shown = root.run("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '; true")
    return re.findall(rf"fusefs daemon \S+ \S+ {TREES}/([^/]+)/bin/python3", shown)


def test_the_package_lives_through_its_whole_life(root: DebianRoot, bucket: Bucket) -> None:
    for number in range(8):
        bucket.put(f"file{number}", bytes([number]) * 300_000)
    dependencies = root.run("dpkg-deb --field /tmp/1.deb Depends").strip()
    root.run("apt-get update -qq")
    root.run(f"apt-get satisfy -qq --no-install-recommends '{dependencies}'")
    before = root.paths()
    root.run("dpkg --install /tmp/1.deb")
    loads = [_mount_from_fstab(root, bucket), _mount_as_user(root, bucket)]

    for revision in ("2", "1", "2"):  # an upgrade, back, and again
        shown = root.run(f"dpkg --install /tmp/{revision}.deb")
        assert shown.count("took over") == 2, shown
        assert "not empty" not in shown  # a tree that dpkg could not remove
        assert trees_of_daemons(root) == [f"{__version__}-{revision}"] * 2
        assert root.run(f"ls {TREES}").split() == [f"{__version__}-{revision}"]
        for load in loads:
            load.goes_on()

    root.run(KILL)
    for load in loads:
        load.goes_on()  # the keeper, of the first version, has started a daemon of the second

    shown = root.run("dpkg --remove fusefs", fails=True)
    assert "/data\n" in shown
    assert "/home/someone/mnt\n" in shown
    assert "ok installed" in root.run("dpkg --status fusefs")
    for load in loads:
        load.goes_on()
        load.end()
    root.run("umount /data")
    root.run(f"{AS_USER} fusefs umount /home/someone/mnt")
    root.run("dpkg --remove fusefs")
    root.run("rm /etc/fusefs/keys && dpkg --purge fusefs && userdel --remove someone")
    root.run("sed -i /fusefs/d /etc/fstab && rmdir /data")
    # The system user stays, as files may belong to it.
    assert root.paths() - before == set()
    assert "fusefs" not in root.run("ls /run")


def _mount_from_fstab(root: DebianRoot, bucket: Bucket) -> Load:
    keys = bucket.server.environment
    root.run(
        "mkdir /data && umask 077 && cat > /etc/fusefs/keys <<'EOF'\n[default]\n"
        + "".join(
            f"{name.lower()} = {keys[name]}\n"
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        )
        + "EOF"
    )
    options = (
        f"endpoint_url={bucket.server.endpoint_url},credentials=/etc/fusefs/keys,cache_size=1GiB"
    )
    root.run(f"echo 's3://{bucket.name}/ /data fusefs noauto,_netdev,{options} 0 0' >> /etc/fstab")
    root.run("mount /data")
    load = Load(root, "/data", 0)
    load.goes_on()
    return load


def _mount_as_user(root: DebianRoot, bucket: Bucket) -> Load:
    keys = " ".join(f"{name}={value}" for name, value in bucket.server.environment.items())
    root.run("useradd --create-home --uid 4000 someone")
    root.run(f"{AS_USER} mkdir /home/someone/mnt")
    root.run(
        f"{AS_USER} {keys} fusefs mount s3://{bucket.name}/ /home/someone/mnt"
        f" --endpoint-url {bucket.server.endpoint_url} --cache-size 1GiB"
    )
    load = Load(root, "/home/someone/mnt", 4000)
    load.goes_on()
    return load
