"""After an update by Windlass, a live unmodified engine has the same bytes as after a load by its own loader.

The test starts a server once. Then real trainers with different parallel layouts, one after the other, train a step and
publish, over each transport and in each mode. For each update the server joins a new fleet. After every update

1. on every rank, all parameters and buffers have the same bytes as a new model in the same process that the engine's own
   loader filled from a checkpoint of the trainer;
2. greedy tokens and logprobs equal those from transformers, within bfloat16;
3. the tokens carry the version.

With replicas, stages or spread experts, requests run on every replica during updates. The updates pause these requests in
turn by `abort` and `in_place` (SGLang: `retract` too, and with stages only `abort`). 2 and 3 hold for every replica.

At the end, a plain server without Windlass loads the last checkpoint. Its tokens and logprobs must be those of the updated
server, and the engine's own checksums of all parameters must be equal, because a load within the updated server's ranks
shares their state. `WINDLASS_ENGINES=one` omits this check, which `tests/integrations/test_vllm_plugin.py` makes as well.

WINDLASS_ENGINES chooses the servers: `one` server, a `covering` set (the default), or `all`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fresh_servers import (
    checksums,
    require_equal_answers,
    require_equal_parameters,
    serving_fresh,
)
from rows import MATRIX, Record, Shown, of_setting
from servers import TOKEN, Layout, Sample, Server, engine_version, save, serving, traffic
from trainer_rank import Order

import windlass
from trainers import (
    FSDP,
    FSDP_CP,
    FSDP_DP_TP,
    FSDP_TP,
    HSDP,
    MEGATRON_CP,
    MEGATRON_EP,
    MEGATRON_PP,
    MEGATRON_TP,
    MEGATRON_TP_EP,
    Ranks,
    Trainer,
    training,
)
from windlass.config import (
    ControlConfig,
    DiskBackend,
    P2pBackend,
    PauseMode,
    PhaseDeadlines,
    UpdateBackend,
    UpdateMode,
    XcclBackend,
)
from windlass.engines.http import EngineHttp
from windlass.engines.options import refuse_options
from windlass.engines.quiesce_gate import QuiesceGate
from windlass.engines.sglang.orders import SglangApi
from windlass.engines.spec import ENGINES
from windlass.engines.vllm.worker import VllmApi
from windlass.errors import ConfigError

PROMPT = [5, 9, 33, 101]
PROMPTS = (PROMPT, [200, 3], [(7 * place) % 240 for place in range(70)])
NUM_TOKENS = 8
DTYPE = "bfloat16"
"""The dtype of the live and the fresh servers."""
BFLOAT16_MEAN_DISTANCE = 0.05
"""Largest mean distance of logprobs over an answer; the test checks that other weights are much further away."""

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

PACKS_CONVOLUTIONS = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
CHOICE = os.environ.get("WINDLASS_ENGINES", "") or "covering"


@dataclass(frozen=True)
class Way:
    """Transport, update mode and pause mode of an update.

    Attributes:
        transport: transport of the backend `p2p`; or `xccl` or `disk` for this backend.
    """

    transport: str
    mode: UpdateMode
    pause: PauseMode = PauseMode.ABORT

    def config(self, folder: Path) -> ControlConfig:
        """Return the controller's settings; the backend `disk` uses the folder."""
        backends: dict[str, UpdateBackend] = {
            "xccl": XcclBackend(),
            "disk": DiskBackend(str(folder)),
        }
        return ControlConfig(
            mode=self.mode,
            pause_mode=self.pause,
            backend=backends.get(self.transport, P2pBackend()),
            deadlines=PhaseDeadlines(pause_s=120),
        )

    @property
    def link(self) -> str:
        """Transport with which engines and trainers connect."""
        return self.transport if self.transport in {"cma", "mooncake"} else "auto"


