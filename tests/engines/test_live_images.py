"""Messages with images, in a live vLLM server: trainers get exactly the tokens and images that the engine used.

The trainer's side computes every log-probability again with transformers, from the sample alone: the token ids of the prompt
as the engine expanded them, and the tensors of the processor. A worker process in vLLM's environment makes them.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import os
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from servers import ROOT, TOKEN, VENVS, Layout, Server, serving
from small_job import launch, vllm_engine
from vision_checkpoint import MERGED, png, write_vision_checkpoint

import windlass
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines, UpdateMode
from windlass.errors import RolloutError
from windlass.net.server import ControlServer
from windlass.rollout import (
    BatchClient,
    BatchQueue,
    RolloutController,
    RolloutGroup,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    TrainingSample,
    mount_rollout_routes,
    training_samples,
)
from windlass.rollout.messages import TrainingBatch

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

MODEL = "model"
OPTIONS = ("--max-model-len", "1024", "--served-model-name", MODEL, "--dtype", "float32")
NUM_TOKENS = 12
GREEDY = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
ATOL = 1e-3
"""Largest difference of float32 log-probabilities between vLLM and transformers."""
WORKER, TRAINER = ROOT / "tests/support/image_worker.py", ROOT / "tests/support/image_trainer.py"
SMALL, WIDE, OTHER = png(2 * MERGED, 1), png(4 * MERGED, 2, height=2 * MERGED), png(2 * MERGED, 3)
"""Images of 4, 8 and 4 tokens."""


def url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def about(*images: bytes, text: str = "What is in image 7 ?") -> list[dict[str, Any]]:
    """Return a message with images before and a text after them, in OpenAI's form."""
    parts = [{"type": "image_url", "image_url": {"url": url(image)}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def forward(
    model: Any, sample: TrainingSample, bias: Mapping[int, float] | None = None
) -> torch.Tensor:
    """Return the log-probabilities of all tokens at each output token's place, by transformers."""
    ids = torch.tensor([sample.prompt_ids + sample.output_ids])
    named = {name: tensor.to_torch() for name, tensor in sample.image_tensors.items()}
    kinds = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **named).logits[0].float()
    for token, change in (bias or {}).items():
        logits[:, token] += change
    found: torch.Tensor = logits[len(sample.prompt_ids) - 1 : -1].log_softmax(-1)
    return found


def check(model: Any, sample: TrainingSample) -> int:
    """Compare the log-probabilities of a sample's generated tokens with transformers; return their number."""
    found = forward(model, sample)
    mine = found[torch.arange(len(sample.output_ids)), list(sample.output_ids)]
    made = torch.tensor(sample.loss_mask)
    torch.testing.assert_close(torch.tensor(sample.logprobs)[made], mine[made], atol=ATOL, rtol=0)
    return sample.num_trained


class Rig:
    """Rollout controller with one live engine, and a worker in the engine's environment."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack, self.step = stack, 0

    async def start(self, server: Server, *, in_environment_of: str = "vllm") -> None:
        engines = StaticEngines([("engine", server.url, 0)])
        self.rollouts = await self.stack.enter_async_context(
            RolloutController(engines, StalenessPolicy.unbounded(64), token=TOKEN)
        )
        self.batches = BatchQueue()
        self.stack.callback(self.batches.close)
        control = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
        mount_rollout_routes(control, self.rollouts, self.batches)
        await control.start()
        self.stack.push_async_callback(control.close)
        self.url = control.url
        process = await asyncio.create_subprocess_exec(
            *(str(VENVS[in_environment_of] / "bin/python"), str(WORKER)),
            *("--name", "w", "--controller", control.url, "--tokenizer", str(server.model)),
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "WINDLASS_TOKEN": TOKEN},
        )

        async def reap() -> None:
            process.kill()
            await process.wait()

        self.stack.push_async_callback(reap)

    async def samples(
        self, *prompts: Any, n: int = 1, sampling: SamplingParams = GREEDY
    ) -> list[tuple[TrainingSample, ...]]:
        """Return the samples of each prompt's group, as a trainer rank gets them."""
        for number, prompt in enumerate(prompts):
            self.rollouts.submit_group(prompt, n, sampling, metadata=number)
        found = await self.rollouts.next_batch(len(prompts), deadline_s=120)
        groups = sorted(found, key=lambda group: group.metadata)  # type: ignore[arg-type,return-value]
        made = await self.trained([training_samples(group, range(n)) for group in groups])
        return [tuple(made[at : at + n]) for at in range(0, len(made), n)]

    async def talks(
        self, workflow: str, questions: Sequence[Any], n: int = 1
    ) -> tuple[RolloutGroup, list[TrainingSample]]:
        """Return the group of a conversation with these questions, and its samples, as a trainer rank gets them."""
        self.rollouts.submit_workflow_group(workflow, questions, n, GREEDY)
        (group,) = await self.rollouts.next_batch(1, deadline_s=120)
        return group, await self.trained([training_samples(group, range(n))])

    async def trained(self, groups: Sequence[Sequence[TrainingSample]]) -> list[TrainingSample]:
        """Return the samples of all groups, as a trainer rank gets them."""
        await self.batches.put(self.step, groups)
        with BatchClient(self.url, TOKEN) as client:
            ask = client.next_batch
            batch = await asyncio.to_thread(ask, self.step, 0, 1, deadline_s=60)
        self.step += 1
        return list(batch.samples)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Any]]:
    """Provide a server with a Qwen2-VL, and the model in transformers."""
    folder = tmp_path_factory.mktemp("model")
    model = write_vision_checkpoint(folder, 1)
    log = tmp_path_factory.mktemp("log") / "log"
    with serving("vllm", folder, log, layout=Layout(), flags=OPTIONS, tokenizes=True) as server:
        yield server, model


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        yield Rig(stack)


