"""Which transport a link takes: the fastest that reaches from its source to its destination.

Pure: decided from what both ranks offer, so that the controller needs none of the transports.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from windlass.errors import ConfigError
from windlass.net.addresses import HOST_VARIABLE, is_loopback, split_host_port
from windlass.transports.base import PeerEndpoint, TransportOffer


class LinkChoice(msgspec.Struct, frozen=True):
    """What one link takes.

    Attributes:
        transport: registry name. reason: why, one line for a person.
        ceiling_bytes_per_s: what the link can reach at best, by the slower of its ends' traits.
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
    """Return the fastest transport of a link.

    Args:
        source: what the rank that writes has.
        destination: how the other rank's memory can be written.
        same_host: whether both say that they run on one host, in one namespace of processes and
            one of networks, and come from one address.
        same_address: whether both come from one address, so that loopback leads from one to the
            other.

    Raises:
        ConfigError: they have none in common, or none that reaches that far; says why of each.
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
                f"transport {offer.transport} reaches processes of one host, one namespace of "
                "processes and one of networks, got a rank of another"
            )
        elif not same_address and (reason := unreachable_reason(other.endpoint)):
            reasons.append(reason)
        else:
            ceiling = min(offer.traits.ceiling_bytes_per_s, other.traits.ceiling_bytes_per_s)
            usable.append((ceiling, offer.transport))
    if not usable:
        have = f"{_names(source)} here, {_names(destination)} there"
        raise ConfigError(
            "; ".join(reasons) + "; between hosts use mooncake or nixl"
            if reasons
            else f"transport must be one that both ends have, got {have}"
        )
    usable.sort(key=lambda found: (-found[0], found[1]))
    (ceiling, name), *slower = usable
    figures = ", ".join(f"{other} ({speed / 1e9:g} GB/s)" for speed, other in slower)
    where = "one host" if same_host else "two hosts"
    why = f"the faster than {figures}" if slower else "the only one that reaches"
    return LinkChoice(name, f"{where}: {ceiling / 1e9:g} GB/s at best, {why}", ceiling)


def unreachable_reason(endpoint: PeerEndpoint) -> str:
    """Why an endpoint cannot be reached from another host; empty where it can."""
    address = endpoint.address
    try:
        host = split_host_port(address)[0]
    except ConfigError:
        host = address  # of a transport that never leaves its host, or without a port
    if not is_loopback(host):
        return ""
    return (
        f"{endpoint.transport} address must be reachable from other hosts, got {address!r}; the "
        f"transport's host or {HOST_VARIABLE} sets it"
    )


def _names(offers: Sequence[TransportOffer]) -> str:
    return ", ".join(sorted(offer.transport for offer in offers)) or "none"
