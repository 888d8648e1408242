"""Builds the Debian package: `make deb`.

    python packaging/deb/build.py [--revision N] [--output build]

All of fusefs but the CSI driver, with the Python packages that it uses at the versions of
requirements.txt, in a tree of this version: /usr/lib/fusefs/VERSION, a virtual environment of
Debian's own Python. Bytecode is part of the package, so nothing is left behind when it goes. What
compiles is compiled here, for the Python that /usr/bin/python3 is: python3-dev, libfuse3-dev,
libcurl4-openssl-dev, pkg-config and gcc must be there, and dpkg-shlibdeps (dpkg-dev).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

PACKAGING = Path(__file__).parent
PROJECT = PACKAGING.parents[1]
# The interpreter that the package depends on.
PYTHON = Path("/usr/bin/python3")
SCRIPTS = ("postinst", "prerm", "postrm")
PINNED = ("--require-hashes", "--quiet", "--disable-pip-version-check")
# Where mount(8) and umount(8) look.
HELPERS = {"mount.fusefs": "mount.fusefs", "umount.fuse.fusefs": "umount.fusefs"}


def main(arguments: list[str]) -> int:
    """Build the package and print its path."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--revision", default=revision(), help="Debian's part of the version")
    options.add_argument("--output", type=Path, default=PROJECT / "build")
    options.add_argument("--cache", type=Path, default=PROJECT / "build/deb-wheels")
    given = options.parse_args(arguments)
    full = f"{version()}-{given.revision}"
    stage = given.output / "deb"
    shutil.rmtree(stage, ignore_errors=True)
    root = stage / "root"
    install_tree(root, full, wheels(given.cache, stage))
    install_files(root, full)
    path: Path = given.output / f"fusefs_{full}_{architecture()}.deb"
    write_control(root, full)
    run("dpkg-deb", "--build", "--root-owner-group", "-Zxz", root, path)
    shutil.rmtree(stage)
    return 0


def version() -> str:
    """The version of the project."""
    namespace = runpy.run_path(str(PROJECT / "fusefs/__init__.py"))
    return str(namespace["__version__"])


def revision() -> str:
    """The package's revision of this version, as the changelog's latest entry has it."""
    first = (PACKAGING / "changelog").read_text().splitlines()[0]
    return first.partition(")")[0].rpartition("-")[2]


def architecture() -> str:
    """As dpkg names this machine's."""
    return output("dpkg", "--print-architecture").strip()


# --- the tree -----------------------------------------------------------------


