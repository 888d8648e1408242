"""The results: a table of medians, the targets with their ratios, and JSON.

A target compares the median of one contender with another contender's median in the same run;
beside it are the lowest and the highest ratio of the single rounds, so that a lucky median is
recognised. Rows and contenders that were not measured are left out, not filled in.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.contenders.contender import Contender
from bench.contenders.registry import BEFORE, CONTENDERS, CSI, JUICEFS, KERNEL, LOCAL, PEERS
from bench.runner import Results
from bench.workloads.table import THREADS, WORKLOADS

# Rows that a run yields beside its workloads, with units.
COSTS = {
    "alone_p99": ("alone: exceeded by one in a hundred", "ms"),
    "large_cpu": ("first_large: processor time of the daemon for each 10^9 bytes", "s/GB"),
    "shards_cpu": ("first_shards: the same", "s/GB"),
    "small_cpu": ("first_small: the same", "s/GB"),
    "small_p50_ms": ("first_small: of the files' times, the median", "ms"),
    "small_p99_ms": ("first_small: what one in a hundred exceeds", "ms"),
    "throttled_refused": ("throttled: requests that were refused", "%"),
    **{
        f"{row}{processes}_cpu": (f"{row}{processes}: processor time of the daemon for each", "us")
        for row in ("opens", "served", "walks")
        for processes in THREADS
    },
    "rss_mib": ("peak memory of the daemon and its children", "MiB"),
    "cpu_s": ("processor time of the daemon and its children", "s"),
    "connections": ("most connections open at a time", ""),
    "s3_gets": ("GET requests", ""),
    "s3_heads": ("HEAD requests", ""),
    "s3_lists": ("LIST requests", ""),
    "s3_bytes_fetched": ("bytes fetched", ""),
}


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio or value that `subject` has to reach.

    It has to reach `floor` times the best of `references`, in `row` and in the rows of `among`.
    Without references `floor` is the value itself; with `below` it is an upper limit. It is for one
    profile.
    """

    row: str
    floor: float
    references: tuple[str, ...] = ()
    subject: str = "fusefs-kernel"
    below: bool = False
    among: tuple[str, ...] = ()
    profile: str = "local"


NATIVE = ("native",)
BARE = ("obstore",)

_far = partial(Target, profile="cloud")

