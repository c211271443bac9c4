"""A launched job: starts everything, trains, publishes, and ends in order."""

from __future__ import annotations

import asyncio
import fnmatch
import itertools
import logging
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, final

import msgspec

from windlass.config import ReplicaPlace
from windlass.controller import Controller
from windlass.engines.launch import num_engine_ranks, read_arguments
from windlass.engines.spec import ENGINES, EngineOptions
from windlass.envs import TLS_VARIABLES, TOKEN_VARIABLE, environment_value, secret_value
from windlass.errors import ConfigError, PeerTimeout, TrainerError, WindlassError
from windlass.jobs.config import (
    CHECKPOINT_RECORD,
    Checkpoint,
    EngineSection,
    LaunchConfig,
    read_checkpoint,
)
from windlass.jobs.progress import Progress
from windlass.jobs.recipe import Recipe, in_thread, load_recipe
from windlass.jobs.schedulers.base import ProcessSpec, Scheduler
from windlass.jobs.schedulers.configs import (
    LocalSchedulerConfig,
    RaySchedulerConfig,
    SchedulerConfig,
    SlurmSchedulerConfig,
    create_scheduler,
)
from windlass.jobs.schedulers.local import visible_gpus
from windlass.jobs.train_controller import RankPlace, TrainController, rank_names, rank_place
from windlass.net.access import Access, role_environment
from windlass.net.addresses import is_loopback
from windlass.net.logs import LOG_VARIABLES
from windlass.observability.page import saved_page, taken_at
from windlass.rollout.handles import RolloutGroup
from windlass.rollout.messages import TrainingSample
from windlass.rollout.staleness import StalenessPolicy
from windlass.transports.registry import parse_transport
from windlass.updates.coordinator import Coordinator
from windlass.updates.messages import RoundOutcome

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
MAX_WORKER_RESTARTS = 3
RANKS = "trainer"
"""Name of the ranks' controller: they are `trainer-0`, `trainer-1`, and so on."""


class JobSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended; `summary.json`.

    Attributes:
        steps: that the weights were trained, those before `resume_from` among them; not those that a
            restart of the ranks has lost.
        version: the last published, -1 for none.
        trainer_restarts: how often the ranks were started again.
        stopped_by: number of the signal, 0 for none.
        outcomes: of the newest 1024 rounds, oldest first.
        rollouts: counts at the end, before outstanding ones were cancelled.
    """

    steps: int
    version: int
    trainer_restarts: int
    stopped_by: int
    outcomes: tuple[RoundOutcome, ...]
    rollouts: dict[str, int]


async def run_job(
    config: LaunchConfig,
    *,
    notify: Callable[[str], None],
    recipe: Recipe | None = None,
    progress: Progress | None = None,
) -> JobSummary:
    """Run a job until its steps are done, its tasks end, or SIGTERM or SIGINT.

    A signal lets a running step or weight update end within `shutdown_s`, then stops the
    trainers, the rollouts, the workers and engines, and the controller, in this order. A second
    signal does not wait. What the scheduler started ends with it in every case.

    Args:
        config: of `load_config`.
        notify: gets one line per event.
        recipe: in the place of the one that `config` names.
        progress: is told of the slow parts of the start.

    Raises:
        ConfigError: see `check_job`, before anything is started.
        WindlassError: a process could not be started, died too often, or a deadline passed; or all
            steps are done and the last update was not published.
    """
    check_job(config)
    recipe = recipe or load_recipe(Path(config.recipe.file), config.recipe.name)
    output_dir = _absolute(config.output_dir)
    await asyncio.to_thread(output_dir.mkdir, parents=True, exist_ok=True)
    token = secret_value(TOKEN_VARIABLE) or secrets.token_hex(16)
    inherited = {name: environment_value(name) for name in (*LOG_VARIABLES, *TLS_VARIABLES)}
    environment = {
        **{name: value for name, value in inherited.items() if value},
        **config.environment,
        "WINDLASS_TRANSPORT": config.transport,
        "WINDLASS_REPLICA": config.replica,
    }
    scheduler = create_scheduler(config.scheduler, output_dir / "logs", environment)
    resumed = read_checkpoint(config.trainer.resume_from) if config.trainer.resume_from else None
    controller = _controller(config, token, resumed.version if resumed else 0)
    trainers = _trainers(config, scheduler, token, controller.coordinator)
    trainers.mount(controller.server)
    stop = _Stop()
    stop.listen()
    try:
        async with scheduler, controller:
            stop.listen()  # again: Ray sets a handler of its own when it starts
            recipe.started(config, controller, scheduler)
            job = _Job(
                config=config,
                output_dir=output_dir,
                recipe=recipe,
                scheduler=scheduler,
                controller=controller,
                trainers=trainers,
                processes=_processes(config, controller.url, token),
                stop=stop,
                notify=notify,
                progress=progress or Progress(),
                newest=(_absolute(config.trainer.resume_from), resumed) if resumed else None,
            )
            summary = await job.run()
    finally:
        stop.close()
    (output_dir / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary)))
    # With a replica the last update ends in the ranks' `close`, which answers nobody.
    if not summary.stopped_by and summary.version < job.version:
        raise WindlassError(
            f"the last update failed: version {job.version} must be published at the end, "
            f"got {summary.version}; see the trainers' logs in {output_dir / 'logs'}"
        )
    return summary


def _absolute(folder: str) -> Path:
    """As ranks in other folders find it."""
    return Path(folder).resolve()


@final
class _Stop:
    """SIGTERM and SIGINT as events: the first asks, the second insists."""

    def __init__(self) -> None:
        self.number = 0
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        if self.asked.is_set():
            self.insisted.set()
        self.number = self.number or number
        self.asked.set()


class _Stopped(Exception):
    """Raised inside the job's work where a signal may end it."""


