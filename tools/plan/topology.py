"""Topology in TOML: description of trainers, engines and the fabric between them.

Planning ahead and benchmarks use it; `synthesis` makes its manifests. Running systems exchange the manifests of their
adapters instead.
"""

from __future__ import annotations

import tomllib
from typing import Literal

import msgspec

from tools.plan.families import ModelSpec
from windlass.errors import ConfigError
from windlass.layout.dtypes import DType

__all__ = ["EngineSpec", "Fabric", "Topology", "TrainerSpec", "parse_topology"]


class TrainerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The trainer side.

    Attributes:
        kind: `megatron` (tp, pp, cp, ep, etp; the remaining axis is data parallel) or `fsdp` (dim 0 of every
            parameter is split over `world_size / replicas` ranks, and experts are fused per layer).
        replicas: number of HSDP replicas, for `fsdp`.
    """

    kind: Literal["megatron", "fsdp"]
    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    replicas: int = 1
    dtype: DType = DType.BFLOAT16


class EngineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The engine side: `replicas` engines of `tp` ranks each.

    Attributes:
        attention_dp: number of copies of attention in one engine (data-parallel attention).
        ep: number of expert-parallel parts; `tp / ep` ranks share each expert.
        vocab_multiple: number whose multiple is the padded size of the vocabulary.
    """

    replicas: int = 1
    tp: int = 1
    ep: int = 1
    attention_dp: int = 1
    vocab_multiple: int = 64
    dtype: DType = DType.BFLOAT16


class Fabric(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Speeds for the speed-of-light model.

    Attributes:
        nic_gbytes_per_s: rate per rank and direction, in 10^9 bytes per second.
        per_write_s: seconds that a rank needs to issue one write.
        pack_gbytes_per_s: rate of packed bytes of a pack or unpack kernel, per rank.
        ranks_per_node: number of ranks per host.
        colocated: whether rank i of both sides is on the same host. Local bytes then use the local link.
        local_gbytes_per_s: rate of NVLink or shared memory, per rank and direction.
        nics_per_node: number of NICs per host, each with `nic_gbytes_per_s`; 0 for one per rank. With fewer NICs
            than ranks, neighbouring ranks share a NIC.
        spine_oversubscription: bandwidth of a host's NICs divided by the bandwidth of its route to other rails (NIC
            i of one host to NIC j of another); 1 for a fabric without rails or with a full spine.
    """

    nic_gbytes_per_s: float
    per_write_s: float = 1e-6
    pack_gbytes_per_s: float = 1000.0
    ranks_per_node: int = 8
    colocated: bool = False
    local_gbytes_per_s: float = 300.0
    nics_per_node: int = 0
    spine_oversubscription: float = 1.0


class Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Both sides and the fabric between them."""

    name: str
    model: ModelSpec
    trainer: TrainerSpec
    engine: EngineSpec
    fabric: Fabric


def parse_topology(text: str) -> Topology:
    """Read a topology from TOML.

    Raises:
        ConfigError: the text is not TOML, a key is unknown or missing, or a value is out of range.
    """
    try:
        topology = msgspec.convert(tomllib.loads(text), type=Topology)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"topology: {error}") from error
    sections = {"trainer": topology.trainer, "engine": topology.engine, "fabric": topology.fabric}
    for section, settings in sections.items():
        for key, value in msgspec.structs.asdict(settings).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0:
                if key == "nics_per_node" and value == 0:
                    continue
                raise ConfigError(f"topology: {section}.{key} must be > 0, got {value}")
    return topology