TARGETS = (
    Target("reread_warm", 0.90, NATIVE),
    Target("reread_dropped", 0.90, NATIVE),
    Target("par8_dropped", 0.90, NATIVE),
    Target("held_warm", 0.90, NATIVE),
    Target("rand4k_warm", 0.85, NATIVE),
    Target("rand4k_dropped8", 0.85, NATIVE),
    Target("mmap_warm", 0.85, NATIVE),
    Target("mmap_dropped", 0.85, NATIVE),
    Target("small_warm", 0.80, NATIVE),
    Target("small_warm", 1.5, (JUICEFS,)),
    Target("small_warm_bare", 0.40, NATIVE),
    Target("small_dropped", 0.80, NATIVE),
    Target("opens1", 20_000),
    Target("first_large", 0.80, ("obstore",)),
    Target("first_large", 1.0, PEERS),
    Target("first_small", 1.0, PEERS),
    Target("tree_cold", 1.0, PEERS),
    Target("tree_cold", 40_000),
    Target("tree_warm", 1.0, PEERS),
    Target("tree_warm", 0.90, NATIVE),
    Target("flat_cold", 1.0, PEERS),
    Target("flat_cold", 40_000),
    Target("flat_warm", 1.0, PEERS),
    Target("flat_warm", 0.90, NATIVE),
    Target("publish_first_byte", 250, subject=CSI, below=True),
    Target("publish20", 3, subject=CSI, below=True),
    Target("direct8", 4.0, ("fusefs-pyfuse3",), subject="fusefs-nopt"),
    Target("write_large", 0.85, ("obstore",)),
    Target("write_large", 1.0, PEERS),
    Target("write_local", 0.85, NATIVE, subject=LOCAL),
    Target("write_small", 0.85, ("obstore",)),
    Target("write_small", 1.0, PEERS),
    Target("write_small", 3.0, (KERNEL,), subject=LOCAL),
    Target("tar_x", 250),
    Target("tar_x", 1.0, PEERS),
    Target("rsync_a", 100),
    Target("rsync_a", 1.0, PEERS),
    Target("rm_rf", 1_667),
    Target("rm_rf", 1.0, PEERS),
    Target("rename_tree", 1.0, PEERS),
    Target("rename_foreign", 1.0, PEERS),
    Target("read_written", 0.90, NATIVE),
    Target("rss_mib", 250, below=True),
    *(
        Target(f"threads{threads}_{state}", 0.95, NATIVE)
        for state in ("warm", "dropped")
        for threads in THREADS
    ),
    _far("first_large", 0.90, BARE, among=("bare_large8", "bare_large32", "bare_large64")),
    _far("first_large", 1.3, PEERS),
    _far("first_shards", 0.90, BARE),
    _far("first_shards", 1.2, PEERS),
    # The bare client alone has a width of 64; either floor is enough.
    _far("first_small", 700),
    _far("first_small", 0.70, BARE, among=("bare_small64",)),
    _far("first_small", 3.0, PEERS),
    _far("folders_cold", 1.5, PEERS),
    _far("tree_cold", 1.5, PEERS),
    _far("write_256", 0.90, BARE),
    _far("write_200", 0.80, BARE),
    _far("epochs_shuffled", 47),
    _far("epochs_fixed", 45),
    _far("epochs_sequential", 45),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target with its measurements; without a reference, ratios are the values themselves."""

    target: Target
    value: float
    reference: str
    ratio: float
    lowest: float
    highest: float

    @property
    def is_met(self) -> bool:
        if self.target.below:
            return self.ratio < self.target.floor
        return self.ratio >= self.target.floor


def medians(results: Results) -> dict[str, dict[str, float]]:
    """Return the median of each row and contender over the rounds."""
    return {
        row: {
            name: statistics.median(sample.value for sample in samples.values())
            for name, samples in by_contender.items()
        }
        for row, by_contender in results.samples.items()
    }


def verdicts(results: Results) -> list[Verdict]:
    """Return the verdicts on the targets for which both sides were measured."""
    mine = [target for target in TARGETS if target.profile == results.profile]
    found = (_verdict(target, results) for target in mine)
    return [verdict for verdict in found if verdict is not None]


def _verdict(target: Target, results: Results) -> Verdict | None:
    rows = medians(results)
    value = rows.get(target.row, {}).get(target.subject)
    references = {
        (row, name): rows[row][name]
        for row in (target.row, *target.among)
        for name in target.references
        if name in rows.get(row, {})
    }
    if value is None or (target.references and not references):
        return None
    mine = results.samples[target.row][target.subject]
    if not references:
        values = [sample.value for sample in mine.values()]
        return Verdict(target, value, "", value, min(values), max(values))
    best = (min if target.below else max)(references, key=lambda each: references[each])
    theirs = results.samples[best[0]][best[1]]
    ratios = [mine[number].value / theirs[number].value for number in mine if number in theirs]
    ratio = value / references[best]
    return Verdict(
        target,
        value,
        best[1] if best[0] == target.row else f"{best[1]} {best[0]}",
        ratio,
        min(ratios, default=ratio),
        max(ratios, default=ratio),
    )


def as_text(results: Results, skipped: dict[str, str]) -> str:
    """Format the whole report for people, as Markdown."""
    tables = (_table(results), _targets(results), _versions(results))
    parts = [f"## Profile {results.profile}\n", *tables]
    parts += [f"- not measured: {name}: {reason}" for name, reason in skipped.items()]
    parts += [f"- failed: {error}" for error in results.errors]
    return "\n".join(part for part in parts if part)


def _table(results: Results) -> str:
    rows = medians(results)
    measured = {name for values in rows.values() for name in values}
    names = [name for name in (*CONTENDERS, BEFORE) if name in measured]
    described = {w.name: (w.title, w.unit) for w in WORKLOADS} | COSTS
    lines = [_line(["row", "unit", *names]), _line(["---", "---", *["---:"] * len(names)])]
    for row, (_, unit) in described.items():
        if row in rows:
            lines.append(_line([row, unit, *(_cell(row, rows[row], name) for name in names)]))
    return "\n".join(lines) + "\n"


def _cell(row: str, values: dict[str, float], name: str) -> str:
    """Format a value, with its ratio to the bare disk (or the bare client) if that was measured."""
    if name not in values:
        return ""
    value = values[name]
    base = values.get("native", values.get("obstore"))
    if row in COSTS or base is None or name in ("native", "obstore"):
        return number_text(value)
    return f"{number_text(value)} ({value / base:.2f})"


def number_text(value: float) -> str:
    """Format a value with three digits or more."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _targets(results: Results) -> str:
    lines = [
        _line(["target", "measured", "compared with", "ratio", "rounds", "at least", "met"]),
        _line(["---", "---:", "---", "---:", "---", "---:", "---"]),
    ]
    found = verdicts(results)
    for verdict in found:
        target = verdict.target
        floor = f"{'under ' if target.below else ''}{target.floor:,g}"
        ends = (verdict.lowest, verdict.highest)
        spread = " to ".join(
            f"{end:.2f}" if target.references else number_text(end) for end in ends
        )
        ratio = f"{verdict.ratio:.2f}" if target.references else ""
        who = f"{target.subject} {target.row}"
        met = "yes" if verdict.is_met else "NO"
        lines.append(
            _line([who, number_text(verdict.value), verdict.reference, ratio, spread, floor, met])
        )
    return "\n".join(lines) + "\n" if found else ""


def _versions(results: Results) -> str:
    """Compare the rows of fusefs with those of the version before, if that was measured."""
    lines = [
        _line(["row", "unit", "before", "now", "times", "rounds"]),
        _line(["---", "---", "---:", "---:", "---:", "---"]),
    ]
    units = {w.name: w.unit for w in WORKLOADS} | {row: unit for row, (_, unit) in COSTS.items()}
    for row, values in medians(results).items():
        if row not in units or BEFORE not in values or KERNEL not in values:
            continue
        old, new = results.samples[row][BEFORE], results.samples[row][KERNEL]
        ratios = [new[n].value / old[n].value for n in new if n in old and old[n].value]
        before, now = values[BEFORE], values[KERNEL]
        times = f"{now / before:.2f}" if before else ""
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
        cells = [row, units[row], number_text(before), number_text(now), times, spread]
        lines.append(_line(cells))
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def as_json(options: dict[str, Any], profiles: dict[str, Any]) -> dict[str, Any]:
    """Return a run with the facts to judge it; `profiles` come from `profile_as_json`."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "options": options,
        "profiles": profiles,
    }


def profile_as_json(
    results: Results, contenders: Sequence[Contender], skipped: dict[str, str]
) -> dict[str, Any]:
    """Return all results of a profile, with the single rounds."""
    return {
        "contenders": {
            one.name: {"version": one.version(), "command": _command(one)} for one in contenders
        },
        "skipped": skipped,
        "medians": medians(results),
        "samples": {
            row: {
                name: [{"round": number, **asdict(one)} for number, one in rounds.items()]
                for name, rounds in by.items()
            }
            for row, by in results.samples.items()
        },
        "targets": [{**asdict(verdict), "is_met": verdict.is_met} for verdict in verdicts(results)],
        "errors": results.errors,
    }


def _command(contender: Contender) -> str:
    """Return the command that starts the contender, without paths that only this run had."""
    command = contender.command().replace(str(contender.place.scratch), "SCRATCH")
    return command.replace(f"{sys.prefix}/bin/", "")


def _machine() -> dict[str, Any]:
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        # The part after the first "-" is the name of a build.
        "kernel": platform.release().partition("-")[0],
        "processors": os.cpu_count(),
        "model": models[0] if models else platform.machine(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "python": platform.python_version(),
    }
