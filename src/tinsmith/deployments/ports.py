"""The one port of the server: reserved by the process that starts it, shared by the gateway replicas of a node.

The kernel spreads connections over listening sockets that were bound with SO_REUSEPORT. The same flag would let a second server join the
first one's port in silence, so the reservation binds without it before anything else starts.
"""

import errno
import socket


class PortUnavailable(Exception):
    """The address cannot be listened on; the message is one line and ends with the remedy."""


def reserve(host: str, port: int) -> socket.socket:
    """Bind (port 0: to a free one) and never listen, so that no other server can have the address while this socket lives.

    Replicas can bind beside it with `listen_shared`. Connections that a former server left behind do not count as its use. Raises
    PortUnavailable.
    """
    reservation = _socket(host)
    try:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind((host, port))
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        reservation.close()
        raise PortUnavailable(_why(host, port, error)) from error
    return reservation


def port_of(bound: socket.socket) -> int:
    port: int = bound.getsockname()[1]
    return port


def listen_shared(host: str, port: int, backlog: int) -> socket.socket:
    """A listening socket of the shared port, whose connections do not keep the next server from it. Raises PortUnavailable."""
    listener = _socket(host)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise PortUnavailable(_why(host, port, error)) from error
    listener.setblocking(False)
    return listener


def url_of(host: str, port: int, *, is_tls: bool = False) -> str:
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)


def _why(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"gateway.port: {host}:{port} is taken by another process; stop that process or choose another port (--port, 0: a free one)"
            )
        case errno.EACCES:
            return f"gateway.port: this user may not listen on {host}:{port}; choose a port above 1023"
        case _:
            return f"gateway.host: cannot listen on {host}:{port} ({error.strerror}); choose an address of this machine"
