"""Advantages of samples from their rewards.

`group_relative` and `leave_one_out` take one reward per sample and return one advantage per sample. The other functions
take and return one number per token, as padded tensors (B, T) of B samples with T tokens. Their mask is 1 for tokens that
the model generated, and 0 for padding and for tokens of tools or users in the answer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

SumOverRanks = Callable[[torch.Tensor], torch.Tensor]
"""Function that returns the sum of a tensor over all data-parallel ranks."""


def group_relative(
    rewards: torch.Tensor, groups: torch.Tensor, *, scale: bool = True, epsilon: float = 1e-4
) -> torch.Tensor:
    """Return rewards minus the mean of their group, divided by the group's standard deviation if `scale` (GRPO).

    GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1) divides. Dr. GRPO (arXiv:2503.20783) does not, because the
    division gives very easy and very hard prompts more weight. The deviation has the divisor n - 1, as in TRL and verl.
    A sample that is alone in its group has advantage 0.

    Args:
        rewards: one reward per sample (S).
        groups: id of each sample's group (S); groups may differ in size.
        scale: whether to divide by the standard deviation.
        epsilon: number added to the standard deviation.
    """
    index, sizes = _group_sizes(groups)
    centred = rewards - _group_sums(rewards, index, sizes)[index] / sizes[index]
    if not scale:
        return centred
    variance = _group_sums(centred**2, index, sizes) / (sizes - 1).clamp(min=1)
    return centred / (variance.sqrt()[index] + epsilon)


def leave_one_out(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return each reward minus the mean reward of the other samples of its group (RLOO, arXiv:2402.14740, section 3.3).

    A sample that is alone in its group has advantage 0. For arguments see `group_relative`.
    """
    index, sizes = _group_sizes(groups)
    others = (sizes - 1).clamp(min=1)[index]
    return group_relative(rewards, groups, scale=False) * sizes[index] / others


def reinforce_plus_plus(
    token_rewards: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float = 1.0,
    sum_over_ranks: SumOverRanks | None = None,
) -> torch.Tensor:
    """Return the discounted sum of each token's own and later rewards, normalised over all tokens (REINFORCE++).

    See arXiv:2501.03262.

    Rewards of tokens that the model did not generate are ignored. For the variant with a baseline, pass rewards minus the
    mean of their group (`group_relative` without scale).

    Args:
        token_rewards: rewards (B, T): a sample's reward at its last token, and penalties of tokens if there are any.
        mask: mask (B, T).
        gamma: discount per generated token.
        sum_over_ranks: see `whitened`.

    Returns:
        Advantages (B, T), 0 where the mask is 0.
    """
    returns = torch.zeros_like(token_rewards)
    running = token_rewards.new_zeros(len(token_rewards))
    for token in range(token_rewards.shape[1] - 1, -1, -1):
        generated = mask[:, token].bool()
        running = torch.where(generated, token_rewards[:, token] + gamma * running, running)
        returns[:, token] = running
    return whitened(returns, mask, sum_over_ranks=sum_over_ranks)


def generalized_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return generalised advantages and the returns that a critic learns (GAE, arXiv:1506.02438, equation 16).

    Tokens that the model did not generate are skipped: the next value is the value of the next generated token. The
    advantages are not normalised; PPO usually passes them to `whitened`.

    Args:
        rewards: rewards of tokens (B, T); ignored where the mask is 0.
        values: value that the critic predicts before each token (B, T).
        mask: mask (B, T).
        gamma: discount per generated token.
        lam: lambda of GAE; 1 for Monte Carlo returns.

    Returns:
        Advantages and returns, both (B, T) and 0 where the mask is 0.
    """
    advantages = torch.zeros_like(rewards)
    next_value = rewards.new_zeros(len(rewards))
    running = rewards.new_zeros(len(rewards))
    for token in range(rewards.shape[1] - 1, -1, -1):
        generated = mask[:, token].bool()
        delta = rewards[:, token] + gamma * next_value - values[:, token]
        running = torch.where(generated, delta + gamma * lam * running, running)
        next_value = torch.where(generated, values[:, token], next_value)
        advantages[:, token] = running
    advantages = advantages * mask
    return advantages, (advantages + values) * mask


def whitened(
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    epsilon: float = 1e-8,
    sum_over_ranks: SumOverRanks | None = None,
) -> torch.Tensor:
    """Return the masked values with mean 0 and standard deviation 1 over all tokens; 0 where the mask is 0.

    The variance has the divisor n - 1, as in TRL and verl.

    Args:
        values: values (B, T).
        mask: mask (B, T).
        epsilon: number added to the variance.
        sum_over_ranks: function that sums a tensor over the ranks, to normalise over the samples of all ranks; None to
            normalise over the given samples.
    """
    add = sum_over_ranks or (lambda tensor: tensor)
    count, total = add(torch.stack([mask.to(values.dtype).sum(), (values * mask).sum()]))
    centred = (values - total / count.clamp(min=1)) * mask
    variance = add((centred**2).sum()) / (count - 1).clamp(min=1)
    found: torch.Tensor = centred * (variance + epsilon).rsqrt()
    return found


def _group_sizes(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the position of each sample's group among the distinct groups, and the size of each distinct group."""
    distinct, index = torch.unique(groups, return_inverse=True)
    return index, index.bincount(minlength=len(distinct))


def _group_sums(values: torch.Tensor, index: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return values.new_zeros(len(sizes)).index_add(0, index, values)
