"""A launched job: starts all processes, trains, publishes, and ends the processes in order."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import shlex
import shutil
import signal
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import final

import msgspec

from windlass.config import ReplicaPlace
from windlass.control.connect_messages import ALLOW_UNUSED_VARIABLE
from windlass.control.report import RoundOutcome
from windlass.controller import Controller
from windlass.engines.launch import checked_arguments
from windlass.engines.options import options_of
from windlass.engines.spec import ENGINES, EngineOptions, EngineSpec
from windlass.envs import (
    TLS_VARIABLES,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    control_token,
    environment_value,
    secret_value,
)
from windlass.errors import ConfigError, PeerTimeout, TrainerError, WindlassError
from windlass.files import replacing, write_file
from windlass.jobs.audit import AUDIT, AuditRecord
from windlass.jobs.config import (
    CHECKPOINT_RECORD,
    Checkpoint,
    EngineSection,
    LaunchConfig,
    Resume,
    check_all,
)
from windlass.jobs.evaluation import evaluate
from windlass.jobs.metric_logs import MetricLogs
from windlass.jobs.output import (
    EVALUATIONS,
    LOGS,
    METRICS,
    REPORT,
    SUMMARY,
    TOKEN,
    OutputFolder,
    find_start,
)
from windlass.jobs.recipe import (
    CallThread,
    Recipe,
    Task,
    decode_tasks,
    encode_tasks,
    has_position,
    in_thread,
    load_recipe,
    recipe_code,
    tasks_of,
    with_file,
)
from windlass.jobs.results import JobSummary, StepResult, sample_metrics
from windlass.jobs.schedulers.base import ProcessSpec, Scheduler
from windlass.jobs.schedulers.configs import create_scheduler
from windlass.jobs.scoring import Scoring
from windlass.jobs.silence import SilenceWatch
from windlass.jobs.train_controller import TrainController, rank_specs
from windlass.jobs.train_worker import LARGEST_DIFFERENCE, LOGPROB_DIFFERENCE
from windlass.net.access import Access, role_environment
from windlass.net.addresses import is_loopback
from windlass.net.logs import LOG_VARIABLES
from windlass.observability.page import saved_page
from windlass.progress import SAID_EVERY_S, Progress
from windlass.rollout.handles import GroupHandle, RolloutGroup
from windlass.rollout.messages import TrainingSample
from windlass.rollout.reward_server import RewardServer, ServerRewards
from windlass.rollout.rewards import RewardPool, Scorer
from windlass.rollout.staleness import StalenessPolicy
from windlass.rollout.text import load_text
from windlass.sampling import SamplingParams
from windlass.transports.registry import parse_transport
from windlass.wording import counted, shortest_path

_log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Pause before the first restart of a process and largest pause. The pause doubles with each restart, until the job
trains another step."""
RANKS = "trainer"
"""Name of the `TrainController`, which starts the processes `trainer-0`, `trainer-1`, and so on."""
LOG_LINES = 20
"""Number of log lines that the job prints when a process has ended."""
RANKS_END_S = 10.0
"""Seconds that ranks have to receive `Stop` and end. A rank without a connection never receives `Stop`."""


async def run_job(
    config: LaunchConfig,
    *,
    notify: Callable[[str], None],
    recipe: Recipe | None = None,
    progress: Progress | None = None,
) -> JobSummary:
    """Run a job until its steps are done, its tasks end, or this process gets SIGTERM or SIGINT.

    After a signal, the job waits at most `shutdown_s` until a running step or weight update has ended. Then it saves a
    checkpoint, if `trainer.save_every` is set. After a second signal, the job no longer waits or saves. The job finally
    stops its parts in this order: trainers and rollouts, workers and engines, the controller. No process that the
    scheduler started outlives the job.

    Args:
        config: configuration from `load_config`.
        notify: function that the job calls with one line of text per event, in its event loop.
        recipe: recipe to use instead of the recipe that `config` names.
        progress: display of the slow parts of the launch.

    Raises:
        ConfigError: `check_job` or the recipe refuses the settings, or another job runs in the output folder. No process
            was started.
        WindlassError: a process could not be started or died too often, a deadline passed, or the job ended without
            publishing its last version.
    """
    check_job(config)
    has_token = has_owner_token()
    token, progress = owner_token(), progress or Progress()
    if recipe is None:
        file = Path(config.recipe.file)
        with progress.part(f"running {file.name}, which has the recipe"):
            recipe = load_recipe(
                file,
                config.recipe.name,
                evaluates=config.evaluation.every > 0,
                has_rewards=config.rewards is not None,
            )
    with progress.part("checking the recipe"), recipe_code("check"):
        await asyncio.to_thread(recipe.check, config)
    output_dir = await asyncio.to_thread(Path(config.output_dir).resolve)
    await asyncio.to_thread(output_dir.mkdir, parents=True, exist_ok=True)
    with OutputFolder(output_dir).locked(), _watchable(output_dir, token, is_made_up=not has_token):
        return await _run_in(output_dir, config, recipe, token, notify, progress)


@contextmanager
def _watchable(folder: Path, token: str, *, is_made_up: bool) -> Iterator[None]:
    """During the block, keep the job's random token in a file of the output folder, where `windlass status` reads it.

    If `is_made_up` is False, the user has chosen the token: write no file. In both cases, delete an earlier job's file.
    """
    file = folder / TOKEN
    file.unlink(missing_ok=True)
    if is_made_up:
        with replacing(file, 0o600) as opened:
            opened.write(token.encode())
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def how_to_watch(url: str, folder: Path) -> str:
    """Return a line with the command that shows a running job. It names the token file if the job wrote one.

    Args:
        url: address of the job's controller.
        folder: output folder of the job.
    """
    file = folder / TOKEN
    variable = f"{TOKEN_FILE_VARIABLE}={shlex.quote(shortest_path(file))} " if file.exists() else ""
    return f"to watch: {variable}windlass status {url} --watch"


async def _run_in(
    output_dir: Path,
    config: LaunchConfig,
    recipe: Recipe,
    token: str,
    notify: Callable[[str], None],
    progress: Progress,
) -> JobSummary:
    """Run a job in its output folder, which the caller has locked; see `run_job`."""
    inherited = {name: environment_value(name) for name in (*LOG_VARIABLES, *TLS_VARIABLES)}
    environment = {
        **{name: value for name, value in inherited.items() if value},
        **config.environment,
        # Hide the token file, which contains the secret of the job: each process gets only the token of its role.
        TOKEN_FILE_VARIABLE: "",
        "WINDLASS_TRANSPORT": config.transport,
        "WINDLASS_REPLICA": config.replica,
    }
    scheduler = create_scheduler(config.scheduler, output_dir / LOGS, environment)
    start = find_start(config)
    is_evaluated = start is None or not (start[1].evaluation_due and config.evaluation.every)
    if start is not None and start[1].steps >= config.steps and is_evaluated:
        notify(
            f"nothing to do: the checkpoint {start[0]} has {counted(start[1].steps, 'step')} already; "
            "to train more, set more steps or another output_dir"
        )
        return JobSummary(
            steps=start[1].steps,
            version=start[1].version,
            trainer_restarts=0,
            stopped_by=0,
            outcomes=(),
            rollouts={},
        )
    scorer = create_scorer(config)
    job = Job(config, output_dir, recipe, scheduler, token, notify, progress, start, scorer)
    loop = asyncio.get_running_loop()

    def listen() -> None:
        for number in SIGNALS:
            loop.add_signal_handler(number, job.signals.put_nowait, number)

    listen()
    what = "starting the scheduler and the controller"
    if isinstance(scorer, RewardPool):
        what = f"starting the scheduler, the controller and the processes of {scorer.name}"
    progress.begin(what)
    try:
        async with scheduler, scorer or nullcontext(), job.controller:
            progress.end()
            # Ray replaces the signal handlers when it starts, so set them again.
            listen()
            with recipe_code("started"):
                recipe.started(config, job.controller, scheduler)
            summary = await job.run()
        write_file(output_dir / SUMMARY, msgspec.json.format(msgspec.json.encode(summary)))
        _check_last_update(summary, job.version)
    except WindlassError as error:
        # With Ray, this folder has no logs, because each node stores the logs of its processes.
        if any((output_dir / LOGS).glob("*.log")):
            error.add_note(f"the logs are in {output_dir / 'logs'}")
            if isinstance(error, PeerTimeout):
                error.add_note("next: read the log of each process that did not connect or answer")
        raise
    finally:
        progress.end(done=False)
        for number in SIGNALS:
            loop.remove_signal_handler(number)
    return summary


