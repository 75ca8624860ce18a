"""Whether something answers at the address of a cluster: engines wait for one that does not, Ray for ten minutes."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

SECONDS = 10.0
"""That an address is tried for."""


def check_address(executor: str, address: str, start: str, *, speaks_first: bool = False) -> None:
    """Check that an address `host:port`, with a protocol before it or without, takes connections.

    An address of another form (`auto`) is left to the engine, which knows at once.

    Args:
        executor: its name.
        address: of the cluster.
        start: how such a cluster is started.
        speaks_first: whether it sends something as soon as there is a connection, which others do not.

    Raises:
        ValueError: nothing answers there; says why, and what to do.
    """
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError as error:  # no such port, or an odd bracket
        raise ValueError(
            f"--executor {executor}: expected an address such as 10.0.0.1:8786, got {address!r}"
        ) from error
    if host is None or port is None:
        return
    try:
        with socket.create_connection((host, port), timeout=SECONDS) as connection:
            if speaks_first and not connection.recv(1):
                raise ConnectionResetError("it hangs up")
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or error
        raise ValueError(
            f"--executor {executor}: no cluster answers at {address} ({why}); start a cluster there ({start}), "
            "correct the option address, or leave it out to have one started on this machine"
        ) from error
