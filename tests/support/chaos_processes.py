"""The simulated processes: the shipped agents around a few bytes of real memory."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import numpy as np
from aiohttp import web
from chaos_schedule import WireFault
from chaos_weights import (
    NUM_TRAINERS,
    engine_manifest,
    trainer_manifest,
    trainer_rows,
    values,
)
from memory_transport import MemoryTransport
from simulated_loop import OneThread
from simulated_network import SimulatedHost

from windlass.control.client import TrainerChannel
from windlass.control.connect_messages import Hello
from windlass.control.engine_agent import EngineAgent
from windlass.control.engine_channel import EngineChannel
from windlass.control.messages import Command, Result
from windlass.control.trainer_agent import TrainerAgent
from windlass.errors import PeerUnreachable, RegionError, TransferFailed, TransferOutcomeUnknown
from windlass.layout.manifest import Role, ShardManifest
from windlass.net.clock import Deadline
from windlass.net.messages import PROTOCOL_VERSION
from windlass.rollout.worker import RolloutWorker, WorkerSettings
from windlass.testing.wrapped_transport import WrappedTransport
from windlass.transfer.base import ParameterMemory
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender
from windlass.transports.base import WriteBatch

if TYPE_CHECKING:
    from chaos_world import World

TOKEN = "a shared secret"
TOKEN_S = 0.01
JOB = "this start"
RIVAL_JOB = "an earlier start"
OF_THIS_RUN = "start"
FOREIGN_LINEAGE = "another run"


class Inline(Executor):
    """Executor that runs each call at once: with threads, the order of writes would depend on the machine."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        return


class ChaosTransport(WrappedTransport):
    """Memory transport that applies the faults of the schedule to its next writes."""

    def __init__(self, world: World, host: SimulatedHost) -> None:
        self._world, self._host = world, host
        # Each process has its own name, so that a peer does not take a dead process for its
        # successor.
        super().__init__(MemoryTransport(world.fabric, f"{host.name}#{world.next_number()}"))
        self.faults: dict[str, deque[WireFault]] = {}

    def vanish(self) -> None:
        """Remove the memory of the dead process from the fabric."""
        self._world.fabric.leave(self.endpoint().address)

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        waiting = self.faults.get(batch.endpoint.address.partition("#")[0])
        if not waiting:
            self.inner.write(batch, deadline_s=deadline_s)
            return
        fault = waiting.popleft()
        self._world.injected[f"wire {fault}"] += 1
        match fault:
            case WireFault.FAIL:
                raise TransferFailed("scripted")
            case WireFault.HALF:
                self._part(batch, deadline_s)
                raise TransferFailed("scripted")
            case WireFault.FLIP:
                self._flipped(batch, deadline_s)
            case WireFault.SHORT:
                self._part(batch, deadline_s)
            case WireFault.UNKNOWN:
                raise TransferOutcomeUnknown("scripted")
            case WireFault.LATE:
                self._late(batch)
                raise TransferOutcomeUnknown("scripted")
            case WireFault.DIE:
                self._part(batch, deadline_s)
                self._world.kill_soon(self._host.name, 1.0)
                raise TransferFailed("the process dies here")

    def _part(self, batch: WriteBatch, deadline_s: float) -> None:
        """Write all pieces but the last, and half of the last."""
        nbytes = batch.nbytes.copy()
        nbytes[-1] //= 2
        self.inner.write(replace(batch, nbytes=nbytes), deadline_s=deadline_s)

    def _flipped(self, batch: WriteBatch, deadline_s: float) -> None:
        """Deliver the batch with one wrong bit."""
        copy, moved = _copied(batch)
        draw = self._world.draw
        copy[draw.randrange(len(copy))] ^= 1 << draw.randrange(8)
        self._receive(moved, copy)

    def _late(self, batch: WriteBatch) -> None:
        copy, moved = _copied(batch)
        delay_s = self._world.draw.uniform(0.0, 3.0)
        self._world.loop.call_later(delay_s, self._receive, moved, copy)

    def _receive(self, batch: WriteBatch, keep: np.ndarray[Any, Any]) -> None:
        """Deliver bytes that are already on the wire, without the checks of the sender."""
        try:
            peer = self._world.fabric.find(batch.endpoint)
            peer.receive(batch, Deadline.after(1e9, "scripted"))
        except (PeerUnreachable, RegionError):
            return
        finally:
            del keep


def _copied(batch: WriteBatch) -> tuple[np.ndarray[Any, Any], WriteBatch]:
    sizes = batch.nbytes.tolist()
    copy = np.empty(sum(sizes), np.uint8)
    starts = np.cumsum([0, *sizes[:-1]])
    for source, start, nbytes in zip(batch.local_addresses.tolist(), starts, sizes, strict=True):
        ctypes.memmove(copy.ctypes.data + int(start), source, nbytes)
    local = (starts + copy.ctypes.data).astype(np.uint64)
    return copy, replace(batch, local_addresses=local)


