"""Addresses of servers as text, for IPv4 and IPv6, and ports that a program holds for its servers.

An address is "host:port". A host is a name or a numeric address. IPv6 has brackets there, as in
"[::1]:80", and none where a host stands alone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator, Sequence

LOOPBACK = "127.0.0.1"
ALL_ADDRESSES = "0.0.0.0"
_ALL = (ALL_ADDRESSES, "::")


def join(host: str, port: int | str) -> str:
    """Returns "host:port"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, str]:
    """Returns the host, without brackets, and the port; the port is empty if there is none."""
    host, mark, port = address.rpartition(":")
    if not mark or address.endswith("]"):
        host, port = address, ""
    return host.removeprefix("[").removesuffix("]"), port


def family(host: str) -> socket.AddressFamily:
    """Returns the family of sockets for a numeric address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_loopback(host: str) -> bool:
    """Whether only this host reaches a numeric address."""
    return ipaddress.ip_address(host).is_loopback


def is_all(host: str) -> bool:
    """Whether a server at this address listens at all addresses of its host."""
    return host in _ALL


def resolved(host: str) -> str:
    """Returns the numeric address of a host; the one of IPv4 if it has both.

    Raises:
      OSError: the host is not known.
    """
    if host in ("localhost", ""):
        return LOOPBACK
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])


@contextlib.contextmanager
def reserve_port(ports: Sequence[int] = ()) -> Iterator[int]:
    """Yields a port that is free on all addresses of this host, and that only servers can bind.

    The socket that holds it does not listen. The system gives its port to no other socket that asks
    for a free one, and servers, which reuse addresses, may bind it.

    Args:
      ports: those to choose from, the first that is free; by default any. A single one must be this
        program's alone.

    Raises:
      OSError: all of them are taken.
    """
    with _holder(ports) as holder:
        yield int(holder.getsockname()[1])


def _holder(ports: Sequence[int]) -> socket.socket:
    """Returns a socket that is bound to the first free port, and lets servers bind it too."""
    for kind in (socket.AF_INET6, socket.AF_INET):
        for port in ports or (0,):
            with contextlib.suppress(OSError):  # there is no IPv6, or the port is taken
                holder = socket.socket(kind, socket.SOCK_STREAM)
                try:
                    if len(ports) == 1:  # nobody else holds it; closed connections may be left
                        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    holder.bind(("", port))  # else alone: other holders reuse addresses too
                    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                except BaseException:
                    holder.close()
                    raise
                return holder
    if ports:
        raise OSError(
            f"reserve_port: one of the ports {ports[0]} to {ports[-1]} must be free; all "
            f"{len(ports)} are taken. Give more of them with --program.ports."
        )
    raise OSError("reserve_port: this host must have IPv4 or IPv6; it has neither.")
