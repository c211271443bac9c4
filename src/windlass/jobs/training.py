"""Settings of the stock trainer: the table `[training]` of a job's file."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from windlass.config import check_numbers, take_name
from windlass.errors import ConfigError
from windlass.sampling import SamplingParams
from windlass.training.settings import (
    LOSSES,
    Advantage,
    Correction,
    Kl,
    Level,
    LossConfig,
    OldPolicy,
    TokenMean,
)


class ComputeType(StrEnum):
    """Element type of the forward and backward pass. Weights and gradients are float32.

    AUTO: bfloat16 on a GPU, float32 on a CPU.
    """

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class TrainingSection(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the stock trainer, which shards a causal language model of transformers with FSDP2.

    The optional settings of the loss replace those of the named loss; see `LossConfig` for their meanings. By default,
    `constant` is the largest number of new tokens in an answer.

    Attributes:
        model: checkpoint folder of the initial weights.
        loss: name in `windlass.training.LOSSES`.
        advantages: estimator of advantages; by default `dr_grpo` if `loss` is `dr_grpo`, otherwise `grpo`.
        learning_rate, weight_decay: settings of AdamW.
        warmup_steps: steps in which the learning rate rises linearly.
        max_grad_norm: norm to which gradients are clipped; 0 for no clipping.
        reference: checkpoint folder of the reference model; by default `model`. Ranks load it if `kl_coefficient` is above 0.
        max_tokens: largest number of tokens in a micro-batch of a rank, with padding. A sample with more tokens is a
            micro-batch of its own.
        compute: element type of the forward and backward pass.
        attention: implementation of attention in transformers. With a name that contains "flash", samples are packed
            without padding, unless the model has other layers that mix tokens (`training.batches.only_attends`).
        gradient_checkpointing: whether to compute activations again in the backward pass, to save memory.
        export: whether each checkpoint contains the folder `hf`, which transformers, vLLM and SGLang load. Rank 0 needs
            host memory for all weights.
        seed: torch's seed.
    """

    model: str
    loss: str = "grpo"
    advantages: Advantage | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    mean: TokenMean | None = None
    constant: float | None = None
    old_policy: OldPolicy | None = None
    correction: Correction | None = None
    correction_level: Level | None = None
    correction_cap: float | None = None
    kl_coefficient: float | None = None
    kl: Kl | None = None
    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    reference: str = ""
    max_tokens: int = 16384
    compute: ComputeType = ComputeType.AUTO
    attention: str = "sdpa"
    gradient_checkpointing: bool = False
    export: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"weight_decay": 0.0, "warmup_steps": 0, "max_grad_norm": 0.0, "max_tokens": 1}
        check_numbers(self, least, ("learning_rate",), where="training.")
        if self.loss not in LOSSES:
            raise ConfigError(f"training.loss must be one of {list(LOSSES)}, got {self.loss!r}")
        compute = take_name("training.compute", self.compute, ComputeType)
        msgspec.structs.force_setattr(self, "compute", compute)
        self.loss_config()

    def loss_config(self) -> LossConfig:
        """Return the settings of the job's loss. Values in the job file's `[training]` replace the loss's defaults.

        Raises:
            ConfigError: the settings contradict each other.
        """
        given = {name: getattr(self, name) for name in LossConfig.__struct_fields__ if name in _OWN}
        changed = {name: value for name, value in given.items() if value is not None}
        try:
            return msgspec.structs.replace(LOSSES[self.loss], **changed)
        except ConfigError as error:
            raise ConfigError(str(error).replace("loss: ", "training.", 1)) from error

    def advantage(self) -> Advantage:
        """Return the estimator of advantages."""
        if self.advantages is not None:
            return self.advantages
        return Advantage.DR_GRPO if self.loss == "dr_grpo" else Advantage.GRPO

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Check that the trainer can compute the log-probability of a token in the distribution that engines sample from.

        The trainer applies the temperature, but no other setting that changes the distribution. With such a setting,
        the ratio of the trainer's to the engine's probability would be wrong.

        Raises:
            ConfigError: the temperature is 0; or another setting changes the distribution, and the loss uses the
                engine's log-probabilities.
        """
        if sampling.temperature <= 0:
            raise ConfigError(
                f"rollout.sampling.temperature must be > 0 with [training], got {sampling.temperature:g}"
            )
        config = self.loss_config()
        uses = config.old_policy is OldPolicy.ROLLOUT or config.correction is not Correction.NONE
        neutral = {
            "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0,
            "json_schema": "", "regex": "", "ebnf": "", "choice": (), "frequency_penalty": 0.0,
            "presence_penalty": 0.0, "logit_bias": {},
        }  # fmt: skip
        for name, value in neutral.items():
            if uses and getattr(sampling, name) != value:
                raise ConfigError(
                    f"rollout.sampling.{name} must be {value!r}, got {getattr(sampling, name)!r}: the loss uses "
                    "the engine's log-probabilities; or set training.old_policy = 'trainer' and "
                    "training.correction = 'none'"
                )


_OWN = frozenset(TrainingSection.__struct_fields__)
