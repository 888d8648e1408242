"""Images without a container engine: archives of one layer, which containerd imports.

The driver's image has the Dockerfile's own steps. Those of the e2e suite are named as the suite
asks for them, and have busybox, agnhost or a plain Debian inside.
"""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.cluster.node import PAUSE
from tests.support.packaging.image import PROJECT, build, stages

VALUES = yaml.safe_load((PROJECT / "charts/fusefs-csi/values.yaml").read_text())
DRIVER = "{repository}:{tag}".format_map(VALUES["image"])
_SOURCES = ("Dockerfile", "pyproject.toml", "setup.py", "image", "proto", "fusefs", "csi")
_LEFT_OUT = ("./proc/*", "./sys/*", "./dev/*")
_PYTHON = "python3.11"  # the image's
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Image:
    """An image with these names: layers of the folders' content, and a configuration."""

    names: list[str]
    roots: list[Path]
    config: dict[str, object]


def write(archive: Path, images: list[Image]) -> None:
    """Write the images into an archive, each folder once.

    The format is Docker's (https://github.com/moby/docker-image-spec).
    """
    archive.parent.mkdir(parents=True, exist_ok=True)
    digests: dict[Path, str] = {}
    index = []
    with tarfile.open(archive, "w") as out:
        for image in images:
            for root in image.roots:
                if root not in digests:
                    digests[root] = _add_layer(out, root)
            layers = [digests[root] for root in image.roots]
            description = {
                "architecture": "amd64",
                "os": "linux",
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{each}" for each in layers]},
                "config": {"Env": [f"PATH={_PATH}"], **image.config},
            }
            body = json.dumps(description).encode()
            name = f"{hashlib.sha256(body).hexdigest()}.json"
            _add(out, name, body)
            files = [f"{each}.tar" for each in layers]
            index.append({"Config": name, "RepoTags": image.names, "Layers": files})
        _add(out, "manifest.json", json.dumps(index).encode())


def _add_layer(out: tarfile.TarFile, root: Path) -> str:
    """Add a folder's content as a layer; returns its digest."""
    with tempfile.NamedTemporaryFile(dir=Path(str(out.name)).parent) as layer:
        exclude = [f"--exclude={path}" for path in _LEFT_OUT]
        tar = ["tar", "--numeric-owner", "-C", str(root), "-cf", layer.name, *exclude, "."]
        subprocess.run(tar, check=True)
        digest = hashlib.file_digest(layer, "sha256").hexdigest()
        out.add(layer.name, f"{digest}.tar")
    return digest


def _add(out: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    out.addfile(member, io.BytesIO(content))


def driver(cache: Path) -> Path:
    """The root of the driver's image, by the Dockerfile's steps; made anew for other sources."""
    sources = hashlib.sha256()
    for name in _SOURCES:
        below = sorted((PROJECT / name).rglob("*")) or [PROJECT / name]
        for path in below:
            if path.is_file() and "__pycache__" not in path.parts and "_pb2" not in path.name:
                sources.update(path.relative_to(PROJECT).as_posix().encode() + path.read_bytes())
    made = cache / f"driver-{sources.hexdigest()[:16]}"
    if not made.exists():
        for old in cache.glob("driver-*"):
            subprocess.run(["rm", "-rf", "--one-file-system", old], check=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as directory:
            build(stages((PROJECT / "Dockerfile").read_text()), Path(directory)).rename(made)
    return made


def make(cache: Path, directory: Path, programs: Path, sidecars: Path) -> Path:
    """Write all images into an archive in `directory`, and return it.

    `programs` has agnhost and the e2e suite, `sidecars` the provisioner and the resizer.
    """
    root = driver(cache)
    path = f"PATH=/opt/fusefs/bin:{_PATH}"
    quiet = [path, "PYTHONDONTWRITEBYTECODE=1", "PYTHONUNBUFFERED=1"]
    entry = ["/usr/bin/tini", "--", "fusefs-csi"]
    names = _names(programs)
    with tempfile.TemporaryDirectory(dir=directory) as made:
        box, more = Path(made, "busybox"), Path(made, "more")
        _make_busybox(box)
        for name in ("agnhost", "sidecar.py", *(program.name for program in sidecars.iterdir())):
            (more / name).mkdir(parents=True)
        shutil.copy(programs / "agnhost", more / "agnhost")
        shutil.copy(Path(__file__).with_name("sidecar.py"), more / "sidecar.py")
        dns = ("glibc-dns-testing", "jessie-dnsutils")  # the newer and the older suite's
        debian = [each for name in ("nginx", *dns) for each in names.get(name, ())]
        images = [
            Image([DRIVER], [root], {"User": "65532:65532", "Entrypoint": entry, "Env": quiet}),
            Image(debian, [root], {"Cmd": ["sh"]}),
            Image([PAUSE], [box], {"Entrypoint": ["/bin/sleep", "2147483647"]}),
            Image(names["busybox"], [box], {"Cmd": ["sh"]}),
            Image(
                names["agnhost"],
                [box, more / "agnhost"],
                {"Entrypoint": ["/agnhost"], "Cmd": ["pause"]},
            ),
        ]
        modules = f"PYTHONPATH=/opt/fusefs/lib/{_PYTHON}/site-packages/fusefs/_driver"
        script = {"Entrypoint": ["/opt/fusefs/bin/python", "/sidecar.py"], "Env": [path, modules]}
        for name, image in _sidecars().items():
            if (sidecars / name).exists():
                shutil.copy(sidecars / name, more / name)
                program = {"User": "65532", "Entrypoint": [f"/{name}"]}
                images.append(Image([image], [more / name], program))
            else:
                images.append(Image([image], [root, more / "sidecar.py"], script))
        archive = directory / "images.tar"
        write(archive, images)
    return archive


def _make_busybox(root: Path) -> None:
    """A root with busybox under all its names, and the users that pods have."""
    for name in ("bin", "etc", "tmp", "proc", "sys", "dev", "root", "home", "usr/bin", "var/run"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    (root / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/home:/bin/false\n"
    )
    (root / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    shutil.copy("/bin/busybox", root / "bin/busybox")
    listed = subprocess.run(["/bin/busybox", "--list"], capture_output=True, text=True, check=True)
    for name in listed.stdout.split():
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")


def _names(programs: Path) -> dict[str, list[str]]:
    """The images that the e2e suite asks for, by the last word of their names."""
    command = [programs / "e2e.test", "--list-images"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    found: dict[str, list[str]] = {"pause": [PAUSE]}
    for image in listed:
        found.setdefault(image.rpartition("/")[2].partition(":")[0], []).append(image)
    return found


def _sidecars() -> dict[str, str]:
    """The images of the chart's sidecars, by their programs."""
    return {
        each["repository"].rpartition("/")[2]: "{repository}:{tag}".format_map(each)
        for each in VALUES["sidecars"].values()
    }
