"""The two S3 clients of a store, made from one set of settings and credentials.

Making them imports boto3 and may ask an identity service for credentials: it
blocks, for half a second and more.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import trio

from fusefs.store import many_deletes, renewal
from fusefs.store.customer_key import CustomerKey
from fusefs.store.errors import (
    NO_CREDENTIALS,
    SILENT_SOURCE,
    AttemptError,
    UnreachableError,
    translate,
)
from fusefs.store.http import proxies, redirects, trust
from fusefs.store.http.client import HttpClient, unsigned_body
from fusefs.store.http.pool import Network
from fusefs.store.http.server_clock import ServerClock
from fusefs.store.http.threads import SharedCall
from fusefs.store.s3 import list_parser, plain
from fusefs.store.s3.list import Lister
from fusefs.store.s3.plain import DEFAULT_REGION, LazyClient
from fusefs.store.s3.special_buckets import AccessPoint, customer_key_obstacle, obstacle
from fusefs.store.s3.write_options import NO_OPTIONS, WriteOptions

if TYPE_CHECKING:
    import boto3
    from botocore.credentials import Credentials
    from botocore.loaders import Loader
    from botocore.session import Session as BotocoreSession
    from obstore.store import S3Store as ObjectStore

logger = logging.getLogger("fusefs.store")

# How long obstore may keep credentials. It asks again five minutes before the
# end, or at each request if that is nearer, as with those that expire sooner than this.
ASK_AGAIN = timedelta(minutes=10)
RECONNECT_EVERY_S = 2.0
# For what gives out credentials at a mount's start, which a keeper ends after 30 s of silence.
SOURCE_LIMIT_S = 20.0
# Up to so many, their time is what limits a first read over TLS.
FEW_PROCESSORS = 4
# Credentials that stay the same until an administrator changes them.
_STATIC = ("env", "shared-credentials-file", "config-file", "explicit")


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Which bucket, where, as whom, and how patiently.

    `keys` are fixed ones, by the names that the environment has for them, instead of those
    that boto3 would find. They and `customer_key` are secrets, and do not show themselves.
    """

    bucket: str
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    keys: Mapping[str, str] | None = field(default=None, repr=False)
    anonymous: bool = False
    addressing: str = "auto"
    max_connections: int = 32
    max_streams: int = 32
    retry_time_s: float = 60.0
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 20.0
    ca_bundle: str | None = None
    requester_pays: bool = False
    write_options: WriteOptions = NO_OPTIONS
    customer_key: CustomerKey | None = None
    fips: bool = False
    dual_stack: bool = False
    part_size: int = 8 << 20


@dataclass(slots=True)
class ObstoreRefusals:
    """Why obstore can't be used, as far as was seen; outlives clients with old credentials."""

    known: set[str] = field(default_factory=set)


