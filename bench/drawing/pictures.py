"""The pictures of a result, as plain data: panels of bars or lines, with their numbers.

A result is a file that `bench.report.as_json` made. A bar is the median of the rounds, with a range
from the lowest to the highest. If a panel has rows of several units, all of them are shown as
ratios to one reference, the bare disk or the best peer, and the range is that of the single rounds'
ratios. Rows and contenders that were not measured are left out; a picture without any row is not
drawn.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.contenders.registry import CONTENDERS, CSI, JUICEFS, KERNEL, NATIVE, OBSTORE, PEERS
from bench.report import COSTS, number_text
from bench.workloads.table import THREADS, WORKLOADS

UNITS = {workload.name: workload.unit for workload in WORKLOADS} | {
    row: unit for row, (_, unit) in COSTS.items()
}

LABELS = {
    "reread_warm": "large file,\npage cache warm",
    "reread_dropped": "large file,\npage cache dropped",
    "held_warm": "large file, also open\nsince its first read",
    "par8_warm": "large file, 8 readers,\npage cache warm",
    "par8_dropped": "large file, 8 readers,\npage cache dropped",
    "rand4k_warm": "4 KiB at random,\npage cache warm",
    "rand4k_dropped8": "4 KiB at random, 8 jobs,\npage cache dropped",
    "mmap_warm": "mapped pages at random,\npage cache warm",
    "mmap_dropped": "mapped pages at random,\npage cache dropped",
    "small_warm": "100 KiB files,\npage cache warm",
    "small_dropped": "100 KiB files,\npage cache dropped",
    "small_warm_bare": "100 KiB files, three\nsystem calls each",
    "tree_warm": "walk with lstat,\n100 folders",
    "flat_warm": "walk with lstat,\none folder",
    "first_large": "large file,\none reader",
    "first_shards": "four large files,\nfour readers",
    "first_small": "100 KiB files,\neight threads",
    "first_blocks": "128 KiB at random,\neight readers",
    "first_mapped": "mapped file, its tensors\nin random order",
    "burst64": "64 readers that\nstart together",
    "folders_cold": "walk with lstat,\n20 folders",
    "tree_cold": "walk with lstat,\n100 folders",
    "flat_cold": "walk with lstat,\none folder",
}
CACHED = (
    "reread_warm",
    "reread_dropped",
    "held_warm",
    "par8_warm",
    "par8_dropped",
    "rand4k_warm",
    "rand4k_dropped8",
    "mmap_warm",
    "mmap_dropped",
    "small_warm",
    "small_dropped",
    "small_warm_bare",
    "tree_warm",
    "flat_warm",
)
FIRST = (
    "first_large",
    "first_shards",
    "first_small",
    "first_blocks",
    "first_mapped",
    "burst64",
    "folders_cold",
    "tree_cold",
    "flat_cold",
)
# The most telling rows, for the picture with both cached and first reads.
CHOSEN_CACHED = ("reread_dropped", "par8_dropped", "rand4k_dropped8", "small_warm", "small_dropped")
CHOSEN_FIRST = ("first_large", "first_shards", "first_small", "folders_cold", "tree_cold")
LATENCIES = {
    "small_p50_ms": "first read of a 100 KiB file, median",
    "small_p99_ms": "the same, exceeded by one in a hundred",
    "alone": "first read of a small file, median",
    "beside": "the same beside a large file's first read",
    "alone_throttled": "first read of a small file, throttled store",
    "beside_throttled": "the same beside a large file's first read",
    "mount_first_byte": "from the mount's command to a first byte",
    "publish_first_byte": "from NodePublishVolume to a first byte",
    "publish_second_pod": "the same for a second pod of a volume",
    "publish20": "20 volumes published at once, to the last first byte",
    "recovery": "from the daemon's death to its first answer",
}
CROWDS = {
    "opens": "open and close of cached files",
    "walks": "warm walk with lstat",
    "served": "4 KiB reads that the daemon answers",
}
CROWDS_CPU = {
    "opens": "the daemon's processor time for each",
    "walks": "the daemon's processor time for each file",
    "served": "the daemon's processor time for each",
}
THREADED = {
    "threads{}_warm": "large file, page cache warm",
    "threads{}_dropped": "large file, page cache dropped",
}
NAMES = {
    NATIVE: "bare disk (ext4)",
    OBSTORE: "bare client (obstore)",
    KERNEL: "fusefs",
    CSI: "fusefs (CSI)",
    JUICEFS: "JuiceFS",
    "fusefs-nopt": "fusefs, passthrough off",
    "fusefs-local": "fusefs, durability local",
    "fusefs-writable": "fusefs, writable",
    "fusefs-pyfuse3": "fusefs, pyfuse3",
}
MIB = 1024 * 1024
DISK, BEST_PEER = "bare disk", "best peer"


class ResultError(Exception):
    """The file is not a result of the bench; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One contender's median with its lowest and highest round; `text` has the measured unit."""

    contender: str
    value: float
    low: float
    high: float
    text: str


