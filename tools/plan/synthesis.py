"""Manifests of the ranks in a topology: Megatron or FSDP trainers, engines like SGLang."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tools.plan.families import AFTER_LAST, BEFORE_FIRST, ModelSpec, Module, Split, modules
from tools.plan.mesh import EngineMesh, MegatronCoords, MegatronMesh, even
from tools.plan.topology import EngineSpec, Topology, TrainerSpec
from windlass.errors import ConfigError
from windlass.layout.box import Box, chunk
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest, TensorSpec

__all__ = ["engine_manifests", "trainer_manifests"]

_Span = tuple[int, int]


@dataclass(slots=True)
class _Writer:
    """Builder of a manifest that places contiguous boxes one after another in a parameter."""

    builder: ManifestBuilder
    dtype: DType

    def parameter(
        self,
        name: str,
        parts: Iterable[tuple[TensorSpec, int, _Span]],
        *,
        dtype: DType | None = None,
        padded_rows: int = 0,
    ) -> None:
        """Add a parameter that consists of `parts` in memory order.

        Args:
            name: parameter name.
            parts: (tensor, split dim, (offset, size) along that dim).
            dtype: element type, or None for the element type of the side.
            padded_rows: number of padding rows at the end, as wide as the last part.
        """
        dtype = dtype or self.dtype
        placed: list[tuple[TensorSpec, Box, int]] = []
        nbytes = width = 0
        for spec, dim, (offset, size) in parts:
            offsets, sizes = [0] * len(spec.shape), list(spec.shape)
            offsets[dim], sizes[dim] = offset, size
            box = Box(tuple(offsets), tuple(sizes))
            placed.append((spec, box, nbytes))
            nbytes += box.numel * dtype.itemsize
            width = spec.shape[-1] * dtype.itemsize
        padding = padded_rows * width
        self.builder.add_parameter(
            name, nbytes=nbytes + padding, dtype=dtype, padding_nbytes=padding
        )
        for spec, box, start in placed:
            self.builder.add_shard(spec.name, spec.shape, box, name, offset_bytes=start)

    def vocabulary(self, module: Module, parts: int, index: int, multiple: int) -> None:
        """Add one part of a padded vocabulary."""
        spec = module.tensors[0]
        padded = -(-spec.shape[0] // multiple) * multiple
        offset, size = even(f"{module.name} padded to {multiple}", padded, parts, index)
        real = max(0, min(size, spec.shape[0] - offset))
        span = (min(offset, spec.shape[0]), real)
        self.parameter(module.name, [(spec, 0, span)], padded_rows=size - real)


def _whole(spec: TensorSpec) -> tuple[TensorSpec, int, _Span]:
    return spec, 0, (0, spec.shape[0])


def _column(module: Module, parts: int, index: int) -> list[tuple[TensorSpec, int, _Span]]:
    return [(s, 0, even(s.name, s.shape[0], parts, index)) for s in module.tensors]


def _row(module: Module, parts: int, index: int) -> list[tuple[TensorSpec, int, _Span]]:
    return [(s, 1, even(s.name, s.shape[1], parts, index)) for s in module.tensors]


def trainer_manifests(topology: Topology) -> list[ShardManifest]:
    """Return one manifest per trainer rank.

    Raises:
        ConfigError: the parallelism does not fit the model or the world size.
    """
    table = list(modules(topology.model))
    if topology.trainer.kind == "fsdp":
        return _fsdp(topology.model, topology.trainer, table)
    spec = topology.trainer
    mesh = MegatronMesh(
        world_size=spec.world_size, tp=spec.tp, pp=spec.pp, cp=spec.cp, ep=spec.ep, etp=spec.etp
    )
    stages = [_stage_modules(topology.model, table, spec.pp, stage) for stage in range(spec.pp)]
    built: dict[tuple[int, int, int, int], ShardManifest] = {}
    manifests: list[ShardManifest] = []
    for rank in range(spec.world_size):
        at = mesh.coords(rank)
        worker, key = f"trainer/{rank}", (at.pp, at.tp, at.ep, at.etp)
        if key not in built:
            writer = _Writer(ManifestBuilder(worker, Role.TRAINER), spec.dtype)
            for module in stages[at.pp]:
                _megatron_module(writer, module, mesh, at)
            built[key] = _finish(writer.builder, topology.model, stages[at.pp])
        manifests.append(replace(built[key], worker=worker))
    return manifests


def _stage_modules(model: ModelSpec, table: list[Module], pp: int, stage: int) -> list[Module]:
    """Return the modules of a pipeline stage; the first `num_hidden_layers % pp` stages have one more layer."""
    if model.num_hidden_layers < pp:
        raise ConfigError(
            f"trainer: pp {pp} must be at most num_hidden_layers {model.num_hidden_layers}"
        )
    share, more = divmod(model.num_hidden_layers, pp)
    first = stage * share + min(stage, more)
    layers = set(range(first, first + share + (stage < more)))
    if stage == 0:
        layers.add(BEFORE_FIRST)
    if stage == pp - 1:
        layers.add(AFTER_LAST)
    return [module for module in table if module.layer in layers]


def _finish(builder: ManifestBuilder, model: ModelSpec, held: list[Module]) -> ShardManifest:
    embed = "model.embed_tokens.weight"
    if model.tie_word_embeddings and any(module.name == embed for module in held):
        builder.add_alias("lm_head.weight", embed)
    return builder.build()


def _megatron_module(
    writer: _Writer, module: Module, mesh: MegatronMesh, at: MegatronCoords
) -> None:
    """Add one module of a Megatron rank, fused and interleaved in the same way as in Megatron."""
    match module.split:
        case Split.REPLICATED:
            for spec in module.tensors:
                writer.parameter(spec.name, [_whole(spec)], dtype=module.dtype)
        case Split.VOCAB:
            writer.vocabulary(module, mesh.tp, at.tp, 128 * mesh.tp)
        case Split.COLUMN:
            writer.parameter(module.name, _column(module, mesh.tp, at.tp))
        case Split.ROW:
            writer.parameter(module.name, _row(module, mesh.tp, at.tp))
        case Split.QKV:
            # For each group of query heads, linear_qkv contains the queries, then their key and value.
            q, k, v = module.tensors
            first, groups = even(f"{module.name} kv heads", module.num_kv_heads, mesh.tp, at.tp)
            q_rows = q.shape[0] // module.num_kv_heads
            head = module.head_dim
            parts: list[tuple[TensorSpec, int, _Span]] = []
            for group in range(first, first + groups):
                parts.append((q, 0, (group * q_rows, q_rows)))
                parts.append((k, 0, (group * head, head)))
                parts.append((v, 0, (group * head, head)))
            writer.parameter(module.name, parts)
        case Split.EXPERTS:
            num_experts = len(module.tensors) // 3
            first, count = even(f"{module.name} experts", num_experts, mesh.ep, at.ep)
            for expert in range(first, first + count):
                gate, up, down = module.tensors[3 * expert : 3 * expert + 3]
                fc1 = [(s, 0, even(s.name, s.shape[0], mesh.etp, at.etp)) for s in (gate, up)]
                span = even(down.name, down.shape[1], mesh.etp, at.etp)
                writer.parameter(f"{module.name}.linear_fc1.weight{expert}", fc1)
                writer.parameter(f"{module.name}.linear_fc2.weight{expert}", [(down, 1, span)])


def _fsdp(model: ModelSpec, spec: TrainerSpec, table: list[Module]) -> list[ShardManifest]:
    """Return manifests with dim 0 of every parameter split over the shard axis; the experts of a layer are one parameter."""
    if spec.world_size % spec.replicas:
        raise ConfigError(
            f"trainer: world_size {spec.world_size} must be a multiple of replicas {spec.replicas}"
        )
    num_shards = spec.world_size // spec.replicas
    built: list[ShardManifest] = []
    for index in range(num_shards):
        writer = _Writer(ManifestBuilder(f"trainer/{index}", Role.TRAINER), spec.dtype)
        for module in table:
            if module.split is Split.EXPERTS:
                _stacked_experts(writer, module, chunk(len(module.tensors) // 3, num_shards, index))
                continue
            for tensor in module.tensors:
                span = chunk(tensor.shape[0], num_shards, index)
                writer.parameter(tensor.name, [(tensor, 0, span)], dtype=module.dtype)
        built.append(_finish(writer.builder, model, table))
    return [
        replace(built[rank % num_shards], worker=f"trainer/{rank}")
        for rank in range(spec.world_size)
    ]


def _stacked_experts(
    writer: _Writer, module: Module, experts: _Span, moe_tp: int = 1, index: int = 0
) -> None:
    """Add `w13` with [gate; up] and `w2` with down, for whole experts or slices of them."""
    first, count = experts
    w13: list[tuple[TensorSpec, int, _Span]] = []
    w2: list[tuple[TensorSpec, int, _Span]] = []
    for expert in range(first, first + count):
        gate, up, down = module.tensors[3 * expert : 3 * expert + 3]
        w13.extend((s, 0, even(s.name, s.shape[0], moe_tp, index)) for s in (gate, up))
        w2.append((down, 1, even(down.name, down.shape[1], moe_tp, index)))
    writer.parameter(f"{module.name}.w13_weight", w13)
    writer.parameter(f"{module.name}.w2_weight", w2)


def engine_manifests(topology: Topology) -> list[ShardManifest]:
    """Return one manifest per engine rank, named `engine-R/T` for rank T of replica R.

    Raises:
        ConfigError: the parallelism does not fit the model.
    """
    spec = topology.engine
    mesh = EngineMesh(tp=spec.tp, attention_dp=spec.attention_dp, ep=spec.ep)
    table = list(modules(topology.model))
    built: list[ShardManifest] = []
    for rank in range(spec.tp):
        writer = _Writer(ManifestBuilder(f"engine-0/{rank}", Role.ENGINE), spec.dtype)
        for module in table:
            _engine_module(writer, module, mesh, rank, spec)
        built.append(_finish(writer.builder, topology.model, table))
    return [
        replace(built[rank], worker=f"engine-{replica}/{rank}")
        for replica in range(spec.replicas)
        for rank in range(spec.tp)
    ]


def _engine_module(
    writer: _Writer, module: Module, mesh: EngineMesh, rank: int, spec: EngineSpec
) -> None:
    at = mesh.coords(rank)
    parts, index = (mesh.attention_tp, at.attention_tp) if module.attention else (mesh.tp, at.tp)
    match module.split:
        case Split.REPLICATED:
            fused = [_whole(tensor) for tensor in module.tensors]
            writer.parameter(module.name, fused, dtype=module.dtype)
        case Split.VOCAB:
            writer.vocabulary(module, parts, index, spec.vocab_multiple)
        case Split.COLUMN:
            writer.parameter(module.name, _column(module, parts, index))
        case Split.ROW:
            writer.parameter(module.name, _row(module, parts, index))
        case Split.QKV:
            q, k, v = module.tensors
            # If there are more ranks than key-value heads, several ranks have the same head.
            kv_parts = min(parts, module.num_kv_heads)
            kv_index = index // (parts // kv_parts)
            writer.parameter(
                module.name,
                [
                    (q, 0, even(q.name, q.shape[0], parts, index)),
                    (k, 0, even(k.name, k.shape[0], kv_parts, kv_index)),
                    (v, 0, even(v.name, v.shape[0], kv_parts, kv_index)),
                ],
            )
        case Split.EXPERTS:
            experts = even(f"{module.name} experts", len(module.tensors) // 3, mesh.ep, at.ep)
            _stacked_experts(writer, module, experts, mesh.moe_tp, at.moe_tp)
