"""The identity with which a volume's mount accesses S3, and the files with its credentials.

There are five kinds of identity: the access keys of the volume's Secret; the role that `roleArn`
names, which the pod's own service account assumes; the role that EKS Pod Identity associates with
that account (`podIdentity`); anonymous; and the driver's own identity. The driver's identity is for
volumes that name none, but never for inline volumes, since any author of a pod can write these.

Secrets are written to files on tmpfs for each mount, mode 0600, which the daemon's user owns, in a
directory that root owns; the daemon's environment has only the files' paths. botocore, in the
daemon, reads the files again before its credentials expire. Kubelet publishes each volume again
about every minute; then the driver replaces the files with rotated keys and fresh tokens.

A Secret's SSE-C key is a part of the identity: a volume with another key gets another mount, with a
cache of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from csi.errors import FailedPreconditionError, InvalidArgumentError, UnauthenticatedError
from csi.identities.cluster_caches import CacheSecrets
from csi.identities.keys import AccessKeys, customer_key_from, keys_from
from csi.volume.options import Options
from csi.volume.stores import AWS, StoreSettings
from fusefs.linux.files import replace as replace_file
from fusefs.store.customer_key import CustomerKey

TOKENS = "csi.storage.k8s.io/serviceAccount.tokens"
NAMESPACE = "csi.storage.k8s.io/pod.namespace"
ACCOUNT = "csi.storage.k8s.io/serviceAccount.name"

# EKS: the audience of the tokens that its agent accepts, and the agent's address on each node
# (https://docs.aws.amazon.com/eks/latest/userguide/pod-id-how-it-works.html).
POD_IDENTITY_AUDIENCE = "pods.eks.amazonaws.com"
POD_IDENTITY_AGENT = "http://169.254.170.23/v1/credentials"

# The names of the files with a mount's lasting secrets.
_CACHE_CREDENTIALS = "cluster-cache-credentials"
_CACHE_KEY = "cluster-cache-key"
_CUSTOMER_KEY = "customer-key"

# Name of the driver's own identity.
DRIVER = "the driver"

_NOT_FOR_SESSION = re.compile(r"[^\w+=,.@-]", re.ASCII)
_MAX_SESSION = 64


@dataclass(frozen=True, slots=True)
class Identity:
    """An identity for S3 requests. Equal `proof` means the same identity, even with new tokens.

    `who` is the name for people. Neither `repr` nor `str` shows a secret.
    """

    who: str
    proof: tuple[str, ...] = field(repr=False)
    keys: AccessKeys | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    role_arn: str | None = None
    session: str = ""
    has_pod_identity: bool = False
    customer_key: CustomerKey | None = field(default=None, repr=False)

    @property
    def key_proof(self) -> tuple[str, ...]:
        """The SSE-C key's part of `proof`, secret; empty without a key."""
        return ("customer key", self.customer_key.text) if self.customer_key else ()


def choose(
    secrets: Mapping[str, str],
    context: Mapping[str, str],
    options: Options,
    store: StoreSettings,
    *,
    is_inline: bool,
) -> Identity:
    """Return the identity for a volume. May request the driver's own keys from their source.

    Raises:
        InvalidArgumentError: an inline volume has no identity; or identities or keys are invalid.
        FailedPreconditionError: the pod's token is missing.
        UnauthenticatedError: the driver has no credentials of its own.
    """
    key = customer_key_from(secrets)
    found = _choose(secrets, context, options, store, is_inline=is_inline)
    if key is None:
        return found
    with_key = replace(found, customer_key=key)
    return replace(with_key, proof=(*found.proof, *with_key.key_proof))


