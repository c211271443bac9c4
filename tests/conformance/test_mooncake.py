from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import ClassVar

import msgspec
import pytest

from windlass.errors import (
    PeerUnreachable,
    TransferFailed,
    TransferOutcomeUnknown,
    TransportUnavailable,
)
from windlass.testing.peer_process import PeerProcess
from windlass.testing.transport_conformance import NBYTES, ProcessConformance, Rig
from windlass.transports.base import PeerEndpoint
from windlass.transports.configs import MooncakeConfig, MooncakeProtocol
from windlass.transports.registry import create_transport

TCP = MooncakeConfig(protocol=MooncakeProtocol.TCP)

try:
    create_transport(TCP).close()
except TransportUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.mooncake


class TestMooncakeTcp(ProcessConformance):
    config: ClassVar[MooncakeConfig] = TCP

    def predecessor(self, endpoint: PeerEndpoint) -> PeerEndpoint:
        token, _, address = endpoint.incarnation.partition("@")
        return msgspec.structs.replace(endpoint, incarnation=f"{token[::-1]}@{address}")

    @pytest.fixture
    def silent(self) -> Iterator[str]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(8)
            yield f"127.0.0.1:{listener.getsockname()[1]}"

    def test_the_wire_is_the_one_that_was_asked_for(self, rig: Rig) -> None:
        report = rig.transport.report()
        assert (report.protocol, report.one_sided) == ("tcp", False)
        assert "mooncake" in report.detail

    def test_a_listener_that_never_answers_is_unreachable_within_the_deadline(
        self, mortal: Rig, silent: str
    ) -> None:
        endpoint = msgspec.structs.replace(mortal.peer.region.endpoint, address=silent)
        region = msgspec.structs.replace(mortal.peer.region, endpoint=endpoint)
        batch = mortal.batch([0], [0], [16], endpoint=endpoint, regions=(region,))
        mortal.refused(batch, PeerUnreachable, within_s=1.5, deadline_s=0.5)
        mortal.write(mortal.batch([0], [0], [16]))

    def test_withdrawn_memory_is_refused_by_the_target_and_that_is_a_clean_failure(
        self, rig: Rig
    ) -> None:
        rig.peer.unregister()
        rig.refused(rig.batch([0, 64], [0, 64], [16, 16]), TransferFailed)
        rig.peer.register()
        rig.check_untouched("withdrawn memory")
        rig.write(rig.batch([0], [0], [16]))

    def test_a_peer_stopped_in_mid_write_is_unknown_until_that_write_has_returned(
        self, mortal: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        batch = mortal.batch([0], [0], [NBYTES])
        process = self.process(mortal)
        process.signal_on_write(0, signal.SIGSTOP)
        caught: TransferOutcomeUnknown | None = None
        start = time.monotonic()
        while caught is None and time.monotonic() < start + 8.0:
            try:
                mortal.write(batch, 1.0)  # until the stop falls into one, not between two
            except TransferOutcomeUnknown as error:
                caught = error
            except PeerUnreachable:
                process.resume()
                process.fill(0xEE)
                process.signal_on_write(0, signal.SIGSTOP)
        assert caught is not None
        mortal.refused(mortal.batch([0], [0], [16]), TransferOutcomeUnknown, deadline_s=1.0)
        process.resume()
        process.read(0, 1)
        for _ in range(200):
            try:
                mortal.write(batch)
                break
            except TransferOutcomeUnknown:
                process.digest()  # a round trip: the write that was open goes on meanwhile
        mortal.check_peer(mortal.arena.bytes, "after it went on")

    def test_a_process_restarted_on_the_same_port_is_another_peer_and_can_be_written(
        self, mortal: Rig
    ) -> None:
        ports = {"MC_MIN_RPC_PORT": "15981", "MC_MAX_RPC_PORT": "15984"}
        first = PeerProcess(self.config, NBYTES, ports)
        rig = Rig(mortal.transport, mortal.arena, first)
        stale = rig.batch([0], [0], [16])
        rig.write(stale)
        first.kill()
        for _ in range(16):
            second = PeerProcess(self.config, NBYTES, ports)
            if second.region.endpoint.address == first.region.endpoint.address:
                break
            second.kill()
        else:
            pytest.skip("the port was not given out again in 16 tries")
        with second:
            rig.refused(stale, PeerUnreachable)
            rig = Rig(mortal.transport, mortal.arena, second)
            rig.check_untouched("the successor")
            rig.write(rig.batch([0], [0], [16]))
            assert second.read(0, 16) == mortal.arena.bytes[:16].tobytes()

    def test_rdma_without_a_nic_is_refused(self) -> None:
        script = (
            "from windlass.transports.mooncake import MooncakeTransport as T\n"
            "from windlass.transports.configs import MooncakeConfig, MooncakeProtocol\n"
            "from windlass.errors import TransportUnavailable\n"
            "try:\n"
            "    T(MooncakeConfig(protocol=MooncakeProtocol.RDMA))\n"
            "except TransportUnavailable as error:\n"
            "    print(error)\n"
        )
        environment = {k: v for k, v in os.environ.items() if k != "MC_FORCE_TCP"}
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
            env=environment,
        )
        assert "must be rdma, the engine chose tcp" in done.stdout

    def test_a_host_that_is_not_this_one_is_refused(self) -> None:
        from windlass.transports.mooncake import MooncakeTransport

        with pytest.raises(TransportUnavailable, match="must be an address of this machine"):
            MooncakeTransport(MooncakeConfig(host="no.such.host.invalid"))
