"""The transport suite over true verbs, and the wire that the bytes really took."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import ClassVar

import msgspec
import pytest
from nics import Nic, tell

from windlass.errors import TransportUnavailable
from windlass.testing.peer_process import PeerProcess
from windlass.testing.transport_conformance import NBYTES, Peer, ProcessConformance, Rig
from windlass.transports.base import OneSidedTransport
from windlass.transports.mooncake.native import MooncakeProtocol
from windlass.transports.mooncake.transport import MooncakeConfig
from windlass.transports.nixl.native import NixlWire
from windlass.transports.nixl.transport import NixlConfig
from windlass.transports.peers import PeerEndpoint
from windlass.transports.registry import create_transport

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

VerbsConfig = MooncakeConfig | NixlConfig


class VerbsConformance(ProcessConformance):
    """Suite that derives `config` from the available devices."""

    # Emulated processors share one host.
    deadline_s: ClassVar[float] = 60.0
    prompt_s: ClassVar[float] = 10.0
    config: ClassVar[VerbsConfig]
    peer_config: ClassVar[VerbsConfig]
    nics: ClassVar[tuple[Nic, Nic]]
    queue_pair: ClassVar[str]

    @classmethod
    def make_config(cls, nic: Nic) -> VerbsConfig:
        raise NotImplementedError

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def both_ends(cls, nics: tuple[Nic, Nic]) -> Iterator[None]:
        cls.nics = nics
        cls.config, cls.peer_config = (cls.make_config(nic) for nic in nics)
        before = [nic.packets_sent() for nic in nics]
        yield
        sent = [nic.packets_sent() - count for nic, count in zip(nics, before, strict=True)]
        tell(f"{cls.__name__}: packets sent {nics[0].name} {sent[0]}, {nics[1].name} {sent[1]}")

    def start_peer(self, transport: OneSidedTransport) -> Peer:
        return PeerProcess(self.peer_config, NBYTES)

    def test_bytes_take_the_requested_wire(self, rig: Rig) -> None:
        here, there = self.nics
        before = here.packets_sent(), there.packets_sent()
        rig.write(rig.batch([0], [0], [NBYTES]))
        rig.check_peer(rig.arena.bytes, "the whole arena")
        sent = here.packets_sent() - before[0]
        report = rig.transport.report()
        pairs = {pair.kind for pair in here.queue_pairs(os.getpid())}
        tell(f"{report.transport}: asked {self.config}\n  report: {report}")
        tell(f"  here:  {here.describe(os.getpid())}")
        tell(f"  there: {there.describe(self.process(rig).pid)}")
        tell(f"  {NBYTES} bytes written: {sent} packets sent by {here.name}")
        assert self.queue_pair in pairs
        assert sent >= NBYTES // 4096, "the device did not carry the bytes"
        assert self.wire_of(report.protocol)
        assert here.name in report.detail

    def wire_of(self, protocol: str) -> bool:
        """Return whether the report has the requested protocol."""
        raise NotImplementedError


class NixlVerbs(VerbsConformance):
    wire: ClassVar[NixlWire]

    @classmethod
    def make_config(cls, nic: Nic) -> VerbsConfig:
        return NixlConfig(host=nic.host, wire=cls.wire, device=f"{nic.name}:1")

    def wire_of(self, protocol: str) -> bool:
        return protocol.split("_")[0] == self.wire.value

    def test_an_absent_device_is_refused(self) -> None:
        with pytest.raises(TransportUnavailable, match="none0"):
            create_transport(msgspec.structs.replace(self.config, device="none0:1"))


class TestNixlReliable(NixlVerbs):
    wire: ClassVar[NixlWire] = NixlWire.RC
    queue_pair: ClassVar[str] = "RC"


class TestNixlDatagram(NixlVerbs):
    wire: ClassVar[NixlWire] = NixlWire.UD
    queue_pair: ClassVar[str] = "UD"


class TestMooncakeRdma(VerbsConformance):
    queue_pair: ClassVar[str] = "RC"

    @classmethod
    def make_config(cls, nic: Nic) -> VerbsConfig:
        return MooncakeConfig(host=nic.host, protocol=MooncakeProtocol.RDMA, device=nic.name)

    def wire_of(self, protocol: str) -> bool:
        return protocol == "rdma"

    def predecessor(self, endpoint: PeerEndpoint) -> PeerEndpoint:
        token, _, address = endpoint.incarnation.partition("@")
        return msgspec.structs.replace(endpoint, incarnation=f"{token[::-1]}@{address}")

    def test_an_absent_device_is_refused(self) -> None:
        with pytest.raises(TransportUnavailable, match="rdma"):
            create_transport(msgspec.structs.replace(self.config, device="none0"))
