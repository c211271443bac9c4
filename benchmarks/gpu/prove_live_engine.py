"""Comparison of live engines with fresh ones, case by case: every tensor and greedy tokens.

    python benchmarks/gpu/prove_live_engine.py --engine vllm --case dense --case latent --json FILE
        [--trainer megatron] [--transport nixl] [--streams 8] [--at-once 2] [--logs FOLDER]

A case is a small model, so that servers start quickly. Two servers of the same release start together: the live server
with other weights, and on the trainers' GPUs the fresh server from a checkpoint of the trainers' last weights. Two
series of updates follow, `in_place` and then `staged`. Each sends other weights first and ends with the last weights.
With several transports the live server offers all of them, and the trainers run both series over each of them in turn.
After each series every tensor of every rank of the live server (parameters, buffers and other tensors of modules, such
as absorbed projections) must have the same fingerprint as in the fresh server, and greedy tokens must be equal. Some
prompts share a long prefix, and the live server also gets them before and between the updates. With `--streams N`, N
requests run during all updates of a series and end before the comparison. Servers use their default prefix caches.
If a case fails, the others continue; the exit status is then 1, and the last lines give the reason. A step that does not
end within `--step-s` fails, and the processes of the case write the stacks of their threads to their logs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from live_engine.cases import CASES, FAMILIES, Case
from live_engine.proof_ranks import ProofTrainers
from live_engine.proof_servers import MODEL, Held, ProofServer, engine_version, reasons, tail
from live_engine.surroundings import TOKEN

import windlass
from harness import median_p95, parser
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines, UpdateMode
from windlass.transports.registry import parse_transport

LAST_SEED = 7
PORTS_PER_CASE = 1000
"""Number of ports per case, because engines use further ports above their own."""


@dataclass
class Proof:
    """Result of a case over one transport.

    Attributes:
        outcome: `proven`, `failed` or `not run` (also if another transport failed before). detail: reason, if the case is
            not proven.
        num_tensors: number of compared tensors of all ranks. num_attributes: number of tensors that are neither
            parameters nor buffers. attributes: last parts of their names.
        num_drafts: number of tensors of the draft model.
        prefix_hits: tokens that each server took from its prefix cache.
        store_hits: tokens that vLLM took from its store outside the GPU after the updates, by mode.
        drafted, accepted: tokens that each server drafted, and accepted.
        logprob_distance: largest distance from the fresh server's logprobs, by mode; tokens are equal.
        busy_tokens: tokens of the answers that ended during the updates, by mode.
        update_s, wire_s, pause_s: median by mode, without the first update.
    """

    case: str
    engine: str
    engine_version: str
    engine_ranks: str
    trainer: str
    transport: str
    outcome: str = "not run"
    detail: str = ""
    seconds: float = 0.0
    nbytes: int = 0
    num_tensors: int = 0
    num_attributes: int = 0
    num_drafts: int = 0
    attributes: list[str] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    prefix_hits: dict[str, float] = field(default_factory=dict)
    store_hits: dict[str, float] = field(default_factory=dict)
    drafted: dict[str, float] = field(default_factory=dict)
    accepted: dict[str, float] = field(default_factory=dict)
    logprob_distance: dict[str, float] = field(default_factory=dict)
    busy_tokens: dict[str, int] = field(default_factory=dict)
    equal_after: list[str] = field(default_factory=list)
    update_s: dict[str, float] = field(default_factory=dict)
    wire_s: dict[str, float] = field(default_factory=dict)
    pause_s: dict[str, float] = field(default_factory=dict)


class Run:
    """Run of one case. `rows` collects its results, one row for each transport; `save` writes the rows of all cases."""

    def __init__(
        self,
        options: argparse.Namespace,
        name: str,
        number: int,
        folder: Path,
        save: Callable[[], None],
    ) -> None:
        self.options, self.name, self.folder, self.save = options, name, folder, save
        self.case: Case = CASES[name]
        self.quantised = self.case.quantised and not options.on_cpu
        self.began = time.monotonic()
        self.rows = [
            Proof(
                case=name,
                engine=options.engine,
                engine_version=engine_version(options.engine),
                engine_ranks=f"TP{options.tp}",
                trainer=f"{options.trainer}, {options.trainers} ranks",
                transport=transport,
            )
            for transport in options.transports
        ]
        self.port = options.port + PORTS_PER_CASE * number
        stem = f"{options.engine}-{options.trainer}-{name}"
        self.logs = {
            what: options.logs / f"{stem}.{what}.log" for what in ("live", "fresh", "trainers")
        }
        self.version = 0
        self.step = "start"

    @contextlib.asynccontextmanager
    async def _step(self, what: str) -> AsyncIterator[None]:
        """Give a deadline to a step, and name the step in messages."""
        self.step, began = what, time.monotonic()
        async with asyncio.timeout(self.options.step_s):
            yield
        self.say(f"{what} took {time.monotonic() - began:.1f} s")

    def say(self, text: str) -> None:
        """Print a message in one line."""
        seconds = time.monotonic() - self.began
        print(f"[{self.name}, {seconds:5.1f} s] {text}", flush=True)

    async def prove(self) -> None:
        """Run the case. A failure is part of the result; only a cancellation is raised."""
        try:
            async with asyncio.timeout(self.options.case_s):
                await self._all()
        except Exception as error:  # noqa: BLE001 - a case that fails must not end the others
            why = str(error) or f"after {time.monotonic() - self.began:.0f} s"
            self._tell(f"{type(error).__name__} in the step {self.step}: {why}"[:2000])
        for row in self.rows:
            row.seconds = row.seconds or round(time.monotonic() - self.began, 1)
            self.say(f"{row.transport}: {row.outcome} {row.detail[:300]}")

    def _tell(self, detail: str) -> None:
        """Add the reason of a failure to the rows that are not proven; the first of them has failed."""
        self.say(f"failed: {detail[:1500]}")
        for what, log in self.logs.items():
            named = reasons(log)
            if named:
                detail += f" | {what}: {' / '.join(named)}"[:3000]
            for line in named or tail(log):
                print(f"    {what}: {line}", flush=True)
        left = [row for row in self.rows if row.outcome != "proven"]
        left[0].outcome = "failed"
        for row in left:
            row.detail = detail

    async def _all(self) -> None:
        paths = {name: self.folder / name for name in ("plain", "first", "last", MODEL)}
        for name, path in paths.items():
            self.case.write_config(path, quantised=self.quantised and name != "plain")
        on_cpu = self.options.on_cpu
        count, tp = max(torch.cuda.device_count(), 1), self.options.tp
        devices = [-1 if on_cpu else (tp + i) % count for i in range(self.options.trainers)]
        trainers = ProofTrainers(
            "fsdp-adapter" if self.case.adapter else self.options.trainer,
            devices,
            str(self.folder / "store"),
            str(paths["plain"]),
            self.logs["trainers"],
        )
        timeout = aiohttp.ClientTimeout(total=180)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                live, fresh = (
                    ProofServer(self.options, self.case, session, self.port + offset)
                    for offset in (0, PORTS_PER_CASE // 2)
                )
                try:
                    await self._checkpoints(trainers, paths)
                    visible = "" if on_cpu else ",".join(str((tp + i) % count) for i in range(tp))
                    await self._updates(trainers, live, fresh, paths, visible)
                # The deadline of the case cancels this task.
                except (TimeoutError, asyncio.CancelledError):
                    for processes in (trainers, live, fresh):
                        processes.stacks()
                    await asyncio.sleep(2)  # They write.
                    raise
                finally:
                    await asyncio.gather(live.end(), fresh.end())
        finally:
            trainers.kill()

    async def _checkpoints(self, trainers: ProofTrainers, paths: dict[str, Path]) -> None:
        await trainers.receive(120)
        if self.case.adapter:
            await trainers.all("save_model", str(paths[MODEL]))
        for seed, name in ((LAST_SEED, "last"), (1, "first")):
            await trainers.all("fill", seed)
            if self.quantised:
                differ = (await trainers.all("check_quantiser", self.options.engine))[0][1]
                assert differ == (0, 0), f"bytes of values and scales that differ: {differ}"
                await trainers.all("save_quantised", self.options.engine, str(paths[name]))
            else:
                await trainers.all("save", str(paths[name]))
        self.say("checkpoints are written")

    async def _updates(
        self,
        trainers: ProofTrainers,
        live: ProofServer,
        fresh: ProofServer,
        paths: dict[str, Path],
        visible: str,
    ) -> None:
        port, wanted = 0, None
        for row in self.rows:
            for mode in (UpdateMode.IN_PLACE, UpdateMode.STAGED):
                async with self._controller(mode, port) as controller:
                    url = controller.url
                    port = int(url.rsplit(":", 1)[1])
                    if wanted is None:
                        wanted = await self._servers(live, fresh, paths, url, visible)
                    async with self._step(f"{row.transport}, {mode}: connecting"):
                        await trainers.all("connect", url, 0, row.transport)
                        await self._wait(controller)
                    await self._series(row, str(mode), trainers, live, wanted)
                    await trainers.all("disconnect")
            async with self._step("asking the fresh server again"):
                again = await fresh.held()
            assert wanted is not None
            assert not again.different(wanted), "the fresh server has changed"
            for what, server in (("live", live), ("fresh", fresh)):
                row.prefix_hits[what] = await server.count("prefix_cache_hits")
                row.drafted[what] = await server.count("spec_decode_num_draft_tokens")
                row.accepted[what] = await server.count("spec_decode_num_accepted_tokens")
            if self.case.stores and self.options.engine == "vllm":
                assert all(row.store_hits.values()), f"no stored entry: {row.store_hits}"
            if row.num_drafts or (self.case.drafts and self.options.engine == "vllm"):
                assert all(row.drafted.values()), f"nothing was drafted: {row.drafted}"
            row.outcome = "proven"
            row.seconds = round(time.monotonic() - self.began, 1)
            self.save()

    async def _servers(
        self, live: ProofServer, fresh: ProofServer, paths: dict[str, Path], url: str, visible: str
    ) -> Held:
        """Start both servers; return what the fresh one holds, and require that the live one holds something else."""
        if self.options.in_turn:
            await self._serve(fresh, "fresh", paths["last"], "", visible)
            async with self._step("asking the fresh server"):
                wanted = await fresh.held()
            await self._serve(live, "live", paths["first"], url, "")
        else:
            await live.start(paths["first"], url, self.logs["live"], "")
            await self._serve(fresh, "fresh", paths["last"], "", visible)
            await live.ready(self.options.start_s)
            self.say("the live engine is up")
            async with self._step("asking the fresh server"):
                wanted = await fresh.held()
        async with self._step("asking the live server"):
            before = await live.held()
        self._describe(wanted)
        self._require_other(before, wanted, "before the updates")
        self._require_other_tokens(before, wanted)
        return wanted

    async def _serve(
        self, server: ProofServer, what: str, folder: Path, controller: str, visible: str
    ) -> None:
        await server.start(folder, controller, self.logs[what], visible)
        await server.ready(self.options.start_s)
        self.say(f"the {what} engine is up")

    def _controller(self, mode: UpdateMode, port: int) -> windlass.Controller:
        deadlines = PhaseDeadlines(pause_s=60)
        config = ControlConfig(mode=mode, pause_mode=self.options.pause_mode, deadlines=deadlines)
        journal = self.folder / "journal"
        return windlass.Controller(token=TOKEN, config=config, journal_path=journal, port=port)

    async def _wait(self, controller: windlass.Controller) -> None:
        await controller.wait_for_fleet(
            num_trainers=self.options.trainers, engines=(self.options.engine,), deadline_s=60
        )

    async def _series(
        self, row: Proof, mode: str, trainers: ProofTrainers, live: ProofServer, wanted: Held
    ) -> None:
        """Send different weights each time; the last weights equal the fresh server's."""
        reports: list[windlass.UpdateReport] = []
        async with live.busy(self.options.streams) as answered:
            before = len(answered)
            for number in range(self.options.updates + 1):
                self.version += 1
                last = number == self.options.updates
                async with self._step(f"{row.transport}, {mode}: update {number}"):
                    await trainers.all("fill", LAST_SEED if last else 10 + self.version)
                    _, report = (await trainers.all("publish", self.version))[0]
                assert report.digest_ok, f"{mode}: a digest differs"
                assert not report.left_out, f"{mode}: left out {report.left_out}"
                used, named = set(report.transports), parse_transport(row.transport).name
                assert used == {named}, f"{mode}: the update used {used}, not {named}"
                reports.append(report)
                if number == 0:
                    async with self._step(f"{row.transport}, {mode}: asking after other weights"):
                        other = await live.held()
                    self._require_other(other, wanted, f"{mode}, after other weights")
            row.busy_tokens[mode] = sum(answered[before:])
        async with self._step(f"{row.transport}, {mode}: asking after the last weights"):
            held = await live.held()
        if self.case.stores:
            before_again = await live.count("external_prefix_cache_hits")
            await live.displace()
            again = await live.held()
            row.store_hits[mode] = await live.count("external_prefix_cache_hits") - before_again
            assert again.tokens == held.tokens, f"{mode}: stored entries give other tokens"
        different = held.different(wanted)
        assert not different, f"{mode}: {len(different)} tensors differ: {different[:8]}"
        wrong = [
            f"prompt {i}: {a}, not {b}"
            for i, (a, b) in enumerate(zip(held.tokens, wanted.tokens, strict=True))
            if a != b
        ]
        assert not wrong, f"{mode}: tensors are equal, tokens are not: {'; '.join(wrong)}"
        row.logprob_distance[mode] = held.distance(wanted)
        row.equal_after.append(mode)
        row.nbytes = reports[-1].nbytes
        for name, values in (
            ("update_s", [r.update_s for r in reports[1:]]),
            ("wire_s", [r.wire_s for r in reports[1:]]),
            ("pause_s", [r.pause_s for r in reports[1:]]),
        ):
            vars(row)[name][mode] = median_p95(values)[0]
        self.say(
            f"{row.transport}, {mode}: all equal after {len(reports)} updates of {row.nbytes / 1e6:.0f} MB, "
            f"{1e3 * row.update_s[mode]:.1f} ms each (wire {1e3 * row.wire_s[mode]:.2f})"
        )

    def _require_other(self, held: Held, wanted: Held, when: str) -> None:
        """Require that the weights differ before the updates. Otherwise equal fingerprints would prove nothing."""
        same = [
            name
            for name in wanted.fingerprints[0]
            if ("adapter/" if self.case.adapter else "proj") in name
            and held.fingerprints[0].get(name) == wanted.fingerprints[0][name]
        ]
        assert not same, f"{when}: other weights must be other fingerprints: {same[:5]}"

    def _require_other_tokens(self, held: Held, wanted: Held) -> None:
        """Require different tokens. Otherwise equal tokens would prove nothing, not even about old caches."""
        same = [
            i for i, (a, b) in enumerate(zip(held.tokens, wanted.tokens, strict=True)) if a == b
        ]
        assert not same, f"other weights must be other tokens: prompts {same}"
        assert len({*map(tuple, wanted.tokens)}) == len(wanted.tokens), (
            f"other prompts must have other tokens: {wanted.tokens}"
        )

    def _describe(self, wanted: Held) -> None:
        names = [name for rank in wanted.fingerprints for name in rank]
        attributes = [name for name in names if name.startswith("attribute:")]
        for row in self.rows:
            row.num_tensors, row.num_attributes = len(names), len(attributes)
            row.num_drafts = sum("draft." in name for name in names)
            row.attributes = sorted({name.rpartition(".")[2] for name in attributes})
            row.tokens = wanted.tokens


