"""Batches of samples: a real model gives padded and packed tokens the same log-probabilities as each sample alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
import transformers

from windlass.errors import ConfigError
from windlass.rollout import SampleTensor, TrainingSample
from windlass.training import token_logprobs
from windlass.training.batches import only_attends, token_batch, with_advantages
from windlass.training.settings import Advantage

CPU = torch.device("cpu")


def sample(number: int, length: int, **changes: Any) -> TrainingSample:
    start = 7 * number
    given: dict[str, Any] = {
        "prompt_ids": tuple(range(1 + start, 3 + number + start)),
        "output_ids": tuple(range(40, 40 + length)),
        "logprobs": tuple(-1.0 - 0.01 * n - number for n in range(length)),
        "versions": (3,) * length,
        "reward": float(number),
        "group_id": 0,
        "engine": "e",
        "loss_mask": tuple(n % 3 != 1 for n in range(length)),
        "tensors": {"advantages": SampleTensor.of([number + 0.1 * n for n in range(length)])},
    }
    return TrainingSample(**{**given, **changes})


SAMPLES = [sample(0, 5), sample(1, 2), sample(2, 9)]


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_has_the_values_of_each_sample_alone(packed: bool) -> None:
    torch.manual_seed(0)
    model: Any = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )
    batch = token_batch(SAMPLES, CPU, packed=packed)
    assert batch.input_ids.shape == ((1, 6 + 4 + 12) if packed else (3, 12))
    with torch.no_grad():
        logits = model(**batch.model_arguments(), use_cache=False).logits
        found = token_logprobs(logits, batch.targets)
        for number, each in enumerate(SAMPLES):
            whole = torch.tensor([each.prompt_ids + each.output_ids])
            alone = model(whole, use_cache=False).logits.log_softmax(-1)[0]
            first = len(each.prompt_ids) - 1
            expected = [float(alone[first + n, token]) for n, token in enumerate(each.output_ids)]
            own = (batch.sequences == number) & (batch.mask > 0)
            trained = [n for n, used in enumerate(each.loss_mask) if used]
            assert found[own].tolist() == pytest.approx([expected[n] for n in trained], abs=1e-5)
            assert batch.rollout_logprobs[own].tolist() == pytest.approx(
                [each.logprobs[n] for n in trained]
            )
            assert batch.advantages[own].tolist() == pytest.approx(
                [number + 0.1 * n for n in trained]
            )
    assert float(batch.mask.sum()) == sum(each.num_trained for each in SAMPLES)


def test_samples_of_one_rollout_count_once_and_share_an_advantage() -> None:
    # Rollout a has two samples, with rewards 1 and 3; rollouts b and c have one each.
    given = [("a", 1.0), ("b", 6.0), ("a", 3.0), ("c", 1.0)]
    samples = [
        sample(1, 4, task_id=task, reward=reward, tensors={}, group_id=5) for task, reward in given
    ]
    found = with_advantages(samples, Advantage.DR_GRPO)
    values = [each.tensors["advantages"].to_torch().tolist() for each in found]
    assert values == [[-1.0] * 4, [3.0] * 4, [-1.0] * 4, [-2.0] * 4]


def test_advantages_that_a_recipe_gave_are_kept() -> None:
    samples = [SAMPLES[0], msgspec.structs.replace(SAMPLES[1], tensors={})]
    found = with_advantages(samples, Advantage.DR_GRPO)
    assert found[0] is SAMPLES[0]
    assert found[1].tensors["advantages"].to_torch().tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt_ids": ()}, "prompt_ids must not be empty"),
        ({"tensors": {}}, "tensors must contain 'advantages', got []; call with_advantages"),
        (
            {"tensors": {"advantages": SampleTensor.of([[1.0]] * 5)}},
            "tensor 'advantages' must have shape (5,), got (5, 1)",
        ),
    ],
)
def test_samples_that_cannot_be_trained_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        token_batch([sample(0, 5, **changes)], CPU)
    assert says in str(refused.value)


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
LINEAR = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


@pytest.mark.parametrize(
    ("kind", "more", "keeps_apart"),
    [
        ("Llama", {}, True),
        ("Gemma3Text", {"head_dim": 16}, True),
        ("Qwen3Next", LINEAR, False),
        ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}, False),
    ],
)
def test_only_attention_keeps_the_samples_of_a_packed_row_apart(
    kind: str, more: dict[str, Any], *, keeps_apart: bool
) -> None:
    """Another first sample changes the logits of the second one in a packed row if a layer does not keep them apart."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.eval().config.use_cache = False
    assert only_attends(model) is keeps_apart

    def logits(first: int) -> torch.Tensor:
        changed = sample(0, 5, prompt_ids=(first, 2))
        batch = token_batch([changed, sample(1, 2)], CPU, packed=True)
        with torch.no_grad():
            found: torch.Tensor = model(**batch.model_arguments()).logits
        return found[0, 6:]

    assert torch.equal(logits(1), logits(40)) is keeps_apart
