"""Trainers write only memory of the engine itself, and tell a forger nothing about other processes.

Trainers, an honest engine and a bystander are real processes. The forger speaks the protocol
itself.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import msgspec
import numpy as np
import pytest
from offers import offer_of
from weight_fleet import TOKEN, Fleet, Rank
from weight_rank import model_nbytes, part_of, run_bystander

import windlass
from windlass.config import ControlConfig, PhaseDeadlines
from windlass.control.connect_messages import Bound, ConnectEngine, Hello
from windlass.control.messages import (
    CONTROLLER_FRAMES,
    Abort,
    Command,
    Done,
    Probe,
    Verified,
    Verify,
)
from windlass.layout.manifest import Role
from windlass.net.access import Access, role_token
from windlass.net.messages import PROTOCOL_VERSION, Envelope, Refused, Reply, encode
from windlass.planning.program import DigestKind
from windlass.transfer.bindings import DestinationBinding
from windlass.transports.peers import PeerEndpoint, RemoteRegion
from windlass.transports.processes import (
    OwnProcess,
    host_identity,
    process_start_time,
    socket_name_of,
)

CONFIG = ControlConfig(deadlines=PhaseDeadlines(connect_s=20, fleet_s=10))
NBYTES = model_nbytes(1)


@dataclass
class Forger:
    """Rank of engine `evil`. `told` contains every reason that it received."""

    hello: Hello
    binding: DestinationBinding
    told: list[str] = field(default_factory=list)
    bound: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, url: str, local_host: str) -> None:
        headers = {"Authorization": f"Bearer {role_token(TOKEN, Access.ENGINE)}"}
        connector = aiohttp.TCPConnector(local_addr=(local_host, 0))
        async with (
            aiohttp.ClientSession(headers=headers, connector=connector) as http,
            http.ws_connect(f"{url}/v1/agents") as socket,
        ):
            await socket.send_bytes(encode(self.hello))
            async for message in socket:
                frame = CONTROLLER_FRAMES.decode(message.data)
                if isinstance(frame, Refused):
                    self.told.append(frame.message)
                    self.bound.set()
                if not isinstance(frame, Envelope):
                    continue
                match frame.command:
                    case ConnectEngine(plan_digest=digest):
                        await self._reply(socket, frame, Bound(digest, self.binding))
                        self.bound.set()
                    case Verify():
                        await self._reply(socket, frame, Verified(()))
                    case Abort(reason=reason):
                        self.told.append(reason)
                    case _:
                        await self._reply(socket, frame, Done())

    async def _reply(
        self,
        socket: aiohttp.ClientWebSocketResponse,
        frame: Envelope[Command | Probe],
        result: Bound | Verified | Done,
    ) -> None:
        await socket.send_bytes(encode(Reply(frame.epoch, frame.round, frame.seq, result)))


def forger(own: PeerEndpoint, bound: PeerEndpoint, address: int, worker: str = "evil/0") -> Forger:
    """Return a forger that announces `own` and binds the bytes at `address` of `bound`."""
    part = part_of("evil/0", Role.ENGINE, 0, 1)
    sizes = [parameter.nbytes for parameter in part.manifest.parameters]
    starts = [address + sum(sizes[:index]) for index in range(len(sizes))]
    region = RemoteRegion(bound, address, NBYTES)
    hello = Hello(
        protocol_version=PROTOCOL_VERSION,
        worker="evil/0",
        incarnation="evil",
        role=Role.ENGINE,
        group="evil",
        rank=0,
        world_size=1,
        manifest=part.manifest.encode(),
        offers=(offer_of(own, "process_vm_writev"),),
        host=host_identity(),
    )
    return Forger(hello, DestinationBinding(worker, bound, (region,), tuple(starts)))


@asynccontextmanager
async def attacked() -> AsyncIterator[tuple[windlass.Controller, Fleet, Rank, int, int]]:
    """Yield a fleet with engine `a` and a bystander, its pid and the address of its memory."""
    async with windlass.Controller(token=TOKEN, config=CONFIG) as controller:
        fleet = Fleet(controller.url, 1)
        bystander = Rank(run_bystander, NBYTES)
        try:
            pid, address = await bystander.read()
            fleet.add_engine("a")
            fleet.add_trainers()
            await fleet.ready()
            yield controller, fleet, bystander, pid, address
        finally:
            bystander.close()
            fleet.close()


async def publish_beside(
    evil: Forger, controller: windlass.Controller, fleet: Fleet, local_host: str = "127.0.0.1"
) -> list[str]:
    """Publish two versions to `a` while the forger is connected, and return all that it was told."""
    running = asyncio.create_task(evil.run(controller.url, local_host))
    try:
        async with asyncio.timeout(20):
            await evil.bound.wait()
        for version in (0, 1):
            outcome, left_out, _ = await fleet.publish(version)
            assert outcome == "published", left_out
            assert await fleet.held("a") == [(version, str(version), False)]
        routable = {engine.name for engine in controller.coordinator.routable()}
        assert routable == {"a"}, "the forger's engine gets traffic"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return evil.told


@pytest.mark.parametrize("listens", [False, True])
async def test_a_bystander_of_a_forged_binding_is_not_written(
    listens: bool,
) -> None:
    """The bystander has its own transport. The forger listens in its name, or no process does."""
    async with attacked() as (controller, fleet, bystander, pid, address):
        forged = PeerEndpoint("cma", str(pid), f"{process_start_time(pid)}-{'0' * 32}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            if listens:
                listener.bind(socket_name_of(forged))
                listener.listen(16)
            told = await publish_beside(forger(forged, forged, address), controller, fleet)
        assert await bystander.ask(True), "the bystander's memory was written"
        assert told
        assert not [reason for reason in told if str(pid) in reason or "process" in reason]


@pytest.mark.parametrize("forgery", ["endpoint", "region", "worker", "Hello"])
async def test_the_memory_of_another_rank_cannot_be_bound(forgery: str) -> None:
    async with attacked() as (controller, fleet, bystander, _, address):
        agent = controller.coordinator.fleet.find("a/0")
        assert agent is not None
        theirs, own = agent.hello.offers[0].endpoint, OwnProcess("cma")
        says = own.endpoint if forgery != "Hello" else theirs
        bound = theirs if forgery in {"endpoint", "Hello"} else own.endpoint
        evil = forger(says, bound, address, "a/0" if forgery == "worker" else "evil/0")
        if forgery == "region":
            region = RemoteRegion(theirs, address, NBYTES)
            evil.binding = msgspec.structs.replace(evil.binding, regions=(region,))
        told = await publish_beside(evil, controller, fleet)
        own.close()
        expected = (
            "must not offer an endpoint of another agent"
            if forgery == "Hello"
            else "must bind memory only at endpoints"
        )
        assert [reason for reason in told if expected in reason]
        assert await bystander.ask(True)


@pytest.mark.parametrize(
    ("misfit", "expected"),
    [
        ("digest_kind", "got host memory at this rank and a GPU at the destination"),
        ("addresses", "dst_parameter must be < 1"),
        ("regions", "inside the regions"),
    ],
)
async def test_an_engine_that_cannot_be_written_is_the_only_engine_left_out(
    misfit: str, expected: str
) -> None:
    """This engine is honest, but was started with other settings or has a defect."""
    memory, own = np.full(NBYTES, 255, np.uint8), OwnProcess("cma")
    async with attacked() as (controller, fleet, _, _, _):
        evil = forger(own.endpoint, own.endpoint, int(memory.ctypes.data))
        bound = evil.binding
        region = RemoteRegion(own.endpoint, bound.regions[0].address, 16)
        evil.binding = {
            "digest_kind": msgspec.structs.replace(bound, digest_kind=DigestKind.POSITION),
            "addresses": msgspec.structs.replace(
                bound, parameter_addresses=bound.parameter_addresses[:1]
            ),
            "regions": msgspec.structs.replace(bound, regions=(region,)),
        }[misfit]
        told = await publish_beside(evil, controller, fleet)
        own.close()
        assert [reason for reason in told if expected in reason], told
        assert (memory == 255).all()


@pytest.mark.parametrize("what", ["address", "identity"])
async def test_a_transport_within_one_host_is_refused_between_hosts(what: str) -> None:
    """This engine is honest, but is on another host and has the default transport."""
    memory, own = np.full(NBYTES, 255, np.uint8), OwnProcess("cma")
    async with attacked() as (controller, fleet, _, _, _):
        evil = forger(own.endpoint, own.endpoint, int(memory.ctypes.data))
        if what == "identity":
            evil.hello = msgspec.structs.replace(evil.hello, host="another boot")
        local_host = "127.0.0.2" if what == "address" else "127.0.0.1"
        told = await publish_beside(evil, controller, fleet, local_host)
        own.close()
        assert "transport cma: both ranks must be on the same host" in told[0]
        assert "use mooncake or nixl" in told[0]
        assert (memory == 255).all()