@final
@dataclass(slots=True, kw_only=True)
class _Job:
    """See `run_job`.

    Attributes:
        newest: checkpoint that the ranks start from, with its folder; None for the weights they begin with.
        steps: that the ranks' weights have been trained. version: the last that was asked for; a number is
            never used again, though steps are when the ranks go back to a checkpoint.
    """

    config: LaunchConfig
    output_dir: Path
    recipe: Recipe
    scheduler: Scheduler
    controller: Controller
    trainers: TrainController
    processes: Sequence[tuple[ProcessSpec, int]]
    stop: _Stop
    notify: Callable[[str], None]
    progress: Progress
    newest: tuple[Path, Checkpoint] | None
    steps: int = 0
    version: int = -1
    restarts: int = 0

    async def run(self) -> JobSummary:
        controller = self.controller
        self.notify(f"controller {controller.url}")
        work = asyncio.create_task(self._work())
        guards = [asyncio.create_task(self._guard(*process)) for process in self.processes]
        asked: asyncio.Task[Any] = asyncio.create_task(self.stop.asked.wait())
        try:
            await asyncio.wait([work, asked, *guards], return_when=asyncio.FIRST_COMPLETED)
            for task in [work, *guards]:
                if task.done():
                    task.result()
            if not work.done():
                await self._let_it_end(work, guards)
            rollouts: dict[str, int] = msgspec.to_builtins(controller.rollouts.stats())
        finally:
            # Before everybody leaves; of a job that fails, too.
            page = saved_page(
                controller.overview(), taken_at(f"the job in {self.output_dir.name}/")
            )
            (self.output_dir / "report.html").write_text(page, encoding="utf-8")
            in_step = not work.done()  # ranks that stand in a call hear nothing else
            for task in (work, asked, *guards):
                task.cancel()
            await asyncio.gather(work, asked, *guards, return_exceptions=True)
            # With a replica the last update may still be on its way when all else has ended.
            grace_s = (
                max(10.0, self.config.shutdown_s)
                if self.config.replica != ReplicaPlace.OFF
                else 10.0
            )
            await self.trainers.close(grace_s=0.5 if in_step else grace_s)
            await controller.rollouts.close()
            # The controller is still there, so that workers and engines leave it in peace.
            left = [status.name for status in self.scheduler.list()]
            await asyncio.gather(*map(self.scheduler.delete, left))
        summary = JobSummary(
            steps=self.steps,
            version=controller.coordinator.published_version,
            trainer_restarts=self.restarts,
            stopped_by=self.stop.number,
            outcomes=tuple(report.outcome for report in controller.coordinator.reports),
            rollouts=rollouts,
        )
        ended = "done" if summary.version >= self.version else "failed"
        if summary.stopped_by:
            ended = f"stopped by signal {summary.stopped_by}"
        self.notify(f"{ended}: {summary.steps} steps, version {summary.version} published")
        return summary

    async def _let_it_end(self, work: asyncio.Task[None], guards: list[asyncio.Task[None]]) -> None:
        """A signal came: a step or an update that runs may end, and dispatches stop."""
        self.controller.rollouts.pause()
        insisted = asyncio.create_task(self.stop.insisted.wait())
        self.notify(f"signal {self.stop.number}: ending what runs")
        try:
            await asyncio.wait(
                [work, insisted, *guards],
                timeout=self.config.shutdown_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            insisted.cancel()
        for task in [work, *guards]:
            if task.done():
                task.result()
        if not work.done():
            self.notify(f"given up after {self.config.shutdown_s} s or a second signal")

    async def _guard(self, spec: ProcessSpec, max_restarts: int) -> None:
        """Keep a process running; a fleet goes on without a member that comes back."""
        for restarts in itertools.count():
            if spec.colocate_with:
                await self.trainers.ranks_started.wait()
            await self.scheduler.start(spec)
            status = await self.scheduler.wait(spec.name)
            ended = f"{spec.name} ended with {status.returncode} after {restarts} restarts"
            if restarts == max_restarts:
                tail = await self.scheduler.log_tail(spec.name)
                raise WindlassError(f"{ended}; its log ends:\n{tail}")
            self.notify(f"{ended}; starting it again")

    # --- the work ----------------------------------------------------------------------------

    async def _work(self) -> None:
        config = self.config
        producer: asyncio.Task[None] | None = None
        try:
            await self._unless_stopped(self._start())
            self.progress.begin(
                "planning, binding and publishing the first version",
                config.trainer.publish_deadline_s,
            )
            await self._publish()
            self.progress.end()
            producer = asyncio.create_task(self._produce())
            while self.steps < config.steps:
                self._check_stopped()
                batch = await self._unless_stopped(self._batch(producer))
                if batch is None:
                    self.notify(f"the recipe's tasks ended after {self.steps} steps")
                    break
                try:
                    await self._step(self.steps, batch)
                except TrainerError as error:
                    await self._start_again(error)
        except _Stopped:
            return
        finally:
            self.progress.end()
            if producer is not None:
                producer.cancel()
                await asyncio.gather(producer, return_exceptions=True)

    async def _start(self) -> None:
        config, controller = self.config, self.controller
        deadline_s = config.start_deadline_s
        if not config.rollout.num_workers:
            controller.rollouts.run_here(self.recipe.workflows())
        world_size, engines = config.trainer.world_size, [e.name for e in config.engines]

        def look() -> None:
            self.progress.waits_for(", ".join(controller.coordinator.missing(world_size, engines)))

        controller.coordinator.subscribe(look)
        async with asyncio.timeout(deadline_s):
            self.progress.begin("starting trainer ranks, engines beside them", deadline_s)
            look()
            await self._start_ranks()
            self.progress.begin("engines load their model and capture its layout", deadline_s)
            look()
            await controller.wait_for_fleet(
                num_trainers=world_size, engines=engines, deadline_s=deadline_s
            )
            self.progress.begin("starting rollout workers", deadline_s)
            await controller.rollouts.wait_for_workers(
                max(config.rollout.num_workers, 1), deadline_s=deadline_s
            )

    async def _start_ranks(self) -> None:
        """Start the ranks, those before them ended, with the weights and the steps of the newest checkpoint."""
        deadline_s = self.config.start_deadline_s
        await self.trainers.start(self.controller.url, deadline_s=deadline_s)
        if self.newest is not None:
            folder, checkpoint = self.newest
            await self.trainers.load(str(folder), deadline_s=deadline_s)
            self.steps = checkpoint.steps
            self.version = max(self.version, checkpoint.version - 1)
            self.notify(f"resumed from {folder}: {self.steps} steps")

    async def _start_again(self, error: TrainerError) -> None:
        """A call of the ranks has failed: go back to the newest checkpoint.

        Its weights get a version of their own: engines may serve, or have been half written with, later
        ones. Rollouts go on meanwhile; what was trained on since, and the batch at hand, is lost.
        """
        max_restarts = self.config.trainer.max_restarts
        while self.newest is not None and self.restarts < max_restarts:
            self.restarts += 1
            _log.warning("trainer ranks failed: %s", error)
            reason, where = (
                str(error).partition("\n")[0],
                f"{self.restarts} of at most {max_restarts}",
            )
            self.notify(f"{reason}; starting the ranks again, {where}")
            try:
                await self._unless_stopped(self._start_ranks())
                return await self._publish()
            except TrainerError as again:
                error = again
        raise error

    async def _publish(self) -> None:
        self.version += 1
        deadline_s = self.config.trainer.publish_deadline_s
        await self.trainers.publish(self.version, deadline_s=deadline_s)

    async def _save(self) -> None:
        """Have the ranks save; a folder without a record is none to start from."""
        folder = self.output_dir / "checkpoints" / str(self.steps)
        record, written = folder / CHECKPOINT_RECORD, folder / f"{CHECKPOINT_RECORD}.new"
        record.unlink(missing_ok=True)
        await self.trainers.save(str(folder), deadline_s=self.config.trainer.step_deadline_s)
        checkpoint = Checkpoint(steps=self.steps, version=self.version)
        written.write_bytes(msgspec.json.encode(checkpoint))
        written.rename(record)
        self.newest = folder, checkpoint

    async def _step(self, step: int, batch: list[list[TrainingSample]]) -> None:
        config, trainers = self.config, self.trainers
        samples = [sample for group in batch for sample in group]
        await self._unless_stopped(self.recipe.before_step(step, samples))
        self.controller.observe_samples(samples)
        result = await trainers.train_step(step, batch, deadline_s=config.trainer.step_deadline_s)
        await self._publish()
        self.steps = step + 1
        if config.trainer.save_every and self.steps % config.trainer.save_every == 0:
            await self._save()
        reward = sum(sample.reward for sample in samples) / max(len(samples), 1)
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
        self.notify(f"step {self.steps}: reward {reward:.4f}, {len(samples)} samples, {metrics}")

    async def _produce(self) -> None:
        """Tasks as fast as the staleness bound admits them."""
        rollout, rollouts = self.config.rollout, self.controller.rollouts
        trainer = self.config.trainer
        # Room comes with a version: after a batch and its scores, a step, a checkpoint, the update; or after
        # ranks that have failed meanwhile were started again.
        deadline_s = (
            rollout.batch_deadline_s * (1 + rollout.groups_per_step)
            + 2 * trainer.step_deadline_s
            + trainer.publish_deadline_s
            + trainer.max_restarts * (2 * self.config.start_deadline_s + trainer.publish_deadline_s)
        )
        for task in self.recipe.tasks():
            await rollouts.wait_for_room(deadline_s=deadline_s)
            if task.workflow:
                rollouts.submit_workflow_group(
                    task.workflow,
                    task.arguments,
                    rollout.samples_per_group,
                    rollout.sampling,
                    metadata=task.metadata,
                )
            else:
                rollouts.submit_group(
                    task.prompt_ids,
                    rollout.samples_per_group,
                    rollout.sampling,
                    metadata=task.metadata,
                )

    async def _batch(self, producer: asyncio.Task[None]) -> list[list[TrainingSample]] | None:
        """The groups of a step, scored; None when there are no tasks left for one.

        Groups that the recipe declines are replaced. The deadline is for waiting, all in all, and
        not for scoring, which has its own.
        """
        loop, left_s = asyncio.get_running_loop(), self.config.rollout.batch_deadline_s
        batch: list[list[TrainingSample]] = []
        while (missing := self.config.rollout.groups_per_step - len(batch)) > 0:
            began_s = loop.time()
            groups = await self._draw(missing, left_s, producer)
            left_s -= loop.time() - began_s
            if groups is None:
                return None
            for group in groups:
                samples = await self._score(group)
                if samples:
                    batch.append(samples)
                else:
                    self.controller.rollouts.decline(group)
        return batch

    async def _draw(
        self, num_groups: int, deadline_s: float, producer: asyncio.Task[None]
    ) -> tuple[RolloutGroup, ...] | None:
        """So many groups; None when there are no tasks left for them."""
        rollout, rollouts = self.config.rollout, self.controller.rollouts
        drawn = asyncio.ensure_future(rollouts.next_batch(num_groups, deadline_s=deadline_s))
        try:
            await asyncio.wait([drawn, producer], return_when=asyncio.FIRST_COMPLETED)
            if producer.done():
                producer.result()
                num_left = rollouts.stats().outstanding
                if not drawn.done() and num_left < rollout.samples_per_group * num_groups:
                    return None
            return await drawn
        finally:
            drawn.cancel()

    async def _score(self, group: RolloutGroup) -> list[TrainingSample]:
        deadline_s = self.config.rollout.batch_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                return list(await in_thread(partial(self.recipe.samples, group)))
        except TimeoutError as error:
            raise PeerTimeout(
                f"recipe: group {group.group_id} was not scored within {deadline_s} s"
            ) from error

    # --- stopping ----------------------------------------------------------------------------

    def _check_stopped(self) -> None:
        if self.stop.asked.is_set():
            raise _Stopped

    async def _unless_stopped(self, what: Coroutine[Any, Any, _T]) -> _T:
        """Wait for something that a signal may cut off without harm."""
        task = asyncio.create_task(what)
        asked = asyncio.create_task(self.stop.asked.wait())
        try:
            await asyncio.wait([task, asked], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _Stopped
            return task.result()
        finally:
            for each in (task, asked):
                each.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)


# --- what it is made of -----------------------------------------------------------------------


def _controller(config: LaunchConfig, token: str, first_version: int) -> Controller:
    """The controller, not yet started, of a job whose first version is this one."""
    rollout = config.rollout
    return Controller(
        token=token,
        host=config.controller.host,
        port=config.controller.port,
        advertise_host=config.controller.advertise_host,
        config=config.update,
        staleness=StalenessPolicy(
            max_staleness=rollout.max_staleness,
            batch_size=rollout.groups_per_step * rollout.samples_per_group,
            max_concurrent=rollout.max_concurrent,
            start_version=first_version,
            on_stale=rollout.on_stale,
            max_resubmits=rollout.max_resubmits,
        ),
    )


def _trainers(
    config: LaunchConfig, scheduler: Scheduler, token: str, coordinator: Coordinator
) -> TrainController:
    """What starts the trainer ranks and calls them; not yet mounted."""
    trainer = config.trainer
    return TrainController(
        scheduler,
        command=(trainer.python or sys.executable, trainer.script, *trainer.arguments),
        world_size=trainer.world_size,
        token=token,
        name=RANKS,
        coordinator=coordinator,
        environment=trainer.environment,
        num_cpus=trainer.num_cpus,
        num_gpus=trainer.num_gpus,
        num_nodes=trainer.num_nodes,
    )


def check_job(config: LaunchConfig) -> None:
    """Refuse what a start would be refused for, as far as this host can tell.

    Raises:
        ConfigError: an engine's options; processes on several hosts with an address or a transport of
            one host, or several nodes of a host; GPUs that do not add up; an engine beside a process that
            there is not; options of Slurm for processes that there are not.
    """
    trainer = config.trainer
    ranks = rank_names(RANKS, trainer.world_size)
    num_gpus = trainer.num_gpus * trainer.world_size
    for engine in config.engines:
        where = f"engines {engine.name!r}"
        num_ranks = _num_ranks(config, engine)
        if engine.colocate_with and engine.colocate_with not in ranks:
            raise ConfigError(
                f"{where}: colocate_with must be one of {list(ranks)}, got {engine.colocate_with!r}"
            )
        _check_shared_gpus(config, engine, num_ranks)
        if engine.colocate_with and engine.num_gpus:
            raise ConfigError(
                f"{where}: num_gpus must not be given with colocate_with, got {engine.num_gpus}"
            )
        if engine.num_gpus and engine.num_gpus != num_ranks:
            raise ConfigError(
                f"{where}: num_gpus must be {num_ranks}, one for each of its ranks, "
                f"got {engine.num_gpus}"
            )
        num_gpus += _num_gpus(config, engine, num_ranks)
    _check_hosts(config)
    _check_scheduler(config)
    if isinstance(config.scheduler, LocalSchedulerConfig):
        gpus = visible_gpus() if config.scheduler.gpus is None else config.scheduler.gpus
        if num_gpus > len(gpus):
            raise ConfigError(
                f"trainer.num_gpus: trainers and engines together must ask for at most the {len(gpus)} "
                f"GPUs of this host, got {num_gpus}"
            )


def _num_ranks(config: LaunchConfig, engine: EngineSection) -> int:
    """Return the ranks of an engine, by the options that it will be started with.

    Raises:
        ConfigError: an option that its launcher refuses.
    """
    spec = ENGINES.find(engine.kind)
    if spec.server is None:
        return engine.tensor_parallel_size
    try:
        args, _ = read_arguments(spec, spec.command(_options(config, engine, ""))[3:])
    except ConfigError as error:
        raise ConfigError(f"engines {engine.name!r}: {error}") from error
    return num_engine_ranks(args)


def _num_gpus(config: LaunchConfig, engine: EngineSection, num_ranks: int) -> int:
    """Return how many GPUs an engine reserves."""
    if engine.num_gpus is not None or engine.colocate_with:
        return engine.num_gpus or 0
    return num_ranks if config.trainer.num_gpus else 0


def _place_beside(config: LaunchConfig, engine: EngineSection, num_ranks: int) -> RankPlace:
    """Return where an engine is that shares what the ranks reserve: the GPUs from its rank's on."""
    trainer = config.trainer
    if not engine.colocate_with:
        return RankPlace(0, ())
    rank = rank_names(RANKS, trainer.world_size).index(engine.colocate_with)
    place = rank_place(rank, trainer.world_size // trainer.num_nodes, trainer.num_gpus)
    return RankPlace(place.node, tuple(place.gpus[0] + n for n in range(num_ranks) if place.gpus))


def _check_shared_gpus(config: LaunchConfig, engine: EngineSection, num_ranks: int) -> None:
    """Refuse an engine beside a rank where fewer GPUs follow than it has ranks."""
    trainer = config.trainer
    gpus = _place_beside(config, engine, num_ranks).gpus
    on_node = trainer.num_gpus * (trainer.world_size // trainer.num_nodes)
    if gpus and gpus[-1] >= on_node:
        raise ConfigError(
            f"engines {engine.name!r}: colocate_with must name a rank with at least {num_ranks} GPUs from its "
            f"own on, one for each rank of the engine, got {engine.colocate_with!r} with "
            f"{on_node - gpus[0]} on its node"
        )


def _check_scheduler(config: LaunchConfig) -> None:
    """Refuse nodes that the scheduler has not, and options of processes that the job has not."""
    scheduler, trainer = config.scheduler, config.trainer
    if _is_this_host(scheduler) and trainer.num_nodes > 1:
        raise ConfigError(
            "trainer.num_nodes must be 1 where the scheduler has this host alone, "
            f"got {trainer.num_nodes}"
        )
    if isinstance(scheduler, SlurmSchedulerConfig):
        names = [
            *rank_names(RANKS, trainer.world_size),
            *(engine.name for engine in config.engines),
            *map(_worker_name, range(config.rollout.num_workers)),
        ]
        for pattern in scheduler.processes:
            if not fnmatch.filter(names, pattern):
                raise ConfigError(
                    f"scheduler.processes must fit a process of the job ({', '.join(names)}), "
                    f"got {pattern!r}"
                )


def _is_this_host(scheduler: SchedulerConfig) -> bool:
    """Whether all that it starts runs here."""
    return isinstance(scheduler, LocalSchedulerConfig) or (
        isinstance(scheduler, RaySchedulerConfig) and not scheduler.address
    )


def _check_hosts(config: LaunchConfig) -> None:
    """Refuse what works on one host only, where the scheduler's processes may be on others."""
    match config.scheduler:
        case LocalSchedulerConfig():
            return
        case SlurmSchedulerConfig(host=host) | RaySchedulerConfig(address=host):
            if _is_this_host(config.scheduler) or is_loopback(host.rpartition(":")[0] or host):
                return
    controller = config.controller
    reached = controller.advertise_host or controller.host
    if is_loopback(reached):
        raise ConfigError(
            f"controller.advertise_host must be an address that the nodes reach, got {reached!r}"
        )
    transport = parse_transport(config.transport)
    if not transport.between_hosts:
        raise ConfigError(
            "transport must be auto, or one that reaches other hosts (mooncake, nixl), where the "
            f"scheduler has several, got {transport.name!r}"
        )


def _processes(config: LaunchConfig, url: str, token: str) -> list[tuple[ProcessSpec, int]]:
    """Engines and rollout workers of the controller at `url`, and how often each is started again."""
    engines = [(_engine(config, each, url, token), each.max_restarts) for each in config.engines]
    workers = range(config.rollout.num_workers)
    return engines + [(_worker(config, n, url, token), MAX_WORKER_RESTARTS) for n in workers]


def _worker_name(number: int) -> str:
    return f"worker-{number}"


def _worker(config: LaunchConfig, number: int, url: str, token: str) -> ProcessSpec:
    script, name = config.rollout.worker_script, _worker_name(number)
    program = (script,) if script else ("-m", "windlass.rollout.worker")
    return ProcessSpec(
        name=name,
        command=(
            *(sys.executable, *program, "--controller", url, "--name", name),
            *config.rollout.worker_arguments,
        ),
        environment=role_environment(token, Access.WORKER),
    )


def _options(config: LaunchConfig, engine: EngineSection, url: str) -> EngineOptions:
    return EngineOptions(
        name=engine.name,
        model=engine.model,
        tensor_parallel_size=engine.tensor_parallel_size,
        transport=config.transport,
        controller=url,
        port=engine.port,
        arguments=engine.arguments,
        python=engine.python,
    )


def _engine(config: LaunchConfig, engine: EngineSection, url: str, token: str) -> ProcessSpec:
    spec = ENGINES.find(engine.kind)
    num_ranks = _num_ranks(config, engine)
    place = _place_beside(config, engine, num_ranks)
    return ProcessSpec(
        name=engine.name,
        command=spec.command(_options(config, engine, url)),
        environment={**engine.environment, **role_environment(token, Access.ENGINE)},
        num_cpus=engine.num_cpus,
        num_gpus=_num_gpus(config, engine, num_ranks),
        colocate_with=engine.colocate_with,
        node=place.node,
        gpus=place.gpus,
    )
