from __future__ import annotations

import time
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from windlass.errors import (
    ConfigError,
    PeerUnreachable,
    RegionError,
    TransferOutcomeUnknown,
    TransportUnavailable,
)
from windlass.testing.peer_process import PeerProcess
from windlass.testing.transport_conformance import NBYTES, ProcessConformance, Rig
from windlass.transports.configs import NixlConfig, NixlWire
from windlass.transports.registry import create_transport

CMA = NixlConfig(wire=NixlWire.CMA)
TCP = NixlConfig(wire=NixlWire.TCP, device="lo")

try:
    create_transport(CMA).close()
except TransportUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)


class TestNixlCma(ProcessConformance):
    config: ClassVar[NixlConfig] = CMA

    def test_the_wire_is_looked_up_after_the_first_write(self, rig: Rig) -> None:
        rig.write(rig.batch([0], [0], [16]))
        report = rig.transport.report()
        assert (report.protocol, report.one_sided) == ("cma", True)
        assert "memory" in report.detail

    def test_a_key_that_is_no_key_is_refused(self, rig: Rig) -> None:
        for key in ("", "nonsense", "AAAA", "\u00e9"):
            region = msgspec.structs.replace(rig.peer.region, key=key)
            rig.refused(rig.batch([0], [0], [16], regions=(region,)), RegionError)

    def test_a_wire_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(TransportUnavailable, match="wire rc"):
            create_transport(NixlConfig(wire=NixlWire.RC, device="none0:1"))

    def test_a_gpu_is_a_number_and_must_be_there(self) -> None:
        with pytest.raises(ConfigError, match="gpu: must be -1 or"):
            NixlConfig(gpu=-2)
        with pytest.raises(TransportUnavailable, match=r"GPU 99|NVIDIA driver"):
            create_transport(NixlConfig(gpu=99))

    def test_a_host_that_is_not_this_one_is_refused(self) -> None:
        with pytest.raises(TransportUnavailable, match="must be an address of this machine"):
            create_transport(NixlConfig(host="192.0.2.77"))


@pytest.mark.nixl
class TestNixlTcp(ProcessConformance):
    config: ClassVar[NixlConfig] = TCP

    def test_the_wire_is_looked_up_after_the_first_write(self, rig: Rig) -> None:
        rig.write(rig.batch([0], [0], [16]))
        report = rig.transport.report()
        assert (report.protocol, report.one_sided) == ("tcp", False)
        assert "lo" in report.detail

    def test_a_write_that_ran_out_of_time_is_unknown_until_it_is_over(self, mortal: Rig) -> None:
        batch = mortal.batch([0], [0], [NBYTES])
        mortal.write(mortal.batch([64], [0], [8]))
        process = self.process(mortal)
        process.stop()
        mortal.refused(batch, TransferOutcomeUnknown, within_s=2.0, deadline_s=0.5)
        source = np.full(4096, 5, np.uint8)
        region = mortal.transport.register(int(source.ctypes.data), source.nbytes)
        mortal.transport.unregister(region)  # waits inside for the open write
        mortal.refused(mortal.batch([0], [0], [16]), TransferOutcomeUnknown, deadline_s=0.5)
        process.resume()
        for _ in range(400):
            process.digest()  # a round trip: the write that was open goes on meanwhile
            try:
                mortal.write(batch)
                break
            except TransferOutcomeUnknown:
                continue
        mortal.check_peer(mortal.arena.bytes, "after it went on")

    def test_a_peer_that_dies_under_an_open_write_is_gone(self, mortal: Rig) -> None:
        batch = mortal.batch([0], [0], [NBYTES])
        mortal.write(mortal.batch([64], [0], [8]))
        process = self.process(mortal)
        process.stop()
        mortal.refused(batch, TransferOutcomeUnknown, within_s=2.0, deadline_s=0.5)
        process.kill()
        start = time.monotonic()
        mortal.refused(batch, PeerUnreachable)
        assert time.monotonic() - start < 1.0
        with PeerProcess(TCP, NBYTES) as successor:
            rig = Rig(mortal.transport, mortal.arena, successor)
            rig.write(rig.batch([0], [0], [4096]))
            assert successor.read(0, 4096) == mortal.arena.bytes[:4096].tobytes()
