"""A live engine in block float8 against a fresh one: bytes and tokens, no load and no timing.

    python benchmarks/gpu/prove_block_float8.py --engine vllm --json FILE --layers 2

As `bench_live_engine.py --quantization fp8-block`, and quicker: two servers of the same release start
together, the one that is updated and, on the trainers' GPUs, the one that loads what the updates must
give: the trainers' full bfloat16 weights, quantised by the engine's own function.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_live_engine as live

import windlass
from harness import Row, median_p95, report
from windlass.config import ControlConfig, PauseMode, UpdateMode


async def prove(options: argparse.Namespace) -> list[Row]:
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    options.quantization = "fp8-block"
    with tempfile.TemporaryDirectory() as folder:
        started, plain, saved = (Path(folder) / name for name in ("started", "plain", "saved"))
        for path in (started, plain, saved):
            live.write_config(options.model, path, quantised=path is not plain)
        devices = list(range(options.tp, options.tp + options.trainers))
        os.environ.update(live.ENGINES[options.engine].environment)
        trainers = live.Trainers(options.trainer, devices, f"{folder}/store", str(plain))
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600))
        other = argparse.Namespace(**{**vars(options), "port": options.port + 500})
        logs = [options.log, options.log.with_suffix(".fresh.log")]
        servers = [live.ENGINES[options.engine](o, session) for o in (options, other)]
        processes: list[asyncio.subprocess.Process] = []
        config = ControlConfig(mode=UpdateMode.IN_PLACE, pause_mode=PauseMode.IN_PLACE)
        try:
            await trainers.receive()
            for seed, path in ((7, saved), (1, started)):
                await trainers.all("fill", seed)
                await live.save(options, trainers, path, say)
            async with windlass.Controller(token=live.TOKEN, config=config) as controller:
                processes.append(
                    await live.start_server(servers[0], str(started), controller.url, logs[0])
                )
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
                processes.append(await live.start_server(servers[1], str(saved), "", logs[1]))
                await trainers.all("connect", controller.url)
                for process, what in zip(processes, ("live", "fresh"), strict=True):
                    assert process.stdout is not None
                    ready = await asyncio.wait_for(process.stdout.readline(), 300)
                    assert ready, f"the {what} engine did not start"
                    say(f"the {what} engine is up")
                await controller.wait_for_fleet(
                    num_trainers=options.trainers, engines=(options.engine,), deadline_s=60
                )
                return await publish_and_compare(options, trainers, servers, say)
        except Exception:
            for log in logs:
                say(f"failed; the end of {log}:")
                if log.exists():
                    print(live.tail(log), flush=True)
            raise
        finally:
            await session.close()
            for process in processes:
                if process.returncode is None:
                    process.terminate()
                    await process.wait()
            for rank in trainers.processes:
                rank.kill()


async def publish_and_compare(
    options: argparse.Namespace, trainers: live.Trainers, servers: list[Any], say: Any
) -> list[Row]:
    updates, wires = [], []
    before = await servers[0].fingerprints()
    for version in range(1, options.updates + 2):
        await trainers.all("fill", 7 if version > options.updates else 100 + version)
        _, done = (await trainers.all("publish", version))[0]
        assert done.digest_ok, "a digest differs"
        updates.append(done.update_s)
        wires.append(done.wire_s)
        if version == options.updates:
            before = await servers[0].fingerprints()
    held, fresh = [(await s.fingerprints(), await s.tokens()) for s in servers]
    assert held[0] != before, "other weights must be other fingerprints"
    live.require_fresh(held, fresh, say)
    entries = live.checkpoint_entries(options.model, quantised=True)
    nbytes = sum(entry[3] for entry in entries)
    reference = nbytes / (options.ceiling * 1e9 * options.trainers)
    rows = []
    for metric, values in (("wire", wires[1:]), ("update", updates[1:])):
        for name, value in zip(("median", "p95"), median_p95(values), strict=True):
            say(f"{metric}, {name}: {1e3 * value:.1f} ms of {nbytes / 1e9:.1f} GB")
            rows.append(
                Row(
                    case=f"{options.trainer} -> {options.engine} TP{options.tp}, {options.model}, "
                    f"{live.SHAPES[options.model].layers} layers ({nbytes / 1e9:.1f} GB, bfloat16 -> "
                    "block float8), in_place, no load",
                    metric=f"{metric}, {name}",
                    value=value,
                    unit="s",
                    reference="bytes at link speed",
                    reference_value=reference,
                    ratio=value / reference,
                )
            )
    return rows


if __name__ == "__main__":
    given = live.options_of(sys.argv[1:])
    report(asyncio.run(prove(given)), given.json, f"a live {given.engine} server in block float8")
