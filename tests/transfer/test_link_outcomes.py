"""The sender waits for each started link and reports unknown outcomes, whatever another link meets."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from memory_transport import GpuMemoryTransport, MemoryFabric, MemoryTransport
from numpy_gpu import numpy_gpu

from windlass.backends.relay import RelayingReceiver
from windlass.config import UpdateMode
from windlass.control.relay_messages import Relay
from windlass.errors import (
    PeerUnreachable,
    PlanError,
    TransferFailed,
    TransferOutcomeUnknown,
    TransportUnavailable,
)
from windlass.layout.box import Box
from windlass.layout.columns import UInt64Array
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.memory.ops import ChunkDigests, MemoryOps
from windlass.net.clock import Deadline
from windlass.net.messages import RoundId
from windlass.planning.planner import plan_transfer
from windlass.planning.relay import RelayGroup
from windlass.testing.wrapped_transport import WrappedTransport
from windlass.transfer.base import ParameterMemory
from windlass.transfer.bindings import DestinationBinding, LinkStatus, Relayed
from windlass.transfer.payload import Payload
from windlass.transfer.receiver import Receiver
from windlass.transfer.relay import TIMEOUT_SPREAD, RelayNode, RelaySender, RelaySource
from windlass.transfer.sender import Sender
from windlass.transports.base import WriteBatch

COUNT = 600
SECONDS = 20.0
ENGINES = ("engine-a/0", "engine-b/0", "engine-c/0")
ROUND = RoundId(1, 1)


def manifest(worker: str, role: Role, dtype: DType) -> ShardManifest:
    builder = ManifestBuilder(worker, role)
    builder.add_parameter("w", nbytes=COUNT * dtype.itemsize, dtype=dtype)
    builder.add_shard("w", (COUNT,), Box((0,), (COUNT,)), "w")
    return builder.build()


class Scripted(WrappedTransport):
    """Transport that calls `script[endpoint address]` with the write instead of writing."""

    def __init__(self, inner: MemoryTransport) -> None:
        super().__init__(inner)
        self.script: dict[str, Callable[[Callable[[], None]], None]] = {}
        self.written: list[str] = []

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        def write() -> None:
            self.inner.write(batch, deadline_s=deadline_s)

        do = self.script.get(batch.endpoint.address)
        if do is None:
            write()
        else:
            do(write)
        self.written.append(batch.endpoint.address)


class Fleet:
    """One trainer rank and three engine ranks. All links are cast, and so packed."""

    def __init__(
        self, arena_nbytes: int = 0, kind: type[MemoryTransport] = MemoryTransport
    ) -> None:
        fabric = MemoryFabric()
        ours = manifest("trainer/0", Role.TRAINER, DType.FLOAT32)
        theirs = [manifest(name, Role.ENGINE, DType.BFLOAT16) for name in ENGINES]
        self.trained = np.arange(COUNT, dtype="<f4") + 1
        self.plan = plan_transfer([ours], theirs)
        self.served = {name: np.zeros(COUNT, "<u2") for name in ENGINES}
        self.transports: dict[str, Scripted] = {}
        self.receivers: dict[str, Receiver] = {}
        self.bindings: list[DestinationBinding] = []
        for target in theirs:
            name, memory = target.worker, self.served[target.worker]
            transport = self.transports[name] = Scripted(kind(fabric, name))
            region = transport.register(memory.ctypes.data, memory.nbytes)
            receiver = Receiver(transport, target, [memory.ctypes.data], [region])
            self.receivers[name] = receiver
            part = self.plan.parts(sending=False, all_names=True)[name]
            self.bindings.append(receiver.connect(part, UpdateMode.IN_PLACE))
        self.transport = Scripted(kind(fabric, "trainer"))
        where = [ParameterMemory(self.trained.ctypes.data, self.trained.nbytes)]
        self.sender = Sender(self.transport, ours, lambda: where, arena_nbytes=arena_nbytes)
        self.sender.connect(
            self.plan.parts(sending=True, all_names=True)["trainer/0"], self.bindings
        )
        self.sender.prepare()

    @property
    def script(self) -> dict[str, Callable[[Callable[[], None]], None]]:
        """Script of the trainer's transport."""
        return self.transport.script

    def write(self) -> dict[str, LinkStatus]:
        sent = self.sender.write(0, ENGINES, SECONDS)
        return {link.destination: link.status for link in sent.links}

    def close(self) -> None:
        self.sender.close()
        for name in ENGINES:
            self.receivers[name].close()
            self.transports[name].close()
        self.transport.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    found = Fleet()
    yield found
    found.close()


