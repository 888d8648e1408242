"""The types of settings, which convert values from and to text.

A `SettingType` has two functions, text to value and value to text, and the placeholder
for `--help`. `read` raises ValueError with a sentence that describes the mistake and the
right form; mount.py puts the origin of the text in front.

Binary units of sizes are `KiB` to `PiB` (or Kubernetes' `Ki` to `Pi`), decimal units `kB`
to `PB`. A bare `K` or `G` is refused, because some tools mean 1000 by it and others 1024.
The text that `show` returns is read back as the same value.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from fusefs.linux import files
from fusefs.settings.patterns import PathRules, parse_rules

T = TypeVar("T")
E = TypeVar("E", bound=enum.StrEnum)
N = TypeVar("N", int, float)

# The default of the longest time for which a listing is used. Unchanging data cost one LIST each
# minute for 1,000 objects: a longer time would save little, and show replaced files later.
METADATA_TTL_S = 60.0

# The longest duration: poll(2) waits at most 2^31 milliseconds, about 24 days.
LONGEST_DAYS = 10


# --- sizes and durations ------------------------------------------------------

KIB, MIB, GIB, TIB, PIB = (1024**power for power in range(1, 6))

# Both GiB and Kubernetes' form Gi.
_BINARY = {
    unit: 1024**power
    for power, letter in enumerate("KMGTP", start=1)
    for unit in (f"{letter}iB", f"{letter}i")
}
_DECIMAL = {f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", start=1)}
_SIZE_UNITS = {"": 1, "B": 1, "kB": 1000} | _DECIMAL | _BINARY
_AMBIGUOUS = frozenset("KMGTP")
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

# Sizes must be smaller than this, like offsets in files and SQLite's integers.
_TOO_LARGE = 2**63

_NUMBER_AND_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Return the bytes of a text such as `50GiB`, `1.5TB` or `4096`; ValueError if invalid."""
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is not None and match[2].upper() in _AMBIGUOUS:
        number, letter = match[1], match[2][0].upper()
        decimal = "k" if letter == "K" else letter
        raise ValueError(
            f"{text!r} is ambiguous; write {number}{letter}iB (units of 1024)"
            f" or {number}{decimal}B (units of 1000)"
        )
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError(f"{text!r} is not a size; write it like 50GiB, 1.5TB or 4096 (bytes)")
    size = int(min(Decimal(match[1]), _TOO_LARGE) * _SIZE_UNITS[match[2]])
    if size >= _TOO_LARGE:
        raise ValueError("the size is too large; the most is 8191PiB")
    return size