def wheels(cache: Path, stage: Path) -> list[Path]:
    """The wheels of everything that runs; those of other projects are built once."""
    pinned = PACKAGING / "requirements.txt"
    digest = hashlib.sha256(pinned.read_bytes()).hexdigest()[:16]
    others, own = cache / digest, stage / "wheels"
    builder = stage / "builder"
    run(PYTHON, "-m", "venv", "--without-pip", builder)
    pip(builder, "install", *PINNED, "-r", PROJECT / "image/build.txt")
    if not others.is_dir():
        made = stage / "others"
        # pip's cache may have a wheel that was compiled for another interpreter.
        building = ("--no-build-isolation", "--no-cache-dir", "--wheel-dir", made, "-r", pinned)
        pip(builder, "wheel", *PINNED, *building)
        cache.mkdir(parents=True, exist_ok=True)
        shutil.move(made, others)
    source = stage / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(PROJECT / name, source)
    for name in ("proto", "fusefs", "csi"):
        shutil.copytree(
            PROJECT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    pip(builder, "wheel", "--quiet", "--no-build-isolation", "--no-deps", "-w", own, source)
    return sorted([*others.glob("*.whl"), *own.glob("*.whl")])


def install_tree(root: Path, full: str, files: list[Path]) -> None:
    """Make the virtual environment of this version below `root`."""
    place = tree(full)
    there = root / place.relative_to("/")
    run(PYTHON, "-m", "venv", "--without-pip", there)
    pip(there, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", *files)
    shutil.copy(PACKAGING / "live_mounts.py", there)
    link(root, there / "bin/python3", PYTHON)
    for path in (there / "bin").iterdir():
        if path.name.startswith(("activate", "Activate")) or not wanted(path.name):
            path.unlink()
        elif not path.is_symlink():
            path.write_text(path.read_text().replace(str(there), str(place)))
    shutil.rmtree(there / "include", ignore_errors=True)
    site = next((there / "lib").glob("python3.*")) / "site-packages"
    # The driver's image is another package, with gRPC.
    shutil.rmtree(site / "fusefs/_driver")
    configuration = there / "pyvenv.cfg"
    lines = configuration.read_text().splitlines(keepends=True)
    # It names a path of the machine that the package is built on.
    configuration.write_text("".join(line for line in lines if not line.startswith("command")))
    for path in site.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
    for path in site.rglob("*.so"):
        run("strip", "--strip-unneeded", path)
    for path in site.glob("*.dist-info/direct_url.json"):
        path.unlink()
    compiled = ("--invalidation-mode", "unchecked-hash", "-q", "-s", root, "-p", "/")
    run(PYTHON, "-m", "compileall", *compiled, site)


def tree(full: str) -> Path:
    """Where a version is on the machine that it is installed on."""
    return Path("/usr/lib/fusefs") / full


def wanted(name: str) -> bool:
    """Whether a program of the environment is part of the package."""
    return name in ("fusefs", "mount.fusefs", "umount.fusefs") or name.startswith("python")


# --- the rest of the files ----------------------------------------------------


def install_files(root: Path, full: str) -> None:
    """Commands, manual pages, completions, the unit and the documents."""
    programs = tree(full) / "bin"
    link(root, root / "usr/bin/fusefs", programs / "fusefs")
    for name, program in HELPERS.items():
        link(root, root / "usr/sbin" / name, programs / program)
    unit = root / "lib/systemd/system"
    unit.mkdir(parents=True)
    shutil.copy(PROJECT / "packaging/systemd/fusefs@.service", unit)
    for name in ("etc/fusefs", "usr/share/lintian/overrides"):
        (root / name).mkdir(parents=True)
    shutil.copy(PACKAGING / "lintian-overrides", root / "usr/share/lintian/overrides/fusefs")
    shared = root / "usr/share"
    run(sys.executable, PROJECT / "packaging/make_docs.py", shared)
    zsh = shared / "zsh/vendor-completions"
    (shared / "zsh/site-functions").rename(zsh)
    for page in list((shared / "man").glob("*/*")):
        compress(page)
    (shared / "man/man8/umount.fuse.fusefs.8.gz").symlink_to("mount.fusefs.8.gz")
    documents = shared / "doc/fusefs"
    documents.mkdir(parents=True)
    shutil.copy(PACKAGING / "changelog", documents / "changelog.Debian")
    compress(documents / "changelog.Debian")
    (documents / "copyright").write_text(copyright_of(root, full))
    shutil.copytree(PROJECT / "docs/operate", documents / "operate")
    for name in ("semantics.md", "project/changelog.md"):
        shutil.copy(PROJECT / "docs" / name, documents)
    shutil.copy(PROJECT / "packaging/README.md", documents / "README.Debian.md")
    for path in root.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)
    (root / "etc/fusefs").chmod(0o750)


def link(root: Path, path: Path, target: Path) -> None:
    """Have `path` be a relative link to what will be at `target`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(os.path.relpath(target, Path("/") / path.parent.relative_to(root)))


def compress(path: Path) -> None:
    """As gzip -9n."""
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes(), 9, mtime=0))
    path.unlink()


def copyright_of(root: Path, full: str) -> str:
    """The copyright file, with the licences that the bundled packages name for themselves."""
    site = root / tree(full).relative_to("/")
    bundled = sorted(set(licences(site)))
    return (PACKAGING / "copyright").read_text() + "".join(f" {line}\n" for line in bundled)


def licences(site: Path) -> Iterator[str]:
    """A line for each of the bundled packages: name, version, licence, place of its text."""
    for path in site.rglob("*.dist-info/METADATA"):
        about = HeaderParser().parsestr(path.read_text())
        if about["Name"] == "fusefs-s3":
            continue
        kinds = [text for text in about.get_all("Classifier", []) if text.startswith("License")]
        named = about["License-Expression"] or about["License"] or "; ".join(kinds)
        licence = named.splitlines()[0].rpartition(":: ")[2] if named else "see its files"
        yield f"{about['Name']} {about['Version']}: {licence}"


# --- the control files --------------------------------------------------------


def write_control(root: Path, full: str) -> None:
    """DEBIAN/: control, sums of all files, the maintainer scripts."""
    control = root / "DEBIAN"
    control.mkdir()
    paths = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    kib = sum(-(-path.stat().st_size // 1024) for path in paths)
    texts = {
        "@VERSION@": full,
        "@ARCHITECTURE@": architecture(),
        "@SIZE@": str(kib),
        "@DEPENDS@": ", ".join(dependencies(root)),
    }
    for name in ("control", *SCRIPTS):
        text = (PACKAGING / name).read_text()
        for word, value in texts.items():
            text = text.replace(word, value)
        (control / name).write_text(text)
        (control / name).chmod(0o755 if name in SCRIPTS else 0o644)
    sums = control / "md5sums"
    sums.write_text(
        "".join(f"{md5(path)}  {path.relative_to(root)}\n" for path in paths if path != sums)
    )
    sums.chmod(0o644)
    control.chmod(0o755)


def dependencies(root: Path) -> list[str]:
    """This very Python, and the libraries that the shared objects are linked with."""
    found = output(PYTHON, "-c", "import sys; print(*sys.version_info[:2])").split()
    major, minor = map(int, found)
    python = [f"python3 (>= {major}.{minor})", f"python3 (<< {major}.{minor + 1})"]
    objects = [f"-e{path.relative_to(root)}" for path in root.rglob("*.so")]
    # dpkg-shlibdeps wants a source package.
    (root / "debian").mkdir()
    (root / "debian/control").write_text("Source: fusefs\n\nPackage: fusefs\nArchitecture: any\n")
    shown = subprocess.run(
        ["dpkg-shlibdeps", "-O", "--warnings=0", *objects],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    shutil.rmtree(root / "debian")
    libraries = re.sub("^shlibs:Depends=", "", shown.stdout.strip())
    return [*python, *sorted(libraries.split(", "))]


def md5(path: Path) -> str:
    """The sum that dpkg --verify compares."""
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


# --- other programs -----------------------------------------------------------


def pip(environment: Path, *arguments: object) -> None:
    """Run this environment's pip for another one, which has none."""
    run(sys.executable, "-m", "pip", "--python", environment / "bin/python3", *arguments)


def run(*command: object) -> None:
    """Run a program; its output is shown."""
    subprocess.run([str(word) for word in command], check=True)


def output(*command: object) -> str:
    """What a program prints."""
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
