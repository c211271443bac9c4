"""Choice of a transport for each link: the fastest transport that both ranks offer and that reaches the destination.

The controller chooses from the offers that both ranks have sent, so it needs no transport itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from windlass.errors import ConfigError
from windlass.net.addresses import HOST_VARIABLE, is_loopback, split_host_port
from windlass.transports.base import TransportOffer
from windlass.transports.peers import PeerEndpoint


class LinkChoice(msgspec.Struct, frozen=True):
    """Transport of one link.

    Attributes:
        transport: registry name of the transport.
        reason: explanation of the choice in one line, for status and reports.
        ceiling_bytes_per_s: highest possible throughput of the link, limited by its slower end.
    """

    transport: str
    reason: str
    ceiling_bytes_per_s: float


def choose_transport(
    source: Sequence[TransportOffer],
    destination: Sequence[TransportOffer],
    *,
    same_host: bool,
    same_address: bool,
) -> LinkChoice:
    """Return the fastest transport that both ranks of a link offer and that reaches the destination.

    Args:
        source: offers of the rank that writes.
        destination: offers of the rank that gets the bytes.
        same_host: whether both ranks report the same host, PID namespace and network namespace, and connect to the
            controller from the same address.
        same_address: whether both ranks connect to the controller from the same address. A loopback address of the
            destination is then usable.

    Raises:
        ConfigError: the ranks have no transport in common, or no common transport reaches the destination. The
            message contains the reason for each transport.
    """
    theirs = {offer.transport: offer for offer in destination}
    usable: list[tuple[float, str]] = []
    reasons: list[str] = []
    for offer in source:
        other = theirs.get(offer.transport)
        if other is None:
            continue
        if offer.traits.same_host and not same_host:
            reasons.append(
                f"transport {offer.transport}: both ranks must be on the same host, with the same PID namespace and "
                "network namespace"
            )
        elif not same_address and (reason := unreachable_reason(other.endpoint)):
            reasons.append(reason)
        else:
            ceiling = min(offer.traits.ceiling_bytes_per_s, other.traits.ceiling_bytes_per_s)
            usable.append((ceiling, offer.transport))
    if not usable:
        have = f"{_names(source)} at the source and {_names(destination)} at the destination"
        raise ConfigError(
            "; ".join(reasons) + "; between hosts use mooncake or nixl"
            if reasons
            else f"transport must be available at both ends, got {have}"
        )
    usable.sort(key=lambda found: (-found[0], found[1]))
    (ceiling, name), *slower = usable
    figures = ", ".join(f"{other} ({speed / 1e9:g} GB/s)" for speed, other in slower)
    where = "one host" if same_host else "two hosts"
    why = f"faster than {figures}" if slower else "the only usable transport"
    return LinkChoice(name, f"{where}: {ceiling / 1e9:g} GB/s at best, {why}", ceiling)


def unreachable_reason(endpoint: PeerEndpoint) -> str:
    """Return an error text if an endpoint has a loopback address, which other hosts cannot reach; otherwise ""."""
    address = endpoint.address
    try:
        host = split_host_port(address)[0]
    except ConfigError:
        # Transports within one host use an address without a port.
        host = address
    if not is_loopback(host):
        return ""
    return (
        f"{endpoint.transport} address must be reachable from other hosts, got {address!r}; set `host` of the "
        f"transport, or the environment variable {HOST_VARIABLE}"
    )


def _names(offers: Sequence[TransportOffer]) -> str:
    """Return the names of the offered transports as text."""
    return ", ".join(sorted(offer.transport for offer in offers)) or "none"
