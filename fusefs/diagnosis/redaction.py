"""Removes secrets from texts that leave the machine.

Known secrets (from the environment, from key files) are removed everywhere. So are texts that look
like secrets: values after names such as `secret` or `token`, signatures, tokens, passwords in URLs,
private keys.
"""

from __future__ import annotations

import configparser
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit

REMOVED = "[removed]"
# Known secrets with fewer characters are not removed: they would be found within other words.
SHORTEST_SECRET = 6
# Shorter values after a colon and a blank, as in "credentials: no answer", are ordinary words.
SHORTEST_WORD = 12

# Repetitions are bounded, since an unbounded search in a key with many dots would take hours.
_SECRET_NAME = r"""[\w.-]{0,64}(?:secret|token|passw(?:or)?d|passphrase|private[_-]?key|signature|
    credential|authorization|api[_-]?key|security)[\w.-]{0,64}"""
# Matches name=value, "name": "value" and name: value; also in JSON within a JSON string, where
# backslashes precede the quotes. A line may end within a value.
_NAMED = re.compile(
    rf"""(?ix)(["']?\b{_SECRET_NAME}(?:\\*["'])?\s*[=:]\s*)
    (?:(?:Bearer|Basic)\s+)?
    (\\+"[^"\n]+"?|"(?:\\.|[^"\\\n])+"?|'[^'\n]+'?|[^\s"',;&}}\]]+)"""
)
_PATTERNS = (
    re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S
    ),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),  # JSON Web Tokens (RFC 7519)
    re.compile(r"(?i)(?<=bearer )[\w.~+/=-]{8,}"),
)
# Matches up to the last @, because a password that was typed by hand may contain an @.
_PASSWORD = re.compile(r"(?<=://)[^/\s:@]*:[^/\s]*(?=@)")
# AWS's key ids (AKIA…, ASIA…) are not secret, but identify an account.
_KEY_ID = re.compile(r"\b(A[KS]IA)[A-Z0-9]{12}([A-Z0-9]{4})\b")
# Harmless values of settings whose names look like those of secrets.
_HARMLESS = re.compile(r"(?i)true|false|null|none|on|off|auto|\d+(?:\.\d+)?")
_QUOTE = re.compile(r"""\\*["']""")


class Secrets:
    """A remover of secrets from texts; `known` secrets are recognised everywhere."""

    def __init__(self, known: Iterable[str]) -> None:
        forms: set[str] = set()
        for secret in known:
            if len(secret) >= SHORTEST_SECRET:
                forms |= {secret, quote(secret), quote(secret, safe=""), json.dumps(secret)[1:-1]}
        # The longest first, because one secret may be part of another.
        self._known = sorted(forms, key=len, reverse=True)

    def remove(self, text: str) -> str:
        """Return the text with each secret replaced by `REMOVED`."""
        for secret in self._known:
            text = text.replace(secret, REMOVED)
        for pattern in _PATTERNS:
            text = pattern.sub(REMOVED, text)
        text = _PASSWORD.sub(REMOVED, text)
        text = _KEY_ID.sub(r"\1…\2", text)
        return _NAMED.sub(_without_value, text)

    def remove_plain(self, value: Any, *, is_secret: bool = False) -> Any:
        """Remove secrets and values of secret names from a JSON value; all texts if `is_secret`."""
        if isinstance(value, Mapping):
            return {
                self.remove(str(name)): self.remove_plain(
                    item, is_secret=is_secret or _is_name_of_secret(str(name))
                )
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.remove_plain(item, is_secret=is_secret) for item in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        text = str(value)
        is_harmless = not text or _HARMLESS.fullmatch(text)
        return REMOVED if is_secret and not is_harmless else self.remove(text)


def _without_value(match: re.Match[str]) -> str:
    value = match[2]
    opening = _QUOTE.match(value)
    quote = opening[0] if opening is not None else ""
    is_sentence = not quote and match[1].endswith(": ") and len(value) < SHORTEST_WORD
    if is_sentence or _HARMLESS.fullmatch(value.strip("\\\"'")):
        return match[0]
    return f"{match[1]}{quote}{REMOVED}{quote}"


def _is_name_of_secret(name: str) -> bool:
    return re.fullmatch(_SECRET_NAME, name, re.I | re.X) is not None


def known_secrets(environment: Mapping[str, str], files: Iterable[str]) -> list[str]:
    """Return the secrets in an environment, and in the texts of AWS configuration files."""
    found = []
    for name, value in environment.items():
        if _is_name_of_secret(name) and not os.path.exists(value):
            found.append(value)
        if password := _password(value):
            found += [password, unquote(password)]
    for text in files:
        parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
        try:
            parser.read_string(text)
        except configparser.Error:
            found += [text.strip(), *re.findall(r"=\s*(\S+)", text)]
            continue
        for section in parser.values():
            found += [
                value
                for name, value in section.items()
                if value and re.search(r"secret|token|password", name)
            ]
    return [value for value in found if value]


def _password(url: str) -> str:
    try:
        return urlsplit(url).password or ""
    except ValueError:
        return ""