def chat_completion(server: Server, messages: Any) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt and of the greedy answer of vLLM's own route for chats."""
    answer = server.post(
        "/v1/chat/completions",
        {
            "model": MODEL, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
            "messages": messages, "return_token_ids": True,
        },
    )  # fmt: skip
    return answer["prompt_token_ids"], answer["choices"][0]["token_ids"]


@asynccontextmanager
async def updated(server: Server, model: Any) -> AsyncIterator[Any]:
    """Connect a trainer with `model` to the server, publish version 1, and provide the trainer."""
    config = ControlConfig(
        mode=UpdateMode.IN_PLACE,
        pause_mode=PauseMode.ABORT,
        deadlines=PhaseDeadlines(pause_s=120),
    )
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        await asyncio.to_thread(server.join, controller.url, "cma")
        with await asyncio.to_thread(
            lambda: windlass.connect_trainer(model, controller=controller.url, token=TOKEN)
        ) as trainer:
            await asyncio.to_thread(trainer.publish, 1)
            yield trainer


def metric(server: Server, name: str) -> float:
    """Return a counter of the server, summed over its labels."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found = [line.split()[1] for line in lines if line.startswith(f"vllm:{name}")]
    return sum(map(float, found))


def num_generated(server: Server) -> float:
    return metric(server, "generation_tokens_total")


async def test_answers_about_images_are_those_of_vllm_and_of_transformers(
    vllm: tuple[Server, Any], rig: Rig, compared: Callable[[str, int], None]
) -> None:
    server, model = vllm
    await rig.start(server)
    async with updated(server, model):
        prompts = [about(SMALL), about(OTHER), about(WIDE, SMALL), about(SMALL, WIDE)]
        groups = await rig.samples(*prompts, n=2)
    num_checked = 0
    for messages, samples in zip(prompts, groups, strict=True):
        prompt_ids, output_ids = await asyncio.to_thread(chat_completion, server, messages)
        for sample in samples:
            assert list(sample.prompt_ids) == prompt_ids
            assert list(sample.output_ids) == output_ids
            num_checked += check(model, sample)
    compared("greedy tokens with vLLM's own chat route", num_checked)
    compared("logprobs with transformers'", num_checked)
    image_token = model.config.image_token_id
    assert [sample.prompt_ids.count(image_token) for sample, _ in groups] == [4, 4, 12, 12]
    # The ids are equal, and the images are not.
    (one, _), (other, _), (wide, _), (small, _) = groups
    assert one.prompt_ids == other.prompt_ids
    assert one.logprobs[0] != pytest.approx(other.logprobs[0], abs=10 * ATOL)
    with pytest.raises(AssertionError):
        check(model, msgspec.structs.replace(one, tensors=other.tensors))
    assert wide.logprobs[0] != pytest.approx(small.logprobs[0], abs=10 * ATOL)


async def test_the_prefix_cache_keeps_prompts_with_equal_ids_and_other_images_apart(
    vllm: tuple[Server, Any], rig: Rig, compared: Callable[[str, int], None]
) -> None:
    server, model = vllm
    await rig.start(server)
    # The cache has blocks of 128 tokens.
    text = " ".join(["What is in image 7 ?"] * 60)
    one, other = about(SMALL, text=text), about(OTHER, text=text)
    async with updated(server, model):
        found = []
        for prompt in (one, other, one, other):
            before = await asyncio.to_thread(metric, server, "prefix_cache_hits_total")
            ((sample,),) = await rig.samples(prompt)
            after = await asyncio.to_thread(metric, server, "prefix_cache_hits_total")
            found.append((sample, after - before))
    (first, _), (second, num_hits), *again = found
    assert len(first.prompt_ids) > 2 * 128
    assert first.prompt_ids == second.prompt_ids
    assert num_hits == 0
    assert all(hits >= 128 for _, hits in again)
    assert first.logprobs[0] != pytest.approx(second.logprobs[0], abs=10 * ATOL)
    for sample, _ in found:
        compared("logprobs of cached prompts with transformers'", check(model, sample))


async def test_an_answer_that_an_update_aborts_continues_with_the_same_images(
    vllm: tuple[Server, Any], rig: Rig, compared: Callable[[str, int], None]
) -> None:
    server, old = vllm
    model = copy.deepcopy(old)
    await rig.start(server)
    # A random model generates the token of an image, which no processor has made an image for.
    bias = {old.config.image_token_id: -100.0, old.config.video_token_id: -100.0}
    long = SamplingParams(
        max_new_tokens=600, temperature=1.0, ignore_eos=True, sampling_seed=5, logit_bias=bias
    )
    prompts = about(SMALL, WIDE), about(OTHER, WIDE)
    async with updated(server, model) as trainer:
        # The worker loads its processor before the long answers begin.
        await rig.samples(*prompts)
        before = await asyncio.to_thread(num_generated, server)
        asked = asyncio.create_task(rig.samples(*prompts, sampling=long))
        async with asyncio.timeout(120):
            while await asyncio.to_thread(num_generated, server) < before + 40:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.02)
        await asyncio.to_thread(trainer.publish, 2)
        groups = await asked
        for (sample,) in groups:
            assert set(sample.versions) == {1, 2}
            first = sample.versions.index(2)
            for weights, part in ((old, slice(None, first)), (model, slice(first, None))):
                chosen = torch.tensor(sample.output_ids[part])
                mine = forward(weights, sample, bias)[part].gather(1, chosen[:, None])[:, 0]
                given = torch.tensor(sample.logprobs[part])
                torch.testing.assert_close(given, mine, atol=ATOL, rtol=0)
                compared("logprobs around an update with transformers'", len(chosen))


@pytest.mark.parametrize("workflow", ["talk", "agent"])
async def test_a_conversation_about_images_is_one_sample(
    vllm: tuple[Server, Any],
    rig: Rig,
    workflow: str,
    tmp_path: Path,
    compared: Callable[[str, int], None],
) -> None:
    """Images are in the first and in the last question. The second call continues the tokens of the first one."""
    server, model = vllm
    await rig.start(server)
    questions = [
        about(SMALL)[0]["content"],
        "What is in image 8 ?",
        about(WIDE, OTHER, text="What is in image 9 ?")[0]["content"],
    ]
    others = [about(OTHER)[0]["content"], *questions[1:]]
    async with updated(server, model):
        group, samples = await rig.talks(workflow, questions, n=2)
        _, (other, *more) = await rig.talks(workflow, others)
    assert len(samples) == 2
    assert not more
    image_token = model.config.image_token_id
    for rollout, sample in zip(group.rollouts, samples, strict=True):
        assert [len(turn.images) for turn in rollout.turns] == [1, 1, 2]
        assert sample.num_trained == 3 * NUM_TOKENS
        assert sample.prompt_ids.count(image_token) == 4
        assert sample.output_ids.count(image_token) == 12
        assert sample.image_tensors["image_grid_thw"].shape == (3, 3)
        compared("logprobs of conversations with transformers'", check(model, sample))
    # Only the pixels of the first image differ.
    assert other.prompt_ids == samples[0].prompt_ids
    assert other.logprobs[0] != pytest.approx(samples[0].logprobs[0], abs=10 * ATOL)
    compared("logprobs of conversations with transformers'", check(model, other))
    with pytest.raises(AssertionError):
        check(model, msgspec.structs.replace(other, tensors=samples[0].tensors))
    if workflow == "talk":
        file = tmp_path / "samples"
        file.write_bytes(msgspec.msgpack.encode(TrainingBatch(0, (*samples, other))))
        done = await asyncio.to_thread(
            subprocess.run,
            (sys.executable, str(TRAINER), str(server.model), str(file)),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["difference"] < ATOL
        compared("logprobs of the stock trainer", found["num_tokens"])
        first, second = found["metrics"]
        assert first["logprob_difference"] < ATOL
        assert second["loss"] != pytest.approx(first["loss"], abs=1e-4)


async def test_answers_with_the_token_of_an_image_are_rejected(
    vllm: tuple[Server, Any], rig: Rig
) -> None:
    server, model = vllm
    await rig.start(server)
    image_token = model.config.image_token_id
    likely = SamplingParams(max_new_tokens=4, temperature=1.0, logit_bias={image_token: 100.0})
    async with updated(server, model):
        await rig.samples(about(SMALL))
        (handle,) = [rig.rollouts.submit(about(SMALL), likely)]
        with pytest.raises(
            RolloutError, match=f"must not have the token of an image, got token {image_token} at"
        ):
            await rig.rollouts.wait([handle], deadline_s=120)
    assert rig.rollouts.stats().rejected >= 8


JOB = """
    import base64
    import itertools
    from pathlib import Path

    from windlass.jobs import Recipe, Task

    def question(file):
        return [{{"role": "user", "content": [
            {{"type": "image", "image": Path(file).read_bytes()}},
            {{"type": "text", "text": "What is in image 7 ?"}},
        ]}}]

    class R(Recipe):
        def tasks(self):
            for number in itertools.count():
                # One of three prompts has no image.
                yield Task(prompt=question({folder!r} + f"/{{number % 3}}.png") if number % 3 else "What is")

        def rewards(self, group):
            return [float(sum(rollout.output_ids) % 7) for rollout in group.rollouts]
