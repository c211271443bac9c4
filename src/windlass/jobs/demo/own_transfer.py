"""The demo's job with the engine's own weight transfer in place of Windlass's updates, for `windlass demo --compare`.

The job has the same trainer, samples, batches, staleness bound, pause mode and check. Only the updates differ: the trainers
gather their weights, and the engine loads them by its own routes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import final

import msgspec
from msgspec.structs import replace

from windlass.config import PauseMode
from windlass.engines.http import EngineHttp
from windlass.engines.private_routes import saved_key
from windlass.engines.spec import ENGINES, EngineOptions
from windlass.envs import inherited_environment
from windlass.errors import PeerTimeout, WindlassError
from windlass.jobs.config import LaunchConfig
from windlass.jobs.demo.checker import TornReport, check_served
from windlass.jobs.demo.recipe import DemoRecipe, Pace, PaceClock
from windlass.jobs.recipe import in_thread, score
from windlass.jobs.schedulers.base import ProcessSpec
from windlass.jobs.schedulers.local import LocalScheduler, visible_gpus
from windlass.jobs.train_controller import TrainController
from windlass.net.access import Access, role_environment
from windlass.net.addresses import free_port
from windlass.net.server import ControlServer
from windlass.rollout import (
    BatchQueue,
    RolloutController,
    StalenessPolicy,
    StaticEngines,
    mount_rollout_routes,
)
from windlass.rollout.messages import TrainingSample

SCRIPT = Path(__file__).parent / "own_transfer_trainer.py"
"""Script of the trainer ranks."""
DEADLINE_S = 300.0
"""Longest time of a request to the server, a call of the trainers, or a wait for rollouts."""
DTYPE = "bfloat16"
"""Dtype of the engine's weights, and of the weights that the trainers send."""


