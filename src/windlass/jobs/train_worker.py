"""The trainer rank's end of a `TrainController`: user code calls `run_train_worker(engine)`.

The user's script is what the scheduler starts; the network carries typed commands and never the
name of code to run. Commands run in the calling thread, one after another; a daemon thread keeps
the connection, so that a long step does not look like a dead rank.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, final

import aiohttp

from windlass.envs import control_token, environment_value
from windlass.errors import AuthenticationError, ConfigError, PeerUnreachable, ProtocolError
from windlass.jobs.train_messages import (
    TRAIN_PROTOCOL_VERSION,
    Call,
    CallReply,
    Done,
    Failed,
    Joined,
    Load,
    Operation,
    Publish,
    Save,
    Setup,
    Stop,
    TrainStep,
    decode_call,
    encode_frame,
)
from windlass.net.addresses import own_address
from windlass.net.logs import configure_logging, log_fields
from windlass.net.sockets import PartJoiner, send_frame
from windlass.rollout.messages import TrainingSample
from windlass.rollout.workflows import encode_value
from windlass.transfer.collective_group import Rendezvous

__all__ = ["TrainContext", "TrainEngine", "TrainOperation", "run_train_worker"]

KEPT_REPLIES = 16
RECONNECT_DEADLINE_S = 30.0
BACKOFF_S = 0.2
STORE_DEADLINE_S = 300.0
HEARTBEAT_S = 20.0
MAX_MESSAGE_NBYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class TrainContext:
    """What an engine is told when it is set up.

    Attributes:
        rank, world_size: in the job. store_host, store_port: of a `torch.distributed.TCPStore`
            that rank 0 has bound; join it with `is_master=False`.
        controller: address of the controller, for `connect_trainer`. token: its secret.
        deadline_s: for the first collective.
    """

    rank: int
    world_size: int
    store_host: str
    store_port: int
    controller: str
    token: str
    deadline_s: float


class TrainEngine(Protocol):
    """What user code implements, one object per rank. Called from one thread, collectively."""

    def setup(self, context: TrainContext) -> tuple[int, int]:
        """Build model and optimiser; returns (data-parallel rank, data-parallel size).

        Ranks with the same data-parallel rank (tensor and pipeline peers) get the same samples.
        """
        ...

    def train_step(
        self, step: int, groups: Sequence[Sequence[TrainingSample]]
    ) -> Mapping[str, float]:
        """One optimiser step on this rank's shard, which may be empty; returns metrics."""
        ...

    def publish(self, version: int, *, deadline_s: float) -> None:
        """Publish the weights as they are; return once the fleet serves them.

        An engine that keeps a replica may return once they are copied; the next `publish`, or
        `close`, then raises what became of them.
        """
        ...

    def save(self, path: str) -> None:
        """Write a checkpoint."""
        ...

    def load(self, path: str) -> None:
        """Go on from what `save` wrote."""
        ...

    def close(self) -> None:
        """Free everything. Idempotent."""
        ...


TrainOperation = Callable[[Any], object]
"""From a msgpack-plain argument to a msgpack-plain value; runs collectively, in `TrainEngine`'s thread."""


def run_train_worker(
    engine: TrainEngine, *, operations: Mapping[str, TrainOperation] | None = None
) -> None:
    """Serve the controller that started this process until it says stop.

    Blocking. A command that raises is reported; the process stays until it is told to end, or
    until the controller could not be reached for 30 s.

    Args:
        engine: carries out what every trainer does.
        operations: what else this job calls (log-probabilities, an evaluation), by name; the same
            names on every rank. A name is a key of this mapping and nothing else.

    Raises:
        ConfigError: WINDLASS_TRAIN_URL, RANK or WORLD_SIZE are missing: not started by a controller.
        AuthenticationError: wrong token. ProtocolError: the controller refuses this rank.
        PeerUnreachable: the controller is gone.
    """
    url = environment_value("WINDLASS_TRAIN_URL")
    numbers = [environment_value(name) for name in ("RANK", "WORLD_SIZE")]
    if not url or not all(number.isdecimal() for number in numbers):
        raise ConfigError(
            f"run_train_worker: WINDLASS_TRAIN_URL, RANK and WORLD_SIZE must be set by a "
            f"TrainController, got {url!r}, {numbers}"
        )
    rank, world_size = map(int, numbers)
    configure_logging(f"trainer rank {rank}")
    name = environment_value("WINDLASS_TRAIN_NAME")
    worker = _Worker(engine, url, name, control_token(), rank, world_size, operations or {})
    try:
        worker.run()
    finally:
        engine.close()


