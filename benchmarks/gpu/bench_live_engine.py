"""Updates of a live engine under load, by Windlass and by the engine's own NCCL weight transfer.

    python benchmarks/gpu/bench_live_engine.py --engine vllm --json FILE [--model qwen3-32b] [--cuda-graphs]
        [--quantization fp8-block]

Half of the GPUs serve (tensor parallel) and half train. The trainers are FSDP2 ranks with a Qwen3 model in
transformers' own layout, or Megatron-core ranks (TP and EP over all of them). They rewrite every weight before each
update. Clients stream tokens all the time, and the benchmark measures the cost of an update at the clients: the longest
gap of each stream around the update, compared with the usual time between two tokens; and the rate of tokens during the
wire phase, compared with the rate before it, at two budgets of the trainers' multiprocessors. At the end both ways
deliver the same weights. Every tensor of the engine must then have the same fingerprint, and the tokens must be equal.

With `--quantization fp8-block` the engine starts from a checkpoint in block float8, and the trainers, in bfloat16,
quantise while they store. At the end the engine's own function quantises the full bfloat16 weights; a fresh server that
loads them must have the same bytes and give the same tokens. With fewer GPUs than ranks the trainers share the GPUs of
the engine, and times mean little. `--on-cpu` tests a run without GPUs, with an engine built for CPUs; its figures are
meaningless.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from live_engine.checks import Held, compare, require_fresh, save, settle
from live_engine.measure import measure
from live_engine.report import capture_rows, case_of, plan_of
from live_engine.servers import (
    ENGINES,
    ServerSettings,
    Sglang,
    Vllm,
    VllmWithNccl,
    start_server,
    tail,
)
from live_engine.shapes import (
    SHAPES,
    checkpoint_entries,
    write_checkpoint,
    write_config,
    write_model_folder,
)
from live_engine.surroundings import TOKEN
from live_engine.trainers import TRAINERS, Trainers

import windlass
from harness import Row, parser, report
from harness import save as save_rows
from windlass.config import ControlConfig, PauseMode

LATER_VERSION = 100


async def run(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        quantised = options.quantization == "fp8-block"
        started, plain, saved = (Path(folder) / name for name in ("started", "plain", "saved"))
        write_folders(options, started, plain, saved)
        entries = checkpoint_entries(options.model, quantised=quantised)
        nbytes = sum(entry[3] for entry in entries)
        num_devices = torch.cuda.device_count()
        shared = options.tp + options.trainers > num_devices
        devices = devices_of(options)
        say(f"{num_devices} GPUs, trainers on {devices}; an update is {nbytes / 1e9:.3f} GB")
        if not options.on_cpu:
            os.environ.update(ENGINES[options.engine].environment)
        trainers = Trainers(options.trainer, devices, f"{folder}/store", str(plain))
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600))
        process = None
        ours: Held = ([], [])
        log = options.log
        server = ENGINES[options.engine](server_settings(options, options.port), session)
        port, used = 0, 0
        stages = plan_of(options)
        try:
            for number, stage in enumerate(stages):
                config = ControlConfig(mode=stage.mode, pause_mode=PauseMode.IN_PLACE)
                async with windlass.Controller(
                    token=TOKEN, config=config, journal_path=Path(folder) / "journal", port=port
                ) as controller:
                    port = int(controller.url.rsplit(":", 1)[1])
                    if process is None:
                        process = await bring_up(
                            options, server, trainers, (started, controller.url, shared), say
                        )
                    elif stage.num_multiprocessors != used:
                        used = stage.num_multiprocessors
                        await trainers.all("connect", controller.url, used, options.transport)
                    await controller.wait_for_fleet(
                        num_trainers=options.trainers, engines=(options.engine,), deadline_s=120
                    )
                    await update(options, number, server, trainers, rows, nbytes, say)
                    if number + 1 == len(stages):
                        if quantised or options.own:
                            ours = await settle(server, trainers)
                        if quantised:
                            await save(options, trainers, saved, say)
                        elif options.own:
                            server, process = await server_of_own_transfer(
                                options, server, process, started, say
                            )
                            rows += await compare(options, server, trainers, rows, ours, say)
                            save_rows(rows, options.json)
                    elif stages[number + 1].num_multiprocessors != used:
                        await trainers.all("disconnect")
            await trainers.all("end")
            if quantised and process is not None:
                process.terminate()
                await process.wait()
                server = ENGINES[options.engine](
                    server_settings(options, options.port + 1), session
                )
                log = options.log.with_suffix(".fresh.log")
                process = await start_server(server, str(saved), "", log)
                assert process.stdout is not None
                ready = await asyncio.wait_for(process.stdout.readline(), 400)
                assert ready, "the fresh engine did not start"
                require_fresh(ours, (await server.fingerprints(), await server.tokens()), say)
        except Exception:
            say("failed; the end of the engine's log:")
            print(tail(log), flush=True)
            raise
        finally:
            await session.close()
            if process is not None and process.returncode is None:
                process.terminate()
                await process.wait()
            for rank in trainers.processes:
                rank.kill()
    return rows


async def server_of_own_transfer(
    options: argparse.Namespace,
    server: Vllm | Sglang,
    process: asyncio.subprocess.Process,
    folder: Path,
    say: Any,
) -> tuple[Vllm | Sglang, asyncio.subprocess.Process]:
    """Return a server that accepts the engine's own transfer; for vLLM end the given server and start another."""
    if isinstance(server, Sglang):
        return server, process
    process.terminate()
    await process.wait()
    plain = VllmWithNccl(server_settings(options, options.port + 1), server.session)
    started = await plain.start(str(folder), options.log.with_suffix(".nccl.log"), 400)
    say("a plain server with vLLM's own transfer is up")
    return plain, started


