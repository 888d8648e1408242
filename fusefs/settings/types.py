"""The types that a setting can have: each is read from text and shown as text.

A `Kind` is a pair of functions, text to value and value to the same text, and
what `--help` calls the text. A reader raises ValueError with a sentence that
says what is wrong and how to write it; `settings` puts the name of the place
in front, where the text came from.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from fusefs.settings.units import (
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    plain_number,
)

T = TypeVar("T")
E = TypeVar("E", bound=enum.StrEnum)
N = TypeVar("N", int, float)

# What waits for that long is poll(2), which counts at most 2^31 milliseconds.
LONGEST_DAYS = 10


# --- the values that have a shape of their own --------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """What is mounted: a bucket, or what is below one prefix of it.

    `prefix` is "" or ends with a slash, so that `prefix + name` is a key.
    """

    bucket: str
    prefix: str = ""

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


@dataclass(frozen=True, slots=True)
class MinFree:
    """Disk space that the cache leaves alone: a share of the disk or a size."""

    percent: float | None = None
    size: int = 0

    def bytes_of(self, total: int) -> int:
        """How much that is on a disk of `total` bytes."""
        if self.percent is None:
            return min(self.size, total)
        return int(total * self.percent / 100)

    def __str__(self) -> str:
        return format_size(self.size) if self.percent is None else f"{plain_number(self.percent)}%"


class Addressing(enum.StrEnum):
    """How the bucket's name goes into a URL."""

    AUTO = "auto"
    PATH = "path"
    VIRTUAL = "virtual"


class SessionKind(enum.StrEnum):
    """Who speaks the FUSE protocol."""

    AUTO = "auto"
    KERNEL = "kernel"
    PYFUSE3 = "pyfuse3"


class Scrubbing(enum.StrEnum):
    """Whether large cached files are compared with their checksums in the background."""

    ON = "on"
    OFF = "off"


class Passthrough(enum.StrEnum):
    """Whether the kernel may read cached files without the daemon."""

    AUTO = "auto"
    OFF = "off"


class Durability(enum.StrEnum):
    """Where a file is when fsync and close return."""

    BUCKET = "bucket"
    LOCAL = "local"


class Conflict(enum.StrEnum):
    """What becomes of a write over an object that somebody else has replaced meanwhile."""

    OVERWRITE = "overwrite"
    FAIL = "fail"


class ExclusiveCreate(enum.StrEnum):
    """When the bucket decides that a file created with O_EXCL is new: always at once, or not."""

    AUTO = "auto"
    RESERVE = "reserve"


class ConditionalWrites(enum.StrEnum):
    """Whether changes carry conditions about what they replace."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class ObjectAttributes(enum.StrEnum):
    """Whether objects are asked for what listings do not tell: modes, owners, times."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class LogLevel(enum.StrEnum):
    """The least severe line that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


# --- text to value and back ---------------------------------------------------


def _parse_wait(text: str) -> float:
    seconds = parse_duration(text)
    if seconds > LONGEST_DAYS * 86400:
        raise ValueError(f"{text!r} is too long; the most is {LONGEST_DAYS}d")
    return seconds


def _parse_lifetime(text: str) -> float:
    if text.strip() == "indefinite":
        return math.inf
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ValueError(f"{error}, or indefinite") from None


def parse_source(text: str) -> Source:
    """Read `s3://BUCKET[/PREFIX]`."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme.lower() != "s3":
        raise ValueError(
            f"{text!r} is not an S3 URL; write it like s3://bucket or s3://bucket/path"
        )
    bucket, _, prefix = rest.partition("/")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", bucket):
        raise ValueError(f"{text!r} names no bucket; write it like s3://bucket or s3://bucket/path")
    if prefix and not prefix.endswith("/"):
        prefix += "/"
    if not _is_key(prefix):
        raise ValueError(
            f"the prefix of {bucket!r} is no S3 key: at most 1024 bytes of UTF-8, no NUL"
        )
    return Source(bucket, prefix)


def _is_key(text: str) -> bool:
    try:
        return "\0" not in text and len(text.encode()) <= 1024
    except UnicodeEncodeError:
        return False


def _parse_min_free(text: str) -> MinFree:
    number, percent_sign, rest = text.strip().partition("%")
    try:
        if not percent_sign:
            return MinFree(size=parse_size(text))
        percent = float(number)
    except ValueError:
        percent = math.nan
    if rest or not 0 <= percent < 100:
        raise ValueError(f"{text!r} is no amount of free space; write it like 10% or 50GiB")
    return MinFree(percent=percent)


