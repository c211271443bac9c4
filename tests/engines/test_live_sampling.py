"""Live engines return log-probabilities of the sampled distribution, and each engine draws its own samples.

The test sends requests with all settings of `SAMPLINGS` in one batch. transformers computes the expected log-probabilities
in the test process, from the files of the checkpoint. Servers compute in float32: rounding then moves no token across
a cut.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from plain_vllm import MODEL, PlainServer, checkpoint, serving_plain
from sampling import (
    SAMPLINGS,
    SPECIAL_SAMPLINGS,
    distributions,
    expected_logprobs,
    top_k_and_top_p,
    top_k_then_top_p,
)
from servers import TOKEN, Layout, Server, serving
from sglang_servers import ENGINE_TOKEN, install, launched, token_file, variables

import windlass
from windlass.net.addresses import free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

PROMPTS = [[5, 9, 33, 101 + number] for number in range(16)]
NUM_TOKENS = 8
NUM_TOP = 7
FLOAT32 = ("--dtype", "float32")
CUTS = {"vllm": top_k_then_top_p, "sglang": top_k_and_top_p}
REFUSED = {
    "vllm": [("priority", 1, "priority must be 0 without --scheduling-policy priority, got 1")],
    "sglang": [
        ("priority", 1, "priority must be None without --enable-priority-scheduling"),
        ("sampling_seed", 3, "sampling_seed must be None without --enable-deterministic-inference"),
    ],
}
Answer = tuple[list[int], list[float]]
Ask = Callable[[list[int], dict[str, Any]], Answer]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(1, tmp_path_factory.mktemp("source") / "source")


@pytest.fixture(scope="module")
def model(source: Path) -> Any:
    found = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return found.eval()


def asking(server: Server, replica: int = 0) -> Ask:
    def ask(prompt: list[int], sampling: dict[str, Any]) -> Answer:
        params = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}
        body: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": params,
            "return_logprob": True,
        }
        chosen = {"X-data-parallel-rank": str(replica)} if server.layout.dp > 1 else {}
        if server.layout.dp > 1 and server.engine == "sglang":
            body["routed_dp_rank"] = replica
        answer = server.post("/generate", body, **chosen)
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        return answer["output_ids"], logprobs

    return ask


def asking_plain(server: PlainServer) -> Ask:
    """Return a function that asks through vLLM's own route, like a user of a plain server."""

    def ask(prompt: list[int], sampling: dict[str, Any]) -> Answer:
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0, **sampling,
        }  # fmt: skip
        said = json.loads(server.http.post("/v1/completions", body, 120.0))["choices"][0]
        tokens = [int(word.strip().removeprefix("w")) for word in said["logprobs"]["tokens"]]
        return tokens, said["logprobs"]["token_logprobs"]

    return ask


def drawn(ask: Ask) -> list[list[int]]:
    return [ask(prompt, {})[0] for prompt in PROMPTS]


def require_own_samples(samples: Sequence[list[list[int]]]) -> None:
    for one, other in combinations(samples, 2):
        assert not [a for a, b in zip(one, other, strict=True) if a == b]


def require_sampled_logprobs(ask: Ask, model: Any, engine: str) -> None:
    with ThreadPoolExecutor(len(SAMPLINGS)) as pool:
        together = list(pool.map(lambda sampling: ask(PROMPTS[0], sampling), SAMPLINGS))
    alone = [ask(PROMPTS[1], sampling) for sampling in SAMPLINGS]
    for prompt, answers in zip(PROMPTS, (together, alone), strict=False):
        for sampling, (tokens, served) in zip(SAMPLINGS, answers, strict=True):
            if engine == "sglang" and sampling == {"top_k": 1}:
                # SGLang represents a greedy request like this request, so both get the same log-probabilities.
                sampling = {"temperature": 0.0}
            expected = expected_logprobs(model, prompt, tokens, sampling, CUTS[engine])
            assert torch.allclose(torch.tensor(served), expected, atol=1e-3), (sampling, served)


def require_top_logprobs(server: Server, model: Any, engine: str) -> None:
    """Compare the most probable tokens of each place with the distribution, for all settings in one batch."""

    def ask(sampling: dict[str, Any]) -> Any:
        params = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}
        body = {"input_ids": PROMPTS[0], "sampling_params": params, "return_logprob": True}
        return server.post("/generate", {**body, "top_logprobs_num": NUM_TOP})

    with ThreadPoolExecutor(len(SAMPLINGS)) as pool:
        answers = list(pool.map(ask, SAMPLINGS))
    counts = set()
    for sampling, answer in zip(SAMPLINGS, answers, strict=True):
        if engine == "sglang" and sampling == {"top_k": 1}:
            sampling = {"temperature": 0.0}
        tokens = answer["output_ids"]
        rows = distributions(model, PROMPTS[0], tokens, sampling, CUTS[engine])
        for row, top in zip(rows, answer["meta_info"]["output_top_logprobs"], strict=True):
            best = row.topk(NUM_TOP).values
            best = best[best > -torch.inf]
            found = torch.tensor([logprob for logprob, *_ in top])
            assert len(found) == len(best), (sampling, top, best)
            assert torch.allclose(found, best, atol=1e-3), (sampling, top, best)
            assert torch.allclose(row[[token for _, token, _ in top]], best, atol=1e-3)
            counts.add(len(top))
    assert {1, NUM_TOP} <= counts


