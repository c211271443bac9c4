"""Policy losses of padded or packed tokens.

All tensors with tokens have one shape: (B, T) if each row is a padded sequence, or any shape with `sequences`, the
index of each token's sequence, if several sequences are packed into a row. `mask` is 1 for tokens that the model
generated and 0 for prompts, padding, and tokens of tools or users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from windlass.errors import ConfigError
from windlass.training.settings import (
    Correction,
    Kl,
    Level,
    LossConfig,
    Objective,
    OldPolicy,
    TokenMean,
)

_MAX_LOG_RATIO = 20.0
"""Limit of log-ratios before `exp`, so that a very improbable token gives no infinite ratio."""


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """Return the log-probability (...) of each of the `tokens` (...) under `logits` (..., V), in float32 or float64.

    Args:
        logits: logits at the position before each token.
        tokens: token ids.
        temperature: temperature at which the engine sampled; logits are divided by it.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scaled = wide if temperature == 1.0 else wide / temperature
    chosen = scaled.gather(-1, tokens[..., None])[..., 0]
    return chosen - scaled.logsumexp(-1)


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, kind: Kl) -> torch.Tensor:
    """Return an estimate per token of KL(model || reference) from tokens that the model sampled.

    K1, K2 and K3 are the estimators of Schulman, "Approximating KL Divergence" (2020). If the two models are close, the
    mean of each estimator is close to the KL divergence. In a loss, only K2 has the right expected gradient if the
    current model sampled the tokens. GRPO uses K3 (arXiv:2402.03300, equation 4).

    Args:
        logprobs: log-probabilities of the tokens in the model.
        reference: log-probabilities of the tokens in the reference model.
        kind: estimator.
    """
    difference = (reference - logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    match kind:
        case Kl.K1:
            return -difference
        case Kl.K2:
            return difference**2 / 2
        case Kl.K3:
            return difference.exp() - difference - 1


def log_ratios(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: Level = Level.TOKEN,
    sequences: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the logarithm of the ratio of new to old probabilities for each token, limited to [-20, 20].

    For `Level.SEQUENCE`, the value of each token is the mean over its sequence (GSPO, arXiv:2507.18071, equation 7), and
    its gradient is the gradient of the token's own log-probability (GSPO-token, equation 14). If all tokens of a sequence
    have the same advantage and the loss is a mean over sequences, the gradient of the loss equals the gradient of
    GSPO's loss.
    """
    difference = (logprobs - old_logprobs) * mask
    if level is Level.SEQUENCE:
        sums, lengths, index = _sequence_sums(difference.detach(), mask, sequences)
        difference = (sums / lengths.clamp(min=1))[index] + (logprobs - logprobs.detach()) * mask
    return difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def importance_weights(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    correction: Correction,
    level: Level = Level.TOKEN,
    cap: float = 2.0,
    sequences: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the importance weight of each token: the trainer's probability divided by the engine's, without gradient.

    A weight above `cap` becomes `cap` (truncated importance sampling) or 0 (masked importance sampling). See Yao et al.,
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025), and Ionides, "Truncated Importance
    Sampling" (2008). For `Level.SEQUENCE`, the weight is the product of the ratios of a sequence's tokens. For
    `Correction.NONE`, all weights are 1.
    """
    difference = (logprobs.detach() - rollout_logprobs) * mask
    if level is Level.SEQUENCE:
        sums, _, index = _sequence_sums(difference, mask, sequences)
        difference = sums[index]
    weights = difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    match correction:
        case Correction.NONE:
            return torch.ones_like(weights)
        case Correction.TRUNCATE:
            return weights.clamp(max=cap)
        case Correction.MASK:
            return weights.masked_fill(weights > cap, 0.0)


def token_mean(
    values: torch.Tensor,
    mask: torch.Tensor,
    mean: TokenMean,
    *,
    constant: float = 1.0,
    sequences: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mean of the values where the mask is 1, as `mean` defines it.

    Sequences whose mask is 0 everywhere do not count.

    Args:
        values: values of tokens.
        mask: mask of tokens.
        mean: kind of the mean.
        constant: divisor of `TokenMean.CONSTANT`, for example the largest number of tokens in an answer.
        sequences: index of each token's sequence; None if each row is a sequence.
    """
    masked = values * mask
    if mean is TokenMean.TOKENS:
        return masked.sum() / mask.sum().clamp(min=1)
    sums, lengths, _ = _sequence_sums(masked, mask, sequences)
    per_sequence = sums / (lengths.clamp(min=1) if mean is TokenMean.SEQUENCES else constant)
    return per_sequence.sum() / (lengths > 0).sum().clamp(min=1)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Result of `policy_loss`.

    Attributes:
        loss: scalar to minimise.
        metrics: name -> scalar without gradient. With `TokenMean.TOKENS`, a metric is the mean over all tokens. Otherwise
            it is the mean, over sequences, of each sequence's mean. So the same weights of micro-batches are right for
            the loss and for the metrics. `ratio` is the ratio of new to old probabilities. `clipped` is the share of
            tokens with a clipped ratio. `rollout_kl` is the K3 estimate of KL(engine's policy || model). `importance` is
            the importance weight; only with a correction. `kl` is the divergence to the reference model; only with a
            `kl_coefficient`.
    """

    loss: torch.Tensor
    metrics: Mapping[str, torch.Tensor]


def policy_loss(
    config: LossConfig,
    *,
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequences: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
) -> PolicyLoss:
    """Return the loss that `config` describes, and its metrics.

    Args:
        config: settings.
        logprobs: log-probabilities of the tokens in the model, with gradient.
        rollout_logprobs: log-probabilities of the tokens in the engine; any finite number where `mask` is 0.
        advantages: advantages of the tokens.
        mask: mask of the tokens.
        sequences: index of each token's sequence; None if each row is a sequence.
        reference: log-probabilities of the tokens in the reference model; None if `kl_coefficient` is 0.

    Raises:
        ConfigError: `kl_coefficient` is not 0, and `reference` is None.
    """
    if config.kl_coefficient and reference is None:
        raise ConfigError(
            f"policy_loss: reference must be given with kl_coefficient={config.kl_coefficient:g}, got None"
        )
    mask = mask.to(logprobs.dtype)
    is_on_rollout = config.old_policy is OldPolicy.ROLLOUT
    old = rollout_logprobs if is_on_rollout else logprobs.detach()
    logs = log_ratios(logprobs, old, mask, level=config.level, sequences=sequences)
    ratio = logs.exp()
    limited = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    if config.objective is Objective.WEIGHT:
        losses = -limited.detach() * advantages * logprobs
        clipped = ratio != limited
    else:
        plain, cut = -ratio * advantages, -limited * advantages
        losses = torch.maximum(plain, cut)
        clipped = cut > plain
    means = {"ratio": ratio, "clipped": clipped.to(mask.dtype)}
    means["rollout_kl"] = kl_estimate(rollout_logprobs, logprobs, Kl.K3)
    if config.correction is not Correction.NONE:
        means["importance"] = importance_weights(
            logprobs,
            rollout_logprobs,
            mask,
            correction=config.correction,
            level=config.correction_level,
            cap=config.correction_cap,
            sequences=sequences,
        )
        losses = losses * means["importance"]
    if config.kl_coefficient and reference is not None:
        means["kl"] = kl_estimate(logprobs, reference, config.kl)
        losses = losses + config.kl_coefficient * means["kl"]
    loss = token_mean(losses, mask, config.mean, constant=config.constant, sequences=sequences)
    by_tokens = config.mean is TokenMean.TOKENS
    unit = TokenMean.TOKENS if by_tokens else TokenMean.SEQUENCES
    metrics = {
        name: token_mean(value.detach(), mask, unit, sequences=sequences)
        for name, value in means.items()
    }
    return PolicyLoss(loss, metrics)


def _sequence_sums(
    values: torch.Tensor, mask: torch.Tensor, sequences: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each sequence's sum of the values, its number of tokens with mask 1, and the sequence of each token."""
    if sequences is None:
        rows = torch.arange(len(values), device=values.device)
        sequences = rows.reshape(-1, *[1] * (values.dim() - 1)).expand_as(values)
    number = int(sequences.max()) + 1 if sequences.numel() else 0
    index = sequences.flatten()
    zeros = values.new_zeros(number)
    sums = zeros.index_add(0, index, values.flatten())
    return sums, zeros.index_add(0, index, mask.to(values.dtype).flatten()), sequences