class Clients:
    """`s3` is boto3's client, `objects` obstore's, `lister` does the LISTs.

    `direct` sends what there is much of through the connections of `s3`.

    `s3` may be made at its first use (plain.py). `request` goes with every call of it.
    `is_confined` says that `objects` is not to be used.
    """

    def __init__(
        self,
        settings: S3Settings,
        refusals: ObstoreRefusals | None = None,
        clock: ServerClock | None = None,
    ) -> None:
        """Find the credentials and make the clients. Blocks.

        Raises:
            AttemptError: there are no credentials, or they can't be used.
            StoreError: certificates or proxies that were named can't be used.
        """
        self._settings = settings
        self._refusals = refusals or ObstoreRefusals()
        self._clock = clock or ServerClock()
        self._proxies = proxies.Proxies.of(os.environ)
        self._processors = len(os.sched_getaffinity(0))
        self._core: BotocoreSession | None = None
        self._session: boto3.Session | None = None
        is_plain = plain.is_plain_endpoint(settings.endpoint_url, settings.addressing, os.environ)
        self._access_point = AccessPoint.parse(settings.bucket)
        is_special = self._access_point is not None or settings.fips or settings.dual_stack
        is_plain = is_plain and not is_special
        is_found = settings.anonymous or plain.has_keys(os.environ)
        is_found = is_found and settings.profile is None and not plain.has_files(os.environ)
        if is_plain and (is_found or settings.keys is not None):
            configured = os.environ.get("AWS_CA_BUNDLE")
        else:
            core, _ = self._sessions()
            is_plain = is_plain and plain.is_plain_profile(core.get_scoped_config())
            configured = core.get_config_variable("ca_bundle")
        self._trust = trust.find_for(settings.endpoint_url, settings.ca_bundle, configured)
        if self._core is not None:
            self._trust_alike(self._core)
        self._network = Network(
            self._proxies,
            self._trust.path if self._trust else None,
            settings.connect_timeout_s,
            settings.read_timeout_s,
            settings.max_connections,
        )
        self._credentials: Credentials | None = None
        if not settings.anonymous:
            self._credentials = self._find_credentials()
            if self._credentials is None:
                raise AttemptError(NO_CREDENTIALS)
        self.request: dict[str, Any] = {"Bucket": settings.bucket}
        if settings.requester_pays:
            self.request["RequestPayer"] = "requester"
        headers = settings.write_options.headers()
        self.direct = HttpClient(
            self._credentials, self._network, headers, settings.customer_key, self._clock
        )
        self.s3: Any
        if is_plain and self._begin_plainly():
            assert settings.endpoint_url is not None
            self.s3 = LazyClient(self._make_s3)
            self._endpoint_url = settings.endpoint_url
        else:
            self.s3 = self._make_s3()
            self._endpoint_url = self.s3.meta.endpoint_url
        self._refuse_place()
        self.lister = Lister(self.s3, self.direct, self.request)
        self.principal = self._name_principal()
        # obstore has no way of sending a customer key with every request.
        has_key = settings.customer_key is not None
        self.is_confined = bool(self._refusals.known) or has_key or self._is_confined()
        self.objects = self._make_objects() if self.uses_obstore else None

    def _refuse_place(self) -> None:
        """See whether the bucket can be used at this endpoint.

        Raises:
            AttemptError: it can't.
        """
        is_aws = redirects.is_aws(self._endpoint_url)
        failure = obstacle(self._settings.bucket, is_aws=is_aws)
        if failure is None and self._settings.customer_key is not None:
            proxy = self._proxies.choose(self._endpoint_url)
            failure = customer_key_obstacle(self._endpoint_url, proxy)
        if failure is not None:
            raise AttemptError(failure)

    @property
    def credentials(self) -> Credentials | None:
        """What requests are signed with; None if they are not."""
        return self._credentials

    @property
    def network(self) -> Network:
        """The proxies, certificates and time-outs of all connections."""
        return self._network

    @property
    def url(self) -> str:
        """The URL to which requests about the bucket's objects go."""
        return self._bucket_url(self._endpoint_url)

    def _sessions(self) -> tuple[BotocoreSession, boto3.Session]:
        """botocore's session and boto3's above it, which are made if need be."""
        if self._core is None or self._session is None:
            self._core = _core_session(self._settings)
            if self._settings.keys is not None:
                self._core.set_credentials(*plain.EnvironmentKeys(self._settings.keys).frozen)
            self._session = self._session_over(self._core)
        return self._core, self._session

    def _trust_alike(self, core: BotocoreSession) -> None:
        if self._settings.ca_bundle is None and self._trust is not None:
            # For those that give out credentials, too.
            core.set_config_variable("ca_bundle", self._trust.path)

    def _find_credentials(self) -> Credentials | None:
        if self._session is None or self._settings.keys is not None:
            return cast("Credentials", plain.EnvironmentKeys(self._settings.keys or os.environ))
        return self._session.get_credentials()

    def _begin_plainly(self) -> bool:
        """Send requests without botocore from the first on; False if that can't be."""
        settings = self._settings
        assert settings.endpoint_url is not None
        headers = {"user-agent": "fusefs"}
        if settings.requester_pays:
            headers["x-amz-request-payer"] = "requester"
        return self.direct.begin(settings.endpoint_url, settings.bucket, self._region, headers)

    @property
    def _region(self) -> str:
        """The region that is configured, or the usual one."""
        if self._session is not None:
            return self._session.region_name or DEFAULT_REGION
        variables = (os.environ.get("AWS_REGION"), os.environ.get("AWS_DEFAULT_REGION"))
        return self._settings.region or next(filter(None, variables), DEFAULT_REGION)

    def _session_over(self, core: BotocoreSession) -> boto3.Session:
        import boto3

        # boto3 knows AWS_DEFAULT_REGION alone, other programs for AWS know this name too.
        region = self._settings.region or os.environ.get("AWS_REGION")
        session = boto3.Session(
            profile_name=self._settings.profile, region_name=region, botocore_session=core
        )
        provider = core.get_component("credential_provider")
        core.register_component("credential_provider", renewal.RenewingProvider(provider))
        return session

    def has_other_credentials(self) -> bool:
        """Whether boto3 would find other credentials now. Blocks, and may ask for them far away."""
        if isinstance(self._credentials, plain.EnvironmentKeys):
            return False  # the environment stays as it is
        session = self._session_over(_core_session(self._settings))
        found, known = session.get_credentials(), self._credentials
        if found is None or known is None:
            return False
        return bool(found.get_frozen_credentials() != known.get_frozen_credentials())

    def _make_s3(self) -> Any:
        from botocore import UNSIGNED
        from botocore.config import Config

        core, session = self._sessions()
        self._trust_alike(core)
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
        # Those of the AWS configuration count where the settings say nothing.
        if settings.fips:
            quiet["use_fips_endpoint"] = True
        if settings.dual_stack:
            quiet["use_dualstack_endpoint"] = True
        ca_file = self._network.ca_file
        config = Config(
            max_pool_connections=settings.max_connections,
            connect_timeout=settings.connect_timeout_s,
            read_timeout=settings.read_timeout_s,
            retries={"total_max_attempts": 1, "mode": "standard"},
            s3=cast(Any, {"addressing_style": addressing}),
            user_agent_extra="fusefs",
            **quiet,
        )

        def make(parameters: dict[str, Any]) -> Any:
            return session.client(
                "s3",
                endpoint_url=settings.endpoint_url,
                region_name=session.region_name or DEFAULT_REGION,
                verify=ca_file,
                config=config.merge(Config(**parameters)),
            )

        client = proxies.make_client(make, self._proxies, ca_file, self._bucket_url)
        redirects.install(client)
        settings.write_options.install(client)
        if settings.customer_key is not None:
            settings.customer_key.install(client)
        for operation in ("PutObject", "UploadPart"):
            client.meta.events.register(f"before-sign.s3.{operation}", _leave_body_unsigned)
        many_deletes.install(client)
        list_parser.install(client)
        if not settings.anonymous:
            self._clock.install(client)
        self.direct.watch(client)
        return client

    def _make_objects(self) -> ObjectStore | None:
        """obstore's client; None, and `is_confined`, if it can't use the certificates."""
        from obstore.exceptions import BaseError
        from obstore.store import S3Store as ObjectStore

        settings = self._settings
        endpoint = self._custom_endpoint() or self._special_endpoint()
        if self._access_point is not None:
            endpoint = self.url
        options: dict[str, Any] = {
            "connect_timeout": timedelta(seconds=settings.connect_timeout_s),
            "read_timeout": timedelta(seconds=settings.read_timeout_s),
            # Of a request for 8 MiB, which may come slowly; a thread waits for it, in any case.
            "timeout": timedelta(hours=1),
            "allow_http": endpoint is not None and endpoint.startswith("http://"),
        }
        config: dict[str, Any] = {
            "region": self._bucket_region() or self._region,
            "virtual_hosted_style_request": not self._is_path_style(self._endpoint_url),
            # Costs nothing: the signature needs this hash as well.
            "checksum_algorithm": "SHA256",
        }
        if settings.requester_pays:
            config["request_payer"] = True
        url = self._bucket_url(endpoint or f"https://s3.{config['region']}.amazonaws.com")
        if endpoint is not None:
            config["endpoint"] = url
        options |= self._connecting(url)
        if settings.anonymous:
            config["skip_signature"] = True
        else:
            config["credential_provider"] = self._provide_credentials
        try:
            return ObjectStore(
                settings.bucket,
                client_options=cast(Any, options),
                retry_config={"max_retries": 0},
                **config,
            )
        except BaseError as error:
            self.confine(translate(error).sentence)
            return None

    def _is_path_style(self, endpoint: str) -> bool:
        """Whether the bucket's name goes into the path of URLs, not into the host."""
        settings = self._settings
        return settings.addressing == "path" or (
            settings.addressing == "auto"
            and (not redirects.is_aws(endpoint) or "." in settings.bucket)
        )

    def _bucket_url(self, endpoint: str) -> str:
        """The URL to which requests about the bucket's objects go."""
        if self._access_point is not None:
            settings = self._settings
            return self._access_point.url(fips=settings.fips, dual_stack=settings.dual_stack)
        if self._is_path_style(endpoint):
            return endpoint
        parts = urlsplit(endpoint)
        return f"{parts.scheme}://{self._settings.bucket}.{parts.netloc}"

    def _connecting(self, url: str) -> dict[str, Any]:
        """obstore's options for the certificates and the proxy of its URL."""
        options: dict[str, Any] = {}
        certificates = self._trust.pem() if self._trust is not None else b""
        if url.startswith("https:") and certificates:
            options["root_certificate"] = certificates
        proxy = self._proxies.choose(url)
        if proxy is not None:
            options["proxy_url"] = proxy
            if proxy.startswith("https:") and certificates:
                options["proxy_ca_certificate"] = certificates.decode("latin-1")
        elif self._proxies.http or self._proxies.https:
            # By itself it would choose one of the environment's, by rules of its own.
            host = urlsplit(url).hostname
            options |= {"proxy_url": "http://127.0.0.1:9", "proxy_excludes": host}
        return options

    def confine(self, why: str) -> None:
        """Have long reads go through boto3's connections from now on; obstore can't do them."""
        self.is_confined = True
        if why not in self._refusals.known:
            self._refusals.known.add(why)
            logger.warning(
                "s3://%s: large reads go over Python's connections, since obstore's fail: %s",
                self._settings.bucket,
                why,
            )

    @property
    def uses_obstore(self) -> bool:
        """Whether long reads go through obstore's connections: over TLS, on many processors.

        On two, obstore took twice the processor time of Python's connections for each byte.
        But it never holds the interpreter's lock, which the event loop needs as well. It signs
        with this machine's clock alone.
        """
        is_tls = self._endpoint_url.startswith("https:") and not self._clock.offset_s
        return is_tls and not self.is_confined and self._processors > FEW_PROCESSORS

    def try_objects(self, key: str) -> None:
        """See whether obstore's connections reach S3, and do without them otherwise. Blocks.

        `key` is that of the request, be it there or not.
        """
        import obstore

        assert self.objects is not None
        try:
            obstore.head(self.objects, key)
        except Exception as error:  # anything may come from its library
            self.confine_for(error)

    def confine_for(self, error: Exception) -> bool:
        """Do without obstore from now on if an error of its says that it can never connect."""
        failure = translate(error)
        never = failure.kind is UnreachableError and not failure.is_retryable
        if never and not failure.status:
            self.confine(failure.sentence)
        return self.is_confined

    def _provide_credentials(self) -> dict[str, Any]:
        """What obstore signs with; it asks again when they expire."""
        assert self._credentials is not None
        now = datetime.now(UTC)
        # Before these are taken, which may be renewed at any moment.
        ends_within = getattr(self._credentials, "refresh_needed", lambda _seconds: False)
        keeps = timedelta() if ends_within(ASK_AGAIN.total_seconds()) else ASK_AGAIN
        current = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": current.access_key,
            "secret_access_key": current.secret_key,
            "token": current.token,
            "expires_at": now + keeps,
        }

    def _custom_endpoint(self) -> str | None:
        """The endpoint if it is not AWS's own; boto3 also takes it from its configuration."""
        endpoint = self._endpoint_url
        return None if redirects.is_aws(endpoint) else endpoint

    def _special_endpoint(self) -> str | None:
        """AWS's endpoint in the bucket's region if it is of FIPS or dual-stack, for obstore.

        obstore knows AWS's usual endpoints alone.
        """
        endpoint = self._endpoint_url
        host = urlsplit(endpoint).hostname or ""
        if not host.startswith("s3-fips.") and ".dualstack." not in host:
            return None
        region = self._bucket_region()
        return (
            endpoint.replace(f".{self.s3.meta.region_name}.", f".{region}.") if region else endpoint
        )

    def _is_confined(self) -> bool:
        """Whether a redirect could take a session token to another host.

        obstore follows redirects, and takes off the signature but not the
        token; it has no setting for that. AWS redirects to itself alone; any
        other server might. boto3's connections follow none.
        """
        credentials = self._credentials
        has_token = credentials is not None and credentials.get_frozen_credentials().token
        return bool(has_token) and self._custom_endpoint() is not None

    def _bucket_region(self) -> str | None:
        """Where the bucket is, as S3 tells in the headers of any answer."""
        if self._access_point is not None:
            return self._access_point.region
        if self._settings.region is not None or self._custom_endpoint() is not None:
            return None
        answer = self.s3.list_objects_v2(**self.request, MaxKeys=1)
        region = answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region")
        return str(region) if region else None

    def _name_principal(self) -> str:
        name = self._name_of_credentials()
        # What was decrypted with a key is for those who have it.
        key = self._settings.customer_key
        return name if key is None else f"{name} customer key {key.identity}"

    def _name_of_credentials(self) -> str:
        if self._credentials is None:
            return "anonymous"
        method = self._credentials.method
        current = self._credentials.get_frozen_credentials()
        if method in _STATIC and not current.token:
            return f"key {current.access_key}"
        # Temporary keys change; what they are derived from does not.
        role = os.environ.get("AWS_ROLE_ARN", "")
        profile = self._session.profile_name if self._session is not None else "default"
        return f"{method} {profile} {role} uid {os.geteuid()}"


