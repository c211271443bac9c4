"""Outcomes of NIXL transfers, over a fake agent with states that the test sets."""

from __future__ import annotations

import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest

from windlass.errors import PeerUnreachable, TransferOutcomeUnknown
from windlass.layout.columns import UInt64Array
from windlass.net.addresses import split_host_port
from windlass.net.clock import Deadline
from windlass.transfer.arena import Arena
from windlass.transports import liveness, region_transport
from windlass.transports.base import WriteBatch
from windlass.transports.liveness import PeerLiveness
from windlass.transports.network import GRACE_S
from windlass.transports.nixl import transport as nixl
from windlass.transports.nixl.native import NativeAgent, NixlWire, WireLog
from windlass.transports.nixl.transport import NixlConfig, NixlTransport

NBYTES = 4096
WORD_NBYTES = 8
SECONDS = 20.0


@dataclass(eq=False)
class Transfer:
    """One native transfer. It begins in the agent's `state`."""

    source: int
    nbytes: int
    state: str = "DONE"


class Agent:
    """Fake of NIXL's calls that moves no bytes."""

    def __init__(self, name: str) -> None:
        self.name, self.state, self.word = name, "DONE", "DONE"
        self.begun: list[Transfer] = []
        self.parted: list[set[str]] = []
        """States of the transfers at each removal of a peer."""
        self.deregistered: list[object] = []
        self.has_begun, self.has_lost_a_word = threading.Event(), threading.Event()

    def register_memory(self, regions: object, *_: object) -> object:
        return regions

    def get_reg_descs(self, regions: object, _: str) -> object:
        return regions

    def deregister_memory(self, regions: object) -> None:
        self.deregistered.append(regions)

    def get_partial_agent_metadata(self, *_: object) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return metadata

    def get_xfer_descs(self, pieces: UInt64Array, _: str) -> UInt64Array:
        return pieces

    def initialize_xfer(self, _: str, local: UInt64Array, *__: object) -> Transfer:
        return Transfer(int(local[0, 0]), int(local[0, 1]))

    def remove_remote_agent(self, _: str) -> None:
        self.parted.append({transfer.state for transfer in self.begun})
        # The next word uses a new connection.
        self.word = "DONE"

    def transfer(self, transfer: Transfer) -> None:
        if transfer.nbytes == WORD_NBYTES:
            transfer.state = self.word
            if self.word == "ERR":
                self.has_lost_a_word.set()
            return
        transfer.state = self.state
        self.begun.append(transfer)
        self.has_begun.set()

    def check_xfer_state(self, transfer: Transfer) -> str:
        return transfer.state


class Log:
    def check(self, _: object) -> None:
        pass


class Ends:
    """A transport that writes from two arenas into another transport's memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wire: NixlWire) -> None:
        agents: list[Agent] = []

        def start(name: str, *_: object) -> tuple[NativeAgent, WireLog, str]:
            agents.append(Agent(name))
            return cast("NativeAgent", agents[-1]), cast("WireLog", Log()), ""

        monkeypatch.setattr(nixl, "start_agent", start)
        monkeypatch.setattr(nixl, "native_errors", lambda: (RuntimeError,))
        self.config = NixlConfig(host="127.0.0.1", wire=wire)
        self.ours, self.theirs = NixlTransport(self.config), NixlTransport(self.config)
        self.agent = agents[0]
        self.arenas = [Arena(self.ours, NBYTES), Arena(self.ours, NBYTES)]
        self.target = Arena(self.theirs, NBYTES)

    def write(self, arena: Arena, deadline_s: float, target: Arena | None = None) -> None:
        region = (target or self.target).region.remote
        batch = WriteBatch(
            endpoint=region.endpoint,
            local_addresses=np.array([arena.address], np.uint64),
            remote_addresses=np.array([region.address], np.uint64),
            nbytes=np.array([NBYTES], np.uint64),
            regions=(region,),
        )
        self.ours.write(batch, deadline_s=deadline_s)

    def lose(self) -> list[Transfer]:
        """Write from each arena in its own thread. The second thread gives up last."""
        self.agent.state, lost = "PROC", list[Exception]()
        before = len(self.agent.begun)

        def write(arena: Arena, deadline_s: float) -> None:
            try:
                self.write(arena, deadline_s)
            except TransferOutcomeUnknown as error:
                lost.append(error)

        jobs = zip(self.arenas, (2.0, 2.5), strict=True)
        threads = [threading.Thread(target=write, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        self.agent.state = "DONE"
        assert len(lost) == 2
        found = {transfer.source: transfer for transfer in self.agent.begun[before:]}
        return [found[arena.address] for arena in self.arenas]

    def lose_one(self) -> Transfer:
        """Write from the first arena and give up."""
        self.agent.state = "PROC"
        with pytest.raises(TransferOutcomeUnknown):
            self.write(self.arenas[0], 0.3)
        self.agent.state = "DONE"
        return self.agent.begun[-1]

    def write_on(self) -> tuple[threading.Thread, list[Exception]]:
        """Start a write from the first arena in a thread, and return the thread and its errors."""
        self.agent.has_begun.clear()
        self.agent.state, found = "PROC", list[Exception]()

        def write() -> None:
            try:
                self.write(self.arenas[0], SECONDS)
            except TransferOutcomeUnknown as error:
                found.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        assert self.agent.has_begun.wait(SECONDS)
        self.agent.state = "DONE"
        return thread, found

    def write_elsewhere(self) -> None:
        """Write to a process that this transport does not know yet."""
        other = NixlTransport(self.config)
        with Arena(other, NBYTES) as target:
            self.write(self.arenas[1], SECONDS, target)
        other.close()

    def close(self) -> None:
        for transfer in self.agent.begun:
            transfer.state = "DONE"
        self.ours.close()
        self.target.close()
        self.theirs.close()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Yield ends that are connected by CMA, or by the wire of the test's parameter."""
    monkeypatch.setattr(region_transport, "NEVER_FREED", [])
    found = Ends(monkeypatch, getattr(request, "param", NixlWire.CMA))
    yield found
    found.close()


