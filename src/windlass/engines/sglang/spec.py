"""SGLang's supported releases, the rules for its settings, and the command that starts its server."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import msgspec

from windlass.engines.http import EngineHttp, NoSuchRoute
from windlass.engines.options import Rule, refuse_settings
from windlass.engines.quantised import require_followed
from windlass.engines.spec import AgentSettings, EngineSpec, RankStep, ServerCommand
from windlass.engines.versions import EngineReleases, Feature, has, installed_version
from windlass.envs import environment_value
from windlass.errors import DECODE_ERRORS, ConfigError, PeerUnreachable
from windlass.net.addresses import free_port
from windlass.transports.registry import transport_name

ORIGINAL = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""Environment variable that makes SGLang return log-probabilities before temperature, `top_k` and `top_p`."""
SAMPLED = "rollouts need log-probabilities of the sampled distribution"
"""Reason not to set `ORIGINAL`."""

REPLICAS = Feature(
    "ranks that know their replica (`dp_rank` of `get_parallel()`)",
    since=(0, 5, 22),
    missing_in=(0, 5, 21),
    without="`--dp` is refused",
)

TOKEN_VERSIONS = Feature(
    "weight version per token",
    since=(0, 5, 19),
    missing_in=(0, 5, 18),
    without="all tokens of an answer carry one version, even if an update came between them",
)

STORED_KEYS = Feature(
    "keys of HiCache's storage that contain the prefix-cache namespace",
    since=(0, 5, 20),
    missing_in=(0, 5, 19),
    without="`--hicache-storage-backend` is refused",
)

RELEASES = EngineReleases(
    name="SGLang",
    package="sglang",
    distributions=("sglang",),
    read=((0, 5, 11), (0, 5, 16), (0, 5, 19), (0, 5, 21), (0, 5, 22), (0, 5, 23)),
    run={(0, 5, 16): "GPUs", (0, 5, 23): "CPUs"},
    features=(
        Feature(
            "plugins (entry points `sglang.srt.plugins`)",
            since=(0, 5, 11),
            missing_in=(0, 5, 10),
            without="its private routes are not protected",
            needed=True,
        ),
        Feature(
            "`--custom-weight-loader`",
            since=(0, 4, 10),
            without="Windlass cannot run code in its ranks",
            needed=True,
        ),
        Feature(
            "`/update_weight_version` without aborting",
            since=(0, 5, 2),
            missing_in=(0, 4, 10),
            without="tokens do not carry the version of the weights",
            needed=True,
        ),
        Feature(
            "`/pause_generation` with `abort`, `retract`, `in_place`",
            since=(0, 5, 6),
            missing_in=(0, 5, 5),
            without="its pause has no modes",
            needed=True,
        ),
        TOKEN_VERSIONS,
        Feature(
            "sessions (`/begin_weight_update`, `/end_weight_update`)",
            since=(0, 5, 21),
            missing_in=(0, 5, 20),
        ),
        STORED_KEYS,
        REPLICAS,
    ),
)

_ADAPTERS = (
    "SGLang fills the slots of adapters again from copies in host memory, which would undo an update, and its code for "
    "adapters runs on no CPU; use vLLM with --adapter NAME=FOLDER, or publish the merged weights"
)
_APART_CONTROL = "ranks would get an order at different steps, and wait for each other in each step"
_EXPERTS = "experts move between ranks while it serves"
_EXPERTS_LEAVE = "experts move to other ranks when ranks are added or removed"
_OFFLOADED = "weights are copied to the GPU for every step"
_APART = (
    "its decode engine computes no prompts, so after an update it could only go on from keys and values of old weights; use "
    "servers that do both, with --chunked-prefill-size for long prompts"
)
_TOKENIZERS = (
    "an abort pause waits for the requests of one tokenizer process: requests of another process "
    "would run while weights are written"
)
_CLEAR = "ranks call the server's routes over HTTP without TLS"
_HICACHE = "use --enable-hierarchical-cache, which keeps entries in the host's memory"
_STORED = f"its entries are found by tokens alone, so that entries of old weights would answer; {_HICACHE}"
_LINKER = (
    "it stores entries by itself, while Windlass separates versions in HiCache's storage backends; use "
    "--enable-hierarchical-cache with --hicache-storage-backend"
)
_STAGED = (
    "SGLang ends if an update comes between the load of a request's entries into this buffer and the start of the request; "
    "use cache"
)
_EMBEDDED = (
    "its entries are found by the image alone, so that embeddings of old weights would answer; leave it out, and each "
    "engine keeps a cache of its own"
)
_OWN_TREE = f"Windlass separates versions in SGLang's own tree; {_HICACHE}"
_SLOTS = "a session passes the KV cache of old weights to its next request without the prefix cache"
SLEEPING = "pull"
"""Transport of a server whose weights may sleep."""
_SLEEPS = (
    "weights that sleep lose the memory into which trainers write; use the transport pull, with which the engine reads "
    "them after it has woken"
)
_OTHER_LISTENER = "Windlass protects private routes on the HTTP server only; let clients use HTTP"
_ENCODERS = "its encoders are in other processes, whose weights are not updated"