class ClientSource:
    """One store's clients, and the credentials that they are made with. Belongs to the event loop.

    `clients` is None as long as they are to be made; `principal` is the identity
    that they read as, a stable name without a secret, and known once they were made.
    Requests under way keep clients that are replaced meanwhile.
    """

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self.clients: Clients | None = None
        self.principal: str | None = None
        self._refusals = ObstoreRefusals()
        self._clock = ServerClock()
        self._connecting = SharedCall(self._take)
        self._credentials_call = SharedCall(self._look_for_credentials)
        self._renewing: SharedCall[object] = SharedCall(lambda _: None)
        self._connected = 0.0

    @property
    def uses_obstore(self) -> bool:
        """As `Clients.uses_obstore`, of those that are there."""
        return self.clients is not None and self.clients.uses_obstore

    async def connect(self) -> Clients:
        """The clients, which are made if need be, with credentials that are valid.

        Raises:
            AttemptError: there are no credentials, they can't be used, or what gives them
                out does not answer in time.
        """
        while self.clients is None:
            try:
                with trio.move_on_after(SOURCE_LIMIT_S) as waiting:
                    await self._connecting.wait(
                        lambda: Clients(self._settings, self._refusals, self._clock)
                    )
                if waiting.cancelled_caught:  # the next caller waits for the same call
                    raise AttemptError(SILENT_SOURCE)
            except AttemptError as error:
                is_lack = error.failure in (NO_CREDENTIALS, SILENT_SOURCE)
                if is_lack and self.principal is not None:
                    # There were some: their source is silent or about to be rewritten.
                    raise AttemptError(replace(error.failure, is_retryable=True)) from error
                raise
        clients = self.clients
        if clients.credentials is not None and renewal.is_due(clients.credentials):
            with trio.move_on_after(SOURCE_LIMIT_S) as waiting:
                await self._renewing.wait(clients.credentials.get_frozen_credentials)
            if waiting.cancelled_caught:
                raise AttemptError(replace(SILENT_SOURCE, is_retryable=True))
        return clients

    def _take(self, clients: Clients) -> None:
        self.clients = clients
        self.principal = self.principal or clients.principal
        self._connected = time.monotonic()

    def renew(self) -> None:
        """Have the next request look for credentials anew: these have expired."""
        now = time.monotonic()
        if self.clients is not None and now - self._connected >= RECONNECT_EVERY_S:
            self.clients = None

    async def has_renewed(self, used: Clients | None) -> bool:
        """Whether there are other credentials than those of a refused request; then use them."""
        current = self.clients
        if used is not None and used is not current:
            return True
        if current is None:
            return False
        if not self._credentials_call.is_under_way:
            now = time.monotonic()
            if now - self._connected < RECONNECT_EVERY_S:
                return False
            self._connected = now
        look = partial(_look_for_others, current)
        try:
            with trio.move_on_after(SOURCE_LIMIT_S):
                await self._credentials_call.wait(look)
        except AttemptError as error:
            logger.info("no other credentials: %s", error)
        return self.clients is not current

    def _look_for_credentials(self, replaced: Clients | None) -> None:
        """Use other credentials than those of these clients, if there are any."""
        if replaced is not None and self.clients is replaced:
            self.clients = None

    def close(self) -> None:
        """Give up the connections."""
        if self.clients is not None:
            self.clients.direct.close()
            self.clients.s3.close()


