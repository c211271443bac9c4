"""A sender ends some links and binds others: the remaining engines still get every byte."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory_transport import MemoryFabric, MemoryTransport

from windlass.backends.relay import RelayingSender
from windlass.config import ReplicaPlace, UpdateMode
from windlass.control.relay_messages import ConnectRelay
from windlass.errors import ProtocolError, RoundAborted
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.memory import host
from windlass.net.messages import RoundId
from windlass.planning.plan import TransferPlan
from windlass.planning.planner import plan_transfer
from windlass.planning.program import LinkProgram
from windlass.planning.relay import RelayGroup
from windlass.transfer.base import ParameterMemory
from windlass.transfer.bindings import BindingsRefused, DestinationBinding, LinkStatus, RelayAddress
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender

ROWS, COLUMNS = 24, 10
NUM_TRAINERS = 2
SECONDS = 20.0
KINDS = ("as it lies", "cast", "transposed", "half")

Elements = npt.NDArray[Any]


def trained(version: int) -> npt.NDArray[np.float32]:
    """Return distinct elements per version, in float32 and in bfloat16."""
    index = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    return ((index * 3 + version * 7) % 251 + 1).astype(np.float32)


def wanted(kind: str, version: int) -> bytes:
    whole = trained(version)
    match kind:
        case "cast":
            return (whole.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        case "transposed":
            return np.ascontiguousarray(whole.T).tobytes()
        # One trainer holds this half alone.
        case "half":
            return whole[: ROWS // 2].tobytes()
        case _:
            return whole.tobytes()


def engine_manifest(worker: str, kind: str) -> ShardManifest:
    builder = ManifestBuilder(worker, Role.ENGINE)
    dtype = DType.BFLOAT16 if kind == "cast" else DType.FLOAT32
    rows = ROWS // 2 if kind == "half" else ROWS
    builder.add_parameter("p", nbytes=rows * COLUMNS * dtype.itemsize, dtype=dtype)
    strides = (4, 4 * ROWS) if kind == "transposed" else None
    box = Box((0, 0), (rows, COLUMNS))
    if strides is None:
        builder.add_shard("w", (ROWS, COLUMNS), box, "p")
    else:
        builder.add_shard("w", (ROWS, COLUMNS), box, "p", strides_bytes=strides)
    return builder.build()


@dataclass
class Engine:
    """Process of an engine rank. Each has its own memory and endpoint."""

    kind: str
    manifest: ShardManifest
    memory: npt.NDArray[np.uint8]
    receiver: Receiver
    transport: MemoryTransport

    def close(self) -> None:
        self.receiver.close()
        self.transport.close()


class Fleet:
    """Trainer ranks that keep their links, and engine ranks that join and leave, in this process."""

    def __init__(self, mode: UpdateMode, *, arena_nbytes: int = 0, replica: bool = False) -> None:
        self.mode, self.fabric = mode, MemoryFabric()
        self.engines: dict[str, Engine] = {}
        self.ended: set[str] = set()
        self.senders: list[Sender] = []
        self.weights: list[Elements] = []
        self.is_bound = False
        self.version = -1
        for index in range(NUM_TRAINERS):
            rows = ROWS // NUM_TRAINERS
            builder = ManifestBuilder(f"trainer/{index}", Role.TRAINER)
            builder.add_parameter("w", nbytes=rows * COLUMNS * 4, dtype=DType.FLOAT32)
            box = Box((index * rows, 0), (rows, COLUMNS))
            builder.add_shard("w", (ROWS, COLUMNS), box, "w")
            weights = np.zeros((rows, COLUMNS), np.float32)
            where = (ParameterMemory(weights.ctypes.data, weights.nbytes),)
            sender = Sender(
                MemoryTransport(self.fabric),
                builder.build(),
                lambda where=where: where,  # type: ignore[misc]
                arena_nbytes=arena_nbytes,
                replica=ReplicaPlace.HOST if replica else ReplicaPlace.OFF,
            )
            self.senders.append(sender)
            self.weights.append(weights)

    def start(self, name: str, kind: str) -> Engine:
        """Start a process of this name without binding it."""
        self.kill(name)
        manifest = engine_manifest(f"{name}/0", kind)
        transport = MemoryTransport(self.fabric)
        memory = np.full(manifest.parameters[0].nbytes, 255, np.uint8)
        region = transport.register(memory.ctypes.data, memory.nbytes)
        receiver = Receiver(transport, manifest, [memory.ctypes.data], [region])
        return Engine(kind, manifest, memory, receiver, transport)

    def kill(self, name: str) -> None:
        engine = self.engines.pop(name, None)
        if engine is not None:
            engine.close()
            self.ended.add(f"{name}/0")

    def plan_for(self, engine: Engine) -> tuple[TransferPlan, DestinationBinding]:
        plan = plan_transfer([sender.manifest for sender in self.senders], [engine.manifest])
        part = plan.parts(sending=False, all_names=True)[engine.manifest.worker]
        return plan, engine.receiver.connect(part, self.mode)

    def join(self, name: str, kind: str) -> None:
        """Bind only this engine, or everything if nothing is bound."""
        engine = self.start(name, kind)
        plan, binding = self.plan_for(engine)
        for sender in self.senders:
            part = plan.parts(sending=True, all_names=True)[sender.manifest.worker]
            if not self.is_bound:
                sender.connect(part, [binding])
            elif len(part.ops):
                sender.change_links(part, [binding], tuple(self.ended))
            else:
                sender.change_links(None, (), tuple(self.ended))
        self.engines[name] = engine
        self.is_bound, self.ended = True, set()

    def end_links(self) -> None:
        for sender in self.senders:
            sender.change_links(None, (), tuple(self.ended))
        self.ended = set()

    def publish(self) -> None:
        """Write the next version to every engine and check all bytes."""
        self.version += 1
        digests: dict[str, dict[str, str]] = {name: {} for name in self.engines}
        for index, (sender, weights) in enumerate(zip(self.senders, self.weights, strict=True)):
            rows = ROWS // NUM_TRAINERS
            weights[:] = trained(self.version)[index * rows : (index + 1) * rows]
            sender.begin_version(version=self.version)
            sender.prepare(self.version)
            names = [n for n, e in self.engines.items() if index == 0 or e.kind != "half"]
            sent = sender.write(self.version, [f"{name}/0" for name in names], SECONDS)
            for name, link in zip(names, sent.links, strict=True):
                assert link.status is LinkStatus.OK, link.error
                digests[name][sender.manifest.worker] = link.digest
            sender.end_version()
        for name, engine in self.engines.items():
            assert engine.receiver.verify(self.version, digests[name]) == ()
            engine.receiver.apply()
        self.check()

    def check(self) -> None:
        for name, engine in self.engines.items():
            if self.version >= 0 and (engine.memory != 255).any():
                assert engine.memory.tobytes() == wanted(engine.kind, self.version), name

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
            sender.transport.close()
        for engine in self.engines.values():
            engine.close()


NAMES = st.sampled_from("abcd")


class Links(RuleBasedStateMachine):
    """Engines join, leave and return in any order."""

    fleet: Fleet

    @initialize(
        mode=st.sampled_from(UpdateMode),
        arena_nbytes=st.sampled_from([0, 256]),
        replica=st.booleans(),
        kind=st.sampled_from(KINDS),
    )
    def begin(self, mode: UpdateMode, arena_nbytes: int, replica: bool, kind: str) -> None:
        self.fleet = Fleet(mode, arena_nbytes=0 if replica else arena_nbytes, replica=replica)
        self.fleet.join("a", kind)

    @rule(name=NAMES, kind=st.sampled_from(KINDS))
    def an_engine_comes(self, name: str, kind: str) -> None:
        self.fleet.join(name, kind)

    @rule(name=NAMES)
    def an_engine_leaves(self, name: str) -> None:
        self.fleet.kill(name)

    @precondition(lambda self: self.fleet.ended)
    @rule()
    def links_end(self) -> None:
        self.fleet.end_links()
        for sender in self.fleet.senders:
            with pytest.raises(RoundAborted, match="sends nothing to z/0"):
                sender.write(0, ["z/0"], SECONDS)

    @rule()
    def publish(self) -> None:
        self.fleet.publish()

    @invariant()
    def what_is_served_is_whole(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.check()

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.close()


TestLinks = Links.TestCase
TestLinks.settings = settings(max_examples=30, deadline=None)


class ManyLinks(Links):
    """The same test with more examples."""


TestManyLinks = pytest.mark.long(ManyLinks.TestCase)
TestManyLinks.settings = settings(max_examples=300, deadline=None)


@pytest.mark.parametrize("kind", ["cast", "transposed"])
def test_prepared_links_of_other_engines_stay(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Counter[str]()
    pack_link = host.HostMemory.pack_link

    def counted(self: host.HostMemory, program: LinkProgram, *more: Any) -> Any:
        cut[program.peer] += 1
        return pack_link(self, program, *more)

    monkeypatch.setattr(host.HostMemory, "pack_link", counted)
    fleet = Fleet(UpdateMode.IN_PLACE)
    try:
        for name in ("a", "b", "c"):
            fleet.join(name, kind)
        fleet.publish()
        fleet.publish()
        assert cut == Counter({"a/0": 2, "b/0": 2, "c/0": 2})
        fleet.join("b", kind)
        fleet.publish()
        assert cut == Counter({"a/0": 2, "b/0": 4, "c/0": 2})
        # Links after `a` move to other places in the arena.
        fleet.kill("a")
        fleet.end_links()
        fleet.publish()
        assert cut == Counter({"a/0": 2, "b/0": 6, "c/0": 4})
    finally:
        fleet.close()


def test_a_refused_binding_changes_no_link() -> None:
    fleet = Fleet(UpdateMode.IN_PLACE)
    try:
        fleet.join("a", "cast")
        fleet.publish()
        engine = fleet.start("b", "as it lies")
        plan, binding = fleet.plan_for(engine)
        spoiled = type(binding)(binding.worker, binding.endpoint, (), binding.parameter_addresses)
        for sender in fleet.senders:
            with pytest.raises(BindingsRefused):
                sender.change_links(
                    plan.parts(sending=True, all_names=True)[sender.manifest.worker],
                    [spoiled],
                    ["a/0"],
                )
        engine.close()
        fleet.publish()
        (sent,) = fleet.senders[0].write(fleet.version, ["a/0"], SECONDS).links
        assert sent.status is LinkStatus.OK
    finally:
        fleet.close()


def test_links_of_a_relay_are_not_changed() -> None:
    fleet = Fleet(UpdateMode.IN_PLACE)
    try:
        fleet.join("a", "as it lies")
        sender = fleet.senders[0]
        _, binding = fleet.plan_for(fleet.engines["a"])
        bindings = (binding, msgspec.structs.replace(binding, worker="b/0"))
        group = RelayGroup(("a/0", "b/0"), ((-1, 0),), 1 << 20)
        half = RelayingSender(sender)
        address = RelayAddress("a/0", "127.0.0.1", 1, "")
        half.carry_out(ConnectRelay((group,), bindings, (address,)), RoundId(1, 1))
        with pytest.raises(ProtocolError, match="relay groups must not be bound"):
            half.change_links(None, (), ["a/0"])
    finally:
        fleet.close()