@final
class _Worker:
    def __init__(
        self,
        engine: TrainEngine,
        url: str,
        name: str,
        token: str,
        rank: int,
        world_size: int,
        operations: Mapping[str, TrainOperation] = MappingProxyType({}),
    ) -> None:
        self._operations = dict(operations)
        self._engine, self._url, self._name, self._token = engine, url, name, token
        self._rank, self._world_size = rank, world_size
        self._calls: queue.SimpleQueue[Call | Exception] = queue.SimpleQueue()
        self._replies: dict[int, CallReply] = {}
        self._newest = 0
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="windlass-train", daemon=True)
        self._incarnation = os.urandom(8).hex()
        self._host, self._port, self._store = "", 0, None
        if rank == 0:
            self._host = own_address(url)
            # Bound here, then published: no port is ever guessed.
            self._store = Rendezvous(self._host, STORE_DEADLINE_S)
            self._port = self._store.port

    def run(self) -> None:
        """The calling thread's loop."""
        self._thread.start()
        while True:
            call = self._calls.get()
            if isinstance(call, Exception):
                raise call
            reply = CallReply(call.request_id, self._carry_out(call))
            done = asyncio.run_coroutine_threadsafe(self._answer(reply), self._loop)
            if isinstance(call.command, Stop):
                done.result(timeout=RECONNECT_DEADLINE_S)
                return

    def _carry_out(self, call: Call) -> Done | Failed:
        engine = self._engine
        try:
            match call.command:
                case Setup(store_host=host, store_port=port, deadline_s=deadline_s):
                    context = TrainContext(
                        rank=self._rank,
                        world_size=self._world_size,
                        store_host=host,
                        store_port=port,
                        controller=self._url,
                        token=self._token,
                        deadline_s=deadline_s,
                    )
                    index, size = engine.setup(context)
                    return Done(data_parallel_rank=index, data_parallel_size=size)
                case TrainStep(step=step, groups=groups):
                    return Done(metrics=dict(engine.train_step(step, groups)))
                case Publish(version=version, deadline_s=deadline_s):
                    with log_fields(version=version):
                        engine.publish(version, deadline_s=deadline_s)
                case Save(path=path):
                    engine.save(path)
                case Load(path=path):
                    engine.load(path)
                case Operation(name=name, argument=argument):
                    value = self._operations[name](argument)
                    encode_value(f"operation {name}: value", value)  # here it can still be reported
                    return Done(value=value)
                case Stop():
                    engine.close()
        # The boundary of user code: whatever it raises is reported, with its trace in the log.
        except Exception as error:  # noqa: BLE001
            traceback.print_exc(file=sys.stderr)
            return Failed(f"{type(error).__name__}: {error}")
        return Done()

    # --- the daemon thread -------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._loop.run_until_complete(self._stay_connected())
        # The boundary of the thread: the calling thread raises it.
        except Exception as error:  # noqa: BLE001
            self._calls.put(error)

    async def _stay_connected(self) -> None:
        give_up_at = self._loop.time() + RECONNECT_DEADLINE_S
        headers = {"Authorization": f"Bearer {self._token}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            while True:
                try:
                    async with session.ws_connect(
                        f"{self._url}/v1/train_workers/{self._name}",
                        heartbeat=HEARTBEAT_S,
                        max_msg_size=MAX_MESSAGE_NBYTES,
                    ) as socket:
                        try:
                            await self._converse(socket)
                        finally:
                            give_up_at = self._loop.time() + RECONNECT_DEADLINE_S
                except aiohttp.WSServerHandshakeError as error:
                    raise AuthenticationError(
                        f"train worker {self._rank}: {self._url} refused: {error.status}"
                    ) from error
                except (aiohttp.ClientError, OSError) as error:
                    if self._loop.time() > give_up_at:
                        raise PeerUnreachable(
                            f"train worker {self._rank}: {self._url} was not reachable for "
                            f"{RECONNECT_DEADLINE_S} s: {error}"
                        ) from error
                await asyncio.sleep(BACKOFF_S)

    async def _converse(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        joined = Joined(
            TRAIN_PROTOCOL_VERSION,
            self._rank,
            self._world_size,
            self._incarnation,
            self._host,
            self._port,
            tuple(sorted(self._operations)),
        )
        await send_frame(socket, encode_frame(joined))
        self._socket = socket
        parts = PartJoiner(MAX_MESSAGE_NBYTES)
        try:
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                data = parts.take(message.data)
                if data is not None:
                    await self._receive(decode_call(data))
        finally:
            self._socket = None
        if socket.close_code == aiohttp.WSCloseCode.POLICY_VIOLATION:
            raise ProtocolError(
                f"train worker {self._rank}: {self._url} refuses this rank; its log says why"
            )

    async def _receive(self, call: Call) -> None:
        if call.request_id in self._replies:
            await self._answer(self._replies[call.request_id])
        elif call.request_id > self._newest:
            self._newest = call.request_id
            self._calls.put(call)

    async def _answer(self, reply: CallReply) -> None:
        """Kept, so that a call repeated after a reconnect is answered and not run again."""
        self._replies[reply.request_id] = reply
        while len(self._replies) > KEPT_REPLIES:
            del self._replies[min(self._replies)]
        if self._socket is not None and not self._socket.closed:
            try:
                await send_frame(self._socket, encode_frame(reply))
            except (ConnectionError, aiohttp.ClientError):
                return  # asked for again on the next connection