def _choose(
    secrets: Mapping[str, str],
    context: Mapping[str, str],
    options: Options,
    store: StoreSettings,
    *,
    is_inline: bool,
) -> Identity:
    """Return a volume's identity like `choose`, with the same errors, but without the SSE-C key."""
    keys = keys_from(secrets)
    named = [
        keys is not None,
        options.role_arn is not None,
        options.has_pod_identity,
        options.is_anonymous,
    ]
    if sum(named) > 1:
        raise InvalidArgumentError(
            "a Secret with keys, roleArn, podIdentity and anonymous exclude each other"
        )
    if keys is not None:
        values = keys.access_key_id, keys.secret_access_key, keys.session_token or ""
        if not all(map(str.isprintable, values)):
            raise InvalidArgumentError("a key in the Secret has a control character")
        proof = ("keys", keys.access_key_id, keys.secret_access_key)
        return Identity(f"access key {keys.access_key_id}", proof, keys=keys)
    if options.role_arn is not None:
        return _of_role(options.role_arn, secrets, context, store)
    if options.has_pod_identity:
        return _of_pod_identity(secrets, context, store)
    if options.is_anonymous:
        return Identity("anonymous", ("anonymous",))
    if is_inline:
        raise InvalidArgumentError(
            "an inline volume needs a nodePublishSecretRef, roleArn, podIdentity or anonymous: the"
            " driver's own credentials are not for it"
        )
    return Identity(DRIVER, ("driver",), keys=_own_keys())


def _of_role(
    role_arn: str, secrets: Mapping[str, str], context: Mapping[str, str], store: StoreSettings
) -> Identity:
    if store.sts_url is None and store.endpoint_url is not None:
        raise InvalidArgumentError(f"roleArn: store {store.name} has no sts-url with an audience")
    namespace, account = _account(context, "roleArn")
    return Identity(
        f"role {role_arn}",
        ("role", role_arn, namespace, account),
        token=_token(secrets, context, store.audience, "roleArn"),
        role_arn=role_arn,
        session=_NOT_FOR_SESSION.sub("-", f"{namespace}-{account}")[:_MAX_SESSION],
    )


def _of_pod_identity(
    secrets: Mapping[str, str], context: Mapping[str, str], store: StoreSettings
) -> Identity:
    if store.name != AWS:
        raise InvalidArgumentError(f"podIdentity: is AWS', and store {store.name} is not")
    namespace, account = _account(context, "podIdentity")
    return Identity(
        f"EKS Pod Identity of {namespace}/{account}",
        ("pod identity", namespace, account),
        token=_token(secrets, context, POD_IDENTITY_AUDIENCE, "podIdentity"),
        has_pod_identity=True,
    )


def _account(context: Mapping[str, str], attribute: str) -> tuple[str, str]:
    """Return the namespace and service account that kubelet sent; an error names `attribute`."""
    namespace, account = context.get(NAMESPACE, ""), context.get(ACCOUNT, "")
    if not namespace or not account:
        raise FailedPreconditionError(
            f"{attribute}: the CSIDriver object has to set podInfoOnMount"
        )
    return namespace, account


def _token(
    secrets: Mapping[str, str], context: Mapping[str, str], audience: str, attribute: str
) -> str:
    text = secrets.get(TOKENS) or context.get(TOKENS)
    try:
        token = json.loads(text or "{}")[audience]["token"]
    except (ValueError, KeyError, TypeError):
        token = None
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise FailedPreconditionError(
            f"{attribute}: kubelet sent no token; the CSIDriver object has to list the audience"
            f" {audience} in tokenRequests"
        )
    return token


@functools.cache
def _own_session() -> Any:
    from botocore.session import get_session

    return get_session()


