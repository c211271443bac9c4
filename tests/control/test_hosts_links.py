"""A whole update between hosts over bad lines is published everywhere or refused everywhere."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
from host_fleet import HOSTS, TRANSPORT, fleet_on
from hosts import Host, Line, Network, why_no_hosts

from windlass.config import UpdateMode

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(why_no_hosts()), reason=f"hosts: {why_no_hosts()}"),
]
NIXL = '{"type": "nixl", "wire": "tcp", "device": "rail0"}'
SERVE = """
import socket, sys
listener = socket.create_server((sys.argv[1], 5000), family=int(sys.argv[2]))
print("listens", flush=True)
connection = listener.accept()[0]
nbytes = 0
while data := connection.recv(1 << 20):
    nbytes += len(data)
print(nbytes, flush=True)
"""
SEND = """
import socket, sys, time
start = time.monotonic()
connection = socket.create_connection((sys.argv[1], 5000), 30)
connected = time.monotonic() - start
connection.sendall(bytes(int(sys.argv[2])))
connection.close()
print(connected)
"""


def send(source: Host, target: Host, address: str, nbytes: int) -> tuple[float, float]:
    """Return the seconds to connect, and until the target has every byte."""
    server = subprocess.Popen(
        target.command(sys.executable, "-c", SERVE, address, "10" if ":" in address else "2"),
        stdout=subprocess.PIPE,
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"listens\n"
        start = time.monotonic()
        connected = float(source.run(sys.executable, "-c", SEND, address, str(nbytes)))
        assert server.stdout.readline() == b"%d\n" % nbytes
        return connected, time.monotonic() - start
    finally:
        server.kill()
        server.communicate()


def require(package: str) -> None:
    """Skip the test if a transport's package is not installed.

    An import of `nixl` fails if other tests have imported cuda-bindings of another CUDA. Windlass imports its build directly.
    """
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def links() -> set[str]:
    """Return the names of this machine's interfaces."""
    return {name for _, name in socket.if_nameindex()}


def test_the_test_network_delays_drops_and_cuts_and_cleans_up() -> None:
    before = links()
    with Network(("a", "b"), rate_bit_s=80_000_000) as network:
        a, b = network.host("a"), network.host("b")
        _, seconds = send(a, b, b.address, 5_000_000)
        assert seconds > 0.4, "the rate limit holds"
        send(a, b, b.addresses_v6[0], 100_000)
        network.between("a", "b", Line(delay_s=0.1))
        connected, _ = send(a, b, b.address, 1000)
        assert 0.2 <= connected < 2
        network.between("a", "b", Line(loss=0.05, reorder=0.1))
        send(a, b, b.address, 5_000_000)
        network.isolate("a")
        with pytest.raises(Exception, match="timed out"):
            a.run(sys.executable, "-c", SEND.replace("30", "1"), b.address, "1")
        network.heal()
        send(a, b, b.address, 1000)
    assert links() == before


@pytest.mark.parametrize("delay_s", [0.001, 0.01, 0.1])
async def test_engines_are_updated_over_slow_lines(delay_s: float) -> None:
    with Network(HOSTS) as network:
        network.everywhere(Line(delay_s=delay_s))
        async with fleet_on(network) as fleet:
            for _ in range(2):
                assert await fleet.publish() == []
                await fleet.serves(["a", "b"])


@pytest.mark.parametrize("mode", list(UpdateMode))
async def test_engines_are_updated_with_lost_and_reordered_packets(
    mode: UpdateMode,
) -> None:
    with Network(HOSTS) as network:
        async with fleet_on(network, mode) as fleet:
            network.everywhere(Line(delay_s=0.002, loss=0.02, reorder=0.05))
            for _ in range(3):
                assert await fleet.publish() == []
                await fleet.serves(["a", "b"])


async def test_engines_are_updated_by_nixl_over_tcp() -> None:
    require("nixl")
    with Network(HOSTS) as network:
        network.everywhere(Line(delay_s=0.01))
        async with fleet_on(network, transport=NIXL) as fleet:
            assert await fleet.publish() == []
            await fleet.serves(["a", "b"])


@pytest.mark.parametrize("mode", list(UpdateMode))
@pytest.mark.parametrize("between", ["mooncake", "nixl"])
async def test_one_update_uses_different_transports_within_and_between_hosts(
    between: str, mode: UpdateMode
) -> None:
    """Two hosts have a trainer rank and an engine each. Every trainer rank writes both engines."""
    require(between)
    wire = {"mooncake": TRANSPORT, "nixl": NIXL}[between]
    offers = json.dumps({"type": "auto", "offers": ["cma", wire]})
    near = {("trainer/0", "a/0"), ("trainer/1", "b/0")}
    with Network(("control", "one", "two")) as network:
        network.between("one", "two", Line(delay_s=0.05))
        async with fleet_on(
            network, mode, transport=offers, num_trainers=2,
            hosts={"trainer0": "one", "a": "one", "trainer1": "two", "b": "two"},
        ) as fleet:  # fmt: skip
            for _ in range(2):
                assert await fleet.publish() == []
                await fleet.serves(["a", "b"])
            links = (await fleet.status())["status"]["links"]
            taken = {(link["source"], link["destination"]): link["transport"] for link in links}
            far = {("trainer/0", "b/0"), ("trainer/1", "a/0")}
            assert taken == dict.fromkeys(near, "cma") | dict.fromkeys(far, between)
            assert all(link["nbytes"] > 0 and link["gbps"] > 0 for link in links), links
            took = {(link["source"], link["destination"]): link["wire_s"] for link in links}
            assert max(took[link] for link in near) < min(took[link] for link in far), took
