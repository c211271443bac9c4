"""Trainer and live engine take turns on the same GPUs: every tensor, tokens, times and memory.

    python benchmarks/gpu/prove_turns.py --engine vllm --case qwen3-4b --json FILE
        [--tp 2 --trainers 2] [--turns 10] [--extra 2] [--kv-gib 20] [--logs FOLDER]

A fresh server loads a checkpoint of the trainer's last weights, and its tensors and tokens are recorded. The live server
starts at the same time with dummy weights and the engine's sleep mode, with CUDA graphs and (vLLM) torch.compile, and
joins with the transport `pull`. The fresh server answers each prompt twice, because vLLM's two
answers can differ, for example after a hit in its prefix cache; either answer counts. A first update without sleep records the
live server's own tokens for the last weights: if they differ from both although all tensors are equal, the two processes
compute differently (for example by autotuned kernels), and sleep is not the reason. The outcomes name the first different
tokens and their logprobs. The run then goes on, also accepts the server's own tokens, and ends with status 1. In each turn the framework's call makes the server sleep; the trainer gets memory, uses `--extra` times its
weights' memory, and sets new weights; it publishes; the engine wakes and reads; the trainer frees its memory; the
engine maps its KV cache and serves. After every second turn all tensors and greedy tokens must equal the fresh
server's, also of prompts with a common prefix; after the other turns they must not. A second series per level follows
in which the controller makes the server sleep. Then a plain server takes turns by the engine's own path with the same
trainer. The reference is a copy of the same bytes within one GPU. On a CPU (`--on-cpu`), nothing is compiled and there
is no own path.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from live_engine.cases import CASES, Case
from live_engine.proof_ranks import ProofTrainers
from live_engine.proof_servers import (
    Held,
    ProofServer,
    engine_environment,
    engine_version,
    reasons,
    tail,
)
from live_engine.servers import start
from live_engine.surroundings import TOKEN
from live_engine.turns import TURN_ENGINES, Published, TurnEngine

import windlass
from harness import Row, median_p95, parser, report
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines

LAST_SEED, OTHER_SEED = 7, 11
GIB = 1 << 30
FEW = 4
"""Largest number of turns of a series that is not one of the engine's kinds of sleep."""
PORTS = 500
"""Distance of the ports of two servers, because engines use further ports above their own."""
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
Sleep = Callable[[], Awaitable[None]]


