"""`examples/own_engine.py`, in the test process, serves exactly the trained weights."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

import windlass

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "secret"
PROMPT = [3, 1, 4, 1, 5]


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_engine", ROOT / "examples/own_engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small_model(seed: int) -> Any:
    torch.manual_seed(seed)
    described = json.loads((ROOT / "examples/launch/model.json").read_text())
    config = transformers.AutoConfig.for_model(**described)
    return transformers.AutoModelForCausalLM.from_config(config)


def trained_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        scores: torch.Tensor = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    answered = torch.tensor(tokens[len(PROMPT) :])[:, None]
    return scores[len(PROMPT) - 1 : -1].gather(1, answered)[:, 0]


async def test_a_custom_engine_serves_and_labels_the_trained_weights() -> None:
    own, trained = example(), small_model(0)
    served = own.Served(small_model(1).eval())
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)

    def train(url: str) -> None:
        with (
            own.join(served, url="http://127.0.0.1:1", controller=url, token=TOKEN, name="own"),
            windlass.connect_trainer(trained, controller=url, token=TOKEN) as trainer,
        ):
            for version in range(3):
                report = trainer.publish(version).result()
                assert report.engines == ("own",)
                for mine, theirs in zip(
                    trained.parameters(), served.model.parameters(), strict=True
                ):
                    assert torch.equal(mine, theirs)
                answer = served.generate(PROMPT, 4, 1.0)
                told = answer["meta_info"]
                assert told["output_token_versions"] == [version] * 4
                logprobs = torch.tensor([entry[0] for entry in told["output_token_logprobs"]])
                again = trained_logprobs(trained, PROMPT + answer["output_ids"])
                torch.testing.assert_close(logprobs, again, atol=1e-4, rtol=1e-4)
                trained(torch.tensor([PROMPT])).logits.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    async with windlass.Controller(token=TOKEN) as controller:
        await asyncio.to_thread(train, controller.url)


def test_a_request_interrupted_by_an_update_returns_its_tokens_or_waits() -> None:
    own = example()
    served = own.Served(small_model(1).eval())
    served.set_version(0, 1.0)
    served.resume(1.0)
    begin = served.step

    def paused_before_third(mode: windlass.PauseMode) -> Any:
        count = 0

        def step() -> Any:
            nonlocal count
            count += 1
            if count == 3:
                served.pause("p", mode, 5.0)
                served.set_version(served.version + 1, 1.0)
                served.resume(1.0)
            return begin()

        served.step = step
        return served.generate(PROMPT, 4, 1.0)["meta_info"]

    told = paused_before_third(windlass.PauseMode.IN_PLACE)
    assert (told["finish_reason"]["type"], told["output_token_versions"]) == (
        "length",
        [0, 0, 1, 1],
    )
    told = paused_before_third(windlass.PauseMode.ABORT)
    assert (told["finish_reason"]["type"], told["output_token_versions"]) == ("abort", [1, 1])