class Watched:
    """`CommandHandler` that records each command, and reports a repeated or outdated one, before
    the agent runs it."""

    def __init__(
        self, world: World, host: SimulatedHost, inner: EngineAgent | TrainerAgent
    ) -> None:
        self._world, self._host, self._inner = world, host, inner
        self._done: set[tuple[int, int, str, bytes]] = set()
        self._newest = (0, 0)

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        place = (epoch, round_number)
        name = type(command).__name__
        key = (*place, name, msgspec.msgpack.encode(command))
        if key in self._done and name in {"Apply", "Publish", "ConnectEngine", "Pause"}:
            self._world.violate(f"{self._host.name} carried out {name} of {place} twice")
        if place < self._newest:
            self._world.violate(
                f"{self._host.name} carried out {name} of {place} after {self._newest}"
            )
        self._newest = max(self._newest, place)
        self._done = {k for k in self._done if k[:2] == place} | {key}
        return self._inner.handle(command, epoch=epoch, round_number=round_number)


class Process:
    """One simulated process."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.host = world.network.host(name)
        self.cleanups: list[Callable[[], None]] = []
        self.runners: list[web.AppRunner] = []
        self.transport: ChaosTransport | None = None

    def kill(self) -> None:
        """Kill the process as SIGKILL does."""
        self.host.kill()
        if self.transport is not None:
            self.transport.vanish()

    async def serve(self, routes: list[web.RouteDef]) -> str:
        """Serve the routes and return the URL."""
        app = web.Application()
        app.add_routes(routes)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        self.runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def buried(self) -> None:
        """Release the resources of the dead process. Call it after `host.kill()`."""
        await self.host.ended()
        for runner in self.runners:
            await runner.cleanup()
        for cleanup in self.cleanups:
            cleanup()


class TrainerProcess(Process):
    """Trainer rank with a real sender, a real agent and real memory.

    A rival has the name of a trainer rank, but comes from another start of the job or from another
    run.
    """

    def __init__(self, world: World, index: int, *, rival: str = "") -> None:
        worker = f"trainer/{index}"
        super().__init__(world, f"rival/{index}" if rival else worker)
        self.index, self.is_rival = index, bool(rival)
        self.is_foreign = self.is_rival and rival != OF_THIS_RUN
        rows = trainer_rows(index)
        self.weights = np.ascontiguousarray(values(0)[rows])
        self.transport = transport = ChaosTransport(world, self.host)
        manifest = trainer_manifest(worker, index)
        memory = (ParameterMemory(int(self.weights.ctypes.data), self.weights.nbytes),)
        sender = Sender(transport, manifest, lambda: memory, threads=Inline())
        agent = TrainerAgent(sender)
        self.cleanups += [agent.close, sender.close, transport.close]
        conversation = _conversation(
            self, manifest, "trainer", index, NUM_TRAINERS, Watched(world, self.host, agent), None
        )
        assert isinstance(conversation, TrainerChannel)
        self.conversation = conversation
        # A rival has already trained, for this run or for another.
        if rival:
            self.conversation.welcomed_by = (
                world.controller.coordinator.run.lineage
                if rival == OF_THIS_RUN
                else FOREIGN_LINEAGE
            )

    def hold(self, version: int) -> None:
        """Store `version` in the weights, as an optimizer does. A rival stores other values."""
        self.weights[:] = values(version)[trainer_rows(self.index)] + self.is_rival

    def start(self) -> None:
        self.host.spawn(self._run(), "conversation")

    async def _run(self) -> None:
        await self.conversation.run()
        self.world.note(f"{self.name} ends: {self.conversation.ended.exception()}")


class EngineProcess(Process):
    """Engine rank with a real receiver, a real agent and real memory. Rank 0 also answers
    `/generate`.

    A foreign engine comes from another run: it reports a version number of this run, but its
    weights are no version of this run.
    """

    def __init__(
        self, world: World, group: str, rank: int, world_size: int, *, foreign: bool = False
    ) -> None:
        super().__init__(world, f"{group}/{rank}")
        self.group, self.rank, self.world_size = group, rank, world_size
        self.transport = transport = ChaosTransport(world, self.host)
        manifest = engine_manifest(self.name, rank, world_size)
        self.memory = np.zeros(manifest.parameters[0].nbytes, np.uint8)
        address = int(self.memory.ctypes.data)
        region = transport.register(address, self.memory.nbytes)
        receiver = Receiver(transport, manifest, [address], [region])
        memory = (ParameterMemory(address, self.memory.nbytes),)
        sender = Sender(transport, manifest, lambda: memory, registered=[region], threads=Inline())
        self.agent = EngineAgent(receiver, self, sender)
        self.cleanups += [sender.close, receiver.close, transport.close]
        self.paused = True
        self.paused_since_s = 0.0
        self.version = -1
        self.url = ""
        self.misled = False
        self._generating = 0
        self._aborts = 0
        self._changed = asyncio.Event()
        self.incarnation = ""
        self._manifest = manifest
        self.conversation: TrainerChannel | EngineChannel | None = None
        if foreign:
            self.memory[:] = np.frombuffer(world.draw.randbytes(self.memory.nbytes), np.uint8)
            self.agent.served_version = max(world.durable(), default=0)
            self.agent.lineage = FOREIGN_LINEAGE

    def start(self) -> None:
        self.host.spawn(self._run(), "engine")

    async def _run(self) -> None:
        if self.rank == 0:
            self.url = await self.serve([web.post("/generate", self._generate)])
        self.conversation = _conversation(
            self,
            self._manifest,
            self.group,
            self.rank,
            self.world_size,
            Watched(self.world, self.host, self.agent),
            self.agent,
        )
        await self.conversation.run()
        self.world.note(f"{self.name} ends: {self.conversation.ended.exception()}")

    # --- EngineHooks ---------------------------------------------------------------------------

    def pause(self, pause_id: str, mode: object, deadline_s: float) -> None:
        self.paused, self.paused_since_s = True, self.world.loop.time()
        self._aborts += 1
        self._wake()

    def resume(self, deadline_s: float) -> None:
        self.paused = False
        self._wake()

    def finalise(self) -> None:
        return

    def set_version(self, version: int, deadline_s: float) -> None:
        self.version = version
        self.misled = False

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- generation ------------------------------------------------------------------------------

    def content(self) -> int | None:
        """Return the version of the whole memory; None for a mixture."""
        return self.world.version_of(self.memory.tobytes(), self.rank, self.world_size)

    async def _generate(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        self.world.saw_request(str(body["rid"]))
        prompt, wanted = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        ids: list[int] = []
        versions: list[int] = []
        aborts = self._aborts
        while len(ids) < wanted and aborts == self._aborts:
            await asyncio.sleep(TOKEN_S)
            ranks = self.world.ranks_of(self.group)
            if any(rank.paused or not rank.host.alive or rank.host.stalled for rank in ranks):
                changed = self._changed
                try:
                    async with asyncio.timeout(0.5):
                        await changed.wait()
                except TimeoutError:
                    pass
                continue
            versions.append(self.world.token_version(ranks))
            ids.append(prompt[0] * 1000 + len(prompt) + len(ids))
        finished = "length" if len(ids) == wanted else "abort"
        return web.json_response(
            {
                "output_ids": ids,
                "meta_info": {
                    "finish_reason": {"type": finished},
                    "output_token_logprobs": [[-0.5, token, None] for token in ids],
                    "output_token_versions": versions,
                },
            }
        )


class WorkerProcess(Process):
    """The shipped rollout worker."""

    def __init__(self, world: World, index: int) -> None:
        super().__init__(world, f"worker/{index}")

    def start(self) -> None:
        self.host.spawn(self._run(), "worker")

    async def _run(self) -> None:
        settings = WorkerSettings(
            controller=self.world.url, name=self.name, max_concurrent=8, controller_gone_s=1e6
        )
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as engines:
            await RolloutWorker(settings, TOKEN, engines).run()


def _conversation(
    process: Process,
    manifest: ShardManifest,
    group: str,
    rank: int,
    world_size: int,
    handler: Watched,
    engine: EngineAgent | None,
) -> TrainerChannel | EngineChannel:
    incarnation = os.urandom(8).hex()
    encoded = manifest.encode()
    url = ""
    if isinstance(process, EngineProcess):
        process.incarnation, url = incarnation, process.url
    assert process.transport is not None
    offers = process.transport.offers()
    job = ""
    if isinstance(process, TrainerProcess):
        job = RIVAL_JOB if process.is_rival else JOB

    def hello() -> Hello:
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            worker=manifest.worker,
            incarnation=incarnation,
            role=Role.TRAINER if engine is None else Role.ENGINE,
            group=group,
            rank=rank,
            world_size=world_size,
            manifest=encoded,
            offers=offers,
            url=url,
            served_version=-1 if engine is None else engine.served_version,
            lineage="" if engine is None else engine.lineage,
            mixed_weights=engine is not None and engine.mixed_weights,
            can_send=engine is not None,
            job=job,
        )

    common = (process.world.url, TOKEN, hello, handler)
    thread, loop = OneThread(), process.world.loop
    if engine is None:
        return TrainerChannel(*common, executor=thread, loop=loop)
    return EngineChannel(*common, on_disconnect=engine.on_disconnect, executor=thread, loop=loop)
