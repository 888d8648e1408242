"""The two S3 clients of a store, made from one set of settings and credentials.

Making them imports boto3 and may ask an identity service for credentials: it
blocks, for half a second and more.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from fusefs.store.direct import Direct, unsigned_body
from fusefs.store.errors import NO_CREDENTIALS, Failure, StoreError
from fusefs.store.lister import Lister
from fusefs.store.stream import AttemptError

if TYPE_CHECKING:
    import boto3
    from botocore.credentials import Credentials
    from obstore.store import S3Store as ObjectStore

DEFAULT_REGION = "us-east-1"
# How long obstore may keep credentials. It asks again five minutes before the
# end (at each request, if that is nearer); boto3 renews temporary ones at least
# ten minutes before they expire.
ASK_AGAIN = timedelta(minutes=10)
# Credentials that stay the same until somebody changes them.
_STATIC = ("env", "shared-credentials-file", "config-file", "explicit")


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Which bucket, where, as whom, and how patiently. No secret is a setting."""

    bucket: str
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    anonymous: bool = False
    addressing: str = "auto"
    max_connections: int = 32
    retry_time_s: float = 60.0
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 20.0
    ca_bundle: str | None = None
    requester_pays: bool = False
    part_size: int = 8 << 20


class Clients:
    """`s3` is boto3's client, `objects` obstore's, `lister` does the LISTs.

    `direct` sends what there is much of through the connections of `s3`.

    `request` goes with every call of `s3`. `is_confined` says that `objects` is not to be used.
    """

    def __init__(self, settings: S3Settings) -> None:
        """Find the credentials and make the clients. Blocks.

        Raises:
            AttemptError: there are no credentials, or they can't be used.
        """
        self._settings = settings
        session = self._session()
        self._credentials: Credentials | None = None
        if not settings.anonymous:
            self._credentials = session.get_credentials()
            if self._credentials is None:
                raise AttemptError(NO_CREDENTIALS)
        self.request: dict[str, Any] = {"Bucket": settings.bucket}
        if settings.requester_pays:
            self.request["RequestPayer"] = "requester"
        self.s3 = self._make_s3(session)
        self.direct = Direct(self.s3, self._credentials)
        self.lister = Lister(self.s3, self.direct, self.request)
        self.principal = self._name_principal(session)
        self.is_confined = self._is_confined()
        self.objects = self._make_objects(session)

    def _session(self) -> boto3.Session:
        import boto3

        # boto3 knows AWS_DEFAULT_REGION alone, other programs for AWS know this name too.
        region = self._settings.region or os.environ.get("AWS_REGION")
        return boto3.Session(profile_name=self._settings.profile, region_name=region)

    def has_other_credentials(self) -> bool:
        """Whether boto3 would find other credentials now. Blocks, and may ask for them far away."""
        found, known = self._session().get_credentials(), self._credentials
        if found is None or known is None:
            return False
        return bool(found.get_frozen_credentials() != known.get_frozen_credentials())

    def _make_s3(self, session: boto3.Session) -> Any:
        from botocore import UNSIGNED
        from botocore.config import Config

        settings = self._settings
        # Without these, botocore checksums what need not be checksummed.
        quiet: dict[str, Any] = {
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "parameter_validation": False,
        }
        if settings.anonymous:
            quiet["signature_version"] = UNSIGNED
        addressing = settings.addressing
        if addressing == "auto" and settings.endpoint_url is not None:
            addressing = "path"
        config = Config(
            max_pool_connections=settings.max_connections,
            connect_timeout=settings.connect_timeout_s,
            read_timeout=settings.read_timeout_s,
            retries={"total_max_attempts": 1, "mode": "standard"},
            s3=cast(Any, {"addressing_style": addressing}),
            user_agent_extra="fusefs",
            **quiet,
        )
        client = session.client(
            "s3",
            endpoint_url=settings.endpoint_url,
            region_name=session.region_name or DEFAULT_REGION,
            verify=settings.ca_bundle,
            config=config,
        )
        for operation in ("PutObject", "UploadPart"):
            client.meta.events.register(f"before-sign.s3.{operation}", _leave_body_unsigned)
        return client

    def _make_objects(self, session: boto3.Session) -> ObjectStore:
        from obstore.store import S3Store as ObjectStore

        settings = self._settings
        endpoint = self._custom_endpoint()
        is_path = settings.addressing == "path" or (
            settings.addressing == "auto" and (endpoint is not None or "." in settings.bucket)
        )
        options: dict[str, Any] = {
            "connect_timeout": timedelta(seconds=settings.connect_timeout_s),
            "read_timeout": timedelta(seconds=settings.read_timeout_s),
            # An object may take hours; what must not take long is each read of it.
            "timeout": timedelta(days=1),
            "allow_http": endpoint is not None and endpoint.startswith("http://"),
        }
        ca_bundle = self._ca_bundle(session)
        if ca_bundle is not None:
            options["root_certificate"] = _read_certificates(ca_bundle)
        config: dict[str, Any] = {
            "region": self._bucket_region() or session.region_name or DEFAULT_REGION,
            "virtual_hosted_style_request": not is_path,
            # Costs nothing: the signature needs this hash as well.
            "checksum_algorithm": "SHA256",
        }
        if settings.requester_pays:
            config["request_payer"] = True
        if endpoint is not None:
            parts = urlsplit(endpoint)
            config["endpoint"] = (
                endpoint if is_path else f"{parts.scheme}://{settings.bucket}.{parts.netloc}"
            )
        if settings.anonymous:
            config["skip_signature"] = True
        else:
            config["credential_provider"] = self._provide_credentials
        return ObjectStore(
            settings.bucket,
            client_options=cast(Any, options),
            retry_config={"max_retries": 0},
            **config,
        )

    def _ca_bundle(self, session: boto3.Session) -> str | None:
        """The certificates to trust: ours, else those that boto3 is told to."""
        told = session._session.get_config_variable("ca_bundle")
        return self._settings.ca_bundle or told or os.environ.get("REQUESTS_CA_BUNDLE")

    def _provide_credentials(self) -> dict[str, Any]:
        """What obstore signs with; it asks again when they expire."""
        assert self._credentials is not None
        current = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": current.access_key,
            "secret_access_key": current.secret_key,
            "token": current.token,
            "expires_at": datetime.now(UTC) + ASK_AGAIN,
        }

    def _custom_endpoint(self) -> str | None:
        """The endpoint if it is not AWS's own; boto3 also takes it from its configuration."""
        endpoint = self.s3.meta.endpoint_url
        host = urlsplit(endpoint).hostname or ""
        is_aws = host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
        return None if is_aws else endpoint

    def _is_confined(self) -> bool:
        """Whether a redirect could take a session token to another host.

        obstore follows redirects, and takes off the signature but not the
        token; it has no setting for that. AWS sends nobody elsewhere; any
        other server might. boto3's connections follow none.
        """
        credentials = self._credentials
        has_token = credentials is not None and credentials.get_frozen_credentials().token
        return bool(has_token) and self._custom_endpoint() is not None

    def _bucket_region(self) -> str | None:
        """Where the bucket is, as S3 tells in the headers of any answer."""
        if self._settings.region is not None or self._custom_endpoint() is not None:
            return None
        answer = self.s3.list_objects_v2(**self.request, MaxKeys=1)
        region = answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region")
        return str(region) if region else None

    def _name_principal(self, session: boto3.Session) -> str:
        if self._credentials is None:
            return "anonymous"
        method = self._credentials.method
        current = self._credentials.get_frozen_credentials()
        if method in _STATIC and not current.token:
            return f"key {current.access_key}"
        # Temporary keys change; what they are derived from does not.
        role = os.environ.get("AWS_ROLE_ARN", "")
        return f"{method} {session.profile_name} {role} uid {os.geteuid()}"


def _leave_body_unsigned(request: Any, **_: Any) -> None:
    """S3 compares the checksum that goes with each body, and the signature covers that."""
    request.context.update(unsigned_body())


def _read_certificates(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        sentence = f"the CA bundle {path} can't be read: {error.strerror}"
        raise AttemptError(Failure(StoreError, sentence)) from error
