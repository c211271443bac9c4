"""Losses and their gradients equal the published formulas, evaluated token by token, and are equal padded and packed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from windlass.errors import ConfigError
from windlass.training import (
    LOSSES,
    Correction,
    Kl,
    Level,
    LossConfig,
    OldPolicy,
    TokenMean,
    importance_weights,
    kl_estimate,
    policy_loss,
    token_logprobs,
)

LENGTHS = [[1, 1, 0, 1, 1], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
MASK = torch.tensor(LENGTHS, dtype=torch.float64)
"""The last sequence has no token of the model, and the first has a token of a tool in the middle."""
ADVANTAGES = torch.tensor([1.5, -0.75, -2.0, 3.0], dtype=torch.float64)[:, None].expand(4, 5)
INPUTS = ["logprobs", "rollout_logprobs", "reference"]


def inputs() -> dict[str, torch.Tensor]:
    """Return log-probabilities (4, 5) with ratios far inside and outside of every clip range."""
    places = torch.arange(20, dtype=torch.float64).reshape(4, 5)
    return {
        "logprobs": -1.5 + torch.sin(places * 1.3),
        "rollout_logprobs": -1.5 + torch.sin(places * 1.3) + 0.6 * torch.cos(places * 1.9),
        "reference": -1.4 + 0.8 * torch.sin(places * 0.9),
    }


def clip(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.minimum(torch.maximum(x, x.new_tensor(low)), x.new_tensor(high))


def rows(of: dict[str, torch.Tensor]) -> list[list[tuple[torch.Tensor, ...]]]:
    """Return (logprob, rollout logprob, reference, advantage) of each generated token, by sequence."""
    return [
        [
            (*(of[name][row, token] for name in INPUTS), ADVANTAGES[row, token])
            for token in range(5)
            if LENGTHS[row][token]
        ]
        for row in range(4)
    ]


def mean(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(values).mean()


def ppo(of: dict[str, torch.Tensor], low: float, high: float) -> list[list[torch.Tensor]]:
    """Return the loss of each token: -min(r A, clip(r) A), PPO equation 7."""
    return [
        [
            -torch.minimum((p - q).exp() * a, clip((p - q).exp(), 1 - low, 1 + high) * a)
            for p, q, _, a in row
        ]
        for row in rows(of)
    ]


def grpo(of: dict[str, torch.Tensor]) -> torch.Tensor:
    """GRPO equation 3 with beta 0.04: a mean over sequences of means over tokens, with the K3 estimate of the KL."""
    found = []
    for row, losses in zip(rows(of), ppo(of, 0.2, 0.2), strict=True):
        with_kl = [
            loss + 0.04 * ((r - p).exp() - (r - p) - 1)
            for (p, _, r, _), loss in zip(row, losses, strict=True)
        ]
        found += [mean(with_kl)] if with_kl else []
    return mean(found)


def dapo(of: dict[str, torch.Tensor]) -> torch.Tensor:
    """DAPO equation 8: a mean over all tokens, with the range [0.8, 1.28]."""
    return mean([loss for row in ppo(of, 0.2, 0.28) for loss in row])


def dr_grpo(of: dict[str, torch.Tensor]) -> torch.Tensor:
    """Dr. GRPO as in TRL: sums of sequences divided by a constant and the number of sequences."""
    return torch.stack([torch.stack(row).sum() / 16 for row in ppo(of, 0.2, 0.2) if row]).sum() / 3


def gspo(of: dict[str, torch.Tensor]) -> torch.Tensor:
    """GSPO equation 5: one ratio per sequence, the geometric mean of its tokens' ratios."""
    found = []
    for row in filter(None, rows(of)):
        ratio = mean([p - q for p, q, _, _ in row]).exp()
        a = row[0][3]
        found.append(-torch.minimum(ratio * a, clip(ratio, 1 - 3e-4, 1 + 4e-4) * a))
    return mean(found)


def cispo(of: dict[str, torch.Tensor]) -> torch.Tensor:
    """CISPO equation 4: the limited ratio is a constant factor of the gain A log p; a mean over all tokens."""
    return mean(
        [-(p - q).exp().clamp(max=5.0).detach() * a * p for row in rows(of) for p, q, _, a in row]
    )


def truncated(of: dict[str, torch.Tensor]) -> torch.Tensor:
    """On-policy gradient with truncated importance weights, per token."""
    return mean(
        [
            -(p - p.detach()).exp() * a * (p - q).detach().exp().clamp(max=1.3)
            for row in rows(of)
            for p, q, _, a in row
        ]
    )


