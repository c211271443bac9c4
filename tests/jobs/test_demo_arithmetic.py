"""The demo's problem for checkpoints: prompts that the tokenizer renders, and rewards of decoded answers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from demo_checkpoint import write_checkpoint
from transformers import AutoModelForCausalLM

from windlass.jobs.demo.arithmetic import (
    DIGIT_CREDIT,
    arithmetic,
    load_tokenizer,
    longest_prompt,
    render,
    reward,
)
from windlass.jobs.demo.trainer import grpo_loss, tokens_of
from windlass.rollout.messages import TrainingSample

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 42", 1.0),
        ("42 apples", 1.0),
        ("421", DIGIT_CREDIT),
        ("is 41", DIGIT_CREDIT * 2 / 5),
        ("abc", 0.0),
        ("", 0.0),
    ],
)
def test_the_first_number_of_an_answer_counts(text: str, expected: float) -> None:
    assert reward(text, 42) == pytest.approx(expected)


def test_prompts_are_text_that_the_tokenizer_renders(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_checkpoint(tmp_path / "plain"))
    assert tokenizer.decode(render(tokenizer, 7, 85)) == "7 + 85 ="
    problem, generator = arithmetic(tokenizer), random.Random(3)
    prompts = [problem.prompt(generator) for _ in range(50)]
    assert len({len(prompt) for prompt in prompts}) > 1, "the test needs prompts of several lengths"
    assert max(map(len, prompts)) <= longest_prompt(tokenizer)
    for prompt in prompts:
        first, _, second, _ = tokenizer.decode(prompt).split()
        right = tokenizer.encode(f" {int(first) + int(second)}")
        assert problem.reward(prompt, right) == 1.0
        assert problem.reward(prompt, tokenizer.encode(" x")) == 0.0


def test_a_chat_template_is_used(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_checkpoint(tmp_path / "chat", chat_template=TEMPLATE))
    assert tokenizer.decode(render(tokenizer, 1, 2)) == (
        "<user>What is 1 + 2? Answer with the number only.<a>"
    )


def test_samples_of_different_lengths_have_the_loss_of_separate_samples(tmp_path: Path) -> None:
    """Padding must not change the log-probabilities of a sample."""
    folder = write_checkpoint(tmp_path / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    samples = [
        TrainingSample(
            prompt_ids=prompt,
            output_ids=output,
            logprobs=(-5.0,) * len(output),
            versions=(0,) * len(output),
            loss_mask=mask,
            engine="e",
            reward=value,
            group_id=0,
        )
        for prompt, output, value, mask in (
            ((5, 6, 7), (8, 9), 1.0, ()),
            ((10,), (11, 12, 13, 14), 0.0, (True, False, False, True)),
            ((15, 16), (17,), 0.4, ()),
        )
    ]
    tokens = tokens_of(samples, torch.device("cpu"))
    assert tokens.tolist() == [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14], [15, 16, 17, 0, 0]]
    mean = sum(s.reward for s in samples) / 3
    spread = (sum((s.reward - mean) ** 2 for s in samples) / 3) ** 0.5 + 1e-4
    gains = []
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.output_ids])
        logprobs = model(ids[:, :-1]).logits[0, len(sample.prompt_ids) - 1 :].log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(sample.output_ids)[:, None])[:, 0]
        ratio, advantage = (chosen + 5.0).exp(), (sample.reward - mean) / spread
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        gains.append(gain[torch.tensor(sample.loss_mask)])
    expected = -torch.cat(gains).mean()
    for given in (tokens, tokens[:, :-1]):
        assert torch.allclose(grpo_loss(model(given).logits, samples), expected, atol=1e-5)