def _check_last_update(summary: JobSummary, version: int) -> None:
    """Raise WindlassError if the job's last version (`version`) was not published. Do nothing if a signal stopped the job.

    If the trainers publish from replicas (copies of the weights), the last update may end while the job closes the ranks.
    No other code checks the result of this update.
    """
    if not summary.stopped_by and summary.version < version:
        raise WindlassError(
            f"the last update failed: version {version} was not published; the published version is "
            f"{summary.version}"
        )


@final
class Job:
    """One run of a job.

    Args:
        config, recipe, notify, progress: see `run_job`.
        output_dir: output folder of the job, which the caller has locked.
        scheduler: scheduler of the job's processes, which the caller enters as a context.
        token: secret of the job.
        start: folder and record of the checkpoint that the job continues from; None for a new job.
        scorer: object that gives rollouts their rewards; None if the recipe does. The caller enters it as a context.

    Attributes:
        controller: controller of the job; the caller enters it as a context.
        signals: numbers of received signals. After the first signal, the job waits for a running step or update; after
            the second signal, the job stops immediately.
        version: newest version that the job has tried to publish. The job uses each number once, even if the ranks
            continue from a checkpoint and repeat steps.
    """

    def __init__(
        self,
        config: LaunchConfig,
        output_dir: Path,
        recipe: Recipe,
        scheduler: Scheduler,
        token: str,
        notify: Callable[[str], None],
        progress: Progress,
        start: tuple[Path, Checkpoint] | None = None,
        scorer: Scorer | None = None,
    ) -> None:
        self._config, self._output_dir, self._recipe = config, output_dir, recipe
        self._output = OutputFolder(output_dir)
        self._logs = MetricLogs(config.log, output_dir, start[1].steps + 1 if start else 1)
        self._scheduler, self._notify, self._progress = scheduler, notify, progress
        self._token, self._scorer = token, scorer
        self._audit_record = (
            AuditRecord(output_dir / AUDIT, config.rollout.sampling, config.rollout.tokenizer)
            if config.audit
            else None
        )
        self._recorded: list[int] = []
        """Versions in the audit record. `_note_published` removes a version here when its update has ended."""
        self._newest = start
        """Folder and checkpoint that the ranks start from; None if they start with their initial weights."""
        self._first_steps = start[1].steps if start else 0
        self._recipe_state = start[1].recipe if start else b""
        """State of the recipe after the newest task that it has yielded."""
        self._again = decode_tasks(start[1].tasks) if start else []
        """Tasks from the checkpoint that the job continues from. The job removes a task when it submits the task."""
        self._num_skipped = 0
        """Number of tasks that the job still has to skip, because the journal of rollouts contains them."""
        self._drawn: Task | None = None
        """Task that the recipe has yielded and that waits until the staleness bound admits it."""
        self._open: dict[int, tuple[Task | None, GroupHandle]] = {}
        """Group id -> task and handle, for submitted groups that are not yet trained on, declined or failed.

        The task of a group from the journal is None.
        """
        self._trained: dict[int, tuple[str, Task | None]] = {}
        """Group id -> a rollout's id and the task, for groups that were trained on since the newest checkpoint."""
        trainer, rollout = config.trainer, config.rollout
        self.controller = Controller(
            token=self._token,
            host=config.controller.host,
            port=config.controller.port,
            advertise_host=config.controller.advertise_host,
            config=config.update,
            staleness=StalenessPolicy(
                max_staleness=rollout.max_staleness,
                batch_size=rollout.groups_per_step * rollout.samples_per_group,
                max_concurrent=rollout.max_concurrent,
                start_version=self._newest[1].version if self._newest else 0,
                on_stale=rollout.on_stale,
                max_resubmits=rollout.max_resubmits,
            ),
            rollout_config=rollout.limits(),
            tensor_transport=config.transport,
        )
        self._trainers = TrainController(
            scheduler,
            command=_rank_command(config),
            world_size=trainer.world_size,
            token=self._token,
            name=RANKS,
            coordinator=self.controller.coordinator,
            environment={
                ALLOW_UNUSED_VARIABLE: " ".join(trainer.allow_unused),
                **trainer.environment,
            },
            num_cpus=trainer.num_cpus,
            num_gpus=trainer.num_gpus,
            num_nodes=trainer.num_nodes,
            sampling=rollout.sampling,
            batches=self.controller.batches,
        )
        self._trainers.mount(self.controller.server)
        self._scoring = Scoring(
            self.controller.rollouts,
            recipe,
            rollout,
            scorer,
            declined=self._forget,
            describe_tasks=self._describe_tasks,
            take_tensors=self._take_tensors,
            keeps_groups=trainer.save_every > 0 and trainer.max_restarts > 0,
        )
        self._silence = SilenceWatch(
            self.controller,
            self._token,
            start_deadline_s=config.start_deadline_s,
            max_silence_s=config.max_silence_s,
        )
        self._task_calls = CallThread("recipe tasks")
        self._asked_for_task_at: float | None = None
        # Evaluations and calls of hooks: how many have begun, and how many have ended.
        self._num_pauses = self._num_pauses_ended = 0
        self._in_step = asyncio.Lock()
        """Lock held during a step or an update of the ranks. After a signal, the job waits for this lock."""
        self.signals: asyncio.Queue[int] = asyncio.Queue()
        self.version = -1
        self._steps = self._restarts = self._stopped_by = 0
        self._insisted = False
        self._num_trained = self._restarts_since_checkpoint = 0
        self._evaluation_due = False
        """Whether the weights after `_steps` steps must be evaluated before the next step."""
        self._has_weights = False
        """Whether the ranks have the weights after `_steps` steps. False from the start of the ranks until they have loaded
        the checkpoint, and from the start of a step until its version is published."""

    async def run(self) -> JobSummary:
        """Run the job until its steps are done, its tasks end, or a signal arrives; then end all its processes.

        Raises:
            WindlassError: see `run_job`. The processes have been ended.
        """
        controller, config = self.controller, self._config
        self._notify(f"controller {controller.url}")
        self._notify(how_to_watch(controller.url, self._output_dir))
        work = asyncio.create_task(self._work())
        processes = job_processes(config, controller.url)
        others = [asyncio.create_task(self._end_at_signal(work))]
        others += [asyncio.create_task(self._guard(*process)) for process in processes]
        rollouts: dict[str, int] | None = None
        try:
            await asyncio.wait([work, *others], return_when=asyncio.FIRST_COMPLETED)
            for task in [work, *others]:
                if task.done() and not task.cancelled():
                    task.result()
            rollouts = msgspec.to_builtins(controller.rollouts.stats())
        finally:
            # Write the report, also for a failed job, while engines and trainers are still connected.
            self._write_report()
            logs_end = asyncio.create_task(self._close_logs(), name="end of the metric logs")
            # While a rank executes a call, it does not read the command `Stop`. So do not wait long for this rank.
            in_call = not work.done()
            for task in (work, *others):
                task.cancel()
            await asyncio.gather(work, *others, return_exceptions=True)
            grace_s = RANKS_END_S
            if config.replica != ReplicaPlace.OFF:
                # When all steps are done, the replicas may still be sending the last update.
                grace_s = max(grace_s, config.shutdown_s)
            controller.coordinator.members.expect_departures()
            ranks_end = asyncio.create_task(
                self._trainers.close(grace_s=0.5 if in_call else grace_s), name="end of the ranks"
            )
            worker_s = await self._clean_up()
            try:
                await ranks_end
                await self._note_published()
                if rollouts is not None:
                    # Call the recipe before the engines end, because the recipe may use them.
                    await self._call_ended(self._summary(rollouts))
            finally:
                # Only pause the rollout controller here, and close it after the workers have ended. Each worker returns
                # its tasks when it ends. If the rollout controller were closed, the worker would try until a deadline.
                controller.rollouts.pause()
                names = [status.name for status in self._scheduler.list()]
                workers = {_worker_name(number) for number in range(config.rollout.num_workers)}
                await asyncio.gather(
                    *(
                        self._scheduler.delete(left, grace_s=worker_s if left in workers else 5.0)
                        for left in names
                    )
                )
                await controller.rollouts.close()
                await logs_end
        summary = self._summary(rollouts)
        ended = "done" if summary.version >= self.version else "failed"
        if summary.stopped_by:
            ended = f"stopped by {signal.Signals(summary.stopped_by).name}"
        self._notify(
            f"{ended}: {counted(summary.steps, 'step')}, version {summary.version} published"
        )
        written = [REPORT, SUMMARY, *([METRICS] if self._num_trained else []), LOGS]
        if self._newest is not None and self._newest[0].is_relative_to(self._output_dir):
            written.append(str(self._newest[0].relative_to(self._output_dir)))
        self._notify(f"in {shortest_path(self._output_dir)}: {', '.join(written)}")
        if summary.stopped_by:
            self._notify(self._how_to_go_on())
        return summary

    def _summary(self, rollouts: dict[str, int]) -> JobSummary:
        """Return the summary of the job until now. `rollouts` has the counts of the rollout controller."""
        coordinator = self.controller.coordinator
        return JobSummary(
            steps=self._steps,
            version=coordinator.fleet.published,
            trainer_restarts=self._restarts,
            stopped_by=self._stopped_by,
            outcomes=tuple(report.outcome for report in coordinator.reports),
            rollouts=rollouts,
            rewards=None if self._scorer is None else self._scorer.counts,
        )

    def _write_report(self) -> None:
        """Write the status page of the job into its output folder. If the file cannot be written, log a warning."""
        page = saved_page(self.controller.overview(), f"the job in {self._output_dir.name}/")
        try:
            write_file(self._output_dir / REPORT, page.encode())
        except OSError as error:
            # A full disk must not prevent the job from ending its processes.
            _log.warning("%s is not written: %s", self._output_dir / REPORT, error)

    async def _close_logs(self) -> None:
        """Close the logs of metrics in a thread, because a log may upload its last metrics. Wait at most `shutdown_s`."""
        deadline_s = self._config.shutdown_s
        try:
            async with asyncio.timeout(deadline_s):
                await in_thread("the end of the metric logs", self._logs.close)
        except TimeoutError:
            self._notify(
                f"the job stopped waiting after shutdown_s={deadline_s:g}; the last metrics may be missing in "
                "the logs of [log]"
            )

    async def _call_ended(self, summary: JobSummary) -> None:
        """Call the recipe's `ended`. A signal that arrives during the call cancels the call.

        If a signal has already stopped the job, the call is also cancelled after `shutdown_s`.

        Raises:
            WindlassError: see `_call_hook`.
        """
        # `_call_hook` converts errors inside the task: a SystemExit that leaves the task would end the event loop.
        hook = asyncio.create_task(
            self._call_hook("ended", lambda: self._recipe.ended(summary)), name="ended"
        )
        insisted = asyncio.create_task(self.signals.get())
        try:
            timeout_s = self._config.shutdown_s if summary.stopped_by else None
            await asyncio.wait(
                [hook, insisted], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if hook.done():
                hook.result()
        finally:
            hook.cancel()
            insisted.cancel()
            await asyncio.gather(hook, insisted, return_exceptions=True)

    async def _clean_up(self) -> float:
        """Cancel all rollouts, and wait at most `shutdown_s` until their workflows have cleaned up.

        Cancel nothing if the job has already received a second signal. If a signal arrives during the wait, stop
        waiting.

        Returns:
            Seconds that worker processes get to end afterwards: `shutdown_s` after a complete clean-up, 5 if some
            attempts have not cleaned up, 0 after a signal.
        """
        if self._insisted:
            return 0.0
        deadline_s = self._config.shutdown_s
        cleaning = asyncio.create_task(
            self.controller.rollouts.cancel_all(
                deadline_s=deadline_s,
                keep_in_journal=self._has_journal,
            ),
            name="clean-up",
        )
        insisted = asyncio.create_task(self.signals.get())
        with self._waiting_for(lambda: "workflows to clean up"):
            await asyncio.wait([cleaning, insisted], return_when=asyncio.FIRST_COMPLETED)
        cleaning.cancel()
        insisted.cancel()
        await asyncio.wait([cleaning, insisted])
        if cleaning.cancelled():
            self._notify("a signal interrupted the clean-up of rollouts")
            return 0.0
        if num_left := cleaning.result():
            self._notify(
                f"the job stopped waiting after shutdown_s={deadline_s:g}; {counted(num_left, 'attempt')} did not finish the "
                "clean-up"
            )
            return 5.0
        return deadline_s

    async def _end_at_signal(self, work: asyncio.Task[None]) -> None:
        """Wait for a signal. Then dispatch no more rollouts, and wait for a running step or update.

        The wait has the limit `shutdown_s`, and a second signal ends it.

        If the step or update ends in time, save a checkpoint and cancel `work`. Otherwise the caller cancels `work`.
        """
        self._stopped_by = await self.signals.get()
        self.controller.rollouts.pause()
        self._notify(
            f"{signal.Signals(self._stopped_by).name}: waiting for the end of a running step or update"
        )
        ended = asyncio.create_task(self._in_step.acquire())
        insisted = asyncio.create_task(self.signals.get())
        try:
            await asyncio.wait(
                [ended, insisted],
                timeout=self._config.shutdown_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if ended.done():
                await self._save_at_signal(insisted)
                work.cancel()
                await asyncio.wait([work])
            else:
                self._insisted = insisted.done()
                limit = f"shutdown_s={self._config.shutdown_s:g}"
                reason = "a second signal" if self._insisted else limit
                self._notify(f"the job stopped waiting for the step or update after {reason}")
        finally:
            ended.cancel()
            insisted.cancel()

    async def _save_at_signal(self, insisted: asyncio.Task[int]) -> None:
        """Save a checkpoint if the job saves checkpoints and has trained a step since the newest checkpoint.

        Save nothing after a failed step until the ranks have loaded the newest checkpoint: their weights may be of other
        steps than `_steps`. The caller holds `_in_step`.

        Args:
            insisted: task that ends at the second signal. This method then stops waiting for the checkpoint.
        """
        if not self._lacks_checkpoint:
            return
        self._notify(f"saving checkpoint {self._steps}; a second signal stops the save")
        saving = asyncio.create_task(self._save(), name="checkpoint at a signal")
        try:
            await asyncio.wait([saving, insisted], return_when=asyncio.FIRST_COMPLETED)
            if saving.done():
                saving.result()
            else:
                self._insisted = True
        except TrainerError as error:
            self._notify(f"checkpoint {self._steps} is not saved: {error}")
        finally:
            saving.cancel()
            await asyncio.wait([saving])

    @property
    def _lacks_checkpoint(self) -> bool:
        """Whether the job saves checkpoints, and the ranks have weights of steps since the newest one."""
        saves = self._config.trainer.save_every > 0
        return saves and self._has_weights and self._steps != self._saved_steps

    @property
    def _saved_steps(self) -> int:
        """Number of steps before the newest checkpoint; 0 without one."""
        return self._newest[1].steps if self._newest is not None else 0

    def _how_to_go_on(self) -> str:
        """Return where the newest checkpoint is, and how a job continues from it."""
        if self._newest is None:
            reason = ""
            if not self._config.trainer.save_every:
                reason = ", because trainer.save_every is 0"
            return f"no checkpoint was saved{reason}; the job can only begin again"
        how = "run the same command"
        if self._config.resume is not Resume.AUTO:
            how = 'set resume = "auto" at the top of the job\'s file, and run the same command'
        folder = shortest_path(self._newest[0])
        return f"to continue after step {self._saved_steps} from {folder}: {how}"

    async def _guard(self, parts: Sequence[ProcessSpec], role: Access, max_restarts: int) -> None:
        """Start an engine or worker, and start it again when it ends or hangs, each time after a longer pause.

        An engine that shares GPUs with trainer ranks starts only after the ranks' processes have started.

        Args:
            parts: processes to start. A worker has one process. An engine has one process per node. If one of them
                ends, the job ends all of them, and starts them again in a new reservation.
            role: role of the processes; they get the token of this role.
            max_restarts: largest number of restarts between two steps.

        Raises:
            WindlassError: the engine or worker ended or hung more than `max_restarts` times between two steps.
        """
        restarts, num_trained, name = 0, 0, parts[0].name
        while True:
            if parts[0].colocate_with:
                await self._trainers.ranks_started.wait()
            for spec in parts:
                environment = {**spec.environment, **role_environment(self._token, role)}
                await self._scheduler.start(msgspec.structs.replace(spec, environment=environment))
            waits = [asyncio.create_task(self._ended(spec.name)) for spec in parts]
            waits.append(asyncio.create_task(self._hung(name, role)))
            try:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            # The last item of `waits` is `_hung`, so the end of a process comes first. This matters if a process ended in
            # the queue: `_hung` then raises an error, and `_ended` returns the reason.
            process, reason = next(wait for wait in waits if wait in done).result()
            if self._num_trained > num_trained:
                restarts, num_trained = 0, self._num_trained
            ended = f"{reason} after {restarts} restarts"
            log = await self._log_end(process)
            if restarts == max_restarts:
                raise WindlassError(f"{ended}{log}")
            self._notify(f"{ended}; starting it again{log}")
            await asyncio.gather(*(self._scheduler.delete(spec.name) for spec in parts))
            await asyncio.sleep(_pause_s(restarts))
            restarts += 1

    async def _ended(self, name: str) -> tuple[str, str]:
        """Wait for the end of the process `name`; return its name and a text with its exit status."""
        status = await self._scheduler.wait(name)
        return name, f"{name} ended with exit status {status.returncode}"

    async def _hung(self, name: str, role: Access) -> tuple[str, str]:
        """Wait until an engine or worker has left the scheduler's queue, and then until it fails to answer.

        Return its name and the reason.

        The time limits are `start_deadline_s` for the first answer and `max_silence_s` afterwards.

        Raises:
            PeerUnreachable: the process ended in the queue, or could not be started.
        """
        # With Slurm or Ray, the process may wait in a queue before it runs.
        await self._scheduler.wait_healthy(name, deadline_s=math.inf)
        return name, await self._silence.until_silent(name, role)

    async def _log_end(self, name: str) -> str:
        """Return the path and the last lines of a process's log, as text to append to a message."""
        tail = await self._scheduler.log_tail(name, LOG_LINES)
        path = self._output_dir / LOGS / f"{name}.log"
        return f"; its log, {path}, ends:\n{tail.rstrip()}"

    # --- the work ----------------------------------------------------------------------------

    async def _work(self) -> None:
        """Start all processes, publish the first version, and train until the steps are done or the tasks end.

        If the ranks fail, start them again. At the end, stop the submission of tasks and the scoring of groups.

        Raises:
            WindlassError: see `run_job`.
        """
        config = self._config
        producer: asyncio.Task[None] | None = None
        try:
            self._take_over_journal()
            await self._start()
            self._progress.begin(
                "planning, binding and publishing the first version",
                config.trainer.publish_deadline_s,
            )
            async with self._in_step:
                await self._publish_loaded()
            self._progress.end()
            producer = asyncio.create_task(self._produce())
            clock = asyncio.get_running_loop().time
            while self._steps < config.steps or self._evaluation_due:
                begun_at = clock()
                try:
                    if self._evaluation_due:
                        await self._evaluate()
                        continue
                    batch = await self._batch(producer)
                    if batch is None:
                        self._end_of_tasks()
                        await self._save_last()
                        break
                    await self._step(batch, begun_at)
                    # Drop the samples now, so that workers can free their tensors while the job waits for the next batch.
                    del batch
                except TrainerError as error:
                    await self._start_again(error)
        finally:
            self._progress.end(done=False)
            self._scoring.close()
            self._task_calls.close()
            if producer is not None:
                producer.cancel()
                await asyncio.gather(producer, return_exceptions=True)

    def _end_of_tasks(self) -> None:
        """Print that the recipe has no more tasks, and the number of groups that the job did not train on.

        Raises:
            WindlassError: the job has trained no step.
        """
        rollout, stats = self._config.rollout, self.controller.rollouts.stats()
        said = f"the recipe's tasks ended after {counted(self._steps, 'step')}"
        if num_left := len(self._open):
            said += (
                f"; {counted(num_left, 'group')} left over, a step takes {rollout.groups_per_step}"
            )
        if stats.failed or stats.declined or stats.dropped:
            said += f"; rollouts: {stats.failed} failed, {stats.declined} declined, {stats.dropped} dropped"
        if not self._num_trained:
            raise WindlassError(f"{said}; the job has trained nothing")
        self._notify(said)

    async def _start(self) -> None:
        """Start the ranks, and wait until ranks, engines and workers are connected.

        `_guard` starts the engines and workers. If the job has no worker processes, run the recipe's workflows in this
        process. Show on the progress display which processes are missing.

        Raises:
            PeerTimeout: a process did not connect within `start_deadline_s`.
            EngineRefused: an engine was refused or could not join.
            TrainerError, ConfigError: see `_start_ranks`.
            ConfigError: the tokenizer cannot be loaded.
            WindlassError: the recipe's `workflows` raised an exception.
        """
        config, controller, progress = self._config, self.controller, self._progress
        deadline_s = config.start_deadline_s
        if config.rollout.tokenizer:
            progress.begin("loading the tokenizer, while engines start")
            # Load the tokenizer here, in a thread. A worker in this process would load it in the event loop.
            await asyncio.to_thread(load_text, config.rollout.tokenizer)
            progress.end()
        if not config.rollout.num_workers:
            with recipe_code("workflows"):
                workflows = self._recipe.workflows()
            controller.rollouts.run_here(workflows, tokenizer=config.rollout.tokenizer)
        world_size, engines = config.trainer.world_size, [e.name for e in config.engines]
        coordinator = controller.coordinator

        def look() -> None:
            missing = ", ".join(coordinator.fleet.missing(world_size, engines).values())
            binds = ", ".join(coordinator.connector.binds)
            waits = f"not connected yet: {missing}{self._where_logs_are()}" if missing else ""
            progress.detail(waits or (f"binding {binds}" if binds else ""))

        coordinator.subscribe(look)
        coordinator.rounds.on_phase(lambda _, phase: progress.detail(f"now in {phase}"))
        try:
            async with asyncio.timeout(deadline_s):
                progress.begin("starting trainer ranks and engines", deadline_s)
                look()
                await self._start_ranks()
                progress.begin("engines load their model and capture its layout", deadline_s)
                look()
                await controller.wait_for_fleet(
                    num_trainers=world_size, engines=engines, deadline_s=deadline_s
                )
                progress.begin("starting rollout workers", deadline_s)
                await controller.rollouts.wait_for_workers(
                    max(config.rollout.num_workers, 1), deadline_s=deadline_s
                )
        except TimeoutError as error:
            raise PeerTimeout(progress.text()) from error

    def _where_logs_are(self) -> str:
        """Return the end of a text that names the folder of the logs; empty if each node stores its own logs (Ray)."""
        folder = self._output_dir / LOGS
        return f"; logs: {shortest_path(folder)}" if any(folder.glob("*.log")) else ""

    async def _start_ranks(self) -> None:
        """End running ranks, start new ranks, and let them load the newest checkpoint if there is one.

        Raises:
            TrainerError: a rank died, did not connect in time, or raised an error.
            ConfigError: a step has fewer groups than there are data-parallel ranks.
        """
        deadline_s = self._config.start_deadline_s
        self._has_weights = False
        trainer = self._config.trainer
        collective_s = max(deadline_s, trainer.step_deadline_s, trainer.publish_deadline_s)
        await self._trainers.start(
            self.controller.url, deadline_s=deadline_s, collective_s=collective_s
        )
        num_groups, size = self._config.rollout.groups_per_step, self._trainers.data_parallel_size
        if num_groups < size:
            raise ConfigError(
                f"rollout.groups_per_step must be >= {size}, a group for each data-parallel rank, got {num_groups}"
            )
        if self._newest is not None:
            folder, checkpoint = self._newest
            await self._trainers.load(str(folder), deadline_s=deadline_s)
            self._steps = checkpoint.steps
            self.version = max(self.version, checkpoint.version - 1)
            self._evaluation_due = checkpoint.evaluation_due and self._config.evaluation.every > 0
            self._notify(f"continues from {folder}, after {counted(self._steps, 'step')}")
        self._has_weights = True
        # The journal may have a newer version than the checkpoint. The next version must be newer than both: otherwise,
        # its tokens would count as too old.
        self.version = max(self.version, self.controller.rollouts.recovered.version)

    async def _start_again(self, error: TrainerError) -> None:
        """Start the ranks again from the newest checkpoint after the ranks have failed with `error`.

        The job publishes the checkpoint's weights as a new version, because engines may have weights of later steps.
        Rollouts continue while the ranks restart. With `trainer.save_every` > 0, the next steps train again on the
        groups of the steps after the checkpoint, and then on the groups of the current batch.

        Raises:
            TrainerError: there is no checkpoint, or the ranks have failed more than `max_restarts` times since the
                newest checkpoint.
            ConfigError: see `_start_ranks`.
            RolloutError: see `_return_groups`.
        """
        max_restarts = self._config.trainer.max_restarts
        while self._newest is not None and self._restarts_since_checkpoint < max_restarts:
            await asyncio.sleep(_pause_s(self._restarts_since_checkpoint))
            self._restarts += 1
            self._restarts_since_checkpoint += 1
            _log.warning("trainer ranks failed: %s", error)
            reason, where = (
                str(error).partition("\n")[0],
                f"restart {self._restarts_since_checkpoint} of at most {max_restarts}",
            )
            self._notify(f"{reason}; starting the ranks again ({where})")
            try:
                with self._waiting_for(lambda: "the trainer ranks to start again"):
                    await self._start_ranks()
                self._return_groups()
                async with self._in_step:
                    return await self._publish_loaded()
            except TrainerError as again:
                error = again
        raise error

    def _return_groups(self) -> None:
        """Open groups again: all groups that steps have taken since the newest checkpoint.

        If `trainer.save_every` is 0, open no group again, because the job does not keep the groups that steps have taken.

        Raises:
            RolloutError: the journal of rollouts cannot be written.
        """
        for handle in self._scoring.return_groups():
            if handle.group_id in self._trained:
                _, task = self._trained[handle.group_id]
            else:
                # The group is in the current batch, so it is still open.
                task, _ = self._open.get(handle.group_id, (None, None))
            self._add_open(task, handle)
        self._trained = {}

    async def _publish_loaded(self) -> None:
        """Publish the weights that the ranks have after their start, without a training step since the last version."""
        self.controller.rollouts.count_from(self.version + 1)
        await self._publish()

    async def _publish(self) -> None:
        """Publish the weights of the ranks as the next version; see `TrainController.publish`."""
        self.version += 1
        deadline_s = self._config.trainer.publish_deadline_s
        with self._waiting_for(self._describe_update):
            await self._trainers.publish(self.version, deadline_s=deadline_s)

    def _describe_update(self) -> str:
        """Return a text about the current update: its version, its phase, and the processes that are not connected."""
        coordinator = self.controller.coordinator
        names = [engine.name for engine in self._config.engines]
        missing = coordinator.fleet.missing(self._config.trainer.world_size, names)
        said = f"the update to version {self.version}"
        if self.controller.phase:
            said += f", now in {self.controller.phase}"
        return f"{said}; not connected: {', '.join(missing.values())}" if missing else said

    async def _save(self) -> None:
        """Save a checkpoint of the ranks and the recipe, and delete old checkpoints as `trainer.keep` says.

        The checkpoint becomes the newest one. Restarts of the ranks are counted from zero again, and groups that were
        trained on since the previous checkpoint are removed from the journal of rollouts.

        Write the checkpoint's record only after all ranks have saved, because a folder with a record counts as finished.
        """
        folder = self._output.checkpoint_folder(self._steps)
        (folder / CHECKPOINT_RECORD).unlink(missing_ok=True)
        # Read the recipe's state before the ranks save, because tasks that the recipe yields while they save belong to
        # the next checkpoint.
        state, tasks = self._recipe_state, self._open_tasks()
        trained = [task_id for task_id, _ in self._trained.values()]
        journal, num_groups = self._journal_position()
        # `num_groups` includes groups of an earlier process whose tasks this job will skip when the recipe yields them
        # again. The recipe's state is from before these tasks, so subtract their number.
        num_groups -= self._num_skipped
        with self._waiting_for(lambda: f"the trainer ranks to save checkpoint {self._steps}"):
            await self._trainers.save(str(folder), deadline_s=self._config.trainer.step_deadline_s)
        checkpoint = Checkpoint(
            steps=self._steps, version=self.version, recipe=state, tasks=tasks if state else b"",
            journal=journal, num_groups=num_groups,
            trained=tuple(trained) if self._has_journal else (),
            evaluation_due=self._evaluation_due,
        )  # fmt: skip
        self._newest = self._output.save_record(checkpoint), checkpoint
        self._restarts_since_checkpoint = 0
        self._forget_trained()
        await asyncio.to_thread(self._output.prune, self._config.trainer.keep)

    async def _save_last(self) -> None:
        """Save a checkpoint if the job saves checkpoints and has trained a step since the newest checkpoint."""
        async with self._in_step:
            if self._lacks_checkpoint:
                await self._save()

    def _open_tasks(self) -> bytes:
        """Return the yielded tasks that the job has not trained on yet, encoded for a checkpoint.

        Leave out tasks that the journal of rollouts records, and tasks that msgpack cannot encode. Return `b""` if the recipe
        has no state.
        """
        if not self._recipe_state:
            return b""
        known = [] if self._has_journal else [task for task, _ in self._open.values()]
        tasks = [task for task in (*known, self._drawn, *self._again) if task is not None]
        encoded, errors = encode_tasks(tasks)
        if errors:
            _log.warning(
                "the checkpoint does not record %d of %s: %s",
                *(len(errors), counted(len(tasks), "open task"), errors[0]),
            )
        return encoded

    @property
    def _has_journal(self) -> bool:
        """Whether the job's rollouts have a journal in a file."""
        return self._config.rollout.journal is not None

    def _journal_position(self) -> tuple[str, int]:
        """Return the id of the rollout journal and the number of rollout groups in it; ("", 0) without a journal."""
        return self.controller.rollouts.position if self._has_journal else ("", 0)

    def _forget_trained(self) -> None:
        """Forget the groups that were trained on, in memory and in the journal of rollouts."""
        trained, self._trained = self._trained, {}
        self.controller.rollouts.acknowledge([task_id for task_id, _ in trained.values()])
        self._scoring.forget_taken(trained)

    async def _step(self, batch: dict[int, list[TrainingSample]], begun_at: float) -> None:
        """Train one step on the samples of each group, and publish the new weights.

        Also run the recipe's hooks, record metrics, and remove the groups from the open groups. If the settings require
        it, write the audit record, update the journal of rollouts, and save a checkpoint.

        Args:
            batch: group id -> samples of the group.
            begun_at: time of the event loop when the job began to wait for the batch. The printed line of the step
                contains the seconds since this time.

        Raises:
            TrainerError: the ranks failed, or the update failed.
            WindlassError: a metric is not finite, or a hook failed.
        """
        trainer, step = self._config.trainer, self._steps
        samples = [sample for group in batch.values() for sample in group]
        await self._call_hook(
            f"before_step of step {step}", lambda: self._recipe.before_step(step, samples)
        )
        self.controller.observe_samples(samples)
        async with self._in_step:
            self._has_weights = False
            with self._waiting_for(lambda: f"the trainer ranks to train step {step + 1}"):
                result = await self._trainers.train_step(
                    step, list(batch.values()), deadline_s=trainer.step_deadline_s
                )
            _check_metrics(step + 1, result)
            seeds = self._seeds_of(batch)
            version = self.version + 1
            await self._audit(version, lambda audit: audit.add(version, step + 1, samples, seeds))
            self._recorded.append(version)
            await self._publish()
            await self._note_published()
            self._steps, self._has_weights = step + 1, True
            every = self._config.evaluation.every
            self._evaluation_due = every > 0 and self._steps % every == 0
            self._num_trained += 1
            for group_id in batch:
                if (group := self._open.pop(group_id, None)) is not None:
                    # Take the id from the group's rollouts, because a rollout may have no sample.
                    task, first = group[0], group[1].future.result().rollouts[0]
                    self._trained[group_id] = first.task_id, task
            if not trainer.save_every:
                self._forget_trained()
            is_last = self._steps == self._config.steps
            if trainer.save_every and (is_last or self._steps % trainer.save_every == 0):
                await self._save()
        of_samples = sample_metrics(batch.values())
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
        step_s = asyncio.get_running_loop().time() - begun_at
        self._notify(
            f"step {self._steps}: reward {of_samples['reward']:.4f}, {len(samples)} samples, {step_s:.1f} s, {metrics}"
        )
        if (difference := result.metrics.get(LOGPROB_DIFFERENCE, 0.0)) > LARGEST_DIFFERENCE:
            self._notify(
                f"warning: log-probabilities of rollouts differ from the trainer's by {difference:.2f} per token; at most "
                f"{LARGEST_DIFFERENCE} is expected. The trainer computes them with the job's sampling settings. "
                "Importance weights are wrong. "
                "Possible causes: an engine returns log-probabilities of another distribution than it samples from, "
                "or a workflow uses its own sampling settings"
            )
        self._output.add_metrics(
            {
                "step": self._steps,
                "version": self.version,
                "samples": len(samples),
                **of_samples,
                **result.metrics,
            }
        )
        self._logs.add("train", self._steps, {**of_samples, **result.metrics})
        await self._call_hook(
            f"after_step of step {step}", lambda: self._recipe.after_step(step, result)
        )
        every = self._config.evaluation.every
        if every and self._steps % every == 0:
            await self._evaluate()

    def _seeds_of(self, group_ids: Iterable[int]) -> dict[str, int | None]:
        """Return rollout id -> seed, for all rollouts of these open groups."""
        found = [self._open.get(group_id) for group_id in group_ids]
        groups = [group[1].future.result() for group in found if group is not None]
        return {each.task_id: each.sampling_seed for group in groups for each in group.rollouts}

    async def _audit(self, version: int, write: Callable[[AuditRecord], None]) -> None:
        """If the job has an audit record, write about `version` in a thread. If the file cannot be written, log the error."""
        if self._audit_record is None:
            return
        try:
            await asyncio.to_thread(write, self._audit_record)
        except sqlite3.Error as error:
            _log.error("%s: version %d is not recorded: %s", AUDIT, version, error)

    async def _note_published(self) -> None:
        """Note in the audit record which recorded versions have been published since the last call.

        With replicas, the update of the newest version may not have ended yet, and may still fail.
        """
        ended = {report.version: report.outcome for report in self.controller.coordinator.reports}
        for version in [each for each in self._recorded if each in ended]:
            self._recorded.remove(version)
            if ended[version] is RoundOutcome.PUBLISHED:
                await self._audit(version, partial(AuditRecord.note_published, version=version))

    async def _evaluate(self) -> None:
        """Wait until the fleet serves the newest version, evaluate it, and record the metrics.

        The next step begins only afterwards, so engines do not change their version during the evaluation. If this job has
        saved the evaluated weights, set `Checkpoint.evaluation_due` in the record of the checkpoint to False.
        """
        with self._without_room(), self._waiting_for(self._describe_update):
            deadline_s = self._config.trainer.publish_deadline_s
            await self._trainers.finish_update(deadline_s=deadline_s)
        version = self.version
        waiting = self._waiting_for(lambda: f"the evaluation of version {version}")
        with self._without_room(), waiting:
            found = await evaluate(
                self.controller, self._recipe, self._config, version, self._scorer
            )
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        self._notify(f"evaluation of version {version}: {metrics}")
        self._output.add_metrics({"step": self._steps, "version": version, **found}, EVALUATIONS)
        self._logs.add("evaluation", self._steps, found)
        self._evaluation_due = False
        if self._newest is not None and self._newest[1].evaluation_due:
            folder, checkpoint = self._newest
            self._newest = folder, msgspec.structs.replace(checkpoint, evaluation_due=False)
            # If the checkpoint is from `trainer.resume_from`, it belongs to another job. Do not change it.
            if folder == self._output.checkpoint_folder(checkpoint.steps):
                self._output.save_record(self._newest[1])

    def _take_over_journal(self) -> None:
        """Continue the unfinished groups that an earlier process recorded in the journal of rollouts.

        - Remove groups that ranks have trained on before the checkpoint.
        - Count the tasks that the earlier process submitted after the checkpoint. The job skips them when the recipe
          yields them again.
        - If there is no checkpoint and the recipe has a position (`Recipe.state`), cancel the groups: the recipe begins
          with its first task, so it yields the tasks of these groups again.

        Raises:
            RolloutError: the journal cannot be written.
        """
        rollouts, checkpoint = self.controller.rollouts, self._newest[1] if self._newest else None
        journal, num_groups = self._journal_position()
        if checkpoint is not None:
            rollouts.acknowledge(checkpoint.trained)
            if checkpoint.recipe and journal == checkpoint.journal:
                # After a power cut, the journal may lack groups from before the checkpoint, so the difference may be < 0.
                self._num_skipped = max(num_groups - checkpoint.num_groups, 0)
        for handle in rollouts.recovered.groups.values():
            if checkpoint is None and has_position(self._recipe):
                handle.cancel()
            if not handle.done():
                self._add_open(None, handle)

    async def _produce(self) -> None:
        """Submit the recipe's tasks one by one, each as soon as the staleness bound admits it, until the tasks end.

        If the job continues from a checkpoint, first restore the recipe's state and submit the checkpoint's tasks.
        """
        deadline_s = room_deadline_s(self._config)
        if self._recipe_state:
            state = msgspec.msgpack.decode(self._recipe_state)
            await self._task_calls.call("load", lambda: self._recipe.load(state))
        while self._again:
            await self._submit(self._again.pop(0), deadline_s)
        tasks = tasks_of(self._recipe)
        while (drawn := await self._next_task(tasks)) is not None:
            task, self._recipe_state = drawn
            await self._submit(task, deadline_s)

    async def _next_task(self, tasks: Iterator[tuple[Task, bytes]]) -> tuple[Task, bytes] | None:
        """Return the recipe's next task, and the recipe's encoded state after this task; None after the last task.

        The recipe runs in the thread of `_task_calls`, so this method does not block the event loop.
        """
        self._asked_for_task_at = asyncio.get_running_loop().time()
        try:
            return await self._task_calls.call("tasks", lambda: next(tasks, None))
        finally:
            self._asked_for_task_at = None

    async def _submit(self, task: Task, deadline_s: float) -> None:
        """Wait until the staleness bound admits a task, submit the task as one group, and record the group as open.

        Skip the task if an earlier process has already submitted it; see `_take_over_journal`.

        Raises:
            ConfigError: no worker knows the task's workflow.
            PeerTimeout: the staleness bound did not admit the task within `deadline_s`, and no evaluation and no hook of the
                recipe ran during this time.
        """
        if self._num_skipped:
            self._num_skipped -= 1
            return
        rollout, rollouts = self._config.rollout, self.controller.rollouts
        if unknown := rollouts.refusal(task.workflow):
            raise ConfigError(f"recipe: tasks: {unknown}")
        self._drawn = task
        while True:
            num_ended = self._num_pauses_ended
            try:
                await rollouts.wait_for_room(deadline_s=deadline_s)
                break
            except PeerTimeout:
                # Raise only if no evaluation or hook ran during the wait. Otherwise wait again, because the job publishes
                # no version during an evaluation or a hook.
                if self._num_pauses == num_ended:
                    raise
        if task.workflow:
            submit = partial(rollouts.submit_workflow_group, task.workflow, task.arguments)
        else:
            submit = partial(rollouts.submit_group, task.prompt or task.prompt_ids)
        handle = submit(
            rollout.samples_per_group,
            rollout.sampling,
            metadata=task.metadata,
            num_extra=rollout.extra_samples,
            min_samples=rollout.min_samples or None,
        )
        self._drawn = None
        self._add_open(task, handle)

    def _add_open(self, task: Task | None, handle: GroupHandle) -> None:
        """Record a group as open until the job has trained on it, or the group is declined, fails or is cancelled."""
        self._open[handle.group_id] = task, handle
        handle.add_done_callback(partial(self._group_ended, handle.group_id))

    def _group_ended(self, group_id: int, ended: asyncio.Future[RolloutGroup]) -> None:
        """Handle the end of a group: remove a failed or cancelled group from `_open`.

        A completed group stays in `_open` until a step has trained on it or the recipe declines it.
        """
        if ended.cancelled() or ended.exception() is not None:
            self._forget(group_id)

    def _forget(self, group_id: int) -> None:
        """Remove a group from `_open`, because the job will not train on it."""
        self._open.pop(group_id, None)

    def _describe_tasks(self) -> str:
        """Return how long the job has waited for the next task of the recipe; an empty text below one second."""
        if self._asked_for_task_at is None:
            return ""
        waited_s = asyncio.get_running_loop().time() - self._asked_for_task_at
        return (
            f"the recipe's tasks() has yielded nothing for {waited_s:.0f} s"
            if waited_s >= 1
            else ""
        )

    async def _batch(self, producer: asyncio.Task[None]) -> dict[int, list[TrainingSample]] | None:
        """Wait for the groups of the next step. Return their samples by group id; None if too few tasks are left for a step.

        For errors see `Scoring.next_batch`.
        """
        with self._waiting_for(
            lambda: f"the batch of step {self._steps + 1}, which needs {self._scoring.describe()}"
        ):
            return await self._scoring.next_batch(producer)

    async def _take_tensors(self, groups: Sequence[Sequence[TrainingSample]]) -> frozenset[str]:
        """Let the ranks fetch the large tensors of the next step; see `TrainController.take_tensors`."""
        deadline_s = self._config.trainer.step_deadline_s
        return await self._trainers.take_tensors(self._steps, groups, deadline_s=deadline_s)

    async def _call_hook(self, hook: str, call: Callable[[], Awaitable[None]]) -> None:
        """Call a hook of the recipe. Report a long wait for the hook. Reports and errors name the hook.

        Raises:
            PeerTimeout: the hook did not end within `recipe.hook_deadline_s`.
            WindlassError: the hook raised an exception.
        """
        deadline_s = self._config.recipe.hook_deadline_s
        waiting = self._waiting_for(lambda: f"the recipe's {hook}")
        with recipe_code(hook), self._without_room(), waiting:
            limit = asyncio.timeout(deadline_s or None)
            try:
                async with limit:
                    await call()
            except TimeoutError as error:
                # The hook may raise TimeoutError for a reason of its own.
                if not limit.expired():
                    raise
                raise PeerTimeout(
                    f"recipe: {hook} did not end within {deadline_s:g} s; raise recipe.hook_deadline_s if the hook needs longer"
                ) from error

    @contextmanager
    def _without_room(self) -> Iterator[None]:
        """Count the block as a pause of the steps. The job publishes no version in the block, so `_submit` waits longer."""
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses_ended += 1

    @contextmanager
    def _waiting_for(self, describe: Callable[[], str]) -> Iterator[None]:
        """While the block runs, report every `SAID_EVERY_S` seconds what the job waits for. `describe` returns this as text."""
        began_s = asyncio.get_running_loop().time()

        async def say() -> None:
            while True:
                await asyncio.sleep(SAID_EVERY_S)
                waited_s = asyncio.get_running_loop().time() - began_s
                self._notify(f"the job has waited {waited_s:.0f} s for {describe()}")

        saying = asyncio.create_task(say(), name="waiting line")
        try:
            yield
        finally:
            saying.cancel()


def _check_metrics(number: int, result: StepResult) -> None:
    """Check that the metrics of a step are finite.

    Raises:
        WindlassError: a metric is NaN or infinite, so the job must not publish the step's weights.
    """
    found = {
        f"{name} {value}"
        for rank in result.ranks
        for name, value in rank.items()
        if not math.isfinite(value)
    }
    if found:
        raise WindlassError(
            f"step {number}: metrics must be finite, got {', '.join(sorted(found))}; the weights of this step are "
            "neither published nor saved"
        )


def _pause_s(restarts: int) -> float:
    """Return the seconds to wait before the next restart of a process that was restarted `restarts` times."""
    return float(min(FIRST_PAUSE_S * 2**restarts, MAX_PAUSE_S))


def create_scorer(config: LaunchConfig) -> Scorer | None:
    """Return the object that scores the job's rollouts; None if the recipe scores them itself."""
    if config.rewards is None:
        return None
    if isinstance(config.rewards, ServerRewards):
        return RewardServer(config.rewards)
    return RewardPool(with_file(config.rewards, config))


def has_owner_token() -> bool:
    """Return whether the user has chosen the job's secret."""
    return bool(secret_value(TOKEN_VARIABLE) or environment_value(TOKEN_FILE_VARIABLE))


def owner_token() -> str:
    """Return the job's secret: from WINDLASS_TOKEN, else from the file in WINDLASS_TOKEN_FILE, else a new random one.

    Raises:
        ConfigError: the file in WINDLASS_TOKEN_FILE cannot be read, or a token is invalid.
    """
    return control_token() if has_owner_token() else secrets.token_hex(16)


# --- processes of the job, and checks of its options ------------------------------------------


def check_job(config: LaunchConfig) -> None:
    """Check a job's options and its output folder; change nothing.

    Raises:
        ConfigError: `check_options` refused an option, or the output folder contains the output of an earlier job that
            this job may not continue.
    """
    check_all([partial(find_start, config), partial(check_options, config)])


def check_options(config: LaunchConfig) -> None:
    """Check that the options of a job agree with each other, without reading files.

    Raises:
        ConfigError: an option of an engine or its number of GPUs is wrong, or `colocate_with` or a Slurm pattern matches no
            process. On one host, `num_nodes` must be 1. On several hosts, addresses and transport must work across
            hosts. The error's text is the first mistake; its notes are the others.
    """
    check_all(
        [
            *(partial(_check_context, config, engine) for engine in config.engines),
            *(partial(_check_sampling, config, engine) for engine in config.engines),
            *(partial(_engine, config, engine, "") for engine in config.engines),
            partial(_check_nodes, config),
            partial(_check_processes, config),
        ]
    )


def _check_nodes(config: LaunchConfig) -> None:
    """Check `num_nodes` and the addresses of a job against its scheduler.

    If the scheduler has one host, `num_nodes` must be 1. If processes of other hosts connect to this host
    (`crosses_hosts`), the addresses and the transport must work across hosts.

    Raises:
        ConfigError: one of these rules is broken.
    """
    if config.scheduler.is_one_host:
        engines = [(f"engines {each.name!r}: ", each.num_nodes) for each in config.engines]
        for where, num_nodes in [("trainer.", config.trainer.num_nodes), *engines]:
            if num_nodes > 1:
                raise ConfigError(
                    f"{where}num_nodes must be 1, got {num_nodes}: the scheduler has only this host"
                )
    elif config.scheduler.crosses_hosts:
        _check_hosts(config)


def _check_processes(config: LaunchConfig) -> None:
    """Check that the scheduler's settings fit the processes of the job; see `SchedulerConfig.check`."""
    try:
        engines = job_processes(config, "")
    except ConfigError:
        # Another check of `check_options` reports this mistake.
        return
    specs = [*_ranks(config), *(spec for parts, _, _ in engines for spec in parts)]
    config.scheduler.check(specs)


def _check_context(config: LaunchConfig, engine: EngineSection) -> None:
    """Check that the longest answer fits into an engine's context window, if the window's size is known.

    Raises:
        ConfigError: the longest answer leaves no room for a prompt in the window.
    """
    spec = ENGINES.find(engine.kind)
    given = dict(options_of(engine.arguments)).get(spec.context_option, "")
    context = int(given) if given.isdecimal() else None if given else spec.default_context
    for table, sampling in _samplings(config):
        if context is not None and sampling.max_new_tokens >= context:
            raise ConfigError(
                f"engines {engine.name!r}: {spec.context_option} must be > {sampling.max_new_tokens} "
                f"({table}.max_new_tokens), got {context}: the prompt needs room too"
            )


def _samplings(config: LaunchConfig) -> list[tuple[str, SamplingParams]]:
    """Return the job's sampling parameters for rollouts and evaluations, each with its table name in the job file."""
    given = [("rollout.sampling", config.rollout.sampling)]
    if config.evaluation.every and config.evaluation.sampling is not None:
        given.append(("evaluation.sampling", config.evaluation.sampling))
    return given


_OPTIONS = {
    ("sglang", "sampling_seed"): "--enable-deterministic-inference",
    ("sglang", "priority"): "--enable-priority-scheduling",
    ("vllm", "priority"): "--scheduling-policy",
}
"""(kind of engine, sampling parameter) -> option without which the engine ignores or refuses the parameter."""


def _check_sampling(config: LaunchConfig, engine: EngineSection) -> None:
    """Check that an engine supports the sampling parameters of the job.

    Raises:
        ConfigError: an engine of this kind, or with these arguments, ignores or refuses a parameter.
    """
    where = f"engines {engine.name!r}"
    for table, sampling in _samplings(config):
        if sampling.has_structure and engine.kind == "embedded":
            raise ConfigError(
                f"{where}: kind must be vllm or sglang if {table} sets json_schema, regex, ebnf or choice, got 'embedded'"
            )
        options = dict(options_of(engine.arguments))
        for name in ("sampling_seed", "priority"):
            value, option = getattr(sampling, name), _OPTIONS.get((engine.kind, name))
            if value and option is not None and option not in options:
                raise ConfigError(
                    f"{where}: arguments must contain {option} if {table} sets {name}, got {list(engine.arguments)}"
                )
        if sampling.priority and engine.kind == "embedded":
            raise ConfigError(
                f"{where}: kind must be vllm or sglang if {table} sets priority, got 'embedded'"
            )
        if sampling.stop and "--skip-tokenizer-init" in dict(options_of(engine.arguments)):
            raise ConfigError(
                f"{where}: arguments must not contain --skip-tokenizer-init if {table} sets stop, because the "
                "engine needs its tokenizer to find stop texts; remove the option, or use stop_token_ids"
            )


def check_host(config: LaunchConfig) -> None:
    """Check the programs, models and ports of a job that runs on this host only.

    Raises:
        ConfigError: a Python interpreter or a model does not exist, or two processes have the same port. The error's text
            is the first mistake; its notes are the others.
    """
    if not config.scheduler.is_one_host:
        return
    ports = {config.controller.port: "the controller"} if config.controller.port else {}
    checks = [
        partial(_check_python, "trainer.", config.trainer.python),
        partial(_check_python, "rollout.", config.rollout.python),
    ]
    if config.training is not None:
        folders = {"model": config.training.model, "reference": config.training.reference}
        checks += [
            partial(_check_folder, f"training.{key}", folder)
            for key, folder in folders.items()
            if folder
        ]
    for engine in config.engines:
        taken = ports.setdefault(engine.port, engine.name) if engine.port else engine.name
        checks += [
            partial(_check_model, engine),
            partial(_check_port, engine, taken),
            partial(_check_python, f"engines {engine.name!r}: ", engine.python),
        ]
    check_all(checks)


def _check_python(where: str, python: str) -> None:
    """Raise `ConfigError` if a Python interpreter is given and is no program on this host."""
    if python and shutil.which(python) is None:
        raise ConfigError(f"{where}python must be a program on this host, got {python!r}")


def _check_model(engine: EngineSection) -> None:
    """Raise `ConfigError` if an engine's model does not exist, or is a folder without a config.json."""
    # Engine kinds of other packages may take a `model` that is not a path.
    is_known = ENGINES.find(engine.kind).module.startswith("windlass.")
    if is_known and not Path(engine.model).exists():
        raise ConfigError(
            f"engines {engine.name!r}: model must be an existing checkpoint folder (or, for the embedded engine, "
            f"an existing configuration), got {engine.model!r}"
        )
    if is_known and Path(engine.model).is_dir():
        _check_folder(f"engines {engine.name!r}: model", engine.model)


def _check_folder(what: str, folder: str) -> None:
    """Raise `ConfigError` if a checkpoint folder has no config.json. `what` names the setting in the error."""
    if not Path(folder, "config.json").exists():
        raise ConfigError(f"{what} must be a checkpoint folder with a config.json, got {folder!r}")


def _check_port(engine: EngineSection, owner: str) -> None:
    """Raise `ConfigError` if another process (`owner`) has this engine's port."""
    if owner != engine.name:
        raise ConfigError(
            f"engines {engine.name!r}: port must differ from the port of {owner} on the same host, got {engine.port}"
        )


def _check_hosts(config: LaunchConfig) -> None:
    """Raise `ConfigError` for a loopback address of the controller or an engine, or a transport that works in one host only."""
    controller = config.controller
    reached = controller.advertise_host or controller.host
    if is_loopback(reached):
        raise ConfigError(
            f"controller.advertise_host must be an address that the nodes can reach, got {reached!r}"
        )
    for engine in config.engines:
        told = dict(options_of(engine.arguments))
        for option in ("--host", "--advertise-host"):
            if is_loopback(host := told.get(option, "")):
                raise ConfigError(
                    f"engines {engine.name!r}: {option} must be an address that the nodes can reach, "
                    f"got {host!r}"
                )
    transport = parse_transport(config.transport)
    if not transport.between_hosts:
        raise ConfigError(
            f"transport must be auto, mooncake or nixl, got {transport.name!r}: the scheduler has several hosts"
        )


def _rank_command(config: LaunchConfig) -> tuple[str, ...]:
    """Return the command of a trainer rank: the user's script, or the built-in trainer with its settings as JSON."""
    trainer = config.trainer
    program: tuple[str, ...] = (trainer.script, *trainer.arguments)
    if config.training is not None:
        settings = msgspec.json.encode(config.training).decode()
        program = ("-m", "windlass.jobs.stock_trainer", settings)
    return (trainer.python or sys.executable, *program)


def _ranks(config: LaunchConfig) -> list[ProcessSpec]:
    """Return the processes of the trainer ranks, as `TrainController` starts them."""
    trainer = config.trainer
    return rank_specs(
        RANKS,
        _rank_command(config),
        trainer.world_size,
        num_cpus=trainer.num_cpus,
        num_gpus=trainer.num_gpus,
        num_nodes=trainer.num_nodes,
    )


def room_deadline_s(config: LaunchConfig) -> float:
    """Return the maximum time in seconds until the staleness bound admits another task.

    At the staleness bound, the job waits for the next version. The result is the sum of the deadlines of everything that
    may happen before a version is published: a batch and its scores, fetching large tensors, a step, a checkpoint, an
    update, and restarts of ranks. After each restart, the job first repeats the steps since the checkpoint on the same
    groups. The bound admits no task before these steps are done. Evaluations and hooks of the recipe are not included;
    `Job._submit` waits again after them.
    """
    rollout, trainer = config.rollout, config.trainer
    step_s = (
        rollout.batch_deadline_s * (1 + rollout.groups_per_step)
        + 2 * trainer.step_deadline_s
        + trainer.publish_deadline_s
    )
    restart_s = (
        2 * config.start_deadline_s
        + trainer.publish_deadline_s
        + trainer.save_every * step_s
        + trainer.step_deadline_s
    )
    return step_s + trainer.step_deadline_s + trainer.max_restarts * restart_s


def job_processes(config: LaunchConfig, url: str) -> list[tuple[list[ProcessSpec], Access, int]]:
    """Return (processes, role, largest number of restarts) for each engine and rollout worker.

    An engine has one process per node; a worker has one process. All connect to the controller at `url`.

    Raises:
        ConfigError: an option of an engine, its number of GPUs or its number of nodes is wrong, or no trainer rank has the
            name in `colocate_with`.
    """
    engines = [
        (_engine(config, each, url), Access.ENGINE, each.max_restarts) for each in config.engines
    ]
    workers = range(config.rollout.num_workers)
    return engines + [
        ([_worker(config, n, url)], Access.WORKER, config.rollout.max_worker_restarts)
        for n in workers
    ]


def _worker_name(number: int) -> str:
    """Return the name of a worker process."""
    return f"worker-{number}"


def _worker(config: LaunchConfig, number: int, url: str) -> ProcessSpec:
    """Return the process of a rollout worker that connects to the controller at `url`."""
    script, name = config.rollout.worker_script, _worker_name(number)
    program = (script,) if script else ("-m", "windlass.rollout.worker")
    python = config.rollout.python or sys.executable
    command = (python, *program, "--controller", url, "--name", name)
    command += ("--shutdown-s", f"{config.shutdown_s:g}")
    command += ("--tensor-transport", config.transport)
    if config.rollout.tokenizer:
        command += ("--tokenizer", config.rollout.tokenizer)
    return ProcessSpec(name=name, command=(*command, *config.rollout.worker_arguments))


def _engine(config: LaunchConfig, engine: EngineSection, url: str) -> list[ProcessSpec]:
    """Return one process per node of the engine.

    By default, the engine reserves its own GPUs. With `colocate_with`, it uses GPUs that the trainers reserved,
    beginning with the first GPU of the trainer rank `colocate_with`.

    Raises:
        ConfigError: the engine's launcher refuses an option, `colocate_with` is not the name of a trainer rank, or the
            engine has a wrong number of GPUs or nodes.
    """
    where, spec, num_nodes = f"engines {engine.name!r}", ENGINES.find(engine.kind), engine.num_nodes
    if num_nodes > 1 and not spec.spans_nodes:
        raise ConfigError(f"{where}: num_nodes must be 1 for kind {engine.kind!r}, got {num_nodes}")
    if num_nodes > 1 and engine.colocate_with:
        raise ConfigError(f"{where}: num_nodes must be 1 with colocate_with, got {num_nodes}")
    commands = [
        spec.command(
            EngineOptions(
                name=engine.name,
                model=engine.model,
                tensor_parallel_size=engine.tensor_parallel_size,
                transport=config.transport,
                controller=url,
                port=engine.port,
                num_nodes=num_nodes,
                node=node,
                arguments=engine.arguments,
                python=engine.python,
            )
        )
        for node in range(num_nodes)
    ]
    try:
        num_ranks = _num_ranks(spec, engine, commands[0][3:])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    num_gpus, node, gpus = engine.num_gpus, 0, tuple[int, ...]()
    if engine.colocate_with:
        ranks = {rank.name: rank for rank in _ranks(config)}
        if (beside := ranks.get(engine.colocate_with)) is None:
            raise ConfigError(
                f"{where}: colocate_with must be one of {list(ranks)}, got {engine.colocate_with!r}"
            )
        if num_gpus:
            raise ConfigError(
                f"{where}: num_gpus must not be given with colocate_with, got {num_gpus}"
            )
        num_gpus, node = 0, beside.node
        if beside.gpus:
            gpus = tuple(beside.gpus[0] + n for n in range(num_ranks))
        if gpus and gpus[-1] >= beside.num_gpus:
            raise ConfigError(
                f"{where}: colocate_with must leave one GPU for each of the engine's {num_ranks} ranks, got "
                f"{counted(beside.num_gpus - gpus[0], 'reserved GPU')} from the first GPU of {engine.colocate_with!r} to the last of "
                "its node; name an earlier trainer rank, or reserve more GPUs"
            )
    elif num_gpus is None:
        num_gpus = num_ranks if config.trainer.num_gpus else 0
    elif num_gpus not in {0, num_ranks}:
        raise ConfigError(
            f"{where}: num_gpus must be 0, or {num_ranks} (one for each rank of the engine), got {num_gpus}"
        )
    return [
        ProcessSpec(
            name=f"{engine.name}-node-{part}" if part else engine.name,
            command=command,
            environment=engine.environment,
            num_nodes=num_nodes,
            num_cpus=engine.num_cpus,
            num_gpus=num_gpus // num_nodes,
            colocate_with=engine.name if part else engine.colocate_with,
            node=node + part,
            gpus=gpus,
        )
        for part, command in enumerate(commands)
    ]


def _num_ranks(spec: EngineSpec, engine: EngineSection, words: Sequence[str]) -> int:
    """Check an engine's command line; return the number of ranks that the engine will have.

    Args:
        spec: kind of the engine.
        engine: settings of the engine.
        words: command line without the interpreter, `-m` and the module.

    Raises:
        ConfigError: the engine cannot be started with these words.
    """
    if spec.check is not None:
        spec.check(words)
    if spec.server is None:
        return engine.tensor_parallel_size
    args = checked_arguments(spec, words)
    return int(args.tp * args.pp * spec.num_replicas(args.dp, words))