def devices_of(options: argparse.Namespace) -> list[int]:
    """Return the GPU of each trainer rank; -1 for none."""
    if options.on_cpu:
        return [-1] * options.trainers
    return [(options.tp + i) % torch.cuda.device_count() for i in range(options.trainers)]


def server_settings(options: argparse.Namespace, port: int) -> ServerSettings:
    """Return the settings of a server on `port`."""
    return ServerSettings(
        engine=options.engine,
        port=port,
        tp=options.tp,
        transport=options.transport,
        with_weights=options.from_checkpoint or options.quantization == "fp8-block",
        streams=options.load,
        engine_memory=options.engine_memory,
        cuda_graphs=options.cuda_graphs,
        on_cpu=options.on_cpu,
        python=options.python,
    )


def write_folders(options: argparse.Namespace, started: Path, plain: Path, saved: Path) -> None:
    """Write the engine's checkpoint, the trainers' configuration and, if quantised, the final configuration."""
    write_config(options.model, plain, quantised=False)
    if options.quantization == "fp8-block":
        write_config(options.model, started, quantised=True)
        write_config(options.model, saved, quantised=True)
    elif options.from_checkpoint:
        # Use the trainers' GPU, because the engine needs nearly all memory of its own GPU.
        last = torch.cuda.device_count() - 1
        device = torch.device("cpu") if options.on_cpu else torch.device("cuda", last)
        write_checkpoint(options.model, started, device)
    else:
        write_model_folder(options.model, started)


async def update(
    options: argparse.Namespace,
    number: int,
    server: Vllm | Sglang,
    trainers: Trainers,
    rows: list[Row],
    nbytes: int,
    say: Any,
) -> None:
    """Run one stage of the plan, add its rows to `rows` and save them."""
    stage = plan_of(options)[number]
    version = 1 + number * LATER_VERSION
    seconds, _ = (await trainers.all("publish", version))[0]
    say(f"{stage.label}: first version in {seconds:.2f} s, plans and tables included")
    case, at_link_speed = (
        case_of(options, stage, nbytes),
        nbytes / options.trainers / options.ceiling / 1e9,
    )
    if number == 0:
        rows += capture_rows(case, options.log)
        for row in rows:
            say(f"{row.metric} {row.value:.2f} s")
    first = "first version after joining"
    rows.append(Row(case, first, seconds, "s", "bytes at link speed", at_link_speed))
    rows += await measure(options, stage, server, trainers, version + 1, nbytes, say)
    save_rows(rows, options.json)