@dataclass(frozen=True, slots=True)
class Group:
    """One row of the bench's table, with a mark for each contender."""

    row: str
    label: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Bars:
    """Rows with a bar for each contender; `reference` names the contender with ratio 1, if any."""

    title: str
    axis: str
    groups: tuple[Group, ...]
    reference: str = ""


@dataclass(frozen=True, slots=True)
class Lines:
    """A value over a count of clients (`counted` says which), with a line for each contender."""

    title: str
    axis: str
    counted: str
    counts: tuple[int, ...]
    lines: tuple[tuple[Mark, ...], ...]
    is_logarithmic: bool


@dataclass(frozen=True, slots=True)
class Picture:
    """One file: `name` is the end of its name, `note` describes the run and the machine."""

    name: str
    title: str
    panels: tuple[Bars | Lines, ...]
    note: str

    @property
    def contenders(self) -> list[str]:
        """The contenders in the picture, in the order of the bench's tables."""
        shown = {mark.contender for panel in self.panels for mark in _marks(panel)}
        return [name for name in CONTENDERS if name in shown]

    @property
    def digest(self) -> str:
        """A digest of the picture's data: the same for the same numbers, however drawn."""
        plain = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(plain.encode()).hexdigest()


def name_of(contender: str) -> str:
    """Return the name of a contender in a picture."""
    return NAMES.get(contender, contender)