def raises(error: Exception) -> Callable[[Callable[[], None]], None]:
    def do(_: Callable[[], None]) -> None:
        raise error

    return do


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("a bug"), LinkStatus.UNKNOWN),
        (MemoryError("none left"), LinkStatus.UNKNOWN),
        (OSError(24, "too many open files"), LinkStatus.UNKNOWN),
        (TransportUnavailable("another wire; nothing was sent"), LinkStatus.FAILED),
        (TransferFailed("over"), LinkStatus.FAILED),
        (PeerUnreachable("gone"), LinkStatus.UNREACHABLE),
    ],
)
@pytest.mark.parametrize("first", ["engine-a/0", "engine-c/0"])
def test_an_error_of_one_link_does_not_hide_outcomes_of_other_links(
    fleet: Fleet, error: Exception, status: LinkStatus, first: str
) -> None:
    stopped = threading.Event()

    def stop(_: Callable[[], None]) -> None:
        stopped.set()
        raise error

    def lose(_: Callable[[], None]) -> None:
        assert stopped.wait(SECONDS)
        raise TransferOutcomeUnknown("bytes may still arrive")

    def arrive_late(write: Callable[[], None]) -> None:
        assert stopped.wait(SECONDS)
        write()

    second, third = (name for name in ENGINES if name != first)
    fleet.script.update({first: stop, second: lose, third: arrive_late})
    assert fleet.write() == {
        first: status,
        second: LinkStatus.UNKNOWN,
        third: LinkStatus.OK,
    }


@pytest.mark.parametrize("arena_nbytes", [0, 512], ids=["whole", "ring"])
def test_the_time_of_a_slow_link_is_not_counted_for_other_links(arena_nbytes: int) -> None:
    fleet, slow_s = Fleet(arena_nbytes), 0.2

    def crawl(write: Callable[[], None]) -> None:
        time.sleep(slow_s)
        write()

    fleet.script["engine-b/0"] = crawl
    sent = fleet.sender.write(0, ENGINES, SECONDS)
    fleet.close()
    took = {link.destination: link.wire_s for link in sent.links}
    assert slow_s <= took["engine-b/0"] <= sent.wire_s
    assert all(0 < took[name] < slow_s for name in ("engine-a/0", "engine-c/0"))


def test_an_unexpected_error_takes_the_arena_out_of_use(fleet: Fleet) -> None:
    arena = fleet.sender.packer.slot.arena
    assert arena is not None
    fleet.script["engine-b/0"] = raises(RuntimeError("a bug"))
    assert fleet.write()["engine-b/0"] is LinkStatus.UNKNOWN
    assert fleet.sender.packer.slot.arena not in {None, arena}
    # The arena is still mapped.
    assert arena.nbytes > 0


@pytest.mark.parametrize("unforeseen", [OSError(12, "no memory"), MemoryError("no memory")])
def test_an_unknown_outcome_is_reported_without_memory_for_another_arena(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, unforeseen: Exception
) -> None:
    def refuse(*_: object) -> None:
        raise unforeseen

    fleet.script["engine-a/0"] = raises(TransferOutcomeUnknown("bytes may still arrive"))
    with monkeypatch.context() as patch:
        patch.setattr("windlass.transfer.packer.Arena", refuse)
        assert fleet.write()["engine-a/0"] is LinkStatus.UNKNOWN


