"""Restricts a server that listens on all addresses to one address of this host. Linux only.

Courier and Reverb start gRPC servers that take a port but no address, so they listen on all of the
host's addresses. A filter on the listening socket makes the kernel drop packets to any other
address before a connection exists; connections inherit the filter. Connections that were made
before are shut down. This is not a firewall: any host that can send packets to the address can
reach the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from rlstack.rpc.addresses import ALL_ADDRESSES, family, is_all, resolved

_SO_ATTACH_FILTER, _SIOCGIFADDR = 26, 0x8915
# Classic BPF (linux/filter.h): load a byte or a word, shift, compare, return.
_BYTE, _WORD, _SHIFT, _EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
_NET = 0xFFF00000  # offsets from here on count from the beginning of the IP header
_V4_TO, _V6_TO = _NET + 16, _NET + 24  # the destination address
_KEEP, _DROP = 0xFFFFFFFF, 0
_ACCEPT_SECONDS = 5.0  # longest time for a server to accept the connections that wait for it
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_ESTABLISHED, _CLOSE_WAIT = "01", "08"  # states of connections that may have sent requests


def address_of(interface: str) -> str:
    """Returns the address of a network interface; an address is returned as it is.

    An interface has its IPv4 address, or without one its first IPv6 address that is global.

    Raises:
      ValueError: there is no such interface, or it has no such address.
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
        except OSError as error:
            if found := _ipv6_of(interface):
                return found
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                f"interface: must be an address of this host or an interface that has one "
                f"({known}); got {interface!r}: {error.strerror}."
            ) from None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_of(interface: str) -> str:
    """Returns the first global IPv6 address of an interface; "" if it has none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            number, _, _, scope, _, name = line.split()
            if name == interface and scope == "00":
                return str(ipaddress.IPv6Address(bytes.fromhex(number)))
    return ""


def address_towards(host: str) -> str:
    """Returns the address of this host from which it reaches another host.

    Raises:
      OSError: there is no way to that host.
    """
    number = resolved(host)
    with socket.socket(family(number), socket.SOCK_DGRAM) as probe:
        probe.connect((number, 9))  # sends nothing; the system chooses a way
        return str(probe.getsockname()[0])


def restrict_listeners(port: int, address: str) -> None:
    """Restricts this process's listeners on a port to one address of this host and loopback.

    Connections from this host to that address are also accepted. Call it as soon as the listeners
    have started: connections to other addresses that were made before are shut down, but requests
    that the server has received over them still run.

    Args:
      port: the port that this process listens on.
      address: a numeric address; that of all addresses changes nothing.

    Raises:
      OSError: this process does not listen on the port, the kernel has no such filters, or the
        server does not accept connections.
    """
    if is_all(address):
        return
    program = _program(address)
    kept = ctypes.create_string_buffer(program, len(program))
    option = struct.pack("HL", len(program) // 8, ctypes.addressof(kept))
    restricted = 0
    for listener in _listeners(port):
        try:
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
        except OSError as error:
            raise OSError(
                error.errno,
                f"restrict_listeners: the kernel must accept a filter for port {port}; it answered "
                f"{error.strerror}. Set the interface to {ALL_ADDRESSES} to listen on all "
                "addresses without a filter",
            ) from error
        restricted += 1
    if not restricted:
        raise OSError(f"restrict_listeners: this process must listen on port {port}; it does not.")
    _end_earlier_connections(port, address)


def _program(address: str) -> bytes:
    """Returns a filter that accepts packets to the address and to loopback, in IPv4 and IPv6."""
    wanted = ipaddress.ip_address(address)
    in_v4 = [_accept([(_BYTE, _V4_TO, 127)])]
    in_v6 = [_accept(_words(_V6_TO, ipaddress.IPv6Address("::1")))]
    if isinstance(wanted, ipaddress.IPv4Address):
        in_v4.append(_accept(_words(_V4_TO, wanted)))
    else:
        in_v6.append(_accept(_words(_V6_TO, wanted)))
    drop = (_RETURN, 0, 0, _DROP)
    v4, v6 = ([step for part in parts for step in part] + [drop] for parts in (in_v4, in_v6))
    version = [(_BYTE, 0, 0, _NET), (_SHIFT, 0, 0, 4), (_EQUAL, 0, len(v4), 4)]
    return b"".join(struct.pack("HBBI", *step) for step in (*version, *v4, *v6))


def _words(offset: int, address: _Address) -> list[tuple[int, int, int]]:
    """Returns what the words of an address must be: how to load each, where, and its value."""
    values = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
    return [(_WORD, offset + 4 * i, value) for i, value in enumerate(values)]


def _accept(values: list[tuple[int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Returns steps that accept a packet with these values; for others the steps after them run."""
    steps, length = [], 2 * len(values) + 1
    for load, offset, value in values:
        steps.append((load, 0, 0, offset))
        steps.append((_EQUAL, 0, length - len(steps) - 1, value))
    return [*steps, (_RETURN, 0, 0, _KEEP)]


