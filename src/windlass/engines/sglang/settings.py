"""What an SGLang server must not be set to, by its command line and as it says itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from windlass.engines.attach import NoSuchRoute, get
from windlass.errors import DECODE_ERRORS, ConfigError, PeerUnreachable

__all__ = ["UNSAFE", "refuse_caches_elsewhere", "refuse_unsafe_settings"]

_ADAPTERS = (
    "updates of adapters have not been shown: SGLang 0.5.23 serves none on a CPU (its LoRA layers "
    "allocate pinned memory, which torch refuses without an accelerator)"
)
_DRAFT = "the draft model's weights are not captured"
_ATTENTION = (
    "updates of data-parallel attention have not been shown: SGLang 0.5.23 serves none on a CPU (its "
    "attention in plain torch lacks get_cpu_graph_seq_len_fill_value, and dies with the first request)"
)
_EXPERTS = "experts move between ranks while it serves"
_OFFLOADED = "weights are copied to the GPU for every step"
_HOSTS = "every rank must be on the launcher's host, where it writes what it has to say"
_APART = "prefill and decoding apart come to rest in other ways, which have not been shown"
_TOKENIZERS = (
    "an abort pause waits for the requests of one tokenizer: those of another reach the engine while "
    "weights are written"
)
_STORED = (
    "keys and values of old weights are kept outside the engine, where other servers read them"
)
_OWN_TREE = "a cache of prefixes that is not SGLang's own may find those of old weights"
_SLOTS = "a session's keys and values of old weights go into its next request past the prefix cache"
_ENCODERS = "its encoders are in other processes, whose weights are not updated"
UNSAFE = {
    "--enable-memory-saver": "weights move and lose their registration when memory is released",
    "--speculative-algorithm": _DRAFT,
    "--speculative-draft-model-path": _DRAFT,
    "--attn-dp-size": _ATTENTION,
    "--enable-dp-attention": _ATTENTION,
    "--torchao-config": "it has SGLang quantise while it loads",
    "--enable-lora": _ADAPTERS,
    "--lora-paths": _ADAPTERS,
    "--adapter": _ADAPTERS,
    "--enable-eplb": _EXPERTS,
    "--elastic-ep-backend": "ranks come and go, and experts move with them",
    "--enable-elastic-expert-backup": "ranks come and go, and experts move with them",
    "--cpu-offload-gb": _OFFLOADED,
    "--offload-group-size": _OFFLOADED,
    "--nnodes": _HOSTS,
    "--disaggregation-mode": _APART,
    "--tokenizer-worker-num": _TOKENIZERS,
    "--hicache-storage-backend": _STORED,
    "--enable-lmcache": _STORED,
    "--enable-flexkv": _STORED,
    "--enable-unified-cache-external-linker": _STORED,
    "--enable-mm-global-cache": _STORED,
    "--radix-cache-backend": _OWN_TREE,
    "--enable-streaming-session": _SLOTS,
    "--language-only": _ENCODERS,
    "--encoder-only": _ENCODERS,
}
"""Options of SGLang with which an update would be wrong, and why."""

_Settings = Mapping[str, tuple[tuple[object, ...], str]]
_CACHES: _Settings = MappingProxyType(
    {
        "hicache_storage_backend": ((None,), _STORED),
        "enable_lmcache": ((False,), _STORED),
        "enable_flexkv": ((False,), _STORED),
        "enable_unified_cache_external_linker": ((False,), _STORED),
        "enable_mm_global_cache": ((False,), _STORED),
        "radix_cache_backend": ((None,), _OWN_TREE),
        "enable_streaming_session": ((False,), _SLOTS),
        "language_only": ((False,), _ENCODERS),
        "encoder_only": ((False,), _ENCODERS),
    }
)
"""Caches that neither a namespace nor a flush reaches."""
_SETTINGS: _Settings = MappingProxyType(
    {
        **_CACHES,
        "enable_memory_saver": ((False,), UNSAFE["--enable-memory-saver"]),
        "speculative_algorithm": ((None,), _DRAFT),
        "attn_dp_size": ((1,), _ATTENTION),
        "enable_dp_attention": ((False,), _ATTENTION),
        "torchao_config": (("",), UNSAFE["--torchao-config"]),
        "enable_lora": ((None, False), _ADAPTERS),
        "enable_eplb": ((False,), _EXPERTS),
        "elastic_ep_backend": ((None, "none"), UNSAFE["--elastic-ep-backend"]),
        "enable_elastic_expert_backup": ((False,), UNSAFE["--enable-elastic-expert-backup"]),
        "cpu_offload_gb": ((0,), _OFFLOADED),
        "offload_group_size": ((-1,), _OFFLOADED),
        "nnodes": ((1,), _HOSTS),
        "disaggregation_mode": (("null",), _APART),
        "tokenizer_worker_num": ((1,), _TOKENIZERS),
    }
)
"""Setting -> the values that an update survives, and why no other."""
_SIZES = ("tp_size", "pp_size", "dp_size")


def refuse_unsafe_settings(url: str, world_size: int) -> int:
    """Ask a server what it was set to, however that was written: in a file, shortened, by default.

    A release that does not tell, or does not know a setting, is taken as its command line said.

    Args:
        url: of the server.
        world_size: ranks that were announced.

    Returns:
        Stages of its pipeline.

    Raises:
        ConfigError: names a setting with which an update would be wrong, and why; or the server has
            another number of ranks.
        PeerUnreachable, PeerTimeout: it does not answer, or not as SGLang does.
    """
    try:
        told = msgspec.json.decode(get(url, "/server_info"), type=dict[str, object])
    except NoSuchRoute:
        return 1
    except DECODE_ERRORS as error:
        raise PeerUnreachable(f"{url}/server_info: not SGLang's answer: {error}") from error
    _refuse(url, told, _SETTINGS)
    sizes = [size if isinstance(size := told.get(name), int) else 1 for name in _SIZES]
    if told.keys() >= set(_SIZES) and math.prod(sizes) != world_size:
        raise ConfigError(
            f"{url}: --tp x --pp x --dp must be the server's ranks, {dict(zip(_SIZES, sizes, strict=True))}, "
            f"got {world_size}"
        )
    return sizes[_SIZES.index("pp_size")]


def refuse_caches_elsewhere(url: str, told: Mapping[str, object]) -> None:
    """Refuse caches of old weights that can be neither emptied nor told apart.

    Args:
        url: of the server.
        told: its settings, as `/server_info` has them.

    Raises:
        ConfigError: names the setting that has one.
    """
    _refuse(url, told, _CACHES)


def _refuse(url: str, told: Mapping[str, object], settings: _Settings) -> None:
    for name, (survived, reason) in settings.items():
        if name in told and told[name] not in survived:
            raise ConfigError(f"{url}: {name} must be {survived[0]}, got {told[name]}: {reason}")
