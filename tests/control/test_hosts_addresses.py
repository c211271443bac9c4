"""Tests which addresses processes bind and announce on hosts with several addresses, and on IPv6."""

from __future__ import annotations

import pytest
from host_fleet import DEADLINES, HOSTS, Fleet, fleet_on
from hosts import Network, why_no_hosts

from windlass.config import ControlConfig

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(why_no_hosts()), reason=f"hosts: {why_no_hosts()}"),
]
CONFIG = ControlConfig(deadlines=DEADLINES, heartbeat_s=8.0)
ROWS = 16
LOOPBACK = '{"type": "mooncake", "protocol": "tcp", "host": "127.0.0.1"}'
MOONCAKE = '{"type": "mooncake", "protocol": "tcp"}'
NIXL = '{"type": "nixl", "wire": "tcp", "device": "rail0"}'


@pytest.mark.parametrize("transport", [MOONCAKE, NIXL], ids=["mooncake", "nixl"])
async def test_a_fleet_of_an_ipv6_controller_uses_ipv6_everywhere(
    transport: str,
) -> None:
    with Network(HOSTS) as network:
        # Remove IPv4, so that no process can fall back to it.
        for name in HOSTS:
            network.host(name).run("ip", "-4", "address", "flush", "dev", "rail0")
        fleet = Fleet(network, CONFIG, transport, ROWS)
        try:
            await fleet.start_controller(address=network.host("control").addresses_v6[0])
            assert fleet.url.startswith("http://[fd77:0::1]:")
            await fleet.start_trainers()
            await fleet.start_engine("a", advertised="http://[fd77:0::3]:8000")
            for name, host in (("a", "a"), ("trainer0", "trainer")):
                address = (await fleet.ready(name))["address"]
                shown = network.host(host).addresses_v6[0].replace(":0::", "::")
                assert address.replace(":0::", "::").startswith(f"[{shown}]:"), address
            await fleet.complete(["a"])
            for _ in range(2):
                assert await fleet.publish() == []
                await fleet.serves(["a"])
        finally:
            await fleet.close()


@pytest.mark.parametrize(
    ("setting", "rail"),
    [("", 0), ("10.77.1.0/24", 1), ("{second}", 1)],
    ids=["route", "net", "own"],
)
async def test_a_host_with_two_networks_advertises_by_route_or_setting(
    setting: str, rail: int
) -> None:
    with Network(HOSTS, rails=2) as network:
        fleet = Fleet(network, CONFIG, MOONCAKE, ROWS)
        try:
            # The controller is on the first network.
            await fleet.start_controller()
            await fleet.start_trainers()
            second = network.host("a").addresses[1]
            environment = {"WINDLASS_HOST": setting.format(second=second)}
            await fleet.start_engine("a", environment=environment)
            address = (await fleet.ready("a"))["address"]
            assert address.startswith(network.host("a").addresses[rail] + ":")
            await fleet.ready("trainer0")
            await fleet.complete(["a"])
            assert await fleet.publish() == []
            await fleet.serves(["a"])
        finally:
            await fleet.close()


async def test_an_engine_with_a_loopback_address_is_refused_by_name(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Network(HOSTS) as network:
        async with fleet_on(network, rows=ROWS, config=CONFIG) as fleet:
            await fleet.end("a")
            await fleet.start_engine("a", transport=LOOPBACK)
            await fleet.ready("a")
            await fleet.publish()
            await fleet.serves(["b"])
            refusal = "mooncake address must be reachable from other hosts, got '127.0.0.1:"
            assert refusal in capfd.readouterr().err
            await fleet.end("a")
            await fleet.start_engine("a", advertised="http://127.0.0.1:8000")
            with pytest.raises(AssertionError, match="ended"):
                await fleet.ready("a")


async def test_an_engine_with_the_address_of_another_host_does_not_start() -> None:
    with Network(HOSTS) as network:
        async with fleet_on(network, rows=ROWS, config=CONFIG) as fleet:
            environment = {"WINDLASS_HOST": network.host("b").address}
            await fleet.start("c", "a", "engine", "c", fleet.url, MOONCAKE, str(ROWS), "", environment=environment)  # fmt: skip
            with pytest.raises(AssertionError, match="ended"):
                await fleet.ready("c")
            assert await fleet.publish() == []
