"""The embedded engine, in real processes, answers as transformers does and pauses as documented."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from sampling import SAMPLINGS, SPECIAL_SAMPLINGS, expected_logprobs

from windlass.engines.embedded.scheduler import Request, Scheduler
from windlass.engines.embedded.server import EngineServer
from windlass.engines.embedded.spec import EngineSettings
from windlass.net.access import Access, role_token
from windlass.net.server import ControlServer
from windlass.sampling import SamplingParams

TOKEN = "secret of the test"
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": None,
}
PROMPTS = [[5, 9, 33], [1], [60, 2, 2, 2, 7, 41], [13, 12, 11, 10]]
NUM_TOKENS = 12


@dataclass(frozen=True)
class Engine:
    """A running engine; a request of `num_long` tokens keeps it busy for about one to two seconds."""

    process: subprocess.Popen[str]
    url: str
    num_long: int

    def call(self, path: str, body: object | None = None, token: str = TOKEN) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: dict[str, Any] = json.loads(response.read())
        return answer

    def status_of(
        self, path: str, body: object | None = None, token: str = TOKEN
    ) -> tuple[int, str]:
        with pytest.raises(urllib.error.HTTPError) as caught:
            self.call(path, body, token)
        with caught.value as error:
            return error.code, json.loads(error.read())["error"]

    def generate(self, prompt: list[int], num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "max_new_tokens": num_tokens}
        return self.call("/generate", {"input_ids": prompt, "sampling_params": sampling})


def start(folder: Path, tensor_parallel_size: int, *options: str) -> Engine:
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG))
    process = subprocess.Popen(
        (
            *(sys.executable, "-m", "windlass.engines.embedded", "--name", "engine"),
            *("--model", str(config), "--tp", str(tensor_parallel_size)),
            *("--max-positions", "512", *options),
        ),
        env={**os.environ, "WINDLASS_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return Engine(
        process,
        json.loads(process.stdout.readline())["url"],
        400 if tensor_parallel_size == 1 else 60,
    )


def end(engine: Engine) -> None:
    engine.process.kill()
    engine.process.wait(30)
    assert engine.process.stdout is not None
    engine.process.stdout.close()


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    running = start(tmp_path_factory.mktemp("engine"), request.param)
    yield running
    end(running)


@pytest.fixture(scope="module")
def reference() -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**CONFIG)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_concurrent_requests_get_the_tokens_and_logprobs_of_transformers(
    engine: Engine, reference: Any
) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(engine.generate, PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            whole = reference.generate(
                torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
            )
            logits = reference(whole).logits[0, len(prompt) - 1 : -1]
        expected = whole[0, len(prompt) :]
        assert answer["output_ids"] == expected.tolist()
        logprobs = logits.log_softmax(-1).gather(1, expected[:, None])[:, 0]
        served = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
        assert torch.allclose(served, logprobs, atol=1e-4)
        assert answer["meta_info"]["finish_reason"] == {"type": "length"}


def test_log_probabilities_match_the_sampled_distribution(engine: Engine, reference: Any) -> None:
    """Requests with different settings share the steps of a batch."""

    def ask(sampling: dict[str, Any]) -> dict[str, Any]:
        body = {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": 24, **sampling}}
        return engine.call("/generate", body)

    samplings = SAMPLINGS + SPECIAL_SAMPLINGS
    with ThreadPoolExecutor(len(samplings)) as pool:
        answers = list(pool.map(ask, samplings))
    for sampling, answer in zip(samplings, answers, strict=True):
        expected = expected_logprobs(reference, PROMPTS[0], answer["output_ids"], sampling)
        served = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
        assert torch.allclose(served, expected, atol=1e-4), sampling


@pytest.mark.parametrize(
    "sampling",
    [{"json_schema": "{}"}, {"regex": "a"}, {"ebnf": "a"}, {"choice": ["a"]}, {"stop": ["w7"]}],
)
def test_what_this_engine_cannot_match_is_refused(engine: Engine, sampling: dict[str, Any]) -> None:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 4, **sampling}}
    status, error = engine.status_of("/generate", body)
    assert status == 400
    assert next(iter(sampling)) in error
    assert "must be empty" in error


def test_a_priority_and_a_bias_outside_the_vocabulary_are_refused(engine: Engine) -> None:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 4}, "priority": 1}
    assert engine.status_of("/generate", body) == (
        400,
        "priority must be 0 for the embedded engine, got 1; use vLLM or SGLang",
    )
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 4, "logit_bias": {"64": 1.0}}}
    status, error = engine.status_of("/generate", body)
    assert status == 400
    assert "logit_bias must have token ids below 64, got 64" in error


def test_images_are_refused_by_name(engine: Engine) -> None:
    # Also images that are larger than any prompt.
    for size in (8, 2 << 20):
        body = {"input_ids": [5], "image_data": ["data:image/png;base64," + "A" * size]}
        assert engine.status_of("/generate", body) == (
            400,
            "image_data must be empty for the embedded engine, got 1 images; use vLLM or SGLang",
        )


def test_equal_seeds_give_equal_answers_next_to_other_requests(engine: Engine) -> None:
    def ask(seed: int | None) -> tuple[int, ...]:
        sampling = {"max_new_tokens": 24, "ignore_eos": True, "sampling_seed": seed}
        answer = engine.call("/generate", {"input_ids": PROMPTS[0], "sampling_params": sampling})
        return tuple(answer["output_ids"])

    seeds = (3, None, 4, 3, None, 4)
    with ThreadPoolExecutor(len(seeds)) as pool:
        one, free, other, again, free_again, other_again = pool.map(ask, seeds)
    assert (one, other) == (again, other_again) == (ask(3), ask(4))
    assert len({one, other, free, free_again}) == 4


def test_answers_end_after_a_stop_text(tmp_path: Path, reference: Any) -> None:
    words = {f"w{number}": number for number in range(64)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    folder = tmp_path / "model"
    reference.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    engine = start(tmp_path, 1, "--model", str(folder))
    try:
        whole = engine.generate(PROMPTS[0])["output_ids"]
        last = whole[-2:]
        stop = ["not there", f"w{last[0]} w{last[1]}"]
        sampling = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "stop": stop}
        body = {"input_ids": PROMPTS[0], "sampling_params": sampling}
        answer = engine.call("/generate", body)
    finally:
        end(engine)
    first = next(n for n in range(2, len(whole) + 1) if whole[n - 2 : n] == last)
    assert answer["output_ids"] == whole[:first]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop"}


@pytest.mark.long
@pytest.mark.parametrize(
    "named", [False, pytest.param(True, marks=pytest.mark.long)], ids=["own_seed", "named_seed"]
)
def test_each_start_of_an_engine_draws_its_own_samples(tmp_path: Path, named: bool) -> None:
    def drawn(*options: str) -> list[list[int]]:
        engine = start(tmp_path, 1, *options)
        body = {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": NUM_TOKENS}}
        answers = [engine.call("/generate", body)["output_ids"] for _ in range(4)]
        end(engine)
        return answers

    options = ("--seed", "3") if named else ()
    first, again = drawn(*options), drawn(*options)
    assert len({tuple(answer) for answer in (*first, *again)}) == (4 if named else 8)
    assert (first == again) == named


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_paused_generation_continues_with_the_same_tokens(engine: Engine, mode: str) -> None:
    undisturbed = engine.generate(PROMPTS[0], engine.num_long)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, PROMPTS[0], engine.num_long)
        assert engine.call("/pause_generation", {"mode": mode})["status"] == "paused"
        info = engine.call("/server_info")
        assert info["paused"]
        assert not running.done() or running.result()["output_ids"] == undisturbed["output_ids"]
        engine.call("/continue_generation", {})
        assert running.result(60)["output_ids"] == undisturbed["output_ids"]


def test_a_pause_that_aborts_returns_the_generated_tokens(engine: Engine) -> None:
    undisturbed = engine.generate(PROMPTS[2], engine.num_long)["output_ids"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, PROMPTS[2], engine.num_long)
        while engine.call("/server_info")["running"] == 0:
            assert not running.done()
        engine.call("/pause_generation", {"mode": "abort"})
        answer = running.result(60)
    engine.call("/continue_generation", {})
    assert answer["meta_info"]["finish_reason"] == {"type": "abort"}
    assert 0 < len(answer["output_ids"]) < engine.num_long
    assert answer["output_ids"] == undisturbed[: len(answer["output_ids"])]


def test_every_token_carries_its_weight_version(engine: Engine) -> None:
    engine.call("/update_weight_version", {"new_version": 7})
    meta = engine.generate(PROMPTS[1])["meta_info"]
    assert meta["weight_version"] == "7"
    assert meta["output_token_versions"] == [7] * NUM_TOKENS
    assert engine.call("/model_info")["weight_version"] == "7"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": []}, "input_ids must not be empty"),
        ({"input_ids": [64]}, "input_ids must be in \\[0, 64\\), got 64"),
        (
            {"sampling_params": {"max_new_tokens": 1, "temperature": -1.0}},
            "temperature must be >= 0 and finite, got -1.0",
        ),
        ({"sampling_params": {"max_new_tokens": 512}}, "must fit into 512 positions, got 515"),
        ({"lora_path": "math"}, "lora_path must be empty"),
        ({"input_ids": "five"}, "Expected `array`, got `str`"),
    ],
)
def test_a_bad_request_names_argument_rule_and_value(
    engine: Engine, change: dict[str, Any], message: str
) -> None:
    status, error = engine.status_of("/generate", {"input_ids": PROMPTS[0], **change})
    assert status == 400
    assert re.search(message, error), error


def test_a_top_p_of_almost_zero_samples_the_most_probable_token(engine: Engine) -> None:
    """Check that the most probable token is in every nucleus: `top_p` 1e-300 becomes 0.0 in float32."""
    sampling = {"max_new_tokens": 2, "top_p": 1e-300}
    answer = engine.call("/generate", {"input_ids": [1], "sampling_params": sampling})
    assert answer["output_ids"] == engine.generate([1], 2)["output_ids"]


def test_only_the_request_that_cannot_be_sampled_fails() -> None:
    scheduler, finished = (
        Scheduler(num_slots=2, max_positions=8, paused=False, seed=0),
        list[Request](),
    )
    once = SamplingParams(max_new_tokens=1)
    for rid in ("bad", "good"):
        scheduler.submit(Request(rid, [1], once, frozenset(), on_finish=finished.append))
    step = scheduler.next_step()
    logits = torch.zeros(2, 4)
    logits[0, 0] = torch.nan
    scheduler.sample(step, logits)
    assert [(r.rid, bool(r.failure), len(r.output_ids)) for r in finished] == [
        ("bad", True, 0),
        ("good", False, 1),
    ]
    assert scheduler.num_requests() == (0, 0)


@pytest.mark.parametrize("path", ["/health", "/model_info", "/generate", "/pause_generation"])
def test_every_route_requires_the_token(engine: Engine, path: str) -> None:
    assert (
        engine.status_of(path, None if "_info" in path or "health" in path else {}, "wrong")[0]
        == 401
    )


def test_an_engine_prints_a_refused_setting_in_one_line() -> None:
    command = (sys.executable, "-m", "windlass.engines.embedded", "--name", "e", "--model", "m")
    ended = subprocess.run(
        (*command, "--max-batch", "0", "--host", "127.0.0.1"),
        env={**os.environ, "WINDLASS_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr == "engine e: ConfigError: max_batch must be >= 1, got 0\n"


def test_a_rollout_client_may_generate_but_not_pause(engine: Engine) -> None:
    token = role_token(TOKEN, Access.CLIENT)
    sampling = {"temperature": 0.0, "max_new_tokens": 2}
    answer = engine.call("/generate", {"input_ids": [3, 4], "sampling_params": sampling}, token)
    assert len(answer["output_ids"]) == 2
    status, said = engine.status_of("/pause_generation", {}, token)
    assert status == 403
    assert said == "POST /pause_generation needs role owner, but this caller has role client"
    assert engine.status_of("/generate", {}, role_token(TOKEN, Access.OBSERVER))[0] == 403


def test_an_engine_server_that_cannot_listen_raises_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(server: ControlServer) -> None:
        server.bind().close()
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(ControlServer, "start", refuse)
    server = EngineServer(
        EngineSettings(name="engine", model="none"),
        TOKEN,
        Scheduler(num_slots=1, max_positions=8, paused=False, seed=0),
        vocab_size=64,
        eos_token_ids=frozenset(),
        read_weight=lambda _name: [],
        require_weights=lambda _what: None,
        sleep=lambda _mode, _deadline_s: None,
    )
    with pytest.raises(OSError, match="already in use"):
        server.start()
    for thread in threading.enumerate():
        if thread.name == "http":
            thread.join(10)
            assert not thread.is_alive()
    # Python warns when it collects an open event loop, and warnings fail tests.
    gc.collect()


@pytest.mark.parametrize("engine", [2], indirect=True, ids=["tp2"])
def test_an_engine_that_lost_a_rank_ends(engine: Engine) -> None:
    # This test ends the shared engine, so it must come last.
    children = Path(f"/proc/{engine.process.pid}/task/{engine.process.pid}/children").read_text()
    os.kill(int(children.split()[0]), signal.SIGKILL)
    assert engine.process.wait(30) == 1