@final
class Routes:
    """Client of a server's own routes.

    Attributes:
        url: address of the server.
        mode: pause mode of the job.
    """

    def __init__(self, url: str, mode: PauseMode) -> None:
        self.url, self.mode = url, mode
        self._http = EngineHttp(url, saved_key(url))

    @property
    def keeps(self) -> bool:
        """Whether running requests keep their KV cache across an update."""
        return self.mode is PauseMode.IN_PLACE

    async def post(self, path: str, body: Mapping[str, object] = MappingProxyType({})) -> None:
        """Post JSON to a route of the server and wait for the answer, at most `DEADLINE_S`."""
        await asyncio.to_thread(self._http.post, path, dict(body), DEADLINE_S)

    async def rpc(self, method: str, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Call a method of all vLLM workers, over the route `/collective_rpc`."""
        await self.post("/collective_rpc", {"method": method, "args": args, "kwargs": kwargs})

    async def pause_vllm(self) -> None:
        """Pause vLLM in the job's pause mode."""
        words = "mode=keep&clear_cache=false" if self.keeps else "mode=abort"
        await self.post(f"/pause?{words}")

    async def resume_vllm(self, version: int) -> None:
        """Set the version that vLLM stamps on later tokens, and resume vLLM."""
        await self.rpc("windlass_set_version", [version], {})
        await self.post("/resume")


Send = Callable[[Routes, TrainController, Path, int], Awaitable[float]]
"""Function that sends a version's weights to the engine, which serves them afterwards. Returns the monotonic time
before the pause command. Arguments: the routes, the trainers, a folder in memory, and the version."""
Connect = Callable[[Routes, TrainController], Awaitable[None]]
"""Function that connects trainers and engine once, before the first update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTransfer:
    """An engine's own weight transfer.

    Attributes:
        title: name for display.
        send: see `Send`.
        connect: see `Connect`; None if no connection is needed.
        arguments: additional arguments of the server.
        environment: additional environment variables of the trainers.
        server_environment: additional environment variables of the server.
    """

    title: str
    send: Send
    connect: Connect | None = None
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    server_environment: Mapping[str, str] = field(default_factory=dict)


async def _save(trainers: TrainController, folder: Path) -> None:
    """Let the trainers write the weights of the whole model into a file of the folder."""
    await trainers.call("save", str(folder / "model.safetensors"), deadline_s=DEADLINE_S)


async def vllm_disk(routes: Routes, trainers: TrainController, folder: Path, version: int) -> float:
    """Let the trainers write a file and vLLM load it with `reload_weights`. For arguments and result see `Send`."""
    await _save(trainers, folder)
    paused = time.monotonic()
    await routes.pause_vllm()
    await routes.rpc("reload_weights", [], {"weights_path": str(folder)})
    await routes.resume_vllm(version)
    return paused


async def sglang_disk(
    routes: Routes, trainers: TrainController, folder: Path, version: int
) -> float:
    """Let the trainers write a file and SGLang load it by `/update_weights_from_disk`. For arguments, see `Send`."""
    await _save(trainers, folder)
    paused = time.monotonic()
    await routes.post("/pause_generation", {"mode": str(routes.mode)})
    await routes.post(
        "/update_weights_from_disk",
        {
            "model_path": str(folder),
            "weight_version": str(version),
            "abort_all_requests": False,
            "flush_cache": not routes.keeps,
        },
    )
    await routes.post("/continue_generation")
    return paused


async def _names_and_shapes(trainers: TrainController) -> list[tuple[str, list[int]]]:
    """Return name and shape of each weight, in the order in which the trainers send them."""
    found = await trainers.call("shapes", None, deadline_s=DEADLINE_S)
    return msgspec.convert(found[0], list[tuple[str, list[int]]])


async def _meet(
    trainers: TrainController, engine: str, port: int, joining: Callable[[], Awaitable[None]]
) -> None:
    """Create an NCCL group of trainer rank 0 and one engine rank.

    Args:
        trainers: the trainer ranks.
        engine: kind of the engine.
        port: free port for the group's TCP store.
        joining: function that lets the engine join the group.
    """
    await asyncio.gather(
        trainers.call("own_init", [engine, port, 2], deadline_s=DEADLINE_S), joining()
    )


async def connect_vllm(routes: Routes, trainers: TrainController) -> None:
    """Create the NCCL group of vLLM's weight transfer."""
    port = free_port()
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    await _meet(
        trainers,
        "vllm",
        port,
        partial(routes.post, "/init_weight_transfer_engine", {"init_info": info}),
    )


async def vllm_nccl(
    routes: Routes, trainers: TrainController, _folder: Path, version: int
) -> float:
    """Send the weights in packed buffers with vLLM's own transfer over NCCL. For arguments and result see `Send`."""
    names = await _names_and_shapes(trainers)
    paused = time.monotonic()
    await routes.pause_vllm()
    await routes.post("/start_weight_update")
    info = {
        "names": [name for name, _ in names],
        "dtype_names": [DTYPE] * len(names),
        "shapes": [shape for _, shape in names],
        "packed": True,
    }
    await asyncio.gather(
        trainers.call("own_send", "vllm", deadline_s=DEADLINE_S),
        routes.post("/update_weights", {"update_info": info}),
    )
    await routes.post("/finish_weight_update")
    await routes.resume_vllm(version)
    return paused


async def connect_sglang(routes: Routes, trainers: TrainController) -> None:
    """Create the NCCL group of SGLang's updates."""
    port = free_port()
    body = {
        "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2,
        "group_name": "own", "backend": "nccl",
    }  # fmt: skip
    await _meet(trainers, "sglang", port, partial(routes.post, "/init_weights_update_group", body))


async def sglang_nccl(
    routes: Routes, trainers: TrainController, _folder: Path, version: int
) -> float:
    """Broadcast every tensor over NCCL while generation is paused. For arguments and result see `Send`.

    The route `/update_weights_from_distributed` makes the engine receive the tensors.
    """
    names = await _names_and_shapes(trainers)
    paused = time.monotonic()
    await routes.post("/pause_generation", {"mode": str(routes.mode)})
    await asyncio.gather(
        trainers.call("own_send", "sglang", deadline_s=DEADLINE_S),
        routes.post(
            "/update_weights_from_distributed",
            {
                "names": [name for name, _ in names],
                "dtypes": [DTYPE] * len(names),
                "shapes": [shape for _, shape in names],
                "group_name": "own",
                "flush_cache": not routes.keeps,
                "weight_version": str(version),
            },
        ),
    )
    await routes.post("/continue_generation")
    return paused


_OWN_VERSIONS = {"WINDLASS_VLLM_OWN_VERSIONS": "1"}
"""Variable that makes vLLM stamp tokens with the version from `windlass_set_version`."""
TRANSFERS: Mapping[tuple[str, str], OwnTransfer] = {
    ("vllm", "disk"): OwnTransfer(
        title="vLLM's reload_weights from disk", send=vllm_disk, server_environment=_OWN_VERSIONS
    ),
    ("sglang", "disk"): OwnTransfer(title="SGLang's update_weights_from_disk", send=sglang_disk),
    ("vllm", "nccl"): OwnTransfer(
        title="vLLM's weight transfer over NCCL",
        send=vllm_nccl,
        connect=connect_vllm,
        arguments=("--weight-transfer-config", '{"backend": "nccl"}'),
        server_environment={**_OWN_VERSIONS, "WINDLASS_OPEN_ROUTES": "/update_weights"},
    ),
    ("sglang", "nccl"): OwnTransfer(
        title="SGLang's update_weights_from_distributed over NCCL",
        send=sglang_nccl,
        connect=connect_sglang,
        # SGLang sets this for its own ranks, and all ranks of an NCCL group must use the same value.
        environment={"NCCL_CUMEM_ENABLE": "0"},
    ),
}
"""(engine, way) -> transfer."""


def own_transfer_of(config: LaunchConfig) -> OwnTransfer:
    """Return the engine's own transfer for the comparison: over NCCL if possible, otherwise through files.

    NCCL is possible if the engine has its own GPU, because NCCL refuses two ranks on one GPU. The trainers must also be
    able to import the engine's package: it contains the trainers' half of the transfer.
    """
    engine = config.engines[0]
    has_nccl = bool(engine.num_gpus) and importlib.util.find_spec(engine.kind) is not None
    return TRANSFERS[engine.kind, "nccl" if has_nccl else "disk"]


class OwnResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the job with the engine's own transfer.

    Attributes:
        title: name of the transfer.
        update_s: duration of each update after the first.
        pause_s: time from each pause command after the first until the engine has resumed.
        pace: speed of the job.
        torn: result of the check of all answers.
        lost: number of lost rollouts.
    """

    title: str
    update_s: tuple[float, ...]
    pause_s: tuple[float, ...]
    pace: Pace
    torn: TornReport
    lost: int


async def run_own_transfer(
    config: LaunchConfig,
    recipe: DemoRecipe,
    transfer: OwnTransfer,
    script: Path = SCRIPT,
    show: Callable[[str], object] = lambda _: None,
) -> OwnResult:
    """Run the job with the engine's own transfer, and check the engine's answers.

    Args:
        config: job with one engine server. The folder of the model must exist.
        recipe: source of prompts and rewards.
        transfer: transfer of the weights.
        script: script of the trainer ranks, with the operations that `transfer` calls.
        show: function that gets a line about each version.

    Raises:
        WindlassError: a process could not be started, or a deadline passed.
    """
    folder, token, rollout = Path(config.output_dir), secrets.token_hex(16), config.rollout
    trainer, section = config.trainer, config.engines[0]
    await asyncio.to_thread((folder / "versions").mkdir, parents=True, exist_ok=True)
    engines = StaticEngines()
    policy = StalenessPolicy(
        max_staleness=rollout.max_staleness,
        batch_size=rollout.groups_per_step * rollout.samples_per_group,
        max_concurrent=rollout.max_concurrent,
        on_stale=rollout.on_stale,
        max_resubmits=rollout.max_resubmits,
    )
    async with AsyncExitStack() as stack:
        shared = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        await asyncio.to_thread(_copy_configs, Path(section.model), shared)
        scheduler = LocalScheduler(folder / "logs", dict(config.environment), watched=True)
        await stack.enter_async_context(scheduler)
        rollouts = await stack.enter_async_context(RolloutController(engines, policy, token=token))
        control = ControlServer(host="127.0.0.1", port=0, token=token)
        mount_rollout_routes(control, rollouts, BatchQueue())
        trainers = TrainController(
            scheduler,
            command=(sys.executable, str(script), Path(trainer.script).stem, *trainer.arguments),
            world_size=trainer.world_size,
            token=token,
            num_gpus=trainer.num_gpus,
            environment={**trainer.environment, **transfer.environment},
        )
        trainers.mount(control)
        await control.start()
        stack.push_async_callback(control.close)
        stack.push_async_callback(trainers.close)
        worker = ("-m", "windlass.rollout.worker", "--controller", control.url, "--name", "worker")
        await scheduler.start(
            ProcessSpec(
                name="worker",
                command=(sys.executable, *worker),
                environment=role_environment(token, Access.WORKER),
            )
        )
        url, _ = await asyncio.gather(
            _start_server(config, transfer, token, stack),
            trainers.start(control.url, deadline_s=config.start_deadline_s),
        )
        routes = Routes(url, config.update.pause_mode)
        if transfer.connect is not None:
            await transfer.connect(routes, trainers)
        await rollouts.wait_for_workers(1, deadline_s=DEADLINE_S)
        loop = _Loop(config, recipe, rollouts, trainers, engines, show)
        await loop.run(partial(transfer.send, routes, trainers, shared), url)
        lost = rollouts.stats().lost
    torn = await asyncio.to_thread(
        check_served,
        loop.served,
        range(config.steps + 1),
        model_config=Path(trainer.arguments[0]),
        versions_dir=folder / "versions",
        dtypes={section.name: DTYPE},
        context_is_kept=config.update.pause_mode is PauseMode.IN_PLACE,
        device=trainer.arguments[3],
    )
    return OwnResult(
        title=transfer.title,
        update_s=tuple(loop.update_s[1:]),
        pause_s=tuple(loop.pause_s[1:]),
        pace=loop.clock.pace(),
        torn=torn,
        lost=lost,
    )


def _copy_configs(model: Path, folder: Path) -> None:
    """Copy a model's JSON files to the folder of the weights, because SGLang reads them when it loads weights from there."""
    for file in model.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, folder)


