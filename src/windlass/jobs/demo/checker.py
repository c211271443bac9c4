"""Check of a demo's answers: the engine must have computed each token with the weight version that the token names.

The check computes the logprob of every token with the trainer's model, at the version that the token names. The
distance of an answer is the mean |logprob difference| over its tokens. If the distance is larger than rounding in the
engine's dtype explains, the answer is torn: other weights computed it. As a control, the check also computes the
distance for the previous version. `control_detected` is the share of answers with a control distance that the check
would call torn.

An answer that was running during an update has tokens of several versions. If the engine kept running requests during
the update (`PauseMode.IN_PLACE`, vLLM's `keep`), later tokens attend to keys and values that older weights computed. If
the request was sent again, the newer version computed the whole context.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue

import msgspec
import torch
from safetensors.torch import load_file
from transformers import DynamicCache

from windlass.jobs.demo.trainer import build_model
from windlass.layout.dtypes import DType
from windlass.memory.torch_dtypes import torch_dtype
from windlass.rollout.messages import TrainingSample

TOLERANCE, OF_LAYERS = {"float32": 1e-3, "bfloat16": 3e-2}, 4
"""Largest distance of a right answer by dtype, and the largest number of layers with this tolerance."""
BATCH = 1024
"""Largest number of answers in a forward pass."""
NUM_WORST = 4
"""Number of answers in `TornReport.worst`."""
NUM_LOADED = 8
"""Largest number of versions in memory at a time."""

Weights = Mapping[str, torch.Tensor]


class WorstAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer with a large distance, and values that show whether rounding or another version explains the distance.

    Attributes:
        sample: the answer.
        distance: mean |logprob difference| over the answer's tokens.
        expected: name of a computation -> log-probabilities of the answer's tokens. The names are "as named" (with the
            versions that the tokens name), "as named, context kept" (with keys and values of older versions), and
            "version N". There is one "version N" for each published version with a file, if a token names this version or
            a neighbouring version.
    """

    sample: TrainingSample
    distance: float
    expected: dict[str, tuple[float, ...]]


class TornReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the check.

    Attributes:
        checked: number of compared answers.
        torn: number of answers with a too large distance, or with a version that was not published.
        max_distance: engine dtype -> largest mean |logprob difference| of an answer.
        control_detected: share of answers that the check would call torn if each token named the previous version.
            Answers with a token of version 0 do not count; None if no other answers exist.
        worst: answers with the largest distances, largest first.
    """

    checked: int
    torn: int
    max_distance: dict[str, float]
    control_detected: float | None
    worst: tuple[WorstAnswer, ...] = ()


def check_served(
    samples: Sequence[TrainingSample],
    published: Sequence[int],
    *,
    model_config: Path,
    versions_dir: Path,
    dtypes: Mapping[str, str],
    context_is_kept: bool,
    device: str,
    progress: Callable[[int], object] = lambda _: None,
) -> TornReport:
    """Compare each sample's log-probabilities with those that the trainer's weights give.

    A token names the version that generated it; the weights of this version compute the token's log-probability again.

    Args:
        samples: answers that the trainers trained on.
        published: versions that were published, so engines may have served them.
        model_config: transformers configuration or checkpoint folder of the model.
        versions_dir: folder with VERSION.safetensors for every version that a sample names.
        dtypes: name of an engine -> dtype of its parameters.
        context_is_kept: whether engines may have kept keys and values across an update. If so, an answer of several
            versions is compared twice, with and without kept keys and values, and the smaller distance counts. The
            check does not know which comparison is right: a request that starts again, because its engine has died, has
            no kept keys and values.
        device: torch device that computes the check.
        progress: function that gets the current number of compared samples.
    """
    by_dtype: dict[str, list[int]] = defaultdict(list)
    unpublished = torch.zeros(len(samples), dtype=torch.bool)
    for index, sample in enumerate(samples):
        if set(sample.versions) <= set(published):
            by_dtype[dtypes[sample.engine]].append(index)
        else:
            unpublished[index] = True
    own, previous = torch.zeros(len(samples)), torch.zeros(len(samples))
    num_models = len(os.sched_getaffinity(0)) if device == "cpu" else 1
    models = {
        dtype: [_checking_model(model_config, dtype, device) for _ in range(num_models)]
        for dtype in by_dtype
    }

    @lru_cache(NUM_LOADED)
    def weights_of(version: int) -> Weights:
        return load_file(versions_dir / f"{version}.safetensors", device=device)

    num_done = int(unpublished.sum())
    for dtype, indices in sorted(by_dtype.items()):
        model = models[dtype][0]
        for same in _grouped(
            indices, lambda i: (len(samples[i].prompt_ids), len(samples[i].versions))
        ):
            chosen, tell = [samples[i] for i in same], partial(_add_to, progress, num_done)
            own[same], previous[same] = _fresh_distances(models[dtype], weights_of, chosen, tell)
            num_done += len(same)
        mixed = [i for i in indices if context_is_kept and len(set(samples[i].versions)) > 1]
        for same in _grouped(
            mixed, lambda i: (len(samples[i].prompt_ids), tuple(samples[i].versions))
        ):
            kept = _kept_distances(model, weights_of, [samples[i] for i in same])
            for distance, other in zip((own, previous), kept, strict=True):
                distance[same] = torch.minimum(distance[same], other)
    dtype_of_sample = [dtypes[sample.engine] for sample in samples]
    depth = _depth_factor(models)
    tolerance = torch.tensor([TOLERANCE[dtype] * depth for dtype in dtype_of_sample])
    torn = unpublished | (own > tolerance)
    later = torch.tensor([min(s.versions) > 0 for s in samples], dtype=torch.bool)
    control = (previous > tolerance)[later]
    largest: dict[str, float] = defaultdict(float)
    for dtype, value in zip(dtype_of_sample, own.tolist(), strict=True):
        largest[dtype] = max(largest[dtype], value)
    worst: list[WorstAnswer] = []
    # A trainer saves version N at the beginning of step N. So the last version, which the last step publishes, has no file.
    saved = [v for v in published if (versions_dir / f"{v}.safetensors").exists()]
    for index in own.argsort(descending=True)[:NUM_WORST].tolist():
        sample = samples[index]
        if unpublished[index]:
            continue
        expect = partial(_logprobs, models[dtypes[sample.engine]][0], weights_of, [sample])
        expected = _explain(expect, sample, saved, context_is_kept=context_is_kept)
        worst.append(WorstAnswer(sample=sample, distance=float(own[index]), expected=expected))
    return TornReport(
        checked=len(samples),
        torn=int(torn.sum()),
        max_distance=dict(largest),
        control_detected=float(control.float().mean()) if len(control) else None,
        worst=tuple(worst),
    )


def _depth_factor(models: Mapping[str, Sequence[torch.nn.Module]]) -> float:
    """Return the factor by which the tolerance grows with the model's depth: sqrt(layers / `OF_LAYERS`), but at least 1.

    The rounding errors of the layers are independent, so their sum grows with the square root of the number of layers.

    Args:
        models: engine dtype -> models of the check; all have the same depth.
    """
    layers = [
        len(list(of_dtype[0].get_submodule("model.layers").children()))
        for of_dtype in models.values()
    ]
    return max([1.0, *(math.sqrt(number / OF_LAYERS) for number in layers)])


def _checking_model(config: Path, dtype: str, device: str) -> torch.nn.Module:
    """Build a model that computes like an engine of this dtype.

    On a CPU, the model's bfloat16 linear layers multiply in float32 and round the product to bfloat16. torch's bfloat16
    layers round in the same way, but take five times as long on a CPU without bfloat16 units.
    """
    model = build_model(config).to(device, torch_dtype(DType(dtype))).eval()
    if device == "cpu" and dtype == "bfloat16":
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                setattr(module, "forward", partial(_float32_linear, module))  # noqa: B010 - mypy
    return model


def _float32_linear(module: torch.nn.Linear, values: torch.Tensor) -> torch.Tensor:
    """Return the output of a linear layer, computed in float32 and rounded to the dtype of `values`."""
    bias: torch.Tensor | None = module.bias
    product = torch.nn.functional.linear(
        values.float(), module.weight.float(), None if bias is None else bias.float()
    )
    return product.to(values.dtype)


def _explain(
    expect: Callable[..., torch.Tensor],
    sample: TrainingSample,
    saved: Sequence[int],
    *,
    context_is_kept: bool,
) -> dict[str, tuple[float, ...]]:
    """Compute the log-probabilities of a sample in several ways. Return name of the way -> log-probabilities.

    Args:
        expect: function that returns the log-probabilities (1, T). Its arguments are one version per token, and `kept`
            (whether keys and values of older versions are reused).
        sample: the sample.
        saved: published versions whose weights were saved.
        context_is_kept: whether engines may have kept keys and values across an update.
    """
    near = {version + step for version in sample.versions for step in (-1, 0, 1)}
    by_way = {"as named": expect(sample.versions, kept=False)}
    if context_is_kept and len(set(sample.versions)) > 1:
        by_way["as named, context kept"] = expect(sample.versions, kept=True)
    for version in sorted(near.intersection(saved)):
        by_way[f"version {version}"] = expect((version,) * len(sample.versions), kept=False)
    return {way: tuple(logprobs[0].tolist()) for way, logprobs in by_way.items()}


def _grouped(indices: Sequence[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    """Group indices by the result of `key`; return one list per group."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index in indices:
        groups[key(index)].append(index)
    return [*groups.values()]


