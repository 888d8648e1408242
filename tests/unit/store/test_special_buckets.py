"""Access points, directory buckets: where their requests go, and what is refused."""

from typing import Any

import pytest

from fusefs.settings.mount import RawValue, SettingsError, build
from fusefs.settings.types import MountSource, parse_source
from fusefs.store.errors import AttemptError
from fusefs.store.s3.access import Access
from fusefs.store.s3.list import list_call
from fusefs.store.s3.settings import S3Settings
from tests.support.semantics import states

ARN = "arn:aws:s3:us-west-2:123456789012:accesspoint/data"
HOST = "data-123456789012.s3-accesspoint.us-west-2.amazonaws.com"


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@pytest.mark.parametrize(
    ("text", "source"),
    [
        (f"s3://{ARN}", MountSource(ARN)),
        (f"s3://{ARN}/", MountSource(ARN)),
        (f"s3://{ARN}/some/prefix", MountSource(ARN, "some/prefix/")),
        ("s3://data-a1b2c3-s3alias/x", MountSource("data-a1b2c3-s3alias", "x/")),
    ],
)
@states("The ARN of an access point may stand for the bucket, at AWS's own endpoints.")
def test_an_access_point_is_a_source(text: str, source: MountSource) -> None:
    assert parse_source(text) == source
    assert parse_source(str(source)) == source


@pytest.mark.parametrize(
    "arn",
    [
        "arn:aws:s3::123456789012:accesspoint/mfzwi23gnjvgw.mrap",
        "arn:aws:s3-object-lambda:us-west-2:123456789012:accesspoint/data",
        "arn:aws:s3-outposts:us-west-2:123456789012:outpost/op-1/accesspoint/data",
        "arn:aws:s3:::bucket",
    ],
)
def test_other_arns_are_refused(arn: str) -> None:
    with pytest.raises(ValueError, match="access points of one region"):
        parse_source(f"s3://{arn}")


@pytest.mark.parametrize(
    ("options", "host"),
    [
        ({}, HOST),
        ({"fips": True}, HOST.replace("accesspoint.", "accesspoint-fips.")),
        ({"dual_stack": True}, HOST.replace("accesspoint.", "accesspoint.dualstack.")),
    ],
)
def test_requests_go_to_the_access_points_host_signed_for_its_region(
    options: dict[str, Any], host: str
) -> None:
    access = Access(S3Settings(ARN, region="eu-central-1", **options))
    request = access.address.request(list_call("", "", "", 1), access.keys)
    assert request.url.startswith(f"https://{host}/?")
    assert "/us-west-2/s3/aws4_request" in dict(request.headers)["authorization"]
    assert access.url == f"https://{host}"  # where doctor looks


def test_the_partition_has_its_own_domain() -> None:
    arn = ARN.replace("aws:s3:us-west-2", "aws-cn:s3:cn-north-1")
    host = "data-123456789012.s3-accesspoint.cn-north-1.amazonaws.com.cn"
    assert Access(S3Settings(arn)).url == f"https://{host}"


def test_an_access_point_is_refused_at_another_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"source": f"s3://{ARN}", "mountpoint": "/mnt", "endpoint_url": "https://minio"}
    with pytest.raises(SettingsError, match="endpoint_url: an access point's ARN"):
        build({name: RawValue(text, name) for name, text in texts.items()})
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://minio")
    with pytest.raises(AttemptError, match="another one is configured"):
        Access(S3Settings(ARN))


@states("Directory buckets (S3 Express One Zone) cannot be mounted.")
def test_directory_buckets_are_refused() -> None:
    for bucket in ("data--usw2-az1--x-s3", "access-point--usw2-az1--xa-s3"):
        with pytest.raises(AttemptError, match="directory buckets"):
            Access(S3Settings(bucket, region="us-west-2"))
    # Another store may give such names to its buckets.
    assert Access(S3Settings("data--x-s3", endpoint_url="https://minio")) is not None
