"""The demo's controller: starts everything, feeds prompts, scores answers, watches the fleet."""

from __future__ import annotations

import asyncio
import random
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

import msgspec
from rich.console import Console
from rich.live import Live

import windlass
from windlass.config import ControlConfig, PhaseDeadlines
from windlass.errors import PeerTimeout, WindlassError
from windlass.jobs.demo.checker import check_served
from windlass.jobs.demo.plot import save_plot
from windlass.jobs.demo.real_engines import prepare_real_engine, real_engine
from windlass.jobs.demo.record import DemoRecord
from windlass.jobs.demo.settings import (
    REAL_ENGINES,
    DemoSettings,
    EngineSpec,
    SchedulerKind,
    make_directory,
    save_settings,
)
from windlass.jobs.demo.task import reward, sample_prompt
from windlass.jobs.demo.view import render
from windlass.jobs.schedulers.base import ProcessSpec
from windlass.jobs.schedulers.configs import (
    LocalSchedulerConfig,
    RaySchedulerConfig,
    SchedulerConfig,
    SlurmSchedulerConfig,
    create_scheduler,
)
from windlass.net.access import Access, role_environment
from windlass.observability.ceilings import measure_memcpy_gbps
from windlass.rollout.batches import training_samples
from windlass.rollout.messages import SamplingParams, TrainingSample
from windlass.updates.messages import UpdateReport
from windlass.updates.round_types import Phase

__all__ = ["run_demo"]


async def run_demo(settings: DemoSettings, *, json_path: Path | None, plain: bool) -> int:
    """Run the demo to its end; 1 when it showed something that it must not show.

    Raises:
        ConfigError: a folder that cannot be written, or holds something else than a demo's output.
        WindlassError: a process could not be started, or died; carries its log's tail.
    """
    make_directory(settings)
    settings_path = save_settings(settings)
    if settings.engine in REAL_ENGINES:
        await asyncio.to_thread(prepare_real_engine, settings)
    record = DemoRecord(ceiling_gbps=measure_memcpy_gbps())
    console = Console(markup=False)
    live = None if plain or not console.is_terminal else Live(console=console, auto_refresh=False)
    began = time.perf_counter()
    demo = _Demo(settings, settings_path, record, _shower(settings, record, live, console))
    if live is not None:
        with live:
            served = await demo.run()
    else:
        served = await demo.run()
    published = [row.version for row in record.updates]
    console.print(f"checking {len(served)} answers against the trainer's own weights ...")
    record.torn = await asyncio.to_thread(check_served, settings, served, published)
    record.wall_s = time.perf_counter() - began
    save_plot(record, settings.directory / "demo.png")
    record.save_json(json_path or settings.directory / "demo.json")
    return _summarise(settings, record, console)


