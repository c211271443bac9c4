"""One rank that captures the exporter of a Megatron bridge, and exports real values with the same exporter."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hf_settings import transformers_config
from te_stub import install as install_te

Chunks = list[torch.nn.Module]
WHOLE = r"\.linear_\w+_down_proj\.|\.indexer\."
"""Pattern of parameters that Transformer Engine marks as split, and that every tensor-parallel rank holds whole."""
UNUSED = (
    "datasets",
    "fla",
    "modelscope",
    "mcore_bridge.model.modules.kernels",
    "megatron.core.inference.contexts.attention_context.triton",
)
"""Packages that a converter imports and does not need to export."""


@dataclass(frozen=True)
class Row:
    """A model, its converter and its parallel layout.

    Attributes:
        bridge: package of the converter: mbridge or mcore_bridge.
        config: `config.json` of the model.
        family: naming table to compare with; "" if no table knows the model.
        etp: expert-tensor-parallel ranks; 0 for as many as `tp`.
        falls_back: also check that the table is used in place of an exporter that computes.
        padded_to: rows of the vocabulary in the model; 0 for as many as in the checkpoint.
    """

    bridge: str
    config: dict[str, Any]
    family: str = ""
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 0
    cp: int = 1
    vpp: int | None = None
    padded_to: int = 0
    falls_back: bool = False

    def __str__(self) -> str:
        layout = "".join(
            f"_{name}{size}"
            for name in ("tp", "pp", "ep", "etp", "cp", "vpp", "padded_to")
            if (size := vars(self)[name]) not in (0, 1, None)
        )
        return f"{self.bridge}_{self.config['model_type']}{layout}"


def run(rank: int, world_size: int, rows: list[Row], folder: str) -> None:
    torch.set_num_threads(1)
    install_te(*UNUSED)
    from windlass.jobs.megatron_cpu import install, without_cuda_tensors

    install()
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    with without_cuda_tensors():
        for row in rows:
            try:
                found = captured(row)
            except Exception as error:  # noqa: BLE001 - the test reports it
                found = {"error": f"{type(error).__name__}: {error}"}
            torch.save(found, Path(folder) / f"{row}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def publish(rank: int, world_size: int, row: Row, url: str, token: str, folder: str) -> None:
    """Save what the converter exports in `folder`, and publish version 1 from its description."""
    torch.set_num_threads(1)
    install_te(*UNUSED)
    from windlass.jobs.megatron_cpu import install, without_cuda_tensors

    install()
    store = f"file://{folder}/../store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    with without_cuda_tensors():
        start_parallel(row)
        chunks, export = CONVERTERS[row.bridge](row)
        fill(chunks)
        exported = {name: tensor.cpu().contiguous() for name, tensor in export(chunks)}
        if rank == 0:
            from safetensors.torch import save_file

            save_file(exported, f"{folder}/model.safetensors", metadata={"format": "pt"})
        from windlass.trainers import connect_megatron_trainer

        with connect_megatron_trainer(
            chunks,
            vocab_size=text_of(row.config)["vocab_size"],
            exporter=export,
            controller=url,
            token=token,
        ) as client:
            assert client.publish(1).result().digest_ok
    dist.destroy_process_group()


def start_parallel(row: Row) -> None:
    """Start Megatron's process groups; collective."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=row.tp,
        pipeline_model_parallel_size=row.pp,
        virtual_pipeline_model_parallel_size=row.vpp,
        context_parallel_size=row.cp,
        expert_model_parallel_size=row.ep,
        expert_tensor_parallel_size=row.etp or row.tp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    # Megatron-core sets these for the attention backend of the first model of a process.
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]


def captured(row: Row) -> dict[str, Any]:
    """Return the manifest by the exporter, the manifest by the table, the memory, and the exporter's tensors."""
    from megatron.core import parallel_state

    from windlass.trainers.megatron import describe_megatron_trainer

    start_parallel(row)
    try:
        chunks, export = CONVERTERS[row.bridge](row)
        fill(chunks)
        before = {
            name: (tensor.data_ptr(), tensor.detach().clone())
            for name, tensor in tensors_of(chunks)
        }
        vocab_size = text_of(row.config)["vocab_size"]
        described = describe_megatron_trainer(chunks, vocab_size=vocab_size, exporter=export)
        for name, tensor in tensors_of(chunks):
            address, values = before[name]
            assert tensor.data_ptr() == address, name
            assert torch.equal(tensor, values), name
        result = {
            "manifest": described.manifest.encode(),
            "memory": [bytes_at(m.address, m.nbytes) for m in described.parameters()],
            "exported": {name: tensor.clone() for name, tensor in export(chunks)},
        }
        if row.family:
            by_table = describe_megatron_trainer(chunks, vocab_size=vocab_size, family=row.family)
            result["table"] = by_table.manifest.encode()
        if row.falls_back:
            assert row.family

            def scaled(models: Chunks) -> Iterable[tuple[str, torch.Tensor]]:
                return ((name, tensor * 2) for name, tensor in export(models))

            instead = describe_megatron_trainer(
                chunks, vocab_size=vocab_size, family=row.family, exporter=scaled
            )
            assert instead.manifest.encode() == result["table"]
    finally:
        parallel_state.destroy_model_parallel()
    return result


