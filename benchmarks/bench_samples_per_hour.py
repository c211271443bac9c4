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
import shutil
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from harness import Row, report
from windlass.cli.commands import demo
from windlass.jobs.demo.own_transfer import TRANSFERS, OwnTransfer, Routes, run_own_transfer
from windlass.jobs.demo.recipe import DemoRecipe
from windlass.jobs.demo.run import check_demo, make_directory, prepare_server
from windlass.jobs.schedulers.local import visible_gpus
from windlass.jobs.train_controller import TrainController

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


async def ipc(routes: Routes, trainers: TrainController, _folder: Path, version: int) -> float:
    """Send by vLLM's weight transfer over CUDA IPC."""
    paused = time.monotonic()
    await routes.pause_vllm()
    await routes.post("/start_weight_update")
    await trainers.call("ipc", routes.url, deadline_s=DEADLINE_S)
    await routes.post("/finish_weight_update")
    await routes.resume_vllm(version)
    return paused


async def connect_ipc(routes: Routes, _trainers: TrainController) -> None:
    await routes.post("/init_weight_transfer_engine", {"init_info": {}})


INSECURE = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
DISK = TRANSFERS["vllm", "disk"]
THEIRS = {
    "disk": DISK,
    "ipc": OwnTransfer(
        title="vLLM's weight transfer over CUDA IPC",
        send=ipc,
        connect=connect_ipc,
        arguments=("--weight-transfer-config", json.dumps({"backend": "ipc"})),
        environment=INSECURE,
        server_environment={
            **DISK.server_environment,
            **INSECURE,
            "WINDLASS_OPEN_ROUTES": "/update_weights",
        },
    ),
}


async def theirs(way: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the same job with vLLM's own updates, which keep running requests."""
    made = argparse.ArgumentParser()
    demo.add_arguments(made)
    words = [*job_words(options, folder), "--pause-mode", "in_place"]
    job = demo.demo_config(made.parse_args(words))
    await asyncio.to_thread(check_demo, job)
    make_directory(job)
    await asyncio.to_thread(prepare_server, job)
    found = await run_own_transfer(job, DemoRecipe(), THEIRS[way], HERE / "own_transfer_trainer.py")
    return {
        **msgspec.to_builtins(found.pace),
        "torn": found.torn.torn,
        "problems": [f"lost {found.lost}"] if found.lost else [],
    }


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
        except Exception as error:  # noqa: BLE001 - run the other ways too
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
    made.add_argument("--ways", nargs="+", choices=[*OURS, *THEIRS], default=[*OURS, "disk"])
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