def _end_earlier_connections(port: int, address: str) -> None:
    """Shuts down the connections to other addresses, which were made before the filter."""
    allowed = ipaddress.ip_address(address)
    until = time.monotonic() + _ACCEPT_SECONDS
    while True:
        # Connections can be shut down only once the server has accepted them. Look for waiting ones
        # first: those that are accepted in the meantime are then among the sockets.
        waiting = any(not _is_open_to(local, allowed) for local in _not_accepted(port))
        time.sleep(0.001)  # the server's thread may hold a new socket that has no descriptor yet
        for sock in _sockets(port):
            if not _is_open_to(_ip(sock.getsockname()[0]), allowed):
                with contextlib.suppress(OSError):  # it listens, or has ended already
                    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        sock.shutdown(socket.SHUT_RDWR)
        if not waiting:
            return
        if time.monotonic() > until:
            raise OSError(
                f"restrict_listeners: the server on port {port} must accept its connections within "
                f"{_ACCEPT_SECONDS:g} s, because those from before the filter are shut down then; "
                "it does not. Start the program again; if that does not help, let nothing connect "
                "to this host from outside while a program starts."
            )
        time.sleep(0.005)


def _is_open_to(local: _Address, allowed: _Address) -> bool:
    """Whether the filter lets packets to a local address through."""
    return local.is_loopback or local == allowed


def _ip(text: str | bytes) -> _Address:
    """Returns an address; IPv4 also for IPv4 in an IPv6 socket."""
    found = ipaddress.ip_address(text.partition("%")[0] if isinstance(text, str) else text)
    return getattr(found, "ipv4_mapped", None) or found


def _not_accepted(port: int) -> Iterator[_Address]:
    """Yields the local addresses of the connections to a port that no process has accepted yet."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/self/net", table).read_text().splitlines()[1:]
        except OSError:  # no IPv6
            continue
        for line in lines:
            _, local, _, state, *_, inode = line.split()[:10]
            host, _, local_port = local.partition(":")
            waits = state in (_ESTABLISHED, _CLOSE_WAIT) and inode == "0"
            if waits and int(local_port, 16) == port:
                # Words of four bytes, in the order of the processor.
                words = (host[i : i + 8] for i in range(0, len(host), 8))
                yield _ip(b"".join(struct.pack("=I", int(word, 16)) for word in words))


def _listeners(port: int) -> Iterator[socket.socket]:
    """Yields this process's listening sockets on a port, each with a duplicated descriptor."""
    for found in _sockets(port):
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield found


def _sockets(port: int) -> Iterator[socket.socket]:
    """Yields this process's TCP sockets on a local port, each with a duplicated descriptor."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since it was listed
            continue
        with found:
            is_ip = found.family in (socket.AF_INET, socket.AF_INET6)
            is_tcp = is_ip and found.type == socket.SOCK_STREAM
            if is_tcp and found.getsockname()[1] == port:
                yield found
