"""The picture that `fusefs top` draws, with rich: all mounts, or one of them in detail.

Names of mounts and of what daemons report are `Text`: in a plain string rich finds markup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fusefs.diagnosis import stall_report
from fusefs.exporter.queries import MALFORMED
from fusefs.settings.display import human_duration, human_size, shown
from fusefs.top import lines
from fusefs.top.rates import Operation, Rates

COLOURS = {"cache": "green", "s3": "yellow", "kernel": "cyan"}
BAR_WIDTH = 24
SMALL_BAR_WIDTH = 8
MOST_OF_PATH = 32
# Terminals with fewer columns get fewer of the table's.
WIDE = 130
# Lines of the screen besides mounts and causes: of the table, of the causes' frame, of the keys.
_LINES_BESIDE = 8
KEYS_OF_ALL = "up/down choose   enter look into it   q quit"
KEYS_OF_ONE = "esc all mounts   q quit"


def overview(mounts: Sequence[Rates], chosen: int, width: int, height: int = 50) -> RenderableType:
    """The mounts, a row for each, and what the chosen one waits for, in `width` characters.

    Of more mounts than `height` lines have room for it shows those around the chosen one.
    """
    columns = [one for one in _COLUMNS if one.is_essential or width >= WIDE]
    table = Table(expand=True, pad_edge=False, box=box.SIMPLE_HEAD)
    for column in columns:
        is_first = column is columns[0]
        table.add_column(column.heading, justify="left" if is_first else "right", no_wrap=True)
    causes = _causes(mounts[chosen]) if mounts and mounts[chosen].is_up else None
    rows = max(1, height - _LINES_BESIDE - (len(_shown_causes(mounts[chosen])) if causes else 0))
    first = max(0, min(chosen - rows // 2, len(mounts) - rows))
    for number, mount in list(enumerate(mounts))[first : first + rows]:
        cells = [column.cell(mount) for column in columns] if mount.is_up else _silent(mount)
        table.add_row(*cells, style="reverse" if number == chosen else "")
    parts: list[RenderableType] = [table]
    if not mounts:
        parts.append(Text("no mounts"))
    elif causes is not None:
        parts.append(causes)
    of_all = f"{first + 1} to {first + rows} of {len(mounts)}   " if len(mounts) > rows else ""
    return Group(*parts, Text(f"{of_all}{KEYS_OF_ALL}", style="dim"))


def _silent(mount: Rates) -> list[RenderableType]:
    return [Text(short(mount.volume)), Text(lines.trouble(mount), style="red")]


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    cell: Callable[[Rates], RenderableType]
    is_essential: bool = False


def _waited(mount: Rates) -> Text:
    return Text.assemble(bar(mount.waited, SMALL_BAR_WIDTH, "red"), f" {mount.waited:>4.0%}")


def _warm(mount: Rates) -> str:
    target = mount.warm_target_bytes
    return f"{mount.warm_done_bytes / target:.0%}" if target else ""


_COLUMNS = (
    _Column("mount", lambda mount: Text(short(mount.volume)), True),
    _Column("read", lambda mount: lines.rate_text(mount.read_s), True),
    _Column("from", lambda mount: origins(mount)),
    _Column("sent to S3", lambda mount: lines.rate_text(mount.sent_s)),
    _Column("waited", _waited, True),
    _Column("S3", lambda mount: f"{mount.s3_s:.0f}/s"),
    _Column("errors", lambda mount: f"{mount.s3_errors_s + mount.s3_throttled_s:.1f}/s"),
    _Column("to upload", lambda mount: f"{mount.pending_files:.0f}", True),
    _Column("not read", lambda mount: f"{mount.wasted_share:.0%}"),
    _Column("warm", _warm),
)


def detail(mount: Rates, status: dict[str, Any] | None) -> RenderableType:
    """One mount; `status` is its daemon's, as far as it came."""
    heading = Text(shown(f"{mount.volume}  {mount.source}"), style="bold")
    if not mount.is_up:
        why = Text(shown(f"{lines.trouble(mount)}: {mount.why}"), style="red")
        return Group(heading, why, Text(KEYS_OF_ONE, style="dim"))
    facts = Table.grid(padding=(0, 2))
    for label, text in _facts(mount):
        facts.add_row(Text(label, style="dim"), Text(text) if isinstance(text, str) else text)
    operations = Table.grid(padding=(0, 4))
    operations.add_row(
        _operations("requests of programs", mount.requests),
        _operations("requests to S3", mount.s3_requests),
    )
    parts: list[RenderableType] = [heading, facts, _causes(mount), operations]
    parts += _stalls(status or {})
    return Group(*parts, Text(KEYS_OF_ONE, style="dim"))


