"""Training samples as tensors: their advantages, and padded or packed batches for a causal language model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from windlass.errors import ConfigError
from windlass.rollout.messages import TrainingSample
from windlass.rollout.tensors import SampleTensor
from windlass.training.advantages import (
    SumOverRanks,
    group_relative,
    leave_one_out,
    reinforce_plus_plus,
)
from windlass.training.settings import Advantage

ADVANTAGES = "advantages"
"""Name of the tensor of a `TrainingSample` that has one advantage per output token."""


def with_advantages(
    samples: Sequence[TrainingSample],
    kind: Advantage,
    *,
    sum_over_ranks: SumOverRanks | None = None,
) -> list[TrainingSample]:
    """Return the samples with the tensor `ADVANTAGES`. Samples that already have this tensor are returned unchanged.

    The samples of one rollout (equal `task_id`) count as one sample of their group. The reward of this sample is their
    mean reward, and they all get its advantage. So a conversation with many branches has the weight of one answer.

    Args:
        samples: samples of complete groups.
        kind: estimator.
        sum_over_ranks: function that sums a tensor over all data-parallel ranks, for REINFORCE++; None to normalise over
            the given samples. Other estimators need only the samples of a group.
    """
    rollouts: dict[tuple[int, str | int], list[TrainingSample]] = defaultdict(list)
    places = []
    for number, sample in enumerate(samples):
        places.append((sample.group_id, sample.task_id or number))
        rollouts[places[-1]].append(sample)
    means = [sum(s.reward for s in found) / len(found) for found in rollouts.values()]
    rewards = torch.tensor(means, dtype=torch.float64)
    groups = torch.tensor([group_id for group_id, _ in rollouts])
    found = _of_groups(rewards, groups, kind)
    of_rollout = dict(zip(rollouts, found.tolist(), strict=True))
    rows = [
        [of_rollout[place]] * len(s.output_ids) for s, place in zip(samples, places, strict=True)
    ]
    if kind in {Advantage.REINFORCE_PP, Advantage.REINFORCE_PP_BASELINE}:
        rows = _over_tokens(samples, [row[0] for row in rows], sum_over_ranks)
    return [
        sample
        if ADVANTAGES in sample.tensors
        else msgspec.structs.replace(
            sample, tensors={**sample.tensors, ADVANTAGES: SampleTensor.of(row)}
        )
        for sample, row in zip(samples, rows, strict=True)
    ]


def _of_groups(rewards: torch.Tensor, groups: torch.Tensor, kind: Advantage) -> torch.Tensor:
    """Return the advantages of `kind` within groups. For REINFORCE++, `_over_tokens` then normalises them."""
    match kind:
        case Advantage.GRPO:
            return group_relative(rewards, groups)
        case Advantage.DR_GRPO | Advantage.REINFORCE_PP_BASELINE:
            return group_relative(rewards, groups, scale=False)
        case Advantage.RLOO:
            return leave_one_out(rewards, groups)
        case Advantage.REINFORCE_PP:
            return rewards


def _over_tokens(
    samples: Sequence[TrainingSample], rewards: Sequence[float], total: SumOverRanks | None
) -> list[list[float]]:
    """Return the advantages of REINFORCE++ for each output token. Each sample's last trained token gets the reward."""
    lengths = [len(sample.output_ids) for sample in samples]
    mask = torch.zeros(len(samples), max(lengths, default=0), dtype=torch.float64)
    token_rewards = torch.zeros_like(mask)
    for row, sample in enumerate(samples):
        mask[row, : lengths[row]] = torch.tensor(sample.loss_mask, dtype=torch.float64)
        if sample.num_trained:
            token_rewards[row, int(mask[row].nonzero()[-1])] = rewards[row]
    found = reinforce_plus_plus(token_rewards, mask, sum_over_ranks=total)
    return [found[row, :length].tolist() for row, length in enumerate(lengths)]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Samples as tensors of one shape: (B, T) padded at the end, or (1, N) packed.

    The entry at each position belongs to the next token of the sequence, `targets`, because the model's logits at a
    position predict the next token.

    Attributes:
        input_ids, position_ids: arguments of the model.
        attention_mask: 1 for tokens, 0 for padding; None if packed. The model finds the sequences of a packed row by
            their positions, which begin at 0.
        targets: next tokens.
        mask: 1.0 where the next token is trained, else 0.0.
        rollout_logprobs, advantages: values of the next tokens; 0.0 where `mask` is 0.
        sequences: index of the sample at each position, for the functions of `windlass.training.losses`.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    targets: torch.Tensor
    mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    sequences: torch.Tensor

    def model_arguments(self) -> dict[str, torch.Tensor]:
        """Return the arguments of a causal language model of transformers."""
        found = {"input_ids": self.input_ids, "position_ids": self.position_ids}
        if self.attention_mask is not None:
            found["attention_mask"] = self.attention_mask
        return found