CMA_IN_PLACE = Way("cma", UpdateMode.IN_PLACE)
CMA_STAGED = Way("cma", UpdateMode.STAGED)
MOONCAKE_IN_PLACE = Way("mooncake", UpdateMode.IN_PLACE)
MOONCAKE_STAGED = Way("mooncake", UpdateMode.STAGED)
P2P_WAYS = (CMA_IN_PLACE, MOONCAKE_STAGED, CMA_STAGED, MOONCAKE_IN_PLACE)
OTHER_WAYS = tuple(Way(backend, mode) for backend in ("xccl", "disk") for mode in UpdateMode)
"""Ways of other backends than `p2p`."""
BUSY_WAYS = (
    Way("cma", UpdateMode.IN_PLACE, PauseMode.IN_PLACE),
    MOONCAKE_STAGED,
    Way("cma", UpdateMode.STAGED, PauseMode.IN_PLACE),
    MOONCAKE_IN_PLACE,
)
"""Ways for servers with running requests."""
RETRACTING_WAYS = (
    BUSY_WAYS[0],
    replace(BUSY_WAYS[1], pause=PauseMode.RETRACT),
    replace(BUSY_WAYS[2], pause=PauseMode.RETRACT),
    BUSY_WAYS[3],
)
"""Ways with running requests, with every pause mode of SGLang."""
ABORTING_WAYS = tuple(replace(way, pause=PauseMode.ABORT) for way in BUSY_WAYS)
"""Ways with running requests, for SGLang with stages."""
TRAINERS = {
    "dense": (FSDP, MEGATRON_TP, MEGATRON_PP, MEGATRON_CP),
    "tied": (FSDP, MEGATRON_PP),
    "moe": (FSDP, MEGATRON_EP),
    "mla": (FSDP, MEGATRON_TP_EP),
    "offset": (FSDP,),
    "recurrent": (FSDP,),
}


@dataclass(frozen=True)
class Live:
    """A server, and the ways and trainers of its updates.

    Attributes:
        only: trainers; empty for all trainers of its kind of model.
        group: name of a group of settings; other groups have the same server.
    """

    engine: str
    kind: str
    layout: Layout
    ways: Sequence[Way] = P2P_WAYS
    only: Sequence[Trainer] = ()
    group: str = ""

    @property
    def trainers(self) -> Sequence[Trainer]:
        return self.only or TRAINERS[self.kind]

    def __str__(self) -> str:
        parts = self.engine, self.kind, *str(self.layout).split(), self.group
        return "-".join(filter(None, parts))

    def cells(self) -> Iterator[tuple[Trainer, Way]]:
        for trainer in self.trainers:
            for way in self.ways:
                yield trainer, way


MANY = [
    Live("vllm", "moe", Layout(dp=2, ep=True), BUSY_WAYS),
    Live("vllm", "tied", Layout(pp=2), BUSY_WAYS),
    Live("vllm", "dense", Layout(dp=2), BUSY_WAYS),
    Live("vllm", "moe", Layout(tp=2, ep=True)),
    Live("vllm", "dense", Layout(pp=2), BUSY_WAYS),
    Live("sglang", "moe", Layout(tp=2, ep=True)),
    Live("sglang", "dense", Layout(dp=2), RETRACTING_WAYS),
    Live("sglang", "dense", Layout(pp=2), ABORTING_WAYS),
    Live("sglang", "tied", Layout(pp=2), ABORTING_WAYS),
]
"""Servers with replicas, with stages, or with experts that are spread over ranks."""
EVERYTHING = [
    Live(engine, kind, Layout(tp))
    for kind in ("dense", "moe", "mla", "tied")
    for tp in (1, 2)
    for engine in ("sglang", "vllm")
]
EVERYTHING += [
    Live(engine, kind, Layout(tp))
    for engine, kind in (("sglang", "offset"), ("vllm", "recurrent"))
    for tp in (1, 2)
]
EVERYTHING += MANY
MESHES = [
    Live(
        engine,
        "dense",
        Layout(tp),
        (CMA_IN_PLACE, CMA_STAGED),
        (FSDP_TP, FSDP_DP_TP, HSDP, FSDP_CP),
        "meshes",
    )
    for tp in (1, 2)
    for engine in ("sglang", "vllm")
]
OTHERS = [
    Live(engine, "dense", Layout(tp), OTHER_WAYS, (FSDP, MEGATRON_TP), "others")
    for tp in (1, 2)
    for engine in ("sglang", "vllm")
]
EVERYTHING += MESHES + OTHERS
COVERING = [
    Live(engine, kind, Layout(tp))
    for kind, tp in (("dense", 2), ("moe", 2), ("mla", 1), ("tied", 1))
    for engine in ("sglang", "vllm")
]
COVERED = {"dense": (FSDP, MEGATRON_TP, MEGATRON_PP), "vllm-mla-tp1": (FSDP,)}
"""Kind of model, or server -> its trainers in the covering run, if these are not all."""
COVERING = [
    replace(live, only=COVERED.get(live.kind) or COVERED.get(str(live), ())) for live in COVERING
]
COVERING += [live for live in MESHES + OTHERS if live.layout.tp == 2]
COVERING += [Live("sglang", "offset", Layout(1))]
COVERING += [Live("vllm", "recurrent", Layout(2))]
COVERING += [replace(live, ways=live.ways[:ways]) for live, ways in zip(MANY, (2, 1), strict=False)]
COVERING += [
    replace(live, ways=live.ways[:2], only=(FSDP,))
    for live in MANY
    if (live.engine, live.kind) == ("sglang", "dense")
]

