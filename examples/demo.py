"""`make demo`: a bucket on a real S3 server, mounted and read by ordinary programs.

Starts SeaweedFS, puts a data set like ImageNet's and two large shards into a
bucket, mounts it and looks at it with `ls`, `cat` and `sha256sum`. Then an
ordinary Python reader goes over it twice: the first epoch brings the data
from S3, the second finds it in the cache. As root the page cache is emptied
before a third one, which so reads from the local disk; the same read of plain
files on that disk stands beside it.

Everything is below one temporary directory, which is removed at the end, also
after Ctrl-C or a failure.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fusefs.cli.status_report import human_size
from fusefs.linux import mountinfo
from tests.support.servers.s3_server import S3Server, ServerError

MIB = 1 << 20
CLASSES = 20
IMAGES_PER_CLASS = 100
SHARDS = 2
SHARD_SIZE = 256 * MIB
READERS = 8
COMMAND_TIMEOUT_S = 120

FUSEFS = Path(sys.prefix) / "bin" / "fusefs"
IS_ROOT = os.geteuid() == 0


class DemoError(Exception):
    """Something was not as it should be."""


# --- the data set -------------------------------------------------------------


def make_data_set(root: Path) -> None:
    """Write the files that go into the bucket: images, labels and shards."""
    noise = random.Random(1)  # the same bytes each time
    for number in range(CLASSES):
        folder = root / "train" / f"class{number:02}"
        folder.mkdir(parents=True)
        for image in range(IMAGES_PER_CLASS):
            size = noise.randrange(80_000, 125_000)
            (folder / f"img{image:04}.jpg").write_bytes(noise.randbytes(size))
    labels = "".join(f"class{number:02},{IMAGES_PER_CLASS}\n" for number in range(CLASSES))
    (root / "labels.csv").write_text(labels)
    (root / "shards").mkdir()
    for number in range(SHARDS):
        with open(root / "shards" / f"shard{number:02}.tar", "wb") as shard:
            for _ in range(SHARD_SIZE // MIB):
                shard.write(noise.randbytes(MIB))


def upload(root: Path, server: S3Server, bucket: str) -> None:
    client = server.client()
    files = [path for path in root.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(READERS) as pool:
        for done in [
            pool.submit(client.upload_file, str(path), bucket, str(path.relative_to(root)))
            for path in files
        ]:
            done.result()


# --- an ordinary reader -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Epoch:
    """How long one pass over the data took."""

    files: int
    files_s: float
    shard_bytes: int
    shards_s: float

    def __str__(self) -> str:
        return (
            f"{self.files / self.files_s:7,.0f} images/s    "
            f"shards {human_size(self.shard_bytes / self.shards_s):>9}/s"
        )


def run_epoch(root: Path) -> Epoch:
    """Read every image in random order with a few threads, then the shards in order."""
    began = time.monotonic()
    images = [path for folder in (root / "train").iterdir() for path in folder.iterdir()]
    random.shuffle(images)
    with ThreadPoolExecutor(READERS) as pool:
        total = sum(pool.map(lambda path: len(path.read_bytes()), images))
    files_s = time.monotonic() - began
    if len(images) != CLASSES * IMAGES_PER_CLASS or not total:
        raise DemoError(f"{len(images)} images with {total} bytes were read")
    began = time.monotonic()
    shard_bytes = sum(_read_shard(path) for path in sorted((root / "shards").iterdir()))
    return Epoch(len(images), files_s, shard_bytes, time.monotonic() - began)


def _read_shard(path: Path) -> int:
    buffer, total = bytearray(MIB), 0
    with open(path, "rb", buffering=0) as shard:
        while count := shard.readinto(buffer):
            total += count
    return total


def drop_page_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


# --- the show -----------------------------------------------------------------


def say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def shell(command: str, environment: dict[str, str] | None = None) -> str:
    """Show a command as a person would type it, run it, and show what it prints."""
    print(f"$ {command}", flush=True)
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    print(done.stdout, end="", flush=True)
    if done.returncode != 0:
        raise DemoError(f"the command ended with status {done.returncode}: {command}")
    return done.stdout


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    # /tmp may be in memory, and the local disk is what is to be seen.
    directory = Path(tempfile.mkdtemp(prefix="fusefs-demo-", dir="/var/tmp"))
    try:
        yield directory
    finally:
        if not mountinfo.is_mountpoint(directory / "data"):
            shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def unmounted_at_last(mountpoint: Path) -> Iterator[None]:
    try:
        yield
    finally:
        if mountinfo.is_mountpoint(mountpoint):
            subprocess.run([FUSEFS, "umount", "--force", mountpoint], check=False)


def show(directory: Path, server: S3Server) -> None:
    source, mountpoint = directory / "source", directory / "data"
    mountpoint.mkdir()
    files = CLASSES * IMAGES_PER_CLASS
    say(f"Putting {files:,} images and {SHARDS} shards of {human_size(SHARD_SIZE)} into a bucket")
    make_data_set(source)
    bucket = server.new_bucket()
    upload(source, server, bucket)

    path = {"PATH": f"{FUSEFS.parent}:{os.environ['PATH']}"}
    environment = os.environ | server.environment | path
    with unmounted_at_last(mountpoint):
        say("Mounting it")
        shell(
            f"fusefs mount s3://{bucket} {shlex.quote(str(mountpoint))} "
            f"--endpoint-url {server.endpoint_url} --cache-dir {directory / 'cache'} "
            f"--log-file {directory / 'fusefs.log'}",
            environment,
        )
        say("It is a directory like any other")
        shell(f"ls -l {mountpoint} {mountpoint}/shards")
        shell(f"ls -l {mountpoint}/train/class07 | sed -n 1,4p")
        shell(f"cat {mountpoint}/labels.csv | tail -3")

        compare_epochs(source, mountpoint)
        compare_sums(source, mountpoint)
        save_checkpoint(source, mountpoint, server, bucket)

        say("What the mount says about itself")
        shell(f"fusefs status {mountpoint}", environment)
        say("Unmounting")
        shell(f"fusefs umount {mountpoint}", environment)


def compare_epochs(source: Path, mountpoint: Path) -> None:
    say(f"An ordinary Python reader with {READERS} threads")
    print(f"first epoch, from S3:            {run_epoch(mountpoint)}", flush=True)
    print(f"second epoch, from the cache:    {run_epoch(mountpoint)}", flush=True)
    if not IS_ROOT:
        print("(as root, this would also empty the page cache and compare with the disk)")
        return
    drop_page_cache()
    print(f"page cache emptied, through it:  {run_epoch(mountpoint)}", flush=True)
    drop_page_cache()
    print(f"page cache emptied, plain files: {run_epoch(source)}", flush=True)


def compare_sums(source: Path, mountpoint: Path) -> None:
    say("The bytes are the bucket's")
    command = f"cd {mountpoint} && sha256sum shards/* train/class00/img0000.jpg"
    for line in shell(command).splitlines():
        digest, name = line.split(maxsplit=1)
        with open(source / name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise DemoError(f"{name} differs from what was uploaded")
    print("the same as before the upload")


def save_checkpoint(source: Path, mountpoint: Path, server: S3Server, bucket: str) -> None:
    say("A checkpoint that was saved is in the bucket")
    saved = mountpoint / "checkpoints"
    shell(
        f"mkdir {saved} && cp {source}/shards/shard00.tar {saved}/tmp && mv {saved}/tmp {saved}/1"
    )
    body = server.client().get_object(Bucket=bucket, Key="checkpoints/1")["Body"]
    digest = hashlib.sha256()
    while chunk := body.read(MIB):
        digest.update(chunk)
    with open(source / "shards" / "shard00.tar", "rb") as file:
        if hashlib.file_digest(file, "sha256").digest() != digest.digest():
            raise DemoError("the checkpoint in the bucket differs from what was saved")
    print("read from the bucket past the mount: the same bytes")


def _stop(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    signal.signal(signal.SIGTERM, _stop)
    began = time.monotonic()
    try:
        with scratch_directory() as directory, S3Server(directory / "s3") as server:
            show(directory, server)
    except KeyboardInterrupt:
        print("\ndemo: interrupted; everything is cleaned up", file=sys.stderr)
        return 130
    except (DemoError, ServerError, OSError, subprocess.SubprocessError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print(f"\ndone in {time.monotonic() - began:.0f} s; nothing is left behind")
    return 0


if __name__ == "__main__":
    sys.exit(main())
