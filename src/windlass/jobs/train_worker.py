"""The trainer rank's side of a `TrainController`: user code calls `run_train_worker(engine)`.

The scheduler starts the user's script. The controller sends typed commands and never sends code. Commands run in the
thread that called `run_train_worker`, one after another. A daemon thread serves the connection, so that a rank still
answers pings during a long step.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple, final

import msgspec

from windlass.backends.collective_group import Rendezvous
from windlass.control.connect_messages import JOB_VARIABLE
from windlass.envs import control_token, environment_value, remove_values, set_values
from windlass.errors import ConfigError
from windlass.jobs.call_values import decode_call_value, encode_call_value
from windlass.net.addresses import own_address
from windlass.net.logs import configure_logging, log_fields
from windlass.net.messages import PROTOCOL_VERSION, Codec, Envelope, Refused, Reply
from windlass.net.rpc_client import Client
from windlass.rollout.batches import BatchClient
from windlass.rollout.messages import TrainingBatch, TrainingSample
from windlass.rollout.values import as_number, plain_integers
from windlass.sampling import SamplingParams

_log = logging.getLogger(__name__)

RECONNECT_DEADLINE_S = 30.0
"""Seconds without a reachable controller after which a rank ends; also its longest wait to send its last answer."""
STORE_DEADLINE_S = 300.0
"""Timeout of the TCP store that rank 0 serves."""
COLLECTIVE_S = 600.0
"""Default timeout in seconds of the collectives of trainer ranks."""
JOINS_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
"""Environment variables that make torch join the job's store. The restart count is a prefix of the store's keys."""
LOGPROB_DIFFERENCE = "logprob_difference"
"""Name of a metric of the first step, in nats; see `TrainEngine.train_step`."""
LARGEST_DIFFERENCE = 0.1
"""Largest value of `LOGPROB_DIFFERENCE` without a warning. With engines in bfloat16, rounding makes it about 0.02."""

Groups = tuple[tuple[TrainingSample, ...], ...]
Arguments = TypeVarTuple("Arguments")
T = TypeVar("T")

# --- messages between a train controller and its ranks -----------------------------------------------

MAX_MESSAGE_NBYTES = 1 << 30
"""Largest size of a message between the train controller and a rank."""


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """First frame of every connection of a rank.

    Attributes:
        protocol_version: protocol version of the rank; the controller refuses every version except its own.
        rank, world_size: number of the rank in its job, and number of ranks.
        job: id of the launch of the ranks (WINDLASS_JOB). The controller refuses a rank of an earlier launch.
        incarnation: random id of the process. The controller refuses a second process with the same rank number.
        store_host, store_port: address of the TCP store that rank 0 serves; '' and 0 for other ranks.
        operations: names of the operations that the script passed to `run_train_worker`.
    """

    protocol_version: int
    rank: int
    world_size: int
    job: str
    incarnation: str
    store_host: str = ""
    store_port: int = 0
    operations: tuple[str, ...] = ()


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The answer to `Joined`."""


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """Call `TrainEngine.setup`. The answer sets `Done.data_parallel_rank` and `Done.data_parallel_size`."""

    store_host: str
    store_port: int
    deadline_s: float
    sampling: SamplingParams | None = None
    collective_s: float = COLLECTIVE_S


class TakeTensors(msgspec.Struct, frozen=True, tag="take_tensors"):
    """Fetch the held tensors of this rank's share of the step's groups, and keep the groups for `TrainStep`.

    The answer sets `Done.lost`.
    """

    step: int
    groups: Groups
    deadline_s: float


class TrainStep(msgspec.Struct, frozen=True, tag="train_step"):
    """Run one optimiser step on this rank's share of the step's groups. A group is never split between ranks.

    Attributes:
        groups: the share of the rank; None for the groups of the last `TakeTensors`.
    """

    step: int
    groups: Groups | None


class PreparePublish(msgspec.Struct, frozen=True, tag="prepare_publish"):
    """Call `TrainEngine.prepare_publish`. The answer sets `Done.sends_copies`."""

    version: int


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Write a checkpoint."""

    path: str


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load a checkpoint."""

    path: str


