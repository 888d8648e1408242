"""The Debian package's scripts, and how they find and upgrade mounts that are in use.

What needs a fresh Debian and minutes is in in_chroot.py: `make test-deb`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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


def test_the_changelog_is_of_this_version() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert (DEB / "changelog").read_text().startswith(f"fusefs ({project['version']}-")


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


@pytest.mark.root
@pytest.mark.fuse
def test_mounts_in_use_are_found_and_get_daemons_of_the_new_version(
    bucket: Bucket, tmp_path: Path
) -> None:
    skip_without_fuse()
    # A `#!` line has room for 127 bytes in old kernels.
    old, new = make_tree(tmp_path / "1"), make_tree(tmp_path / "2")
    live = DEB / "live_mounts.py"
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    (tmp_path / "run").mkdir()
    # Keys and paths are the mount's own: the package's scripts have no such environment.
    own = {**bucket.server.environment, "FUSEFS_RUNTIME_DIRECTORY": str(tmp_path / "run")}
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