def test_a_link_without_a_thread_does_not_hide_outcomes_of_other_links(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, refused = ThreadPoolExecutor.submit, threading.Event()
    last = next(b.endpoint for b in fleet.bindings if b.worker == "engine-c/0")

    def refuse(threads: ThreadPoolExecutor, job: Callable[..., float], *args: Any) -> Future[float]:
        match args:
            case ((WriteBatch(endpoint=peer), *_), *_) if peer == last:
                refused.set()
                raise RuntimeError("can't start new thread")
        return submit(threads, job, *args)

    def lose(_: Callable[[], None]) -> None:
        assert refused.wait(SECONDS)
        raise TransferOutcomeUnknown("bytes may still arrive")

    fleet.script["engine-a/0"] = lose
    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    assert fleet.write() == {
        "engine-a/0": LinkStatus.UNKNOWN,
        "engine-b/0": LinkStatus.OK,
        "engine-c/0": LinkStatus.UNKNOWN,
    }


@pytest.mark.parametrize("packing", [MemoryError("none left"), PlanError("a row of blocks")])
@pytest.mark.parametrize(
    ("wire", "status"),
    [
        (TransferOutcomeUnknown("bytes may still arrive"), LinkStatus.UNKNOWN),
        (OSError(5, "input or output"), LinkStatus.UNKNOWN),
        (PeerUnreachable("gone"), LinkStatus.UNREACHABLE),
        (None, LinkStatus.FAILED),
    ],
)
def test_a_packing_error_reports_the_outcome_of_bytes_on_the_wire(
    monkeypatch: pytest.MonkeyPatch,
    packing: Exception,
    wire: Exception | None,
    status: LinkStatus,
) -> None:
    fleet = Fleet(arena_nbytes=512)
    ring, stopped = fleet.sender.packer.ring, threading.Event()

    def stop(program: object, peer: object) -> Iterator[object]:
        batches = ring(program, peer)  # type: ignore[arg-type]
        yield next(batches)
        if program.peer == "engine-b/0":  # type: ignore[attr-defined]
            stopped.set()
            raise packing
        yield from batches

    def end(write: Callable[[], None]) -> None:
        assert stopped.wait(SECONDS)
        if wire is not None:
            raise wire
        write()

    fleet.script["engine-b/0"] = end
    monkeypatch.setattr(fleet.sender.packer, "ring", stop)
    assert fleet.write() == {
        "engine-a/0": LinkStatus.OK,
        "engine-b/0": status,
        "engine-c/0": LinkStatus.OK,
    }
    fleet.close()


class Chain:
    """Chain: the trainer feeds the first engine, which feeds the other two."""

    def __init__(self, kind: type[MemoryTransport]) -> None:
        self.fleet = Fleet(kind=kind)
        group = RelayGroup(members=ENGINES, stripes=((-1, 0, 0),), chunk_nbytes=256)
        nodes = {name: RelayNode(self.fleet.receivers[name], "127.0.0.1") for name in ENGINES}
        self.nodes = nodes
        addresses = [node.open() for node in nodes.values()]
        self.bound = group, self.fleet.bindings, addresses
        for node in nodes.values():
            node.connect(*self.bound)
        self.source = RelaySource(self.fleet.sender)
        self.source.connect([group], self.fleet.bindings, addresses)
        self.fleet.sender.prepare()
        self.source.prepare()

    def run(self) -> tuple[dict[str, LinkStatus], dict[str, Relayed]]:
        """Return the outcomes of the trainer's links and of the engines' parts."""
        parts: dict[str, Relayed] = {}

        def take_part(name: str) -> None:
            parts[name], _ = self.nodes[name].run(ROUND, SECONDS)

        threads = [threading.Thread(target=take_part, args=(name,)) for name in ENGINES]
        for thread in threads:
            thread.start()
        sent = self.source.write(ROUND, 1, ENGINES, SECONDS)
        for thread in threads:
            thread.join(SECONDS)
        return {link.destination: link.status for link in sent.links}, parts

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()
        self.fleet.close()


@pytest.fixture(params=[MemoryTransport, GpuMemoryTransport], ids=["host", "gpu"])
def chain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Chain]:
    """Yield a chain in host memory, and one with kernels in numpy."""
    monkeypatch.setattr("windlass.memory.cuda.gpu.shared_gpu", lambda _: numpy_gpu())
    found = Chain(request.param)
    yield found
    found.close()