CASES: dict[str, tuple[LossConfig, Callable[[dict[str, torch.Tensor]], torch.Tensor]]] = {
    "grpo": (LossConfig(mean=TokenMean.SEQUENCES, kl_coefficient=0.04), grpo),
    "dapo": (LOSSES["dapo"], dapo),
    "dr_grpo": (LossConfig(mean=TokenMean.CONSTANT, constant=16.0), dr_grpo),
    "gspo": (LOSSES["gspo"], gspo),
    "cispo": (LOSSES["cispo"], cispo),
    "truncated": (
        LossConfig(
            old_policy=OldPolicy.TRAINER, correction=Correction.TRUNCATE, correction_cap=1.3
        ),
        truncated,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_the_papers(name: str) -> None:
    config, published = CASES[name]
    own, expected = inputs(), inputs()
    for given in (own, expected):
        given["logprobs"].requires_grad_()
    loss = policy_loss(config, **own, advantages=ADVANTAGES, mask=MASK)
    reference = published(expected)
    loss.loss.backward()  # type: ignore[no-untyped-call]
    reference.backward()  # type: ignore[no-untyped-call]
    assert loss.loss.item() == pytest.approx(reference.item(), rel=1e-12)
    ours, theirs = own["logprobs"].grad, expected["logprobs"].grad
    assert ours is not None
    assert theirs is not None
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    assert ours.any()
    assert not (ours * (1 - MASK)).any()
    assert all(math.isfinite(value) for value in loss.metrics.values())


@pytest.mark.parametrize("name", CASES)
def test_packed_tokens_have_the_loss_of_padded_tokens(name: str) -> None:
    config, _ = CASES[name]
    padded, packed = inputs(), inputs()
    padded["logprobs"].requires_grad_()
    # All tokens of a sequence but its padding, in one row; the order of the sequences differs.
    places = [(row, token) for row in (2, 0, 3, 1) for token in range(5 if row == 0 else 3)]
    at = [row for row, _ in places], [token for _, token in places]
    cut = {name: tensor[at][None].clone() for name, tensor in packed.items()}
    cut["logprobs"].requires_grad_()
    whole = policy_loss(config, **padded, advantages=ADVANTAGES, mask=MASK)
    one_row = policy_loss(
        config,
        **cut,
        advantages=ADVANTAGES[at][None],
        mask=MASK[at][None],
        sequences=torch.tensor([at[0]]),
    )
    assert one_row.loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
    whole.loss.backward()  # type: ignore[no-untyped-call]
    one_row.loss.backward()  # type: ignore[no-untyped-call]
    assert padded["logprobs"].grad is not None
    assert cut["logprobs"].grad is not None
    assert torch.allclose(padded["logprobs"].grad[at], cut["logprobs"].grad[0], rtol=1e-12)
    for metric, value in whole.metrics.items():
        assert float(one_row.metrics[metric]) == pytest.approx(float(value), rel=1e-12)


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("correction", Correction)
def test_importance_weights_are_limited_per_token_or_sequence(
    level: Level, correction: Correction
) -> None:
    of = inputs()
    found = importance_weights(
        of["logprobs"], of["rollout_logprobs"], MASK, correction=correction, level=level, cap=1.4
    )
    at_cap = 0
    for row, tokens in enumerate(LENGTHS):
        own = [token for token in range(5) if tokens[token]]
        differences = [float(of["logprobs"][row, n] - of["rollout_logprobs"][row, n]) for n in own]
        for token, difference in zip(own, differences, strict=True):
            weight = math.exp(sum(differences) if level is Level.SEQUENCE else difference)
            at_cap += weight > 1.4
            limits = {"none": 1.0, "truncate": min(weight, 1.4), "mask": weight * (weight <= 1.4)}
            assert float(found[row, token]) == pytest.approx(limits[correction.value], rel=1e-12)
    assert at_cap


def test_kl_estimates_have_the_divergence_as_their_mean() -> None:
    """The mean of K1 and K3 over a distribution is the exact divergence; K2 equals it to second order."""
    logits = torch.sin(torch.arange(40, dtype=torch.float64) * 1.7)
    model = logits.log_softmax(0)
    reference = (logits + 0.05 * torch.cos(torch.arange(40, dtype=torch.float64))).log_softmax(0)
    exact = float((model.exp() * (model - reference)).sum())
    for kind, tolerance in ((Kl.K1, 1e-12), (Kl.K2, 0.05), (Kl.K3, 1e-12)):
        estimates = kl_estimate(model, reference, kind)
        assert float((model.exp() * estimates).sum()) == pytest.approx(exact, rel=tolerance)
        assert kind is Kl.K1 or bool((estimates >= 0).all())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_are_those_of_the_tempered_distribution(temperature: float) -> None:
    logits = torch.sin(torch.arange(60, dtype=torch.float64).reshape(2, 3, 10)) * 4
    tokens = torch.tensor([[3, 0, 9], [1, 7, 2]])
    expected = (logits / temperature).softmax(-1).gather(-1, tokens[..., None])[..., 0].log()
    assert torch.allclose(token_logprobs(logits, tokens, temperature=temperature), expected)


def test_a_correction_of_a_ratio_that_corrects_already_is_refused() -> None:
    with pytest.raises(ConfigError, match="correction must be 'none' with old_policy 'rollout'"):
        LossConfig(correction=Correction.MASK)


def test_a_loss_with_a_reference_model_needs_its_logprobs() -> None:
    given = inputs()
    del given["reference"]
    with pytest.raises(
        ConfigError, match=r"reference must be given with kl_coefficient=0.1, got None"
    ):
        policy_loss(LossConfig(kl_coefficient=0.1), advantages=ADVANTAGES, mask=MASK, **given)
