"""Samples per hour of one asynchronous job, with Windlass's updates and with vLLM's own, in the same run.

The job is the demo's: GRPO from scratch, FSDP2 trainers, an unmodified vLLM, a rollout controller and a worker process. Model,
batches, staleness and checks are the same for all ways of updating: Windlass (`in_place`, `staged`) and vLLM's own. `disk`: rank 0
gathers and writes a safetensors file to shared memory; `/pause?mode=keep`, `reload_weights`, `/resume`. `ipc`, on a GPU: vLLM's weight
transfer backend between two processes on one GPU, packed. Every trained answer is compared with the trainer's weights of its versions.

    python benchmarks/bench_samples_per_hour.py --json FILE [--device cuda] [--steps 30] [--model FILE] [--max-new-tokens 8]
        [--ways in_place staged disk ipc] [--logs FOLDER]

The server's environment is WINDLASS_VLLM_VENV, or this interpreter's environment if it contains vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import json
import os
import platform
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from harness import Row, report
from windlass.cli.commands import demo
from windlass.engines.http import EngineHttp
from windlass.engines.private_routes import saved_key
from windlass.engines.spec import ENGINES, EngineOptions
from windlass.jobs.config import LaunchConfig
from windlass.jobs.demo.checker import check_served
from windlass.jobs.demo.recipe import DemoRecipe, PaceClock
from windlass.jobs.demo.run import check_demo, make_directory, prepare_server
from windlass.jobs.recipe import in_thread, score
from windlass.jobs.schedulers.base import ProcessSpec
from windlass.jobs.schedulers.local import LocalScheduler, visible_gpus
from windlass.jobs.train_controller import TrainController
from windlass.net.access import Access, role_environment
from windlass.net.server import ControlServer
from windlass.rollout import (
    BatchQueue,
    RolloutController,
    StalenessPolicy,
    StaticEngines,
    mount_rollout_routes,
)
from windlass.rollout.messages import TrainingSample

HERE = Path(__file__).resolve().parent
OURS = ("in_place", "staged")
DEADLINE_S = 300.0


async def ours(mode: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the job with `windlass demo`."""
    told = folder.with_suffix(".json")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "windlass.cli.main", "demo", "--plain", "--mode", mode),
        *("--json", str(told), *job_words(options, folder)),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        status = await process.wait()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            await process.wait()
    if not told.exists():
        raise RuntimeError(f"windlass demo --mode {mode} ended with {status}")
    found: dict[str, Any] = json.loads(told.read_text())
    return {**found["pace"], "torn": found["torn"], "problems": found["problems"]}