CHOICES = {
    "one": [Live("vllm", "dense", Layout(2), (CMA_IN_PLACE, CMA_STAGED), only=(FSDP,))],
    "covering": COVERING,
    "all": EVERYTHING,
}


def row(live: Live, trainer: Trainer, way: Way, outcome: str = "proven") -> Shown:
    return Shown(
        trainer=str(trainer), engine=live.engine, engine_version=engine_version(live.engine),
        engine_parallelism=str(live.layout), model=live.kind, dtype="float32 -> bfloat16",
        transport=way.transport, mode=str(way.mode), outcome=outcome,
    )  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def matrix(request: pytest.FixtureRequest) -> None:
    """Add every combination as `untested`; a passed test replaces its row."""
    # With `one`, the other engine need not be installed.
    if CHOICE == "one":
        return
    request.config.stash.setdefault(MATRIX, []).extend(
        asdict(row(live, trainer, way, "untested"))
        for live in EVERYTHING
        for trainer, way in live.cells()
    )


@pytest.mark.parametrize("live", CHOICES[CHOICE], ids=str)
async def test_an_updated_engine_is_a_fresh_one(live: Live, tmp_path: Path, shown: Record) -> None:
    if live.kind == "recurrent" and PACKS_CONVOLUTIONS:
        pytest.skip("vLLM packs convolutions on this CPU: refused, see engines.vllm.cpu_kernels")
    old = save(live.kind, 1, tmp_path / "old")
    checkpoint, version, rows = old, 0, []
    with serving(live.engine, old, tmp_path / "live.log", layout=live.layout) as server:
        for trainer in live.trainers:
            with training(trainer, live.kind, old) as ranks:
                for way in live.ways:
                    version += 1
                    checkpoint, before = tmp_path / str(version), server.digests()
                    await publish(server, ranks, way, version, checkpoint)
                    check(server, checkpoint, version, old=old, before=before)
                    rows.append(row(live, trainer, way))
        answers = [
            (sample.tokens, sample.logprobs)
            for prompt in PROMPTS
            for sample in [server.sample(prompt, NUM_TOKENS)]
        ]
        held = checksums(live.engine, server.post)
    if CHOICE != "one":
        with serving_fresh(
            live.engine, checkpoint, tmp_path / "fresh.log", layout=live.layout, dtype=DTYPE
        ) as fresh:
            require_equal_parameters(held, checksums(live.engine, fresh.post))
            told = [fresh.answer(prompt, NUM_TOKENS) for prompt in PROMPTS]
        require_equal_answers(answers, told, dtype=DTYPE)
    for proven in rows:
        shown(proven)


@contextmanager
def busy(server: Server, checkpoint: Path) -> Iterator[list[list[int]]]:
    """Run requests on every replica of a server with replicas or stages, and yield the versions of their tokens.

    The requests begin when the trainers have written the checkpoint.
    """
    answers: list[list[int]] = []
    with ExitStack() as running:
        replicas = range(server.layout.dp) if server.layout.is_more_than_tensor_parallel else ()
        spoken = [
            running.enter_context(
                traffic(server, PROMPT, replica, after=checkpoint / "config.json")
            )
            for replica in replicas
        ]
        yield answers
    answers += [answer for replica in spoken for answer in replica]
    assert all(spoken)