class Run:
    """One case. `rows` collects figures, `told` the turns and outcomes."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.engine: TurnEngine = TURN_ENGINES[options.engine]
        case, flags = (
            CASES[options.case],
            self.engine.flags(kv_nbytes=options.kv_nbytes, on_cpu=options.on_cpu),
        )
        own = {options.engine: (*case.flags.get(options.engine, ()), *flags)}
        self.case: Case = replace(case, flags=own)
        self.began, self.version = time.monotonic(), 0
        self.rows: list[Row] = []
        self.told: dict[str, Any] = {"turns": {}, "outcomes": {}}
        self.copy_s = 0.0
        # Tokens per prompt for the last weights: of the fresh server, twice, and of the live server before it has slept.
        self.answers: list[list[list[int]]] = []
        self.logs = {
            what: options.logs / f"{options.engine}-{options.case}.{what}.log"
            for what in ("fresh", "live", "own", "trainers")
        }

    def say(self, text: str) -> None:
        print(f"[{self.options.case}, {time.monotonic() - self.began:5.1f} s] {text}", flush=True)

    def server(
        self, number: int, session: aiohttp.ClientSession, *, with_weights: bool = False
    ) -> ProofServer:
        port = self.options.port + PORTS * number
        return ProofServer(self.options, self.case, session, port, with_weights=with_weights)

    async def prove(self) -> None:
        """Run everything. Raise at the first difference."""
        on_cpu, tp = self.options.on_cpu, self.options.tp
        paths = {name: self.folder / name for name in ("plain", "last")}
        for path in paths.values():
            self.case.write_config(path, quantised=False)
        devices = [-1 if on_cpu else rank % tp for rank in range(self.options.trainers)]
        if self.options.expandable:
            os.environ[ALLOCATOR] = "expandable_segments:True"
        trainers = ProofTrainers(
            "fsdp-turns", devices, str(self.folder / "store"), str(paths["plain"]), self.logs["trainers"]
        )  # fmt: skip
        # The servers start later, without this variable.
        os.environ.pop(ALLOCATOR, None)
        timeout = aiohttp.ClientTimeout(total=180)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                await trainers.receive(120)
                self.say("the trainers are up")
                await trainers.all("step", LAST_SEED, 0.0)
                await trainers.all("save", str(paths["last"]))
                await trainers.all("release")
                self.say("the checkpoint is written")
                wanted = await self._live(session, paths["last"], trainers)
                if self.engine.own and not on_cpu and not self.options.no_own:
                    await self._own(session, paths["last"], trainers, wanted)
        finally:
            trainers.kill()

    async def _fresh(self, session: aiohttp.ClientSession, folder: Path) -> Held:
        server = self.server(0, session, with_weights=True)
        try:
            await server.start(folder, "", self.logs["fresh"], "")
            await server.ready(self.options.start_s)
            self.say("the fresh server is up")
            held, again = await server.held(), await server.held()
            self.answers += held.tokens, again.tokens
            self.told["outcomes"]["fresh"] = (
                f"its own answers differ at {again.first_differences(held)}"
            )
            return held
        finally:
            await server.end()

    async def _live(
        self, session: aiohttp.ClientSession, last: Path, trainers: ProofTrainers
    ) -> Held:
        """Take turns with the live server; return the weights and tokens of the fresh server."""
        config = ControlConfig(pause_mode=PauseMode.ABORT, deadlines=PhaseDeadlines(pause_s=60))
        async with windlass.Controller(token=TOKEN, config=config) as controller:
            server = self.server(1, session)
            try:
                await server.start(last, controller.url, self.logs["live"], "")
                async with asyncio.TaskGroup() as starts:
                    fresh = starts.create_task(self._fresh(session, last))
                    starts.create_task(server.ready(self.options.start_s))
                wanted = fresh.result()
                remove_weights(last)
                self.say("the live server is up, and has joined")
                before = await server.held()
                assert before.different(wanted), "the live server must begin with other weights"
                await trainers.all("step", 1, 0.0)
                await trainers.all("connect", controller.url, 0, "pull")
                await controller.wait_for_fleet(
                    num_trainers=self.options.trainers,
                    engines=(self.options.engine,),
                    deadline_s=60,
                )
                await self._publish_awake(server, trainers, wanted)
                for level in self.engine.levels:

                    async def by_framework(level: str = level) -> None:
                        await self.engine.sleep(server, level)

                    name = f"level {level}"
                    await self._series(name, by_framework, self._publish, server, trainers, wanted)

                async def by_controller() -> None:
                    await controller.sleep_engines(mode=PauseMode.ABORT)

                await self._series(
                    *("controller", by_controller, self._publish, server, trainers, wanted),
                    at_most=FEW,
                )
                await trainers.all("disconnect")
                return wanted
            finally:
                await server.end()

    async def _publish_awake(
        self, server: ProofServer, trainers: ProofTrainers, wanted: Held
    ) -> None:
        """Publish the last weights to the server before it has slept, and record its tokens."""
        await trainers.all("step", LAST_SEED, 0.0)
        await self._publish(server, trainers)
        held = await server.held()
        different = held.different(wanted)
        assert not different, f"awake: {len(different)} tensors differ: {different[:8]}"
        are_equal = "equal" if self._is_known(held) else "differ from"
        self.answers.append(held.tokens)
        self.told["outcomes"]["awake"] = (
            f"tensors equal, tokens {are_equal} the fresh server's {held.first_differences(wanted)}"
        )
        self.say(f"before any sleep: {self.told['outcomes']['awake']}")

    async def _publish(self, _server: ProofServer, trainers: ProofTrainers) -> Published:
        self.version += 1
        found: Published = (await trainers.all("turn", self.version))[0][1]
        return found

    async def _own(
        self,
        session: aiohttp.ClientSession,
        folder: Path,
        trainers: ProofTrainers,
        wanted: Held,
    ) -> None:
        """Take turns by the engine's own path. A failure is an outcome."""
        server = self.server(2, session)
        words = [
            *self.engine.own_command(server, str(folder)),
            *self.engine.flags(kv_nbytes=self.options.kv_nbytes, on_cpu=False),
        ]
        own = {
            **engine_environment(self.options.engine),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        }

        async def sleep() -> None:
            await self.engine.sleep(server, self.engine.levels[-1])

        async def update(server: ProofServer, trainers: ProofTrainers) -> Published:
            began = time.perf_counter()
            await self.engine.own_update(server, trainers)
            seconds = time.perf_counter() - began
            used = (await trainers.all("points"))[0][1]
            return Published(seconds, seconds, used=used)

        if self.options.own_path:
            path = (os.environ.get("PYTHONPATH", ""), self.options.own_path)
            os.environ["PYTHONPATH"] = os.pathsep.join(path)
        kept: list[asyncio.Task[None]] = []
        try:
            server.process = await start(server.engine.settings, words, self.logs["own"], own)
            # vLLM logs to stdout.
            assert server.process.stdout is not None
            kept.append(asyncio.create_task(keep(server.process.stdout, self.logs["own"])))
            async with asyncio.timeout(self.options.start_s):
                while not await serves(server):
                    assert server.process.returncode is None, "the plain server ended"
                    await asyncio.sleep(0.5)
            self.say("the plain server is up")
            await self._series(
                self.engine.own, sleep, update, server, trainers, wanted, at_most=FEW
            )
        except Exception as error:  # noqa: BLE001 - the rows of Windlass stay
            self.told["outcomes"][self.engine.own] = f"{type(error).__name__}: {error}"[:2000]
            self.say(f"{self.engine.own}: {type(error).__name__}: {error}"[:1500])
            for line in reasons(self.logs["own"]) or tail(self.logs["own"]):
                print(f"    own: {line}", flush=True)
        finally:
            await server.end()
            await asyncio.gather(*kept)

    async def _series(
        self,
        name: str,
        sleep: Sleep,
        update: Callable[[ProofServer, ProofTrainers], Awaitable[Published]],
        server: ProofServer,
        trainers: ProofTrainers,
        wanted: Held,
        *,
        at_most: int = 1 << 30,
    ) -> None:
        """Take all turns of a series, an even number, and add its rows."""
        turns: list[dict[str, Any]] = []
        for number in range(min(self.options.turns, at_most)):
            last = number % 2 == 1
            began = time.perf_counter()
            await sleep()
            sleep_s = time.perf_counter() - began
            await trainers.all(
                "step", LAST_SEED if last else OTHER_SEED + number, self.options.extra
            )
            step_s = time.perf_counter() - began - sleep_s
            found = await update(server, trainers)
            whole_s = time.perf_counter() - began
            began = time.perf_counter()
            held = await server.held()
            used = {key: round(size / GIB, 2) for key, size in (found.used or {}).items()}
            turns.append({
                "sleep_s": sleep_s, "step_s": step_s, "whole_s": whole_s,
                "check_s": time.perf_counter() - began, **asdict(found), "used_gib": used,
            })  # fmt: skip
            self.told["turns"][name] = turns
            self.say(
                f"{name}, turn {number}: update {found.update_s * 1e3:.1f} ms (wire {found.wire_s * 1e3:.1f}), "
                f"publish {found.publish_s * 1e3:.1f}, sleep {sleep_s * 1e3:.0f}, step {step_s * 1e3:.0f}; GiB {used}; "
                f"{ {k: round(v * 1e3, 1) for k, v in (found.phase_s or {}).items()} }"
            )
            self._compare(
                f"{name}, turn {number}", held, wanted, equal=last, own=name == self.engine.own
            )
        self.told["outcomes"][name] = (
            f"equal: {sum(map(len, wanted.fingerprints))} tensors, {len(wanted.tokens)} prompts, "
            f"{len(turns)} turns"
        )
        self.say(f"{name}: {self.told['outcomes'][name]}")
        await self._add_rows(name, turns, trainers)

    def _compare(self, when: str, held: Held, wanted: Held, *, equal: bool, own: bool) -> None:
        """Raise AssertionError if the tensors or tokens are wrong; `own`: after an update by the engine's own path."""
        different = held.different(wanted)
        if not equal:
            assert different, f"{when}: other weights must be other fingerprints"
            assert held.tokens != wanted.tokens, f"{when}: other weights must be other tokens"
            return
        assert not different, f"{when}: {len(different)} tensors differ: {different[:8]}"
        if self._is_known(held):
            return
        text = f"tensors are equal, tokens are not: {held.first_differences(wanted)}"
        assert own, f"{when}: {text}"
        # The plain server is another process. Its tensors prove the update.
        self.told["outcomes"][when] = text

    def _is_known(self, held: Held) -> bool:
        """Return whether each prompt's tokens equal one of the known answers."""
        known = zip(*self.answers, strict=True)
        return all(mine in theirs for mine, theirs in zip(held.tokens, known, strict=True))

    async def _add_rows(
        self, name: str, turns: list[dict[str, Any]], trainers: ProofTrainers
    ) -> None:
        nbytes = turns[-1]["nbytes"]
        if not self.copy_s:
            # The engine is awake, so a full copy of a large model may not fit; copy one GiB at most.
            copied = max(min(nbytes // self.options.tp, GIB), 1)
            self.copy_s = (await trainers.all("copy_s", copied))[0][1] * nbytes / copied
            self.copy_s /= self.options.tp
        options = self.options
        case = f"{options.engine} TP{options.tp}, {options.case}, {name}"
        reference = "copy within the GPU"
        self.rows += [
            Row(case, f"{key}, median", median_p95([t[f"{key}_s"] for t in turns[1:]])[0], "s", reference, self.copy_s)
            for key in ("update", "wire", "sleep", "publish", "whole")
            if turns[-1][f"{key}_s"]
        ]  # fmt: skip
        for point in turns[-1]["used_gib"]:
            peak = max(turn["used_gib"][point] for turn in turns)
            self.rows.append(
                Row(case, f"in use: {point}, peak", peak, "GiB", "weights", nbytes / GIB or 1.0)
            )
        self.write()

    def write(self) -> None:
        if self.options.json is None:
            return
        on_gpu = not self.options.on_cpu
        where = {
            "device": torch.cuda.get_device_name(0) if on_gpu else "cpu",
            "engine": self.options.engine, "engine_version": engine_version(self.options.engine),
            "tp": self.options.tp, "trainers": self.options.trainers, "case": self.options.case,
            "compiles": self.options.compiles, "extra": self.options.extra,
            "expandable": self.options.expandable,
            "torch": str(torch.__version__),
        }  # fmt: skip
        told = {"where": where, **self.told, "rows": [asdict(row) for row in self.rows]}
        self.options.json.write_text(json.dumps(told, indent=2) + "\n")


async def keep(stream: asyncio.StreamReader, log: Path) -> None:
    """Add everything that a process writes to its log."""
    with log.open("ab") as sink:
        while data := await stream.read(1 << 16):
            sink.write(data)
            sink.flush()


def remove_weights(checkpoint: Path) -> None:
    """Remove the weights of a checkpoint: on a tmpfs they take the memory that vLLM's copies of level 1 need."""
    for file in checkpoint.glob("*.safetensors"):
        file.unlink()


async def serves(server: ProofServer) -> bool:
    """Return whether the server listens and is healthy."""
    try:
        async with server.session.get(f"{server.engine.url}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def options_of(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    options = parser(__doc__ or "")
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--engine", choices=sorted(TURN_ENGINES), default="vllm")
    options.add_argument("--case", choices=sorted(CASES), default="qwen3-4b")
    options.add_argument("--tp", type=int, default=1)
    options.add_argument("--trainers", type=int, default=1, help="trainer ranks, on the same GPUs")
    options.add_argument(
        "--turns", type=int, default=10, help="turns of each series; an even number"
    )
    options.add_argument(
        "--extra", type=float, default=2.0, help="memory of a step, in multiples of the weights"
    )
    options.add_argument("--kv-gib", type=float, default=20.0, help="size of the KV cache")
    options.add_argument("--eager", action="store_true", help="no CUDA graphs and no torch.compile")
    options.add_argument("--logs", type=Path, default=Path("."), help="folder of the servers' logs")
    options.add_argument(
        "--start-s", type=float, default=200.0, help="deadline of a server's start"
    )
    options.add_argument("--port", type=int, default=19123)
    options.add_argument(
        "--expandable", action="store_true", help="the trainers use torch's expandable segments"
    )
    options.add_argument(
        "--no-own", action="store_true", help="leave out the engine's own path of updates"
    )
    options.add_argument("--on-cpu", action="store_true", help="test run on a CPU")
    options.add_argument(
        "--engine-path", default="", help="further folders of the engine's modules, for a test run"
    )
    options.add_argument(
        "--own-path",
        default="",
        help="further folder of modules that only the engine's own path needs",
    )
    options.add_argument(
        "--python", default=sys.executable, help="interpreter of the engine's environment"
    )
    parsed = options.parse_args(words)
    if parsed.turns % 2:
        options.error(f"--turns must be even, got {parsed.turns}")
    parsed.transports, parsed.kv_nbytes = ["pull"], int(parsed.kv_gib * GIB)
    parsed.compiles = parsed.cuda_graphs = not parsed.eager and not parsed.on_cpu
    parsed.logs.mkdir(parents=True, exist_ok=True)
    if parsed.engine_path:
        path = (parsed.engine_path, os.environ.get("PYTHONPATH", ""))
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
    return parsed


async def main(options: argparse.Namespace) -> int:
    """Run the case; print the figures. Return 1 after a failure."""
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        run = Run(options, Path(folder))
        try:
            await run.prove()
        except Exception as error:  # noqa: BLE001 - the figures until then are shown
            status = 1
            reason: BaseException = error
            while isinstance(reason, BaseExceptionGroup):
                reason = reason.exceptions[0]
            run.told["outcomes"]["failed"] = f"{type(reason).__name__}: {reason}"[:3000]
            run.say(f"failed: {type(reason).__name__}: {reason}"[:3000])
            for what, log in run.logs.items():
                for line in reasons(log) or tail(log):
                    print(f"    {what}: {line}", flush=True)
        if "differ from" in run.told["outcomes"].get("awake", ""):
            status = 1
        run.write()
    report(run.rows, None, "turns")
    for name, outcome in run.told["outcomes"].items():
        print(f"{name}: {outcome[:600]}")
    return status


if __name__ == "__main__":
    sys.exit(asyncio.run(main(options_of(sys.argv[1:]))))
