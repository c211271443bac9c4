"""Advantages and losses of reinforcement learning, as functions of torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.lazy import public

if TYPE_CHECKING:
    from windlass.training.advantages import generalized_advantages as generalized_advantages
    from windlass.training.advantages import group_relative as group_relative
    from windlass.training.advantages import leave_one_out as leave_one_out
    from windlass.training.advantages import reinforce_plus_plus as reinforce_plus_plus
    from windlass.training.advantages import whitened as whitened
    from windlass.training.losses import PolicyLoss as PolicyLoss
    from windlass.training.losses import importance_weights as importance_weights
    from windlass.training.losses import kl_estimate as kl_estimate
    from windlass.training.losses import log_ratios as log_ratios
    from windlass.training.losses import policy_loss as policy_loss
    from windlass.training.losses import token_logprobs as token_logprobs
    from windlass.training.losses import token_mean as token_mean
    from windlass.training.settings import LOSSES as LOSSES
    from windlass.training.settings import Advantage as Advantage
    from windlass.training.settings import Correction as Correction
    from windlass.training.settings import Kl as Kl
    from windlass.training.settings import Level as Level
    from windlass.training.settings import LossConfig as LossConfig
    from windlass.training.settings import Objective as Objective
    from windlass.training.settings import OldPolicy as OldPolicy
    from windlass.training.settings import TokenMean as TokenMean

# Type checkers must not see `__getattr__`: with it they would accept any name.
if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = public(__name__)
