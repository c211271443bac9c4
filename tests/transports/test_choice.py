"""The choice of a link's transport from the offers of both ends."""

from __future__ import annotations

import pytest
from offers import offer_of

from windlass.errors import ConfigError
from windlass.transports.base import TransportOffer
from windlass.transports.choice import choose_transport
from windlass.transports.peers import PeerEndpoint


def has(*names: str, host: str = "192.0.2.1") -> list[TransportOffer]:
    speeds = {"cma": 6e9, "shm": 8.6e9, "mooncake": 50e9, "nixl": 1.2e9}
    found = []
    for name in names:
        local = name in {"cma", "shm"}
        endpoint = PeerEndpoint(name, "4711" if local else f"{host}:9", "1")
        found.append(offer_of(endpoint, same_host=local, ceiling_bytes_per_s=speeds[name]))
    return found


def test_a_link_takes_the_fastest_transport_that_reaches_its_peer() -> None:
    here, there = has("cma", "shm", "nixl"), has("nixl", "cma")
    within = choose_transport(here, there, same_host=True, same_address=True)
    assert within.transport == "cma"
    assert "one host: 6 GB/s at best" in within.reason
    assert "nixl (1.2 GB/s)" in within.reason
    between = choose_transport(here, there, same_host=False, same_address=False)
    assert between.transport == "nixl"
    assert "two hosts: 1.2 GB/s at best, the only usable transport" in between.reason


def test_a_link_is_as_fast_as_its_slower_end() -> None:
    endpoint = PeerEndpoint("mooncake", "192.0.2.1:9", "1")
    tcp = [offer_of(endpoint, same_host=False, ceiling_bytes_per_s=1e9), *has("nixl")]
    choice = choose_transport(has("mooncake", "nixl"), tcp, same_host=False, same_address=False)
    assert choice.transport == "nixl"


def test_an_unreachable_peer_is_refused_with_the_reason_of_each_transport() -> None:
    with pytest.raises(
        ConfigError,
        match="must be available at both ends, got cma at the source and nixl at the destination",
    ):
        choose_transport(has("cma"), has("nixl"), same_host=True, same_address=True)
    with pytest.raises(
        ConfigError, match=r"cma: both ranks must be on the same host.*use mooncake or nixl"
    ):
        choose_transport(has("cma"), has("cma"), same_host=False, same_address=True)
    with pytest.raises(ConfigError, match=r"must be reachable from other hosts, got '127.0.0.1:9'"):
        choose_transport(
            has("nixl"), has("nixl", host="127.0.0.1"), same_host=False, same_address=False
        )
