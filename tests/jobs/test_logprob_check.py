"""In its first step, a job compares log-probabilities of rollouts with its trainer's, under its sampling settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from sampling import SAMPLINGS, distributions, expected_logprobs, top_k_and_top_p, top_k_then_top_p
from transformers import AutoConfig, AutoModelForCausalLM

from windlass.jobs.logprob_check import LogprobCheck
from windlass.jobs.train_worker import LOGPROB_DIFFERENCE
from windlass.rollout.messages import TrainingSample
from windlass.sampling import SamplingParams

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "launch"
CONFIG = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
OF_THE_MODEL = """
# This error is as large as with log-probabilities before temperature and top_k.
import msgspec
from recipe import CountSevens

class Raw(CountSevens):
    def samples(self, group):
        for sample in super().samples(group):
            yield msgspec.structs.replace(sample, logprobs=tuple(p - 0.4 for p in sample.logprobs))
"""


@pytest.mark.parametrize("recipe", [pytest.param("CountSevens", marks=pytest.mark.long), "Raw"])
def test_a_job_warns_of_log_probabilities_that_differ_from_its_trainers(
    recipe: str, tmp_path: Path
) -> None:
    text = (EXAMPLE / "job.toml").read_text().replace("{here}", str(EXAMPLE))
    (tmp_path / "raw.py").write_text(OF_THE_MODEL)
    sampling = "ignore_eos = true, temperature = 0.5, top_p = 0.8"
    for old, new in (
        ("launch-output", str(tmp_path / "out")),
        ("steps = 4", "steps = 2"),
        ("ignore_eos = true", sampling),
        *([] if recipe == "CountSevens" else [(f"{EXAMPLE}/recipe.py", f"{tmp_path}/raw.py")]),
        ("CountSevens", recipe),
    ):
        text = text.replace(old, new)
    (tmp_path / "job.toml").write_text(text)
    done = subprocess.run(
        (sys.executable, "-m", "windlass.cli.main", "launch", str(tmp_path / "job.toml")),
        env={**os.environ, "PYTHONPATH": f"{EXAMPLE}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (difference,) = re.findall(rf"{LOGPROB_DIFFERENCE} (\S+)", done.stdout)
    warned = re.findall(
        r"warning: log-probabilities of rollouts differ from the trainer's by (\S+) per token",
        done.stdout,
    )
    if recipe == "CountSevens":
        assert float(difference) < 1e-3
        assert not warned
    else:
        assert float(difference) == pytest.approx(0.4, abs=1e-3)
        assert warned == ["0.40"]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    found = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).eval()
    with torch.no_grad():
        # Large weights make the distribution far from uniform.
        found.lm_head.weight.mul_(20)
    return found


def answer(model: Any, prompt: list[int], length: int, sampling: dict[str, Any], cut: Any) -> Any:
    """Return a sample that is drawn as an engine draws it."""
    output: list[int] = []
    for _ in range(length):
        ahead = distributions(model, [*prompt, *output], [0], sampling, cut)
        output.append(int(torch.multinomial(ahead[0].exp(), 1)))
    logprobs = expected_logprobs(model, prompt, output, sampling, cut)
    return TrainingSample(
        prompt_ids=tuple(prompt), output_ids=tuple(output), logprobs=tuple(logprobs.tolist()),
        versions=(0,) * length, reward=0.0, group_id=0, engine="engine",
    )  # fmt: skip


@pytest.mark.parametrize("sampling", [*SAMPLINGS, {"min_p": 0.3}], ids=str)
@pytest.mark.parametrize("cut", [top_k_then_top_p, top_k_and_top_p])
def test_the_logprob_check_finds_samples_in_every_layout_of_a_loss(
    sampling: dict[str, Any], cut: Any, model: Any
) -> None:
    torch.manual_seed(1)
    samples = [answer(model, [1, 2, 30], 3, sampling, cut), answer(model, [4], 2, sampling, cut)]
    long, short = ([*sample.prompt_ids, *sample.output_ids] for sample in samples)
    padding = [0] * (len(long) - len(short))
    layouts = (
        [long, short + padding],
        [long[:-1], (short + padding)[:-1]],
    )
    for tokens in layouts:
        check = LogprobCheck(samples, SamplingParams(max_new_tokens=3, **sampling))
        with check.watching(model):
            model(torch.tensor(tokens))
        assert check.metrics()[LOGPROB_DIFFERENCE] < 1e-4
        assert len(torch.cat(check.distances)) == 5


def test_the_logprob_check_ignores_tokens_that_are_not_generated(model: Any) -> None:
    torch.manual_seed(1)
    first = answer(model, [1, 2, 30], 3, {}, top_k_then_top_p)
    second = answer(model, [*first.prompt_ids, *first.output_ids, 7, 8], 2, {}, top_k_then_top_p)
    both = msgspec.structs.replace(
        first,
        output_ids=(*first.output_ids, 7, 8, *second.output_ids),
        logprobs=(*first.logprobs, 0.0, 0.0, *second.logprobs),
        versions=(0, 0, 0, -1, -1, 0, 0),
        loss_mask=(True, True, True, False, False, True, True),
    )
    check = LogprobCheck([both], SamplingParams(max_new_tokens=3))
    with check.watching(model):
        model(torch.tensor([[*both.prompt_ids, *both.output_ids]]))
    assert len(torch.cat(check.distances)) == 5
    assert check.metrics()[LOGPROB_DIFFERENCE] < 1e-4


def test_the_logprob_check_finds_a_sample_that_a_longer_one_contains(model: Any) -> None:
    """A conversation may repeat the tokens of another one after its first turn, where they have other logits."""
    torch.manual_seed(1)
    sample = answer(model, [1, 2, 30], 3, {}, top_k_then_top_p)
    short = [*sample.prompt_ids, *sample.output_ids]
    longer = [9, 60, 31, *short]
    check = LogprobCheck([sample], SamplingParams(max_new_tokens=3))
    with check.watching(model):
        model(torch.tensor([longer, [*short, 0, 0, 0]]))
    assert len(torch.cat(check.distances)) == 3
    assert check.metrics()[LOGPROB_DIFFERENCE] < 1e-4


def test_the_logprob_check_ignores_a_loss_without_a_whole_sample(model: Any) -> None:
    sample = answer(model, [1, 2, 3], 3, {}, top_k_then_top_p)
    check = LogprobCheck([sample], SamplingParams(max_new_tokens=3))
    with check.watching(model):
        model(torch.tensor([[1, 2]]))
        model(inputs_embeds=torch.zeros(1, 2, 32))
        model.model(torch.tensor([[1, 2, 3, *sample.output_ids]]))
    assert check.metrics() == {}


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.5},
        {"min_new_tokens": 2},
        {"json_schema": "{}"},
        {"min_p": 0.1, "top_p": 0.9},
    ],
    ids=str,
)
def test_the_logprob_check_compares_nothing_that_logits_alone_do_not_determine(
    sampling: dict[str, Any], model: Any
) -> None:
    sample = answer(model, [1, 2, 3], 3, {}, top_k_then_top_p)
    check = LogprobCheck([sample], SamplingParams(max_new_tokens=3, **sampling))
    with check.watching(model):
        model(torch.tensor([[1, 2, 3, *sample.output_ids]]))
    assert check.metrics() == {}
