"""Comparison of a live engine in block float8 with a fresh one: bytes and tokens, without load and timing.

    python benchmarks/gpu/prove_block_float8.py --engine vllm --json FILE --layers 2

This is a faster variant of `bench_live_engine.py --quantization fp8-block`. Two servers of the same release start
together: the live server, which is updated, and on the trainers' GPUs a fresh server, which loads the expected weights:
the trainers' full bfloat16 weights, quantised by the engine's own function.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_live_engine import devices_of, options_of, server_settings
from live_engine.checks import require_fresh, save
from live_engine.servers import ENGINES, start_server, tail
from live_engine.shapes import SHAPES, checkpoint_entries, write_config
from live_engine.surroundings import TOKEN
from live_engine.trainers import Trainers

import windlass
from harness import Row, median_p95, report
from windlass.config import ControlConfig, PauseMode, UpdateMode

SMALL = {
    "vllm": ("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(2 << 30)),
    "sglang": (),
}
"""Flags for two servers and the trainers on one GPU. Without them vLLM counts all used memory as its own."""


async def prove(options: argparse.Namespace) -> list[Row]:
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    options.quantization = "fp8-block"
    with tempfile.TemporaryDirectory() as folder:
        started, plain, saved = (Path(folder) / name for name in ("started", "plain", "saved"))
        for path in (started, plain, saved):
            write_config(options.model, path, quantised=path is not plain)
        devices = devices_of(options)
        os.environ.update(ENGINES[options.engine].environment)
        trainers = Trainers(options.trainer, devices, f"{folder}/store", str(plain))
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600))
        logs = [options.log, options.log.with_suffix(".fresh.log")]
        servers = [
            ENGINES[options.engine](server_settings(options, options.port + offset), session)
            for offset in (0, 500)
        ]
        processes: list[asyncio.subprocess.Process] = []
        rows: list[Row] = []
        journal = Path(folder) / "journal"
        try:
            await trainers.receive()
            for seed, path in ((7, saved), (1, started)):
                await trainers.all("fill", seed)
                await save(options, trainers, path, say)
            async with controller_of(UpdateMode.IN_PLACE, journal, 0) as controller:
                url = controller.url
                for server, what, path, at in zip(
                    servers, ("live", "fresh"), (started, saved), (url, ""), strict=True
                ):
                    if what == "fresh":
                        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
                    log = logs[len(processes)]
                    flags = SMALL[options.engine]
                    processes.append(await start_server(server, str(path), at, log, flags))
                await trainers.all("connect", url)
                for process, what in zip(processes, ("live", "fresh"), strict=True):
                    assert process.stdout is not None
                    ready = await asyncio.wait_for(process.stdout.readline(), 300)
                    assert ready, f"the {what} engine did not start"
                    say(f"the {what} engine is up")
                await wait(controller, options)
                rows += await publish(options, "in_place", trainers, 1, say)
                before = await servers[0].fingerprints()
            port = int(url.rsplit(":", 1)[1])
            async with controller_of(UpdateMode.STAGED, journal, port) as controller:
                await wait(controller, options)
                rows += await publish(options, "staged", trainers, 101, say)
                held, fresh = [(await s.fingerprints(), await s.tokens()) for s in servers]
            assert held[0] != before, "other weights must be other fingerprints"
            require_fresh(held, fresh, say)
        except Exception:
            for log in logs:
                say(f"failed; the end of {log}:")
                if log.exists():
                    print(tail(log), flush=True)
            raise
        finally:
            await session.close()
            for process in processes:
                if process.returncode is None:
                    process.terminate()
                    await process.wait()
            for rank in trainers.processes:
                rank.kill()
    return rows


def controller_of(mode: UpdateMode, journal: Path, port: int) -> windlass.Controller:
    config = ControlConfig(mode=mode, pause_mode=PauseMode.IN_PLACE)
    return windlass.Controller(token=TOKEN, config=config, journal_path=journal, port=port)


async def wait(controller: windlass.Controller, options: argparse.Namespace) -> None:
    await controller.wait_for_fleet(
        num_trainers=options.trainers, engines=(options.engine,), deadline_s=60
    )


async def publish(
    options: argparse.Namespace, mode: str, trainers: Trainers, first: int, say: Any
) -> list[Row]:
    """Publish different weights each time; the last weights equal the fresh engine's."""
    updates, wires = [], []
    for number in range(options.updates + 1):
        seed = 7 if number == options.updates and mode == "staged" else first + 10 + number
        await trainers.all("fill", seed)
        _, done = (await trainers.all("publish", first + number))[0]
        assert done.digest_ok, "a digest differs"
        updates.append(done.update_s)
        wires.append(done.wire_s)
    entries = checkpoint_entries(options.model, quantised=True)
    nbytes = sum(entry[3] for entry in entries)
    reference = nbytes / (options.ceiling * 1e9 * options.trainers)
    rows = []
    for metric, values in (("wire", wires[1:]), ("update", updates[1:])):
        for name, value in zip(("median", "p95"), median_p95(values), strict=True):
            say(f"{mode}: {metric}, {name}: {1e3 * value:.1f} ms of {nbytes / 1e9:.1f} GB")
            rows.append(
                Row(
                    f"{options.trainer} -> {options.engine} TP{options.tp}, {options.model}, "
                    f"{SHAPES[options.model].layers} layers ({nbytes / 1e9:.1f} GB, bfloat16 -> "
                    f"block float8), {mode}, no load",
                    f"{metric}, {name}",
                    value,
                    "s",
                    "bytes at link speed",
                    reference,
                )
            )
    return rows


if __name__ == "__main__":
    given = options_of(sys.argv[1:])
    report(asyncio.run(prove(given)), given.json, f"a live {given.engine} server in block float8")