def load(path: Path) -> dict[str, Any]:
    """Load a result's JSON.

    Raises:
        ResultError: it can't be read, or is something else.
    """
    try:
        result = json.loads(path.read_bytes())
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ResultError(f"{path}: not JSON: {error}") from error
    try:
        for profile in result["profiles"].values():
            list(_checked_values(profile["samples"]))
        machine, options = result["machine"], result["options"]
        for number in (machine["processors"], options["rounds"], options["large"]):
            int(number)
        str(result["date"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ResultError(f"{path}: not a result of the bench ({why})") from error
    return dict(result)


def _checked_values(samples: Mapping[str, Any]) -> Iterator[float]:
    for by_contender in samples.values():
        for rounds in by_contender.values():
            for sample in rounds:
                yield float(sample["value"])


def pictures(result: Mapping[str, Any], profile: str) -> list[Picture]:
    """Make the pictures for which the profile has measurements."""
    rows = _Rows(result["profiles"][profile]["samples"])
    both = rows.cached(CHOSEN_CACHED), rows.first(CHOSEN_FIRST)
    found: dict[str, tuple[str, list[Bars | Lines]]] = {
        # With only one of the two, this picture would be the beginning of another.
        "reads": ("Cached reads and first reads", both[0] + both[1] if all(both) else []),
        "cached": ("Cached reads", rows.cached(CACHED)),
        "first": ("First reads and first walks", rows.first(FIRST)),
        "clients": ("Many client processes at a time", rows.crowds()),
        "threads": ("Cached reads by many threads of a process", rows.threads()),
        "latency": ("Times that a program waits, less is better", rows.latencies()),
    }
    note = _note(result, profile)
    return [
        Picture(name, title, tuple(panels), note)
        for name, (title, panels) in found.items()
        if panels
    ]


def _note(result: Mapping[str, Any], profile: str) -> str:
    """Describe the run for readers of the pictures."""
    machine, options = result["machine"], result["options"]
    where = {
        "local": "SeaweedFS on the same machine as S3",
        "cloud": "SeaweedFS as S3 behind a TLS proxy: 30 ms to a first byte, 90 MB/s a connection",
    }.get(profile, "")
    rounds = int(options["rounds"])
    how = f"median of {rounds} rounds, with the lowest and the highest" if rounds > 1 else "1 round"
    share = "a quarter of the data, " if options.get("quick") else ""
    parts = [
        f"Profile {profile}: {where}",
        f"{how}; {share}the large file has {int(options['large']) // MIB:,} MiB",
        f"{machine['processors']} processors ({machine.get('model', 'unknown')}),"
        f" Linux {str(machine.get('kernel', '')).partition('-')[0]}, {str(result['date'])[:10]}",
        "compare within a row: contenders, server and reader share the processors",
    ]
    return "; ".join(parts) + "."


class _Rows:
    """The rounds of one profile, by row and contender."""

    def __init__(self, samples: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> None:
        self._rounds = {
            row: {
                name: {
                    int(sample.get("round", position)): float(sample["value"])
                    for position, sample in enumerate(rounds)
                }
                for name, rounds in by_contender.items()
                if rounds and name in CONTENDERS
            }
            for row, by_contender in samples.items()
        }

    def cached(self, rows: Sequence[str]) -> list[Bars | Lines]:
        """Make bars relative to the bare disk if it was measured, else to the best peer."""
        title = "Cached: read before, now on the local disk"
        disk = self._ratios(title, rows, (NATIVE,), DISK)
        return disk or self._ratios(title, rows, (*PEERS, JUICEFS), BEST_PEER)

    def first(self, rows: Sequence[str]) -> list[Bars | Lines]:
        title = "First: nothing is local yet"
        return self._ratios(title, rows, PEERS, BEST_PEER, without=(NATIVE,))

    def _ratios(
        self,
        title: str,
        rows: Sequence[str],
        references: Sequence[str],
        reference: str,
        without: Sequence[str] = (),
    ) -> list[Bars | Lines]:
        groups = [self._ratio_group(row, references, without) for row in rows]
        found = tuple(group for group in groups if group is not None)
        return [Bars(title, f"ratio to the {reference}", found, reference)] if found else []

    def _ratio_group(
        self, row: str, references: Sequence[str], without: Sequence[str]
    ) -> Group | None:
        by_contender = {name: by for name, by in self._of(row).items() if name not in without}
        middles = {name: statistics.median(by.values()) for name, by in by_contender.items()}
        best = max(
            (name for name in references if name in middles), key=middles.__getitem__, default=None
        )
        if best is None or len(middles) == 1 or not middles[best]:
            return None
        marks = []
        for name, rounds in by_contender.items():
            theirs = by_contender[best]
            ratios = [rounds[number] / theirs[number] for number in rounds if theirs.get(number)]
            value = middles[name] / middles[best]
            # A ratio of medians may lie outside the ratios of the rounds.
            low, high = min([value, *ratios]), max([value, *ratios])
            marks.append(Mark(name, value, low, high, _measured(row, middles[name])))
        return Group(row, LABELS[row], tuple(marks))

    def crowds(self) -> list[Bars | Lines]:
        counted = "client processes"
        panels = []
        for row, title in CROWDS.items():
            panels.append(self._lines(f"{row}{{}}", title, counted, is_logarithmic=True))
            panels.append(self._lines(f"{row}{{}}_cpu", CROWDS_CPU[row], counted))
        return [panel for panel in panels if panel is not None]

    def threads(self) -> list[Bars | Lines]:
        panels = [self._lines(row, title, "threads") for row, title in THREADED.items()]
        return [panel for panel in panels if panel is not None]

    def _lines(
        self, pattern: str, title: str, counted: str, *, is_logarithmic: bool = False
    ) -> Lines | None:
        counts = tuple(count for count in THREADS if self._of(pattern.format(count)))
        if not counts:
            return None
        marks: dict[str, list[Mark]] = {name: [] for name in CONTENDERS}
        for count in counts:
            row = pattern.format(count)
            for mark in self._marks(row):
                marks[mark.contender].append(mark)
        # A line across a missing point would suggest a measurement.
        whole = tuple(tuple(line) for line in marks.values() if len(line) == len(counts))
        if not whole:
            return None
        unit = UNITS[pattern.format(counts[0])].replace("us", "µs")
        return Lines(title, unit, counted, counts, whole, is_logarithmic)

    def latencies(self) -> list[Bars | Lines]:
        """Make a panel for each row, since their times are of different orders."""
        return [
            Bars(title, UNITS[row], (Group(row, "", self._marks(row)),))
            for row, title in LATENCIES.items()
            if self._of(row)
        ]

    def _marks(self, row: str) -> tuple[Mark, ...]:
        found = []
        for name, rounds in self._of(row).items():
            values = list(rounds.values())
            middle = statistics.median(values)
            found.append(Mark(name, middle, min(values), max(values), _measured(row, middle)))
        return tuple(found)

    def _of(self, row: str) -> dict[str, dict[int, float]]:
        """Return the rounds of a row, in the order of the bench's tables."""
        by_contender = self._rounds.get(row, {})
        return {name: by_contender[name] for name in CONTENDERS if name in by_contender}


def _measured(row: str, value: float) -> str:
    return f"{number_text(value)} {UNITS[row]}"


def _marks(panel: Bars | Lines) -> Iterator[Mark]:
    if isinstance(panel, Bars):
        for group in panel.groups:
            yield from group.marks
    else:
        for line in panel.lines:
            yield from line
