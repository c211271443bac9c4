"""TRL's trainers with `vllm_mode="colocate"`: vLLM runs in the process of every trainer rank.

`colocate` replaces two things of huggingface/trl 1.16 (trl/generation/vllm_generation.py): the name `LLM`, so that vLLM
starts with Windlass's backend and its layout is captured before its first sleep, and `VLLMGeneration.sync_weights`.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Mapping, Sequence
from typing import Any, final

from accelerate.utils import is_peft_model
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from windlass.engines.vllm.backend import BACKEND
from windlass.errors import ConfigError
from windlass.integrations.fleet_sync import SentWeights
from windlass.integrations.trl.merging import merged, merged_names
from windlass.integrations.vllm import ColocatedEngine, ColocatedSync
from windlass.integrations.vllm.plugin import register
from windlass.layout.naming.stacked import StackedRule

__all__ = ["colocate"]

_ATTRIBUTE = "windlass_colocated"
"""Attribute of TRL's `VLLMGeneration` and of vLLM's `LLM` with our object."""


def colocate(
    *,
    stacked: Sequence[StackedRule] | None = None,
    allow_unused: Sequence[str] = (),
    deadline_s: float = 600.0,
) -> None:
    """Make TRL's trainers with `vllm_mode="colocate"` update their vLLM through Windlass.

    Every rank calls this once, before it creates the trainer. The call applies to all later trainers of this process
    that generate with `VLLMGeneration`, for example `GRPOTrainer`. Trainers with `vllm_mode="server"` do not change.

    Each sync is collective over the trainer ranks, as TRL's own sync is. In a sync, the ranks copy their shards into
    vLLM's weights, vLLM verifies digests, and Windlass resets vLLM's prefix cache.

    Args:
        stacked: see `connect_trainer`.
        allow_unused: see `connect_trainer`.
        deadline_s: deadline in seconds for all ranks to connect, and then for each sync.

    The trainer's constructor raises the errors of `ColocatedEngine`. The trainer's first sync raises the errors of
    `ColocatedSync`, and ConfigError for FSDP1 and ZeRO-3. Each sync raises the errors of `ColocatedSync.send_weights`.
    If you call `colocate` again, the new arguments apply only to trainers that are created after this call.
    """
    _patch()
    _Given.settings = {
        "stacked": stacked,
        "allow_unused": allow_unused,
        "deadline_s": deadline_s,
    }


class _Given:
    """Arguments of the last call of `colocate`."""

    settings: Mapping[str, Any] = {}


@functools.cache
def _patch() -> None:
    """Replace `LLM` and `VLLMGeneration.sync_weights` in TRL. Idempotent."""
    # If Windlass is only on PYTHONPATH and not installed, vLLM does not find the plugin's entry point. So register the
    # plugin here.
    register()
    made, sync_weights = vllm_generation.LLM, VLLMGeneration.sync_weights

    def _make(*given: Any, **named: Any) -> Any:
        llm = made(*given, **named, weight_transfer_config={"backend": BACKEND})
        engine = ColocatedEngine(llm, deadline_s=_Given.settings["deadline_s"])
        setattr(llm, _ATTRIBUTE, functools.partial(ColocatedSync, engine=engine, **_Given.settings))
        return llm

    @functools.wraps(sync_weights)
    def sync(generation: Any) -> None:
        if generation.mode != "colocate":
            sync_weights(generation)
            return
        if _ATTRIBUTE not in vars(generation):
            setattr(generation, _ATTRIBUTE, _Syncs(generation))
        vars(generation)[_ATTRIBUTE].send()

    vllm_generation.LLM, VLLMGeneration.sync_weights = _make, sync


@final
class _Syncs:
    """Connection of one `VLLMGeneration`, and the number of its syncs."""

    def __init__(self, generation: VLLMGeneration) -> None:
        _refuse_gathered(generation)
        self._generation, self._version = generation, 0
        self._sync: ColocatedSync | None = None

    def send(self) -> SentWeights:
        """Wake vLLM's weights if they sleep, send the current weights, and reset vLLM's prefix cache. Collective."""
        generation = self._generation
        if generation.enable_sleep_mode:
            # The KV cache stays asleep until TRL's `generate` wakes it.
            vllm_generation.empty_cache()
            generation.llm.wake_up(tags=["weights"])
        model = generation.accelerator.unwrap_model(generation.model)
        if self._sync is None:
            names = merged_names(model.prefix) if is_peft_model(model) else None
            self._sync = vars(generation.llm)[_ATTRIBUTE](model, name_map=names)
            # TRL does not tell `VLLMGeneration` when training ends.
            atexit.register(self._sync.shutdown)
        self._version += 1
        with merged(model):
            sent = self._sync.send_weights(self._version)
        generation.llm.reset_prefix_cache()
        generation._llm_weights_sleeping = False
        return sent


def _refuse_gathered(generation: VLLMGeneration) -> None:
    """Refuse wrappers that hide the shards of a rank.

    Raises:
        ConfigError: the trainer uses FSDP1 or DeepSpeed ZeRO-3.
    """
    found = generation._dist
    if found.is_zero3 or found.fsdp_version == 1:
        wrapper = "DeepSpeed ZeRO-3" if found.is_zero3 else "FSDP1"
        raise ConfigError(
            f"colocate: the trainer must use DDP, FSDP2 (fsdp_version: 2) or ZeRO up to stage 2, got {wrapper}"
        )