def _stalls(status: dict[str, Any]) -> list[RenderableType]:
    stalls = status.get("stalls")
    if not stalls:
        return []
    try:
        return [*(Text(one) for one in stall_report.sentences(stalls)), *_slowest(stalls)]
    except MALFORMED as error:
        text = f"its status can't be read: {type(error).__name__}: {error}"
        return [Text(text, style="red")]


def failure(why: str) -> RenderableType:
    """That there is nothing to show."""
    return Group(Text(f"sampling the mounts failed: {why}", style="red"), Text("q quit"))


def _facts(mount: Rates) -> list[tuple[str, RenderableType]]:
    cache = f"{human_size(mount.cache_bytes)} of {human_size(mount.cache_limit_bytes)}"
    opens = ", ".join(f"{rate:.0f}/s {mode}" for mode, rate in mount.opens.items())
    states = ", ".join(f"{count:.0f} {state}" for state, count in mount.connections.items())
    found: list[tuple[str, RenderableType]] = [
        ("read", Text.assemble(f"{lines.rate_text(mount.read_s)} ", origins(mount))),
        ("opened", f"{opens}; passthrough {lines.rate_text(mount.opened_passthrough_s)}"),
        (
            "S3",
            f"{lines.transfer_text(mount)}; {lines.s3_text(mount)}",
        ),
        ("connections", states.replace("_", " ")),
        ("cache", cache),
        (
            "fetched ahead",
            f"{human_size(mount.prefetched_bytes)}, {mount.wasted_share:.0%} not read",
        ),
        ("uploads", lines.pending_text(mount) if mount.pending_files else "nothing waits"),
        (
            "daemon",
            f"{mount.cpu:.0%} of a processor, {human_size(mount.memory_bytes)}, "
            f"{mount.restarts:.0f} restarts",
        ),
    ]
    if mount.warm_target_bytes:
        found.append(("warm", lines.warm_text(mount)))
    return found


def _slowest(stalls: dict[str, Any]) -> list[Text]:
    return [
        Text(
            shown(
                f"{wait['operation']} of {wait['key']} waited {human_duration(wait['waited_s'])}"
            ),
            style="dim",
        )
        for wait in stall_report.slowest(stalls)
    ]


def _causes(mount: Rates) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for cause, share in [("any", mount.waited), *_shown_causes(mount)]:
        name = "waited" if cause == "any" else lines.CAUSES.get(cause, cause)
        waiting = mount.waiting.get(cause, 0.0)
        table.add_row(
            Text(name),
            bar(share, BAR_WIDTH, "red"),
            f"{share:.0%}",
            f"{waiting:.1f} requests on average",
        )
    return Panel(table, title=Text(shown(f"what {mount.volume} waits for")), title_align="left")


def _shown_causes(mount: Rates) -> list[tuple[str, float]]:
    return [(cause, share) for cause, share in mount.causes if share >= lines.LEAST_SHARE]


def _operations(title: str, found: dict[str, Operation]) -> RenderableType:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for heading in ("", "per second", "ms"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, operation in list(found.items())[:8]:
        table.add_row(Text(name), f"{operation.per_s:.0f}", f"{1e3 * operation.mean_s:.2f}")
    return table


def short(volume: str) -> str:
    """The end of a long path, which says more than its beginning."""
    volume = shown(volume)
    return volume if len(volume) <= MOST_OF_PATH else f"…{volume[1 - MOST_OF_PATH :]}"


def origins(mount: Rates) -> Text:
    """The origins of bytes, as a bar of coloured parts, and the largest part's name."""
    if not mount.read_s:
        return Text("")
    text = Text()
    for source, rate in mount.read_from.items():
        cells = round(SMALL_BAR_WIDTH * rate / mount.read_s)
        text.append("█" * cells, style=COLOURS.get(source, "white"))
    largest = max(mount.read_from, key=lambda source: mount.read_from[source])
    share = mount.read_from[largest] / mount.read_s
    return text.append(f" {share:.0%} {lines.SOURCES.get(largest, largest)}")


def bar(share: float, width: int, colour: str) -> Text:
    cells = round(width * min(1.0, share))
    return Text.assemble(("█" * cells, colour), ("░" * (width - cells), "dim"))