async def _start_server(
    config: LaunchConfig, transfer: OwnTransfer, token: str, stack: AsyncExitStack
) -> str:
    """Start the job's engine server without a controller. Return the server's URL as soon as the server is ready.

    Closing `stack` stops the server.

    Raises:
        PeerTimeout: the server does not serve within `start_deadline_s`.
        WindlassError: the server ended.
    """
    section = config.engines[0]
    command = ENGINES.find(section.kind).command(
        EngineOptions(
            name=section.name,
            model=section.model,
            port=section.port,
            arguments=(*section.arguments, *transfer.arguments),
            python=section.python,
        )
    )
    gpus = visible_gpus()
    logs = Path(config.output_dir) / "logs"
    await asyncio.to_thread(logs.mkdir, parents=True, exist_ok=True)
    log = stack.enter_context((logs / f"{section.name}.log").open("wb"))
    process = await asyncio.create_subprocess_exec(
        *command,
        env={
            **inherited_environment(),
            **config.environment,
            **section.environment,
            # Trainers get the first GPUs, so the engine gets the last GPU.
            **({"CUDA_VISIBLE_DEVICES": gpus[-1]} if section.num_gpus else {}),
            **transfer.server_environment,
            "WINDLASS_TOKEN": token,
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
    )

    async def end() -> None:
        if process.returncode is None:
            process.terminate()
        try:
            async with asyncio.timeout(config.shutdown_s):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    stack.push_async_callback(end)
    line = b""
    if process.stdout is not None:
        try:
            async with asyncio.timeout(config.start_deadline_s):
                line = await process.stdout.readline()
        except TimeoutError as error:
            raise PeerTimeout(
                f"--compare: the server {section.name} did not serve within {config.start_deadline_s:g} s; its log is "
                f"in {logs}"
            ) from error
    if not line:
        raise WindlassError(f"--compare: the server {section.name} ended; its log is in {logs}")
    return str(msgspec.json.decode(line, type=dict[str, str])["url"])


@final
class _Loop:
    """The steps of the job, as `windlass.jobs.launch` runs them, with other updates.

    Attributes:
        served: samples that trainers trained on.
        clock: clock of the job's pace.
        update_s, pause_s: durations of all updates.
    """

    def __init__(
        self,
        config: LaunchConfig,
        recipe: DemoRecipe,
        rollouts: RolloutController,
        trainers: TrainController,
        engines: StaticEngines,
        show: Callable[[str], object],
    ) -> None:
        self._config, self._recipe, self._rollouts = config, recipe, rollouts
        self._trainers, self._engines, self._show = trainers, engines, show
        self.clock = PaceClock()
        self.served: list[TrainingSample] = []
        self.update_s: list[float] = []
        self.pause_s: list[float] = []

    async def run(self, send: Callable[[int], Awaitable[float]], url: str) -> None:
        """Publish version 0. Then, for each step, wait for groups, score them, train on them and publish a version.

        Args:
            send: function that sends a version to the engine, and returns the monotonic time before the pause command.
            url: URL of the engine's server.
        """
        rollout, recipe = self._config.rollout, self._recipe
        await self._update(send, url, 0)
        producer = asyncio.create_task(self._produce())
        try:
            for step in range(self._config.steps):
                groups = await self._rollouts.next_batch(
                    rollout.groups_per_step, deadline_s=DEADLINE_S
                )
                batch = [
                    await in_thread("samples", partial(score, recipe, group)) for group in groups
                ]
                samples = [sample for group in batch for sample in group]
                self.served += samples
                self.clock.stepping(samples, step)
                await self._trainers.train_step(step, batch, deadline_s=DEADLINE_S)
                await self._update(send, url, step + 1)
        finally:
            producer.cancel()
            await asyncio.gather(producer, return_exceptions=True)

    async def _update(
        self, send: Callable[[int], Awaitable[float]], url: str, version: int
    ) -> None:
        """Send a version to the engine, let rollouts use it, and record and show the times. For arguments see `run`."""
        began = time.monotonic()
        paused = await send(version)
        ended = time.monotonic()
        self._engines.set([(self._config.engines[0].name, url, version)])
        self.update_s.append(ended - began)
        self.pause_s.append(ended - paused)
        self.clock.updated(ended - began, ended - paused)
        self._show(
            f"v{version:<3d} update {1e3 * (ended - began):6.1f}  pause {1e3 * (ended - paused):6.1f} ms"
        )

    async def _produce(self) -> None:
        """Submit the recipe's tasks without end, each as soon as the staleness bound admits it."""
        rollout = self._config.rollout
        for task in self._recipe.tasks():
            await self._rollouts.wait_for_room(deadline_s=DEADLINE_S)
            self._rollouts.submit_group(
                task.prompt_ids, rollout.samples_per_group, rollout.sampling
            )


def own_config(config: LaunchConfig) -> LaunchConfig:
    """Return the configuration of the second job, which uses the engine's own transfer.

    The second job's output folder is `own` in the first job's output folder, and its trainers save versions there. Its
    engines get new free ports. Everything else is as in `config`, the first job.
    """
    folder = Path(config.output_dir) / "own"
    source, _, *others = config.trainer.arguments
    return replace(
        config,
        output_dir=str(folder),
        trainer=replace(config.trainer, arguments=(source, str(folder / "versions"), *others)),
        engines=tuple(replace(engine, port=free_port()) for engine in config.engines),
    )


def comparison(recipe: DemoRecipe, own: OwnResult, title: str, torn: int) -> list[str]:
    """Return the lines of a table that compares both jobs.

    Args:
        recipe: recipe of the job with Windlass, with its measurements.
        own: result of the job with the engine's own transfer.
        title: heading of the column for the job with Windlass.
        torn: number of torn answers of the job with Windlass.
    """
    updates = recipe.updates[1:]

    def median(seconds: Sequence[float]) -> str:
        return f"{1e3 * statistics.median(seconds):,.1f} ms"

    pace = recipe.clock.pace()
    rows = [
        ("", title, own.title),
        ("update, median", median([u.update_s for u in updates]), median(own.update_s)),
        ("pause, median", median([u.pause_s for u in updates]), median(own.pause_s)),
        ("samples per hour", f"{pace.samples_per_hour:,.0f}", f"{own.pace.samples_per_hour:,.0f}"),
        ("torn answers", str(torn), str(own.torn.torn)),
    ]
    widths = [max(len(each[column]) for each in rows) for column in range(3)]
    return [
        "  ".join(
            (each[0].ljust(widths[0]), each[1].rjust(widths[1]), each[2].rjust(widths[2]))
        ).rstrip()
        for each in rows
    ]
