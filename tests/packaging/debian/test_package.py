"""The Debian package's scripts, and how they find and upgrade mounts that are in use.

What needs a fresh Debian and a quarter of an hour is in in_chroot.py: `make test-deb`.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fusefs import __version__
from fusefs.launch import registry
from tests.support.mounting import FUSEFS
from tests.support.packaging.image import PROJECT
from tests.support.servers.buckets import Bucket
from tests.support.sharing import skip_without_fuse

DEB = PROJECT / "packaging/deb"
# What Debian's policy says that the scripts are called with.
CALLS = {
    "postinst": ("configure", "abort-upgrade", "abort-remove", "abort-deconfigure"),
    "prerm": ("remove", "upgrade", "deconfigure", "failed-upgrade"),
    "postrm": ("remove", "purge", "upgrade", "failed-upgrade", "abort-install", "abort-upgrade"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_maintainer_script_knows_its_calls_and_refuses_others(name: str) -> None:
    script = (DEB / name).read_text()
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    known = re.findall(r"^    ([a-z|-]+)\)$", script, re.MULTILINE)
    assert set(CALLS[name]) <= {call for line in known for call in line.split("|")}
    done = subprocess.run(["sh", "-s", "nonsense"], input=script, text=True, capture_output=True)
    assert done.returncode == 1


def script_in(directory: Path, name: str) -> str:
    """A maintainer script that knows no path of this machine but those of programs."""
    text = (DEB / name).read_text()
    return re.sub(r"(?<=[ =\"])/(var|etc|run|proc|usr/lib)/", rf"{directory}/\1/", text)


def call(directory: Path, name: str, argument: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-s", argument],
        input=script_in(directory, name),
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("path", "stays"),
    [
        ("mounts/1/staging/2/3", True),
        ("mounts/1/renames/1", True),
        ("mounts/1/resolved", False),
        ("content/1", False),
    ],
)
def test_a_purge_removes_no_cache_with_changes_that_wait(
    tmp_path: Path, path: str, stays: bool
) -> None:
    cache = tmp_path / "var/cache/fusefs"
    (cache / "mounts/2/staging/1").mkdir(parents=True)
    (cache / "mounts/2/renames").mkdir()
    (cache / path).parent.mkdir(parents=True, exist_ok=True)
    (cache / path).write_text("content")
    done = call(tmp_path, "postrm", "purge")
    assert done.returncode == 0, done.stderr
    assert cache.exists() == (cache / path).exists() == stays
    assert ("wait for their upload" in done.stderr) == stays


@pytest.mark.root
def test_a_purge_empties_a_disk_of_the_caches_own_which_stays_mounted(tmp_path: Path) -> None:
    skip_without_fuse()  # nor may anything else be mounted then
    cache = tmp_path / "var/cache/fusefs"
    cache.mkdir(parents=True)
    script = script_in(tmp_path, "postrm")
    within = f"""set -e