def bytes_at(address: int, nbytes: int) -> bytes:
    import ctypes

    return ctypes.string_at(address, nbytes)


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config.get("text_config", config)
    return found


def tensors_of(chunks: Chunks) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{index}.{name}", tensor)
        for index, chunk in enumerate(chunks)
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers())
    ]


@torch.no_grad()
def fill(chunks: Chunks) -> None:
    """Fill chunks with random values: equal for replicas, different for parts."""
    from megatron.core import parallel_state as ps
    from trained_rank import global_name

    for chunk in chunks:
        inner: Any = chunk
        while hasattr(inner, "module"):
            inner = inner.module
        for local_name, tensor in (*inner.named_parameters(), *inner.named_buffers()):
            if not tensor.is_floating_point() or tensor.is_meta:
                continue
            name = global_name(inner, local_name)
            if name == "output_layer.weight" and inner.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"
            part: tuple[int, ...] = (0, 0)
            if ".experts." in name:
                part = ps.get_expert_model_parallel_rank(), ps.get_expert_tensor_parallel_rank()
            elif vars(tensor).get("tensor_model_parallel") and not re.search(WHOLE, name):
                part = 0, ps.get_tensor_model_parallel_rank()
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {part}".encode()))
            tensor.copy_(torch.randn(tensor.shape, generator=generator))


def hf_config(config: dict[str, Any]) -> Any:
    made = transformers_config(config)
    # Converters for older transformers read these at the top level.
    for one in {id(c): c for c in (made, made.get_text_config())}.values():
        rope = getattr(one, "rope_parameters", None) or {}
        one.rope_theta = rope.get("rope_theta", 1e4)
        one.partial_rotary_factor = rope.get("partial_rotary_factor", 1.0)
        if not hasattr(one, "rope_scaling") or one.rope_scaling == rope:
            one.rope_scaling = None
    return made


def by_mbridge(row: Row) -> tuple[Chunks, Callable[[Chunks], Iterable[tuple[str, torch.Tensor]]]]:
    import mbridge
    from megatron.core.transformer import MLATransformerConfig

    def latent(max_position_embeddings: int, **options: Any) -> MLATransformerConfig:
        """Make a configuration; Megatron-core 0.16 has another name for one option than mbridge."""
        return MLATransformerConfig(
            original_max_position_embeddings=max_position_embeddings, **options
        )

    mbridge.models.DeepseekV3Bridge.TransformerConfigClass = staticmethod(latent)
    bridge = mbridge.AutoBridge.from_config(
        hf_config(row.config),
        dtype=torch.bfloat16,
        make_vocab_size_divisible_by=row.padded_to or None,
    )
    return bridge.get_model(bf16=True), bridge.export_weights


def by_mcore_bridge(
    row: Row,
) -> tuple[Chunks, Callable[[Chunks], Iterable[tuple[str, torch.Tensor]]]]:
    import mcore_bridge
    from mcore_bridge.bridge import gpt_bridge

    # The converter keeps the group of the first layout of a process.
    gpt_bridge.EP_PP_GROUP = None
    config = mcore_bridge.hf_to_mcore_config(hf_config(row.config))
    options = {
        "tensor_model_parallel_size": row.tp,
        "pipeline_model_parallel_size": row.pp,
        "virtual_pipeline_model_parallel_size": row.vpp,
        "context_parallel_size": row.cp,
        "expert_model_parallel_size": row.ep,
        "expert_tensor_parallel_size": row.etp or row.tp,
        "sequence_parallel": row.tp > 1,
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "use_cpu_initialization": True,
    }
    if row.padded_to:
        config["padded_vocab_size"] = row.padded_to
    made = mcore_bridge.ModelConfig(**config, **options)
    chunks = mcore_bridge.get_mcore_model(made)
    return chunks, made.bridge.export_weights


CONVERTERS = {"mbridge": by_mbridge, "mcore_bridge": by_mcore_bridge}