def join(join_at: Callable[[str], object]) -> None:
    """Let a server join the fleet of a controller, and end the controller."""

    async def in_loop() -> None:
        async with windlass.Controller(token=TOKEN) as controller:
            await asyncio.to_thread(join_at, controller.url)

    asyncio.run(in_loop())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_launched_engines_draw_independent_samples(
    engine: str, source: Path, model: Any, tmp_path: Path
) -> None:
    """Check a server of two ranks, the same server after a restart, and a server of two replicas."""
    samples = []
    for name in ("first", "again"):
        with serving(engine, source, tmp_path / name, layout=Layout(2), flags=FLOAT32) as server:
            join(partial(server.join, transport="cma"))
            samples.append(drawn(asking(server)))
            if name == "again":
                require_sampled_logprobs(asking(server), model, engine)
    replicas = Layout(dp=2)
    with serving(engine, source, tmp_path / "dp", layout=replicas, flags=FLOAT32) as server:
        join(partial(server.join, transport="cma"))
        samples += [drawn(asking(server, replica)) for replica in range(2)]
    require_own_samples(samples)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_launched_engines_follow_stop_texts_penalties_and_structures(
    engine: str, source: Path, model: Any, tmp_path: Path
) -> None:
    with serving(
        engine, source, tmp_path / "log", layout=Layout(1), flags=FLOAT32, tokenizes=True
    ) as server:
        join(partial(server.join, transport="cma"))
        require_top_logprobs(server, model, engine)
        ask = asking(server)
        for sampling in SPECIAL_SAMPLINGS:
            if engine == "sglang" and "repetition_penalty" in sampling:
                # SGLang penalises only the tokens of the answer.
                continue
            tokens, served = ask(PROMPTS[0], sampling)
            assert len(tokens) == NUM_TOKENS
            expected = expected_logprobs(model, PROMPTS[0], tokens, sampling, CUTS[engine])
            assert torch.allclose(torch.tensor(served), expected, atol=1e-3), (sampling, served)
        if engine == "vllm":
            seeded = [ask(PROMPTS[0], {"sampling_seed": seed})[0] for seed in (3, 4, 3, 4)]
            assert seeded[:2] == seeded[2:]
            assert seeded[0] != seeded[1]
        for name, value, says in REFUSED[engine]:
            body: dict[str, Any] = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
            (body if name == "priority" else body["sampling_params"])[name] = value
            with pytest.raises(urllib.error.HTTPError) as refused:
                server.post("/generate", body)
            assert refused.value.code in {400, 422}
            assert says in refused.value.read().decode()
        grammar = "root ::= " + ' ("w1" | "w2")' * NUM_TOKENS
        tokens, _ = ask(PROMPTS[0], {"ebnf": grammar})
        assert len(tokens) == NUM_TOKENS
        assert set(tokens) <= {1, 2}
        greedy = {"temperature": 0.0}
        whole, _ = ask(PROMPTS[0], greedy)
        last = whole[-2:]
        first = next(n for n in range(2, len(whole) + 1) if whole[n - 2 : n] == last)
        stopped, _ = ask(PROMPTS[0], {**greedy, "stop": [f"w{last[0]} w{last[1]}"]})
        assert stopped == whole[:first]
        # No token is a proper prefix of these words, and the expression ends with the last token of the answer.
        tokens, _ = ask(PROMPTS[0], {"regex": f"(w[1-9]){{{NUM_TOKENS}}}"})
        assert len(tokens) == NUM_TOKENS
        assert all(1 <= token <= 9 for token in tokens)


def test_vllm_servers_of_a_user_draw_independent_samples(
    source: Path, model: Any, tmp_path: Path
) -> None:
    with ExitStack() as running:
        servers = [
            running.enter_context(serving_plain(source, tmp_path / name, flags=FLOAT32))
            for name in ("one", "other")
        ]
        samples = [drawn(asking_plain(server)) for server in servers]
        require_sampled_logprobs(asking_plain(servers[1]), model, "vllm")
    with serving_plain(source, tmp_path / "again", flags=FLOAT32) as server:
        require_own_samples([*samples, drawn(asking_plain(server))])


def test_a_user_may_choose_the_seed_and_raw_log_probabilities(
    source: Path, model: Any, tmp_path: Path
) -> None:
    named = (*FLOAT32, "--seed", "0", "--logprobs-mode", "raw_logprobs")
    samples = []
    for name in ("first", "again"):
        with serving_plain(source, tmp_path / name, flags=named) as server:
            samples.append(drawn(asking_plain(server)))
            tokens, served = asking_plain(server)(PROMPTS[0], {"temperature": 0.5})
            assert torch.allclose(
                torch.tensor(served), expected_logprobs(model, PROMPTS[0], tokens, {}), atol=1e-3
            )
    assert samples[0] == samples[1]


def test_sglang_servers_of_a_user_draw_independent_samples(
    source: Path, model: Any, tmp_path: Path
) -> None:
    given = variables(
        install(tmp_path / "site"),
        WINDLASS_CONTROLLER="wait",
        WINDLASS_TOKEN_FILE=str(token_file(tmp_path)),
    )
    samples = []

    def told(server: Server, controller: str) -> None:
        server.post(
            "/windlass/join", {"controller": controller}, Authorization=f"Bearer {ENGINE_TOKEN}"
        )

    with ExitStack() as running:
        for name in ("one", "other"):
            server = running.enter_context(
                launched(source, tmp_path / name, free_port(), given, flags=FLOAT32)
            )
            join(partial(told, server))
            samples.append(drawn(asking(server)))
            if name == "other":
                require_sampled_logprobs(asking(server), model, "sglang")
    with launched(source, tmp_path / "again", free_port(), given, flags=FLOAT32) as server:
        join(partial(told, server))
        require_own_samples([*samples, drawn(asking(server))])
