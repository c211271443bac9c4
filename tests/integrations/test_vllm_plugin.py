"""FSDP2 trainers update plain vLLM servers, which users start with one flag, through vLLM's own routes.

After every update, a server with prefix caches gives the same answers as a fresh server that has loaded the trainer's
weights and runs without Windlass (`fresh_servers`). vLLM's own checksums of all parameters are equal too. Servers die in
a known phase of a round: rank 0 of the trainer hosts the controller and kills them in this phase.

WINDLASS_ENGINES=one omits most phases, and cases that repeat others with more ranks. `all` tests every phase in both modes,
and every kind of pause with two ranks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fresh_servers import (
    PACKS,
    checksums,
    require_equal_answers,
    require_equal_parameters,
    serving_fresh,
)
from plain_vllm import MODEL, PlainServer, checkpoint, serving_plain, syncing
from servers import ADAPTER, Layout, adapted, build
from sync_rank import Order, Sent

from windlass.integrations.vllm import WeightSync

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

CHOICE = os.environ.get("WINDLASS_ENGINES", "")
ONE = CHOICE == "one"
PREFIX = [(7 * place) % 240 for place in range(140)]
PROMPTS = tuple([*PREFIX, *tail] for tail in ([17, 18], [99, 4, 5]))
"""Prompts with a common block. vLLM's blocks have 128 tokens on CPUs, so the second prompt hits the prefix cache."""
NUM_TOKENS = 12
DTYPE = "bfloat16"
"""The dtype of the live and the fresh servers."""
NUM_NOISY, NOISE = 3, 0.5
"""Number of versions that the trainer makes with noise on every parameter, and the noise's standard deviation."""
NOISY_DTYPE = "float32" if PACKS else "bfloat16"
"""The dtype of servers of noisy versions. In bfloat16, two servers with different kernels may differ by whole nats."""
NUM_RUNNING_TOKENS = 120
BY_CALLER = "by the caller"
"""Kind of pause: the caller pauses and resumes, as frameworks do; `pause=None` of `WeightSync`."""
BY_FACTORY = "by the caller, of vLLM's own trainer engines"
"""The same with vLLM's own trainer engines, which number their versions themselves."""
HOLDING = "POST /update_weights "
"""Line in a server's log if a route, instead of the server's own agent, held it."""
TOLD_S = 15.0
"""Limit in seconds for the report of a dead process; deadlines of phases are 60 s and more."""

Answers = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(1, tmp_path_factory.mktemp("source") / "source")


@pytest.fixture(scope="module")
def one_rank(source: Path) -> Iterator[PlainServer]:
    """Provide one server for all tests, with the weights that the previous test left.

    Its own agent holds it during updates. Servers with a separate process per rank are held through routes.
    """
    with serving_plain(source, source.with_name("live.log"), in_core=True) as server:
        yield server


def ask(server: PlainServer, model: str = MODEL) -> Answers:
    return [server.answer(prompt, NUM_TOKENS, model=model) for prompt in PROMPTS]


@contextmanager
def running(server: PlainServer) -> Iterator[list[int]]:
    """Run requests one after the other inside the block, and yield the lengths of their answers."""
    over = threading.Event()
    lengths: list[int] = []

    def run() -> None:
        while not over.is_set():
            tokens, _ = server.answer([5, 9, 33], NUM_RUNNING_TOKENS)
            lengths.append(len(tokens))

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(run)
        try:
            yield lengths
        finally:
            over.set()
        ended.result(120)


@contextmanager
def paused(servers: Sequence[PlainServer]) -> Iterator[None]:
    """Pause servers inside the block, as frameworks do, and resume those still alive at its end."""
    for server in servers:
        server.http.post("/pause?mode=keep", {})
        assert server.is_paused()
    yield
    for server in servers:
        if server.process.poll() is None:
            assert server.is_paused()
            server.http.post("/resume", {})


def require_fresh(
    server: PlainServer, weights: Path, log: Path, *, tp: int, old: Answers, held: dict[str, str]
) -> None:
    hits = server.num_prefix_hits()
    answered, updated = ask(server), server.checksums()
    assert server.num_prefix_hits() > hits
    assert updated != held
    assert answered != old
    require_equal_to_fresh(weights, log, updated, answered, tp=tp)


def require_equal_to_fresh(
    weights: Path,
    log: Path,
    updated: dict[str, str],
    answered: Answers,
    *,
    tp: int = 1,
    dtype: str = DTYPE,
) -> None:
    """Compare an updated server with a fresh server that runs without Windlass."""
    with serving_fresh("vllm", weights, log, layout=Layout(tp), dtype=dtype) as fresh:
        require_equal_parameters(updated, checksums("vllm", fresh.post))
        told = [fresh.answer(prompt, NUM_TOKENS) for prompt in PROMPTS]
    require_equal_answers(answered, told, dtype=dtype)