def test_a_relay_in_order_delivers_every_byte_to_every_engine(chain: Chain) -> None:
    links, parts = chain.run()
    assert set(links.values()) == {LinkStatus.OK}
    assert not any(part.missing or part.unknown_to or part.unknown_from for part in parts.values())
    trained = torch.from_numpy(chain.fleet.trained).to(torch.bfloat16).view(torch.int16).numpy()
    assert all((held == trained.view("<u2")).all() for held in chain.fleet.served.values())
    for name, part in parts.items():
        assert part.passed_on.keys() <= {*ENGINES} - {name}
        carried = [sent for sent in part.passed_on.values() if sent.nbytes]
        assert sum(sent.nbytes for sent in carried) == part.nbytes
        assert all(0 < sent.wire_s <= part.wire_s for sent in carried)
    assert sum(part.nbytes for part in parts.values()) == 2 * trained.nbytes


def test_an_engine_reports_the_peer_it_may_still_write_after_an_unexpected_error(
    chain: Chain,
) -> None:
    script = chain.fleet.transports["engine-a/0"].script
    script["engine-b/0"] = raises(RuntimeError("a bug"))
    _, parts = chain.run()
    assert parts["engine-a/0"].unknown_to == ("engine-b/0",)
    assert parts["engine-b/0"].unknown_from == ("engine-a/0",)
    assert parts["engine-c/0"].missing == ()


