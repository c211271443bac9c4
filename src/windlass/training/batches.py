"""Training samples as tensors: their advantages, and padded or packed batches for a causal language model."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final, runtime_checkable

import msgspec
import torch

from windlass.errors import ConfigError
from windlass.rollout.messages import TrainingSample
from windlass.rollout.tensors import IMAGES, SampleTensor, joined
from windlass.rollout.trajectories import INSERTED_VERSION
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
        images: tensors of the images of all samples, in the order of the rows, by the model's names.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    targets: torch.Tensor
    mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    sequences: torch.Tensor
    images: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def model_arguments(self) -> dict[str, torch.Tensor]:
        """Return the arguments of a causal language model of transformers; for models with images see `VisionModel`."""
        found = {"input_ids": self.input_ids, "position_ids": self.position_ids}
        if self.attention_mask is not None:
            found["attention_mask"] = self.attention_mask
        return found


@runtime_checkable
class VisionConfig(Protocol):
    """Configuration of a model of transformers that takes images. Configurations of other models lack these attributes."""

    vision_config: Any
    image_token_id: int


@final
class VisionModel:
    """Properties of a vision-language model of transformers.

    Args:
        model: the model; its configuration has `image_token_id`.

    Attributes:
        image_token_id: token that stands for a part of an image.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        found: Any = model
        self.image_token_id: int = found.config.image_token_id
        self._takes_types = "mm_token_type_ids" in inspect.signature(found.forward).parameters

    def arguments(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        """Return the arguments of the model for a padded batch.

        They have no positions: positions may depend on the places and sizes of images, so the model computes them.
        """
        found = {**batch.model_arguments(), **batch.images}
        del found["position_ids"]
        if self._takes_types:
            found["mm_token_type_ids"] = (batch.input_ids == self.image_token_id).int()
        return found

    def is_trainable(self, sample: TrainingSample) -> bool:
        """Return whether each token of an image in a sample stands for one of its images.

        The model would put the features of an image in place of a generated token of an image, and of such a token in text.
        """
        if not sample.has_images:
            return self.image_token_id not in sample.prompt_ids + sample.output_ids
        made = zip(sample.output_ids, sample.versions, strict=True)
        return (self.image_token_id, True) not in (
            (token, v != INSERTED_VERSION) for token, v in made
        )

    def blanked(self, sample: TrainingSample) -> TrainingSample:
        """Return a sample of the same length that is not trained, without images, and with token 0 in place of their tokens."""
        blank = {self.image_token_id: 0}
        return msgspec.structs.replace(
            sample,
            prompt_ids=tuple(blank.get(token, token) for token in sample.prompt_ids),
            output_ids=tuple(blank.get(token, token) for token in sample.output_ids),
            loss_mask=(False,) * len(sample.output_ids),
            tensors={n: t for n, t in sample.tensors.items() if not n.startswith(IMAGES)},
        )


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
        ConfigError: a sample has no prompt, or does not have exactly one advantage per output token; a sample has images and
            the batch is packed; or the tensors of images cannot be joined.
    """
    columns: dict[str, list[torch.Tensor]] = defaultdict(list)
    for number, sample in enumerate(samples):
        where = f"sample of group {sample.group_id}: "
        if packed:
            sample.refuse_images("token_batch with packed=True")
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
    rows: dict[str, Any]
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
    found = joined([sample.image_tensors for sample in samples if sample.has_images])
    images = {name: tensor.to_torch().to(device) for name, tensor in found.items()}
    return TokenBatch(attention_mask=attention_mask, images=images, **rows)
