"""Where credentials come from, and that they are renewed: as with every program that uses boto3."""

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trio

from fusefs.launch import launcher, users
from fusefs.settings.mount import MountSettings
from fusefs.settings.types import MountSource
from fusefs.store.s3 import access
from tests.support.machine.ordinary_user import runnable_by_all
from tests.support.mounting import FUSEFS, LIMIT_S, Mount, Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, stored
from tests.support.servers.faulty_s3 import FaultyS3, Request
from tests.support.servers.identity_services import IdentityServices
from tests.support.servers.s3_server import ACCESS_KEY, DOMAIN, SECRET_KEY
from tests.support.sharing import PATIENCE_S, content, drop_copies, skip_without_fuse
from tests.support.store_reading import download, opened
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("as_owner")

EMPTY_LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
PROFILE = "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n"
START_URL = "https://example.awsapps.com/start"
SSO_PROFILE = f"""[default]
sso_start_url = {START_URL}
sso_region = us-east-1
sso_account_id = 123456789012
sso_role_name = reader
"""


SETTINGS = MountSettings(source=MountSource("bucket"), mountpoint=Path("/mnt"))


@pytest.fixture(scope="module")
def services() -> Iterator[str]:
    with IdentityServices() as server:
        yield server.endpoint_url


def key_of(request: Request) -> str:
    """The access key that a request is signed with."""
    found = re.search(r"Credential=([^/]*)/", request.headers["authorization"])
    assert found is not None
    return found[1]


def _web_identity(url: str, home: Path) -> dict[str, str]:
    (home / "token").write_text("a token")
    return {
        "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/reader",
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(home / "token"),
        "AWS_ENDPOINT_URL_STS": url,
    }


def _sso(url: str, home: Path) -> dict[str, str]:
    (home / "config").write_text(SSO_PROFILE)
    (home / "sso").mkdir()
    login = {"accessToken": "t", "expiresAt": "2100-01-01T00:00:00Z", "startUrl": START_URL}
    name = hashlib.sha1(START_URL.encode()).hexdigest()
    (home / "sso" / f"{name}.json").write_text(json.dumps(login))
    return {"AWS_CONFIG_FILE": str(home / "config"), "AWS_ENDPOINT_URL_SSO": url}


