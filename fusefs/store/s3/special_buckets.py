"""Buckets that are not reached as others are: access points by ARN, and directory buckets.

An access point has a host name of its own, and requests are signed for its region
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/access-points-naming.html). Its alias, in
contrast, is used as a bucket's name. Directory buckets (S3 Express One Zone) are refused: their
requests are signed with credentials of sessions (CreateSession), which nothing here makes.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from fusefs.store.errors import Failure, MisconfiguredError, UnsupportedError

# AWS gives no other bucket, and no other access point, a name with one of these ends.
DIRECTORY_BUCKETS = ("--x-s3", "--xa-s3")


@dataclass(frozen=True, slots=True)
class AccessPoint:
    """The parts of `arn:aws:s3:REGION:ACCOUNT:accesspoint/NAME`."""

    partition: str
    region: str
    account: str
    name: str

    @classmethod
    def parse(cls, bucket: str) -> AccessPoint | None:
        """The access point that stands for a bucket; None if it is a bucket's name."""
        if not bucket.startswith("arn:"):
            return None
        _, partition, _, region, account, resource = bucket.split(":", 5)
        return cls(partition, region, account, resource.partition("/")[2])

    def url(self, *, fips: bool, dual_stack: bool) -> str:
        """The URL to which requests about its objects go."""
        service = "s3-accesspoint" + ("-fips" if fips else "") + (".dualstack" * dual_stack)
        domain = "amazonaws.com.cn" if self.partition == "aws-cn" else "amazonaws.com"
        return f"https://{self.name}-{self.account}.{service}.{self.region}.{domain}"


def obstacle(bucket: str, *, is_aws: bool) -> Failure | None:
    """The reason why a bucket cannot be mounted, whatever it holds."""
    if is_aws and bucket.endswith(DIRECTORY_BUCKETS):
        sentence = "directory buckets (S3 Express One Zone) take sessions, which mounts do not make"
        return Failure(UnsupportedError, sentence)
    if not is_aws and bucket.startswith("arn:"):
        sentence = "an access point's ARN is for AWS's own endpoints, and another one is configured"
        return Failure(UnsupportedError, sentence)
    return None


def customer_key_obstacle(url: str, proxy: str | None) -> Failure | None:
    """The reason why a customer key must not go to an endpoint: it could be read on the way."""
    address = urlsplit(url)
    if address.scheme == "https" or (proxy is None and _is_loopback(address.hostname or "")):
        return None
    return Failure(MisconfiguredError, f"a customer key is sent over TLS alone, and {url} has none")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