def test_an_updated_server_is_a_fresh_one(
    one_rank: PlainServer, source: Path, tmp_path: Path
) -> None:
    update_in_every_way(one_rank, source, tmp_path, tp=1)


@pytest.mark.skipif(ONE, reason="WINDLASS_ENGINES=one: one rank")
def test_an_updated_server_of_two_ranks_is_a_fresh_one(source: Path, tmp_path: Path) -> None:
    with serving_plain(source, tmp_path / "live.log", tp=2) as server:
        update_in_every_way(server, source, tmp_path, tp=2)


@pytest.mark.skipif(ONE, reason="WINDLASS_ENGINES=one: one rank")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("dense", Layout(dp=2)), ("moe", Layout(dp=2, ep=True)), ("dense", Layout(pp=2))],
    ids=["replicas", "replicas of experts", "stages"],
)
def test_updated_replicas_and_stages_equal_fresh_ones(
    kind: str, layout: Layout, tmp_path: Path
) -> None:
    source = checkpoint(1, tmp_path / "source", kind)
    with serving_plain(
        source,
        tmp_path / "live.log",
        pp=layout.pp,
        dp=layout.dp,
        flags=("--enable-expert-parallel",) if layout.ep else (),
    ) as server:
        old, held = ask_replicas(server, layout.dp), server.checksums()
        version = 0
        for mode, pause in (("in_place", "keep"), ("staged", "abort"), ("staged", BY_CALLER)):
            with syncing(
                tmp_path / f"trainers-{mode}-{pause}", 2, source=str(source), kind=kind,
                servers=[server.url], mode=mode, pause=None if pause == BY_CALLER else pause,
            ) as trainers:  # fmt: skip
                assert [joined.error for joined in trainers.answers()] == ["", ""]
                for _ in range(2):
                    version += 1
                    with (
                        running(server) as lengths,
                        running(server),
                        paused([server] if pause == BY_CALLER else []),
                    ):
                        answers = trainers.send(version, tmp_path / str(version))
                    expect(answers, version, [server.url])
                    assert lengths if pause == "abort" else {*lengths} == {NUM_RUNNING_TOKENS}
                    assert server.version() == str(version)
                    assert not server.is_paused()
        answered, updated = ask_replicas(server, layout.dp), server.checksums()
    assert answered != old
    assert updated != held
    # Replicas and stages do not change how an engine rounds. Ranks that share experts do.
    of_fresh = layout if layout.ep else Layout()
    with serving_fresh(
        "vllm", tmp_path / str(version), tmp_path / "fresh.log", layout=of_fresh, dtype=DTYPE
    ) as fresh:
        loaded = checksums("vllm", fresh.post)
        told = [fresh.answer(prompt, NUM_TOKENS) for prompt in PROMPTS]
    for number, of_replica in enumerate(answered):
        require_equal_answers(of_replica, told, dtype=DTYPE)
        if not layout.ep:
            require_equal_parameters(of_ranks(updated, f"dp{number}:"), of_ranks(loaded))
    if layout.ep:
        require_equal_parameters(updated, loaded)


def of_ranks(checksums: dict[str, str], start: str = "") -> dict[str, str]:
    """Return the checksums of ranks with a name that begins with `start`, by the name of the parameter."""
    return {
        name.rpartition(":")[2]: checksum
        for name, checksum in checksums.items()
        if name.startswith(start)
    }


def ask_replicas(server: PlainServer, count: int) -> list[Answers]:
    """Return the answers of every replica."""
    return [
        [server.answer(prompt, NUM_TOKENS, replica=replica) for prompt in PROMPTS]
        for replica in range(count)
    ]


