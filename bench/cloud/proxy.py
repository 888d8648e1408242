"""Builds, starts and adjusts the Go program in proxy/, which stands before the S3 server.

It ends with the process that started it, when its stdin ends. main.go says what the program does to
the bytes that pass.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from bench import processes
from bench.processes import BenchError, Usage

SOURCES = Path(__file__).parent / "proxy"
BUILD_LIMIT_S = 600.0
STOP_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance at which the server seems to be; zero means no delay and no limit.

    An answer's first byte comes at least `first_ms` after the end of its request; for `tail_share`
    of the answers `tail_ms` after it. `mb_s` (MB = 10^6 bytes) is the limit of each connection and
    direction. Requests above `requests_per_s`, the limit for all connections together, are answered
    503 SlowDown.
    """

    first_ms: float = 30.0
    tail_share: float = 0.01
    tail_ms: float = 300.0
    mb_s: float = 90.0
    requests_per_s: float = 0.0


NEAR = Distance(first_ms=0, tail_share=0, tail_ms=0, mb_s=0)


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts since the start, but `most_open` connections since the previous counts.

    `sent_bytes` are of answers, with headers and without encryption.
    """

    connections: int
    open: int
    most_open: int
    requests: int
    refused: int
    sent_bytes: int


class Proxy:
    """The proxy before the server at `target`, an http URL, from `start` to `stop`.

    `build` is a directory for the Go compiler's output, which may be kept; `directory` gets the
    root certificate and the log.
    """

    def __init__(self, target: str, directory: Path, build: Path) -> None:
        self._target = urlsplit(target).netloc
        self._directory = directory
        self._build = build
        self._process: subprocess.Popen[str] | None = None
        self._port = 0

    def __enter__(self) -> Proxy:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def endpoint_url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    @property
    def authority(self) -> Path:
        """The root certificate (PEM) that clients have to trust."""
        return self._directory / "proxy-ca.pem"

    def start(self) -> None:
        """Build the proxy if need be, and start it with no delay and no limit.

        Raises:
            BenchError: Go is missing, or the program did not start.
        """
        program = build(self._build)
        log = self._directory / "proxy.log"
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [str(program), "-target", self._target, "-ca", str(self.authority)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        port = self._process.stdout.readline()
        if not port:
            raise BenchError(f"the proxy did not start: {processes.tail(log)}")
        self._port = int(port)

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(STOP_WAIT_S)
        finally:
            processes.kill_group(process)

    def set(self, distance: Distance) -> Counts:
        """Set the distance for all further answers, and return the counts."""
        return self._order(asdict(distance))

    def counts(self) -> Counts:
        return self._order({})

    def usage(self) -> Usage:
        """Return the resources that the proxy has used since its start."""
        assert self._process is not None
        return processes.usage_of(self._process.pid)

    def _order(self, order: dict[str, float]) -> Counts:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise BenchError("the proxy has ended")
        return Counts(**json.loads(answer))


def build(directory: Path) -> Path:
    """Build the program if its sources have changed, and return its path. Blocks.

    Raises:
        BenchError: Go is missing, or the program does not compile.
    """
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    program = directory / f"s3proxy-{digest.hexdigest()[:16]}"
    if program.exists():
        return program
    places = os.pathsep.join((str(Path(sys.prefix) / "bin"), os.environ.get("PATH", os.defpath)))
    go = shutil.which("go", path=places)
    if go is None:
        raise BenchError("the profile cloud needs Go: pip install -e '.[bench]'")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ".gitignore").write_text("*\n")
    environment = {**os.environ, "GOCACHE": str(directory / "go"), "GOTOOLCHAIN": "local"}
    # The compiler's output has another name until it is complete.
    partial = program.with_suffix(".partial")
    processes.capture(
        [go, "build", "-C", str(SOURCES), "-trimpath", "-o", str(partial), "."],
        BUILD_LIMIT_S,
        environment,
    )
    partial.rename(program)
    return program
