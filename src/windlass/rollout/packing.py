"""Packs of training samples: sequences one after the other, without padding, balanced over trainer ranks."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from windlass.errors import ConfigError
from windlass.rollout.messages import TrainingSample
from windlass.rollout.tensors import SampleTensor, joined
from windlass.sampling import is_count

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """Samples of one forward pass, one after the other; T tokens and S sequences.

    Attention must not cross the sequence boundaries in `cu_seqlens`. The logits of token i - 1 predict token i. The first
    token of each sequence has `loss_mask` False, so `loss_mask[1:]` masks `logits[:-1]` at boundaries too.

    Attributes:
        token_ids: (T,) prompt and output of each sequence.
        position_ids: (T,) position of each token in its sequence.
        cu_seqlens: (S + 1,) index of the first token of each sequence, and T; int32, as flash attention takes it.
        loss_mask: (T,) whether to train on a token; False for prompts.
        logprobs, versions: (T,) values of the samples; 0 and -1 for prompts.
        rewards, group_ids: (S,) values of the samples.
        indices: (S,) index of each sequence's sample among the packed samples; -1 for a filler.
        tensors: name -> (T, ...) per-token tensors of the samples; 0 for prompts, and for samples without the tensor.
        images: name -> tensor of the images of all sequences, in their order, see `TrainingSample.image_tensors`. Empty if no
            sequence has images.
        max_seqlen: length of the longest sequence.
    """

    token_ids: Array
    position_ids: Array
    cu_seqlens: Array
    loss_mask: Array
    logprobs: Array
    versions: Array
    rewards: Array
    group_ids: Array
    indices: Array
    tensors: Mapping[str, Array]
    images: Mapping[str, Array]
    max_seqlen: int

    @property
    def num_trained(self) -> int:
        """Number of tokens that `loss_mask` selects."""
        return int(self.loss_mask.sum())

    def to_torch(self, device: str = "cpu") -> Any:
        """Return the pack with every array as a torch tensor on `device`."""
        torch = importlib.import_module("torch")
        moved: dict[str, Any] = {
            field.name: torch.from_numpy(value).to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), np.ndarray)
        }
        for name in ("tensors", "images"):
            found = getattr(self, name)
            moved[name] = {key: torch.from_numpy(a).to(device) for key, a in found.items()}
        return replace(self, **moved)


def pack(
    samples: Sequence[TrainingSample], *, num_ranks: int = 1, max_tokens: int
) -> tuple[tuple[Pack, ...], ...]:
    """Pack samples for trainer ranks. Return one tuple of packs per rank. All tuples have the same length.

    The function adds the longest samples first, each to the shortest pack, and uses as few packs as this rule allows. If
    there are fewer samples than packs, a pack without a sample gets a filler, so that every rank takes part in collectives:
    a copy of the shortest sample with `loss_mask` False. A group may be split over ranks, so compute advantages before
    packing. Packs contain only the per-token tensors of samples and the tensors of their images.

    Args:
        samples: samples of one step.
        num_ranks: number of data-parallel trainer ranks.
        max_tokens: largest number of tokens in a pack.

    Raises:
        ConfigError: `samples` is empty, a sample is longer than `max_tokens` or has no prompt, packed tensors of one name
            differ in dtype or in shape per token, NumPy does not have a tensor's dtype, tensors of images cannot be joined, or
            a number is below 1.
    """
    for name, number in (("num_ranks", num_ranks), ("max_tokens", max_tokens)):
        if not is_count(number):
            raise ConfigError(f"pack: {name} must be an integer >= 1, got {number!r}")
    if not samples:
        raise ConfigError("pack: samples must not be empty")
    lengths = [len(sample.prompt_ids) + len(sample.output_ids) for sample in samples]
    for index, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        if length > max_tokens:
            raise ConfigError(
                f"pack: samples[{index}] must have at most max_tokens={max_tokens} tokens, got {length}"
            )
        if not sample.prompt_ids:
            raise ConfigError(f"pack: samples[{index}] must have a prompt, got none")
    kinds = _kinds(samples)
    bins = divide(lengths, max_tokens, num_ranks=num_ranks)
    shortest = lengths.index(min(lengths))
    packs = [_pack(samples, indices, shortest, kinds) for indices in bins]
    return tuple(tuple(packs[n] for n in of_rank) for of_rank in _ranks(packs, num_ranks))


def divide(
    lengths: Sequence[int], max_tokens: int, *, num_ranks: int = 1, padded: bool = False
) -> list[list[int]]:
    """Divide samples into micro-batches of at most `max_tokens` tokens. Return the sample indices of each micro-batch.

    A sample of more than `max_tokens` tokens is a micro-batch of its own. The number of micro-batches is a multiple of
    `num_ranks`, so some may be empty.

    Args:
        lengths: number of tokens of each sample.
        max_tokens: largest number of tokens in a micro-batch.
        num_ranks: number of ranks.
        padded: whether the trainer pads the samples of a micro-batch to the longest of them. The padding then counts as
            tokens, and samples of similar length share a micro-batch. Without padding, micro-batches have similar numbers
            of tokens.
    """
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    if padded:
        found: list[list[int]] = []
        for index in longest_first:
            if not found or (len(found[-1]) + 1) * lengths[found[-1][0]] > max_tokens:
                found.append([])
            found[-1].append(index)
        return found + [[] for _ in range(-len(found) % num_ranks)]
    num_tokens = sum(min(length, max_tokens) for length in lengths)
    num_bins = num_ranks * max(1, -(-num_tokens // (num_ranks * max_tokens)))
    while True:
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        filled = [0] * num_bins
        for index in longest_first:
            emptiest = filled.index(min(filled))
            if bins[emptiest] and filled[emptiest] + lengths[index] > max_tokens:
                break
            bins[emptiest].append(index)
            filled[emptiest] += lengths[index]
        else:
            return bins
        num_bins += num_ranks


def _ranks(packs: Sequence[Pack], num_ranks: int) -> list[list[int]]:
    """Give each rank the same number of packs, and about the same number of tokens; return the packs' indices."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    num_tokens, room = [0] * num_ranks, len(packs) // num_ranks
    for index in sorted(range(len(packs)), key=lambda n: -len(packs[n].token_ids)):
        rank = min(
            (n for n in range(num_ranks) if len(ranks[n]) < room), key=num_tokens.__getitem__
        )
        ranks[rank].append(index)
        num_tokens[rank] += len(packs[index].token_ids)
    return ranks


