"""Packs contain every token of every sample once, without padding, and balance ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from windlass.errors import ConfigError
from windlass.rollout.messages import TrainingSample
from windlass.rollout.packing import Pack, divide, pack
from windlass.rollout.tensors import SampleTensor

MAX_TOKENS = 24


def sample(number: int, num_prompt: int, num_output: int, **changes: Any) -> TrainingSample:
    """Return a sample whose values all differ from those of other samples."""
    begin = 1000 * number
    made: dict[str, Any] = {
        "prompt_ids": tuple(range(begin, begin + num_prompt)),
        "output_ids": tuple(range(begin + num_prompt, begin + num_prompt + num_output)),
        "logprobs": tuple(-begin - n / 8 for n in range(num_output)),
        "versions": tuple(begin + n for n in range(num_output)),
        "loss_mask": tuple((number + n) % 3 > 0 for n in range(num_output)),
        "reward": number / 2,
        "group_id": number // 2,
        "engine": "e",
        "tensors": {
            "advantages": SampleTensor.of(np.arange(num_output, dtype="float32") + begin),
            "experts": SampleTensor.of(
                np.arange(num_output * 6, dtype="uint8").reshape(num_output, 2, 3)
            ),
            "prompt": SampleTensor.of([1.0], per_token=False),
        },
    }
    return TrainingSample(**{**made, **changes})


@pytest.mark.parametrize(
    ("padded", "expected"),
    [
        # Padded samples have the length of the first one.
        (True, [[22], [11], [9], [7, 6], [5, 4]]),
        (False, [[22], [11, 4], [9, 5], [7, 6]]),
    ],
)
def test_micro_batches_have_at_most_so_many_tokens(padded: bool, expected: list[list[int]]) -> None:
    """A sample above the limit is a micro-batch of its own, and makes no empty one."""
    lengths = [7, 11, 4, 9, 5, 22, 6]
    found = divide(lengths, 16, padded=padded)
    assert [[lengths[index] for index in each] for each in found] == expected
    assert divide([100], 16, padded=padded) == [[0]]


@given(st.lists(st.integers(1, 40), min_size=1), st.integers(1, 60), st.booleans())
def test_no_micro_batch_of_one_rank_is_empty(
    lengths: list[int], max_tokens: int, padded: bool
) -> None:
    found = divide(lengths, max_tokens, padded=padded)
    assert sorted(index for each in found for index in each) == [*range(len(lengths))]
    for each in found:
        sizes = [lengths[index] for index in each]
        num_tokens = len(sizes) * max(sizes) if padded else sum(sizes)
        assert len(each) == 1 or num_tokens <= max_tokens


@st.composite
def batches(draw: st.DrawFn) -> list[TrainingSample]:
    sizes = st.tuples(st.integers(1, 8), st.integers(1, MAX_TOKENS - 8))
    return [sample(n, *draw(sizes)) for n in range(draw(st.integers(1, 20)))]


def check_sequence(packed: Pack, place: int, given: TrainingSample) -> None:
    begin, end = packed.cu_seqlens[place], packed.cu_seqlens[place + 1]
    num_prompt = len(given.prompt_ids)
    output = slice(begin + num_prompt, end)
    assert packed.token_ids[begin:end].tolist() == [*given.prompt_ids, *given.output_ids]
    assert packed.position_ids[begin:end].tolist() == list(range(end - begin))
    assert packed.logprobs[output].tolist() == list(given.logprobs)
    assert packed.versions[output].tolist() == list(given.versions)
    assert packed.loss_mask[output].tolist() == list(given.loss_mask)
    assert not packed.loss_mask[begin : begin + num_prompt].any()
    assert set(packed.versions[begin : begin + num_prompt]) == {-1}
    assert (packed.rewards[place], packed.group_ids[place]) == (given.reward, given.group_id)
    for name in ("advantages", "experts"):
        expected = given.tensors[name].to_numpy()
        assert packed.tensors[name].dtype == expected.dtype
        assert np.array_equal(packed.tensors[name][output], expected)
        assert not packed.tensors[name][begin : begin + num_prompt].any()


@settings(deadline=None)
@given(batches(), st.integers(1, 5), st.integers(MAX_TOKENS, 3 * MAX_TOKENS))
def test_every_token_is_packed_once_and_every_rank_has_as_many_packs(
    samples: list[TrainingSample], num_ranks: int, max_tokens: int
) -> None:
    ranks = pack(samples, num_ranks=num_ranks, max_tokens=max_tokens)
    assert len(ranks) == num_ranks
    assert len({len(packs) for packs in ranks}) == 1
    found = []
    for packed in (each for packs in ranks for each in packs):
        assert 0 < len(packed.token_ids) == packed.cu_seqlens[-1] <= max_tokens
        assert packed.max_seqlen == np.diff(packed.cu_seqlens).max()
        if packed.indices.tolist() == [-1]:
            assert packed.num_trained == 0
            continue
        found += packed.indices.tolist()
        for place, index in enumerate(packed.indices):
            check_sequence(packed, place, samples[index])
    assert sorted(found) == list(range(len(samples)))
    num_packs = sum(map(len, ranks))
    # One pack less per rank would not be enough for the greedy rule, and twice the room is never used.
    total = sum(len(s.prompt_ids) + len(s.output_ids) for s in samples)
    assert num_packs <= max(num_ranks, num_ranks + 2 * num_ranks * -(-total // max_tokens))


@settings(deadline=None)
@given(batches(), st.integers(1, 5))
def test_tokens_of_ranks_differ_by_at_most_the_longest_sample(
    samples: list[TrainingSample], num_ranks: int
) -> None:
    ranks = pack(samples, num_ranks=num_ranks, max_tokens=1 << 20)
    tokens = [sum(len(p.token_ids) for p in packs if p.indices[0] >= 0) for packs in ranks]
    longest = max(len(s.prompt_ids) + len(s.output_ids) for s in samples)
    assert max(tokens) - min(tokens) <= longest


def test_a_model_computes_the_same_logprobs_for_packed_and_single_sequences() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    samples = [
        sample(0, 3, 5), sample(0, 2, 9, prompt_ids=(40, 41)), sample(0, 6, 2), sample(0, 1, 4),
    ]  # fmt: skip
    ((packed,),) = pack(samples, max_tokens=64)
    tensors = packed.to_torch()
    assert tensors.tensors["advantages"].dtype == torch.float32
    with torch.no_grad():
        # As in flash attention, a token sees the earlier tokens of its own sequence only.
        lengths = tensors.cu_seqlens.diff().long()
        sequence = torch.repeat_interleave(torch.arange(len(samples)), lengths)
        mask = (sequence[:, None] == sequence).tril()[None, None]
        logits = model(
            tensors.token_ids[None], attention_mask=mask, position_ids=tensors.position_ids[None]
        ).logits[0]
        chosen = logits[:-1].log_softmax(-1).gather(1, tensors.token_ids[1:, None])[:, 0]
        expected = []
        for index in packed.indices:
            given = samples[index]
            ids = torch.tensor([given.prompt_ids + given.output_ids])
            single = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            expected.append(single[len(given.prompt_ids) - 1 :][torch.tensor(given.loss_mask)])
    assert torch.allclose(chosen[tensors.loss_mask[1:]], torch.cat(expected), atol=1e-5)


def test_a_sample_without_a_tensor_has_zeros() -> None:
    one, other = sample(1, 1, 2), sample(2, 1, 3, tensors={})
    ((packed,),) = pack([one, other], max_tokens=16)
    place = packed.indices.tolist().index(1)
    begin, end = packed.cu_seqlens[place], packed.cu_seqlens[place + 1]
    assert not packed.tensors["advantages"][begin:end].any()
    assert packed.tensors["advantages"].shape == (7,)


@pytest.mark.parametrize(
    ("samples", "changes", "says"),
    [
        ([], {}, r"pack: samples must not be empty"),
        ([sample(0, 9, 16)], {}, r"samples\[0\] must have at most max_tokens=24 tokens, got 25"),
        ([sample(0, 0, 2)], {}, r"samples\[0\] must have a prompt, got none"),
        ([sample(0, 1, 2)], {"num_ranks": 0}, r"num_ranks must be an integer >= 1, got 0"),
        ([sample(0, 1, 2)], {"max_tokens": 2.5}, r"max_tokens must be an integer >= 1, got 2\.5"),
        (
            [sample(0, 1, 2), sample(1, 1, 1, tensors={"experts": SampleTensor.of([1])})],
            {},
            r"tensor 'experts' must have the same dtype and .* uint8 of shape \(2, 3\) and int64 of shape \(\)",
        ),
        (
            [sample(0, 1, 2, tensors={"x": SampleTensor.of(torch.ones(2, dtype=torch.bfloat16))})],
            {},
            r"tensor 'x' must have a dtype of NumPy, got bfloat16; store it as float32",
        ),
    ],
)
def test_what_cannot_be_packed_is_named(
    samples: list[TrainingSample], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        pack(samples, **{"max_tokens": MAX_TOKENS, **changes})
