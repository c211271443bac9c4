"""Windlass's knowledge of SGLang: supported releases, allowed settings, and the command that starts its server."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import final

import msgspec

from windlass.engines.http import EngineHttp, NoSuchRoute
from windlass.engines.options import Rule, refuse_settings
from windlass.engines.quantised import require_followed
from windlass.engines.spec import AgentSettings, EngineSpec, RankStep, ServerCommand
from windlass.engines.versions import EngineReleases, Feature, has, installed_version
from windlass.errors import DECODE_ERRORS, ConfigError, PeerUnreachable
from windlass.net.addresses import free_port

ORIGINAL = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""Environment variable that makes SGLang return log-probabilities of the model's own distribution at any
temperature."""

REPLICAS = Feature(
    "ranks that know their replica (`dp_rank` of `get_parallel()`)",
    since=(0, 5, 22),
    missing_in=(0, 5, 21),
    without="`--dp` is refused",
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
            without="nothing is put in front of its server",
            needed=True,
        ),
        Feature(
            "`--custom-weight-loader`",
            since=(0, 4, 10),
            without="nothing can be run in its ranks",
            needed=True,
        ),
        Feature(
            "`/update_weight_version` without aborting",
            since=(0, 5, 2),
            missing_in=(0, 4, 10),
            without="the version that it serves cannot be stamped",
            needed=True,
        ),
        Feature(
            "`/pause_generation` with `abort`, `retract`, `in_place`",
            since=(0, 5, 6),
            missing_in=(0, 5, 5),
            without="its pause has no modes",
            needed=True,
        ),
        Feature(
            "weight version per token",
            since=(0, 5, 19),
            missing_in=(0, 5, 18),
            without="all tokens of an answer carry one version, also where an update came between",
        ),
        Feature(
            "sessions (`/begin_weight_update`, `/end_weight_update`)",
            since=(0, 5, 21),
            missing_in=(0, 5, 20),
        ),
        REPLICAS,
    ),
)

_ADAPTERS = (
    "updates of adapters have not been shown: SGLang 0.5.23 serves none on a CPU (its LoRA layers "
    "allocate pinned memory, which torch refuses without an accelerator)"
)
_DRAFT = "the draft model's weights are not captured"
_ATTENTION = "it has been shown as --attn-dp-size, in releases that have it, alone"
_APART_CONTROL = "orders reach ranks at different steps, in each of which they wait for each other"
_EXPERTS = "experts move between ranks while it serves"
_EXPERTS_LEAVE = "ranks come and go, and experts move with them"
_OFFLOADED = "weights are copied to the GPU for every step"
_APART = "prefill and decoding apart are paused in other ways, which have not been shown"
_TOKENIZERS = (
    "an abort pause waits for the requests of one tokenizer: those of another reach the engine while "
    "weights are written"
)
_CLEAR = "its ranks call its routes in clear text"
_STORED = (
    "keys and values of old weights are kept outside the engine, where other servers read them"
)
_OWN_TREE = "a cache of prefixes that is not SGLang's own may find those of old weights"
_SLOTS = "a session's keys and values of old weights go into its next request past the prefix cache"
_OTHER_LISTENER = (
    "private routes are closed to strangers on the HTTP server alone; let clients use HTTP"
)
_ENCODERS = "its encoders are in other processes, whose weights are not updated"


def _rule(setting: str, allowed: tuple[object, ...], why: str) -> Rule:
    """Return the rule of a setting whose command-line option has the same name."""
    return Rule(f"--{setting.replace('_', '-')}", allowed, why, (setting,))


