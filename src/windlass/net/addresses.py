"""Choice of the address that a process binds, and of the address that its peers use.

Both are the same unless configured otherwise. A host may have many addresses. The process uses the
first address that exists in this order: the caller's configuration, WINDLASS_HOST, the address of
this host on the route to the controller, and loopback.
"""

from __future__ import annotations

import ipaddress
import random
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from windlass.envs import environment_value
from windlass.errors import ConfigError, PeerUnreachable
from windlass.net.tls import is_tls_required

HOST_VARIABLE = "WINDLASS_HOST"
"""Environment variable with the address, name or network of this host; see `own_address`."""
LOOPBACK = "127.0.0.1"
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_EPHEMERAL_PORT = 32768
"""First ephemeral port of Linux unless the administrator has changed it."""
_FIRST_FREE_PORT = 20000
_NUM_PROBES = 100


def join_host_port(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_of(host: str, port: int, *, scheme: str = "http") -> str:
    """Return the URL `scheme://host:port`, with brackets around an IPv6 address."""
    return f"{scheme}://{join_host_port(host, port)}"


def check_url(url: str, what: str, *, may_be_plain: bool | None = None) -> SplitResult:
    """Check the URL of a server and return its parts.

    Args:
        url: URL of the server.
        what: name of the argument, for errors.
        may_be_plain: whether `http` is allowed. None: `http` is allowed unless this process requires TLS.

    Raises:
        ConfigError: the URL has another scheme, no host, an invalid port, a user, a query, a
            fragment, or unprintable characters.
    """
    plain = not is_tls_required() if may_be_plain is None else may_be_plain
    schemes = ("http", "https") if plain else ("https",)
    rule = f"{what} must be {' or '.join(schemes)}://host[:port], got {url!r}"
    try:
        parts = urlsplit(url)
        known = parts.scheme in schemes and parts.hostname is not None and parts.port != 0
    except ValueError as error:
        raise ConfigError(rule) from error
    # Refuse a query and a fragment: callers append a path to the URL, and the path would become a part of them.
    # Refuse a user, because a password would appear in logs.
    if not known or "@" in parts.netloc or "?" in url or "#" in url or not url.isprintable():
        raise ConfigError(rule)
    return parts


def split_host_port(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`; return the host, without brackets, and the port.

    Raises:
        ConfigError: the address has another form, or the port is not in 1..65535.
    """
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    good_port = port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536
    if not bare or not good_port or bracketed is not (":" in bare):
        raise ConfigError(f"address must be host:port or [v6]:port, got {address!r}")
    return bare, int(port)


def is_wildcard(host: str) -> bool:
    """Return whether `host` is empty or a wildcard such as 0.0.0.0, which peers cannot connect to."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address, which other hosts cannot reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def published_host(host: str, advertise_host: str, what: str) -> str:
    """Return the address at which peers connect to a server that binds `host`.

    The address is `advertise_host` if that is not empty, else `host`.

    Raises:
        ConfigError: the address is a wildcard, which peers cannot connect to.
    """
    told = advertise_host or host
    if is_wildcard(told):
        raise ConfigError(
            f"{what}: advertise_host must be the address that peers connect to, got {told!r} "
            f"(the server binds {host!r})"
        )
    return told


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now, for a server that cannot choose and report a port itself.

    The port is below the kernel's ephemeral range if possible, because the kernel gives ports of this range to other
    sockets at any time. Another process may still take the port before the server binds it.
    """
    try:
        end = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except OSError:
        end = _USUAL_EPHEMERAL_PORT
    ports = range(min(_FIRST_FREE_PORT, end), end)
    # Use the system's generator: a job may have set the same seed of `random` in all its processes.
    for port in random.SystemRandom().sample(ports, min(_NUM_PROBES, len(ports))):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def listen(host: str, port: int, what: str) -> socket.socket:
    """Return a socket bound to an address or name of this host, IPv4 or IPv6. The socket does not listen yet.

    Args:
        host: address or name; empty for all addresses of this host.
        port: TCP port; 0 for any free port.
        what: start of the error message: the setting or operation that needs the socket.

    Raises:
        ConfigError: the host cannot be resolved, or the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"{what}: host {host!r} cannot be resolved: {error}") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{what}: host {host!r} port {port} cannot be bound: {error}") from error
    return listener


def own_address(towards: str = "") -> str:
    """Return the address of this host that peers of this process should use.

    WINDLASS_HOST may be an address or a name of this host, or a network (`10.1.0.0/16`). A network can
    be the same on all hosts: each host uses its own address in the network.

    Args:
        towards: URL of the controller; empty for a process without a controller.

    Raises:
        ConfigError: WINDLASS_HOST is not an address of this host or is a wildcard; or this host has no address in the
            network, or no route to it; or `towards` is not a URL.
        PeerUnreachable: WINDLASS_HOST is not set, and the host name of `towards` is unknown or there is no route to it.
    """
    wanted = environment_value(HOST_VARIABLE)
    if "/" in wanted:
        return _in_network(wanted)
    if wanted:
        if is_wildcard(wanted):
            raise ConfigError(f"{HOST_VARIABLE} must name one address, got {wanted!r}")
        listen(wanted, 0, HOST_VARIABLE).close()
        return wanted
    return address_towards(towards) if towards else LOOPBACK


def address_towards(url: str) -> str:
    """Return the source address that packets from this host to the host of `url` would have. Nothing is sent.

    Raises:
        ConfigError: `url` is invalid; see `check_url`.
        PeerUnreachable: the host name is unknown, or there is no route to the host. In these cases, this
            function does not return a loopback address, because peers on other hosts could not reach it.
    """
    parts = check_url(url, "controller")
    try:
        return _source_towards(parts.hostname or "", parts.port or 80)
    except OSError as error:
        raise PeerUnreachable(
            f"no route to {url}: {error}; set {HOST_VARIABLE} to the address of this host that peers connect to"
        ) from error


def is_this_host(url: str) -> bool:
    """Return whether the host of `url` is this host: whether a socket can be bound to its address. Nothing is sent to it.

    Raises:
        ConfigError: `url` is invalid; see `check_url`.
        PeerUnreachable: the name service does not know the host.
    """
    parts = check_url(url, "controller")
    try:
        found = socket.getaddrinfo(parts.hostname, 0, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise PeerUnreachable(f"the host name in {url} cannot be resolved: {error}") from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def _in_network(wanted: str) -> str:
    """Return this host's address in the network `wanted`, such as 10.1.0.0/16.

    Raises:
        ConfigError: `wanted` is not a network, or this host has no address in the network or no route to it.
    """
    try:
        network = ipaddress.ip_network(wanted, strict=False)
    except ValueError as error:
        raise ConfigError(f"{HOST_VARIABLE} must be a host or a network: {error}") from error
    inside = network[1] if network.num_addresses > 1 else network[0]
    try:
        found = _source_towards(str(inside), 80)
    except OSError as error:
        raise ConfigError(f"{HOST_VARIABLE}: no route to {wanted}: {error}") from error
    if ipaddress.ip_address(found) not in network:
        raise ConfigError(f"{HOST_VARIABLE}: this host has no address in {wanted}, got {found}")
    return found


def _source_towards(host: str, port: int) -> str:
    """Return the source address that packets to `host` would have. Nothing is sent.

    Raises:
        OSError: `host` is unknown, or there is no route to it.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