def job_words(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the options of `windlass demo` for this job."""
    return [
        *("--engine", "vllm", "--device", options.device, "--steps", str(options.steps)),
        *("--output", str(folder), *(("--model", str(options.model)) if options.model else ())),
        *("--max-new-tokens", str(options.max_new_tokens)),
    ]


class Server:
    """Client of vLLM's own routes."""

    def __init__(self, url: str) -> None:
        self.url, self._http = url, EngineHttp(url, saved_key(url))

    async def post(self, path: str, **body: object) -> None:
        await asyncio.to_thread(self._http.post, path, body, DEADLINE_S)

    async def rpc(self, method: str, *args: object, **kwargs: object) -> None:
        await self.post("/collective_rpc", method=method, args=args, kwargs=kwargs)


Transfer = Callable[[Server, TrainController, Path], Awaitable[float]]
"""Function that sends the trainers' weights to the engine and returns the time of the pause command."""


async def disk(server: Server, trainers: TrainController, folder: Path) -> float:
    await trainers.call("save", str(folder / "model.safetensors"), deadline_s=DEADLINE_S)
    paused = time.monotonic()
    await server.post("/pause?mode=keep&clear_cache=false")
    await server.rpc("reload_weights", weights_path=str(folder))
    return paused


async def ipc(server: Server, trainers: TrainController, _folder: Path) -> float:
    paused = time.monotonic()
    await server.post("/pause?mode=keep&clear_cache=false")
    await server.post("/start_weight_update")
    await trainers.call("ipc", server.url, deadline_s=DEADLINE_S)
    await server.post("/finish_weight_update")
    return paused


TRANSFERS: dict[str, Transfer] = {"disk": disk, "ipc": ipc}


async def theirs(way: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the same job with vLLM's own updates."""
    made = argparse.ArgumentParser()
    demo.add_arguments(made)
    job = demo.demo_config(made.parse_args(job_words(options, folder)))
    await asyncio.to_thread(check_demo, job)
    make_directory(job)
    await asyncio.to_thread(prepare_server, job)
    token, rollout = secrets.token_hex(8), job.rollout
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
        await asyncio.to_thread(copy_configs, Path(job.engines[0].model), shared)
        scheduler = LocalScheduler(folder / "logs", dict(job.environment), watched=True)
        await stack.enter_async_context(scheduler)
        rollouts = await stack.enter_async_context(RolloutController(engines, policy, token=token))
        control = ControlServer(host="127.0.0.1", port=0, token=token)
        mount_rollout_routes(control, rollouts, BatchQueue())
        trainer = job.trainer
        trainers = TrainController(
            scheduler,
            command=(sys.executable, str(HERE / "own_transfer_trainer.py"), *trainer.arguments),
            world_size=trainer.world_size,
            token=token,
            num_gpus=trainer.num_gpus,
            environment={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
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
        await trainers.start(control.url, deadline_s=DEADLINE_S)
        server = Server(await start_server(job, way, token, folder, stack))
        if way == "ipc":
            await server.post("/init_weight_transfer_engine", init_info={})
        await rollouts.wait_for_workers(1, deadline_s=DEADLINE_S)
        clock, served = await train(job, way, server, shared, rollouts, trainers, engines)
        lost = rollouts.stats().lost
    torn = await asyncio.to_thread(
        check_served,
        served,
        range(job.steps + 1),
        model_config=Path(trainer.arguments[0]),
        versions_dir=folder / "versions",
        dtypes={"engine-a": "bfloat16"},
        context_is_kept=True,
        device=options.device,
    )
    return {
        **msgspec.to_builtins(clock.pace()),
        "torn": torn.torn,
        "problems": [f"lost {lost}"] if lost else [],
    }


def copy_configs(model: Path, folder: Path) -> None:
    for file in model.glob("*.json"):
        shutil.copy(file, folder)


async def start_server(
    job: LaunchConfig, way: str, token: str, folder: Path, stack: AsyncExitStack
) -> str:
    """Start the demo's engine without a fleet; return its address once it serves."""
    section, spec = job.engines[0], ENGINES.find("vllm")
    of_ipc = ("--weight-transfer-config", json.dumps({"backend": "ipc"}))
    options = EngineOptions(
        name=section.name,
        model=section.model,
        port=section.port,
        arguments=(*section.arguments, *(of_ipc if way == "ipc" else ())),
        python=section.python,
    )
    gpus = {"CUDA_VISIBLE_DEVICES": visible_gpus()[-1]} if section.num_gpus else {}
    log = stack.enter_context((folder / "logs" / "engine-a.log").open("wb"))
    process = await asyncio.create_subprocess_exec(
        *spec.command(options),
        env={
            **os.environ,
            **job.environment,
            **section.environment,
            **gpus,
            "WINDLASS_TOKEN": token,
            "WINDLASS_VLLM_OWN_VERSIONS": "1",
            "WINDLASS_OPEN_ROUTES": "/update_weights",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1" if way == "ipc" else "0",
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
    )

    async def end() -> None:
        if process.returncode is None:
            process.terminate()
        await process.wait()

    stack.push_async_callback(end)
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
    if not line:
        raise RuntimeError(f"{way}: the server ended; see {folder / 'logs'}")
    url: str = json.loads(line)["url"]
    return url


async def train(
    job: LaunchConfig, way: str, server: Server, shared: Path, rollouts: RolloutController,
    trainers: TrainController, engines: StaticEngines,
) -> tuple[PaceClock, list[TrainingSample]]:  # fmt: skip
    """Draw, score, train and update, as in `windlass.jobs.launch`."""
    clock, rollout, recipe = PaceClock(), job.rollout, DemoRecipe()
    served: list[TrainingSample] = []

    async def update(version: int) -> None:
        began = time.monotonic()
        paused = await TRANSFERS[way](server, trainers, shared)
        await server.rpc("windlass_set_version", version)
        await server.post("/resume")
        ended = time.monotonic()
        engines.set([("engine-a", server.url, version)])
        clock.updated(ended - began, ended - paused)

    async def produce() -> None:
        for task in recipe.tasks():
            await rollouts.wait_for_room(deadline_s=DEADLINE_S)
            rollouts.submit_group(task.prompt_ids, rollout.samples_per_group, rollout.sampling)

    await update(0)
    producer = asyncio.create_task(produce())
    try:
        for step in range(job.steps):
            groups = await rollouts.next_batch(rollout.groups_per_step, deadline_s=DEADLINE_S)
            batch = [await in_thread("samples", partial(score, recipe, group)) for group in groups]
            samples = [sample for group in batch for sample in group]
            served += samples
            clock.stepping(samples, step)
            await trainers.train_step(step, batch, deadline_s=DEADLINE_S)
            await update(step + 1)
    finally:
        producer.cancel()
        await asyncio.gather(producer, return_exceptions=True)
    return clock, served


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for way in options.ways:
        place = folder / way
        run = partial(ours, way) if way in OURS else partial(theirs, way)
        try:
            async with asyncio.timeout(options.way_s):
                found[way] = await run(options, place)
        except TimeoutError:
            found[way] = {"failed": f"did not end within {options.way_s:.0f} s"}
        except Exception as error:  # noqa: BLE001 - the other ways are told all the same
            found[way] = {"failed": f"{type(error).__name__}: {error}"[:3000]}
        print(f"{way}: {json.dumps(found[way])}", flush=True)
        if options.logs and (place / "logs").exists():
            shutil.copytree(place / "logs", options.logs / way, dirs_exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        write(options, found)
    return found


def main() -> int:
    made = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    made.add_argument("--json", type=Path, metavar="FILE")
    made.add_argument("--logs", type=Path, metavar="FOLDER")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--steps", type=int, default=30)
    made.add_argument(
        "--way-s", type=float, default=300.0, help="deadline of one way, including its start"
    )
    made.add_argument("--model", type=Path)
    made.add_argument("--max-new-tokens", type=int, default=8)
    made.add_argument("--ways", nargs="+", choices=[*OURS, *TRANSFERS], default=[*OURS, "disk"])
    options = made.parse_args()
    os.environ["WINDLASS_VLLM_OWN_VERSIONS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(measure(options, Path(name)))
    return 1 if any(each.get("failed") or each["problems"] for each in found.values()) else 0


def write(options: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    """Print the table, and write it with a description of the machine."""
    ended = {way: each for way, each in found.items() if "failed" not in each}
    reference = next((way for way in reversed(options.ways) if way in ended), "")
    rows = [
        Row(way, metric, each[metric], unit, reference, ended[reference][metric], ratio=each[metric] / (ended[reference][metric] or 1))
        for way, each in ended.items()
        for metric, unit in (
            ("samples_per_hour", "1/h"), ("tokens_per_s", "1/s"), ("mean_staleness", "versions"),
            ("paused_share", ""), ("idle_share", ""), ("step_share", ""),
        )
    ]  # fmt: skip
    report(rows, None, "The same job with Windlass and with vLLM's own updates")
    if options.json is not None:
        on_gpu = options.device == "cuda"
        where = {
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            "device": torch.cuda.get_device_name(0) if on_gpu else platform.processor() or "cpu",
            "num_gpus": len(visible_gpus()) if on_gpu else 0,
            "num_cores": os.cpu_count(),
            "torch": torch.__version__,
            "steps": options.steps,
            "max_new_tokens": options.max_new_tokens,
            "model": str(options.model.name) if options.model else "the demo's",
        }
        told = {"where": where, "ways": found, "rows": [msgspec.to_builtins(row) for row in rows]}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
