"""Access to one bucket: the credentials, and the address to which requests go.

botocore finds both, in the ways that users of AWS's tools expect; it sends no request to the
bucket. Importing it, or asking an identity service, blocks for half a second and more. So it is not
imported if everything is known without it: the endpoint is configured, AWS's configuration files do
not exist, and no environment variable changes how requests are made.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

import trio

from fusefs.store.engine.engine import Route
from fusefs.store.errors import NoCredentialsError, SilentSourceError, StoreError, translate
from fusefs.store.http import proxies, redirects, trust
from fusefs.store.http.server_clock import ServerClock
from fusefs.store.http.sigv4 import Signer
from fusefs.store.s3.address import Address
from fusefs.store.s3.settings import S3Settings, customer_key_obstacle, obstacle

if TYPE_CHECKING:
    from botocore.credentials import Credentials, ReadOnlyCredentials
    from botocore.session import Session as BotocoreSession

logger = logging.getLogger("fusefs.store")

T = TypeVar("T")

DEFAULT_REGION = "us-east-1"
_KEYS = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
# Variables that only provide credentials, or that this module evaluates itself.
_KNOWN_VARIABLES = re.compile(
    "AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|REGION|DEFAULT_REGION|CA_BUNDLE|CONFIG_FILE"
    "|SHARED_CREDENTIALS_FILE|EC2_METADATA_DISABLED|ROLE_ARN|ROLE_SESSION_NAME"
    "|WEB_IDENTITY_TOKEN_FILE|STS_REGIONAL_ENDPOINTS|ENDPOINT_URL_STS)"
)
# The keys of a profile in AWS's files that only provide credentials or that this module evaluates.
_KNOWN_IN_PROFILE = re.compile("aws_(access_key_id|secret_access_key|session_token)|region|output")
_FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}
RECONNECT_EVERY_S = 2.0
# Limit for providers of credentials: a keeper ends a mount that is silent for 30 s at its start.
SOURCE_LIMIT_S = 20.0
# In the last LAST_S seconds of the credentials' validity, requests wait for new ones. AGAIN_S is
# the time between two renewals.
LAST_S = 60
AGAIN_S = 30.0
# Credentials that stay the same until an administrator changes them.
_STATIC = ("env", "shared-credentials-file", "config-file", "explicit")
_SCOPE = re.compile(r"AWS4-HMAC-SHA256 Credential=[^/]+/\d+/([^/]+)/([^/]+)/aws4_request")


class Access:
    """The credentials and address of requests to one bucket; `renew` changes only `keys`."""

    def __init__(self, settings: S3Settings, clock: ServerClock | None = None) -> None:
        """Find the credentials and the address. Blocks.

        Raises:
            StoreError: there are no credentials; or the credentials, the bucket, or the configured
                certificates or proxies can't be used.
        """
        self._settings = settings
        self.clock = clock or ServerClock()
        self._session: BotocoreSession | None = None  # None if not needed
        is_plain = _is_plain(settings, os.environ)
        # Keys in the environment have precedence over all others, in botocore as well.
        is_found = settings.anonymous or {name for name, key in os.environ.items() if key} >= _KEYS
        is_found = is_found and settings.profile is None and not _has_files(os.environ)
        if is_plain and (is_found or settings.keys is not None):
            configured = os.environ.get("AWS_CA_BUNDLE")
        else:
            self._session = _session_for(settings)
            profile = self._session.get_scoped_config()
            is_plain = is_plain and all(map(_KNOWN_IN_PROFILE.fullmatch, profile))
            configured = self._session.get_config_variable("ca_bundle")
        self._trust = self._find_trust(configured)
        if self._session is not None and settings.ca_bundle is None and self._trust is not None:
            # The providers of credentials trust the same certificates.
            self._session.set_config_variable("ca_bundle", self._trust.path)
        self.credentials: Credentials | None = None
        if not settings.anonymous:
            self.credentials = self._find_credentials()
            if self.credentials is None:
                raise NoCredentialsError
        # The keys that sign requests; None for unsigned requests.
        self.keys: ReadOnlyCredentials | None = None
        self.renew()
        # The region of the signatures. If S3 names another one, requests are signed for that.
        self.region = ""
        self.address = self._plain_address() if is_plain else self._botocores_address()
        self.principal = self._name_of_credentials()
        if settings.customer_key is not None:
            error = customer_key_obstacle(self.url, self.address.route.proxy)
            if error is not None:
                raise error
            # Content decrypted with a key is only for identities that have the key.
            self.principal += f" customer key {settings.customer_key.identity}"

    @property
    def url(self) -> str:
        """The URL of the server to which requests about the bucket's objects go."""
        return self.address.origin

    @property
    def name(self) -> str:
        """The identity as shown to people: the access key, or the provider of the credentials."""
        return self.principal.removesuffix(f" uid {os.geteuid()}")

    def ends_in(self, seconds: int | None = None) -> bool:
        """True if the credentials expire within `seconds` (None: botocore's limit, 15 minutes)."""
        needs_refresh = getattr(self.credentials, "refresh_needed", None)
        return needs_refresh is not None and bool(needs_refresh(seconds))

    def renew(self) -> None:
        """Set `keys` from the credentials, which botocore renews first if need be. Blocks.

        Raises:
            Exception: any exception that botocore raises if it gets no new keys.
        """
        if self.credentials is not None:
            self.keys = self.credentials.get_frozen_credentials()

    def has_other_credentials(self) -> bool:
        """True if botocore would now find other credentials. Blocks; may ask a remote service."""
        if isinstance(self.credentials, EnvironmentKeys):
            return False  # the environment stays as it is
        found = _session_for(self._settings).get_credentials()
        return found is not None and bool(found.get_frozen_credentials() != self.keys)

    def _find_trust(self, configured: str | None) -> trust.Trust | None:
        bundle, url = self._settings.ca_bundle, self._settings.endpoint_url
        try:
            return trust.find(bundle, os.environ, configured)
        except StoreError:
            # Without TLS, a missing file that the environment names does not matter.
            if bundle is None and url is not None and url.startswith("http:"):
                return None
            raise

    def _find_credentials(self) -> Credentials | None:
        if self._session is None or self._settings.keys is not None:
            return cast("Credentials", EnvironmentKeys.of(self._settings.keys or os.environ))
        return self._session.get_credentials()

    def _name_of_credentials(self) -> str:
        if self.credentials is None or self.keys is None:
            return "anonymous"
        method = self.credentials.method
        if method in _STATIC and not self.keys.token:
            return f"key {self.keys.access_key}"
        # Temporary keys change; their source (profile, role) does not.
        role = os.environ.get("AWS_ROLE_ARN", "")
        profile = (self._session.profile if self._session is not None else None) or "default"
        return f"{method} {profile} {role} uid {os.geteuid()}"

    def _plain_address(self) -> Address:
        """Return the address for the configured endpoint with the bucket in the path."""
        assert self._settings.endpoint_url is not None
        variables = (os.environ.get("AWS_REGION"), os.environ.get("AWS_DEFAULT_REGION"))
        region = self._settings.region or next(filter(None, variables), DEFAULT_REGION)
        if self._session is not None:
            region = _region_of(self._session)
        signer = None if self.credentials is None else Signer(region, "s3", self.clock)
        url = f"{self._settings.endpoint_url.rstrip('/')}/{self._settings.bucket}"
        return self._address(url, region, signer)

    def _botocores_address(self) -> Address:
        """Return the address to which botocore would send a LIST; that request is never sent."""
        from botocore.awsrequest import AWSResponse

        sent: list[Any] = []
        no_body = cast(Any, SimpleNamespace(stream=list))

        def keep(request: Any, **_: Any) -> Any:
            sent.append(request)
            return AWSResponse(request.url, 204, cast(Any, {}), no_body)

        client = self._botocores_client()
        error = obstacle(self._settings.bucket, is_aws=redirects.is_aws(client.meta.endpoint_url))
        if error is not None:
            raise error
        client.meta.events.register_first("before-send.s3", keep)
        client.list_objects_v2(Bucket=self._settings.bucket)
        (request,) = sent
        header = request.headers.get("authorization", "")
        text = header.decode("latin-1") if isinstance(header, bytes) else header
        scope, signer = _SCOPE.match(text), None
        region = client.meta.region_name
        client.close()
        if scope is not None:
            region, signer = scope[1], Signer(scope[1], scope[2], self.clock)
        elif self.credentials is not None:
            raise StoreError("the bucket's requests are signed in an unknown way")
        return self._address(request.url, region, signer)

    def _botocores_client(self) -> Any:
        from botocore import UNSIGNED
        from botocore.config import Config

        session, settings = self._session, self._settings
        assert session is not None
        # The AWS configuration's values apply where the settings have none.
        chosen: dict[str, Any] = {
            "ignore_configured_endpoint_urls": settings.ignores_configured_endpoints or None,
            "signature_version": UNSIGNED if settings.anonymous else None,
            "use_fips_endpoint": settings.fips or None,
            "use_dualstack_endpoint": settings.dual_stack or None,
        }
        addressing = settings.addressing
        if addressing == "auto" and settings.endpoint_url is not None:
            addressing = "path"
        config = Config(
            retries={"total_max_attempts": 1, "mode": "standard"},
            proxies={},
            s3=cast(Any, {"addressing_style": addressing}),
            **{name: value for name, value in chosen.items() if value is not None},
        )
        region, url = _region_of(session), settings.endpoint_url
        return session.create_client("s3", endpoint_url=url, region_name=region, config=config)

    def _address(self, url: str, region: str, signer: Signer | None) -> Address:
        self.region = region
        proxy = proxies.choose(url, os.environ)
        needs_trust = url.startswith("https:") or (proxy or "").startswith("https:")
        ca_file = self._trust.path if needs_trust and self._trust is not None else None
        return Address(url, self._settings, signer, Route(proxy, ca_file))


