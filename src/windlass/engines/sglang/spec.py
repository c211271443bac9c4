"""What Windlass knows of SGLang: releases, settings that updates do not survive, layouts of its kernels."""

from __future__ import annotations

from windlass.engines.sglang.server import SglangServer
from windlass.engines.sglang.settings import RELEASES, RULES
from windlass.engines.spec import EngineSpec, QuantisedLayout

__all__ = ["ENGINE"]

LAYOUTS = (
    QuantisedLayout("SGLang 0.5.16", "Triton, Hopper (SGLANG_ENABLE_JIT_DEEPGEMM=0)", "as in the checkpoint", "proven: every tensor and the tokens are those of a fresh load (docs/gpu.md)"),
    QuantisedLayout("SGLang 0.5.16", "DeepGEMM, Hopper", "as in the checkpoint", "untested"),
    QuantisedLayout("SGLang 0.5.23", "CPU", "packed for AMX", "untested: the kernels need a CPU with AMX tiles"),
    QuantisedLayout("SGLang", "DeepGEMM, Blackwell", "requantised", "untested: scales become powers of two, which capture leaves to the engine's loader"),
    QuantisedLayout("SGLang", "latent attention", "kv_b_proj dequantised to bfloat16", "untested live: capture leaves it to the engine's loader"),
)  # fmt: skip

ENGINE = EngineSpec(
    name="sglang",
    title="SGLang",
    module="windlass.engines.sglang",
    releases=RELEASES,
    rules=RULES,
    layouts=LAYOUTS,
    server=SglangServer(),
    needs_port=True,
    cpu_arguments=(
        *("--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"),
        *("--sampling-backend", "pytorch", "--disable-cuda-graph", "--skip-server-warmup"),
        *("--skip-tokenizer-init", "--max-total-tokens", "8192", "--mem-fraction-static", "0.5"),
        *("--max-running-requests", "64"),
    ),
    cpu_environment={"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_HOST_IP": "127.0.0.1"},
)
