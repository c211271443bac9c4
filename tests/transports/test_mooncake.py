from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from windlass.errors import (
    PeerUnreachable,
    RegionError,
    TransferFailed,
    TransferOutcomeUnknown,
    TransportUnavailable,
)
from windlass.testing.peer_process import PeerProcess
from windlass.testing.transport_conformance import NBYTES, ProcessConformance, Rig, check
from windlass.transports.base import WriteBatch
from windlass.transports.mooncake import transport as mooncake
from windlass.transports.mooncake.native import MooncakeProtocol, NativeEngine
from windlass.transports.mooncake.transport import MooncakeConfig, MooncakeTransport
from windlass.transports.peers import PeerEndpoint
from windlass.transports.registry import create_transport

TCP = MooncakeConfig(protocol=MooncakeProtocol.TCP)
BUSY_S = 20.0
"""Seconds that a step of a test may take on a busy machine."""

try:
    create_transport(TCP).close()
except TransportUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)


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

    def test_the_report_names_the_requested_wire(self, rig: Rig) -> None:
        report = rig.transport.report()
        assert (report.protocol, rig.transport.traits.one_sided) == ("tcp", False)
        assert "mooncake" in report.detail

    def test_a_range_that_the_engine_refuses_is_named_and_leaves_no_region(self, rig: Rig) -> None:
        """Only the engine has the page of the token registered."""
        token_page = int(rig.transport.endpoint().incarnation.split("@")[1].split(":")[0], 16)
        memory = np.full(16384, 7, np.uint8)
        good = [(int(memory.ctypes.data) + at, 64) for at in (0, 4096, 8192)]
        with pytest.raises(RegionError, match=rf"{token_page:#x}.*overlaps a registered region"):
            rig.transport.register_all([*good[:2], (token_page, 64), good[2]])
        for region in rig.transport.register_all(good):
            rig.transport.unregister(region)

    def test_a_listener_that_never_answers_is_unreachable_within_the_deadline(
        self, mortal: Rig, silent: str
    ) -> None:
        endpoint = msgspec.structs.replace(mortal.peer.region.endpoint, address=silent)
        region = msgspec.structs.replace(mortal.peer.region, endpoint=endpoint)
        batch = mortal.batch([0], [0], [16], endpoint=endpoint, regions=(region,))
        mortal.refused(batch, PeerUnreachable, within_s=1.5, deadline_s=0.5)
        mortal.write(mortal.batch([0], [0], [16]))

    def test_the_target_refuses_writes_to_unregistered_memory(self, rig: Rig) -> None:
        rig.peer.unregister()
        # The target ends the connection after a refusal. The outcome is "unknown" if the read that
        # checks the queue still uses that connection, or if the refusal is late.
        message = rig.refused(
            rig.batch([0, 64], [0, 64], [16, 16]), (TransferFailed, TransferOutcomeUnknown)
        )
        rig.peer.register()
        rig.check_untouched("unregistered memory")
        if "may still arrive" in message:
            rig.refused(rig.batch([0], [0], [16]), TransferOutcomeUnknown)
        else:
            rig.write(rig.batch([0], [0], [16]))

    def test_a_peer_stopped_during_a_write_is_unknown_until_the_write_returns(
        self, mortal: Rig
    ) -> None:
        batch = mortal.batch([0], [0], [NBYTES])
        process = self.process(mortal)
        transport = mortal.transport
        assert isinstance(transport, MooncakeTransport)
        started = transport.engines[0].started
        stops: Any = StopsPeer(started.engine, process)
        transport.engines[0].started = dataclasses.replace(started, engine=stops)
        ends, caught = time.monotonic() + BUSY_S, False
        while not caught:
            try:
                mortal.write(batch, 1.0)
            except TransferOutcomeUnknown:
                caught = True
            except (PeerUnreachable, TransferFailed) as error:
                # On a busy machine, the deadline may pass before the write begins.
                check(not stops.has_stopped.is_set() and time.monotonic() < ends, str(error))
        assert stops.has_stopped.wait(BUSY_S)
        mortal.refused(mortal.batch([0], [0], [16]), TransferOutcomeUnknown, deadline_s=1.0)
        process.resume()
        ends, caught = time.monotonic() + BUSY_S, False
        while not caught:
            try:
                mortal.write(batch)
                caught = True
            except TransferOutcomeUnknown as error:
                check(time.monotonic() < ends, str(error))
                # The open write continues during this round trip.
                process.digest()
        mortal.check_peer(mortal.arena.bytes, "after it went on")

    def test_a_process_restarted_at_the_same_address_is_a_new_writable_peer(
        self, mortal: Rig
    ) -> None:
        # The engine rarely gets its port back within a minute of a kill, so peers use a forwarder's
        # address. To this side it is one address with one process after another.
        with Forwarder() as forwarder:
            first = PeerProcess(TCP, NBYTES)
            behind = Behind(forwarder, first)
            rig = Rig(mortal.transport, mortal.arena, behind)
            stale = rig.batch([0], [0], [16])
            rig.write(stale)
            first.kill()
            with PeerProcess(TCP, NBYTES) as second:
                successor = Behind(forwarder, second)
                rig.refused(stale, PeerUnreachable)
                rig = Rig(mortal.transport, mortal.arena, successor)
                rig.check_untouched("the successor")
                rig.write(rig.batch([0], [0], [16]))
                assert second.read(0, 16) == mortal.arena.bytes[:16].tobytes()

    def test_rdma_without_a_nic_is_refused(self) -> None:
        script = (
            "from windlass.transports.mooncake.transport import MooncakeTransport as T\n"
            "from windlass.transports.mooncake.native import MooncakeProtocol\n"
            "from windlass.transports.mooncake.transport import MooncakeConfig\n"
            "from windlass.errors import TransportUnavailable\n"
            "try:\n"
            "    T(MooncakeConfig(host='127.0.0.1', protocol=MooncakeProtocol.RDMA))\n"
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
        assert "must be rdma, but the engine chose tcp" in done.stdout

    def test_the_address_of_another_host_is_refused(self) -> None:
        from windlass.transports.mooncake.transport import MooncakeTransport

        with pytest.raises(TransportUnavailable, match="must be an address of this machine"):
            MooncakeTransport(MooncakeConfig(host="no.such.host.invalid"))


class StopsPeer:
    """Native engine that stops the peer's process when one half of the first write has arrived.

    The engine then makes the whole write, which cannot end while the process is stopped.
    """

    def __init__(self, engine: NativeEngine, process: PeerProcess) -> None:
        self.engine, self.process = engine, process
        self.has_stopped = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def batch_transfer_sync_write(
        self, peer: str, local: list[int], remote: list[int], nbytes: list[int]
    ) -> int:
        write = self.engine.batch_transfer_sync_write
        if not self.has_stopped.is_set():
            half = [n // 2 for n in nbytes]
            if code := write(peer, local, remote, half):
                return code
            self.process.stop()
            self.has_stopped.set()
        return write(peer, local, remote, nbytes)


class Forwarder:
    """Forwarder of connections to the port that is set."""

    def __init__(self) -> None:
        self.port = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            try:
                outer = socket.create_connection(("127.0.0.1", self.port))
            except OSError:
                inner.close()
                continue
            self._sockets += [inner, outer]
            for pair in ((inner, outer), (outer, inner)):
                thread = threading.Thread(target=self._pass_on, args=pair)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def __enter__(self) -> Forwarder:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(5)


class Behind:
    """Peer process seen through a forwarder."""

    def __init__(self, forwarder: Forwarder, process: PeerProcess) -> None:
        endpoint = process.region.endpoint
        forwarder.port = int(endpoint.address.rpartition(":")[2])
        self.region = msgspec.structs.replace(
            process.region, endpoint=msgspec.structs.replace(endpoint, address=forwarder.address)
        )
        self.read = process.read
        self.digest = process.digest
        self.fill = process.fill
        self.unregister = process.unregister
        self.register = process.register
        self.fence = process.fence
        self.kill = process.kill
        self.close = process.close


def test_a_fence_stops_writes_of_old_connections_and_peers_reconnect() -> None:
    sender, receiver = create_transport(TCP), create_transport(TCP)
    try:
        source, target = np.arange(1, 4097, dtype=np.uint64), np.zeros(4096, np.uint64)
        sender.register(source.ctypes.data, source.nbytes)
        region = receiver.register(target.ctypes.data, target.nbytes)
        batch = WriteBatch(
            endpoint=receiver.endpoint(),
            local_addresses=np.array([source.ctypes.data], np.uint64),
            remote_addresses=np.array([target.ctypes.data], np.uint64),
            nbytes=np.array([source.nbytes], np.uint64),
            regions=(region.remote,),
        )
        # This fence has nothing to cut yet.
        receiver.fence(deadline_s=10.0)
        for factor in (1, 3):
            source *= np.uint64(factor)
            sender.write(batch, deadline_s=20.0)
            assert np.array_equal(source, target)
            receiver.fence(deadline_s=10.0)
    finally:
        sender.close()
        receiver.close()


Source = np.ndarray[Any, np.dtype[np.uint8]]
Sending = tuple[MooncakeTransport, Source]


def batch_to(peer: PeerProcess, source: Source) -> WriteBatch:
    return WriteBatch(
        endpoint=peer.region.endpoint,
        local_addresses=np.array([source.ctypes.data], np.uint64),
        remote_addresses=np.array([peer.region.address], np.uint64),
        nbytes=np.array([source.nbytes], np.uint64),
        regions=(peer.region,),
    )


def threads_of_peers() -> int:
    return sum(thread.name.startswith("mooncake-127.") for thread in threading.enumerate())


@pytest.fixture
def sending() -> Iterator[Sending]:
    transport = create_transport(TCP)
    assert isinstance(transport, MooncakeTransport)
    source = np.arange(1, 129, dtype=np.uint8)
    transport.register(source.ctypes.data, source.nbytes)
    yield transport, source
    transport.close()


def test_dead_peers_leave_no_thread_and_no_entry(sending: Sending) -> None:
    transport, source = sending
    before = threads_of_peers()
    with ExitStack() as stack:
        peers = [stack.enter_context(PeerProcess(TCP, NBYTES)) for _ in range(4)]
        for peer in peers:
            transport.write(batch_to(peer, source), deadline_s=20.0)
            assert peer.read(0, source.nbytes) == source.tobytes()
        assert threads_of_peers() == before + len(peers)
        for peer in peers:
            peer.kill()
        for peer in peers:
            with pytest.raises(PeerUnreachable):
                transport.write(batch_to(peer, source), deadline_s=20.0)
    assert threads_of_peers() == before
    assert transport.peers == {}


def test_an_idle_peer_keeps_no_thread_and_can_be_written_again(
    sending: Sending, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "IDLE_S", 0.05)
    transport, source = sending
    before = threads_of_peers()
    with PeerProcess(TCP, NBYTES) as peer:
        for _ in range(3):
            source += 1
            transport.write(batch_to(peer, source), deadline_s=20.0)
            assert peer.read(0, source.nbytes) == source.tobytes()
            ends = time.monotonic() + 20.0
            while threads_of_peers() > before:
                assert time.monotonic() < ends
                time.sleep(0.01)


def test_peers_written_in_turn_stay_connected_and_share_an_engine(sending: Sending) -> None:
    transport, source = sending
    with PeerProcess(TCP, NBYTES) as first, PeerProcess(TCP, NBYTES) as second:
        for peer in (first, second, first, second):
            source += 1
            transport.write(batch_to(peer, source), deadline_s=20.0)
            assert peer.read(0, source.nbytes) == source.tobytes()
        assert set(transport.peers) == {first.region.endpoint, second.region.endpoint}
        assert len(transport.engines) == 1
