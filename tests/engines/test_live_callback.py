"""`RolloutCallback` with live servers: trainers drive updates themselves, and a trainer that dies changes nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from driving_rank import Drive
from fresh_servers import (
    Answer,
    checksums,
    require_equal_answers,
    require_equal_parameters,
    serving_fresh,
)
from rank_processes import RankProcesses
from rows import MATRIX, Record, Shown
from servers import TOKEN, Layout, Sample, Server, engine_version, save, serving, traffic
from test_live_servers import DTYPE, NUM_TOKENS, PROMPT, PROMPTS, check, differing

import windlass
from trainers import FSDP, MEGATRON_PP, MEGATRON_TP, Trainer, training
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

KIND = "dense"
TRAINERS = (FSDP, MEGATRON_TP, MEGATRON_PP)
WAYS = ("xccl", "disk")
NUM_VERSIONS = 2
SESSION_S = 6.0
DEATH_S = 300.0
LIVE = [(engine, tp) for tp in (1, 2) for engine in ("sglang", "vllm")]
CHOICE = os.environ.get("WINDLASS_ENGINES", "") or "covering"
CHOSEN = {"one": [("vllm", 2)], "covering": LIVE[2:], "all": LIVE}[CHOICE]
DEATHS = (("xccl", "bucket"), ("xccl", "half"), ("disk", "files"), ("xccl", "continue"))
"""How a leader sends, and where it dies, see `Drive.dies`."""


def row(engine: str, tp: int, trainer: Trainer, by: str, outcome: str = "proven") -> Shown:
    return Shown(
        trainer=str(trainer), engine=engine, engine_version=engine_version(engine),
        engine_parallelism=str(Layout(tp)), model=KIND, dtype="float32 -> bfloat16",
        transport=f"callback {by}", mode="staged", outcome=outcome,
    )  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def matrix(request: pytest.FixtureRequest) -> None:
    """Add every combination as `untested`; a passed test replaces its row."""
    if CHOICE == "one":
        return
    request.config.stash.setdefault(MATRIX, []).extend(
        asdict(row(engine, tp, trainer, by, "untested"))
        for engine, tp in LIVE
        for trainer in TRAINERS
        for by in WAYS
    )


def config() -> ControlConfig:
    return ControlConfig(pause_mode=PauseMode.IN_PLACE, deadlines=PhaseDeadlines(pause_s=120))


@contextmanager
def driving(trainer: Trainer, folder: Path, *, ends_well: bool = True) -> Iterator[RankProcesses]:
    """Start the ranks of a trainer in a folder of their own beside the model's folder."""
    own = folder.with_name(f"{folder.name}-{time.monotonic_ns()}")
    own.mkdir()
    shutil.copy(folder / "config.json", own)
    with training(trainer, KIND, own, script="driving_rank.py", ends_well=ends_well) as ranks:
        yield ranks


@pytest.mark.parametrize(("engine", "tp"), CHOSEN)
async def test_a_trainer_drives_updates_of_a_live_server(
    engine: str, tp: int, tmp_path: Path, shown: Record
) -> None:
    old = save(KIND, 1, tmp_path / "old")
    layout, version, rows, checkpoint = Layout(tp), 0, [], old
    with serving(engine, old, tmp_path / "live.log", layout=layout) as server:
        for trainer in TRAINERS:
            async with windlass.Controller(token=TOKEN, config=config()) as controller:
                await asyncio.to_thread(server.join, controller.url, "auto")
                with driving(trainer, old) as ranks:
                    for by in WAYS:
                        for _ in range(NUM_VERSIONS):
                            version += 1
                            checkpoint, before = tmp_path / str(version), server.digests()
                            drive = Drive(controller.url, version, str(checkpoint), by)
                            await drive_beside_requests(server, ranks, drive)
                            check(server, checkpoint, version, old=old, before=before)
                        if trainer is TRAINERS[-1]:
                            require_fresh(server, checkpoint, tmp_path / f"fresh-{by}.log")
                        rows.append(row(engine, tp, trainer, by))
    for proven in rows:
        shown(proven)