def _parse_share(text: str) -> MinFree:
    share = _parse_min_free(text)
    if share.percent is None:
        raise ValueError(f"{text!r} is no share; write it like 10%")
    return share


def _parse_switch(text: str) -> bool:
    try:
        return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[
            text.strip().lower()
        ]
    except KeyError:
        raise ValueError(f"{text!r} is neither true nor false") from None


def _parse_durations(text: str) -> tuple[float, ...]:
    durations = tuple(_parse_wait(part) for part in text.split(","))
    if list(durations) != sorted(set(durations)):
        raise ValueError(f"{text!r} is no list of growing times; write it like 5s,15s,60s")
    return durations


def _parse_mode(text: str) -> int:
    if not re.fullmatch(r"(0o?)?[0-7]{3}", text.strip()):
        raise ValueError(f"{text!r} is not a file mode; write three octal digits, like 0644")
    return int(text.strip().removeprefix("0o"), 8)


def _parse_url(text: str) -> str:
    try:
        parts = urlsplit(text.strip())
        is_endpoint = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of the address or the port
        is_endpoint = False
    if not is_endpoint or parts.query or parts.fragment:
        raise ValueError(f"{text!r} is not an endpoint; write it like https://s3.example.org:9000")
    if parts.username or parts.password:
        raise ValueError("no user or password here; credentials come from the AWS environment")
    return text.strip().rstrip("/")


def _parse_path(text: str) -> Path:
    if not text:
        raise ValueError("the path is empty")
    return Path(text).expanduser().absolute()


def _parse_word(text: str) -> str:
    if not text.strip():
        raise ValueError("the value is empty")
    return text.strip()


# --- kinds --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """How one type of setting is read from text, and shown as the same text."""

    metavar: str
    read: Callable[[str], T]
    show: Callable[[T], str] = str
    takes_numbers: bool = False  # a TOML file may give a bare number


def at_least(minimum: N, kind: Kind[N]) -> Kind[N]:
    def read(text: str) -> N:
        value = kind.read(text)
        if value < minimum:
            raise ValueError(f"{text!r} is too small; the least is {kind.show(minimum)}")
        return value

    return Kind(kind.metavar, read, kind.show, kind.takes_numbers)


def whole_number(least: int, most: int) -> Kind[int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"\d{1,10}", text.strip()) or not least <= int(text) <= most:
            raise ValueError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return Kind("N", read, takes_numbers=True)


def choice(values: type[E]) -> Kind[E]:
    def read(text: str) -> E:
        try:
            return values(text.strip())
        except ValueError:
            raise ValueError(f"{text!r} is none of {', '.join(values)}") from None

    return Kind("|".join(values), read)


WORD = Kind("NAME", _parse_word)
URL = Kind("URL", _parse_url)
PATH = Kind("PATH", _parse_path)
SWITCH = Kind("", _parse_switch, lambda value: "true" if value else "false")
SIZE = Kind("SIZE", parse_size, format_size, takes_numbers=True)
DURATION = Kind("TIME", _parse_wait, format_duration, takes_numbers=True)
DURATIONS = Kind("TIME,…", _parse_durations, lambda times: ",".join(map(format_duration, times)))
# A daemon says each second that it lives.
SILENCE = at_least(2.0, DURATION)
LIFETIME = Kind("TIME", _parse_lifetime, format_duration, takes_numbers=True)
MIN_FREE = Kind("SIZE|N%", _parse_min_free)
SHARE = Kind("N%", _parse_share)
MODE = Kind("MODE", _parse_mode, lambda mode: f"{mode:04o}")
SOURCE = Kind("s3://BUCKET[/PREFIX]", parse_source)
ID = whole_number(0, 2**32 - 2)


# --- how a field is declared --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as its users see it: flags, environment, file and help."""

    name: str
    kind: Kind[Any]
    group: str
    help: str
    default: str  # as text, for `--help`

    @property
    def flag(self) -> str:
        return "--" + self.key

    @property
    def key(self) -> str:
        return self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "FUSEFS_" + self.name.upper()

    @property
    def is_switch(self) -> bool:
        return self.kind is SWITCH


def about(kind: Kind[Any], group: str, help: str, *, otherwise: str = "") -> dict[str, Any]:
    """A field's metadata; `otherwise` tells what a default that is not fixed means."""
    return {"setting": (kind, group, help, otherwise)}