@pytest.mark.parametrize(
    ("service", "configure"),
    [
        ("instance", lambda url, _: {"AWS_EC2_METADATA_SERVICE_ENDPOINT": url}),
        ("container", lambda url, _: {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{url}/container"}),
        ("sts", _web_identity),
        ("sso", _sso),
    ],
)
async def test_keys_come_from_each_service_and_are_renewed(
    shared: Bucket,
    faulty: FaultyS3,
    services: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    service: str,
    configure: Callable[[str, Path], dict[str, str]],
) -> None:
    monkeypatch.setattr(access, "AGAIN_S", 0.1)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name)
    cached = str(tmp_path / "sso")
    monkeypatch.setattr("botocore.credentials.SSOProvider._SSO_TOKEN_CACHE_DIR", cached)
    for name, value in configure(services, tmp_path).items():
        monkeypatch.setenv(name, value)
    faulty.add("LIST", body=EMPTY_LISTING)
    before = len(faulty.requests("LIST"))
    # They are renewed beside the requests. Those of an instance are kept for some minutes longer
    # than they are valid.
    wanted = 1 if service == "instance" else 2
    keys: set[str] = set()
    async with opened(shared, faulty) as store:
        with trio.fail_after(30):
            while len(keys) < wanted:
                await store.list_page(f"{len(keys)}/")
                sent = faulty.requests("LIST")[before:]
                keys = {key_of(request) for request in sent}
    assert {key.rstrip("0123456789") for key in keys} == {service}
    assert {request.headers["x-amz-security-token"] for request in sent} == {"t"}


@pytest.mark.parametrize("place", ["setting", "AWS_REGION", "AWS_DEFAULT_REGION", "profile"])
async def test_requests_are_signed_for_the_region_that_is_named(
    shared: Bucket, faulty: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.delenv("AWS_REGION")
    settings = {}
    if place == "setting":
        settings["region"] = "eu-north-9"
    elif place != "profile":
        monkeypatch.setenv(place, "eu-north-9")
    else:
        (tmp_path / "config").write_text("[profile north]\nregion = eu-north-9\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_PROFILE", "north")
    shared.put("object", b"x" * (3 << 20))
    before = len(faulty.requests())
    async with opened(shared, faulty, **settings) as store:
        await store.list_page("")
        await download(store, await store.head("object"))
    for request in faulty.requests()[before:]:
        assert "/eu-north-9/s3/" in request.headers["authorization"]
    assert {one.operation for one in faulty.requests()[before:]} == {"LIST", "HEAD", "GET"}


async def test_every_request_agrees_to_pay_where_the_requester_does(
    shared: Bucket, faulty: FaultyS3
) -> None:
    for key, size in (("large", 3 << 20), ("small", 10), ("odd//key", 10)):
        shared.put(key, b"x" * size)
    before = len(faulty.requests())
    async with opened(shared, faulty, requester_pays=True) as store:
        await store.list_page("")
        for key in ("large", "small", "odd//key"):
            await download(store, await store.head(key))
    sent = faulty.requests()[before:]
    assert len(sent) >= 7
    unpaid = {one.operation for one in sent if one.headers.get("x-amz-request-payer") is None}
    assert unpaid == set()


# From the files of whoever mounts


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of credentials that the environment names."""
    path = tmp_path / "credentials"
    path.write_text(PROFILE.format(ACCESS_KEY, SECRET_KEY))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    return path


def given_files(user: users.User | None) -> dict[str, str]:
    files: dict[str, str] = json.loads(launcher.daemon_input(SETTINGS, user))["files"]
    return files


def test_a_daemon_gets_what_it_may_not_read_or_find(
    credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"AWS_SHARED_CREDENTIALS_FILE": credentials.read_text()}
    assert given_files(users.current_user()) == {}
    credentials.chmod(0o600)
    for user in (None, users.User("stranger", 54321, 54321, ())):
        assert given_files(user) == content
    monkeypatch.chdir(credentials.parent)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", credentials.name)
    assert given_files(users.current_user()) == content


@pytest.mark.root
def test_an_upgrade_finds_the_files_that_the_mount_was_made_with(
    shared: Bucket, public_path: Path, credentials: Path
) -> None:
    """As of a line of /etc/fstab: no variable of root's shell names them."""
    skip_without_fuse()
    credentials.chmod(0o600)
    (public_path / "mnt").mkdir()
    shared.put("first", b"1")
    shared.put("second", b"2")
    with runnable_by_all() as (command, environment):
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("AWS_", "FUSEFS_"))
        } | {**environment, "HOME": str(public_path)}
        one = Mount(
            f"s3://{shared.name}",
            public_path / "mnt",
            public_path / "cache",
            shared.server.endpoint_url,
            {},
            public_path / "log",
        )

        def run(*arguments: object, **variables: str) -> None:
            subprocess.run(
                [*command, *map(str, arguments)],
                env={**clean, **variables},
                check=True,
                timeout=PATIENCE_S,
            )

        try:
            options = ["--endpoint-url", one.endpoint_url, "--region", "us-east-1"]
            options += ["--cache-dir", one.cache, "--log-file", one.log, "--user", "nobody"]
            keys = {"AWS_SHARED_CREDENTIALS_FILE": str(credentials)}
            run("mount", one.source, one.path, *options, **keys)
            assert (one.path / "first").read_bytes() == b"1"
            old = one.pid
            run("upgrade", one.path)
            assert one.pid != old
            assert (one.path / "second").read_bytes() == b"2"
        finally:
            one.clean_up()


@states("Keys that change in a file that the daemon may read are used by running mounts.")
def test_keys_that_change_in_a_file_arrive_in_a_running_mount(
    mounter: Mounter, faulty: FaultyS3, credentials: Path
) -> None:
    own = ("--user", "root") if os.geteuid() == 0 else ()
    # An empty variable is as good as none.
    keys = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    here = mounter(
        "--metadata-ttl",
        "0s",
        *own,
        endpoint_url=faulty.endpoint_url,
        AWS_SHARED_CREDENTIALS_FILE=str(credentials),
        **keys,
    )
    credentials.write_text(PROFILE.format("rotated", SECRET_KEY))
    faulty.add("LIST", code="InvalidAccessKeyId")

    def has_used_others() -> bool:
        with contextlib.suppress(OSError):
            os.listdir(here.path)
        return any(key_of(request) == "rotated" for request in faulty.requests("LIST"))

    until(has_used_others, "the new keys are used")


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
    script = drop_copies() + SCRIPT.format(
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
