"""Which stores volumes may be in, where requests go, and what a volume's location may be."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from csi.controller.bucket_client import Bucket, store_of
from csi.errors import InvalidArgumentError, UnavailableError
from csi.identities.keys import AccessKeys, keys_from
from csi.volume.location import VolumeId, fill_in, location_of, normal_prefix, overlap
from csi.volume.stores import ConfigurationError, Stores, StoreSettings, is_forbidden, read_stores
from fusefs.settings.types import Addressing
from fusefs.store.errors import StoreError
from fusefs.store.s3.access import Access
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import ACCESS_KEY, REGION, SECRET_KEY, S3Server

MINIO = "https://minio.storage.svc:9000"
KEYS = AccessKeys(ACCESS_KEY, SECRET_KEY, "session-token")


def written(directory: Path, text: str) -> Path:
    path = directory / "stores.toml"
    path.write_text(text)
    return path


@pytest.fixture
def stores() -> Stores:
    made = [StoreSettings("minio", MINIO), StoreSettings("plain", "http://10.0.0.7")]
    return Stores({"aws": StoreSettings("aws"), **{store.name: store for store in made}})


def test_a_stores_sts_gets_no_token_that_aws_would_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = f'[stores.minio]\nendpoint-url = "{MINIO}"\nsts-url = "{MINIO}"\n'
    without = read_stores(written(tmp_path, store)).by_name["minio"]
    assert "stores.minio: no volume with a roleArn mounts" in caplog.text
    # The driver starts, and volumes with other credentials mount.
    assert without == StoreSettings("minio", MINIO)
    known = read_stores(written(tmp_path, store + 'audience = "minio"\n'))
    assert known.by_name["minio"].audience == "minio"
    assert known.by_name["aws"].audience == "sts.amazonaws.com"


def test_a_file_names_stores_beside_aws(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.touch()
    path = written(
        tmp_path,
        f"""
        [stores.minio]
        endpoint-url = "{MINIO}/"
        region = "eu-west-9"
        addressing = "path"
        ca-bundle = "{bundle}"
        sts-url = "https://sts.storage.svc"
        audience = "minio"
        [stores.aws]
        region = "eu-central-1"
        """,
    )
    stores = read_stores(path)
    assert stores.choose("minio") == StoreSettings(
        "minio", MINIO, "eu-west-9", Addressing.PATH, bundle, "https://sts.storage.svc", "minio"
    )
    assert stores.choose("aws") == StoreSettings("aws", region="eu-central-1")
    assert "other" not in stores.by_name


@pytest.mark.parametrize(
    "text",
    [
        "not toml",
        "[store.x]",
        'stores = "x"',
        "[stores]\nx = 1",
        "[stores.x]",
        '[stores.x]\nendpoint-url = "minio:9000"',
        "[stores.x]\nendpoint-url = 1",
        f'[stores.x]\nendpoint-url = "{MINIO}"\nretries = "3"',
        f'[stores.Minio]\nendpoint-url = "{MINIO}"',
        f'[stores.{"x" * 21}]\nendpoint-url = "{MINIO}"',
        f'[stores.x]\nendpoint-url = "{MINIO}/path"',
        '[stores.x]\nendpoint-url = "https://user:password@minio"',
        '[stores.x]\nendpoint-url = "https://minio:port"',
        f'[stores.x]\nendpoint-url = "{MINIO}"\nregion = "a.b/c"',
        f'[stores.x]\nendpoint-url = "{MINIO}"\naddressing = "none"',
        f'[stores.x]\nendpoint-url = "{MINIO}"\nca-bundle = "/no/such/file"',
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        read_stores(path)
    assert str(path) in str(caught.value)


FORBIDDEN = [
    "169.254.169.254",
    "169.254.170.2",
    "[fe80::1]",
    "[fd00:ec2::254]",
    "100.100.100.200",
    "168.63.129.16",
    "0.0.0.0",
    "[::]",
    "[::ffff:169.254.169.254]",
    "224.0.0.1",
    "metadata.google.internal",
]


@pytest.mark.parametrize("host", FORBIDDEN)
@pytest.mark.parametrize("setting", ["endpoint-url", "sts-url"])
def test_addresses_that_hand_out_credentials_are_no_stores(
    tmp_path: Path, host: str, setting: str
) -> None:
    urls = {"endpoint-url": MINIO, "sts-url": MINIO, setting: f"http://{host}"}
    lines = "\n".join(f'{name} = "{url}"' for name, url in urls.items())
    lines += '\naudience = "x"'
    with pytest.raises(ConfigurationError, match="link-local or metadata"):
        read_stores(written(tmp_path, f"[stores.x]\n{lines}"))


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.7", "192.168.1.1", "::1", "fd12::1"])
def test_private_addresses_may_be_stores(address: str) -> None:
    assert not is_forbidden(address)


@pytest.mark.parametrize("setting", ["endpoint_url", "sts_url"])
def test_a_name_that_stands_for_such_an_address_is_refused_when_it_is_looked_up(
    setting: str,
) -> None:
    # A resolver takes this number for 169.254.169.254.
    urls = {"endpoint_url": "http://127.0.0.1", setting: "http://2852039166"}
    with pytest.raises(InvalidArgumentError, match=r"169\.254\.169\.254"):
        StoreSettings("x", **urls).check_address()


def test_a_name_that_is_not_known_may_be_known_later() -> None:
    with pytest.raises(UnavailableError):
        StoreSettings("x", "http://no-such-host.invalid").check_address()


def test_a_volume_names_its_store(stores: Stores) -> None:
    for name in ("aws", "minio"):
        assert stores.choose(name).name == name
    for name in ("other", "", "../minio"):
        with pytest.raises(InvalidArgumentError, match="store"):
            stores.choose(name)


@pytest.fixture
def elsewhere(s3: S3Server) -> Iterator[FaultyS3]:
    with FaultyS3(s3.endpoint_url) as server:
        yield server


@pytest.mark.parametrize(
    ("status", "code"), [(301, "PermanentRedirect"), (307, "TemporaryRedirect")]
)
def test_a_redirect_to_another_host_is_not_followed(
    faulty: FaultyS3, elsewhere: FaultyS3, status: int, code: str
) -> None:
    other = elsewhere.endpoint_url
    faulty.add(
        code=code,
        status=status,
        body=(f"<Error><Code>{code}</Code><Endpoint>{other}</Endpoint></Error>").encode(),
        headers={"Location": f"{other}/b/k", "x-amz-bucket-region": "eu-west-1"},
    )
    bucket = Bucket(StoreSettings("faulty", faulty.endpoint_url, REGION), "bucket", None, KEYS)
    for act in (
        lambda: bucket.put_new("k", b""),
        lambda: bucket.get("k"),
        lambda: list(bucket.pages("k")),
        lambda: bucket.delete_all(["k"]),
    ):
        with pytest.raises(StoreError):
            act()
    assert elsewhere.requests() == []
    faulty.clear()


def test_the_environment_sends_requests_to_no_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://evil.example")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://evil.example")
    store = store_of(StoreSettings("aws"), "bucket", "eu-west-1", KEYS)
    assert Access(store.settings).url == "https://bucket.s3.eu-west-1.amazonaws.com"


def test_a_store_that_lists_other_keys_than_requested_has_nothing_deleted(faulty: FaultyS3) -> None:
    listing = (
        "<ListBucketResult><Contents><Key>other/k</Key><ETag>&quot;e&quot;</ETag></Contents>"
        "</ListBucketResult>"
    )
    faulty.add("LIST", status=200, body=listing.encode())
    bucket = Bucket(StoreSettings("faulty", faulty.endpoint_url, REGION), "bucket", None, KEYS)
    with pytest.raises(StoreError, match="other keys"):
        list(bucket.pages("mine/"))
    faulty.clear()


@pytest.mark.parametrize(
    "names",
    [
        ("access_key_id", "secret_access_key", "session_token"),
        ("accessKeyId", "secretAccessKey", "sessionToken"),
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    ],
)
def test_a_secret_has_keys_under_any_usual_spelling(names: tuple[str, str, str]) -> None:
    values = (ACCESS_KEY, f"{SECRET_KEY}\n", "session-token")
    secret = dict(zip(names, values, strict=True))
    assert keys_from(secret) == KEYS
    assert keys_from({"csi.storage.k8s.io/serviceAccount.tokens": "{}"}) is None


def test_keys_are_not_shown() -> None:
    shown = f"{KEYS} {KEYS!r}"
    assert not any(text in shown for text in (ACCESS_KEY, SECRET_KEY, "session-token"))


@pytest.mark.parametrize(
    ("text", "prefix"),
    [
        ("", ""),
        ("/", ""),
        ("a", "a/"),
        ("/a/", "a/"),
        ("a/b", "a/b/"),
        ("a b/ü", "a b/ü/"),
        ("...", ".../"),
        (".hidden", ".hidden/"),
        ("x" * 899, "x" * 899 + "/"),
    ],
)
def test_a_prefix_has_one_form(text: str, prefix: str) -> None:
    assert normal_prefix(text) == prefix
    assert normal_prefix(prefix) == prefix


@pytest.mark.parametrize(
    "text",
    [
        "//",
        "a//b",
        "a//",
        "//a",
        ".",
        "..",
        "a/./b",
        "a/../b",
        "a\0",
        "a\x1f",
        "\x85",
        ".fusefs",
        "a/.fusefs/b",
        "x" * 900,
        "ü" * 450,
    ],
    ids=ascii,
)
def test_a_prefix_that_no_path_has_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="prefix"):
        normal_prefix(text)


def test_a_value_is_never_read_as_a_template() -> None:
    assert fill_in("${a}/x", {"a": "${b}", "b": "secret"}) == "${b}/x/"


@pytest.mark.parametrize(
    ("one", "other", "is_so"),
    [
        ("a/", "a/", True),
        ("a/", "a/b/", True),
        ("", "a/", True),
        ("", "", True),
        ("team-a/", "team-ab/", False),
        ("a/b/", "a/c/", False),
    ],
)
def test_prefixes_overlap_by_whole_segments(one: str, other: str, is_so: bool) -> None:
    assert overlap(one, other) is is_so
    assert overlap(other, one) is is_so


def test_an_attribute_says_where_a_static_volume_is(stores: Stores) -> None:
    attributes = {
        "store": "minio",
        "bucket": "data",
        "prefix": "sets/a",
        "region": "eu-west-1",
        "x": "y",
    }
    location = location_of(attributes, stores)
    assert (location.store.name, str(location)) == ("minio", "s3://data/sets/a/")
    assert location.region == "eu-west-1"


@pytest.mark.parametrize(
    "text", ["", "a", "a/b", "a/bucket/", "a/bucket/..", "a/B/c", "a/bucket/c\n"]
)
def test_what_no_volume_can_be_called_is_no_id(text: str) -> None:
    assert VolumeId.parse(text) is None