def update_in_every_way(server: PlainServer, source: Path, tmp_path: Path, *, tp: int) -> None:
    old, held = ask(server), server.checksums()
    version = 0
    further = CHOICE == "all" or (not ONE and tp == 1)
    # The second trainer joins a server that has left the first one's fleet.
    for num_ranks, mode, pause in (
        (1, "in_place", "keep"),
        (2, "staged", BY_CALLER),
        (2, "in_place", BY_FACTORY),
        *(
            ((2, "in_place", None), (2, "staged", "wait"), (2, "staged", "abort"))
            if further
            else ()
        ),
    ):
        by_factory = pause == BY_FACTORY
        if by_factory:
            version, pause = 0, BY_CALLER
        with syncing(
            tmp_path / f"trainers-{mode}-{pause}-{num_ranks}", num_ranks, by_factory=by_factory,
            source=str(source), servers=[server.url], mode=mode,
            pause=None if pause == BY_CALLER else pause,
        ) as trainers:  # fmt: skip
            assert [joined.error for joined in trainers.answers()] == [""] * num_ranks
            for _ in range(2):
                version += 1
                num_asked = server.log.read_text().count(HOLDING)
                with (
                    running(server) as lengths,
                    paused([server] if pause == BY_CALLER else []),
                ):
                    answers = trainers.send(version, tmp_path / str(version))
                for sent in answers:
                    assert (sent.version, sent.servers) == (version, [server.url]), sent
                    assert sent.digest_ok
                assert lengths if pause == "abort" else {*lengths} == {NUM_RUNNING_TOKENS}
                assert server.version() == str(version)
                assert not server.is_paused()
                # These requests fill the prefix cache.
                ask(server)
                num_asked += tp > 1 or pause in ("wait", "abort")
                assert server.log.read_text().count(HOLDING) == num_asked
    weights = tmp_path / str(version)
    require_fresh(server, weights, tmp_path / "fresh.log", tp=tp, old=old, held=held)


def test_a_version_that_is_not_published_leaves_the_old_weights(
    one_rank: PlainServer, source: Path, tmp_path: Path
) -> None:
    """Check a first version that ends with the trainer's death, a later join, and a refused version."""
    server = one_rank
    settings: dict[str, Any] = {
        "source": str(source),
        "servers": [server.url],
        "mode": "staged",
    }
    answered, held = ask(server), server.checksums()
    with syncing(tmp_path / "dying", 2, **settings) as trainers:
        assert [joined.error for joined in trainers.answers()] == ["", ""]
        killed = [trainers.processes[1].pid]
        trainers.begin(
            Order(version=1, checkpoint=str(tmp_path / "1"), kill=killed, kill_in="write")
        )
        began_s = time.monotonic()
        assert "RoundAborted" in trainers.answer(0).error
        assert time.monotonic() - began_s < TOLD_S
        trainers.abandon()
    assert (ask(server), server.checksums(), server.is_paused()) == (answered, held, False)
    with syncing(tmp_path / "trainers", 2, **settings) as trainers:
        assert [joined.error for joined in trainers.answers()] == ["", ""]
        expect(trainers.send(1, tmp_path / "2"), 1, [server.url])
        updated, answered = server.checksums(), ask(server)
        assert updated != held
        for sent in trainers.send(1, tmp_path / "again"):
            assert "RoundAborted" in sent.error
            assert "stale version" in sent.error
    assert (ask(server), server.checksums(), server.is_paused()) == (answered, updated, False)


