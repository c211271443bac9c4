"""What an SGLang server must not be set to, by its command line and as it says itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from windlass.engines.attach import NoSuchRoute, get
from windlass.errors import DECODE_ERRORS, ConfigError, PeerUnreachable

__all__ = ["UNSAFE", "refuse_unsafe_settings"]

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
}
"""Options of SGLang with which an update would be wrong, and why."""

_SETTINGS: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
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
    for name, (survived, reason) in _SETTINGS.items():
        if name in told and told[name] not in survived:
            raise ConfigError(f"{url}: {name} must be {survived[0]}, got {told[name]}: {reason}")
    sizes = [size if isinstance(size := told.get(name), int) else 1 for name in _SIZES]
    if told.keys() >= set(_SIZES) and math.prod(sizes) != world_size:
        raise ConfigError(
            f"{url}: --tp x --pp x --dp must be the server's ranks, {dict(zip(_SIZES, sizes, strict=True))}, "
            f"got {world_size}"
        )
    return sizes[_SIZES.index("pp_size")]