mount -t tmpfs tmpfs {cache}
mkdir {cache}/content
(
{script}
)
mountpoint -q {cache}
ls -A {cache}
"""
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-s", "purge"], input=within, text=True, capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


MOUNTINFO = "36 35 0:50 / /data rw,nosuid - fuse.fusefs s3://bucket/ rw,user_id=0\n"


@pytest.mark.parametrize(
    ("mountinfo", "refuses"),
    [(MOUNTINFO, True), (MOUNTINFO.replace(".fusefs", ".sshfs"), False), (None, False)],
)
def test_where_python_fails_the_kernels_table_says_what_is_mounted(
    tmp_path: Path, mountinfo: str | None, refuses: bool
) -> None:
    if mountinfo is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/mountinfo").write_text(mountinfo)
    done = call(tmp_path, "prerm", "remove")
    assert done.returncode == refuses
    assert ("\n/data\n" in done.stderr) == refuses


def test_the_changelog_is_of_this_version() -> None:
    assert (DEB / "changelog").read_text().startswith(f"fusefs ({__version__}-")


def test_package_and_image_have_the_same_versions_of_what_both_use() -> None:
    def pins(path: Path) -> dict[str, str]:
        return dict(re.findall(r"^([\w-]+)==(\S+)", path.read_text(), re.MULTILINE))

    package, image = pins(DEB / "requirements.txt"), pins(PROJECT / "image/requirements.txt")
    assert "trio" in package
    assert {name: package[name] for name in package.keys() & image.keys()} == {
        name: image[name] for name in package.keys() & image.keys()
    }
    # All but the driver's.
    assert image.keys() - package.keys() == {"grpcio", "protobuf"}


def make_tree(directory: Path) -> Path:
    """An environment like a version's tree in the package, with this one's packages."""
    (directory / "bin").mkdir(parents=True)
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", directory)
    (directory / "lib").symlink_to(Path(sys.prefix) / "lib")
    python = directory / "bin/python3"
    python.symlink_to(Path(sys.executable).resolve())
    program = directory / "bin/fusefs"
    program.write_text(f"#!{python}\n" + FUSEFS.read_text().partition("\n")[2])
    program.chmod(0o755)
    return directory


def run(tree: Path, *arguments: object, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [tree / "bin/python3", "-P", *map(str, arguments)],
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **(environment or {})},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return done.stdout


WAITING = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    """An old one, and one whose `fusefs` shows what it was called with, and its environment."""
    old, new = make_tree(tmp_path / "1"), make_tree(tmp_path / "2")
    (new / "bin/fusefs").write_text('#!/bin/sh\necho "$@"\nenv\n')
    return old, new


def make_pipe(record: Path) -> None:
    record.unlink()
    os.mkfifo(record)


@pytest.mark.root
@pytest.mark.parametrize(
    ("program", "ids", "change", "is_found"),
    [
        (None, None, None, True),
        ("/bin/cat", None, None, False),  # what is called so is another program
        (None, lambda: os.setresuid(54321, 0, 0), None, False),  # started with another's rights
        (None, None, lambda record: os.chown(record.parents[1], 54321, 54321), False),
        (None, None, make_pipe, False),
        (None, None, lambda record: record.write_text('{"mountpoint": 1}'), False),
    ],
)
def test_a_process_that_only_seems_to_be_a_daemon_is_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trees: tuple[Path, Path],
    program: str | None,
    ids: Callable[[], None] | None,
    change: Callable[[Path], None] | None,
    is_found: bool,
) -> None:
    old, new = trees
    name = old / "bin/python3"
    own = {registry.RUNTIME_VARIABLE: str(tmp_path / "run"), "HOME": "/home/someone"}
    monkeypatch.setenv(registry.RUNTIME_VARIABLE, own[registry.RUNTIME_VARIABLE])
    with subprocess.Popen(
        [name] if program else [name, "-c", WAITING],
        executable=program,
        env=own | {"LD_BIND_NOW": "1", "PYTHONHASHSEED": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=ids,
    ) as process:
        if program is None:
            process.stdout.readline()
        registration = registry.register(Path("/mnt/data"), "s3://bucket/", process.pid)
        if change is not None:
            change(registration.directory / "mount.json")
        try:
            live = DEB / "live_mounts.py"
            assert run(new, live, "list") == ("/mnt/data\n" if is_found else "")
            shown = run(new, live, "upgrade")
        finally:
            process.stdin.close()
    if is_found:
        assert "fusefs: upgrade /mnt/data\n" in shown
        assert {f"{variable}={value}" for variable, value in own.items()} <= {*shown.splitlines()}
    else:
        assert shown == ""
    assert "PYTHON" not in shown
    assert "LD_" not in shown


@pytest.mark.root
def test_mounts_in_use_are_found_and_get_daemons_of_the_new_version(
    bucket: Bucket, tmp_path: Path
) -> None:
    skip_without_fuse()
    # A `#!` line has room for 127 bytes in old kernels.
    old, new = make_tree(tmp_path / "1"), make_tree(tmp_path / "2")
    live = DEB / "live_mounts.py"
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    # Keys are the mount's own: the package's scripts have no such environment. Nor has a mount
    # the variable by which they find it, but from its own command.
    own = bucket.server.environment
    place = ("--endpoint-url", bucket.server.endpoint_url, "--cache-dir", tmp_path / "cache")
    source = f"s3://{bucket.name}/"
    bucket.put("file", b"content")
    mount = ("mount", source, mountpoint, *place, "--log-file", tmp_path / "log")
    run(old, old / "bin/fusefs", *mount, environment=own)
    try:
        assert run(new, live, "list") == f"{mountpoint}\n"
        assert "took over" in run(new, live, "upgrade")
        assert (mountpoint / "file").read_bytes() == b"content"
        assert run(new, live, "upgrade") == ""  # all have their new daemons
    finally:
        run(new, new / "bin/fusefs", "umount", "--force", mountpoint, environment=own)
    assert run(new, live, "list") == ""
