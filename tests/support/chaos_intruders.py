"""Intruders that attack the controller, and engines that misbehave: see `Intrusion` and `Misfit`.

They speak the protocol themselves, from their own hosts. They know everything that an attacker
could know: the running round, the pending calls, the addresses of other engines' memory. Each
checks the answers that it gets; the world checks that the other members stay unharmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import numpy as np
from chaos_controller import HEARTBEAT_S
from chaos_processes import TOKEN
from chaos_schedule import CONTROLLER, ENGINES, Intrusion, Misfit
from chaos_weights import engine_manifest, trainer_manifest
from memory_transport import MemoryTransport
from simulated_network import SimulatedHost

from windlass.config import PauseMode
from windlass.control.connect_messages import Bound, CannotJoin, ConnectEngine, Hello, Welcome
from windlass.control.fleet import PROBE_SEQ
from windlass.control.messages import (
    CONTROLLER_FRAMES,
    MAX_COUNT,
    Announce,
    Apply,
    Command,
    Done,
    Failure,
    FailureKind,
    Pause,
    Probe,
    Result,
    Verified,
    Verify,
    Withdraw,
)
from windlass.errors import WindlassError
from windlass.layout.manifest import ShardManifest
from windlass.net.access import Access, role_token
from windlass.net.listener import MAX_STRANGERS, STRANGER_S
from windlass.net.messages import PROTOCOL_VERSION, Envelope, Refused, Reply, encode
from windlass.planning.program import DigestKind
from windlass.rollout import messages as rollout
from windlass.transfer.bindings import DestinationBinding, LinkOutcome, LinkStatus, Relayed, Written
from windlass.transports.base import MemoryRegion
from windlass.transports.peers import RemoteRegion
from windlass.transports.processes import host_identity

if TYPE_CHECKING:
    from chaos_processes import EngineProcess
    from chaos_world import World

SLACK_S = 2.0
ROUTES = ("/v1/status", "/v1/agents", "/v1/callback", "/v1/workers", "/v1/batches", "/metrics")
NUM_STRANGERS = MAX_STRANGERS + 40
NUM_CANNOT_JOIN = 60
FORGING_S = 6.0
FIRST_ANSWERS: dict[str, Callable[[bytes], object]] = {
    "/v1/agents": CONTROLLER_FRAMES.decode,
    "/v1/workers": rollout.CONTROLLER_FRAMES.decode,
}
PEERS_GONE = (aiohttp.ClientError, OSError)
"""Errors that an intruder gets when the controller dies."""


class Intruder:
    """An intruder or a misfit. `run` of an intruder ends with its attack, `run` of a misfit with the world."""

    def __init__(self, world: World, what: str, number: int) -> None:
        self.world, self.what = world, what
        self.name = f"intruder-{number}"
        self.host: SimulatedHost = world.network.host(self.name)
        self.transport = MemoryTransport(world.fabric, f"{self.name}#{number}")
        # The layout differs from a/0's, so a write of these bytes into a/0 damages it.
        self.manifest = engine_manifest(f"{self.name}/0", 1, 2)
        self.memory = np.zeros(self.manifest.parameters[0].nbytes, np.uint8)
        self.region: MemoryRegion = self.transport.register(self._address, self.memory.nbytes)
        self._forged: set[tuple[int, int, int]] = set()

    @property
    def _address(self) -> int:
        return int(self.memory.ctypes.data)

    def token(self, role: Access) -> dict[str, str]:
        """Return the header that a process of this role sends."""
        return {"Authorization": f"Bearer {role_token(TOKEN, role)}"}

    async def run(self) -> None:
        """Run the attack; end quietly if the controller dies during it."""
        acts: dict[str, Callable[[], Awaitable[None]]] = {
            Intrusion.CROWD: self._crowd,
            Intrusion.TOKENS: self._try_tokens,
            Intrusion.LURK: self._lurk,
            Intrusion.HELLO: self._forge_hellos,
            Intrusion.FIRST: self._forge_first_frames,
            Intrusion.ROLE: self._take_trainers_name,
            Intrusion.FUTURE: self._serve_the_future,
            Intrusion.REPLIES: self._reply_for_others,
            Intrusion.PREDECESSOR: self._reply_to_a_predecessor,
            Intrusion.CANNOT_JOIN: self._cannot_join,
            Intrusion.WORKER: self._register_workers,
            Intrusion.COMPLETIONS: self._complete_for_others,
        }
        try:
            await acts.get(self.what, self._be_a_misfit)()
        except (*PEERS_GONE, WindlassError):
            return
        except Exception as error:  # noqa: BLE001  (else it would try nothing any more, unseen)
            self.world.violate(f"intruder {self.what} fails: {type(error).__name__}: {error}")

    # --- without a token ----------------------------------------------------------------------------

    async def _crowd(self) -> None:
        held: list[Any] = []
        for number in range(NUM_STRANGERS):
            transport, _ = await self.world.network.connect(asyncio.Protocol, self.world.port)
            assert isinstance(transport, asyncio.WriteTransport)
            held.append(transport)
            if number % 2:
                transport.write(b"GET /v1/status HTTP/1.1\r\nHost: a\r\n")
        await asyncio.sleep(0.1)
        there = self._num_connections()
        if there > MAX_STRANGERS:
            self.world.violate(f"{there} connections without a token, at most {MAX_STRANGERS}")
        await asyncio.sleep(STRANGER_S + SLACK_S)
        if there := self._num_connections():
            self.world.violate(f"{there} connections without a token after {STRANGER_S} s")

    def _num_connections(self) -> int:
        """Count the connections of this intruder at the controller's end."""
        ends = self.world.controller.host.transports
        return sum(end.peer.host is self.host for end in ends)

    async def _try_tokens(self) -> None:
        wrong: tuple[dict[str, str], ...] = (
            {},
            {"Authorization": "Bearer "},
            {"Authorization": "Bearer x"},
            {"Authorization": f"bearer {TOKEN}"},
            {"Authorization": f"Basic {TOKEN}"},
            self.token(Access.CLIENT),
        )
        async with aiohttp.ClientSession() as http:
            for headers in wrong:
                for route in ROUTES:
                    await self._expect(http, "GET", route, headers, {401, 403, 404, 405})
            for role in (Access.ENGINE, Access.WORKER, Access.OBSERVER):
                await self._expect(http, "POST", "/v1/callback", self.token(role), {403})
            for role in (Access.ENGINE, Access.TRAINER, Access.OBSERVER):
                await self._expect(http, "GET", "/v1/workers", self.token(role), {403})
            for role in (Access.WORKER, Access.OBSERVER):
                await self._expect(http, "GET", "/v1/agents", self.token(role), {403})

    async def _expect(
        self,
        http: aiohttp.ClientSession,
        method: str,
        route: str,
        headers: dict[str, str],
        expected: set[int],
    ) -> None:
        async with http.request(method, self.world.url + route, headers=headers) as response:
            if response.status not in expected:
                self.world.violate(
                    f"{method} {route} with {headers} is answered {response.status}, must be {expected}"
                )

    # --- with an engine's token -----------------------------------------------------------------------

    def hello(self, describes: ShardManifest | None = None, **changes: Any) -> Hello:
        """Return the Hello of an engine of one rank, with these changes."""
        manifest = describes or self.manifest
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            worker=manifest.worker,
            incarnation=f"of {self.name}",
            role=manifest.role,
            group=manifest.worker.rpartition("/")[0],
            rank=int(manifest.worker.rpartition("/")[2]),
            world_size=1,
            manifest=manifest.encode(),
            offers=self.transport.offers(),
            host=host_identity(),
            can_send=True,
        )
        return msgspec.structs.replace(hello, **changes)

    def _named(self, worker: str, **changes: Any) -> Hello:
        return self.hello(engine_manifest(worker, 1, 2), **changes)

    async def _open(
        self, http: aiohttp.ClientSession, route: str = "/v1/agents"
    ) -> aiohttp.ClientWebSocketResponse:
        return await http.ws_connect(self.world.url + route)

    async def _lurk(self) -> None:
        async with aiohttp.ClientSession(headers=self.token(Access.ENGINE)) as http:
            socket = await self._open(http)
            try:
                async with asyncio.timeout(HEARTBEAT_S + SLACK_S):
                    await socket.receive()
            except TimeoutError:
                self.world.violate(f"a session without a Hello lasts longer than {HEARTBEAT_S} s")

    def _wrong_hellos(self) -> Iterator[tuple[str, Hello]]:
        """Yield Hellos that each break one rule. The last ones need other members that stay connected."""
        coordinator = self.world.controller.coordinator
        far = coordinator.run.round_id.epoch + (1 << 21)
        yield "an epoch out of bounds", self.hello(epoch=MAX_COUNT + 1)
        yield "an epoch far ahead", self.hello(received_epoch=min(far, MAX_COUNT))
        yield "a round out of bounds", self.hello(round=MAX_COUNT + 1)
        yield "a version out of bounds", self.hello(served_version=MAX_COUNT + 1)
        yield "a version below none", self.hello(served_version=-2)
        yield "a worker that is not group/rank", self._named(f"{self.name}/7", rank=0)
        yield "a name with a line end", self._named(f"{self.name}\n12:00 INFO all is well/0")
        yield "a name that moves a cursor", self._named(f"{self.name}\x1b[2J/0")
        yield "a long name", self._named("x" * 300 + "/0")
        yield "a rank outside its group", self._named(f"{self.name}/3")
        yield "no transport", self.hello(offers=())
        yield "two offers of one transport", self.hello(offers=self.transport.offers() * 2)
        yield "another protocol", self.hello(protocol_version=PROTOCOL_VERSION + 1)
        yield "another rank's manifest", self.hello(manifest=engine_manifest("a/0", 0, 1).encode())
        yield "a manifest that is none", self.hello(manifest=b"\x93")
        yield "a URL with a query", self.hello(url="http://127.0.0.1:1/admin/delete?x=")
        yield "a URL that is none", self.hello(url="file:///etc/passwd")
        if self.world.schedule.only_intruders:
            theirs = self.world.engine("a/0").transport
            assert theirs is not None
            yield "an endpoint of another", self.hello(offers=theirs.offers())
            yield "a name that is taken", self._named("a/0")
            yield "a size that another rank denies", self._named("b/2", world_size=3)
            yield "the trainers' name", self._named("trainer/0")
            manifest = trainer_manifest("trainer/0", 0)
            yield "a trainer's role", self.hello(manifest, world_size=2)

    async def _forge_hellos(self) -> None:
        async with aiohttp.ClientSession(headers=self.token(Access.ENGINE)) as http:
            for what, hello in self._wrong_hellos():
                await self._must_be_refused(http, what, encode(hello))

    async def _forge_first_frames(self) -> None:
        round_id = self.world.controller.coordinator.run.round_id
        frames = {
            "a reply": encode(Reply(*round_id, 1, Verified(()))),
            "an announcement": encode(Announce(10**6, 1)),
            "a withdrawal": encode(Withdraw(1)),
            "a welcome": encode(Welcome(1, "mine")),
            "a command": encode(Envelope(*round_id, 1, Pause(PauseMode.ABORT, 1.0))),
            "no frame": b"\xc1",
            "a notice of a name with a line end": encode(CannotJoin(PROTOCOL_VERSION, "a\nb", "")),
        }
        async with aiohttp.ClientSession(headers=self.token(Access.ENGINE)) as http:
            for what, frame in frames.items():
                await self._must_be_refused(http, what, frame)

    async def _must_be_refused(
        self, http: aiohttp.ClientSession, what: str, frame: bytes, route: str = "/v1/agents"
    ) -> None:
        controller = self.world.controller
        async with await self._open(http, route) as socket:
            await socket.send_bytes(frame)
            answer = await socket.receive()
            if (
                answer.type is not aiohttp.WSMsgType.BINARY
                or controller is not self.world.controller
            ):
                return
            if not isinstance(FIRST_ANSWERS[route](answer.data), Refused):
                self.world.violate(f"who says {what} is let in")

    async def _take_trainers_name(self) -> None:
        """Try for 5 s, during which the trainer may be absent."""
        engine = self._named("trainer/1", world_size=2)
        trainer = self.hello(trainer_manifest("trainer/1", 1), world_size=2)
        async with aiohttp.ClientSession(headers=self.token(Access.ENGINE)) as http:
            for _ in range(20):
                await self._must_be_refused(
                    http, "an engine's token, in trainer/1", encode(trainer)
                )
                if self.world.controller.trainers_were_there:
                    await self._must_be_refused(
                        http, "that an engine is called trainer/1", encode(engine)
                    )
                await asyncio.sleep(0.25)

    async def _serve_the_future(self) -> None:
        lineage = self.world.controller.coordinator.run.lineage
        await self._join(self.hello(served_version=10**6, lineage=lineage), self._misfit_answer)

    async def _cannot_join(self) -> None:
        async with aiohttp.ClientSession(headers=self.token(Access.ENGINE)) as http:
            for number in range(NUM_CANNOT_JOIN):
                notice = CannotJoin(PROTOCOL_VERSION, f"{self.name}-{number}", "x" * 5000)
                async with await self._open(http) as socket:
                    await socket.send_bytes(encode(notice))
                    await socket.receive()

    # --- a member ---------------------------------------------------------------------------------------

    async def _join(
        self,
        hello: Hello,
        answer: Callable[[Envelope[Command | Probe]], Result | None],
        during: Callable[[aiohttp.ClientWebSocketResponse], Awaitable[None]] | None = None,
        *,
        for_s: float = 1e9,
    ) -> None:
        """Join as an engine that replies with `answer`, and reconnect when the connection is lost."""
        ends_s = self.world.loop.time() + for_s
        async with aiohttp.ClientSession(headers=self.token(Access.ENGINE)) as http:
            while self.world.loop.time() < ends_s:
                with suppress(*PEERS_GONE):
                    async with await self._open(http) as socket:
                        await socket.send_bytes(encode(hello))
                        if not await self._converse(socket, answer, during):
                            return
                await asyncio.sleep(0.3)

    async def _converse(
        self,
        socket: aiohttp.ClientWebSocketResponse,
        answer: Callable[[Envelope[Command | Probe]], Result | None],
        during: Callable[[aiohttp.ClientWebSocketResponse], Awaitable[None]] | None,
    ) -> bool:
        """Answer calls until the connection ends. Return whether the intruder may reconnect."""
        beside: asyncio.Task[Any] | None = None
        try:
            async for message in socket:
                frame = CONTROLLER_FRAMES.decode(message.data)
                match frame:
                    case Refused():
                        self.world.note(f"{self.name} ({self.what}) is refused: {frame.message}")
                        return not frame.final
                    case Welcome() if during is not None:
                        beside = asyncio.ensure_future(during(socket))
                    case Envelope():
                        result = answer(frame)
                        if result is not None:
                            reply = Reply(frame.epoch, frame.round, frame.seq, result)
                            await socket.send_bytes(encode(reply))
                    case _:
                        pass
        finally:
            if beside is not None:
                beside.cancel()
                await asyncio.gather(beside, return_exceptions=True)
        return True

    async def _be_a_misfit(self) -> None:
        await self._join(self.hello(), self._misfit_answer)

    def _misfit_answer(self, call: Envelope[Command | Probe]) -> Result | None:
        """Return the misfit's reply. No misfit completes a round, so it gets no rollouts."""
        match call.command:
            case ConnectEngine(plan_digest=digest):
                return self._bind(digest)
            case _ if self.what == Misfit.SILENT:
                return None
            case Probe():
                return Done()
            case _ if self.what == Misfit.UNKNOWN:
                return Failure(FailureKind.UNKNOWN, "as it is told")
            case Pause() if self.what == Misfit.NO_PAUSE:
                return Failure(FailureKind.FAILED, "as it is told")
            case Verify(expected=expected):
                return self._verdict(tuple(expected))
            case Apply():
                return Failure(FailureKind.FAILED, "as it is told")
            case _:
                return Done()

    def _verdict(self, sources: tuple[str, ...]) -> Result:
        match self.what:
            case Misfit.MISMATCH:
                return Verified(sources)
            case Misfit.STRANGER:
                return Verified(("trainer/9",))
            case Misfit.NO_VERDICT:
                return Done()
            case Misfit.RELAYED:
                return Relayed((), ("trainer/0",), ("a/0", "b/0"), ("c/0",), 1 << 60, 1e300)
            case _:
                return Verified(())

    def _bind(self, digest: str) -> Result | None:
        endpoint = self.transport.endpoint()
        region = RemoteRegion(endpoint, self._address, self.memory.nbytes)
        own = DestinationBinding(f"{self.name}/0", endpoint, (region,), (self._address,))
        replace = msgspec.structs.replace
        match self.what:
            case Misfit.BIND_SILENT:
                return None
            case Misfit.BIND_TYPE:
                return Verified(())
            case Misfit.BIND_PLAN:
                return Bound("00" * 16, own)
            case Misfit.BIND_WORKER:
                return Bound(digest, replace(own, worker="a/0"))
            case Misfit.BIND_MEMORY:
                return Bound(digest, self._binding_of(self.world.engine("a/0")))
            case Misfit.BIND_SMALL:
                small = RemoteRegion(endpoint, self._address, 3)
                return Bound(digest, replace(own, regions=(small,)))
            case Misfit.BIND_FEW:
                return Bound(digest, replace(own, parameter_addresses=()))
            case Misfit.BIND_DIGEST:
                return Bound(digest, replace(own, digest_kind=DigestKind.POSITION))
            case _:
                return Bound(digest, own)

    def _binding_of(self, victim: EngineProcess) -> DestinationBinding:
        assert victim.transport is not None
        endpoint, address = victim.transport.endpoint(), int(victim.memory.ctypes.data)
        region = RemoteRegion(endpoint, address, victim.memory.nbytes)
        return DestinationBinding(f"{self.name}/0", endpoint, (region,), (address,))

    async def _reply_for_others(self) -> None:
        async def forge(socket: aiohttp.ClientWebSocketResponse) -> None:
            """Reply before the called members do: look for pending calls every 2 ms."""
            for _ in range(int(FORGING_S / 0.002)):
                await asyncio.sleep(0.002)
                for epoch, number, seq in self._calls_of_others():
                    for result in (
                        Failure(FailureKind.UNKNOWN, "forged"),
                        Verified(("trainer/0", "trainer/1")),
                        _unknown_writes(),
                    ):
                        await socket.send_bytes(encode(Reply(epoch, number, seq, result)))
                    epoch_before = max(epoch - 1, 0)
                    forged = Reply(epoch_before, number, PROBE_SEQ, _unknown_writes())
                    await socket.send_bytes(encode(forged))
            await socket.send_bytes(encode(Announce(10**6, 1)))

        await self._join(self.hello(), self._misfit_answer, forge, for_s=FORGING_S)

    def _calls_of_others(self) -> list[tuple[int, int, int]]:
        """Return (epoch, round, seq) of pending calls of the running round, at most 16, each only once."""
        coordinator = self.world.controller.coordinator
        driver = coordinator.rounds.driver
        calls = [] if driver is None else [(*driver.round_id, s) for s in driver.machine.pending]
        fresh = [call for call in calls if call not in self._forged]
        self._forged |= set(fresh)
        return fresh[:16]

    async def _reply_to_a_predecessor(self) -> None:
        """Report writes of an earlier controller's rounds, although this engine took no part in them."""
        self.world.kill_soon(CONTROLLER, 0.5)
        await asyncio.sleep(1.0)

        async def report(socket: aiohttp.ClientWebSocketResponse) -> None:
            for epoch in range(4):
                await socket.send_bytes(encode(Reply(epoch, 1, 3, _unknown_writes())))

        await self._join(self.hello(), self._misfit_answer, report, for_s=FORGING_S)

    # --- with a worker's token --------------------------------------------------------------------------

    def _worker_hello(self, **changes: Any) -> dict[str, Any]:
        """Return the Hello as builtins, so that a change may have any type or value."""
        hello = rollout.WorkerHello(
            protocol_version=PROTOCOL_VERSION, name=self.name, incarnation="i", max_concurrent=1
        )
        return {**msgspec.to_builtins(hello), **changes}

    async def _register_workers(self) -> None:
        wrong = (
            self._worker_hello(max_concurrent=0),
            self._worker_hello(name=rollout.LOCAL_WORKER),
            self._worker_hello(name="a\nb"),
            self._worker_hello(name=""),
            self._worker_hello(name="x" * 300),
            self._worker_hello(received=MAX_COUNT + 1),
            self._worker_hello(protocol_version=PROTOCOL_VERSION + 1),
            msgspec.to_builtins(rollout.CompletionBatch(1, ())),
        )
        async with aiohttp.ClientSession(headers=self.token(Access.WORKER)) as http:
            for frame in wrong:
                await self._must_be_refused(http, str(frame), encode(frame), "/v1/workers")
            if not self.world.schedule.only_intruders:
                # With other faults, a new controller may have no record of the name.
                return
            for incarnation in ("i", "j"):
                async with await self._open(http, "/v1/workers") as socket:
                    await socket.send_bytes(encode(self._worker_hello(incarnation=incarnation)))
                    await socket.receive()
            replaced = encode(self._worker_hello())
            await self._must_be_refused(http, "a name that it lost", replaced, "/v1/workers")

    async def _complete_for_others(self) -> None:
        """Send outcomes of the previous attempt and of a distant one, with tokens that no engine made."""
        async with (
            aiohttp.ClientSession(headers=self.token(Access.WORKER)) as http,
            await self._open(http, "/v1/workers") as socket,
        ):
            await socket.send_bytes(encode(self._worker_hello()))
            await socket.receive()
            last = 0
            for _ in range(30):
                await asyncio.sleep(0.1)
                version = self.world.controller.coordinator.fleet.published
                outcomes = tuple(
                    encode(_forged_outcome(task_id, attempt + step, version))
                    for task_id, attempt in [*self.world.attempts.items()][-8:]
                    for step in (-1, 1000)
                )
                last += len(outcomes)
                await socket.send_bytes(encode(rollout.CompletionBatch(last, outcomes)))


def _forged_outcome(task_id: str, attempt: int, version: int) -> rollout.RolloutOutcome:
    return rollout.RolloutOutcome(
        task_id=task_id,
        attempt=attempt,
        status=rollout.OutcomeStatus.ACCEPTED,
        result=rollout.Partial((6, 6, 6), (-1.0,) * 3, (version,) * 3),
        engine="a",
        worker="worker/0",
        finished_at=0.0,
    )


def _unknown_writes() -> Written:
    """Return an unknown outcome for the writes to every engine rank."""
    ranks = [f"{name}/{rank}" for name, size in ENGINES.items() for rank in range(size)]
    links = tuple(LinkOutcome(rank, LinkStatus.UNKNOWN, 0, "", "forged") for rank in ranks)
    return Written(links, 0.0, 0.0)