@final
class _Demo:
    def __init__(
        self,
        settings: DemoSettings,
        settings_path: Path,
        record: DemoRecord,
        show: Callable[[windlass.Controller], None],
    ) -> None:
        self._settings = settings
        self._settings_path = settings_path
        self._record = record
        self._show = show
        self._token = secrets.token_hex(16)
        self._served: list[TrainingSample] = []
        self._killed, self._restarted = asyncio.Event(), asyncio.Event()
        self._kill_task: asyncio.Future[None] | None = None
        self._controller = windlass.Controller(
            token=self._token,
            config=ControlConfig(
                mode=settings.mode,
                backend=settings.update_backend,
                deadlines=PhaseDeadlines(fleet_s=settings.start_deadline_s),
                min_engines=1,
            ),
            staleness=windlass.StalenessPolicy(
                max_staleness=settings.max_staleness,
                batch_size=settings.prompts_per_step * settings.samples_per_prompt,
                max_concurrent=2 * settings.prompts_per_step * settings.samples_per_prompt,
            ),
            journal_path=settings.directory / "journal.jsonl",
        )
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._scheduler = create_scheduler(
            _scheduler_config(settings), settings.directory / "logs", environment
        )

    async def run(self) -> list[TrainingSample]:
        """All answers that were trained on."""
        coordinator = self._controller.coordinator
        coordinator.on_update(self._on_update)
        coordinator.on_phase(self._on_phase)
        async with self._scheduler, self._controller:
            work = asyncio.create_task(self._work())
            guards = [work, *await self._start()]
            try:
                done, _ = await asyncio.wait(guards, return_when=asyncio.FIRST_COMPLETED)
            finally:  # Ctrl-C, too: that their processes end now is no failure, and none starts again
                for task in guards:
                    task.cancel()
                await asyncio.gather(*guards, return_exceptions=True)
            for task in done:
                task.result()
            self._count_rollouts()
        return self._served

    # --- processes ---------------------------------------------------------------------------

    async def _start(self) -> list[asyncio.Task[None]]:
        settings, url = self._settings, self._controller.url
        trainer = (
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(settings.num_trainers), "-m", "windlass.jobs.demo.trainer"),
            *(str(self._settings_path), url),
        )
        worker = (
            *(sys.executable, "-m", "windlass.rollout.worker"),
            *("--controller", url, "--name", "worker-0"),
        )
        tasks = [
            self._guard(
                ProcessSpec(name="trainers", command=trainer), Access.TRAINER, restart=False
            ),
            self._guard(ProcessSpec(name="worker-0", command=worker), Access.WORKER, restart=False),
        ]
        tasks += [
            self._guard(self._engine(spec), Access.ENGINE, restart=True)
            for spec in settings.engines
        ]
        return [asyncio.create_task(task) for task in tasks]

    def _engine(self, spec: EngineSpec) -> ProcessSpec:
        settings = self._settings
        if settings.engine in REAL_ENGINES:
            return real_engine(settings, spec, self._controller.url)
        command = (
            *(sys.executable, "-m", "windlass.engines.embedded", "--name", spec.name),
            *("--model", str(settings.model_config_path), "--dtype", spec.dtype),
            *("--tp", str(spec.tensor_parallel_size), "--transport", settings.transport),
            *("--controller", self._controller.url, "--seed", str(settings.seed)),
            *("--max-batch", "64", "--max-positions", "16"),
        )
        return ProcessSpec(name=spec.name, command=command)

    async def _guard(self, spec: ProcessSpec, role: Access, *, restart: bool) -> None:
        """Keep a process running; an end that nobody asked for is an error."""
        tokens = role_environment(self._token, role)
        with_tokens = msgspec.structs.replace(spec, environment={**spec.environment, **tokens})
        while True:
            await self._scheduler.start(with_tokens)
            if self._killed.is_set():
                self._restarted.set()
            status = await self._scheduler.wait(spec.name)
            if restart and status.returncode == -signal.SIGKILL and self._killed.is_set():
                self._note(f"{spec.name} is dead; starting it again")
                continue
            if spec.name == "trainers" and status.returncode == 0:
                await asyncio.Event().wait()  # done; the work task ends the demo
            tail = await self._scheduler.log_tail(spec.name)
            raise WindlassError(f"{spec.name} ended with {status.returncode}; its log:\n{tail}")

    # --- the loop ----------------------------------------------------------------------------

    async def _work(self) -> None:
        settings = self._settings
        names = [engine.name for engine in settings.engines]
        await self._controller.wait_for_fleet(
            num_trainers=settings.num_trainers, engines=names, deadline_s=settings.start_deadline_s
        )
        producer = asyncio.create_task(self._produce())
        try:
            for step in range(settings.steps):
                if step == settings.steps - 1 and settings.kill_engine_at:
                    await self._wait_for_the_killed(names)
                await self._step(step)
            await self._controller.wait_for_version(
                settings.steps, engines=names, deadline_s=self._turn_deadline_s
            )
        finally:
            producer.cancel()
            await asyncio.gather(producer, return_exceptions=True)

    async def _wait_for_the_killed(self, names: Sequence[str]) -> None:
        """It must be back before the last version goes out: its peers hold other dtypes.

        Batches are put ahead of training, so that it may live still when this is called.
        """
        settings = self._settings
        try:
            async with asyncio.timeout(self._turn_deadline_s):
                await self._restarted.wait()
        except TimeoutError:
            raise PeerTimeout(
                f"demo: nothing was killed in an update to version {settings.kill_engine_at} "
                f"within {self._turn_deadline_s} s"
            ) from None
        await self._controller.wait_for_fleet(
            num_trainers=settings.num_trainers, engines=names, deadline_s=settings.start_deadline_s
        )

    @property
    def _turn_deadline_s(self) -> float:
        """Of what waits for a trainer: it may have to start first, then it makes a step."""
        return self._settings.start_deadline_s + self._settings.step_deadline_s

    async def _produce(self) -> None:
        """Prompts as fast as the staleness bound admits them."""
        settings, rollouts = self._settings, self._controller.rollouts
        generator = random.Random(settings.seed)  # noqa: S311 - prompts, not secrets
        sampling = SamplingParams(max_new_tokens=settings.max_new_tokens, ignore_eos=True)
        while True:
            await rollouts.wait_for_room(deadline_s=self._turn_deadline_s)
            rollouts.submit_group(sample_prompt(generator), settings.samples_per_prompt, sampling)

    async def _step(self, step: int) -> None:
        controller, record = self._controller, self._record
        await controller.batches.requested(step, deadline_s=self._turn_deadline_s)
        groups = await controller.rollouts.next_batch(
            self._settings.prompts_per_step, deadline_s=self._settings.step_deadline_s
        )
        scored = [
            training_samples(
                group, [reward(group.prompt_ids, r.output_ids) for r in group.rollouts]
            )
            for group in groups
        ]
        samples = [sample for group in scored for sample in group]
        version = controller.coordinator.published_version
        record.add_step(
            [sample.reward for sample in samples],
            [version - min(sample.versions) for sample in samples],
        )
        self._served += samples
        await controller.batches.put(step, scored)
        self._show(controller)

    # --- what happens ------------------------------------------------------------------------

    def _on_update(self, report: UpdateReport) -> None:
        self._record.add_update(report)
        for name, reason in report.left_out.items():
            self._note(f"version {report.version} went on without {name}: {reason}")
        self._show(self._controller)

    def _on_phase(self, version: int, phase: Phase) -> None:
        wanted = self._settings.kill_engine_at
        if wanted and version == wanted and phase is Phase.WRITE and not self._killed.is_set():
            victim = self._settings.engines[-1].name
            self._killed.set()
            self._note(f"kill -9 {victim} in the middle of the update to version {version}")
            kill = self._scheduler.signal(victim, signal.SIGKILL)
            self._kill_task = asyncio.ensure_future(kill)

    def _note(self, event: str) -> None:
        self._record.events.append(event)
        self._show(self._controller)

    def _count_rollouts(self) -> None:
        self._record.rollouts = msgspec.to_builtins(self._controller.rollouts.stats())
        serving = {e.name for e in self._controller.coordinator.routable()}
        for engine in self._settings.engines:
            if engine.name not in serving:
                self._record.missing_engines.append(engine.name)


