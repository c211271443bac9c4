"""Rank numbers to mesh coordinates, and how one dim is cut over a mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.errors import ConfigError

__all__ = ["EngineCoords", "EngineMesh", "MegatronCoords", "MegatronMesh", "even"]


def even(what: str, size: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, size) of part `index` of a dim that must divide evenly.

    Raises:
        ConfigError: it does not.
    """
    if size % parts:
        raise ConfigError(f"{what}: {size} must be divisible by {parts}")
    return index * (size // parts), size // parts


@dataclass(frozen=True, slots=True)
class MegatronCoords:
    """Where a trainer rank stands: dense axes, then expert axes."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronMesh:
    """Megatron-core's rank order: tp, cp, dp, pp for dense layers; etp, ep, edp, pp for experts.

    Raises:
        ConfigError: the axes do not multiply to `world_size`.
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
        """Coordinates of `rank`."""
        stage_size = self.world_size // self.pp
        pp, in_stage = divmod(rank, stage_size)
        rest, tp = divmod(in_stage, self.tp)
        dp, cp = divmod(rest, self.cp)
        rest, etp = divmod(in_stage, self.etp)
        edp, ep = divmod(rest, self.ep)
        return MegatronCoords(tp, cp, dp, pp, etp, ep, edp)


@dataclass(frozen=True, slots=True)
class EngineCoords:
    """Where a rank of one engine stands: the axes of attention, of dense MLPs and of experts."""

    tp: int
    attention_tp: int
    ep: int
    moe_tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMesh:
    """SGLang's rank order inside one engine of `tp` ranks.

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
        """Ranks that one copy of attention is split over."""
        return self.tp // self.attention_dp

    @property
    def moe_tp(self) -> int:
        """Ranks that one expert is split over."""
        return self.tp // self.ep

    def coords(self, rank: int) -> EngineCoords:
        """Coordinates of `rank`."""
        ep, moe_tp = divmod(rank, self.moe_tp)
        return EngineCoords(rank, rank % self.attention_tp, ep, moe_tp)