def _own_keys() -> AccessKeys:
    """Return the driver's own credentials, which botocore finds and renews. May block.

    Raises:
        UnauthenticatedError: the driver has no credentials, or their source refuses.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        credentials = _own_session().get_credentials()
        if credentials is None:
            raise UnauthenticatedError("the driver has no credentials of its own")
        now = credentials.get_frozen_credentials()
    except (BotoCoreError, ClientError) as error:
        raise UnauthenticatedError(f"the driver's own credentials: {error}") from error
    return AccessKeys(now.access_key, now.secret_key, now.token)


# --- for the daemon ---------------------------------------------------------------


class CredentialFiles:
    """The files with mounts' secrets, below `directory`. `agent` is EKS Pod Identity's URL."""

    def __init__(self, directory: Path, agent: str = POD_IDENTITY_AGENT) -> None:
        self._directory = directory
        self._agent = agent
        directory.mkdir(mode=0o711, parents=True, exist_ok=True)

    def store(self, mount: str, identity: Identity, uid: int) -> None:
        """Write new keys, or a new token, to the file that a mount's daemon reads as user `uid`."""
        directory = self._prepare(mount, uid)
        if identity.keys is not None:
            replace_file(directory / "keys", _as_profile(identity.keys), owner=uid)
        elif identity.token is not None:
            replace_file(directory / "token", identity.token, owner=uid)

    def store_kept(
        self, mount: str, identity: Identity, cluster_cache: CacheSecrets | None, uid: int
    ) -> None:
        """Write the secrets that stay the same for a mount, to the files that `settings_of` names.

        The launcher, as root, reads the cluster cache's secrets. The daemon's user owns the files
        nevertheless: a daemon that lost its keeper starts another one and passes the secrets on.
        """
        directory = self._prepare(mount, uid)
        if identity.customer_key is not None:
            replace_file(directory / _CUSTOMER_KEY, identity.customer_key.text, owner=uid)
        if cluster_cache is not None:
            replace_file(directory / _CACHE_CREDENTIALS, cluster_cache.credentials, owner=uid)
            replace_file(directory / _CACHE_KEY, cluster_cache.key, owner=uid)

    def settings_of(
        self, mount: str, identity: Identity, *, has_cluster_cache: bool
    ) -> dict[str, str]:
        """Return the mount's settings with the paths of the files that `store_kept` writes."""
        names = {"customer_key": _CUSTOMER_KEY} if identity.customer_key else {}
        if has_cluster_cache:
            names["cluster_cache_credentials"] = _CACHE_CREDENTIALS
            names["cluster_cache_key"] = _CACHE_KEY
        directory = self._directory / mount
        return {setting: os.fspath(directory / name) for setting, name in names.items()}

    def _prepare(self, mount: str, uid: int) -> Path:
        directory = self._directory / mount
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        # Root owns the directory, so the daemon cannot add files; the daemon's group may search it.
        os.chown(directory, 0, uid)
        directory.chmod(0o710)
        return directory

    def environment(
        self, mount: str, identity: Identity, store: StoreSettings, *, is_fips: bool = False
    ) -> dict[str, str]:
        """Return the variables by which the daemon's botocore finds credentials; not secret.

        With `is_fips`, AWS' STS is used at its endpoint with validated cryptography (FIPS).
        """
        directory = self._directory / mount
        variables = {
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        if identity.keys is not None:
            variables["AWS_SHARED_CREDENTIALS_FILE"] = os.fspath(directory / "keys")
        if identity.has_pod_identity:
            variables |= {
                "AWS_CONTAINER_CREDENTIALS_FULL_URI": self._agent,
                "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": os.fspath(directory / "token"),
            }
        if identity.role_arn is not None:
            variables |= {
                "AWS_ROLE_ARN": identity.role_arn,
                "AWS_ROLE_SESSION_NAME": identity.session,
                "AWS_WEB_IDENTITY_TOKEN_FILE": os.fspath(directory / "token"),
                "AWS_STS_REGIONAL_ENDPOINTS": "regional",
            }
            if store.sts_url is not None:
                variables["AWS_ENDPOINT_URL_STS"] = store.sts_url
            elif is_fips:
                variables["AWS_USE_FIPS_ENDPOINT"] = "true"
            if store.ca_bundle is not None:
                variables["AWS_CA_BUNDLE"] = os.fspath(store.ca_bundle)
        return variables

    def remove(self, mount: str) -> None:
        """Remove a mount's directory with all files, also unknown ones, if it exists."""
        directory = self._directory / mount
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(directory):
                (directory / name).unlink(missing_ok=True)
            directory.rmdir()


def _as_profile(keys: AccessKeys) -> str:
    lines = [
        "[default]",
        f"aws_access_key_id = {keys.access_key_id}",
        f"aws_secret_access_key = {keys.secret_access_key}",
    ]
    if keys.session_token:
        lines.append(f"aws_session_token = {keys.session_token}")
    return "\n".join([*lines, ""])