class SharedCall:
    """Runs one blocking call at a time in a thread, for all tasks that wait. For the event loop."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._failure: StoreError | None = None  # of the last call
        self._ended: trio.Event | None = None  # of the running call

    @property
    def is_under_way(self) -> bool:
        return self._ended is not None

    async def wait(self, work: Callable[[], T], accept: Callable[[T], None]) -> None:
        """Wait for the running call's end; if no call is running, start `work` in a thread.

        `accept` gets the result of `work`, even if the wait was cancelled or timed out before.

        Raises:
            StoreError: the call failed, or did not end in time.
        """
        ended = self._ended
        if ended is None:
            ended = self._ended = trio.Event()
            self._nursery.start_soon(self._run, work, accept)
        with trio.move_on_after(SOURCE_LIMIT_S) as waiting:
            await ended.wait()
        if waiting.cancelled_caught:
            raise SilentSourceError
        if self._failure is not None:
            raise replace(self._failure)

    async def _run(self, work: Callable[[], T], accept: Callable[[T], None]) -> None:
        failure = None
        try:
            accept(await trio.to_thread.run_sync(work, abandon_on_cancel=True))
        except RuntimeError as error:  # the system starts no thread
            failure = StoreError(f"no thread for S3: {error}", is_retryable=True)
        except Exception as error:  # each provider of credentials has its own
            failure = translate(error)
        finally:
            assert self._ended is not None
            self._ended.set()
            self._failure, self._ended = failure, None


class AccessSource:
    """One store's access, renewed after a refusal. Belongs to the event loop.

    `access` is None at first and after a refusal, until `connect` finds it. `principal`, a stable
    name of the identity without a secret, is set when `connect` first succeeds. Requests under way
    keep a replaced access.
    """

    def __init__(self, settings: S3Settings, nursery: trio.Nursery) -> None:
        """`nursery` runs the calls in threads, which outlast the tasks that wait for them."""
        self._settings = settings
        self._nursery = nursery
        self.access: Access | None = None
        self.principal: str | None = None
        self._clock = ServerClock()
        self._connecting, self._looking, self._renewing = (SharedCall(nursery) for _ in range(3))
        self._connected, self._next_renewal = 0.0, -math.inf

    async def connect(self) -> Access:
        """Return the bucket's `Access` with valid credentials; find or renew them first if need be.

        Raises:
            StoreError: there are no credentials, they can't be used, or their provider does not
                answer in time.
        """
        access = self.access
        try:
            while self.access is None:
                work = partial(Access, self._settings, self._clock)
                await self._connecting.wait(work, self._take)
            access = self.access
            if access.ends_in(LAST_S):
                await self._renewing.wait(access.renew, lambda _: None)
            elif access.ends_in() and time.monotonic() >= self._next_renewal:
                # botocore would make one request wait for the renewal, and in the last ten minutes
                # all requests, which then fail with it although their credentials are valid.
                self._next_renewal = time.monotonic() + AGAIN_S
                self._nursery.start_soon(self._renew, access)
        except (NoCredentialsError, SilentSourceError) as error:
            if isinstance(error, SilentSourceError) and self.access is access:
                # The renewal may never end: the next request looks for the credentials anew.
                self.access, self._renewing = None, SharedCall(self._nursery)
            if self.principal is not None:
                # There were credentials before: the provider is silent, or the file is rewritten.
                raise replace(error, is_retryable=True) from error
            raise
        return access

    async def _renew(self, access: Access) -> None:
        try:
            await self._renewing.wait(access.renew, lambda _: None)
        except StoreError as error:
            logger.warning("the credentials are not renewed yet: %s", error)

    def _take(self, access: Access) -> None:
        self.access = access
        self.principal = self.principal or access.principal
        self._connected = time.monotonic()

    def renew(self) -> None:
        """Drop the expired `access` unless it was just found, so that `connect` finds another."""
        if self.access is not None and time.monotonic() - self._connected >= RECONNECT_EVERY_S:
            self.access = None

    async def has_renewed(self, used: Access | None) -> bool:
        """Look for other credentials than `used`, refused by S3; True if a retry may use others."""
        current = self.access
        if used is not None and used is not current:
            return True
        if current is None:
            return False
        if not self._looking.is_under_way:
            now = time.monotonic()
            if now - self._connected < RECONNECT_EVERY_S:
                return False
            self._connected = now

        def accept(has_others: bool) -> None:
            if has_others and self.access is current:
                self.access = None

        try:
            await self._looking.wait(current.has_other_credentials, accept)
        except StoreError as error:
            logger.info("no other credentials: %s", error)
        return self.access is not current

    def relocate(self, region: str, used: Access | None) -> bool:
        """Switch to the bucket's `region`, which S3 named; False if `used` was for that region."""
        used = used or self.access
        if used is None or region == used.region:
            return False
        if self.access is used:
            logger.info("s3://%s is in the region %s", self._settings.bucket, region)
            self._settings = replace(self._settings, region=region)
            self.access = None
        return True


