"""Offers of transports for ranks of tests."""

from __future__ import annotations

from windlass.transports.base import TransportOffer
from windlass.transports.peers import PeerEndpoint
from windlass.transports.traits import TransportTraits, WireReport

__all__ = ["GPU_TRAITS", "offer_of"]

GPU_TRAITS = TransportTraits(same_host=True, one_sided=True, ceiling_bytes_per_s=1e9, gpu=0)
"""Traits of a network transport that registers the memory of GPU 0."""


def offer_of(
    endpoint: PeerEndpoint,
    protocol: str = "numbers",
    detail: str = "",
    *,
    same_host: bool = True,
    ceiling_bytes_per_s: float = 1e9,
) -> TransportOffer:
    """Return the offer of one transport, named by its endpoint."""
    traits = TransportTraits(
        same_host=same_host, one_sided=True, ceiling_bytes_per_s=ceiling_bytes_per_s
    )
    return TransportOffer(endpoint, traits, WireReport(endpoint.transport, protocol, detail))