def differing(held: list[dict[str, str]], fresh: list[dict[str, str]]) -> list[str]:
    """Return the tensors of all ranks that differ from a fresh load."""
    return [
        f"{rank}: {name}"
        for rank, (ours, theirs) in enumerate(zip(held, fresh, strict=True))
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


async def publish(server: Server, ranks: Ranks, way: Way, version: int, checkpoint: Path) -> None:
    """Publish a version to the server in a new fleet."""
    config = way.config(checkpoint.with_suffix(".disk"))
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        await asyncio.to_thread(server.join, controller.url, way.link)
        order = Order(controller.url, way.link, version, str(checkpoint))
        with busy(server, checkpoint) as answers:
            await asyncio.to_thread(ranks.publish, order)
    for spoken in answers:
        assert spoken == sorted(spoken)
        assert {-1, *range(1, version + 1)}.issuperset(spoken)


def check(
    server: Server, checkpoint: Path, version: int, *, old: Path, before: list[dict[str, str]]
) -> None:
    held = server.digests()
    assert all(a != b for a, b in zip(before, held, strict=True))
    assert differing(held, server.digests_of_fresh_load(checkpoint)) == []
    for replica in range(server.layout.dp):
        sample = server.sample(PROMPT, NUM_TOKENS, replica=replica)
        check_answer(sample, checkpoint, version, old=old)


def check_answer(sample: Sample, checkpoint: Path, version: int, *, old: Path) -> None:
    """Check that an answer is greedy, comes from `checkpoint`, not from `old`, and carries the version."""
    assert sample.versions == [version] * NUM_TOKENS
    logprobs = expected(checkpoint, sample)
    chosen = logprobs.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
    assert float((logprobs.max(1).values - chosen).max()) < 2 * BFLOAT16_MEAN_DISTANCE
    assert distance(logprobs, sample) < BFLOAT16_MEAN_DISTANCE
    assert distance(expected(old, sample), sample) > 4 * BFLOAT16_MEAN_DISTANCE


@torch.no_grad()
def expected(checkpoint: Path, sample: Sample) -> torch.Tensor:
    """Return logprobs of transformers with a checkpoint at the positions of an answer: (tokens, vocabulary)."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16
    ).eval()
    tokens = torch.tensor([[*PROMPT, *sample.tokens]])
    logits: torch.Tensor = model(tokens[:, :-1]).logits[0, len(PROMPT) - 1 :].float()
    return logits.log_softmax(-1)


def distance(logprobs: torch.Tensor, sample: Sample) -> float:
    """Return the mean distance between `logprobs` and the logprobs of an answer."""
    own = logprobs.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
    return float((own - torch.tensor(sample.logprobs)).abs().mean())


UNSAFE = {
    engine: {o: r for r in ENGINES.find(engine).rules for o in (r.option, *r.aliases) if o}
    for engine in ("sglang", "vllm")
}


@pytest.mark.parametrize(
    ("engine", "option"), [(engine, option) for engine in UNSAFE for option in UNSAFE[engine]]
)
def test_no_engine_starts_with_an_option_that_updates_cannot_survive(
    engine: str, option: str, shown: Record
) -> None:
    for spelt in (option, f"{option}=x"):
        with pytest.raises(ConfigError, match=r"must (be|have|not be given)"):
            refuse_options([spelt], ENGINES.find(engine).rules)
    shown(refusal(engine, option, UNSAFE[engine][option].why))


def test_vllm_refuses_the_pause_mode_retract(shown: Record) -> None:
    with pytest.raises(ConfigError, match="pause_mode must be one of"):
        VllmApi(EngineHttp("http://127.0.0.1:1"), can_block=False, stamps=False).pause(
            PauseMode.RETRACT, 1.0
        )
    shown(refusal("vllm", "pause_mode retract", "vLLM has abort and keep (in_place) only"))


def test_sglang_with_stages_accepts_only_the_pause_mode_abort(shown: Record) -> None:
    api = SglangApi(EngineHttp("http://127.0.0.1:1"), 2, QuiesceGate(), blocks=False, num_stages=2)
    for mode in (PauseMode.RETRACT, PauseMode.IN_PLACE):
        with pytest.raises(ConfigError, match="pause_mode must be abort with pipeline stages"):
            api.pause(mode, 1.0)
    reason = "SGLang's loop of a pipeline does not look whether it is paused"
    shown(refusal("sglang", "pause_mode retract, in_place with --pp", reason))


def refusal(engine: str, what: str, reason: str) -> Shown:
    return of_setting(engine, engine_version(engine), what, detail=reason, outcome="refused")