def format_size(size: int) -> str:
    """Return `size` as text: a whole number of the largest possible binary unit."""
    for unit, factor in (("PiB", PIB), ("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def parse_duration(text: str) -> float:
    """Return the seconds of a text such as `60s`, `500ms`, `2h` or `60`; ValueError if invalid."""
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None or match[2] not in _DURATION_UNITS:
        raise ValueError(f"{text!r} is not a duration; write it like 60s, 500ms, 5m or 2h")
    return float(match[1]) * _DURATION_UNITS[match[2]]


def format_duration(seconds: float) -> str:
    return "indefinite" if math.isinf(seconds) else f"{plain_number(seconds)}s"


def plain_number(number: float) -> str:
    """Return `number` as text with all its digits and without an exponent."""
    text = format(Decimal(repr(number)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


# --- values with a class of their own -----------------------------------------


@dataclass(frozen=True, slots=True)
class MountSource:
    """A bucket, or its part below one prefix.

    `prefix` is "" or ends with a slash, so that `prefix + name` is a key.
    """

    bucket: str
    prefix: str = ""

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


@dataclass(frozen=True, slots=True)
class MinFree:
    """Disk space that the cache leaves free: a share of the disk, or a size in bytes."""

    percent: float | None = None
    size: int = 0

    def bytes_of(self, total: int) -> int:
        """Return the bytes to leave free on a disk of `total` bytes."""
        return min(self.size, total) if self.percent is None else int(total * self.percent / 100)

    def __str__(self) -> str:
        return format_size(self.size) if self.percent is None else f"{plain_number(self.percent)}%"


# The share of the disk's inodes that the cache leaves free. Each cached file needs an inode, and
# ext4 has one for 16 KiB: with small files, a cache runs out of inodes long before it is full.
FREE_INODES = MinFree(percent=10.0)


class Addressing(enum.StrEnum):
    """The place of the bucket's name in a URL: the path, or the host name (virtual)."""

    AUTO = "auto"
    PATH = "path"
    VIRTUAL = "virtual"


class SessionKind(enum.StrEnum):
    """The implementation of the FUSE protocol that talks to the kernel."""

    AUTO = "auto"
    KERNEL = "kernel"
    PYFUSE3 = "pyfuse3"


class PassthroughMode(enum.StrEnum):
    """The use of passthrough, by which the kernel reads cached files without the daemon."""

    AUTO = "auto"
    OFF = "off"


class Encryption(enum.StrEnum):
    """Server-side encryption of objects: with S3's keys, KMS keys, or KMS keys in two layers."""

    S3 = "AES256"
    KMS = "aws:kms"
    DOUBLE = "aws:kms:dsse"


class Acl(enum.StrEnum):
    """S3's canned ACLs for objects."""

    PRIVATE = "private"
    OWNER_FULL_CONTROL = "bucket-owner-full-control"
    OWNER_READ = "bucket-owner-read"
    AUTHENTICATED_READ = "authenticated-read"
    PUBLIC_READ = "public-read"


class Conflict(enum.StrEnum):
    """The action of an upload if another writer has replaced the object meanwhile."""

    OVERWRITE = "overwrite"
    FAIL = "fail"


class Durability(enum.StrEnum):
    """The place where a file is stored when fsync and close return.

    AUTO means the bucket; but the close of a temporary file, or of a file that is appended to
    again and again, stores it on the local disk.
    """

    AUTO = "auto"
    BUCKET = "bucket"
    LOCAL = "local"


EVERYWHERE_AUTO = PathRules(Durability.AUTO)


class AttributeForm(enum.StrEnum):
    """The form of modes, owners and times in new objects: s3fs's form, or that of AWS's tools."""

    S3FS = "s3fs"
    AWS = "aws"


class LogLevel(enum.StrEnum):
    """The lowest severity of lines that are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.StrEnum):
    """The form of a log's lines."""

    TEXT = "text"
    JSON = "json"


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


def _parse_durability(text: str) -> PathRules[Durability]:
    def read(name: str) -> Durability:
        try:
            return Durability(name)
        except ValueError:
            raise ValueError(
                f"{name!r} is none of {', '.join(Durability)}; write it like bucket, or for some"
                " paths like bucket,local:runs/**"
            ) from None

    return parse_rules(text, read, Durability.AUTO)


def parse_source(text: str) -> MountSource:
    """Parse `s3://BUCKET[/PREFIX]`; BUCKET may be an access point's alias. Raises ValueError."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme.lower() != "s3":
        raise ValueError(
            f"{text!r} is not an S3 URL; write it like s3://bucket or s3://bucket/path"
        )
    bucket, _, prefix = rest.partition("/")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", bucket):
        raise ValueError(
            f"{text!r} does not name a bucket; write it like s3://bucket or s3://bucket/path"
            " (an access point has its alias, not its ARN)"
        )
    if prefix and not prefix.endswith("/"):
        prefix += "/"
    if not _is_key(prefix):
        raise ValueError(
            f"the prefix in {bucket!r} is not an S3 key: at most 1024 bytes of UTF-8, no NUL"
        )
    return MountSource(bucket, prefix)


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
        raise ValueError(f"{text!r} is not an amount of free space; write it like 10% or 50GiB")
    return MinFree(percent=percent)


def _parse_switch(text: str) -> bool:
    try:
        return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[
            text.strip().lower()
        ]
    except KeyError:
        raise ValueError(f"{text!r} is neither true nor false") from None


def _parse_mode(text: str) -> int:
    if not re.fullmatch(r"(0o?)?[0-7]{3}", text.strip()):
        raise ValueError(f"{text!r} is not a file mode; write three octal digits, like 0644")
    return int(text.strip().removeprefix("0o"), 8)


def _parse_url(text: str) -> str:
    try:
        parts = urlsplit(text.strip())
        is_endpoint = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the address or the port is invalid
        is_endpoint = False
    if not is_endpoint or parts.query or parts.fragment:
        raise ValueError(f"{text!r} is not an endpoint; write it like https://s3.example.org:9000")
    if parts.username or parts.password:
        raise ValueError(
            "an endpoint has no user or password; credentials come from the AWS environment"
        )
    return text.strip().rstrip("/")


def _parse_path(text: str) -> Path:
    if not text:
        raise ValueError("the path is empty")
    if "\0" in text:
        raise ValueError(f"{text!r} is not a path: no name has a NUL")
    try:
        return files.absolute(Path(text).expanduser())
    except RuntimeError:
        raise ValueError(f"{text!r}: there is no such user, or no home directory") from None
    except OSError as error:
        raise ValueError(f"{text!r}: {error.strerror}") from None


def _parse_storage_class(text: str) -> str:
    name = text.strip()
    if not re.fullmatch(r"[A-Z0-9][A-Z0-9_-]{0,63}", name):
        raise ValueError(f"{text!r} is not a storage class; they are like STANDARD_IA")
    if name in ("GLACIER", "DEEP_ARCHIVE"):
        raise ValueError(f"{name} is an archive: what is written there can't be read at once")
    return name


def _parse_word(text: str) -> str:
    word = text.strip()
    if not word:
        raise ValueError("the value is empty")
    if not word.isprintable():
        raise ValueError(f"{word!r} has characters that no name has")
    return word


def _parse_kms_key(text: str) -> str:
    # https://docs.aws.amazon.com/kms/latest/APIReference/API_DescribeKey.html; sent in a header.
    if not re.fullmatch(r"[!-~]{1,2048}", text.strip()):
        raise ValueError(f"{text!r} is not a KMS key; write its id, its ARN or alias/NAME")
    return text.strip()


# --- types --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SettingType(Generic[T]):
    """One type of settings: `read` parses a value from text, `show` converts a value to text.

    `read` raises ValueError. With `takes_numbers` a TOML file may contain a bare number. If a
    value may contain commas, `further` matches each part after a comma, so that the part is
    not taken for the next option of a list.
    """

    metavar: str
    read: Callable[[str], T]
    show: Callable[[T], str] = str
    takes_numbers: bool = False
    further: re.Pattern[str] | None = None


def at_least(minimum: N, base: SettingType[N]) -> SettingType[N]:
    """Return the type `base`, but with ValueError for values below `minimum`."""

    def read(text: str) -> N:
        value = base.read(text)
        if value < minimum:
            raise ValueError(f"{text!r} is too small; the least is {base.show(minimum)}")
        return value

    return replace(base, read=read)


def whole_number(least: int, most: int) -> SettingType[int]:
    """Return the type of whole numbers from `least` to `most`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"\d{1,10}", text.strip()) or not least <= int(text) <= most:
            raise ValueError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return SettingType("N", read, takes_numbers=True)


def choice(values: type[E]) -> SettingType[E]:
    """Return the type of an enumeration of strings; each value is its own text."""

    def read(text: str) -> E:
        try:
            return values(text.strip())
        except ValueError:
            raise ValueError(f"{text!r} is none of {', '.join(values)}") from None

    return SettingType("|".join(values), read)


WORD = SettingType("NAME", _parse_word)
URL = SettingType("URL", _parse_url)
KMS_KEY = SettingType("KEY", _parse_kms_key)
STORAGE_CLASS = SettingType("CLASS", _parse_storage_class)
PATH = SettingType("PATH", _parse_path)
SWITCH = SettingType("", _parse_switch, lambda value: "true" if value else "false")
SIZE = SettingType("SIZE", parse_size, format_size, takes_numbers=True)
DURATION = SettingType("TIME", _parse_wait, format_duration, takes_numbers=True)
# `further` does not match `auto`, which is an option of its own in /etc/fstab.
DURABILITY = SettingType(
    "MODE[:PATTERN],…",
    _parse_durability,
    PathRules.shown,
    further=re.compile(rf"({'|'.join(Durability)}):|(bucket|local)$"),
)
# Two seconds at least, because a daemon sends its keeper a sign of life each second.
SILENCE = at_least(2.0, DURATION)
LIFETIME = SettingType("TIME", _parse_lifetime, format_duration, takes_numbers=True)
TTL = SettingType(
    "TIME[:PATTERN],…",
    lambda text: parse_rules(text, _parse_lifetime, METADATA_TTL_S),
    lambda rules: rules.shown(format_duration),
    takes_numbers=True,
    further=re.compile(r"(\d[\d.]*[a-z]*|indefinite)(:|$)"),
)
MIN_FREE = SettingType("SIZE|N%", _parse_min_free)
MODE = SettingType("MODE", _parse_mode, lambda mode: f"{mode:04o}")
SOURCE = SettingType("s3://BUCKET[/PREFIX]", parse_source)
ID = whole_number(0, 2**32 - 2)
CONNECTIONS = whole_number(1, 1024)


# --- how a field is declared --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, with its names as flag, environment variable and TOML key."""

    name: str
    type: SettingType[Any]
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
        return self.type is SWITCH


def option(
    type: SettingType[Any],
    group: str,
    help: str,
    default: object = MISSING,
    *,
    factory: Callable[[], object] | None = None,
    otherwise: str = "",
) -> Any:
    """Return a dataclass field that is a setting, in this group of `--help`.

    `factory` makes a default that depends on the process; `otherwise` describes, for
    `--help`, a default that has no text.
    """
    metadata = {"setting": (type, group, help, otherwise)}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)
