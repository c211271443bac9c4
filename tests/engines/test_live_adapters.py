"""A live vLLM server that serves a LoRA adapter is updated with the adapter alone.

A PEFT model under FSDP2 on two processes trains a step and publishes, over each transport and in each mode. After every
update

1. on every rank, the adapter's slot has the same bytes as in a new model, after vLLM's own loader loaded the adapter that
   PEFT saved; no byte of the model has changed;
2. requests that name the adapter get the greedy tokens and logprobs of transformers and PEFT, within bfloat16, through
   either route, with the new version;
3. requests that do not name the adapter get the same answers as before, and the adapter's slot has no effect on them.
"""

from __future__ import annotations

import os
import urllib.error
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rows import MATRIX, Record, Shown
from servers import ADAPTER, Layout, Sample, Server, adapted, build, engine_version, save, serving
from test_live_servers import (
    BFLOAT16_MEAN_DISTANCE,
    NUM_TOKENS,
    P2P_WAYS,
    PROMPT,
    Way,
    distance,
    publish,
)

from trainers import FSDP, training

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

KIND = "dense"
FULL = os.environ.get("WINDLASS_ENGINES", "") == "all"
SLOT = "buffer:adapter/"
Digests = list[dict[str, str]]


SHARDED = "fully sharded"
"""Name of a layout in which tensor-parallel ranks also split the low-rank dim of an adapter."""
LAYOUTS = {
    "tp1": Layout(),
    "tp2": Layout(2),
    f"tp2 {SHARDED}": Layout(2),
    "tp1 pp2": Layout(pp=2),
    "tp1 dp2": Layout(dp=2),
}


def row(name: str, way: Way, outcome: str = "proven") -> Shown:
    return Shown(
        trainer=str(FSDP), engine="vllm", engine_version=engine_version("vllm"),
        engine_parallelism=name, model=f"{KIND}+lora", dtype="float32 -> bfloat16",
        transport=way.transport, mode=str(way.mode), outcome=outcome,
    )  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def matrix(request: pytest.FixtureRequest) -> None:
    """Add every combination as `untested`; a passed test replaces its row."""
    request.config.stash.setdefault(MATRIX, []).extend(
        asdict(row(name, way, "untested")) for name in LAYOUTS for way in P2P_WAYS
    )


@pytest.mark.parametrize("name", LAYOUTS if FULL else ["tp2"])
async def test_an_updated_adapter_equals_a_freshly_loaded_adapter(
    name: str, tmp_path: Path, shown: Record
) -> None:
    layout, flags = LAYOUTS[name], (("--fully-sharded-loras",) if SHARDED in name else ())
    base, old = save(KIND, 1, tmp_path / "base"), tmp_path / "adapter"
    adapted(build(KIND, 1).float(), seed=4).save_pretrained(old)
    with serving(
        "vllm", base, tmp_path / "live.log", layout=layout, adapter=old, flags=flags
    ) as server:
        model, answer = parts(server.digests())[0], server.sample(PROMPT, NUM_TOKENS)
        version, adapter = 0, old
        with training(FSDP, f"{KIND}+lora", base) as ranks:
            for way in P2P_WAYS:
                version += 1
                adapter, before = tmp_path / str(version), parts(server.digests())[1]
                await publish(server, ranks, way, version, adapter)
                held = parts(server.digests())
                assert held[0] == model
                assert all(a != b for a, b in zip(before, held[1], strict=True))
                check(server, adapter, version, base=base, old=old)
                again = server.sample(PROMPT, NUM_TOKENS)
                assert (again.tokens, again.logprobs) == (answer.tokens, answer.logprobs)
                assert parts(server.digests())[1] == fresh(server, adapter)
        check_that_it_stays(server, adapter, old)
    for way in P2P_WAYS:
        shown(row(name, way))


def parts(digests: Digests) -> tuple[Digests, Digests]:
    """Split the digests of every rank into digests of the model and of the adapter's slot."""
    slots = [{k: v for k, v in d.items() if k.startswith(SLOT)} for d in digests]
    model = [{k: v for k, v in d.items() if not k.startswith(SLOT)} for d in digests]
    assert all(slots)
    assert all(model)
    return model, slots


def fresh(server: Server, adapter: Path) -> Digests:
    """Return per rank the digests of freshly loaded slots; vLLM answers for its first replica only."""
    return server.digests_of_fresh_adapter(adapter) * server.layout.dp


def check(server: Server, adapter: Path, version: int, *, base: Path, old: Path) -> None:
    for replica in range(server.layout.dp):
        sample = server.sample(PROMPT, NUM_TOKENS, adapter=ADAPTER, replica=replica)
        assert sample.versions == [version] * NUM_TOKENS
        if server.layout.dp == 1:
            assert openai_tokens(server) == sample.tokens
        logprobs = expected(base, adapter, sample)
        chosen = logprobs.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        assert float((logprobs.max(1).values - chosen).max()) < 2 * BFLOAT16_MEAN_DISTANCE
        assert distance(logprobs, sample) < BFLOAT16_MEAN_DISTANCE
        assert distance(expected(base, old, sample), sample) > 4 * BFLOAT16_MEAN_DISTANCE


def openai_tokens(server: Server) -> list[int]:
    """Return the tokens of a greedy answer through vLLM's OpenAI route."""
    answer = server.post(
        "/v1/completions",
        {
            "model": ADAPTER, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        },
    )  # fmt: skip
    return list(answer["choices"][0]["token_ids"])


@torch.no_grad()
def expected(base: Path, adapter: Path, sample: Sample) -> torch.Tensor:
    """Return logprobs of transformers and PEFT at the positions of an answer: (tokens, vocabulary)."""
    from peft import PeftModel

    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(plain, adapter).eval()
    tokens = torch.tensor([[*PROMPT, *sample.tokens]])
    logits: torch.Tensor = model(tokens[:, :-1]).logits[0, len(PROMPT) - 1 :].float()
    return logits.log_softmax(-1)


def check_that_it_stays(server: Server, adapter: Path, old: Path) -> None:
    """Check that another adapter does not replace this one, and that an engine without it refuses updates."""
    held = server.digests()
    body = {"method": "load_another_adapter", "args": [str(old)]}
    said = server.post("/collective_rpc", body)["results"]
    assert all("pinned" in words for words in said), said
    assert server.digests() == held
    assert parts(held)[1] == fresh(server, adapter)
    server.post("/collective_rpc", {"method": "remove_lora", "args": [1]})
    with pytest.raises(urllib.error.HTTPError):
        server.post("/collective_rpc", {"method": "windlass_quiesce", "args": ["x", ""]})
