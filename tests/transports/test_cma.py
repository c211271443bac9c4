from __future__ import annotations

import signal
import time
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from windlass.errors import PeerUnreachable, TransferFailed
from windlass.testing.transport_conformance import NBYTES, ProcessConformance, Rig
from windlass.transports.cma import CmaConfig


class TestCma(ProcessConformance):
    config: ClassVar[CmaConfig] = CmaConfig()

    def test_invalid_addresses_within_a_false_region_are_an_error(self, rig: Rig) -> None:
        wide = msgspec.structs.replace(rig.peer.region, address=4096, nbytes=(1 << 47) - 8192)
        batch = rig.batch([0, 64], [0, 64], [16, 16], regions=(wide,))
        batch.remote_addresses[1] = 4096
        message = rig.refused(batch, TransferFailed)
        assert "not mapped" in message
        rig.write(rig.batch([0], [0], [16]))

    def test_a_partial_write_continues_where_it_stopped(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from windlass.transports import cma
        from windlass.transports.process_memory import writev

        def short(pid: int, local: np.ndarray, remote: np.ndarray) -> int:
            if len(local) == 1 and int(local[0, 1]) <= 100:
                return writev(pid, local, remote)
            cut = max(len(local) // 2, 1)
            local, remote = local[:cut].copy(), remote[:cut].copy()
            take = min(int(local[-1, 1]), 100)
            local[-1, 1] = remote[-1, 1] = take
            return writev(pid, local, remote)

        monkeypatch.setattr(cma, "writev", short)
        sizes = np.array([1, 99, 100, 101, 250, 1000, 7, 333], np.uint64)
        offsets = np.arange(8, dtype=np.uint64) * np.uint64(2000)
        rig.write(rig.batch(offsets, offsets + np.uint64(5), sizes))
        rig.check_peer(rig.expected(offsets, offsets + np.uint64(5), sizes), "partial counts")

    def test_a_passed_deadline_ends_between_two_calls_and_is_a_clean_failure(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from windlass.transports import process_memory

        monkeypatch.setattr(process_memory, "MAX_CALL_NBYTES", 4096)
        rig.refused(rig.batch([0], [0], [NBYTES]), TransferFailed, deadline_s=0.0005)

    def test_a_zombie_is_unreachable(self, mortal: Rig) -> None:
        import os

        batch = mortal.batch([0], [0], [16])
        process = self.process(mortal)
        # The process is not reaped, so its pid and start time remain.
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        start = time.monotonic()
        mortal.refused(batch, PeerUnreachable)
        assert time.monotonic() - start < 1.0