def _rule(setting: str, allowed: tuple[object, ...], why: str) -> Rule:
    """Return the rule of a setting. The command-line option has the name of the setting."""
    return Rule(f"--{setting.replace('_', '-')}", allowed, why, (setting,))


_CACHES = (
    _rule("hicache_host_memory_mode", ("cache",), _STAGED),
    _rule("enable_lmcache", (False,), _STORED),
    _rule("enable_flexkv", (False,), _STORED),
    _rule("enable_unified_cache_external_linker", (False,), _LINKER),
    _rule("enable_mm_global_cache", (False,), _EMBEDDED),
    _rule("radix_cache_backend", (None,), _OWN_TREE),
    _rule("enable_streaming_session", (False,), _SLOTS),
    _rule("language_only", (False,), _ENCODERS),
    _rule("encoder_only", (False,), _ENCODERS),
)
"""Rules against caches of old weights that neither a new namespace nor a flush makes unused."""
RULES = (
    *_CACHES,
    Rule(
        "--enable-memory-saver", (False,), _SLEEPS, ("enable_memory_saver",), transports=(SLEEPING,)
    ),
    _rule("enable_dp_attention_local_control_broadcast", (False,), _APART_CONTROL),
    _rule("torchao_config", ("",), "SGLang would quantise weights while it loads them"),
    _rule("enable_lora", (None, False), _ADAPTERS),
    Rule("--lora-paths", (), _ADAPTERS),
    Rule("--adapter", (), _ADAPTERS),
    _rule("enable_eplb", (False,), _EXPERTS),
    _rule("elastic_ep_backend", (None, "none"), _EXPERTS_LEAVE),
    _rule("enable_elastic_expert_backup", (False,), _EXPERTS_LEAVE),
    _rule("cpu_offload_gb", (0,), _OFFLOADED),
    _rule("offload_group_size", (-1,), _OFFLOADED),
    _rule("disaggregation_mode", ("null",), _APART),
    _rule("tokenizer_worker_num", (1,), _TOKENIZERS),
    _rule("ssl_certfile", (None,), _CLEAR),
    _rule("grpc_port", (None,), _OTHER_LISTENER),
    _rule("grpc_mode", (False,), _OTHER_LISTENER),
    _rule("smg_grpc_mode", (False,), _OTHER_LISTENER),
)
"""Rules for a server that gets updates."""
_TOKEN_KEYS = _rule(
    "hicache_storage_backend", (None,), f"this release finds stored {_STORED.removeprefix('its ')}"
)
"""Rule for releases without `STORED_KEYS`."""
_OF_SLEEP = (
    _rule("pp_size", (1,), "the first pipeline stage answers while later stages still free memory"),
    _rule(
        "speculative_algorithm",
        (None,),
        "the weights of the draft model would be lost, and no update writes them",
    ),
    _rule(
        "weight_cache_mode", ("off",), "SGLang ends when it frees weights that other servers share"
    ),
)
"""Additional rules for a server with the memory saver."""
_DP_ATTENTION = "--enable-dp-attention"
_SIZES = ("tp_size", "pp_size", "dp_size")


@final
class SglangServer:
    """`EngineServer` of SGLang."""

    ready_line = "The server is fired up"

    def command(self, args: argparse.Namespace, rest: Sequence[str]) -> ServerCommand:
        """Return the command of an SGLang server; see `EngineServer`.

        Raises:
            ConfigError: an environment variable makes the server unfit for rollouts, trainers cannot quantise weights as
                the checkpoint declares, or this release of SGLang does not support the number of replicas.
        """
        if is_set(ORIGINAL):
            raise ConfigError(f"{ORIGINAL} must not be set: {SAMPLED}")
        require_followed(Path(args.model), rest)
        if ENGINE.num_replicas(args.dp, rest) > 1 and not has(
            REPLICAS, version := installed_version(RELEASES)
        ):
            raise ConfigError(
                f"--dp must be 1 with SGLang {version}, got {args.dp}: ranks of this release do not know the index of "
                f"their replica; start one engine per replica, or add {_DP_ATTENTION} for data-parallel attention"
            )
        return ServerCommand(
            (
                *(
                    sys.executable,
                    "-m",
                    "windlass.engines.sglang.serve",
                    "--model-path",
                    args.model,
                ),
                # On nodes other than the first, this port serves only SGLang's health checks, which no client uses.
                *("--host", args.host, "--port", str(free_port() if args.node_rank else args.port)),
                *("--tp-size", str(args.tp)),
                *(("--pp-size", str(args.pp)) if args.pp > 1 else ()),
                *(("--dp-size", str(args.dp)) if args.dp > 1 else ()),
                *(("--dist-init-addr", args.dist_init_addr) if args.dist_init_addr else ()),
                *("--nnodes", str(args.nnodes), "--node-rank", str(args.node_rank)),
                *rest,
            )
        )


