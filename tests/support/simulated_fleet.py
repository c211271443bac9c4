"""A whole fleet on a simulated clock: the shipped controller, and the shipped agent of every rank.

`SimulatedFleet` measures the controller's work for many ranks; for faults see `chaos_world.py`.
Layouts come from `tools.plan`: a small mixture of experts, cut by Megatron's rules for trainers
and by an engine's rules for engines. Weights are real memory. Every element encodes its tensor,
place and version, and the fleet compares the engines' memory with these values.

All ranks and the controller share one process. A `Meter` measures CPU seconds and messages per
simulated host, and so the controller's share. `held_by` counts the objects that a controller
keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import random
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
from chaos_processes import Inline
from memory_transport import MemoryFabric, MemoryTransport
from simulated_loop import OneThread, SimulatedLoop
from simulated_network import Meter, SimulatedHost, SimulatedNetwork

from tools.plan.families import ModelSpec
from tools.plan.synthesis import engine_manifests, trainer_manifests
from tools.plan.topology import EngineSpec, Fabric, Topology, TrainerSpec
from windlass.config import ControlConfig, PhaseDeadlines, UpdateMode
from windlass.control.client import Announcement, TrainerChannel
from windlass.control.connect_messages import Hello
from windlass.control.coordinator import Coordinator
from windlass.control.engine_agent import EngineAgent
from windlass.control.engine_channel import EngineChannel
from windlass.control.report import RoundOutcome, UpdateReport
from windlass.control.routes import mount_updates
from windlass.control.trainer_agent import TrainerAgent
from windlass.layout.manifest import Role, ShardManifest
from windlass.net.addresses import free_port
from windlass.net.messages import PROTOCOL_VERSION
from windlass.net.server import ControlServer
from windlass.testing.resting_engine import RestingEngine
from windlass.transfer.base import ParameterMemory
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender

__all__ = ["CONTROLLER", "ENGINE_RANKS", "SimulatedFleet", "held_by", "topology_of"]

TOKEN = "a shared secret"
CONTROLLER = "controller"
DEADLINE_S = 3600.0
ENGINE_RANKS = 8
_MODEL = ModelSpec(
    family="qwen3_moe",
    num_hidden_layers=4,
    hidden_size=64,
    vocab_size=512,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    n_routed_experts=8,
    moe_intermediate_size=16,
)
Elements = npt.NDArray[np.uint16]


def topology_of(num_trainers: int, num_engines: int, *, kind: str = "megatron") -> Topology:
    """Return the topology of `num_trainers` ranks and engines of `ENGINE_RANKS` ranks each.

    `megatron`: TP4 PP2 EP8, the rest data parallel. The number of sources of an engine rank does
    not grow with the fleet. `fsdp`: every rank has a part of every tensor, so every engine rank
    reads from all ranks.
    """
    trainer = (
        TrainerSpec(kind="megatron", world_size=num_trainers, tp=4, pp=2, ep=8)
        if kind == "megatron"
        else TrainerSpec(kind="fsdp", world_size=num_trainers)
    )
    return Topology(
        name=f"{num_trainers}-to-{num_engines * ENGINE_RANKS}",
        model=_MODEL,
        trainer=trainer,
        engine=EngineSpec(replicas=num_engines, tp=ENGINE_RANKS, ep=ENGINE_RANKS),
        fabric=Fabric(nic_gbytes_per_s=50.0),
    )


# --- weights -------------------------------------------------------------------------------------


def _truth(tensors: dict[str, tuple[int, ...]], version: int) -> dict[str, Elements]:
    """Return two bytes per element; elements of a tensor differ, and so do versions."""
    found = {}
    for number, (name, shape) in enumerate(tensors.items()):
        index = np.arange(int(np.prod(shape)), dtype=np.uint32).reshape(shape)
        found[name] = ((index + 251 * number + 8191 * (version + 1)) % 65521).astype(np.uint16)
    return found


def _content(manifest: ShardManifest, truth: dict[str, Elements]) -> list[Elements]:
    """Return the expected content of this rank's parameters."""
    content = {p.name: np.zeros(p.nbytes // 2, np.uint16) for p in manifest.parameters}
    for shard in manifest.shards():
        place = tuple(
            slice(offset, offset + size)
            for offset, size in zip(shard.box.offsets, shard.box.sizes, strict=True)
        )
        part = truth[shard.tensor][place].ravel()
        start = shard.offset_bytes // 2
        content[shard.parameter][start : start + len(part)] = part
    return list(content.values())


# --- ranks ---------------------------------------------------------------------------------------


class _Rank:
    """One process: an agent with real memory, and its connection."""

    def __init__(
        self, fleet: SimulatedFleet, manifest: ShardManifest, number: int, world_size: int
    ) -> None:
        self.name = manifest.worker
        self.manifest = manifest
        self.host = fleet.network.host(f"{self.name}#{number}")
        group, _, rank = self.name.rpartition("/")
        self.memory = [np.zeros(p.nbytes // 2, np.uint16) for p in manifest.parameters]
        self._transport = MemoryTransport(fleet.fabric, f"{self.name}#{number}")
        where = tuple(ParameterMemory(m.ctypes.data, m.nbytes) for m in self.memory)
        regions = [self._transport.register(m.ctypes.data, m.nbytes) for m in self.memory]
        sender = Sender(
            self._transport, manifest, lambda: where, registered=regions, threads=Inline()
        )
        engine: EngineAgent | None = None
        if manifest.role is Role.ENGINE:
            addresses = [m.ctypes.data for m in self.memory]
            receiver = Receiver(self._transport, manifest, addresses, regions)
            engine = EngineAgent(receiver, RestingEngine(), sender)
        incarnation = f"{number:016x}"

        def hello() -> Hello:
            return Hello(
                protocol_version=PROTOCOL_VERSION,
                worker=self.name,
                incarnation=incarnation,
                role=manifest.role,
                group=group,
                rank=int(rank),
                world_size=world_size,
                manifest=manifest.encode(),
                offers=self._transport.offers(),
                url=f"http://{group}" if engine is not None and rank == "0" else "",
                served_version=-1 if engine is None else engine.served_version,
                lineage="" if engine is None else engine.lineage,
                mixed_weights=engine is not None and engine.mixed_weights,
                can_send=engine is not None,
                job="this start",
            )

        common, thread = (fleet.url, TOKEN, hello), OneThread()
        self.channel = (
            TrainerChannel(*common, TrainerAgent(sender), executor=thread, loop=fleet.loop)
            if engine is None
            else EngineChannel(
                *common,
                engine,
                on_disconnect=engine.on_disconnect,
                executor=thread,
                loop=fleet.loop,
            )
        )

    def start(self) -> None:
        self.host.spawn(self.channel.run())

    async def kill(self, fabric: MemoryFabric) -> None:
        self.host.kill()
        fabric.leave(self._transport.endpoint().address)
        await self.host.ended()

    def hold(self, content: Iterable[Elements]) -> None:
        for memory, part in zip(self.memory, content, strict=True):
            memory[:] = part

    def holds(self, content: Iterable[Elements]) -> bool:
        return all((m == c).all() for m, c in zip(self.memory, content, strict=True))


# --- cost of the controller ----------------------------------------------------------------------


_SKIPPED = (
    types.ModuleType,
    types.CodeType,
    types.BuiltinFunctionType,
    type,
    logging.Logger,
    logging.Handler,
    SimulatedLoop,
    SimulatedNetwork,
    SimulatedHost,
    Meter,
)


def held_by(*roots: object) -> tuple[int, Counter[str]]:
    """Return the bytes of everything that these objects keep alive, and the number of objects per
    type.

    Excluded: types, modules, functions' globals, the simulation, the other ends of connections.
    """
    nbytes, counts = 0, Counter[str]()
    seen: set[int] = set()
    stack: list[object] = list(roots)
    while stack:
        found = stack.pop()
        if id(found) in seen or isinstance(found, _SKIPPED):
            continue
        seen.add(id(found))
        nbytes += sys.getsizeof(found)
        counts[type(found).__name__] += 1
        if isinstance(found, types.FunctionType):
            stack += [found.__closure__, found.__defaults__, found.__kwdefaults__]
        elif type(found).__module__ == "simulated_network":
            stack.append(getattr(found, "_protocol", None))
        else:
            stack += gc.get_referents(found)
    return nbytes, counts


# --- the fleet -----------------------------------------------------------------------------------


@final
class SimulatedFleet:
    """A simulated fleet; see the module. Its coroutines run in `loop`, inside `simulated`.

    Args:
        topology: result of `topology_of`.
        folder: folder for the journal.
        seed: seed of the network's delays.

    Attributes:
        meter: meter of all hosts; it runs inside `simulated`.
        coordinator, server: parts of the current controller.
    """

    def __init__(self, topology: Topology, folder: Path, *, seed: int = 0) -> None:
        self.meter = Meter()
        self.network = SimulatedNetwork(seed, meter=self.meter)
        self.loop = SimulatedLoop(self.network)
        self.fabric = MemoryFabric()
        self.num_trainers = topology.trainer.world_size
        self.num_engines = topology.engine.replicas
        self.url = f"http://127.0.0.1:{free_port()}"
        self._journal = folder / "journal"
        self._numbers = itertools.count(1)
        self._trainer_manifests = trainer_manifests(topology)
        self._engine_manifests = engine_manifests(topology)
        self._tensors = {
            spec.name: spec.shape
            for manifest in self._trainer_manifests
            for spec in manifest.tensors
        }
        self._layouts: dict[int, ShardManifest] = {}
        self.trainers: list[_Rank] = []
        self.engines: dict[str, list[_Rank]] = {}
        self.coordinator: Coordinator
        self.server: ControlServer
        self._controller = self.network.host(CONTROLLER)

    @contextlib.contextmanager
    def simulated(self) -> Iterator[None]:
        """Simulate HTTP and measure CPU inside the block; end all processes after it."""
        random.seed(0)
        with self.network.http(), self.meter.running():
            asyncio.set_event_loop(self.loop)
            try:
                yield
                self.loop.run_until_complete(self._bury_all())
            finally:
                asyncio.set_event_loop(None)
                self.loop.close()

    # --- actions ---------------------------------------------------------------------------------

    def start_controller(self) -> asyncio.Task[None]:
        """Create and start a controller; await the task to wait for the start."""
        self._controller = self.network.host(CONTROLLER)
        return self._controller.spawn(self._start_controller())

    async def _start_controller(self) -> None:
        deadlines = PhaseDeadlines(**dict.fromkeys(PhaseDeadlines.__struct_fields__, DEADLINE_S))
        config = ControlConfig(
            mode=UpdateMode.IN_PLACE, deadlines=deadlines, min_engines=self.num_engines
        )
        self.coordinator = Coordinator(config, journal_path=self._journal)
        port = int(self.url.rpartition(":")[2])
        self.server = ControlServer(host="127.0.0.1", port=port, token=TOKEN)
        mount_updates(self.coordinator, self.server)
        await self.server.start()

    async def kill_controller(self) -> None:
        """Kill the controller without notice."""
        coordinator, server = self.coordinator, self.server
        journal: Any = coordinator.run.journal
        journal.close()
        self._controller.kill()
        await self._controller.ended()
        await coordinator.close()
        await server.close()

    def start_trainers(self) -> None:
        """Start all trainer ranks at once."""
        truth = _truth(self._tensors, -1)
        for manifest in self._trainer_manifests:
            rank = _Rank(self, manifest, next(self._numbers), self.num_trainers)
            rank.hold(_content(manifest, truth))
            rank.start()
            self.trainers.append(rank)

    def start_engine(self, index: int) -> None:
        """Start all ranks of one engine at once."""
        first = index * ENGINE_RANKS
        manifests = self._engine_manifests[first : first + ENGINE_RANKS]
        ranks = [_Rank(self, m, next(self._numbers), ENGINE_RANKS) for m in manifests]
        for rank in ranks:
            rank.start()
        self.engines[f"engine-{index}"] = ranks

    async def start_engines(self, every_s: float) -> None:
        """Start all engines, one after another."""
        for index in range(self.num_engines):
            self.start_engine(index)
            await asyncio.sleep(every_s)

    async def restart_engine(self, index: int) -> None:
        """Kill the ranks of an engine and start new ones in their place."""
        for rank in self.engines.pop(f"engine-{index}"):
            await rank.kill(self.fabric)
        await self.until(lambda: self.coordinator.fleet.group_of(f"engine-{index}") is None)
        self.start_engine(index)

    async def publish(self, version: int) -> UpdateReport:
        """Let all trainers publish `version`; return their report.

        Raises:
            AssertionError: the version was not published to all engines, or an engine has other weights.
        """
        truth = _truth(self._tensors, version)
        made: dict[int, list[Elements]] = {}
        announced: list[Announcement] = []
        for rank in self.trainers:
            key = id(rank.manifest.table)
            if key not in made:
                made[key] = _content(rank.manifest, truth)
            rank.hold(made[key])
            with self.network.acting_as(rank.host):
                assert isinstance(rank.channel, TrainerChannel)
                announced.append(rank.channel.begin_announcement(version))
        await self.until(lambda: all(a.report.done() for a in announced))
        told = [a.report.result() for a in announced]
        wanted = [_content(manifest, truth) for manifest in self._engine_manifests[:ENGINE_RANKS]]
        assert {report.outcome for report in told} == {RoundOutcome.PUBLISHED}, told[0].reason
        assert all(len(report.engines) == self.num_engines for report in told)
        for name, ranks in self.engines.items():
            for rank, content in zip(ranks, wanted, strict=True):
                assert rank.holds(content), f"{name}: {rank.name} does not hold version {version}"
        return told[0]

    async def settled(self) -> None:
        """Wait until every rank is connected and bound, and serves the published version."""

        def there() -> bool:
            fleet, binding = self.coordinator.fleet, self.coordinator.connector.binding
            trainers = fleet.trainers()
            return (
                trainers is not None
                and trainers.complete
                and len(fleet.writable_engines()) == self.num_engines
                and binding is not None
                and len(binding.engines) == self.num_engines
                and not binding.ended
                and not self.coordinator.rounds.lock.locked()
                and self.coordinator.fleet.published in self._serving()
            )

        await self.until(there)

    def _serving(self) -> set[int]:
        """Return the version that all engines serve; -1 if they serve none, nothing if they differ."""
        states = self.coordinator.fleet.states()
        versions = {state.version for state in states}
        return versions if len(versions) == 1 and len(states) == self.num_engines else set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition; check it every 50 simulated milliseconds."""
        end_s = self.loop.time() + DEADLINE_S
        while not holds():
            assert self.loop.time() < end_s, "it does not come about"
            await asyncio.sleep(0.05)

    def held(self) -> tuple[int, Counter[str]]:
        """Return the size of the controller's objects; see `held_by`."""
        gc.collect()
        return held_by(self.coordinator, self.server)

    async def _bury_all(self) -> None:
        await self.kill_controller()
        for rank in itertools.chain(self.trainers, *self.engines.values()):
            await rank.kill(self.fabric)
