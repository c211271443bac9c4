"""Updates of an engine under load, measured at its clients."""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import statistics
import time
from typing import Any

import windlass
from harness import Row, median_p95
from live_engine.arrivals import Arrivals, count_between, gaps_of, silences, turns_of
from live_engine.load import load
from live_engine.report import Stage, case_of
from live_engine.servers import Sglang, Vllm
from live_engine.trainers import Trainers
from windlass.config import UpdateMode

BEFORE_S = 0.4


async def measure(
    options: argparse.Namespace,
    stage: Stage,
    server: Vllm | Sglang,
    trainers: Trainers,
    version: int,
    nbytes: int,
    say: Any,
) -> list[Row]:
    """Run a stage of updates under load and return its rows."""
    mode = stage.label
    ours, theirs = mp.get_context("spawn").Pipe()
    clients = mp.get_context("spawn").Process(
        target=load, args=(server.url, options.engine, options.load, 151936, theirs)
    )
    clients.start()
    # Wait until kernels are compiled, because the compilation would count as a gap of the update.
    assert await asyncio.to_thread(ours.poll, options.warm_up_s), "the streams bring no tokens"
    ours.recv()
    await asyncio.sleep(4)
    windows: list[tuple[float, float]] = []
    reports = []
    quiet = (time.monotonic() - 3.0, time.monotonic())
    for number in range(options.updates):
        await trainers.all("fill", version + number)
        begin = time.monotonic()
        answers = await trainers.all("publish", version + number)
        windows.append((begin, time.monotonic()))
        reports.append(answers[0][1])
        await asyncio.sleep(0.7)
    ours.send("end")
    arrivals, errors = await asyncio.to_thread(ours.recv)
    clients.join(20)
    if errors:
        say(f"{mode}: clients saw {len(errors)} errors, first: {errors[0]}")
    return summarise(options, stage, arrivals, windows, reports, quiet, nbytes, say)


def summarise(
    options: argparse.Namespace,
    stage: Stage,
    arrivals: Arrivals,
    windows: list[tuple[float, float]],
    reports: list[windlass.UpdateReport],
    quiet: tuple[float, float],
    nbytes: int,
    say: Any,
) -> list[Row]:
    """Return the rows of a series of updates. `quiet`: a span of time before the first update."""
    mode = stage.label
    usual = statistics.median(
        b - a
        for requests in arrivals
        for a, b in gaps_of(requests)
        if quiet[0] <= a and b <= quiet[1]
    )
    tell_turns(mode, arrivals, windows, say)
    worst_by_update = [round(max(stream), 3) for stream in silences(arrivals, windows) if stream]
    say(f"{mode}: longest silence by update: {worst_by_update}")
    seen = [statistics.median(stream) for stream in silences(arrivals, windows) if stream]
    worst = [max(stream) for stream in silences(arrivals, windows) if stream]
    rate = count_between(arrivals, [quiet]) / (quiet[1] - quiet[0])
    say(f"{mode}: {rate:.0f} tokens/s, {1e3 * usual:.1f} ms between tokens without updates")
    assert all(report.digest_ok for report in reports), "a digest differs"
    last = reports[-1]
    say(f"{mode}: phases {json.dumps({k: round(v, 4) for k, v in last.phase_s.items()})}")
    say(f"{mode}: left out {last.left_out}, {last.nbytes / 1e9:.1f} GB")
    rows = during_the_wire(options, stage, arrivals, windows, reports, nbytes, say)
    ceiling = options.ceiling * 1e9 * options.trainers
    for metric, values in (
        ("wire", [r.wire_s for r in reports]),
        ("update", [r.update_s for r in reports]),
        ("pause, engine", [r.pause_s for r in reports]),
        ("publish, trainer", [b - a for a, b in windows]),
        ("longest silence, median stream", seen),
        ("longest silence, worst stream", worst),
    ):
        median, p95 = median_p95(values)
        say(f"{mode}: {metric}: median {median:.4f} s, p95 {p95:.4f} s")
        for name, value in (("median", median), ("p95", p95)):
            rows.append(
                Row(
                    case_of(options, stage, nbytes),
                    f"{metric}, {name}",
                    value,
                    "s",
                    "time between tokens" if "silence" in metric else "bytes at link speed",
                    usual if "silence" in metric else nbytes / ceiling,
                )
            )
    return rows


def tell_turns(mode: str, arrivals: Arrivals, windows: list[tuple[float, float]], say: Any) -> None:
    """Print the times between a request of a stream and the next one."""
    touched: dict[bool, list[float]] = {True: [], False: []}
    for requests in arrivals:
        for a, b in turns_of(requests):
            touched[any(b > begin and a < end for begin, end in windows)].append(b - a)
    for during, turns in touched.items():
        if turns:
            say(
                f"{mode}: from a request to the next {'over an update' if during else 'otherwise'}: "
                f"median {statistics.median(turns):.3f} s, worst {max(turns):.3f} s, of {len(turns)}"
            )


def during_the_wire(
    options: argparse.Namespace,
    stage: Stage,
    arrivals: Arrivals,
    windows: list[tuple[float, float]],
    reports: list[windlass.UpdateReport],
    nbytes: int,
    say: Any,
) -> list[Row]:
    """Return rows for the tokens during the wire phase, compared with the time before each update."""
    if stage.mode is not UpdateMode.STAGED:
        return []
    wire, before = [], []
    for (begin, end), found in zip(windows, reports, strict=True):
        start = end - found.update_s
        for phase, seconds in found.phase_s.items():
            if phase == "write":
                break
            start += seconds
        wire.append((start, start + found.phase_s["write"]))
        before.append((begin - BEFORE_S, begin))
    figures: dict[str, tuple[float, float]] = {}
    for name, spans in (("before", before), ("wire", wire)):
        rate = count_between(arrivals, spans) / sum(b - a for a, b in spans)
        gaps = [
            y - x
            for requests in arrivals
            for x, y in gaps_of(requests)
            if any(a <= x and y <= b for a, b in spans)
        ]
        if not gaps:
            say(f"{stage.label}: {name}: too short for two tokens of a stream")
            return []
        figures[name] = (rate, statistics.median(gaps))
        say(
            f"{stage.label}: {name}: {rate:.0f} tokens/s over "
            f"{sum(b - a for a, b in spans):.2f} s; between tokens {1e3 * figures[name][1]:.2f} ms "
            f"median, {1e3 * statistics.fmean(gaps):.2f} mean, of {len(gaps)}"
        )
    metrics = (
        ("tokens per second during the wire phase", "1/s"),
        ("time between tokens during it", "s"),
    )
    return [
        Row(
            case_of(options, stage, nbytes),
            metric,
            value,
            unit,
            f"{BEFORE_S} s before each update",
            reference,
        )
        for (metric, unit), value, reference in zip(
            metrics, figures["wire"], figures["before"], strict=True
        )
    ]
