"""A controller does not grow over weeks with thousands of engines, workers and rollouts."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sized
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from fake_fleet import TOKEN
from small_pair import small_manifest
from test_catch_up_retries import Rig, Socket, simulated
from test_resumes import Engine, Resting

from windlass.config import ControlConfig, UpdateMode
from windlass.control import fleet, journal, recovery
from windlass.control import members as connections
from windlass.control.binder import EnginesUnbound
from windlass.control.connect_messages import ConnectEngine
from windlass.control.coordinator import Coordinator
from windlass.control.report import RoundOutcome
from windlass.control.routes import mount_updates
from windlass.engines.client import EngineClient, EngineWeights
from windlass.layout.manifest import Role
from windlass.net.messages import PROTOCOL_VERSION, encode
from windlass.net.server import ControlServer
from windlass.rollout import (
    BatchQueue,
    RolloutConfig,
    RolloutController,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    WorkflowContext,
    mount_rollout_routes,
    pool,
)
from windlass.rollout.messages import WorkerHello
from windlass.trainers.client import TrainerClient
from windlass.trainers.weights import TrainerWeights
from windlass.transfer.base import ParameterMemory
from windlass.transfer.bindings import LinkStatus
from windlass.transports.base import MemoryRegion, OneSidedTransport
from windlass.transports.registry import create_transport, parse_transport

NUM_WARM, NUM_ENGINES = 20, 300
BOUNDED = ("_handed_out", "_handed_out[]", "_seen")
"""Containers of bounded size, used by `decline` and by the choice of engines."""
WITHIN_S = 60.0


def sizes(root: object) -> dict[str, int]:
    """Return path -> length of every container that Windlass objects reach, except bounded queues."""
    found: dict[str, int] = {}
    seen: set[int] = set()

    def visit(path: str, value: object) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, deque) and value.maxlen is not None:
            return
        if isinstance(value, Mapping | list | set | frozenset | deque | tuple):
            assert isinstance(value, Sized)
            found[path] = found.get(path, 0) + len(value)
            for each in list(value.values()) if isinstance(value, Mapping) else list(value):
                visit(f"{path}[]", each)
        elif type(value).__module__.startswith("windlass."):
            for name, member in members(value):
                visit(f"{path}.{name}", member)

    visit(type(root).__name__, root)
    return found


def members(value: object) -> Iterator[tuple[str, object]]:
    yield from vars(value).items() if hasattr(value, "__dict__") else ()
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(value, name):
                yield name, getattr(value, name)


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    return {p: (before.get(p, 0), n) for p, n in after.items() if n > before.get(p, 0)}


class Late(Socket):
    """Rank that never answers a command that binds it."""

    def result_of(self, command: object) -> None:
        if isinstance(command, ConnectEngine):
            return
        super().result_of(command)


async def come_and_go(rig: Rig, number: int) -> None:
    """Let an engine with a unique name join and leave. `number` selects what happens to it."""
    name, what = f"engine-{number}", number % 6
    rig.make = {3: Resting, 4: Late}.get(what, Socket)
    outcomes = {1: LinkStatus.FAILED, 2: LinkStatus.UNKNOWN}
    rig.on_write = lambda _donor: outcomes.get(what, LinkStatus.OK)
    engine = await rig.join(name, served=-1)
    await asyncio.sleep(70.0 if what == 4 else 2.0)
    assert (name in rig.routable) is (what in {0, 3, 5})
    if isinstance(engine, Resting):
        engine.say("away")
        await asyncio.sleep(2.0)
        assert name not in rig.routable
    if isinstance(engine, Late):
        late = EnginesUnbound({}, {f"{name}/0": "late"}, "")
        await rig.coordinator.connector.exclude_unbound(late)
    await rig.leave(engine, ended=bool(number % 2))
    # The engine returns as another process.
    if what == 5:
        rig.on_write = lambda _donor: LinkStatus.OK
        engine = await rig.join(name, served=-1, incarnation=f"after-{number}")
        await asyncio.sleep(2.0)
        await rig.leave(engine, ended=True)


def test_the_coordinator_keeps_nothing_of_three_hundred_departed_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "KEPT_ATTEMPTS", 4)
    monkeypatch.setattr(connections, "KEPT_REFUSALS", 2)
    monkeypatch.setattr(fleet, "MAX_QUARANTINED", 2)
    monkeypatch.setattr(journal, "MAX_QUARANTINED", 2)

    async def scenario(rig: Rig) -> None:
        await rig.join("a")
        for number in range(NUM_WARM):
            await come_and_go(rig, number)
        await asyncio.sleep(1000.0)
        before = sizes(rig.coordinator)
        for number in range(NUM_WARM, NUM_ENGINES):
            await come_and_go(rig, number)
        await asyncio.sleep(1000.0)
        assert grown(before, sizes(rig.coordinator)) == {}
        assert rig.routable == {"a"}

    with simulated(UpdateMode.STAGED) as rig:
        rig.loop.run_until_complete(scenario(rig))


async def answer(context: WorkflowContext) -> object:
    return context.arguments


async def test_a_controller_keeps_nothing_of_departed_rollouts_engines_and_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "MAX_REPLACED", 4)
    engines = StaticEngines([("a", "http://127.0.0.1:9", 0)])
    config = RolloutConfig(retry_backoff_s=0.01, worker_grace_s=0.05, engine_grace_s=0.01)
    policy = StalenessPolicy.unbounded(64)
    async with (
        asyncio.timeout(WITHIN_S),
        RolloutController(engines, policy, token=TOKEN, config=config) as controller,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http,
    ):
        controller.run_here({"answer": answer})
        server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
        mount_rollout_routes(server, controller, BatchQueue())
        await server.start()

        async def turn(number: int) -> None:
            engines.set([(f"engine-{number}", "http://127.0.0.1:9", number)])
            sampling = SamplingParams(max_new_tokens=1)
            controller.submit_workflow_group("answer", number, 2, sampling)
            handle = controller.submit_workflow("answer", number, sampling)
            (group,) = await controller.next_batch(1, deadline_s=WITHIN_S)
            assert [rollout.value for rollout in group.rollouts] == [number, number]
            assert (await handle).value == number
            for incarnation in (f"first-{number}", f"second-{number}"):
                hello = WorkerHello(
                    protocol_version=PROTOCOL_VERSION,
                    name=f"worker-{number % 3}",
                    incarnation=incarnation,
                    max_concurrent=1,
                )
                async with http.ws_connect(f"{server.url}/v1/workers") as socket:
                    await socket.send_bytes(encode(hello))
                    await socket.receive()

        def is_stopping() -> bool:
            return any(task.get_name().startswith("stop ") for task in asyncio.all_tasks())

        async def settled() -> dict[str, int]:
            # The controller drops a worker that does not reconnect.
            while controller.stats().workers > 1 or is_stopping():  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
            return sizes(controller)

        for number in range(NUM_WARM):
            await turn(number)
        before = await settled()
        for number in range(NUM_WARM, NUM_ENGINES):
            await turn(number)
        left = {p: n for p, n in grown(before, await settled()).items() if not p.endswith(BOUNDED)}
        await server.close()
        assert left == {}


def held() -> dict[str, object]:
    """Return the system resources that this process holds."""
    gc.collect()
    names = [thread.name for thread in threading.enumerate()]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": sorted(name for name in names if not name.startswith("asyncio_")),
        "segments": Path("/proc/self/maps").read_text().count("/memfd:windlass-"),
    }


async def settles_at(wanted: dict[str, object]) -> None:
    """Wait until `held()` equals `wanted`, because a thread ends a moment after its user."""
    ends = time.monotonic() + WITHIN_S
    while (found := held()) != wanted:
        assert time.monotonic() < ends, (found, wanted)
        await asyncio.sleep(0.05)


Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def memory_of(transport: OneSidedTransport) -> tuple[Bytes, MemoryRegion]:
    """Return 24 registered bytes."""
    if transport.allocator is not None:
        address = transport.allocator.allocate(24)
        array = np.ctypeslib.as_array((ctypes.c_uint8 * 24).from_address(address))
    else:
        array = np.zeros(24, np.uint8)
        address = int(array.ctypes.data)
    return array, transport.register(address, 24)


@pytest.mark.parametrize("transport", ["cma", "shm"])
async def test_real_engines_that_leave_release_all_their_resources(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "KEPT_ATTEMPTS", 2)
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    coordinator = Coordinator(ControlConfig())
    mount_updates(coordinator, server)
    await server.start()
    url, config = server.url, parse_transport(transport)
    sending = create_transport(config, towards=url)
    trained, source = memory_of(sending)

    def new_trainer() -> TrainerClient:
        memory = (ParameterMemory(source.address, 24),)
        return TrainerClient(
            TrainerWeights(
                manifest=small_manifest("trainer/0", Role.TRAINER),
                parameters=lambda: memory,
            ),
            transport=sending,
            controller=url,
            token=TOKEN,
            registered=[source],
        )

    def new_engine(name: str) -> tuple[EngineClient, Bytes]:
        receiving = create_transport(config, towards=url)
        served, target = memory_of(receiving)
        client = EngineClient(
            EngineWeights(
                manifest=small_manifest(f"{name}/0", Role.ENGINE),
                addresses=[target.address],
                regions=[target],
            ),
            transport=receiving,
            hooks=Engine(),
            controller=url,
            token=TOKEN,
            url="http://127.0.0.1:9",
        )
        return client, served

    async def turn(version: int) -> None:
        name = f"engine-{version}"
        trained[:] = np.arange(24) + version
        engine, served = await asyncio.to_thread(new_engine, name)
        await coordinator.members.wait_for_fleet(
            num_trainers=1, engines=[name], deadline_s=WITHIN_S
        )
        report = (await asyncio.to_thread(trainer.publish, version)).result()
        assert (report.outcome, report.engines) == (RoundOutcome.PUBLISHED, (name,))
        assert bytes(served) == bytes(trained)
        del served
        await asyncio.to_thread(engine.close)
        await coordinator.changes.until(
            lambda: not coordinator.fleet.engines(), WITHIN_S, lambda: f"{name} is still there"
        )

    trainer = await asyncio.to_thread(new_trainer)
    try:
        for version in range(3):
            await turn(version)
        await asyncio.sleep(0.5)
        before, known = held(), sizes(coordinator)
        for version in range(3, 23):
            await turn(version)
        await settles_at(before)
        # For each engine that left, a timer runs until its last write must have ended.
        left = {p: n for p, n in grown(known, sizes(coordinator)).items() if "_tasks" not in p}
        assert left == {}
    finally:
        await asyncio.to_thread(trainer.close)
        await coordinator.close()
        await server.close()