_ATTENTIONS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Layer types of transformers models in which attention does not mix the samples of a packed row."""


def only_attends(model: torch.nn.Module) -> bool:
    """Return whether attention is the only layer of a transformers model that mixes tokens.

    Attention finds the samples of a packed row by `position_ids`. Recurrent layers, linear attention and convolutions do
    not: in a packed row, they carry values of one sample into the next.
    """
    found: Any = model
    settings = found.config.get_text_config().to_dict()
    kinds = settings.get("layer_types") or ()
    return not found._is_stateful and _ATTENTIONS.issuperset(kinds)


def token_batch(
    samples: Sequence[TrainingSample], device: torch.device, *, packed: bool = False
) -> TokenBatch:
    """Return the samples as a batch for a causal language model.

    Args:
        samples: at least one sample; each must have the tensor `ADVANTAGES` and at least one prompt token.
        device: torch device of the tensors.
        packed: whether to put all samples into one row without padding. The model's attention must support this, as
            flash attention does, and the model must have no other layers that mix tokens; see `only_attends`.

    Raises:
        ConfigError: a sample has images or no prompt, or does not have exactly one advantage per output token.
    """
    columns: dict[str, list[torch.Tensor]] = defaultdict(list)
    for number, sample in enumerate(samples):
        where = f"sample of group {sample.group_id}: "
        sample.refuse_images("token_batch")
        if not sample.prompt_ids:
            raise ConfigError(f"{where}prompt_ids must not be empty, got ()")
        if ADVANTAGES not in sample.tensors:
            raise ConfigError(
                f"{where}tensors must contain {ADVANTAGES!r}, got {sorted(sample.tensors)}; call with_advantages"
            )
        own = sample.tensors[ADVANTAGES].to_torch()
        if own.shape != (len(sample.output_ids),):
            raise ConfigError(
                f"{where}tensor {ADVANTAGES!r} must have shape ({len(sample.output_ids)},), got {tuple(own.shape)}"
            )
        tokens = torch.tensor(sample.prompt_ids + sample.output_ids)
        no_target = torch.zeros(len(sample.prompt_ids) - 1)
        mask = torch.tensor(sample.loss_mask, dtype=torch.float32)
        columns["input_ids"].append(tokens[:-1])
        columns["targets"].append(tokens[1:])
        columns["position_ids"].append(torch.arange(len(tokens) - 1))
        columns["sequences"].append(torch.full((len(tokens) - 1,), number))
        columns["mask"].append(torch.cat([no_target, mask]))
        logprobs = torch.tensor(sample.logprobs) * mask
        columns["rollout_logprobs"].append(torch.cat([no_target, logprobs]))
        columns["advantages"].append(torch.cat([no_target, own.float() * mask]))
    if packed:
        rows = {name: torch.cat(values)[None].to(device) for name, values in columns.items()}
        return TokenBatch(attention_mask=None, **rows)
    lengths = torch.tensor([len(row) for row in columns["input_ids"]])
    rows = {
        name: torch.nn.utils.rnn.pad_sequence(values, batch_first=True).to(device)
        for name, values in columns.items()
    }
    numbers = torch.arange(len(samples), device=device)[:, None]
    rows["sequences"] = numbers.expand_as(rows["input_ids"])
    places = torch.arange(int(lengths.max()))
    attention_mask = (places < lengths[:, None]).long().to(device)
    return TokenBatch(attention_mask=attention_mask, **rows)
