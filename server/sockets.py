"""The server's port, bound before anything else is imported or loaded; a taken one ends the start.

Imports nothing of the server: whoever starts the engine beside it has the port first.
"""

from __future__ import annotations

import socket

from compiled_engine.errors import ConfigError

BACKLOG = 1024


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket, taken before the model is loaded; port 0 takes a free one.

    Who connects before the server runs waits in its queue.

    Raises:
        ConfigError: the address cannot be bound; one line saying why.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"--host {host} is no address: {error.strerror}", param="host") from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Two processes may bind one address until one of them listens: only this takes the port.
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; --port takes another one",
            param="port",
        ) from error
    return sock
