"""After an update by Windlass, a live unmodified engine holds what its own loader would have put there.

Every trainer of a case is real (its own processes, its own parallel layout), trains a step and
publishes. The engine must then hold, byte for byte, what a fresh server holds that loaded the
trainer's weights as a checkpoint; must answer with the same greedy tokens; and its logprobs must
be those of transformers with these weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rows import MATRIX, Record, Shown
from servers import ROOT, TOKEN, Sample, engine_version, save, serving

import windlass
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines, UpdateMode
from windlass.engines.sglang.__main__ import UNSAFE, refuse_unsafe
from windlass.engines.vllm.extension import VllmApi
from windlass.errors import ConfigError

PROMPT = [5, 9, 33, 101]
NUM_TOKENS = 8
BFLOAT16_MEAN_DISTANCE = 0.05
"""Of logprobs over an answer; other weights are further away by far, which is checked too."""

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

IN_PLACE, STAGED = UpdateMode.IN_PLACE, UpdateMode.STAGED
FULL = os.environ.get("WINDLASS_ENGINES_FULL", "") == "1"


@dataclass(frozen=True)
class Trainer:
    """A trainer and its parallel layout over two processes."""

    name: str
    axis: str

    def __str__(self) -> str:
        return f"{self.name} {self.axis}{NUM_RANKS}"


NUM_RANKS = 2
FSDP = Trainer("fsdp2", "dp")
MEGATRON_TP = Trainer("megatron", "tp")
MEGATRON_EP = Trainer("megatron", "ep")


@dataclass(frozen=True)
class Case:
    """A live server that every trainer publishes into, one after the other."""

    engine: str
    kind: str
    tp: int
    transport: str
    mode: UpdateMode
    trainers: tuple[Trainer, ...]

    def __str__(self) -> str:
        return f"{self.engine}-{self.kind}-tp{self.tp}-{self.transport}-{self.mode}"


DENSE = (FSDP, MEGATRON_TP)
SPARSE = (FSDP, MEGATRON_EP)
SMALL = [
    Case("vllm", "moe", 1, "cma", IN_PLACE, SPARSE),
    Case("vllm", "dense", 2, "mooncake", STAGED, DENSE),
    Case("sglang", "dense", 2, "cma", IN_PLACE, DENSE),
]
TRAINERS = {"dense": DENSE, "tied": (FSDP,), "moe": SPARSE, "mla": (FSDP,)}
ALL = [
    Case(engine, kind, tp, transport, mode, TRAINERS[kind])
    for engine in ("sglang", "vllm")
    for kind in ("dense", "tied", "moe", "mla")
    for tp in (1, 2)
    for transport in ("cma", "mooncake")
    for mode in (IN_PLACE, STAGED)
]


def row(case: Case, trainer: Trainer, outcome: str = "proven") -> Shown:
    return Shown(
        trainer=str(trainer), engine=case.engine, engine_version=engine_version(case.engine),
        engine_parallelism=f"tp{case.tp}", model=case.kind, dtype="float32 -> bfloat16",
        transport=case.transport, mode=str(case.mode), outcome=outcome,
    )  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def matrix(request: pytest.FixtureRequest) -> None:
    """What is not shown by a test that passed is untested."""
    request.config.stash[MATRIX] = [
        asdict(row(case, trainer, "untested")) for case in ALL for trainer in case.trainers
    ]


@dataclass(frozen=True)
class State:
    """What a server holds and answers."""

    digests: list[dict[str, str]]
    sample: Sample


@pytest.fixture(scope="session")
def fresh_states() -> dict[tuple[str, str, int, str], State]:
    """Of servers started with a checkpoint; equal checkpoints are loaded once."""
    return {}


@pytest.mark.parametrize("case", ALL if FULL else SMALL, ids=str)
async def test_an_updated_engine_is_a_fresh_one(
    case: Case,
    tmp_path: Path,
    shown: Record,
    fresh_states: dict[tuple[str, str, int, str], State],
) -> None:
    old = save(case.kind, 1, tmp_path / "old")
    config = ControlConfig(mode=case.mode, deadlines=PhaseDeadlines(pause_s=120))
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        updated = await asyncio.to_thread(publish_all, case, old, controller.url, tmp_path)
    for trainer, (folder, state) in updated.items():
        fresh = await asyncio.to_thread(load_afresh, case, folder / "new", fresh_states)
        assert state.digests == fresh.digests, trainer
        assert state.sample.tokens == fresh.sample.tokens, trainer
        assert distance(folder / "new", state.sample) < BFLOAT16_MEAN_DISTANCE, trainer
        assert distance(old, state.sample) > 4 * BFLOAT16_MEAN_DISTANCE, trainer
        shown(row(case, trainer))


def publish_all(case: Case, old: Path, url: str, folder: Path) -> dict[Trainer, tuple[Path, State]]:
    updated = {}
    with serving(
        case.engine, old, folder / "live.log",
        tp=case.tp, controller=url, transport=case.transport,
    ) as server:  # fmt: skip
        before = server.digests()
        for version, trainer in enumerate(case.trainers, 1):
            work = folder / str(version)
            work.mkdir()
            (work / "old").symlink_to(old)
            train(trainer, case, url, work, version)
            state = State(server.digests(), server.sample(PROMPT, NUM_TOKENS))
            assert all(a != b for a, b in zip(before, state.digests, strict=True))
            assert state.sample.versions == [version] * NUM_TOKENS
            updated[trainer] = (work, state)
    return {trainer: updated[trainer] for trainer in case.trainers}


def train(trainer: Trainer, case: Case, url: str, folder: Path, version: int) -> None:
    """Train a step and publish; returns when both ranks have ended."""
    job = folder / "job.json"
    job.write_text(
        json.dumps(
            {
                "trainer": trainer.name, "layout": {trainer.axis: NUM_RANKS}, "kind": case.kind,
                "folder": str(folder), "url": url, "transport": case.transport,
                "version": version,
            }
        )
    )  # fmt: skip
    script = str(Path(__file__).with_name("trainer_rank.py"))
    environment = {
        **os.environ, "WINDLASS_TOKEN": TOKEN, "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
    }  # fmt: skip
    logs = [(folder / f"rank-{rank}.log").open("w") for rank in range(NUM_RANKS)]
    ranks = [
        subprocess.Popen(
            (sys.executable, script, str(rank), str(NUM_RANKS), str(job)),
            env=environment, stdout=log, stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]  # fmt: skip
    try:
        ended = [rank.wait(300) for rank in ranks]
    finally:
        for rank, log in zip(ranks, logs, strict=True):
            rank.kill()
            rank.wait(30)
            log.close()
    assert ended == [0] * NUM_RANKS, "\n".join(Path(log.name).read_text()[-4000:] for log in logs)
    assert json.loads((folder / "report.json").read_text())["digest_ok"]


def load_afresh(
    case: Case, checkpoint: Path, known: dict[tuple[str, str, int, str], State]
) -> State:
    content = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
    key = (case.engine, case.kind, case.tp, content)
    if key not in known:
        log = checkpoint.parent / "fresh.log"
        with serving(case.engine, checkpoint, log, tp=case.tp) as server:
            known[key] = State(server.digests(), server.sample(PROMPT, NUM_TOKENS))
    return known[key]


@torch.no_grad()
def distance(checkpoint: Path, sample: Sample) -> float:
    """Mean distance between the engine's logprobs and those of transformers with a checkpoint."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16
    ).eval()
    tokens = torch.tensor([[*PROMPT, *sample.tokens]])
    logits = model(tokens[:, :-1]).logits[0, len(PROMPT) - 1 :].float()
    own = logits.log_softmax(-1).gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
    return float((own - torch.tensor(sample.logprobs)).abs().mean())


@pytest.mark.parametrize("option", sorted(UNSAFE))
def test_sglang_does_not_start_with_an_option_that_updates_cannot_survive(
    option: str, shown: Record
) -> None:
    with pytest.raises(ConfigError, match="must not be given"):
        refuse_unsafe([f"{option}=x"])
    shown(refusal("sglang", option, UNSAFE[option]))


def test_vllm_is_not_asked_to_retract(shown: Record) -> None:
    with pytest.raises(ConfigError, match="pause_mode must be one of"):
        VllmApi("http://127.0.0.1:1", pipelined=False).pause(PauseMode.RETRACT, 1.0)
    shown(refusal("vllm", "pause_mode retract", "vLLM has abort and keep (in_place) only"))


def refusal(engine: str, what: str, reason: str) -> Shown:
    return Shown(
        trainer="any", engine=engine, engine_version=engine_version(engine),
        engine_parallelism="any", model="any", dtype="any", transport="any", mode=what,
        outcome="refused", detail=reason,
    )  # fmt: skip