async def run(options: argparse.Namespace) -> list[Proof]:
    """Run all cases, at most `at_once` at the same time; return their results."""
    rows: list[Proof] = []
    turn = asyncio.Semaphore(options.at_once)
    ends = time.monotonic() + options.deadline_s

    def save() -> None:
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")

    async def one(number: int, name: str, folder: Path) -> None:
        async with turn:
            case = Run(options, name, number, folder, save)
            rows.extend(case.rows)
            left = ends - time.monotonic()
            obstacle = CASES[name].obstacle(options.engine, options.trainer)
            if obstacle or left < options.least_s:
                for row in case.rows:
                    row.outcome, row.detail = "not run", obstacle or f"{left:.0f} s left"
            else:
                options_left = argparse.Namespace(**vars(options))
                options_left.case_s = min(options.case_s, left)
                case.options = options_left
                await case.prove()
            save()

    with tempfile.TemporaryDirectory() as folder:
        tasks = []
        for number, name in enumerate(options.case):
            place = Path(folder) / str(number)
            place.mkdir()
            tasks.append(one(number, name, place))
        await asyncio.gather(*tasks)
    return rows


async def until_told(options: argparse.Namespace) -> list[Proof]:
    """Call `run`; on SIGTERM, also end the servers."""
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    return await run(options)


