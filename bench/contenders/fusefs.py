"""fusefs, mounted by its command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench import processes
from bench.contenders.contender import Mount, Place
from bench.processes import BenchError, Usage
from tests.support.servers.s3_server import REGION

COMMAND_WAIT_S = 60.0


class Fusefs(Mount):
    """fusefs, which goes into the background by itself and reports its status."""

    def __init__(
        self, name: str, place: Place, options: list[str], prefix: Path = Path(sys.prefix)
    ) -> None:
        super().__init__(name, place)
        self._options = options
        self._program = str(prefix / "bin" / "fusefs")

    def missing(self) -> str | None:
        try:
            self._run("--help")
        except BenchError as error:
            return f"the command does not run: {error}"
        return None

    def command(self) -> str:
        return " ".join(["fusefs", *self._mount_arguments()])

    def start(self) -> None:
        self._prepare()
        self._run(*self._mount_arguments())
        if not processes.is_mounted(self.root):
            raise BenchError("mount returned 0, and nothing is mounted")

    def stop(self) -> None:
        try:
            if processes.is_mounted(self.root):
                self._end()
        finally:
            self._clear()

    def _end(self) -> None:
        pid = self._pid("daemon")
        try:
            self._run("umount", str(self.root))
        except BenchError:
            self._run("umount", str(self.root), "--force")
        if pid is not None:
            # The cache must not be removed while a daemon still closes it.
            processes.wait_gone(pid)

    def settle(self) -> None:
        self._run("sync", str(self.root))

    def plan(self, path: Path) -> None:
        """Send the mount a plan of the reads: a file with a path below the mount on each line."""
        self._run("plan", str(self.root), str(path))

    def usage(self) -> Usage | None:
        # The daemon is a child of its keeper, if it has one.
        pid = self._pid("keeper") or self._pid("daemon")
        return None if pid is None else processes.usage_of(pid)

    def requests(self) -> dict[str, int]:
        counts = self._status().get("s3", {})
        return {
            name: int(counts[name])
            for name in ("gets", "heads", "lists", "bytes_fetched")
            if name in counts
        }

    def _pid(self, process: str) -> int | None:
        """Return the pid of one of the mount's processes, by its name in the status, or None."""
        try:
            return int(self._status()[process]["pid"])
        except (BenchError, KeyError):
            return None

    def wait_for_daemon(self, other_than: int | None) -> int:
        """Return the pid of a daemon that answers and is not `other_than`, which was killed."""
        found: list[int] = []

        def is_new() -> bool:
            pid = self._pid("daemon")
            if pid is not None and pid != other_than:
                found.append(pid)
            return bool(found)

        processes.wait_until(is_new, f"a daemon after {other_than}")
        return found[0]

    def _status(self) -> dict[str, dict[str, int]]:
        answer = json.loads(self._run("status", str(self.root), "--json"))
        if not isinstance(answer, dict):
            raise BenchError(f"status is not one mount's: {answer}")
        return answer

    def _mount_arguments(self) -> list[str]:
        bucket = self.place.bucket
        return [
            "mount",
            f"s3://{bucket.name}",
            str(self.root),
            "--endpoint-url",
            bucket.endpoint_url,
            *([] if bucket.authority is None else ["--ca-bundle", str(bucket.authority)]),
            "--region",
            REGION,
            "--cache-dir",
            str(self.cache),
            "--no-read-only" if self.is_writable else "--read-only",
            "--log-file",
            str(self.log.with_suffix(".daemon.log")),
            *([] if self.cache_limit is None else ["--cache-size", str(self.cache_limit)]),
            *self._options,
        ]

    def _run(self, *arguments: str) -> str:
        # Output goes to files: a daemon that keeps a pipe open would block this process.
        output = self.log.with_suffix(".out")
        try:
            with output.open("wb") as out, self.log.open("ab") as errors:
                code = subprocess.run(
                    [self._program, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=errors,
                    env=self.place.bucket.environment(),
                    timeout=COMMAND_WAIT_S,
                    start_new_session=True,
                ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BenchError(f"fusefs {arguments[0]}: {error}") from error
        if code != 0:
            raise BenchError(f"fusefs {arguments[0]}: exit {code}: {processes.tail(self.log)}")
        return output.read_text()
