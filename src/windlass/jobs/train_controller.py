"""Controller of trainer ranks: starts them through a scheduler, and calls all of them at the same time."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, final

import msgspec
from aiohttp import web

from windlass.control.connect_messages import JOB_VARIABLE
from windlass.control.coordinator import Coordinator
from windlass.control.publish_requests import CalledUpdate
from windlass.control.report import RoundOutcome
from windlass.errors import DECODE_ERRORS, ConfigError, ProtocolError, TrainerError
from windlass.jobs.call_values import decode_call_value, encode_call_value
from windlass.jobs.results import StepResult
from windlass.jobs.schedulers.base import ProcessSpec, Scheduler
from windlass.jobs.train_worker import (
    COLLECTIVE_S,
    MAX_MESSAGE_NBYTES,
    RANK_FRAMES,
    Done,
    Failed,
    Groups,
    Joined,
    Load,
    Operation,
    PreparePublish,
    RankFrame,
    Save,
    Setup,
    Stop,
    TakeTensors,
    TrainCommand,
    TrainResult,
    TrainStep,
    Welcome,
)
from windlass.net.access import Access, role_environment
from windlass.net.clock import Deadline
from windlass.net.messages import Garbled, MustWait, check_version
from windlass.net.rpc import Session
from windlass.net.rpc_server import serve
from windlass.net.server import ControlServer
from windlass.rollout.batches import BatchQueue, check_groups
from windlass.rollout.fetch import held_in
from windlass.rollout.messages import TrainingSample
from windlass.rollout.values import plain_integers
from windlass.sampling import SamplingParams
from windlass.wording import counted

_log = logging.getLogger(__name__)

HEARTBEAT_S = 20.0
"""Seconds between two pings to a rank."""
LOG_LINES = 20
"""Number of log lines of a rank in an error."""
DEATH_GRACE_S = 1.0
"""Seconds to wait after a rank has failed. The scheduler may then report that another rank died and is the cause."""
RANK_SHARE = 0.9
"""Fraction of the deadline of `take_tensors` that is the deadline of each rank."""
BROKEN_GRACE_S = 1.0
"""Seconds that ranks get to end after a failure. A longer time would not help ranks that wait in a collective."""


class _RankEnded(Exception):
    """The process of a rank has ended. If other ranks fail as a consequence, a call raises this error, not their errors."""


class _RankFailed(TrainerError):
    """A rank answered that its command raised an exception, or the weight update failed."""

    def __init__(self, rank: str, reason: str) -> None:
        super().__init__(f"{rank}: {reason}")
        self.rank = rank


_T = TypeVar("_T")
_Wait = asyncio.Future[TrainResult] | asyncio.Task[bool]
"""Answer of a rank, or the wait for its connection."""


def rank_specs(
    name: str,
    command: Sequence[str],
    world_size: int,
    *,
    num_cpus: int,
    num_gpus: int,
    num_nodes: int,
) -> list[ProcessSpec]:
    """Return the specs of the rank processes of a `TrainController` that has these arguments, in rank order.

    Rank 0 reserves all nodes, cores and GPUs of the job; the other ranks share its reservation.
    """
    per_node, specs = world_size // num_nodes, []
    for rank in range(world_size):
        node, local = divmod(rank, per_node)
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            # A rank with GPUs sees only the GPUs reserved for it, numbered from 0.
            "LOCAL_RANK": "0" if num_gpus else str(local),
            "LOCAL_WORLD_SIZE": "1" if num_gpus else str(per_node),
        }
        specs.append(
            ProcessSpec(
                name=f"{name}-{rank}",
                command=tuple(command),
                environment=environment,
                num_nodes=num_nodes,
                num_cpus=num_cpus * per_node,
                num_gpus=num_gpus * per_node,
                colocate_with=f"{name}-0" if rank else "",
                node=node,
                gpus=tuple(range(local * num_gpus, (local + 1) * num_gpus)),
            )
        )
    return specs


@final
class _Rank(Session[TrainCommand, TrainResult]):
    """Session of one trainer rank. The session continues when the rank's process connects again.

    Attributes:
        spec: process of the rank.
        incarnation: incarnation of the connected process; empty before its first connection.
        joined: event that is set when the rank has connected.
        watch: task that waits for the end of the process, and returns its exit status and the end of its log as a text;
            None if no process is started.
        data_parallel: answer to `Setup`; it contains the data-parallel rank and size.
        operations: names of the operations that the rank can run.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        super().__init__(spec.name, keeps_calls=True)
        self.spec, self.incarnation = spec, ""
        self.joined = asyncio.Event()
        self.watch: asyncio.Task[str] | None = None
        self.data_parallel = Done()
        self.operations: tuple[str, ...] = ()