def options_of(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    options = parser(__doc__ or "")
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    options.add_argument(
        "--case",
        action="append",
        choices=[*CASES, "all", "families"],
        required=True,
        help="may be repeated",
    )
    options.add_argument("--trainer", choices=("fsdp", "megatron"), default="fsdp")
    options.add_argument(
        "--transport",
        action="append",
        dest="transports",
        help="name or JSON of a transport, may be repeated; default: cuda_ipc, on a CPU cma",
    )
    options.add_argument("--tp", type=int, default=2)
    options.add_argument("--trainers", type=int, default=2)
    options.add_argument(
        "--updates", type=int, default=3, help="number of updates per mode, after the first"
    )
    options.add_argument(
        "--streams", type=int, default=0, help="number of requests that run during updates"
    )
    options.add_argument("--cuda-graphs", action="store_true")
    options.add_argument(
        "--pause-mode", type=PauseMode, choices=list(PauseMode), default=PauseMode.IN_PLACE
    )
    options.add_argument(
        "--at-once", type=int, default=1, help="number of cases at a time on the same GPUs"
    )
    options.add_argument("--logs", type=Path, default=Path("."), help="folder of the servers' logs")
    options.add_argument(
        "--in-turn",
        action="store_true",
        help="start the live server after the fresh one has answered, so that it reads the choices of Triton's "
        "autotuner from disk: servers that tune at the same time may choose kernels that round differently",
    )
    options.add_argument(
        "--start-s", type=float, default=150.0, help="deadline of a server's start"
    )
    options.add_argument(
        "--step-s", type=float, default=180.0, help="deadline of a step after the servers' start"
    )
    options.add_argument("--case-s", type=float, default=240.0, help="deadline of a case")
    options.add_argument("--deadline-s", type=float, default=540.0, help="deadline of all cases")
    options.add_argument(
        "--least-s", type=float, default=60.0, help="time that must be left to begin a case"
    )
    options.add_argument("--port", type=int, default=18123)
    options.add_argument(
        "--on-cpu", action="store_true", help="test run on a CPU, with an engine built for CPUs"
    )
    options.add_argument(
        "--python", default=sys.executable, help="interpreter of the engine's environment"
    )
    parsed = options.parse_args(words)
    parsed.compiles = False
    if "all" in parsed.case:
        parsed.case = list(CASES)
    elif "families" in parsed.case:
        parsed.case = list(FAMILIES)
    # Two cores start one server at a time.
    parsed.in_turn = parsed.in_turn or parsed.on_cpu
    parsed.transports = parsed.transports or ["cma" if parsed.on_cpu else "cuda_ipc"]
    parsed.logs.mkdir(parents=True, exist_ok=True)
    return parsed


def main() -> int:
    """Run the command line; return 0 if every case that ran is proven."""
    parsed = options_of(sys.argv[1:])
    rows = asyncio.run(until_told(parsed))
    print("\n--- what was shown ---")
    for row in sorted(rows, key=lambda row: row.outcome == "proven", reverse=True):
        shown = (
            f"{row.num_tensors} tensors ({row.num_attributes} of modules: {row.attributes}, "
            f"{row.num_drafts} of a model that drafts)"
        )
        what = shown if row.outcome == "proven" else row.detail[:700]
        after = f", equal after {' and '.join(row.equal_after)}" if row.equal_after else ""
        print(
            f"{row.outcome}: {row.engine} {row.engine_version} {row.engine_ranks}, {row.case}, "
            f"{row.trainer}, {row.transport}, {row.seconds} s{after}: {what}"
        )
    return int(any(row.outcome == "failed" for row in rows))


if __name__ == "__main__":
    status: Any = main()
    sys.exit(status)
