"""Access points, directory buckets: where their requests go, and what is refused."""

import pytest

from fusefs.settings.types import MountSource, parse_source
from fusefs.store.errors import UnsupportedError
from fusefs.store.s3.access import Access
from fusefs.store.s3.list import list_call
from fusefs.store.s3.settings import S3Settings
from tests.support.semantics import states


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@states("The alias of an access point may stand for the bucket.")
def test_an_access_point_is_mounted_by_its_alias() -> None:
    alias = "data-a1b2c3-s3alias"
    assert parse_source(f"s3://{alias}/x") == MountSource(alias, "x/")
    request = Access(S3Settings(alias, region="us-west-2")).address.request(
        list_call("", "", "", 1), None
    )
    assert request.url.startswith(f"https://{alias}.s3.us-west-2.amazonaws.com/?")


def test_an_arn_is_refused() -> None:
    with pytest.raises(ValueError, match="an access point has its alias"):
        parse_source("s3://arn:aws:s3:us-west-2:123456789012:accesspoint/data/x")


@states("Directory buckets (S3 Express One Zone) cannot be mounted.")
def test_directory_buckets_are_refused() -> None:
    for bucket in ("data--usw2-az1--x-s3", "access-point--usw2-az1--xa-s3"):
        with pytest.raises(UnsupportedError, match="directory buckets"):
            Access(S3Settings(bucket, region="us-west-2"))
    # Another store may give such names to its buckets.
    assert Access(S3Settings("data--x-s3", endpoint_url="https://minio")) is not None