def test_engines_that_cannot_relay_report_their_missing_upstream(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr("windlass.transfer.relay.RelayRound.on_chunk", refuse)
    links, parts = chain.run()
    assert links["engine-a/0"] is LinkStatus.OK
    assert set(parts) == set(ENGINES)
    assert all(part.missing == ("trainer/0",) for part in parts.values())


def test_a_trainer_tells_its_engine_of_an_unexpected_error(
    chain: Chain,
) -> None:
    chain.fleet.script["engine-a/0"] = raises(OSError(5, "input or output"))
    links, parts = chain.run()
    assert links["engine-a/0"] is LinkStatus.UNKNOWN
    assert parts["engine-a/0"].unknown_from == ("trainer/0",)


@pytest.mark.parametrize(
    ("wire", "told"),
    [
        (TransferOutcomeUnknown("bytes may still arrive"), TransferOutcomeUnknown),
        (TransferFailed("over"), MemoryError),
    ],
)
def test_a_link_that_cannot_start_does_not_hide_the_outcome_of_a_root(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, wire: Exception, told: type[Exception]
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("none left")

    chain.fleet.script["engine-a/0"] = raises(wire)
    monkeypatch.setattr(chain.fleet.sender, "write", refuse)
    node = chain.nodes["engine-a/0"]
    part = threading.Thread(target=node.run, args=(ROUND, SECONDS))
    part.start()
    with pytest.raises(told):
        chain.source.write(ROUND, 1, ENGINES, SECONDS)
    part.join(SECONDS)


def test_a_last_chunk_that_could_not_be_verified_is_missing(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, found = chain.nodes["engine-a/0"], list[tuple[Relayed, frozenset[str]]]()
    make, num_taken = Payload.digests, itertools.count(1)

    def digests_of(payload: Payload, memory: MemoryOps, addresses: UInt64Array) -> ChunkDigests:
        digests = make(payload, memory, addresses)
        take = digests.take

        def refuse(chunks: Sequence[int], deadline_s: float) -> dict[int, str]:
            if next(num_taken) == payload.num_chunks:
                raise MemoryError("none left")
            return take(chunks, deadline_s)

        monkeypatch.setattr(digests, "take", refuse)
        return digests

    with monkeypatch.context() as patch:
        patch.setattr(Payload, "digests", digests_of)
        node.connect(*chain.bound)
    part = threading.Thread(target=lambda: found.append(node.run(ROUND, SECONDS)))
    part.start()
    chain.source.write(ROUND, 1, ENGINES, SECONDS)
    part.join(SECONDS)
    assert found[0][0].missing == ("trainer/0",)


def die_in_mid_relay(chain: Chain, *, with_a_word: bool) -> tuple[Relayed, frozenset[str]]:
    """Let the trainer connect to the first engine, then end its connection."""
    node = chain.nodes["engine-a/0"]
    found: list[tuple[Relayed, frozenset[str]]] = []
    part = threading.Thread(target=lambda: found.append(node.run(ROUND, SECONDS)))
    part.start()
    sender = RelaySender(node.open(), "trainer/0", ROUND, Deadline.after(SECONDS, "test"))
    if with_a_word:
        sender.end(unknown=False)
    sender.close()
    part.join(SECONDS)
    return found[0]


@pytest.mark.parametrize("with_a_word", [True, False])
def test_a_relay_reports_an_upstream_that_ends_without_a_message(
    chain: Chain, with_a_word: bool
) -> None:
    result, disconnected = die_in_mid_relay(chain, with_a_word=with_a_word)
    assert result.missing == ("trainer/0",)
    assert result.unknown_from == ()
    assert disconnected == (set() if with_a_word else {"trainer/0"})


def test_a_relay_does_not_accept_an_upstream_that_has_timed_out(fleet: Fleet) -> None:
    """The last engine waits longer for one upstream than for the other, which connects too late."""
    seconds, first, last = 4.0, "engine-a/0", "engine-c/0"
    group = RelayGroup(members=ENGINES, stripes=((-1, 2, 0), (-1, 0, 1)), chunk_nbytes=256)
    nodes = {name: RelayNode(fleet.receivers[name], "127.0.0.1") for name in ENGINES}
    addresses = {name: node.open() for name, node in nodes.items()}
    node = nodes[last]
    node.connect(group, fleet.bindings, tuple(addresses.values()))
    found: list[tuple[Relayed, frozenset[str]]] = []
    part = threading.Thread(target=lambda: found.append(node.run(ROUND, seconds)))
    began = time.monotonic()
    part.start()
    time.sleep(seconds * (1 - TIMEOUT_SPREAD / 3) + 0.1 - (time.monotonic() - began))
    with contextlib.ExitStack() as connection:
        try:
            deadline = Deadline.after(SECONDS, "test")
            sender = RelaySender(addresses[last], first, ROUND, deadline)
            connection.callback(sender.close)
            # The upstream may now write until the connection ends.
            could_write = {first}
        except PeerUnreachable:
            could_write = set()
        part.join(SECONDS)
    assert could_write <= set(found[0][0].unknown_from)
    for each in nodes.values():
        each.close()


@pytest.mark.parametrize("disconnected", [(), ("trainer/0",)])
def test_an_engine_fences_before_it_verifies_bytes_of_a_dead_upstream(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, disconnected: tuple[str, ...]
) -> None:
    happened: list[str] = []
    receiver = fleet.receivers["engine-a/0"]
    half = RelayingReceiver(receiver, "127.0.0.1")
    refused = [True]

    def fence(*, deadline_s: float) -> None:
        happened.append("fence")
        if refused.pop():
            raise TransferFailed(f"a reader holds a connection after {deadline_s} s")

    def verify(_: object, _version: int, expected: dict[str, str]) -> tuple[str, ...]:
        happened.append("verify")
        return tuple(expected)

    result = Relayed(("trainer/0",), (), (), (), 0, 0.0), disconnected
    monkeypatch.setattr(fleet.transports["engine-a/0"], "fence", fence)
    monkeypatch.setattr(Receiver, "verify", verify)
    monkeypatch.setattr(RelayNode, "run", lambda *_: result)
    assert half.carry_out(Relay(1, SECONDS), ROUND) == result[0]
    expected = {"trainer/0": "digest"}
    if disconnected:
        with pytest.raises(TransferFailed):
            half.verify(1, expected)
        assert happened == ["fence"]
        refused.append(False)
    for _ in range(2):
        half.verify(1, expected)
    assert happened == (["fence", "fence"] if disconnected else []) + ["verify"] * 2
    half.close()


def test_a_good_relay_does_not_cancel_the_fence_of_an_earlier_relay(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fences: list[float] = []
    results = [(Relayed((), (), (), (), 0, 0.0), names) for names in (("trainer/0",), ())]
    half = RelayingReceiver(fleet.receivers["engine-a/0"], "127.0.0.1")
    transport = fleet.transports["engine-a/0"]
    monkeypatch.setattr(transport, "fence", lambda *, deadline_s: fences.append(deadline_s))
    monkeypatch.setattr(Receiver, "verify", lambda *_: ())
    monkeypatch.setattr(RelayNode, "run", lambda *_: results.pop(0))
    for _ in range(2):
        half.carry_out(Relay(1, SECONDS), ROUND)
    half.verify(1, {})
    assert len(fences) == 1
    half.close()
