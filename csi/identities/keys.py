"""The keys in a Secret: access keys, and a key of server-side encryption (SSE-C).

A Secret's fields are `access_key_id`, `secret_access_key` and, for temporary keys, `session_token`;
the spellings `accessKeyId` and `AWS_ACCESS_KEY_ID` are accepted, too. `customer_key` is the SSE-C
key; a Secret may have only this key, for a volume that is accessed with a role. The functions raise
InvalidArgumentError, which names the field that is missing, unknown or invalid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from csi.errors import InvalidArgumentError
from csi.volume.location import own
from fusefs.store.customer_key import CustomerKey, CustomerKeyError
from fusefs.store.customer_key import parse as parse_customer_key

_FIELDS = ("access_key_id", "secret_access_key", "session_token")
_CUSTOMER_KEY = "customer_key"
_ALL = (*_FIELDS, _CUSTOMER_KEY)
_BY_SPELLING = {name.replace("_", ""): name for name in _ALL}


@dataclass(frozen=True, slots=True)
class AccessKeys:
    """The access keys that sign requests. Neither `repr` nor `str` shows them."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)

    def environment(self) -> dict[str, str]:
        """Return the keys as AWS' environment variables; the token may be empty."""
        values = (self.access_key_id, self.secret_access_key, self.session_token or "")
        return {f"AWS_{name.upper()}": value for name, value in zip(_FIELDS, values, strict=True)}


def keys_from(secrets: Mapping[str, str]) -> AccessKeys | None:
    """Return the access keys in a Secret's fields; None if the Secret has no access keys."""
    found = _fields(secrets)
    found.pop(_CUSTOMER_KEY, None)
    if not found:
        return None
    missing = [name for name in _FIELDS[:2] if not found.get(name)]
    if missing:
        raise InvalidArgumentError(f"the Secret has no {', '.join(missing)}")
    return AccessKeys(found[_FIELDS[0]], found[_FIELDS[1]], found.get(_FIELDS[2]) or None)


def customer_key_from(secrets: Mapping[str, str]) -> CustomerKey | None:
    """Return the SSE-C key in a Secret's fields; None if the Secret has no such key."""
    text = _fields(secrets).get(_CUSTOMER_KEY)
    if text is None:
        return None
    try:
        return parse_customer_key(text.encode(), f"the Secret's {_CUSTOMER_KEY}")
    except CustomerKeyError as error:
        raise InvalidArgumentError(str(error)) from None


def _fields(secrets: Mapping[str, str]) -> dict[str, str]:
    """Return a Secret's fields by standard name; InvalidArgumentError for unknown spellings."""
    found: dict[str, str] = {}
    for name, value in own(secrets).items():  # kubelet may add tokens of service accounts
        spelling = name.lower().replace("_", "").replace("-", "").removeprefix("aws")
        if spelling not in _BY_SPELLING:
            known = ", ".join(_ALL)
            raise InvalidArgumentError(f"the Secret's field {name!r} is none of {known}")
        if _BY_SPELLING[spelling] in found:
            raise InvalidArgumentError(f"the Secret has {_BY_SPELLING[spelling]} under two names")
        # A file that was made with an editor ends with a line feed.
        found[_BY_SPELLING[spelling]] = value.strip()
    return found
