"""Settings of advantages and losses, without torch: the process that reads a job's file needs them too."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import msgspec

from windlass.config import check_numbers, take_name
from windlass.errors import ConfigError


class Advantage(StrEnum):
    """Estimator of advantages from one reward per sample; see `windlass.training.advantages`.

    GRPO, DR_GRPO: `group_relative`, with and without division by the standard deviation.
    RLOO: `leave_one_out`.
    REINFORCE_PP: `reinforce_plus_plus`. REINFORCE_PP_BASELINE: the same, of rewards minus the mean of their group.
    """

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"
    REINFORCE_PP = "reinforce_pp"
    REINFORCE_PP_BASELINE = "reinforce_pp_baseline"


class Objective(StrEnum):
    """Use of the ratio in the loss: clip the product with the advantage (PPO), or clip the ratio as a weight (CISPO)."""

    CLIP = "clip"
    WEIGHT = "weight"


class Level(StrEnum):
    """Unit of a ratio: each token has its own, or all tokens of a sequence share one."""

    TOKEN = "token"  # noqa: S105 - not a secret
    SEQUENCE = "sequence"


class TokenMean(StrEnum):
    """Mean of a loss over tokens.

    TOKENS: mean over all tokens of the batch.
    SEQUENCES: mean over the sequences' means.
    CONSTANT: mean over sequences of the sum of a sequence's tokens divided by a constant (Dr. GRPO).
    """

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    CONSTANT = "constant"


class Kl(StrEnum):
    """Estimator of the KL divergence of a token; see `windlass.training.losses.kl_estimate`."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class Correction(StrEnum):
    """Importance weights for tokens that engines sampled from another distribution than the trainer's old policy.

    NONE: no weights. TRUNCATE: weights above the cap become the cap. MASK: weights above the cap become 0.
    """

    NONE = "none"
    TRUNCATE = "truncate"
    MASK = "mask"


class OldPolicy(StrEnum):
    """Policy in the denominator of the ratio.

    ROLLOUT: the engine's policy, by the rollouts' log-probabilities. The ratio then also corrects stale tokens.
    TRAINER: the trainer's policy at the beginning of the step. With one optimiser step per batch, the ratio is 1.
    """

    ROLLOUT = "rollout"
    TRAINER = "trainer"


class LossConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `policy_loss`. `LOSSES` has the settings of published losses by name.

    Attributes:
        objective: use of the ratio.
        level: unit of the ratio.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        mean: mean over tokens.
        constant: divisor of `TokenMean.CONSTANT`; for other means it has no effect.
        old_policy: policy in the denominator of the ratio.
        correction, correction_level, correction_cap: importance weights of rollouts; only with `OldPolicy.TRAINER`,
            because the ratio to the engine's policy is already such a weight.
        kl_coefficient: factor of the KL divergence to a reference model; 0 for no reference model.
        kl: estimator of the divergence.

    Raises:
        ConfigError: a value is out of range, or the settings contradict each other.
    """

    objective: Objective = Objective.CLIP
    level: Level = Level.TOKEN
    clip_low: float = 0.2
    clip_high: float = 0.2
    mean: TokenMean = TokenMean.TOKENS
    constant: float = 1.0
    old_policy: OldPolicy = OldPolicy.ROLLOUT
    correction: Correction = Correction.NONE
    correction_level: Level = Level.TOKEN
    correction_cap: float = 2.0
    kl_coefficient: float = 0.0
    kl: Kl = Kl.K3

    def __post_init__(self) -> None:
        where = "loss: "
        kinds: dict[str, type[StrEnum]] = {
            "objective": Objective, "level": Level, "mean": TokenMean, "old_policy": OldPolicy,
            "correction": Correction, "correction_level": Level, "kl": Kl,
        }  # fmt: skip
        for name, kind in kinds.items():
            found = take_name(f"{where}{name}", getattr(self, name), kind)
            msgspec.structs.force_setattr(self, name, found)
        least = {"clip_low": 0.0, "clip_high": 0.0, "kl_coefficient": 0.0}
        check_numbers(self, least, ("correction_cap", "constant"), where=where)
        if self.correction is not Correction.NONE and self.old_policy is OldPolicy.ROLLOUT:
            raise ConfigError(
                f"{where}correction must be 'none' with old_policy 'rollout', got {self.correction.value!r}; "
                "set old_policy = 'trainer'"
            )


# PPO: arXiv:1707.06347. GRPO: 2402.03300. Dr. GRPO: 2503.20783. DAPO: 2503.14476; its penalty of long answers belongs to
# the reward. GSPO: 2507.18071. CISPO: 2506.13585, which names no limits; weights of at most 5 are from ScaleRL (2510.13786).
LOSSES: Mapping[str, LossConfig] = MappingProxyType(
    {
        "ppo": LossConfig(),
        "grpo": LossConfig(mean=TokenMean.SEQUENCES),
        "dr_grpo": LossConfig(mean=TokenMean.CONSTANT),
        "dapo": LossConfig(clip_high=0.28),
        "gspo": LossConfig(
            level=Level.SEQUENCE, clip_low=3e-4, clip_high=4e-4, mean=TokenMean.SEQUENCES
        ),
        "cispo": LossConfig(objective=Objective.WEIGHT, clip_low=1.0, clip_high=4.0),
    }
)
"""Name of a published loss -> its settings."""