@pytest.mark.parametrize("first", [0, 1])
def test_a_peer_is_open_until_each_of_its_lost_writes_is_over(ends: Ends, first: int) -> None:
    """This happens in a relay, where four threads write to one engine."""
    ends.write(ends.arenas[0], SECONDS)
    lost = ends.lose()
    memory = [weakref.ref(arena.bytes) for arena in ends.arenas]
    for arena in ends.arenas:
        arena.close()
    other = Arena(ends.ours, NBYTES)
    lost[first].state = "DONE"
    with pytest.raises(TransferOutcomeUnknown, match="an earlier write may still continue"):
        ends.write(other, 0.3)
    assert memory[first]() is None
    assert memory[1 - first]() is not None
    lost[1 - first].state = "DONE"
    ends.write(other, SECONDS)
    assert memory[1 - first]() is None
    other.close()


def test_a_lost_write_keeps_only_the_arena_that_it_reads(ends: Ends) -> None:
    """The transfer to a dead peer never ends, while a trainer continues to make plans."""
    lost = ends.lose_one()
    ends.arenas.append(Arena(ends.ours, NBYTES))
    memory = [weakref.ref(arena.bytes) for arena in ends.arenas]
    for arena in ends.arenas:
        arena.close()
    assert [ref() is None for ref in memory] == [False, True, True]
    another = NixlTransport(ends.config)
    target, source = Arena(another, NBYTES), Arena(ends.ours, NBYTES)
    ends.write(source, SECONDS, target)
    assert memory[0]() is not None
    lost.state = "DONE"
    # A write to any peer frees the memory.
    ends.write(source, SECONDS, target)
    assert memory[0]() is None
    source.close()
    target.close()
    another.close()


def test_an_arena_under_an_open_write_is_freed_when_the_write_ends(ends: Ends) -> None:
    thread, found = ends.write_on()
    memory = [weakref.ref(arena.bytes) for arena in ends.arenas]
    for arena in ends.arenas:
        arena.close()
    assert [ref() is None for ref in memory] == [False, True]
    ends.agent.begun[-1].state = "DONE"
    thread.join(SECONDS)
    assert found == []
    assert memory[0]() is None


def test_closing_during_a_write_ends_it_with_an_error_and_keeps_its_memory(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "STRANDED", stranded := list[object]())
    thread, found = ends.write_on()
    memory = [weakref.ref(arena.bytes) for arena in ends.arenas]
    for arena in ends.arenas:
        arena.close()
    freed = len(ends.agent.deregistered)
    ends.ours.close()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert "the transport was closed; bytes may still arrive" in str(found[0])
    assert len(ends.agent.deregistered) == freed
    assert [ref() is None for ref in memory] == [False, True]
    assert len(stranded) == len(region_transport.NEVER_FREED) == 1


