"""Access keys that a Secret holds.

Its fields are `access_key_id`, `secret_access_key` and, for temporary keys,
`session_token`; `accessKeyId` and `AWS_ACCESS_KEY_ID` are the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from csi.errors import InvalidArgumentError

# Kubelet adds service account tokens under such names.
_RESERVED = "csi.storage.k8s.io/"
_FIELDS = ("access_key_id", "secret_access_key", "session_token")
_BY_SPELLING = {name.replace("_", ""): name for name in _FIELDS}


@dataclass(frozen=True, slots=True)
class AccessKeys:
    """What requests are signed with. Neither `repr` nor `str` shows it."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


def keys_from(secrets: Mapping[str, str]) -> AccessKeys | None:
    """The keys in a Secret's fields; None if it has none at all.

    Raises:
        InvalidArgumentError: a field is missing, or is none that is known.
    """
    found: dict[str, str] = {}
    for name, value in secrets.items():
        if name.startswith(_RESERVED):
            continue
        spelling = name.lower().replace("_", "").replace("-", "").removeprefix("aws")
        if spelling not in _BY_SPELLING:
            raise InvalidArgumentError(f"the Secret's field {name!r} is none of {_listed(_FIELDS)}")
        # A file that was made by an editor ends with a line's end.
        found[_BY_SPELLING[spelling]] = value.strip()
    if not found:
        return None
    missing = [name for name in _FIELDS[:2] if not found.get(name)]
    if missing:
        raise InvalidArgumentError(f"the Secret has no {_listed(missing)}")
    return AccessKeys(found[_FIELDS[0]], found[_FIELDS[1]], found.get(_FIELDS[2]) or None)


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names)