def _look_for_others(clients: Clients) -> Clients | None:
    """These clients if there are other credentials than theirs by now. Blocks."""
    return clients if clients.has_other_credentials() else None


# botocore's loader with what it has read of S3, while no session has it; see `prepare`.
_loaders: list[Loader] = []


def prepare() -> None:
    """Import what a client of S3 needs, and read botocore's description of S3. Blocks.

    The next `Clients` of this process are made in half the time. No credentials
    are looked for.
    """
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import get_session

    for name in ("botocore.awsrequest", "botocore.httpsession", "obstore.store"):
        importlib.import_module(name)
    # With these boto3 reads no file of keys.
    no_keys = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
    os.environ.update(no_keys)
    try:
        core = get_session()
        session = boto3.Session(region_name=DEFAULT_REGION, botocore_session=core)
        session.client("s3", config=Config(signature_version=UNSIGNED)).close()
    finally:
        for name in no_keys:
            del os.environ[name]
    _loaders.append(core.get_component("data_loader"))


def _core_session(settings: S3Settings) -> BotocoreSession:
    """botocore's session below one of boto3's, with the loader that was prepared, once.

    The clients that it makes by itself, of what gives out credentials, wait as long as those
    of S3 do: botocore's own limit is five times a minute, and all requests wait for them.
    """
    from botocore.config import Config
    from botocore.session import get_session

    session = get_session()
    session.set_default_client_config(
        Config(
            connect_timeout=settings.connect_timeout_s,
            read_timeout=settings.read_timeout_s,
            retries={"total_max_attempts": 3, "mode": "standard"},
        )
    )
    # A user with a directory of descriptions of his own gets a loader for that.
    if _loaders and "AWS_DATA_PATH" not in os.environ:
        session.register_component("data_loader", _loaders.pop())
    return session


def _leave_body_unsigned(request: Any, **_: Any) -> None:
    """S3 compares the checksum that goes with each body, and the signature covers that."""
    request.context.update(unsigned_body())