def test_an_interrupted_write_keeps_its_memory_until_it_is_over(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends.write(ends.arenas[0], SECONDS)
    ends.agent.state = "PROC"

    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PeerLiveness, "wait_ended", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ends.write(ends.arenas[0], SECONDS)
    memory = weakref.ref(ends.arenas[0].bytes)
    ends.arenas[0].close()
    assert memory() is not None
    ends.agent.state = ends.agent.begun[-1].state = "DONE"
    ends.write(ends.arenas[1], SECONDS)
    assert memory() is None


def test_no_write_waits_for_the_listener_of_a_disconnected_peer(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a partition listeners are silent, and each would be waited for for a second."""
    is_cut, connect, held = threading.Event(), socket.create_connection, list[bool]()
    theirs = split_host_port(ends.theirs.endpoint().address)
    monkeypatch.setattr(liveness, "RECONNECT_S", 0.0)

    class Breakable(socket.socket):
        def recv(self, *arguments: int) -> bytes:
            if is_cut.is_set():
                raise ConnectionResetError
            return super().recv(*arguments)

    def connect_unless_cut(address: tuple[str, int], timeout: float) -> socket.socket:
        made = connect(address, timeout)
        if address != theirs:
            return made
        if not is_cut.is_set():
            return Breakable(fileno=made.detach())
        made.close()
        held.append(is_held(peer.lock))
        raise TimeoutError("a partition")

    monkeypatch.setattr(socket, "create_connection", connect_unless_cut)
    ends.write(ends.arenas[0], SECONDS)
    (peer,) = ends.ours.peers.values()
    is_cut.set()
    ends.write_elsewhere()
    ends.lose()
    with pytest.raises(TransferOutcomeUnknown):
        ends.write(ends.arenas[0], 0.1)
    assert held
    assert not any(held)
    is_cut.clear()


def is_held(lock: threading.RLock) -> bool:
    """Return whether the calling thread holds a lock, so that another thread cannot take it."""
    taken: list[bool] = []

    def take() -> None:
        taken.append(lock.acquire(timeout=1.0))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return not taken[0]


@pytest.mark.parametrize("ends", [NixlWire.TCP], indirect=True)
def test_a_peer_is_not_removed_under_a_transfer_of_another_thread(ends: Ends) -> None:
    """This happens in a relay when the engine's fence cuts the connection of some threads."""
    agent = ends.agent
    ends.write(ends.arenas[0], SECONDS)
    agent.has_begun.clear()
    agent.state = "PROC"
    jobs = [threading.Thread(target=ends.write, args=(arena, SECONDS)) for arena in ends.arenas]
    jobs[0].start()
    assert agent.has_begun.wait(SECONDS)
    agent.state, agent.word = "DONE", "ERR"
    with pytest.raises(
        PeerUnreachable, match="other writes to this peer still run; nothing was sent"
    ):
        ends.write(ends.arenas[1], 2.0)
    assert agent.parted == []
    agent.has_lost_a_word.clear()
    jobs[1].start()
    assert agent.has_lost_a_word.wait(SECONDS)
    # The second thread must wait for the transfer of the first. It would otherwise raise after `GRACE_S`.
    time.sleep(4 * GRACE_S)
    assert jobs[1].is_alive()
    agent.begun[1].state = "DONE"
    for job in jobs:
        job.join(SECONDS)
    assert agent.parted == [{"DONE"}]
    assert [t.source for t in agent.begun] == [ends.arenas[i].address for i in (0, 0, 1)]


def test_a_dead_peer_is_not_removed_during_a_call(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the transport would lose track of the memory that the call uses."""
    ends.write(ends.arenas[0], SECONDS)
    (peer,) = ends.ours.peers.values()
    wait_ended, may_look = PeerLiveness.wait_ended, threading.Event()

    def wait_long(connection: PeerLiveness, timeout_s: float, wake: int = -1) -> bool:
        if connection is peer.liveness:
            assert may_look.wait(SECONDS)
        return wait_ended(connection, timeout_s, wake)

    monkeypatch.setattr(PeerLiveness, "wait_ended", wait_long)
    thread, found = ends.write_on()
    ends.target.close()
    ends.theirs.close()
    wait_until(peer.liveness.has_ended)
    ends.write_elsewhere()
    assert peer in ends.ours.peers.values()
    ends.agent.begun[1].state = "DONE"
    may_look.set()
    thread.join(SECONDS)
    assert found == []
    ends.write_elsewhere()
    assert peer not in ends.ours.peers.values()


def wait_until(is_so: Callable[[], bool]) -> None:
    before = time.monotonic()
    while not is_so():
        assert time.monotonic() - before < SECONDS
        time.sleep(0.001)


def test_a_write_to_a_peer_removed_by_another_thread_is_unreachable(
    ends: Ends,
) -> None:
    """The peer is removed between two native calls of a batch. The transport itself is open."""
    ends.write(ends.arenas[0], SECONDS)
    (peer,) = ends.ours.peers.values()
    ends.target.close()
    ends.theirs.close()
    assert peer.liveness.wait_ended(SECONDS)
    ends.write_elsewhere()
    assert peer not in ends.ours.peers.values()
    column = np.array([ends.arenas[0].address], np.uint64)
    with pytest.raises(PeerUnreachable, match="the peer's process has ended"):
        peer.write((column, column, column), Deadline.after(SECONDS, "write"))