def _kinds(samples: Sequence[TrainingSample]) -> dict[str, tuple[Array, SampleTensor]]:
    """Map the name of each per-token tensor to an empty array and to the first tensor with this name.

    The array has the tensor's dtype and its shape per token.

    Raises:
        ConfigError: the dtype or the shape per token differs between samples, or NumPy does not have the dtype.
    """
    kinds: dict[str, tuple[Array, SampleTensor]] = {}
    for sample in samples:
        for name, tensor in sample.tensors.items():
            if not tensor.per_token:
                continue
            if not tensor.has_numpy_dtype:
                raise ConfigError(
                    f"pack: tensor {name!r} must have a dtype of NumPy, got {tensor.dtype}; store it as float32"
                )
            _, known = kinds.setdefault(name, (tensor.to_numpy()[:0], tensor))
            if (tensor.dtype, tensor.shape[1:]) != (known.dtype, known.shape[1:]):
                raise ConfigError(
                    f"pack: tensor {name!r} must have the same dtype and shape per token in all samples, got {known.dtype} of "
                    f"shape {known.shape[1:]} and {tensor.dtype} of shape {tensor.shape[1:]}"
                )
    return kinds


def _pack(
    samples: Sequence[TrainingSample],
    indices: Sequence[int],
    shortest: int,
    kinds: Mapping[str, tuple[Array, SampleTensor]],
) -> Pack:
    """Concatenate the samples with these indices. Without indices, use sample number `shortest` as a filler."""
    chosen = [samples[index] for index in indices] or [samples[shortest]]
    lengths = [len(s.prompt_ids) + len(s.output_ids) for s in chosen]

    def joined(dtype: str, before: float, of: Any) -> Array:
        parts = [([before] * len(s.prompt_ids), of(s)) for s in chosen]
        return np.concatenate([np.asarray(part, dtype) for pair in parts for part in pair])

    mask = joined("bool", False, lambda s: s.loss_mask)
    return Pack(
        token_ids=np.concatenate(
            [np.asarray(s.prompt_ids + s.output_ids, "int64") for s in chosen]
        ),
        position_ids=np.concatenate([np.arange(length) for length in lengths]),
        cu_seqlens=np.cumsum([0, *lengths], dtype="int32"),
        loss_mask=mask if indices else np.zeros_like(mask),
        logprobs=joined("float32", 0.0, lambda s: s.logprobs),
        versions=joined("int64", -1, lambda s: s.versions),
        rewards=np.asarray([s.reward for s in chosen], "float32"),
        group_ids=np.asarray([s.group_id for s in chosen], "int64"),
        indices=np.asarray(indices or [-1], "int64"),
        tensors={name: _tensor(chosen, name, none) for name, (none, _) in kinds.items()},
        images=_images(chosen),
        max_seqlen=max(lengths),
    )


def _images(chosen: Sequence[TrainingSample]) -> dict[str, Array]:
    """Return the tensors of the images of samples, in the order of the samples; raise `ConfigError` as `pack` does."""
    found = joined([sample.image_tensors for sample in chosen if sample.has_images])
    for name, tensor in found.items():
        if not tensor.has_numpy_dtype:
            raise ConfigError(
                f"pack: tensor {name!r} of images must have a dtype of NumPy, got {tensor.dtype}; store it as float32"
            )
    # Copy, because an array of a sample cannot be changed.
    return {name: tensor.to_numpy().copy() for name, tensor in found.items()}


def _tensor(chosen: Sequence[TrainingSample], name: str, none: Array) -> Array:
    """Concatenate a per-token tensor of samples, with 0 for prompts and for samples without the tensor."""
    parts = []
    for sample in chosen:
        parts.append(np.zeros((len(sample.prompt_ids), *none.shape[1:]), none.dtype))
        found = sample.tensors.get(name)
        if found is None or not found.per_token:
            parts.append(np.zeros((len(sample.output_ids), *none.shape[1:]), none.dtype))
        else:
            parts.append(found.to_numpy())
    return np.concatenate(parts)