@final
class TrainController:
    """Controller of trainer ranks: starts them, and sends each command to all ranks at the same time. Not thread-safe.

    If a rank dies, hangs or raises, other ranks may wait for this rank in a collective. So every later call raises the
    same error, until `start` restarts all ranks.

    Calls run one after another, in the order in which they were made. If the caller of a running call is cancelled, the call
    continues on all ranks, and the next call begins after it has ended. So a cancelled step may still be trained.

    Attributes:
        ranks_started: event that is set while the processes of all ranks are started.

    Args:
        scheduler: scheduler that starts the ranks; `close` does not close the scheduler.
        command: command that runs the user's script, which calls `run_train_worker`.
        world_size: number of ranks.
        token: secret of the server on which this object is mounted; ranks get the token of the trainer role.
        name: prefix of the ranks' names (NAME-0, NAME-1, ...); letters, digits, "_", "." and "-".
        coordinator: `Controller.coordinator` of the controller with this server; only `publish` needs a coordinator.
        environment: variables added to every rank's environment.
        num_cpus: number of cores reserved per rank.
        num_gpus: number of GPUs reserved per rank.
        num_nodes: number of nodes for the ranks, with the same number of ranks on each, in rank order. The first rank
            reserves all nodes together.
        sampling: sampling parameters of rollouts, for `TrainContext.sampling`.
        batches: queue of the controller with this server, which lets ranks fetch large tensors of samples. Without it,
            samples must contain the elements of their tensors.

    Raises:
        ConfigError: world_size < 1 or not a multiple of num_nodes, or the name contains other characters.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        command: Sequence[str],
        world_size: int,
        token: str,
        name: str = "trainer",
        coordinator: Coordinator | None = None,
        environment: Mapping[str, str] | None = None,
        num_cpus: int = 1,
        num_gpus: int = 0,
        num_nodes: int = 1,
        sampling: SamplingParams | None = None,
        batches: BatchQueue | None = None,
    ) -> None:
        if world_size < 1:
            raise ConfigError(f"TrainController: world_size must be >= 1, got {world_size}")
        if num_nodes < 1 or world_size % num_nodes:
            raise ConfigError(
                f"TrainController: world_size must be a multiple of num_nodes, got {world_size} "
                f"and {num_nodes}"
            )
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise ConfigError(
                f"TrainController: name must consist of A-Z a-z 0-9 _ . -, got {name!r}"
            )
        self._scheduler, self._token, self._name = scheduler, token, name
        self._environment = dict(environment or {})
        self._coordinator, self._sampling, self._batches = coordinator, sampling, batches
        self._looked_at: Groups | None = None
        """Groups of the next step, if all ranks have the large tensors of these groups; else None."""
        self._are_taken = False
        """Whether the ranks keep `_looked_at` for the next step, because it has large tensors."""
        self._under_way: CalledUpdate | None = None
        self._is_served = self._stands_still = False
        if coordinator is not None:
            coordinator.catch_ups.add_standstill_check(lambda: self._stands_still)
        specs = rank_specs(
            name, command, world_size, num_cpus=num_cpus, num_gpus=num_gpus, num_nodes=num_nodes
        )
        self._ranks = [_Rank(spec) for spec in specs]
        self.ranks_started = asyncio.Event()
        self._store = ("", 0)
        self._job = ""
        self._num_calls = 0
        self._failure = ""
        self._is_closing = False
        self._lock = asyncio.Lock()
        """Lock held during a call of the ranks and during `publish`."""
        self._call: asyncio.Task[Any] | None = None
        """Task of the newest call that has begun. It holds `_lock`."""

    def mount(self, server: ControlServer) -> None:
        """Add the HTTP route for the ranks' connections to `server`, which must not have started yet.

        A server may have several train controllers with different names, for example of an actor and a critic.

        Raises:
            ConfigError: the server already has a train controller of this name.
        """
        # The regular expression makes this route match only this controller's name. The access rule of the route
        # `/v1/train_workers/{name}` applies to every name.
        route = f"/v1/train_workers/{{name:{re.escape(self._name)}}}"
        server.add_routes([web.get(route, self._serve)])

    # --- calls -------------------------------------------------------------------------------

    async def start(
        self, url: str, *, deadline_s: float, collective_s: float = COLLECTIVE_S
    ) -> None:
        """Start all ranks, wait until they have connected, and call `TrainEngine.setup` on each.

        First end the ranks of an earlier call, and clear their failure. The new ranks do not load a checkpoint; see
        `load`. If an engine still runs on the nodes that the scheduler reserved for the earlier ranks, the new ranks
        start on the same nodes.

        Args:
            url: URL of the server on which this object is mounted, as the ranks can reach it.
            deadline_s: seconds for the whole call.
            collective_s: timeout of the ranks' collectives. It should not be shorter than the deadlines of later calls,
                because a rank may wait in a collective for a slower rank.

        Raises:
            ConfigError: the scheduler cannot start the processes.
            TrainerError: a rank died, or did not connect and finish `setup` within `deadline_s`; or its `setup` raised,
                or the data-parallel numbers that the ranks returned do not give each group to one data-parallel rank.
        """
        deadline = Deadline.after(deadline_s, "connect")
        await self._end_ranks(BROKEN_GRACE_S)
        self._ranks = [_Rank(rank.spec) for rank in self._ranks]
        self._failure, self._under_way = "", None
        self._are_taken, self._looked_at = False, None
        self._job = secrets.token_hex(8)
        environment = {
            **self._environment,
            **role_environment(self._token, Access.TRAINER),
            "WINDLASS_TRAIN_URL": url,
            "WINDLASS_TRAIN_NAME": self._name,
            JOB_VARIABLE: self._job,
        }
        for rank in self._ranks:
            given = {**environment, **rank.spec.environment}
            await self._scheduler.start(msgspec.structs.replace(rank.spec, environment=given))
            rank.watch = asyncio.create_task(self._watch(rank.peer))
        self.ranks_started.set()
        joins = [asyncio.create_task(rank.joined.wait()) for rank in self._ranks]
        await self._wait_for_all(joins, deadline)
        left_s = max(deadline.remaining_s, 0.1)
        setup = Setup(*self._store, left_s, self._sampling, collective_s)
        answers = await self._order([setup] * len(self._ranks), left_s)
        for rank, done in zip(self._ranks, answers, strict=True):
            if not 0 <= done.data_parallel_rank < done.data_parallel_size <= len(self._ranks):
                raise TrainerError(
                    f"{rank.peer}: setup must return a data-parallel rank in [0, size) and a size of at most "
                    f"{len(self._ranks)}, got rank {done.data_parallel_rank} and size {done.data_parallel_size}"
                )
            rank.data_parallel = done
        self._check_places()

    def _check_places(self) -> None:
        """Check that the data-parallel ranks of all ranks give each group of a step to a data-parallel rank, and to only one.

        Raises:
            TrainerError: two ranks have different numbers of data-parallel ranks, or a data-parallel rank is missing.
        """
        rule = "setup must return the same data-parallel size on all ranks, and each data-parallel rank below this size"
        first, size = self._ranks[0].peer, self._ranks[0].data_parallel.data_parallel_size
        for rank in self._ranks:
            if (other := rank.data_parallel.data_parallel_size) != size:
                raise TrainerError(
                    f"{rank.peer}: {rule}, got size {other}, and size {size} on {first}"
                )
        found = {rank.data_parallel.data_parallel_rank for rank in self._ranks}
        if missing := sorted({*range(size)} - found):
            raise TrainerError(
                f"{rule}, got no data-parallel rank {missing[0]} of {size} from {counted(len(self._ranks), 'rank')}: "
                "its groups would not be trained on"
            )

    async def train_step(
        self, step: int, groups: Sequence[Sequence[TrainingSample]], *, deadline_s: float
    ) -> StepResult:
        """Run one optimiser step on all ranks. Group i goes to data-parallel rank i modulo `data_parallel_size`.

        This method calls `take_tensors` first if the caller has not called it with these groups.

        Args:
            step: number of the step, for `TrainEngine.train_step` of each rank.
            groups: samples of each group. A data-parallel rank may get no group.
            deadline_s: seconds for the step. The ranks have the same time again to fetch large tensors before the step.

        Raises:
            ConfigError: `step` is not an integer, or a value of a group is not a `TrainingSample`.
            TrainerError: a rank died, did not answer within `deadline_s`, or raised; or tensors are lost. If tensors are
                lost, no rank has trained, and the next call may train on other groups.
        """
        (step,) = plain_integers("train_step: step", (step,))
        whole = check_groups("train_step", groups)
        return await self._in_turn(lambda: self._train(step, whole, deadline_s))

    async def _train(self, step: int, whole: Groups, deadline_s: float) -> StepResult:
        """Do the work of `train_step` on checked groups.

        Raises:
            TrainerError: for the same reasons as in `train_step`.
        """
        if whole != self._looked_at:
            lost = await self._take(step, whole, deadline_s)
            if lost:
                raise TrainerError(
                    f"train_step: the ranks could not fetch {counted(len(lost), 'tensor')} of step {step}, because the holders "
                    "(usually rollout workers) have ended, have freed the memory, or are not connected"
                )
        are_taken, self._are_taken, self._looked_at = self._are_taken, False, None
        shards = [whole[index::size] for index, size in self._shard_indices()]
        steps = [TrainStep(step, None if are_taken else shard) for shard in shards]
        answers = await self._collective(steps, deadline_s)
        weights = [float(sum(map(len, shard))) for shard in shards]
        found = tuple(answer.metrics for answer in answers)
        return StepResult(step, found, _weighted_mean(found, weights))

    async def take_tensors(
        self, step: int, groups: Sequence[Sequence[TrainingSample]], *, deadline_s: float
    ) -> frozenset[str]:
        """Let all ranks fetch the large tensors of a step's groups. A later `train_step` with these groups uses them.

        The holders of the tensors (usually rollout workers) write the elements into the memory of the ranks; see
        `windlass.rollout.held`. The call does nothing if the groups have no large tensor.

        Returns:
            Keys of tensors that are lost, see `HeldTensor`; empty if all ranks have all tensors.

        Raises:
            ConfigError: `step` is not an integer, or a value of a group is not a `TrainingSample`.
            TrainerError: a rank died, did not answer within `deadline_s`, or raised, for example because it has no
                transport in common with a holder.
        """
        (step,) = plain_integers("take_tensors: step", (step,))
        whole = check_groups("take_tensors", groups)
        return await self._in_turn(lambda: self._take(step, whole, deadline_s))

    async def _take(self, step: int, whole: Groups, deadline_s: float) -> frozenset[str]:
        """Do the work of `take_tensors` on checked groups."""
        self._are_taken, self._looked_at = False, None
        if self._batches is None:
            self._looked_at = whole
            return frozenset()
        async with self._batches.lend(whole) as lent:
            if not held_in(sample for group in lent for sample in group):
                self._looked_at = whole
                return frozenset()
            # Ranks give up before this call does, so that they can report the reason.
            takes = [
                TakeTensors(step, lent[index::size], deadline_s * RANK_SHARE)
                for index, size in self._shard_indices()
            ]
            answers = await self._collective(takes, deadline_s)
        lost = frozenset([key for answer in answers for key in answer.lost])
        if not lost:
            self._are_taken, self._looked_at = True, whole
        return lost

    async def publish(self, version: int, *, deadline_s: float) -> None:
        """Publish the weights of all ranks as `version`. When this method returns, training may change the weights.

        This method returns when engines serve the version. If all ranks send from replicas (copies of their weights), it
        returns as soon as the weights are copied. The next call of `publish` then first waits until this update ends,
        and raises an error if the update failed. The first call always waits until engines serve the version,
        because before this call engines serve no version of this job.

        Raises:
            ConfigError: this object has no coordinator, or `version` is not an integer.
            TrainerError: this version was not published, or a rank died, did not answer within `deadline_s`, or raised.
                If ranks send from replicas, also: the previous version was not published.
        """
        if self._coordinator is None:
            raise ConfigError(
                "TrainController: publish needs a coordinator, but this object was created without one"
            )
        coordinator = self._coordinator
        (version,) = plain_integers("publish: version", (version,))
        await self._in_turn(lambda: self._publish(coordinator, version, deadline_s))

    async def _publish(self, coordinator: Coordinator, version: int, deadline_s: float) -> None:
        """Do the work of `publish`."""
        deadline = Deadline.after(deadline_s, "publish")
        await self._finish_update(deadline)
        left_s = max(deadline.remaining_s, 0.1)
        answers = await self._collective([PreparePublish(version)] * len(self._ranks), left_s)
        self._under_way = coordinator.publish(version, deadline_s=left_s)
        if self._is_served and all(answer.sends_copies for answer in answers):
            await self._wait_for(_copied(self._under_way), deadline)
        else:
            await self._finish_update(deadline)
            self._is_served = True
        self._stands_still = True
        coordinator.catch_ups.serve_again()

    async def finish_update(self, *, deadline_s: float) -> None:
        """Wait until the fleet serves the version of the last `publish`. Without replicas, `publish` has waited already.

        Raises:
            TrainerError: the version was not published, a rank died, or the deadline passed.
        """
        await self._finish_update(Deadline.after(deadline_s, "publish"))

    async def _finish_update(self, deadline: Deadline) -> None:
        """Wait until the update in progress ends, if there is one, and forget the update.

        Raises:
            TrainerError: the version was not published, a rank died, or the deadline passed.
        """
        if (update := self._under_way) is not None:
            await self._wait_for(_published(update), deadline)
            if self._under_way is update:
                self._under_way = None

    async def _wait_for(self, work: Coroutine[Any, Any, TrainResult], deadline: Deadline) -> None:
        """Run `work`, which waits for an update; stop as soon as a rank ends.

        Raises:
            TrainerError: `work` returned `Failed`, a rank ended first, or the deadline passed.
        """
        # `_wait_for_all` expects one task per rank. Here the same task stands for each rank.
        waits = [asyncio.create_task(work)] * len(self._ranks)
        await self._wait_for_all(waits, deadline, late=self._describe_update)

    def _describe_update(self) -> str:
        """Return what an update waits for when its deadline passes: its phase, and trainer ranks without a connection."""
        if self._coordinator is None:
            return ""
        driver, away = self._coordinator.rounds.driver, self._coordinator.fleet.away()
        said = f"the update is in phase {driver.machine.phase}" if driver else "no round runs"
        return f"{said}; not connected: {', '.join(away)}" if away else said

    async def save(self, path: str | Path, *, deadline_s: float) -> None:
        """Let all ranks write a checkpoint into the folder `path`, with `TrainEngine.save`.

        Raises:
            TrainerError: see `train_step`.
        """
        saves = [Save(str(path))] * len(self._ranks)
        await self._order(saves, deadline_s)

    async def load(self, path: str | Path, *, deadline_s: float) -> None:
        """Let all ranks load the checkpoint that `save` wrote into the folder `path`.

        Raises:
            TrainerError: see `train_step`.
        """
        loads = [Load(str(path))] * len(self._ranks)
        await self._order(loads, deadline_s)

    async def call(
        self, operation: str, argument: object = None, *, deadline_s: float
    ) -> tuple[Any, ...]:
        """Run an operation of `run_train_worker` on all ranks; return the values in rank order.

        Tensors in arguments and values keep their dtype and shape, and arrive in host memory.

        Args:
            operation: name of the operation.
            argument: argument of the operation, the same for all ranks; a value that msgpack can encode. It may contain
                torch tensors.
            deadline_s: seconds for the whole call.

        Raises:
            ConfigError: a rank has no such operation, or `argument` cannot be encoded or is too large. No rank was
                called.
            TrainerError: see `train_step`.
        """
        commands = self._commands(operation, [argument] * len(self._ranks))
        answers = await self._order(commands, deadline_s)
        return tuple(_value_of(rank, done) for rank, done in zip(self._ranks, answers, strict=True))

    async def map(
        self, operation: str, items: Sequence[object], *, deadline_s: float
    ) -> tuple[Any, ...]:
        """Run an operation on items, and return the results in the order of the items.

        The ranks share the items in the same way as `train_step` shares groups.

        The operation gets a list of items, which may be empty, and must return a list with one result per item. If
        several ranks get the same items, `map` returns the results of the rank with the lowest number.

        Raises:
            ConfigError: see `call`.
            TrainerError: see `call`, or a rank did not return one result per item.
        """
        indices = self._shard_indices()
        shards = [list(items[index::size]) for index, size in indices]
        commands = self._commands(operation, shards)
        answers = await self._order(commands, deadline_s)
        found: list[Any] = [None] * len(items)
        for rank, (index, size), shard, answer in reversed(
            list(zip(self._ranks, indices, shards, answers, strict=True))
        ):
            value = _value_of(rank, answer)
            if not isinstance(value, list) or len(value) != len(shard):
                got = len(value) if isinstance(value, list) else type(value).__name__
                raise TrainerError(
                    f"{rank.peer}: operation {operation} must return a list of {len(shard)} results, "
                    f"got {got}"
                )
            found[index::size] = value
        return tuple(found)

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel ranks, known after `start`."""
        return max(rank.data_parallel.data_parallel_size for rank in self._ranks)

    def _shard_indices(self) -> list[tuple[int, int]]:
        """Return for each rank the index of its first item, and the distance to its next item."""
        return [
            (each.data_parallel.data_parallel_rank, each.data_parallel.data_parallel_size)
            for each in self._ranks
        ]

    def _commands(self, operation: str, arguments: Sequence[object]) -> list[TrainCommand]:
        """Return one command per rank. Each command runs the operation with the rank's argument.

        Raises:
            ConfigError: a rank has no such operation, or an argument cannot be encoded or is too large.
        """
        lacking = [rank.peer for rank in self._ranks if operation not in rank.operations]
        if lacking:
            known = sorted(set.intersection(*[set(rank.operations) for rank in self._ranks]))
            raise ConfigError(
                f"operation must be in the `operations` that every rank gives to run_train_worker, got {operation!r}, "
                f"which is missing on {', '.join(lacking)}; every rank has: {known}"
            )
        what = f"operation {operation}: argument"
        return [Operation(operation, encode_call_value(what, argument)) for argument in arguments]

    async def close(self, *, grace_s: float = 10.0) -> None:
        """Wait for calls and an update in progress, ask all ranks to stop, and end the processes that still run. Idempotent.

        A call that has not ended before the processes end raises `TrainerError`.

        Args:
            grace_s: limit in seconds of each of three waits: for calls and the update, for the ranks' answers to `Stop`, and for
                the end of the processes. After a failure, or if a call has not ended, the ranks do not get `Stop`, and their
                processes have at most `BROKEN_GRACE_S` to end.
        """
        self._is_closing = True
        if not self._failure:
            deadline = Deadline.after(grace_s, "publish")
            try:
                await self._in_turn(lambda: self._finish_update(deadline), within_s=grace_s)
                if self.ranks_started.is_set():
                    stops = [Stop()] * len(self._ranks)
                    await self._order(stops, grace_s, within_s=grace_s)
            except TrainerError as error:
                _log.warning("trainer ranks did not stop on request: %s", error)
                self._failure = str(error)
        broken = bool(self._failure)
        self._failure = self._failure or "closed"
        await self._end_ranks(min(grace_s, BROKEN_GRACE_S) if broken else grace_s)

    async def _end_ranks(self, grace_s: float) -> None:
        """End the processes of all started ranks at the same time, and close their connections.

        Each process has `grace_s` before SIGKILL. If ending a rank fails, end all other ranks, then raise the first error.
        A call in progress fails. This method waits until it has failed.

        Clear `ranks_started`, so that the job starts no engines on the ranks' GPUs until `start` has started the ranks again.
        """
        self.ranks_started.clear()

        async def end(rank: _Rank, watch: asyncio.Task[str]) -> None:
            watch.cancel()
            await asyncio.wait([watch])
            rank.watch = None
            await self._scheduler.delete(rank.peer, grace_s=grace_s)
            await rank.close()

        ends = [end(r, r.watch) for r in self._ranks if r.watch is not None]
        errors = [e for e in await asyncio.gather(*ends, return_exceptions=True) if e is not None]
        for error in errors[1:]:
            _log.error("a trainer rank was not ended: %s", error)
        if ends and self._call is not None:
            await asyncio.wait([self._call])
        if errors:
            raise errors[0]

    async def _in_turn(
        self, work: Callable[[], Coroutine[Any, Any, _T]], *, within_s: float | None = None
    ) -> _T:
        """Run `work` after all earlier calls have ended, and return its result.

        If the caller is cancelled before `work` begins, do not run it. If the caller is cancelled later, `work` continues: some
        ranks may have its command already, and the other ranks must get this command before any other.

        Raises:
            TrainerError: the earlier calls have not ended after `within_s`.
        """
        try:
            async with asyncio.timeout(within_s):
                await self._lock.acquire()
        except TimeoutError:
            raise TrainerError(
                f"an earlier call of the ranks has not ended within {within_s} s"
            ) from None
        call = self._call = asyncio.create_task(work())
        call.add_done_callback(lambda _: self._lock.release())
        return await asyncio.shield(call)

    async def _order(
        self, commands: Sequence[TrainCommand], deadline_s: float, *, within_s: float | None = None
    ) -> tuple[Done, ...]:
        """Run `_collective` after all earlier calls have ended; see `_in_turn` for `within_s` and the errors."""
        return await self._in_turn(
            lambda: self._collective(commands, deadline_s), within_s=within_s
        )

    async def _collective(
        self, commands: Sequence[TrainCommand], deadline_s: float
    ) -> tuple[Done, ...]:
        """Send each rank its command, wait for all answers, and return the answers in rank order.

        The caller must have the turn, see `_in_turn`. Every command except `Save` may change the ranks' weights. After such a
        command, the coordinator must not let engines catch up from the ranks until the next `publish`.

        Raises:
            TrainerError: an earlier call failed, or see `_wait_for_all`.
        """
        if self._failure:
            raise TrainerError(self._failure)
        deadline = Deadline.after(deadline_s, type(commands[0]).__name__)
        if not isinstance(commands[0], Save):
            self._stands_still = False
        self._num_calls += 1
        call_id = (1, self._num_calls, 1)
        try:
            replies = await asyncio.gather(
                *(
                    rank.call(call_id, command, within_s=deadline_s)
                    for rank, command in zip(self._ranks, commands, strict=True)
                )
            )
            return await self._wait_for_all(replies, deadline, from_ranks=True)
        finally:
            for rank in self._ranks:
                rank.forget(call_id)

    async def _wait_for_all(
        self,
        waits: Sequence[_Wait],
        deadline: Deadline,
        *,
        from_ranks: bool = False,
        late: Callable[[], str] | None = None,
    ) -> tuple[Done, ...]:
        """Wait for the answers of all ranks. A rank may end after its answer, as it does after `Stop`.

        Args:
            waits: future or task of each rank's answer, in rank order; all are cancelled at the end.
            deadline: deadline of the wait. `deadline.purpose` is the name of the call in errors.
            from_ranks: whether the ranks themselves answer. If so, the error for a rank that raised contains the end of
                the rank's log.
            late: function that returns what the call waits for if not the ranks but other processes are late. The error of the
                deadline then has this text, and no names and logs of ranks.

        Raises:
            TrainerError: a rank died before its answer or answered with `Failed`, or the deadline passed. All later
                calls, except `start` and `close`, raise the same error.
        """
        answers = [
            asyncio.create_task(_answer(rank, wait, deadline.purpose))
            for rank, wait in zip(self._ranks, waits, strict=True)
        ]
        try:
            done, missing = await asyncio.wait(
                answers, timeout=deadline.remaining_s, return_when=asyncio.FIRST_EXCEPTION
            )
            if missing and any(answer.exception() for answer in done):
                # When a rank dies, the collectives of its peers often fail before the scheduler reports the death.
                await asyncio.wait(
                    missing, timeout=DEATH_GRACE_S, return_when=asyncio.FIRST_EXCEPTION
                )
            errors = [e for answer in answers if answer.done() and (e := answer.exception())]
            errors.sort(key=lambda error: not isinstance(error, _RankEnded))
            if missing and not errors and late is not None:
                said = f"{deadline.purpose}: not done within {deadline.seconds} s: {late()}"
                errors.append(TrainerError(said))
            elif missing and not errors:
                pairs = zip(self._ranks, answers, strict=True)
                names = [rank.peer for rank, answer in pairs if not answer.done()]
                tails = [f"{name}:\n{await self._log_tail(name)}" for name in names]
                said = f"{deadline.purpose}: no answer from {', '.join(names)} within "
                said += f"{deadline.seconds} s; logs end:\n{''.join(tails)}"
                errors.append(TrainerError(said))
            if errors:
                self._failure = str(errors[0])
                if from_ranks and isinstance(errors[0], _RankFailed):
                    # A rank logs the traceback before it answers, so the log contains the traceback now.
                    tail = await self._log_tail(errors[0].rank)
                    self._failure += f"; its log ends:\n{tail}"
                raise TrainerError(self._failure) from errors[0]
            return tuple(answer.result() for answer in answers)
        finally:
            for wait in (*answers, *waits):
                wait.cancel()

    async def _watch(self, name: str) -> str:
        """Wait until a process ends; return a text with its exit status and the last lines of its log."""
        status = await self._scheduler.wait(name)
        ended = f"{name} ended with exit status {status.returncode}"
        return f"{ended}; its log ends:\n{await self._log_tail(name)}"

    async def _log_tail(self, name: str) -> str:
        """Return the last `LOG_LINES` lines of a process's log."""
        return await self._scheduler.log_tail(name, LOG_LINES)

    # --- connections -------------------------------------------------------------------------

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        """Serve the connection of a rank until it ends."""
        return await serve(
            request, self, RANK_FRAMES, heartbeat_s=HEARTBEAT_S, max_nbytes=MAX_MESSAGE_NBYTES
        )

    async def admit(
        self,
        first: RankFrame,
        socket: web.WebSocketResponse,  # noqa: ARG002
    ) -> tuple[_Rank, Welcome]:
        """Check the first frame of a connection; return the session of the rank, and the answer to the frame.

        Record the process as the rank's process, with its operations. For rank 0, also record the address of its TCP
        store.

        Raises:
            ProtocolError: the frame is not `Joined`; or its protocol version, number of ranks or job id is wrong.
            MustWait: another process has this rank's number.
        """
        if not isinstance(first, Joined):
            raise ProtocolError("train worker: the first frame must be Joined, got a reply")
        check_version(first.protocol_version, "train worker")
        if first.world_size != len(self._ranks) or not 0 <= first.rank < first.world_size:
            raise ProtocolError(
                f"train worker: rank must be in [0, {len(self._ranks)}) and world_size {len(self._ranks)}, got rank "
                f"{first.rank} and world_size {first.world_size}"
            )
        rank = self._ranks[first.rank]
        if not self._job or not hmac.compare_digest(first.job.encode(), self._job.encode()):
            raise ProtocolError(
                f"train worker: {rank.peer}: job must be the id of the newest launch of the trainer ranks, got {first.job!r}"
            )
        if rank.incarnation not in ("", first.incarnation):
            raise MustWait(f"train worker: another process has already joined as {rank.peer}")
        rank.incarnation, rank.operations = first.incarnation, first.operations
        if first.rank == 0:
            self._store = (first.store_host, first.store_port)
        return rank, Welcome()

    async def admitted(self, session: _Rank) -> None:
        """Record that the rank has connected, and wake `start`; see `rpc.Owner`."""
        session.joined.set()

    async def received(self, session: _Rank, frame: RankFrame) -> None:
        """Give a rank's reply to the call that waits for it; see `rpc.Owner`.

        Raises:
            Garbled: the rank sent a second `Joined`.
        """
        if isinstance(frame, Joined):
            raise Garbled(f"{session.peer}: Joined may be sent only once")
        session.on_reply((frame.epoch, frame.round, frame.seq), frame.result)

    async def lost(self, session: _Rank, reason: str, *, ended: bool) -> None:  # noqa: ARG002
        """Log a lost connection. This is no failure: the rank may connect again. If its process ends, the scheduler reports that."""
        level = logging.DEBUG if self._is_closing else logging.INFO
        _log.log(level, "%s: %s", session.peer, reason)