_CACHES = (
    _rule("hicache_storage_backend", (None,), _STORED),
    _rule("enable_lmcache", (False,), _STORED),
    _rule("enable_flexkv", (False,), _STORED),
    _rule("enable_unified_cache_external_linker", (False,), _STORED),
    _rule("enable_mm_global_cache", (False,), _STORED),
    _rule("radix_cache_backend", (None,), _OWN_TREE),
    _rule("enable_streaming_session", (False,), _SLOTS),
    _rule("language_only", (False,), _ENCODERS),
    _rule("encoder_only", (False,), _ENCODERS),
)
"""Rules against caches of old weights that neither a new cache namespace nor a flush reaches."""
RULES = (
    *_CACHES,
    _rule(
        "enable_memory_saver",
        (False,),
        "weights move and lose their registration when memory is released",
    ),
    _rule("speculative_algorithm", (None,), _DRAFT),
    Rule("--speculative-draft-model-path", (), _DRAFT),
    _rule("enable_dp_attention", (False,), _ATTENTION),
    _rule("enable_dp_attention_local_control_broadcast", (False,), _APART_CONTROL),
    _rule("torchao_config", ("",), "it has SGLang quantise while it loads"),
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
"""Rules for a server whose ranks run an agent."""
_SIZES = ("tp_size", "pp_size", "dp_size")


@final
class SglangServer:
    """`EngineServer` of SGLang."""

    ready_line = "The server is fired up"
    answers_for_all = False

    def command(self, args: argparse.Namespace, rest: Sequence[str]) -> ServerCommand:
        require_followed(Path(args.model), rest)
        if args.dp > 1 and not has(REPLICAS, version := installed_version(RELEASES)):
            raise ConfigError(
                f"dp: must be 1 with SGLang {version}, whose ranks do not say which replica they "
                f"are, got --dp {args.dp}"
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
                # Nodes other than the first serve only SGLang's own health checks, which no client asks
                # for: any port will do.
                *("--host", args.host, "--port", str(free_port() if args.node_rank else args.port)),
                *("--tp-size", str(args.tp)),
                *(("--pp-size", str(args.pp)) if args.pp > 1 else ()),
                *(("--dp-size", str(args.dp)) if args.dp > 1 else ()),
                *(("--dist-init-addr", args.dist_init_addr) if args.dist_init_addr else ()),
                *("--nnodes", str(args.nnodes), "--node-rank", str(args.node_rank)),
                *rest,
            )
        )

    def order(
        self, server: EngineHttp, step: RankStep, settings: AgentSettings, folder: str
    ) -> None:
        from windlass.engines.sglang.orders import Step, order_ranks

        stages = 1
        if step is RankStep.CAPTURE:
            stages = check_server(server, settings.world_size)
        order = Step(step, settings, folder, stages)
        order_ranks(server, order, settings.world_size, settings.join_deadline_s)


def check_server(server: EngineHttp, world_size: int) -> int:
    """Check the settings that a running server reports.

    If the server does not report its settings, its command line counts.

    Args:
        server: the running server.
        world_size: number of ranks that the launcher announced.

    Returns:
        Number of pipeline stages.

    Raises:
        ConfigError: an update would be wrong with a setting, or the server has another number of ranks.
        PeerUnreachable, PeerTimeout: the server does not answer, or not as SGLang does.
    """
    try:
        told = msgspec.json.decode(server.get("/server_info"), type=dict[str, object])
    except NoSuchRoute:
        return 1
    except DECODE_ERRORS as error:
        raise PeerUnreachable(f"{server.url}/server_info: not SGLang's answer: {error}") from error
    # A server that reports `attn_dp_size` sets `enable_dp_attention` only as a consequence of it.
    if "attn_dp_size" in told:
        told.pop("enable_dp_attention", None)
    # Settings that this release does not have are not checked.
    refuse_settings(server.url, RULES, told.__getitem__)
    sizes = [size if isinstance(size := told.get(name), int) else 1 for name in _SIZES]
    if told.keys() >= set(_SIZES) and math.prod(sizes) != world_size:
        raise ConfigError(
            f"{server.url}: --tp x --pp x --dp must be the server's ranks, "
            f"{dict(zip(_SIZES, sizes, strict=True))}, got {world_size}"
        )
    return sizes[_SIZES.index("pp_size")]


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
    cpu_arguments=(
        *("--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"),
        *("--sampling-backend", "pytorch", "--disable-cuda-graph", "--skip-server-warmup"),
        *("--skip-tokenizer-init", "--max-total-tokens", "8192", "--mem-fraction-static", "0.5"),
        *("--max-running-requests", "64"),
    ),
    cpu_environment={"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_HOST_IP": "127.0.0.1"},
)