def _scheduler_config(settings: DemoSettings) -> SchedulerConfig:
    match settings.scheduler:
        case SchedulerKind.LOCAL:
            return LocalSchedulerConfig()
        case SchedulerKind.SLURM:
            return SlurmSchedulerConfig(host="127.0.0.1")
        case SchedulerKind.RAY:
            # More processes than a laptop has cores; they take turns as they do without Ray.
            return RaySchedulerConfig(num_cpus=len(settings.engines) + 2)


def _shower(
    settings: DemoSettings, record: DemoRecord, live: Live | None, console: Console
) -> Callable[[windlass.Controller], None]:
    printed = 0
    last_version = -1

    def show(controller: windlass.Controller) -> None:
        nonlocal printed, last_version
        if live is not None:
            engines = controller.coordinator.routable()
            outstanding = controller.rollouts.stats().outstanding
            live.update(render(settings, record, engines, outstanding), refresh=True)
            return
        for event in record.events[printed:]:
            console.print(event, style="yellow", highlight=False)
        printed = len(record.events)
        row = record.updates[-1] if record.updates else None
        if row is not None and row.version != last_version:
            last_version = row.version
            reward_text = f"{record.rewards[-1]:.3f}" if record.rewards else "  -  "
            console.print(
                f"version {row.version:3d}  reward {reward_text}  {row.nbytes:,} bytes  "
                f"wire {row.wire_s * 1e3:6.2f} ms  update {row.update_s * 1e3:6.1f} ms  "
                f"pause {row.pause_s * 1e3:6.1f} ms  {row.gbps:5.2f} GB/s",
                highlight=False,
                soft_wrap=True,
            )

    return show


def _summarise(settings: DemoSettings, record: DemoRecord, console: Console) -> int:
    problems = record.problems()
    first = record.rewards[0] if record.rewards else 0.0
    last = record.rewards[-1] if record.rewards else 0.0
    torn = record.torn
    detected = torn.control_detected if torn else None
    shown = "not known" if detected is None else f"{100 * detected:.0f} %"
    console.print(
        f"\n{len(record.updates)} versions published, reward {first:.3f} -> {last:.3f}, "
        f"{torn.torn if torn else '?'} torn of {torn.checked if torn else '?'} answers "
        f"(a wrong version would have shown in: {shown}), "
        f"{record.rollouts.get('lost')} lost, {record.wall_s:.0f} s",
        highlight=False,
    )
    console.print(f"picture and logs: {settings.directory}/", highlight=False)
    for problem in problems:
        console.print(f"PROBLEM: {problem}", style="red", highlight=False)
    return 1 if problems else 0
