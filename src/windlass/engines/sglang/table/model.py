"""The model of an SGLang rank, built and loaded by SGLang's own code in a process of ours.

Nothing is served: no scheduler, no caches. The steps are those of SGLang's scheduler process up to
the loaded model, as its `benchmark/one_batch.py` takes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from windlass.errors import UnsupportedLayout

__all__ = ["build_model", "checksum"]


def build_model(arguments: Sequence[str], rank: int, dist_port: int) -> torch.nn.Module:
    """Build and load the model of one tensor-parallel rank; called once per process.

    All ranks call this together.

    Args:
        arguments: of the server's command line.
        rank: tensor-parallel, of this process.
        dist_port: where the ranks meet, on this host.

    Raises:
        UnsupportedLayout: the model is not in this host's memory, or it has encoders.
    """
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.model_executor.model_runner_components.load_model_utils import (
        build_load_config,
    )
    from sglang.srt.model_loader import get_model
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, get_device, publish, spawn_world_rank
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    server_args = prepare_server_args([*arguments, "--host", "127.0.0.1"])
    server_args.resolve_once()
    world_rank = spawn_world_rank(server_args, tp_rank=rank, pp_rank=0)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, gpu_id=rank))
    initialize_moe_config()
    initialize_fp8_gemm_config()
    initialize_fp4_gemm_config()
    device = get_device().device
    if device != "cpu":
        raise UnsupportedLayout(
            f"device must be cpu in this program, whatever the engine's, got {device!r}: append "
            "--device cpu and what else that needs to the command line"
        )
    model_config = ModelConfig.from_server_args(server_args)
    if model_config.is_multimodal:
        raise UnsupportedLayout(
            "the model must be one of text: a flush leaves the embeddings that SGLang's encoders have "
            "computed, which would outlive an update"
        )
    bootstrap.init_parallel_runtime(server_args=server_args, device=device, dist_port=dist_port)
    bootstrap.init_layer_runtime(model_config=model_config)
    load_config = build_load_config(
        server_args=server_args,
        tp_rank=rank,
        remote_instance_weight_transporter_engine=None,
        remote_instance_weight_transporter_session_id="",
        draft_model_idx=None,
        weight_cache_mode="off",
        weight_cache_socket=None,
    )
    size = torch.distributed.get_world_size()
    model_config = adjust_config_with_unaligned_cpu_tp(model_config, load_config, size)
    model: torch.nn.Module = get_model(
        model_config=model_config, load_config=load_config, device_config=DeviceConfig(device, 0)
    )
    return model


def checksum(tensor: torch.Tensor) -> str:
    """As `/weights_checker` of an engine on CPU tells it."""
    from sglang.srt.managers.mm_utils import tensor_hash

    return f"{tensor_hash(tensor):016x}"
