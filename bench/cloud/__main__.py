"""`python -m bench.cloud`: a bucket of a distant S3 server, to try things by hand.

It starts SeaweedFS and, before it, the proxy of the profile `cloud`, and prints shell
commands that give a program the endpoint, the root certificate, the keys and the bucket.
It runs until Ctrl-C or SIGTERM. Each line on stdin is a JSON object of
settings of the distance that are to change, as {"requests_per_s": 500}, or {}; it is answered
by a line of counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import signal
import sys
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from pathlib import Path

from bench import processes
from bench.bucket import Bucket
from bench.cloud.proxy import NEAR, Distance, Proxy
from bench.processes import BenchError
from tests.support.servers.s3_server import S3Server, ServerError


def main() -> int:
    arguments = _parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _serve(arguments)
    except (BenchError, ServerError) as error:
        print(f"bench.cloud: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _serve(arguments: argparse.Namespace) -> None:
    base: Path = arguments.scratch.resolve()
    with ExitStack() as cleanup:
        scratch = cleanup.enter_context(processes.scratch_directory(base, "cloud-"))
        server = cleanup.enter_context(S3Server(scratch / "server"))
        proxy = cleanup.enter_context(Proxy(server.endpoint_url, scratch, base / "build"))
        distance = _distance(arguments)
        proxy.set(distance)
        bucket = Bucket.create(server)
        for name, value in {
            **server.environment,
            "AWS_ENDPOINT_URL": proxy.endpoint_url,
            "AWS_CA_BUNDLE": str(proxy.authority),
            "BUCKET": bucket.name,
            "PLAIN_ENDPOINT_URL": server.endpoint_url,
            "SERVER_DATA": str(server.data),
        }.items():
            print(f"export {name}={shlex.quote(value)}")
        print(f"# {distance}; the server without the proxy is PLAIN_ENDPOINT_URL", flush=True)
        for line in sys.stdin:
            with contextlib.suppress(ValueError, TypeError):
                distance = replace(distance, **json.loads(line))
            print(json.dumps(asdict(proxy.set(distance))), flush=True)
        signal.pause()


def _distance(arguments: argparse.Namespace) -> Distance:
    given = {field.name: getattr(arguments, field.name) for field in fields(Distance)}
    chosen = {name: value for name, value in given.items() if value is not None}
    return replace(NEAR if arguments.near else Distance(), **chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.cloud", description=__doc__)
    usual = Distance()
    helps = {
        "first_ms": "from the end of a request to its answer's first byte",
        "tail_share": "of the answers, that wait longer",
        "tail_ms": "how long these wait",
        "mb_s": "for each connection, 10^6 bytes a second; 0: no limit",
        "requests_per_s": "for all connections; above it 503 SlowDown; 0: no limit",
    }
    for name, text in helps.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(
            option, type=float, metavar="X", help=f"{text} (default {getattr(usual, name):g})"
        )
    parser.add_argument("--near", action="store_true", help="TLS alone: no delay and no limit")
    parser.add_argument("--scratch", type=Path, default=Path(".bench-scratch"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