"""
JOB_FILE = """
output_dir = "{folder}/out"
transport = "cma"
steps = 3

[environment]
OMP_NUM_THREADS = "1"
HF_HUB_OFFLINE = "1"

[recipe]
file = "{folder}/recipe.py"
name = "R"

[trainer]
world_size = 2

[training]
model = "{model}"
learning_rate = 1e-4

[[engines]]
name = "engine-a"
model = "{model}"
{engine}

[rollout]
groups_per_step = 4
samples_per_group = 2
tokenizer = "{model}"
python = "{python}"
worker_arguments = ["--tensor-transport", "cma"]
sampling = {{ max_new_tokens = 8 }}
max_staleness = 1
on_stale = "train"
max_rejections = 50
"""


def test_a_job_trains_the_stock_trainer_on_images(tmp_path: Path) -> None:
    """Two ranks train on samples with and without images, and engines serve the new weights."""
    write_vision_checkpoint(tmp_path / "model", 1)
    for number, seed in ((1, 1), (2, 3)):
        (tmp_path / f"{number}.png").write_bytes(png(2 * MERGED, seed))
    (tmp_path / "recipe.py").write_text(textwrap.dedent(JOB.format(folder=str(tmp_path))))
    engine = vllm_engine(tmp_path, max_model_len=256)
    job = tmp_path / "job.toml"
    job.write_text(
        JOB_FILE.format(
            folder=tmp_path,
            model=tmp_path / "model",
            engine=engine,
            python=VENVS["vllm"] / "bin/python",
        )
    )
    status, printed = launch(job, deadline_s=500.0)
    assert status == 0, printed
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    first, *_, last = [json.loads(line) for line in lines]
    assert first["logprob_difference"] < 1e-4
    assert (last["step"], last["version"], len(lines)) == (3, 3, 3)
    assert last["grad_norm"] > 0