# --- access without botocore ----------------------------------------------------


class EnvironmentKeys(NamedTuple):
    """Access keys from environment variables, with the interface of botocore's Credentials."""

    access_key: str
    secret_key: str
    token: str | None
    method: str = "env"

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> EnvironmentKeys:
        token = environment.get("AWS_SESSION_TOKEN") or None
        return cls(environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"], token)

    def get_frozen_credentials(self) -> EnvironmentKeys:
        return self


def _is_plain(settings: S3Settings, environment: Mapping[str, str]) -> bool:
    """True if requests certainly go to the configured endpoint, with the bucket in the path."""
    url, is_special = settings.endpoint_url, settings.fips or settings.dual_stack
    if url is None or is_special or settings.addressing == "virtual" or redirects.is_aws(url):
        return False
    address = urlsplit(url)
    if address.path.strip("/") or address.query or "@" in address.netloc:
        return False
    named = (name for name in environment if name.startswith("AWS_"))
    return all(map(_KNOWN_VARIABLES.fullmatch, named))


def _has_files(environment: Mapping[str, str]) -> bool:
    """True if one of AWS's configuration files exists, which botocore would read."""
    for variable, usual in _FILES.items():
        path = environment.get(variable) or os.path.expanduser(usual)
        if path != os.devnull and os.path.exists(path):
            return True
    return False


# --- botocore -------------------------------------------------------------------


def _region_of(session: BotocoreSession) -> str:
    return session.get_config_variable("region") or DEFAULT_REGION


def _session_for(settings: S3Settings) -> BotocoreSession:
    """Return a botocore session whose clients have the same time-outs for credentials as for S3.

    By default botocore waits a minute, five times, and all requests wait for the credentials.
    """
    from botocore.config import Config
    from botocore.session import Session

    session = Session(profile=settings.profile)
    # botocore reads only AWS_DEFAULT_REGION; other programs for AWS read this name too.
    region = settings.region or os.environ.get("AWS_REGION")
    if region:
        session.set_config_variable("region", region)
    if settings.keys is not None:
        session.set_credentials(*EnvironmentKeys.of(settings.keys)[:3])
    session.set_default_client_config(
        Config(
            connect_timeout=settings.connect_timeout_s,
            read_timeout=settings.read_timeout_s,
            retries={"total_max_attempts": 3, "mode": "standard"},
        )
    )
    return session