async def drive_beside_requests(server: Server, ranks: RankProcesses, drive: Drive) -> None:
    """Send a version while requests run, and check that no answer has tokens of a later version before an earlier."""

    def send() -> list[list[int]]:
        with traffic(server, PROMPT, after=Path(drive.checkpoint) / "config.json") as answers:
            ranks.begin(drive)
            for rank in range(len(ranks.logs)):
                assert ranks.line(rank) == "sent\n"
        return answers

    for versions in await asyncio.to_thread(send):
        assert versions == sorted(versions)
        assert {-1, *range(1, drive.version + 1)}.issuperset(versions)


def require_fresh(server: Server, checkpoint: Path, log: Path) -> None:
    """Compare the server with a fresh server of the checkpoint: parameters, greedy tokens and their logprobs."""
    held, samples = checksums(server.engine, server.post), answers_of(server)
    with serving_fresh(server.engine, checkpoint, log, layout=server.layout, dtype=DTYPE) as fresh:
        require_equal_parameters(held, checksums(server.engine, fresh.post))
        told = [fresh.answer(prompt, NUM_TOKENS) for prompt in PROMPTS]
    require_equal_answers(pairs(samples), told, dtype=DTYPE)


def pairs(samples: Sequence[Sample]) -> list[Answer]:
    return [(sample.tokens, sample.logprobs) for sample in samples]


def answers_of(server: Server) -> list[Sample]:
    return [server.sample(prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize(("engine", "tp"), CHOSEN)
async def test_a_leader_that_dies_leaves_no_mixture(engine: str, tp: int, tmp_path: Path) -> None:
    old = save(KIND, 1, tmp_path / "old")
    with serving(engine, old, tmp_path / "live.log", layout=Layout(tp)) as server:
        async with windlass.Controller(token=TOKEN, config=config()) as controller:
            await asyncio.to_thread(server.join, controller.url, "auto")
            first = tmp_path / "first"
            with driving(FSDP, old) as ranks:
                drive = Drive(controller.url, 1, str(first), "xccl")
                await drive_beside_requests(server, ranks, drive)
            served, number = first, 1
            for by, dies in DEATHS:
                before, said = server.digests(), answers_of(server)
                checkpoint, number = tmp_path / dies, number + 1
                drive = Drive(controller.url, number, str(checkpoint), by, SESSION_S, dies)
                await asyncio.to_thread(die, server, old, drive)
                held, answers = server.digests(), answers_of(server)
                if differing(held, before):
                    # Only a version of which everything had arrived may be published.
                    assert dies == "continue"
                    check(server, checkpoint, number, old=old, before=before)
                    served = checkpoint
                else:
                    assert [a.versions for a in answers] == [a.versions for a in said]
                    require_equal_answers(pairs(answers), pairs(said), dtype=DTYPE)
                    assert differing(held, server.digests_of_fresh_load(served)) == []
            last = tmp_path / "last"
            with driving(FSDP, old) as ranks:
                before = server.digests()
                drive = Drive(controller.url, number + 1, str(last), "xccl")
                await drive_beside_requests(server, ranks, drive)
            check(server, last, number + 1, old=old, before=before)


def die(server: Server, folder: Path, drive: Drive) -> None:
    """Let a leader die in an update while requests run. Return when the server answers again."""
    with driving(FSDP, folder, ends_well=False) as ranks:
        began = Path(drive.checkpoint) / "config.json"
        with traffic(server, PROMPT, after=began) as answers:
            ranks.begin(drive)
            assert ranks.processes[0].wait(DEATH_S) < 0
            # The session ends after this time, with the old version.
            time.sleep(SESSION_S)
    for versions in answers:
        assert versions == sorted(versions)
        assert versions[-1] == versions[0] or drive.dies == "continue"
