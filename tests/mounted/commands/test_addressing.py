"""A bucket in the host name, as Amazon's has it: with a server whose names only the test knows."""

import hashlib
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.mounting import FUSEFS, LIMIT_S
from tests.support.servers.buckets import Bucket, stored
from tests.support.servers.s3_server import DOMAIN
from tests.support.sharing import content, skip_without_fuse

# In a mount namespace of its own; what ends the script takes the mount away, and so the daemon.
SCRIPT = """
set -e
mount --bind {hosts} /etc/hosts
{fusefs} mount s3://{bucket} {here} --addressing virtual --endpoint-url {endpoint} --cache-dir \
    {here}-cache --log-file {here}.log
trap 'umount -l {here}' EXIT
cd {here}
sha256sum {names}
cp large copy
mv copy renamed
cd /
{fusefs} umount {here}
trap - EXIT
"""
# The last one has a control character.
OBJECTS = {
    "small": content("s", 9_000),
    "large": content("l", 20 << 20),
    "odd\x01one": content("o", 9_000),
}


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)
def test_a_bucket_is_read_and_written_under_a_host_name_of_its_own(
    bucket: Bucket, tmp_path: Path
) -> None:
    skip_without_fuse()
    for key, data in OBJECTS.items():
        bucket.put(key, data)
    (tmp_path / "mnt").mkdir()
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost {bucket.name}.{DOMAIN}\n")
    port = urlsplit(bucket.server.endpoint_url).port
    script = SCRIPT.format(
        hosts=tmp_path / "hosts",
        fusefs=FUSEFS,
        bucket=bucket.name,
        here=tmp_path / "mnt",
        endpoint=f"http://{DOMAIN}:{port}",
        names=shlex.join(OBJECTS),
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, **bucket.server.environment},
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    sums = [line.split()[0].lstrip("\\") for line in done.stdout.splitlines()]
    assert sums == [hashlib.sha256(data).hexdigest() for data in OBJECTS.values()]
    assert stored(bucket, "renamed") == OBJECTS["large"]
