"""The Dockerfile, read, and its steps run without a container engine.

`build` starts from a Debian root that mmdebstrap makes, in place of the base
image, and runs each RUN step by chroot in a mount namespace of its own. Only
the instructions that our Dockerfile has are known.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.sharing import drop_copies

PROJECT = Path(__file__).parents[3]
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_MACHINE = ("/etc/resolv.conf", "/etc/hosts")


@dataclass
class Stage:
    """One FROM and what follows. `base` is an image's name, or another stage's."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def texts(self, instruction: str) -> list[str]:
        return [text for kind, text in self.steps if kind == instruction]


def stages(text: str) -> list[Stage]:
    """The stages of a Dockerfile, in its order; the last is the image."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    found: list[Stage] = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if not line.strip():
            continue
        kind, _, rest = line.strip().partition(" ")
        if kind == "FROM":
            base, _, name = rest.partition(" AS ")
            found.append(Stage(name or "image", base))
        else:
            found[-1].steps.append((kind, " ".join(rest.split())))
    return found


def copied(stage: Stage) -> list[tuple[list[str], str]]:
    """The COPY steps from the project: sources and destination."""
    found = []
    for text in stage.texts("COPY"):
        if not text.startswith("--from="):
            *sources, destination = text.split()
            found.append((sources, destination))
    return found


def copy_sources(stage: Stage, directory: Path) -> None:
    """Put what the stage copies from the project into `directory`, without what is ignored."""
    for sources, destination in copied(stage):
        for source in sources:
            target = directory / destination
            if (PROJECT / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*_pb2*")
                shutil.copytree(PROJECT / source, target, ignore=ignored, dirs_exist_ok=True)
            else:
                is_directory = destination.endswith("/")
                place = target / Path(source).name if is_directory else target
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(PROJECT / source, place)


def build(found: list[Stage], directory: Path) -> Path:
    """Run all steps of the stages in roots below `directory`; returns the last one's root."""
    roots: dict[str, Path] = {}
    for stage in found:
        root = roots[stage.name] = directory / stage.name
        if stage.base in roots:
            subprocess.run(["cp", "-a", "--reflink=auto", roots[stage.base], root], check=True)
        else:
            _debian(root)
        _run_steps(stage, root, roots)
    return roots[found[-1].name]


def _debian(root: Path) -> None:
    sources = Path("/etc/apt/sources.list.d/debian.sources").read_bytes()
    subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=minbase", "bookworm", root, "-"],
        input=sources,
        check=True,
    )


def _run_steps(stage: Stage, root: Path, roots: dict[str, Path]) -> None:
    workdir = "/"
    for kind, text in stage.steps:
        if kind == "WORKDIR":
            workdir = text
            (root / text.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif kind == "RUN":
            run_in(root, text, workdir=workdir)
        elif kind == "COPY" and text.startswith("--from="):
            origin, source, target = text.removeprefix("--from=").split()
            shutil.copytree(
                roots[origin] / source.lstrip("/"), root / target.lstrip("/"), symlinks=True
            )
        elif kind == "COPY":
            copy_sources(Stage(stage.name, stage.base, [(kind, text)]), root / workdir.lstrip("/"))


def run_in(root: Path, command: str, *, workdir: str = "/", user: str = "0:0") -> str:
    """Run a shell command in the root; returns what it printed.

    Raises:
        AssertionError: it failed; with the end of its output.
    """
    binds = drop_copies() + "".join(
        f'touch "{root}{name}" && mount --bind {name} "{root}{name}" && ' for name in _MACHINE
    )
    binds += f'touch "{root}/tmp/ca.crt" && mount --bind {_CERTIFICATES} "{root}/tmp/ca.crt" && '
    script = (
        f'{binds} mount -t proc proc "{root}/proc" && mount --rbind /dev "{root}/dev" && '
        f'exec chroot --userspec={user} "{root}" /bin/sh -c "cd {workdir} && $STEP"'
    )
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--propagation=private", "sh", "-c", script],
        env={
            "PATH": "/opt/fusefs/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PIP_CERT": "/tmp/ca.crt",
            "DEBIAN_FRONTEND": "noninteractive",
            "STEP": command,
            "HOME": "/root",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}"
    return done.stdout


def size_of(root: Path) -> int:
    """The bytes of the files below `root`."""
    return sum(
        os.lstat(Path(directory, name)).st_size
        for directory, _, names in os.walk(root)
        for name in names
    )