async def _answer(rank: _Rank, wait: _Wait, what: str) -> Done:
    """Wait for a rank's answer and return it.

    Args:
        rank: the rank.
        wait: future or task of the rank's answer. If its result is neither `Done` nor `Failed`, return `Done()`.
        what: name of the call, for errors.

    Raises:
        _RankEnded: the rank's process ended before the answer.
        _RankFailed: the answer is `Failed`.
    """
    watches = [rank.watch] if rank.watch is not None else []
    await asyncio.wait([wait, *watches], return_when=asyncio.FIRST_COMPLETED)
    if not wait.done():
        if watches[0].cancelled():
            raise _RankEnded(f"{what}: {rank.peer} is ended by `start` or `close`")
        raise _RankEnded(f"{what}: {watches[0].result()}")
    result = wait.result()
    if isinstance(result, Failed):
        raise _RankFailed(rank.peer, result.error)
    return result if isinstance(result, Done) else Done()


def _value_of(rank: _Rank, done: Done) -> Any:
    """Decode the value that an operation returned on this rank.

    Raises:
        TrainerError: the rank sent bytes that are not msgpack.
    """
    try:
        return decode_call_value(done.value)
    except DECODE_ERRORS as error:
        raise TrainerError(
            f"{rank.peer}: cannot decode the operation's result of {len(done.value)} bytes: {error}"
        ) from error


