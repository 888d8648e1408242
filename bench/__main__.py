"""`python -m bench`: make the data, start the server, run, report, clean up.

Needs root (it drops the page cache) and room on a real disk: `--scratch` is
where data, caches and mounts go, in a directory of their own that is removed
at the end, also after Ctrl-C or a failure. `--quick` is for trying things
out; the figures that count come from a full run. `python -m bench draw` draws
results (`bench.drawing`), as a run does at its end where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import compileall
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from bench import processes, report
from bench.bucket import Bucket
from bench.cloud.profile import PROFILES, at_distance
from bench.contenders.contender import Contender, Place
from bench.contenders.registry import BEFORE, CONTENDERS, other_version
from bench.dataset import DataSet, Sizes
from bench.drawing import command as drawing
from bench.processes import BenchError
from bench.runner import Runner
from bench.workloads.table import READING, WORKLOADS, Workload
from tests.support.servers.s3_server import S3Server, ServerError

MIB = 1024 * 1024
RESULTS = Path(__file__).parent / "results"

# Time limit of one random-read measurement: three seconds give the slowest peer some thirty
# thousand reads.
LIMIT_S = 3.0
QUICK_LIMIT_S = 1.0

# Memory-backed file systems, whose "disk" would be the page cache itself.
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
NO_JOURNAL = (
    "bench: {base} is on ext4 without a journal, which searches the inodes that were deleted in the"
    " last minute whenever it makes a file: first reads of small files are slower than on a node's"
    " disk (bench/README.md)"
)


def main() -> int:
    if sys.argv[1:2] == ["draw"]:
        return drawing.main(sys.argv[2:])
    arguments = _parser().parse_args()
    workloads = [w for w in WORKLOADS if _matches(w.name, arguments.only)]
    names = [name for name in CONTENDERS if _matches(name, arguments.contenders)]
    if not workloads or not names:
        return _refuse("nothing to run: no workload or no contender has such a name")
    if os.geteuid() != 0:
        return _refuse("needs root, to drop the page cache between measurements")
    base: Path = arguments.scratch.resolve()
    base.mkdir(parents=True, exist_ok=True)
    if _file_system(base) in MEMORY_FILE_SYSTEMS:
        return _refuse(f"{base} is in memory; name a directory on a disk with --scratch")
    if _lacks_journal(base):
        print(NO_JOURNAL.format(base=base), file=sys.stderr, flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        errors = _run(arguments, workloads, names, base)
    except KeyboardInterrupt:
        return _refuse("interrupted; all is cleaned up")
    except (BenchError, ServerError) as error:
        return _refuse(str(error))
    return 1 if errors else 0


def _run(
    arguments: argparse.Namespace, workloads: Sequence[Workload], names: list[str], base: Path
) -> list[str]:
    """Run everything and write the report; return what could not be measured."""
    sizes = Sizes().quick() if arguments.quick else Sizes()
    if arguments.size:
        sizes = replace(sizes, large=arguments.size * MIB)
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    # Compiled as after an installation, because imports take most of a mount's start.
    for checkout in (RESULTS.parents[1], *([arguments.before] if arguments.before else [])):
        for package in ("fusefs", "csi"):
            compileall.compile_dir(checkout / package, quiet=1)
    with ExitStack() as cleanup:
        scratch = cleanup.enter_context(processes.scratch_directory(base, "run-"))
        server = cleanup.enter_context(S3Server(scratch / "server"))
        bucket = Bucket.create(server)
        data = DataSet(scratch / "native", scratch / "names.json", sizes)
        if any(workload.group in READING for workload in workloads):
            print("making and uploading the data", file=sys.stderr, flush=True)
            data.create()
            data.upload(bucket.store())
            bucket.age()
        measured: dict[str, Any] = {}
        errors: list[str] = []
        for profile in arguments.profile.split(","):
            with at_distance(profile, bucket, scratch, base) as seen:
                place = Place(seen, data.root, scratch)
                contenders, skipped = _present(names, place, arguments.before)
                limit_s = QUICK_LIMIT_S if arguments.quick else LIMIT_S
                chosen = [each for each in workloads if profile in each.profiles]
                runner = Runner(profile, chosen, data, limit_s)
                runner.run(place, contenders, rounds)
            print(report.as_text(runner.results, skipped), flush=True)
            measured[profile] = report.profile_as_json(runner.results, contenders, skipped)
            errors += runner.results.errors
        options = {"rounds": rounds, "quick": arguments.quick, "large": sizes.large}
        _publish(report.as_json(options, measured))
        if errors:
            _keep_logs(scratch)
    return errors


def _present(
    names: list[str], place: Place, before: Path | None
) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders that can be measured, and why the others can't."""
    wanted = [CONTENDERS[name](name, place) for name in names]
    if before is not None:
        wanted.append(other_version(before, place))
    present: list[Contender] = []
    skipped: dict[str, str] = {}
    for contender in wanted:
        reason = contender.missing()
        if reason is None:
            present.append(contender)
        else:
            skipped[contender.name] = reason
    return present, skipped


def _publish(results: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"{datetime.now():%Y%m%d-%H%M%S}.json"
    target.write_text(json.dumps(results, indent=1))
    print(f"written to {target}")
    try:
        for picture in drawing.draw_result(target, RESULTS):
            print(f"drawn {picture}")
    except drawing.DrawingError as error:
        print(f"not drawn: {error}")


def _keep_logs(scratch: Path) -> None:
    """Copy the daemons' logs to look into a failure; the next failure replaces the copies."""
    target = RESULTS / "logs"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for log in scratch.glob("*.log"):
        shutil.copy(log, target)
    print(f"logs are in {target}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, help="default 3, with --quick 1")
    parser.add_argument(
        "--only",
        default="*",
        metavar="PATTERNS",
        help="workloads, as comma-separated patterns: " + " ".join(w.name for w in WORKLOADS),
    )
    parser.add_argument(
        "--contenders",
        default="*",
        metavar="PATTERNS",
        help="comma-separated patterns: " + " ".join(CONTENDERS),
    )
    parser.add_argument(
        "--profile",
        default=",".join(PROFILES),
        type=_profiles,
        help="comma-separated: local (the server as it is), cloud (far away, over TLS); both",
    )
    parser.add_argument("--size", type=int, metavar="MIB", help="of the large object")
    parser.add_argument(
        "--scratch",
        type=Path,
        default=Path(".bench-scratch"),
        help="directory on a real disk (default %(default)s)",
    )
    parser.add_argument(
        "--before",
        type=Path,
        metavar="CHECKOUT",
        help=f"another version, with its .venv: {BEFORE}, in every row of fusefs-kernel",
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of the data, one round")
    return parser


def _profiles(text: str) -> str:
    if not set(text.split(",")) <= set(PROFILES):
        raise argparse.ArgumentTypeError(f"not of {', '.join(PROFILES)}: {text}")
    return text


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern.strip()) for pattern in patterns.split(","))


def _file_system(path: Path) -> str:
    command = ["stat", "--file-system", "--format=%T", str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _lacks_journal(path: Path) -> bool:
    device = path.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    try:
        return Path(f"/sys/fs/ext4/{block}/journal_task").read_text().strip() == "<none>"
    except OSError:  # another file system
        return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Stop the run; a second signal must not stop the cleanup."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, frame: None)
    raise KeyboardInterrupt


def _refuse(message: str) -> int:
    print(f"bench: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
