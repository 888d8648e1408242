"""Serves a registry of prometheus_client over HTTP at `/metrics`, from threads."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, start_http_server

# The default without an address: IPv6's socket takes IPv4 as well, where there is IPv6.
EVERY_ADDRESS = "::"


def serve(host: str, port: int, registry: CollectorRegistry) -> Callable[[], None]:
    """Serve from now on; the result ends that.

    Each scrape has a thread of its own. Port 0 is a free port.

    Raises:
        OSError: the address can't be used.
    """
    try:
        server, thread = start_http_server(port, host or EVERY_ADDRESS, registry)
    except OSError:
        if host:
            raise
        # This machine has no IPv6.
        server, thread = start_http_server(port, "0.0.0.0", registry)

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end