async def bring_up(
    options: argparse.Namespace,
    server: Vllm | Sglang,
    trainers: Trainers,
    place: tuple[Path, str, bool],
    say: Any,
) -> asyncio.subprocess.Process:
    """Start the server and connect the trainers. `place`: checkpoint, controller, whether both sides share GPUs."""
    folder, url, shared = place
    quantised = options.quantization == "fp8-block"
    # Engines measure the free memory when they start.
    if shared or quantised:
        await trainers.receive()
        await trainers.all("fill", 1)
    if quantised:
        await save(options, trainers, folder, say)
    process = await start_server(server, str(folder), url, options.log)
    try:
        if not (shared or quantised):
            await trainers.receive()
            await trainers.all("fill", 1)
        say("trainers are up")
        await trainers.all("connect", url, 0, options.transport)
        assert process.stdout is not None
        ready = await asyncio.wait_for(process.stdout.readline(), 400)
        assert ready, "the engine did not start"
        say("engine is up, captured and connected")
    except BaseException:
        # The caller does not have the process yet, so it must end here.
        if process.returncode is None:
            process.terminate()
            await process.wait()
        raise
    return process


def options_of(words: list[str]) -> argparse.Namespace:
    options = parser(__doc__ or "")
    options.add_argument("--engine", choices=list(ENGINES), default="vllm")
    options.add_argument("--model", choices=list(SHAPES), default="qwen3-30b-a3b")
    options.add_argument(
        "--cuda-graphs",
        action="store_true",
        help="decode with CUDA graphs, like engines by default",
    )
    options.add_argument(
        "--quantization",
        choices=("none", "fp8-block"),
        default="none",
        help="quantisation of the engine",
    )
    options.add_argument(
        "--from-checkpoint",
        action="store_true",
        help="start the server from a checkpoint in TMPDIR instead of with dummy weights",
    )
    options.add_argument(
        "--layers", type=int, default=0, help="number of layers, if fewer than in the model"
    )
    options.add_argument("--trainer", choices=list(TRAINERS), default="fsdp")
    options.add_argument(
        "--budget", type=int, default=0, help="multiprocessors of a third series of updates"
    )
    options.add_argument(
        "--transport",
        default="",
        help="name or JSON of a transport; default: cuda_ipc, on a CPU cma",
    )
    options.add_argument(
        "--engine-memory",
        type=float,
        default=0.4,
        help="fraction of a GPU, without the shadow copy",
    )
    options.add_argument("--tp", type=int, default=2)
    options.add_argument("--trainers", type=int, default=2)
    options.add_argument("--updates", type=int, default=10, help="number of updates per mode")
    options.add_argument(
        "--in-place-only",
        action="store_true",
        help="no staged mode, which needs memory for a second copy",
    )
    options.add_argument(
        "--own", type=int, default=5, help="number of updates by the engine's own transfer"
    )
    options.add_argument("--load", type=int, default=64, help="number of streams")
    options.add_argument(
        "--warm-up-s", type=float, default=120.0, help="deadline of the first tokens"
    )
    options.add_argument("--port", type=int, default=18123)
    options.add_argument(
        "--ceiling", type=float, default=397.0, help="GB/s of one link (bench_nvlink)"
    )
    options.add_argument("--log", type=Path, default=Path("engine.log"))
    options.add_argument(
        "--on-cpu", action="store_true", help="test run on a CPU, with an engine built for CPUs"
    )
    options.add_argument(
        "--python", default=sys.executable, help="interpreter of the engine's environment"
    )
    parsed = options.parse_args(words)
    parsed.transport = parsed.transport or ("cma" if parsed.on_cpu else "cuda_ipc")
    if parsed.on_cpu and (parsed.quantization != "none" or parsed.budget):
        options.error("--on-cpu: --quantization and --budget need a GPU; leave them out")
    # The engine's own transfer needs NCCL.
    parsed.own = 0 if parsed.on_cpu else parsed.own
    if parsed.layers:
        SHAPES[parsed.model] = replace(SHAPES[parsed.model], layers=parsed.layers)
    return parsed


def main() -> None:
    parsed = options_of(sys.argv[1:])
    report(asyncio.run(run(parsed)), parsed.json, f"updates of a live {parsed.engine} server")


if __name__ == "__main__":
    main()