def _kept_distances(
    model: torch.nn.Module, weights_of: Callable[[int], Weights], samples: Sequence[TrainingSample]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two distances per sample between the engine's and the checker's log-probabilities.

    A distance is the mean absolute difference over the sample's tokens. For the first distance, the checker computes the
    log-probability of each token with the token's version in `sample.versions`. For the second distance, it uses the
    version before that.

    Like an engine that continues requests after an update, the checker reuses the keys and values that older versions
    computed for earlier tokens.

    Args:
        model: model of the demo; this function overwrites its weights with the weights of each version.
        weights_of: function that returns the weights of a version.
        samples: samples with equally long prompts and equal `versions`.
    """
    served = torch.tensor([sample.logprobs for sample in samples])
    named = samples[0].versions
    before = [max(version - 1, 0) for version in named]
    own, previous = (
        (served - _logprobs(model, weights_of, samples, claimed, kept=True)).abs().mean(1)
        for claimed in (named, before)
    )
    return own, previous


def _add_to(progress: Callable[[int], object], num_before: int, num: int) -> None:
    """Call `progress` with the number of samples compared so far: `num_before` in earlier groups and `num` in this one."""
    progress(num_before + num)


def _fresh_distances(
    models: Sequence[torch.nn.Module],
    weights_of: Callable[[int], Weights],
    samples: Sequence[TrainingSample],
    progress: Callable[[int], object],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two distances per sample between the engine's and the checker's log-probabilities.

    A distance is the mean absolute difference over the sample's tokens. For the first distance, the checker computes the
    log-probability of each token with the token's version in `sample.versions`. For the second distance, it uses the
    version before that.

    The checker uses one version for a token and its whole context. One forward pass per version covers all tokens with
    this version: the model is causal, so later tokens do not change the result.

    Args:
        models: models that run forward passes in parallel, each in its own thread.
        weights_of: function that returns the weights of a version.
        samples: samples with equally long prompts and equally long answers.
        progress: function that gets the current number of compared samples.
    """
    named = torch.tensor([list(sample.versions) for sample in samples])
    served = torch.tensor([sample.logprobs for sample in samples])
    claims = (named, (named - 1).clamp(min=0))
    expected = (torch.zeros_like(served), torch.zeros_like(served))
    versions = sorted(set(torch.cat(claims).flatten().tolist()))
    passes = [
        (version, part)
        for version in versions
        for part in ((claims[0] == version) | (claims[1] == version))
        .any(1)
        .nonzero()[:, 0]
        .split(BATCH)
    ]
    free: SimpleQueue[torch.nn.Module] = SimpleQueue()
    for model in models:
        free.put(model)

    def compute(version: int, part: torch.Tensor) -> torch.Tensor:
        model, chosen = free.get(), [samples[index] for index in part.tolist()]
        try:
            return _logprobs(model, weights_of, chosen, [version] * served.shape[1], kept=False)
        finally:
            free.put(model)

    num_done, num_rows = 0, sum(len(part) for _, part in passes)
    # Use one thread per pass: threads inside an operator would spin on cores that other processes need.
    with ThreadPoolExecutor(len(models), "check", lambda: torch.set_num_threads(1)) as pool:
        for (version, part), found in zip(
            passes, pool.map(compute, *zip(*passes, strict=True)), strict=True
        ):
            for claimed, logprobs in zip(claims, expected, strict=True):
                is_claimed = claimed[part] == version
                logprobs[part] = torch.where(is_claimed, found, logprobs[part])
            num_done += len(part)
            progress(len(samples) * num_done // num_rows)
    own, previous = ((served - logprobs).abs().mean(1) for logprobs in expected)
    return own, previous


@torch.no_grad()
def _logprobs(
    model: torch.nn.Module,
    weights_of: Callable[[int], Weights],
    samples: Sequence[TrainingSample],
    versions: Sequence[int],
    *,
    kept: bool,
) -> torch.Tensor:
    """Return log-probabilities (B, T) of outputs in float32; version `versions[i]` computes token i.

    Args:
        model: model of the demo; this function overwrites its weights with the weights of each version.
        weights_of: function that returns the weights of a version.
        samples: B samples with equally long prompts and T output tokens each.
        versions: T versions, one for each output token.
        kept: whether a version reuses the keys and values that earlier versions computed for earlier tokens.
    """
    device = next(model.parameters()).device
    prompts = torch.tensor([s.prompt_ids for s in samples], device=device)
    outputs = torch.tensor([s.output_ids for s in samples], device=device)
    tokens, num_prompt = torch.cat([prompts, outputs], dim=1), prompts.shape[1]
    cache, num_cached, parts = DynamicCache(), 0, []
    for version, run in groupby(range(len(versions)), key=versions.__getitem__):
        indices = list(run)
        weights = weights_of(version)
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        end = num_prompt + indices[-1]
        if not kept:
            cache, num_cached = DynamicCache(), 0
        # Pass the cache by position, because transformers 5.24 renamed this argument.
        logits = model(tokens[:, num_cached:end], None, None, cache).logits
        parts.append(logits[:, -len(indices) :].float().log_softmax(-1))
        num_cached = end
    chosen: torch.Tensor = torch.cat(parts, 1).gather(2, outputs[..., None])[..., 0]
    return chosen.cpu()