class Operation(msgspec.Struct, frozen=True, tag="operation"):
    """Run the user's operation of this name with `argument` (msgpack). The answer sets `Done.value`."""

    name: str
    argument: bytes


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Close the engine and end the process."""


TrainCommand = Setup | TakeTensors | TrainStep | PreparePublish | Save | Load | Operation | Stop


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Answer of a rank whose call returned.

    Attributes:
        metrics: answer to `TrainStep`: metrics of the engine.
        data_parallel_rank, data_parallel_size: answer to `Setup`.
        sends_copies: answer to `PreparePublish`: whether the rank sends the weights from a replica. Training may then
            change the weights as soon as they are copied to the replica.
        lost: answer to `TakeTensors`: keys of tensors that no process holds any more.
        value: result of an operation in msgpack; empty for other commands.
    """

    metrics: dict[str, float] = {}
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    value: bytes = b""
    sends_copies: bool = False
    lost: tuple[str, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Answer of a rank whose call raised an exception."""

    error: str


TrainResult = Done | Failed
RankFrame = Joined | Reply[TrainResult]
ControllerFrame = Welcome | Refused | Envelope[TrainCommand]

RANK_FRAMES: Codec[RankFrame] = Codec(RankFrame, "train rank frame", max_nbytes=MAX_MESSAGE_NBYTES)
CONTROLLER_FRAMES: Codec[ControllerFrame] = Codec(
    ControllerFrame, "train controller frame", max_nbytes=MAX_MESSAGE_NBYTES
)


# --- what user code sees -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainContext:
    """Argument of `TrainEngine.setup`.

    The environment has the same variables as under `torchrun` (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT). In `setup`, `torch.distributed.init_process_group` needs no argument.

    Attributes:
        rank, world_size: rank of this process and number of ranks in the job.
        store_host, store_port: address of a `torch.distributed.TCPStore` that rank 0 has bound; join it
            with `is_master=False`.
        controller: address of the controller, for `connect_trainer`.
        token: this rank's token for the controller.
        deadline_s: seconds within which `setup` must end. This time is short if other ranks connected late.
        sampling: sampling parameters of the job's rollouts, for a check of the rollouts' log-probabilities. None if the
            parameters are unknown.
        collective_s: timeout of the process group.
    """

    rank: int
    world_size: int
    store_host: str
    store_port: int
    controller: str
    token: str
    deadline_s: float
    sampling: SamplingParams | None = None
    collective_s: float = COLLECTIVE_S


class TrainEngine(Protocol):
    """Interface that user code implements. Every rank has one engine; each method runs on all ranks, in one thread.

    A method other than `close` may raise any exception. The rank reports it to the `TrainController` and waits for the next
    command. The call of the `TrainController` then raises TrainerError.
    """

    def setup(self, context: TrainContext) -> tuple[int, int]:
        """Build model and optimiser; return (data-parallel rank, data-parallel size).

        Ranks with the same data-parallel rank (tensor and pipeline peers) get the same samples.
        """
        ...

    def train_step(
        self, step: int, groups: Sequence[Sequence[TrainingSample]]
    ) -> Mapping[str, float]:
        """Take one optimiser step on this rank's groups (there may be none); return metrics by name.

        The job warns if the optional metric `LOGPROB_DIFFERENCE` is above `LARGEST_DIFFERENCE`. This metric is the mean
        absolute difference per token between the log-probabilities of the rollouts and of the trainer's model, both
        with the settings of `TrainContext.sampling`.
        """
        ...

    def prepare_publish(self, version: int) -> bool:
        """Make this rank's weights ready to be sent as `version`, usually with `TrainerClient.prepare_publish`.

        The weights are sent after this method has returned. This object must not change them before its next
        `train_step` or `load`.

        Returns:
            Whether the rank sends a copy of the weights (a replica). If all ranks do, the controller may call the next
            `train_step` as soon as the weights are copied.
        """
        ...

    def save(self, path: str) -> None:
        """Write this rank's part of a checkpoint into the folder `path`, the same on all ranks."""
        ...

    def load(self, path: str) -> None:
        """Load this rank's part of the checkpoint that `save` wrote into the folder `path`. Called after `setup`."""
        ...

    def close(self) -> None:
        """Free connections, process groups and memory. Must be idempotent: called on `Stop`, and when the rank ends."""
        ...


EngineT = TypeVar("EngineT", bound=TrainEngine)


class WrappedEngine(Generic[EngineT]):
    """`TrainEngine` that passes all calls to another engine. Subclasses override some of the methods.

    Args:
        engine: the other engine.

    Attributes:
        engine: as given.
    """

    def __init__(self, engine: EngineT) -> None:
        self.engine = engine

    def setup(self, context: TrainContext) -> tuple[int, int]:
        """See `TrainEngine.setup`."""
        return self.engine.setup(context)

    def train_step(
        self, step: int, groups: Sequence[Sequence[TrainingSample]]
    ) -> Mapping[str, float]:
        """See `TrainEngine.train_step`."""
        return self.engine.train_step(step, groups)

    def prepare_publish(self, version: int) -> bool:
        """See `TrainEngine.prepare_publish`."""
        return self.engine.prepare_publish(version)

    def save(self, path: str) -> None:
        """See `TrainEngine.save`."""
        self.engine.save(path)

    def load(self, path: str) -> None:
        """See `TrainEngine.load`."""
        self.engine.load(path)

    def close(self) -> None:
        """See `TrainEngine.close`."""
        self.engine.close()


TrainOperation = Callable[[Any], object]
"""Function that the controller may call on all ranks. It gets one argument and returns a value, both of types that msgpack
can encode, and both may contain torch tensors. It runs in the same thread as the methods of the `TrainEngine`."""


def run_train_worker(
    engine: TrainEngine, *, operations: Mapping[str, TrainOperation] | None = None
) -> None:
    """Run the commands of the `TrainController` that started this process, until the command `Stop`. Blocks.

    If a command raises, the rank reports the error and waits for the next command.

    Args:
        engine: object that runs the commands common to all trainers.
        operations: name -> additional function that the controller may call, for example an evaluation. All ranks need
            the same names. The controller cannot call any other code.

    Raises:
        ConfigError: WINDLASS_TRAIN_URL, RANK or WORLD_SIZE is missing, because no `TrainController` started this process;
            or a variable for logging or TLS has a wrong value.
        AuthenticationError: the controller refuses the token.
        ProtocolError: the controller refuses this rank.
        PeerUnreachable: the controller could not be reached for 30 s.
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
    try:
        TrainWorker(engine, url, name, control_token(), rank, world_size, operations or {}).work()
    finally:
        engine.close()


@final
class _CallingThread(concurrent.futures.Executor):
    """Executor that runs functions in the thread that calls `run_next`: user code may have to run in one thread always."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    # Only the event loop calls this, and without keyword arguments.
    def submit(  # type: ignore[override]
        self, job: Callable[[*Arguments], T], /, *args: *Arguments
    ) -> concurrent.futures.Future[T]:
        """Queue a function for `run_next`; return a future of its result or exception."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job(*args))
                # The event loop, which waits for the future, gets the error.
                except Exception as error:  # noqa: BLE001
                    future.set_exception(error)

        self._jobs.put(run)
        return future

    def put(self, job: Callable[[], object]) -> None:
        """Queue a function. If the function raises, the call of `run_next` that runs it raises the same exception."""
        self._jobs.put(job)

    def run_next(self) -> None:
        """Wait for the next queued function and run it in this thread."""
        self._jobs.get()()


@final
class TrainWorker(Client[TrainCommand, TrainResult, Welcome]):
    """Connection of a rank to the controller. The thread that calls `work` executes the controller's commands."""

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
        self._calling_thread = _CallingThread()
        super().__init__(
            url,
            f"/v1/train_workers/{name}",
            token,
            CONTROLLER_FRAMES,
            executor=self._calling_thread,
            give_up_s=RECONNECT_DEADLINE_S,
            keeps_calls=True,
        )
        self._engine, self._operations = engine, dict(operations)
        self._batches: BatchClient | None = None
        self._taken: Groups = ()
        self._is_stopped = False
        host, port = "", 0
        if rank == 0:
            host = own_address(url)
            # Bind the port before the controller gives it to other ranks, so that no other process can take the port.
            self._store_server = Rendezvous(host, STORE_DEADLINE_S)
            port = self._store_server.port
        names, incarnation = tuple(sorted(operations)), os.urandom(8).hex()
        job = environment_value(JOB_VARIABLE)
        self._joined = Joined(
            PROTOCOL_VERSION, rank, world_size, job, incarnation, host, port, names
        )

    def work(self) -> None:
        """Connect, and execute the controller's commands in this thread until `Stop`.

        Raises:
            ConfigError, AuthenticationError, ProtocolError: see `run_train_worker`.
            PeerUnreachable: see `run_train_worker`; or this process cannot start a thread.
        """
        self.ended.add_done_callback(lambda ended: self._calling_thread.put(ended.result))
        self.start()
        try:
            while not self._is_stopped:
                self._calling_thread.run_next()
            self.flush(RECONNECT_DEADLINE_S)
        finally:
            self.close()
            if self._batches is not None:
                self._batches.close()

    def hello(self) -> Joined:
        """Return the first frame of each connection; see `Client`."""
        return self._joined

    def on_frame(self, frame: Welcome) -> None:
        """Ignore the controller's answer to `Joined`: it has no content."""

    def failed(self, error: Exception, command: TrainCommand | None) -> Failed:
        """Log the traceback of a command that raised, and return the answer for it; see `Client`."""
        name = "unreadable command" if command is None else type(command).__name__
        _log.error("%s failed", name, exc_info=error)
        return Failed(f"{type(error).__name__}: {error}")

    def execute(self, call: Envelope[TrainCommand]) -> Done:
        """Run a command, and return its answer; see `Client`.

        `Setup` sets MASTER_ADDR and MASTER_PORT in this process. `Stop` closes the engine and ends `work`.

        Raises:
            ConfigError: the engine's `setup` did not return two integers, its `train_step` returned values of a wrong
                type, or the value that an operation returned cannot be encoded.
        """
        engine = self._engine
        match call.command:
            case Setup(store_host=host, store_port=port) as setup:
                context = TrainContext(
                    rank=self._joined.rank,
                    world_size=self._joined.world_size,
                    store_host=host,
                    store_port=port,
                    controller=self._url,
                    token=self._token,
                    deadline_s=setup.deadline_s,
                    sampling=setup.sampling,
                    collective_s=setup.collective_s,
                )
                set_values({"MASTER_ADDR": host, "MASTER_PORT": str(port), **JOINS_STORE})
                try:
                    found = engine.setup(context)
                finally:
                    # If these variables stayed set, rank 0 of a later process group would not start that group's store.
                    remove_values(JOINS_STORE)
                place = plain_integers("setup: the returned ranks", found)
                if len(place) != 2:
                    raise ConfigError(
                        f"setup must return (data-parallel rank, data-parallel size), got {place}"
                    )
                return Done(data_parallel_rank=place[0], data_parallel_size=place[1])
            case TakeTensors():
                return self._take(call.command)
            case TrainStep(step=step, groups=groups):
                taken, self._taken = self._taken, ()
                given = taken if groups is None else groups
                return Done(metrics=step_metrics(engine.train_step(step, given)))
            case PreparePublish(version=version):
                with log_fields(version=version):
                    return Done(sends_copies=bool(engine.prepare_publish(version)))
            case Save(path=path):
                engine.save(path)
            case Load(path=path):
                engine.load(path)
            case Operation(name=name, argument=argument):
                value = self._operations[name](decode_call_value(argument))
                return Done(value=encode_call_value(f"operation {name}: value", value))
            case Stop():
                self._is_stopped = True
                engine.close()
        return Done()

    def _take(self, command: TakeTensors) -> Done:
        """Fetch the tensors of the groups, and keep the groups if no tensor is lost."""
        # Free the memory of earlier groups before `fetch` allocates new memory.
        self._taken = ()
        if self._batches is None:
            transport = environment_value("WINDLASS_TRANSPORT") or "auto"
            self._batches = BatchClient(self._url, self._token, transport=transport)
        asked = TrainingBatch(command.step, tuple(chain.from_iterable(command.groups)))
        batch, lost = self._batches.fetch(
            asked, self._joined.rank, self._joined.world_size, deadline_s=command.deadline_s
        )
        if not lost:
            samples = iter(batch.samples)
            self._taken = tuple([tuple(islice(samples, len(g))) for g in command.groups])
        return Done(lost=lost)


def step_metrics(found: object) -> dict[str, float]:
    """Convert the metrics that an engine's `train_step` returned to Python floats; None becomes an empty dict.

    Raises:
        ConfigError: `found` is not a mapping of names to numbers.
    """
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"train_step must return a mapping of names to numbers, got {found!r}")
    return {str(name): as_number(f"train_step: metric {name}", found[name]) for name in found}
