"""Mapping of rank numbers to mesh coordinates, and the split of a dim over a mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.errors import ConfigError

__all__ = ["EngineCoords", "EngineMesh", "MegatronCoords", "MegatronMesh", "even"]


def even(what: str, size: int, parts: int, index: int) -> tuple[int, int]:
    """Return (offset, size) of part `index` of a dim.

    Raises:
        ConfigError: `size` is not divisible by `parts`.
    """
    if size % parts:
        raise ConfigError(f"{what}: {size} must be divisible by {parts}")
    return index * (size // parts), size // parts


@dataclass(frozen=True, slots=True)
class MegatronCoords:
    """Mesh coordinates of a trainer rank: dense axes, then expert axes."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronMesh:
    """Rank order of Megatron-core: tp, cp, dp, pp for dense layers; etp, ep, edp, pp for experts.

    Raises:
        ConfigError: `world_size` is not a multiple of the product of the axes.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for names, product in (
            ("tp * cp * pp", self.tp * self.cp * self.pp),
            ("etp * ep * pp", self.etp * self.ep * self.pp),
        ):
            if product < 1 or self.world_size % product:
                raise ConfigError(
                    f"trainer: world_size {self.world_size} must be a multiple of {names} = {product}"
                )

    def coords(self, rank: int) -> MegatronCoords:
        """Return the coordinates of `rank`."""
        stage_size = self.world_size // self.pp
        pp, in_stage = divmod(rank, stage_size)
        rest, tp = divmod(in_stage, self.tp)
        dp, cp = divmod(rest, self.cp)
        rest, etp = divmod(in_stage, self.etp)
        edp, ep = divmod(rest, self.ep)
        return MegatronCoords(tp, cp, dp, pp, etp, ep, edp)


@dataclass(frozen=True, slots=True)
class EngineCoords:
    """Mesh coordinates of an engine rank: the axes of attention, dense MLPs and experts."""

    tp: int
    attention_tp: int
    ep: int
    moe_tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMesh:
    """Rank order of SGLang inside one engine of `tp` ranks.

    Raises:
        ConfigError: `attention_dp` or `ep` does not divide `tp`.
    """

    tp: int
    attention_dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name, value in (("attention_dp", self.attention_dp), ("ep", self.ep)):
            if value < 1 or self.tp % value:
                raise ConfigError(f"engine: tp {self.tp} must be a multiple of {name} = {value}")

    @property
    def attention_tp(self) -> int:
        """Return the number of ranks per copy of attention."""
        return self.tp // self.attention_dp

    @property
    def moe_tp(self) -> int:
        """Return the number of ranks per expert."""
        return self.tp // self.ep

    def coords(self, rank: int) -> EngineCoords:
        """Return the coordinates of `rank`."""
        ep, moe_tp = divmod(rank, self.moe_tp)
        return EngineCoords(rank, rank % self.attention_tp, ep, moe_tp)
