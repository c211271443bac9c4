"""A topology: one description of both sides and of the fabric between them, read from TOML.

For planning ahead and for benchmarks; `synthesis` makes the manifests
that it implies. Running systems exchange the manifests of their adapters instead.
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
    """The training side.

    Attributes:
        kind: `megatron` (tp, pp, cp, ep, etp; the rest is data parallel) or `fsdp` (dim 0 of
            every parameter over `world_size / replicas` ranks, experts fused per layer).
        replicas: HSDP replicas, for `fsdp`.
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
    """The rollout side: `replicas` engines of `tp` ranks each.

    Attributes:
        attention_dp: copies of attention within one engine (data-parallel attention).
        ep: ranks that the experts of a layer are dealt to; `tp / ep` share each expert.
        vocab_multiple: the vocabulary is padded to a multiple of this.
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
        nic_gbytes_per_s: per rank and direction, 10^9 bytes per second.
        per_write_s: seconds that one rank needs to issue one write.
        pack_gbytes_per_s: per rank, packed bytes out of a pack or unpack kernel.
        ranks_per_node: ranks that share a host.
        colocated: rank i of both sides is on the same host, and local bytes take the local link.
        local_gbytes_per_s: NVLink or shared memory, per rank and direction.
        nics_per_node: NICs of a host, each of `nic_gbytes_per_s`; 0 for one per rank. Fewer are
            shared by neighbouring ranks.
        spine_oversubscription: bandwidth of a host's NICs over that of its way to other rails (NIC
            i of one host to NIC j of another); 1 for a fabric without rails or a full spine.
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
    """Both sides and what lies between them."""

    name: str
    model: ModelSpec
    trainer: TrainerSpec
    engine: EngineSpec
    fabric: Fabric


def parse_topology(text: str) -> Topology:
    """Read a topology from TOML.

    Raises:
        ConfigError: no TOML, an unknown or missing key, or a value that is out of range.
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
