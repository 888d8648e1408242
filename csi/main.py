"""The command `fusefs-csi`: node, controller, all, daemons, list.

`node` serves kubelet on each node, `controller` serves the provisioner and the resizer once per
cluster, and `all` serves both on one socket, for tests and single machines. `daemons` runs the
mounts' daemons. `list` shows the volumes of a node's pods.

Every failure is one line on standard error that begins with `fusefs-csi: `. Exit status: 0 after
SIGTERM, 1 after a failure, 2 if the command line, the file of the stores or the file of the cluster
caches cannot be used.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from fusefs import __version__
from fusefs.daemon.log_handlers import OneLineFormatter
from fusefs.settings.arguments import Parser

try:
    from csi.daemons import main as daemons
    from csi.errors import CsiError, InvalidArgumentError
    from csi.identity import IdentityService
    from csi.node import config, listing
    from csi.node import service as node
    from csi.server import Server, Service
    from csi.volume.stores import ConfigurationError, Stores, read_stores
except ModuleNotFoundError as error:
    # `fusefs-csi` is installed even without the packages that only the driver needs.
    if (error.name or "").partition(".")[0] not in ("grpc", "google", "prometheus_client"):
        raise
    sys.exit(
        f"fusefs-csi: the Python package {error.name} is missing:"
        " install the wheel with its extra, pip install './fusefs_s3-….whl[csi]'"
    )

Maker = Callable[[argparse.Namespace, Stores], Service]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of the command line and return its exit status."""
    options = make_parser().parse_args(arguments)
    _set_up_log(options.log_level.upper())
    try:
        return int(options.run(options))
    except (ConfigurationError, InvalidArgumentError) as error:
        _complain(error)
        return 2
    except (OSError, CsiError) as error:
        _complain(error)
        return 1


def _set_up_log(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(OneLineFormatter())
    # Libraries log the headers of requests, which include tokens.
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for package in ("csi", "fusefs"):
        logging.getLogger(package).setLevel(level)


def _complain(what: object) -> None:
    print(f"fusefs-csi: {' '.join(str(what).split())}", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = Parser(prog="fusefs-csi", description="The fusefs CSI driver.")
    parser.add_argument("--version", action="version", version=f"fusefs-csi {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    each_node = commands.add_parser("node", help="serve kubelet on a node")
    _add_server_flags(each_node, node.make_service)
    config.add_flags(each_node)

    once = commands.add_parser("controller", help="serve the provisioner and the resizer")
    _add_server_flags(once, _controller)
    _add_controller_flags(once)

    both = commands.add_parser("all", help="serve both on one socket")
    _add_server_flags(both, _controller, node.make_service)
    _add_controller_flags(both)
    config.add_flags(both)

    listing_command = commands.add_parser(
        "list",
        help="list the volumes of this node's pods",
        description="List the volumes of this node's pods: pod, claim, source, identity, what the "
        "identity has cached, and the files that are not in the bucket yet. In the driver's "
        "container: kubectl exec POD -c driver -- fusefs-csi list.",
    )
    _add_state_flag(listing_command)
    listing.add_flags(listing_command)
    listing_command.set_defaults(run=listing.run, log_level="warning")

    supervisor = commands.add_parser("daemons", help="run the daemons of the node's mounts")
    _add_common_flags(supervisor)
    daemons.add_flags(supervisor)
    supervisor.set_defaults(run=daemons.run)
    return parser


def _controller(options: argparse.Namespace, stores: Stores) -> Service:
    # Imported here, because its S3 client would cost each node's driver 0.13 s and 13 MB.
    from csi.controller.service import ControllerService

    return ControllerService(stores, options.cluster_id.strip())


def _add_controller_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster-id",
        default="",
        metavar="TEXT",
        help="id of this cluster, unique among clusters with volumes in the same buckets;"
        " without it no data are ever deleted, and equal claims of two clusters may share a folder",
    )


def _add_server_flags(parser: argparse.ArgumentParser, *makers: Maker) -> None:
    parser.add_argument(
        "--endpoint", required=True, metavar="unix:///PATH", help="the socket to serve on"
    )
    parser.add_argument(
        "--stores", type=Path, metavar="FILE", help="file with the S3 stores besides aws (TOML)"
    )
    _add_common_flags(parser)
    parser.set_defaults(run=lambda options: _serve(options, makers))


def _add_state_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state-dir",
        type=Path,
        default=Path("/run/fusefs-csi"),
        metavar="DIR",
        help="directory for state that a reboot may remove (default: %(default)s)",
    )


def _add_common_flags(parser: argparse.ArgumentParser) -> None:
    _add_state_flag(parser)
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least severe level to log (default: %(default)s)",
    )


def _serve(options: argparse.Namespace, makers: Sequence[Maker]) -> int:
    stores = read_stores(options.stores)
    services = [make(options, stores) for make in makers]
    nodes = [service for service in services if isinstance(service, node.NodeService)]
    server = Server(options.endpoint, [IdentityService(), *services])
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    server.start()
    if metrics := getattr(options, "metrics", None):
        # Imported here, so that drivers without metrics save prometheus_client's memory.
        from fusefs.exporter.collector import MountCollector, registry_of, serve

        host, port = metrics
        serve(host, port, registry_of(MountCollector(nodes[0].metrics_targets)))
    logging.getLogger(__name__).info("serving %s at %s", options.command, server.path)
    # Python runs signal handlers only in this thread, so it has to wake up regularly.
    while not ending.wait(1.0):
        pass
    server.stop()
    for each in nodes:
        each.close()
    # At its ordinary end the interpreter would wait for the threads of calls that were cut off,
    # which may wait for a store or for uploads, and the node would have no driver meanwhile. A call
    # may stop at any point, because a repeated call continues from there.
    logging.shutdown()
    os._exit(0)