async def _published(update: CalledUpdate) -> TrainResult:
    """Wait until an update ends; return `Failed` with the reason if its version was not published."""
    report = await asyncio.shield(update.report)
    if report.outcome is RoundOutcome.PUBLISHED:
        return Done()
    return Failed(f"RoundAborted: version {report.version} was not published: {report.reason}")


async def _copied(update: CalledUpdate) -> TrainResult:
    """Wait until an update's weights are in the replicas. If the update ends first, return as `_published` does."""
    copied = asyncio.create_task(update.copied.wait())
    await asyncio.wait([copied, update.report], return_when=asyncio.FIRST_COMPLETED)
    copied.cancel()
    return Done() if update.copied.is_set() else await _published(update)


def _weighted_mean(
    metrics: Sequence[Mapping[str, float]], weights: Sequence[float]
) -> dict[str, float]:
    """Return the weighted mean of each metric over the ranks that have it; 0 if all these ranks have weight 0.

    Args:
        metrics: metrics of each rank, by name.
        weights: weight of each rank.
    """
    names = dict.fromkeys(name for found in metrics for name in found)
    means = {}
    for name in names:
        pairs = [(m[name], w) for m, w in zip(metrics, weights, strict=True) if name in m]
        total = sum(weight for _, weight in pairs)
        means[name] = sum(value * weight for value, weight in pairs) / total if total else 0.0
    return means