def rules_for(version: str, *, sleeps: bool = False) -> tuple[Rule, ...]:
    """Return the rules for a server of a release of SGLang. `sleeps` is True if the server has the memory saver."""
    rules = RULES if has(STORED_KEYS, version) else (*RULES, _TOKEN_KEYS)
    return (*rules, *_OF_SLEEP) if sleeps else rules


def require_pull(transport: str) -> None:
    """Check the transport of a server with the memory saver. `transport` is a name, or a configuration in JSON.

    Raises:
        ConfigError: the transport is not `pull`.
    """
    if transport_name(transport) != SLEEPING:
        raise ConfigError(
            f"--enable-memory-saver: transport must be {SLEEPING}, got {transport!r}: {_SLEEPS}"
        )


def send_step(server: EngineHttp, step: RankStep, settings: AgentSettings, folder: str) -> None:
    """Order every rank of a server to carry out a step; see `windlass.engines.rank_reports.SendStep`.

    Raises:
        ConfigError: the step is a capture, and the server has a wrong setting (`check_server`).
        PeerUnreachable, PeerTimeout: the server refused the order, a rank failed, or the server did not answer in time.
    """
    from windlass.engines.sglang.orders import Step, order_ranks

    stages = 1
    if step is RankStep.CAPTURE:
        stages = check_server(server, settings.world_size, transport_name(settings.transport))
    order = Step(step, settings, folder, stages)
    order_ranks(server, order, settings.world_size, settings.join_deadline_s)


def is_set(variable: str) -> bool:
    """Return whether a variable of SGLang is set, by SGLang's own rule."""
    return environment_value(variable).lower() in ("1", "true", "yes", "y")


def check_server(server: EngineHttp, world_size: int, transport: str = "") -> int:
    """Check the settings that a running server reports, and return its number of pipeline stages.

    Return 1 without a check if the server's release has no route `/server_info`.

    Args:
        server: the running server.
        world_size: number of ranks according to the launcher's options.
        transport: name of the transport that receives weights.

    Raises:
        ConfigError: a setting breaks a rule, or the server has another number of ranks.
        PeerUnreachable: the server does not answer, or its response is not SGLang's.
        PeerTimeout: the server does not answer in time.
    """
    try:
        told = msgspec.json.decode(server.get("/server_info"), type=dict[str, object])
    except NoSuchRoute:
        return 1
    except DECODE_ERRORS as error:
        raise PeerUnreachable(
            f"{server.url}/server_info must answer as SGLang does: {error}"
        ) from error
    sleeps = bool(told.get("enable_memory_saver"))
    rules = rules_for(str(told.get("version", "")), sleeps=sleeps)
    refuse_settings(server.url, rules, told.__getitem__, transport)
    sizes = {name: size if isinstance(size := told.get(name), int) else 1 for name in _SIZES}
    sizes["dp_size"] = num_replicas(told, sizes["dp_size"])
    if told.keys() >= set(_SIZES) and math.prod(sizes.values()) != world_size:
        raise ConfigError(
            f"{server.url}: --tp x --pp x --dp must be {math.prod(sizes.values())}, as the server reports {sizes}, got "
            f"{world_size}"
        )
    return sizes["pp_size"]


def num_replicas(told: Mapping[str, object], dp_size: int) -> int:
    """Return the number of replicas of a server.

    `told` has the server's resolved settings by name. `dp_size` is the value of the setting `dp_size`.

    Up to SGLang 0.5.21, `dp_size` is the number of attention groups if `enable_dp_attention` is set. These groups share
    the `tp_size` ranks of one replica. Later releases have the setting `attn_dp_size` for the groups, and `dp_size` is
    always the number of replicas.
    """
    shares_ranks = "attn_dp_size" not in told and bool(told.get("enable_dp_attention", False))
    return 1 if shares_ranks else dp_size


ENGINE = EngineSpec(
    name="sglang",
    title="SGLang",
    module="windlass.engines.sglang",
    releases=RELEASES,
    rules=RULES,
    server=SglangServer(),
    context_option="--context-length",
    needs_port=True,
    spans_nodes=True,
    dp_within_tp=_DP_ATTENTION,
    cpu_arguments=(
        *("--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"),
        *("--sampling-backend", "pytorch", "--disable-cuda-graph", "--skip-server-warmup"),
        *("--skip-tokenizer-init", "--max-total-tokens", "8192", "--mem-fraction-static", "0.5"),
        *("--max-running-requests", "64"),
    ),
    cpu_environment={"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_HOST_IP": "127.0.0.1"},
    sleep_arguments=("--enable-memory-saver",),
    gpu_arguments=(
        *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
        *("--grammar-backend", "none", "--disable-cuda-graph", "--skip-server-warmup"),
        *("--skip-tokenizer-init", "--max-running-requests", "256"),
        # The number of tokens limits the KV cache. The fraction only limits how much of the free memory SGLang may use.
        # SGLang ends if other processes allocate the remaining memory while SGLang loads the model.
        *("--max-total-tokens", "65536", "--mem-fraction-static", "0.5"),
    ),
)
