"""What a vLLM engine must not be set to, as its ranks have it: options may stand in a file, or be shortened."""

from __future__ import annotations

from windlass.engines.vllm.caches import OUTSIDE, SCHEDULER
from windlass.errors import ConfigError

__all__ = ["refuse_unsafe_config"]

_OFFLOADED = "weights are copied to the GPU for every step"
_RULES: tuple[tuple[str, object, str], ...] = (
    ("model_config.enable_sleep_mode", False, "weights move when it sleeps"),
    ("parallel_config.enable_eplb", False, "experts move between ranks while it serves"),
    ("parallel_config.enable_elastic_ep", False, "ranks come and go, and experts with them"),
    ("parallel_config.prefill_context_parallel_size", 1, "its ranks have not been shown"),
    ("speculative_config", None, "the draft model's weights are not captured"),
    ("cache_config.cpu_offload_gb", 0, _OFFLOADED),
    ("offload_config.uva.cpu_offload_gb", 0, _OFFLOADED),
    ("offload_config.prefetch.offload_group_size", 0, _OFFLOADED),
    ("kv_transfer_config", None, OUTSIDE),
    ("ec_transfer_config", None, OUTSIDE),
    ("scheduler_config.scheduler_cls", SCHEDULER, "it keeps caches apart by version"),
)
"""Place in vLLM's configuration, the value that an update survives, and why no other."""
_ADAPTERS = ("lora_config", None, "--adapter NAME=FOLDER says which one adapter is updated")


def refuse_unsafe_config(config: object, *, adapter: bool) -> None:
    """Check the resolved configuration of a rank; releases lack some of its places.

    Args:
        config: vLLM's `VllmConfig`.
        adapter: whether the rank's adapter is what is updated.

    Raises:
        ConfigError: names a setting with which an update would be wrong, and why.
    """
    for place, survived, reason in (*_RULES, *(() if adapter else (_ADAPTERS,))):
        found = _at(config, place, survived)
        if found != survived:
            raise ConfigError(f"vLLM: {place} must be {survived}, got {found}: {reason}")


def _at(config: object, place: str, unknown: object) -> object:
    """What stands there; `unknown` where a release has no such place: it cannot be set."""
    found = config
    for name in place.split("."):
        if found is None or name not in vars(found):
            return unknown
        found = vars(found)[name]
    return found
