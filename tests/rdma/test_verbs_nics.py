"""Several NICs per rank, and registrations in steps, over true verbs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest
from nics import Nic, find_nics, tell
from test_verbs_conformance import VerbsConfig

from windlass.testing.peer_process import PeerProcess
from windlass.testing.transport_conformance import Rig, scattered
from windlass.transfer.arena import Arena
from windlass.transports.mooncake.native import MooncakeProtocol
from windlass.transports.mooncake.transport import REQUEST_NBYTES, MooncakeConfig
from windlass.transports.nixl.native import NixlWire
from windlass.transports.nixl.transport import NixlConfig
from windlass.transports.registry import create_transport

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

FIRST_S = 60.0
NBYTES = 8 << 20
STEP_NBYTES = 3 << 19


def configured(kind: str, nics: tuple[Nic, ...], step_nbytes: int = 0) -> VerbsConfig:
    """Return a configuration that uses all these devices of one host."""
    if kind == "mooncake":
        return MooncakeConfig(
            host=nics[0].host,
            protocol=MooncakeProtocol.RDMA,
            device=",".join(nic.name for nic in nics),
            max_registration_nbytes=step_nbytes,
        )
    return NixlConfig(
        host=nics[0].host,
        wire=NixlWire.RC,
        device=",".join(f"{nic.name}:1" for nic in nics),
        max_registration_nbytes=step_nbytes,
    )


@pytest.fixture(scope="session")
def two_each(request: pytest.FixtureRequest) -> tuple[tuple[Nic, ...], tuple[Nic, ...]]:
    """Provide two devices of this side and two of the peer, on one switch."""
    asked: list[str] = request.config.getoption("--rdma-device", default=[])
    names = asked[2:6] or ["rxe_c", "rxe_d", "rxe_e", "rxe_f"]
    found = find_nics(names, at_least=4)
    return (found[0], found[2]), (found[1], found[3])


@pytest.fixture(params=["nixl-rc", "mooncake"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connected(stack: ExitStack, here: VerbsConfig, there: VerbsConfig) -> Rig:
    peer = stack.enter_context(PeerProcess(there, NBYTES))
    transport = create_transport(here)
    stack.callback(transport.close)
    arena = Arena(transport, NBYTES)
    stack.callback(arena.close)
    arena.bytes.view(np.uint64)[:] = np.arange(NBYTES // 8, dtype=np.uint64) * 2654435761
    rig = Rig(transport, arena, peer)
    rig.deadline_s = FIRST_S
    return rig


def test_two_nics_of_a_rank_both_carry_bytes(
    stack: ExitStack, kind: str, two_each: tuple[tuple[Nic, ...], tuple[Nic, ...]]
) -> None:
    here, there = two_each
    rig = connected(stack, configured(kind, here), configured(kind, there))
    # This write makes the connections.
    rig.write(rig.batch([0], [0], [64]))
    sent, received = ([nic.packets_sent() for nic in nics] for nics in two_each)
    # Mooncake picks a random NIC for each of 16 requests of 1 MiB. All take the same NIC once in
    # 32 768 writes.
    for _ in range(2):
        rig.write(rig.batch([0], [0], [NBYTES]))
    rig.check_peer(rig.arena.bytes, "over two NICs")
    packets = [nic.packets_sent() - count for nic, count in zip(here, sent, strict=True)]
    answers = [nic.packets_sent() - count for nic, count in zip(there, received, strict=True)]
    names = [nic.name for nic in here]
    tell(f"{kind} over {' and '.join(names)}: twice {NBYTES} bytes, packets sent {packets}")
    tell(f"  answered by {' and '.join(nic.name for nic in there)}: {answers}")
    tell(f"  report: {rig.transport.report()}")
    assert sum(packets) >= 2 * NBYTES // 4096
    if kind == "mooncake":
        assert min(packets) >= REQUEST_NBYTES // 4096, "one of the NICs carried no request"
        assert min(answers) > 0, "one of the peer's NICs received nothing"
    else:
        # NIXL aims at halves. Each NIC must carry at least an eighth.
        assert min(packets) >= NBYTES // 4096 // 4, "one of the NICs carried almost nothing"
    for name in names:
        assert name in rig.transport.report().detail


def test_a_rank_uses_only_its_given_nic(
    stack: ExitStack, kind: str, two_each: tuple[tuple[Nic, ...], tuple[Nic, ...]]
) -> None:
    here, there = two_each
    rig = connected(stack, configured(kind, here[1:]), configured(kind, there[1:]))
    idle = [here[0].packets_sent(), there[0].packets_sent()]
    busy = here[1].packets_sent()
    rig.write(rig.batch([0], [0], [NBYTES]))
    rig.check_peer(rig.arena.bytes, "over the second NIC")
    assert here[1].packets_sent() - busy >= NBYTES // 4096
    assert [here[0].packets_sent(), there[0].packets_sent()] == idle


def test_a_region_above_the_registration_limit_is_written_across_its_seams(
    stack: ExitStack, kind: str, nics: tuple[Nic, Nic]
) -> None:
    configs = [configured(kind, (nic,), STEP_NBYTES) for nic in nics]
    rig = connected(stack, configs[0], configs[1])
    pieces = scattered(30, 250_000, 3)
    rig.write(rig.batch(*pieces))
    rig.check_peer(rig.expected(*pieces), "pieces that cross seams")
    rig.write(rig.batch([0], [0], [NBYTES]))
    rig.check_peer(rig.arena.bytes, "everything")
    sizes = nics[0].registered_nbytes()
    tell(f"{kind}: {NBYTES} bytes registered in steps of {STEP_NBYTES}: {sizes}")
    assert sizes.count(STEP_NBYTES) >= NBYTES // STEP_NBYTES
    plain = msgspec.structs.replace(configs[1], max_registration_nbytes=0)
    other = connected(stack, configs[0], plain)
    other.write(other.batch([0], [0], [NBYTES]))
    other.check_peer(other.arena.bytes, "to a peer that registers at once")