def test_versions_of_large_noise_equal_fresh_servers(
    source: Path, tmp_path: Path, compared: Callable[[str, int], None]
) -> None:
    """With such weights, one wrong value or one wrong version changes most greedy tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    served: list[tuple[Answers, dict[str, str]]] = []
    with (
        serving_plain(source, tmp_path / "live.log", flags=("--dtype", NOISY_DTYPE)) as server,
        WeightSync(model, servers=[server.url]) as sync,
    ):
        for version in range(1, NUM_NOISY + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(noise.to(parameter.dtype) * NOISE)
            assert sync.send_weights(version).servers == (server.url,)
            # The second time, the prefix cache answers for the prompts.
            answered = ask(server)
            assert ask(server) == answered
            served.append((answered, server.checksums()))
            model.save_pretrained(tmp_path / str(version))
    assert len({str(answered) for answered, _ in served}) == NUM_NOISY
    for version, (answered, held) in enumerate(served, 1):
        log = tmp_path / f"fresh-{version}.log"
        require_equal_to_fresh(tmp_path / str(version), log, held, answered, dtype=NOISY_DTYPE)
        compared("greedy tokens with a fresh server's", NUM_TOKENS * len(PROMPTS))
        compared("logprobs with a fresh server's", NUM_TOKENS * len(PROMPTS))


KILLS: dict[str, dict[tuple[str, str], tuple[str, ...]]] = {
    "one": {("in_place", "keep"): ("write",)},
    "": {
        ("in_place", "keep"): ("prepare", "write", "apply"),
        ("staged", BY_CALLER): ("write", "verify", "pause", "publish"),
    },
    "all": {
        ("in_place", "keep"): ("prepare", "write", "verify", "apply", "publish"),
        ("staged", BY_CALLER): ("prepare", "write", "verify", "pause", "apply", "publish"),
    },
}
"""WINDLASS_ENGINES -> (mode, kind of pause) -> phases that a server is killed in."""


@pytest.mark.parametrize(("mode", "pause"), KILLS[CHOICE])
def test_a_server_that_dies_blocks_no_update_and_rejoins(
    mode: str, pause: str, one_rank: PlainServer, source: Path, tmp_path: Path
) -> None:
    """Kill a server in each phase, start it again at its URL, and check that it gets the next version."""
    phases = KILLS[CHOICE][mode, pause]
    stays = one_rank
    old, held = ask(stays), stays.checksums()
    dies = serving_plain(source, tmp_path / "dies.log")
    server = dies.__enter__()
    try:
        urls = [stays.url, server.url]
        port = int(server.url.rpartition(":")[2])
        with syncing(
            tmp_path / "trainers", 2, source=str(source), servers=urls, mode=mode,
            pause=None if pause == BY_CALLER else pause,
        ) as trainers:  # fmt: skip
            assert [joined.error for joined in trainers.answers()] == ["", ""]
            version = 0
            for phase in phases:
                version += 1
                with paused([stays, server] if pause == BY_CALLER else []):
                    expect(trainers.send(version, tmp_path / str(version)), version, urls)
                assert stays.checksums() == server.checksums()
                assert ask(stays) == ask(server)
                version += 1
                family = server.family()
                with paused([stays, server] if pause == BY_CALLER else []):
                    answers = trainers.send(
                        version, tmp_path / str(version), kill=family, kill_in=phase
                    )
                    server.process.wait(30)
                # In the last phase, the server may have received the version before its death.
                expect(answers, version, [stays.url], may=server.url if phase == "publish" else "")
                assert all(sent.took_s < TOLD_S for sent in answers), answers
                assert stays.version() == str(version)
                dies.__exit__(None, None, None)
                dies = serving_plain(source, tmp_path / "dies.log", port=port)
                server = dies.__enter__()
            version += 1
            expect(trainers.send(version, tmp_path / str(version)), version, urls)
            assert stays.checksums() == server.checksums()
            assert ask(stays) == ask(server)
        weights = tmp_path / str(version)
    finally:
        dies.__exit__(None, None, None)
    require_fresh(stays, weights, tmp_path / "fresh.log", tp=1, old=old, held=held)


def expect(answers: Sequence[Sent], version: int, urls: Sequence[str], may: str = "") -> None:
    for sent in answers:
        assert not sent.error, sent
        assert sent.version == version
        assert set(urls) <= set(sent.servers) <= {*urls, may}, sent


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_updated_adapter_equals_one_that_a_fresh_server_loads(tmp_path: Path) -> None:
    """The base model keeps its weights. The fresh server has the plugin too: its workers make the fingerprints."""
    source = checkpoint(1, tmp_path / "source")
    adapted(build("dense", 1), seed=2).save_pretrained(tmp_path / "adapter")
    with serving_plain(
        source, tmp_path / "live.log", flags=lora_flags(tmp_path / "adapter"), in_core=True
    ) as server:
        old, base, held = ask(server, ADAPTER), ask(server), server.digests()
        assert old != base
        version = 0
        for mode, pause in (("in_place", "keep"), ("staged", "abort")):
            with syncing(
                tmp_path / f"trainers-{mode}", 2, source=str(source), kind="dense+lora",
                servers=[server.url], mode=mode, pause=pause,
            ) as trainers:  # fmt: skip
                assert [joined.error for joined in trainers.answers()] == ["", ""]
                for _ in range(2):
                    version += 1
                    with running(server):
                        answers = trainers.send(version, tmp_path / str(version))
                    expect(answers, version, [server.url])
        answered, updated = ask(server, ADAPTER), server.digests()
        assert ask(server) == base
    assert answered != old
    assert updated.keys() == held.keys()
    changed = {name for name in updated if updated[name] != held[name]}
    assert changed
    assert all("adapter" in name for name in changed)
    with serving_plain(
        source, tmp_path / "fresh.log", flags=lora_flags(tmp_path / str(version)), in_core=True
    ) as fresh:
        assert fresh.digests() == updated
        require_equal_answers(answered, ask(fresh, ADAPTER), dtype=DTYPE)


def lora_flags(adapter: Path) -> tuple[str, ...]:
    """Return vLLM's own options for one adapter."""
    return ("--enable-lora", "--lora-modules", f"{ADAPTER}={adapter}", "--max-lora-rank", "8")


def test_every_rank_gets_the_reason_of_a_server_that_cannot_be_updated(
    source: Path, tmp_path: Path
) -> None:
    with serving_plain(
        source, tmp_path / "live.log", flags=("--enable-lora", "--max-lora-rank", "8")
    ) as server:
        old = ask(server)
        with syncing(
            tmp_path / "trainers", 2, source=str(source), servers=[server.url]
        ) as trainers:
            first, second = trainers.answers()
        assert "EngineRefused" in first.error
        assert "lora_config must be None" in first.error
        assert "lora_config must be None" in second.error
        assert "--lora-modules NAME=FOLDER must name the one adapter" in first.error
        assert ask(server) == old
