"""What the program and its rank processes tell each other, one line of JSON each."""

from __future__ import annotations

import msgspec

from windlass.transports.mooncake.config import MooncakeConfig

__all__ = ["RankOrder", "RankReport"]


class RankOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank is told.

    Attributes:
        name: of the engine in the fleet. url: of the server. checkpoint: folder with what the
            engine holds now. arguments: of the server's command line, for the model.
        rank, world_size: tensor-parallel. dist_port: where the ranks of this program meet.
        controller: address, empty for a look only. transport: of this rank's own Mooncake engine.
        device: of the server's weights, as SGLang calls it.
    """

    name: str
    url: str
    checkpoint: str
    arguments: tuple[str, ...]
    rank: int
    world_size: int
    dist_port: int
    controller: str
    transport: MooncakeConfig
    device: str


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank found, or why it cannot join.

    Attributes:
        session: of the engine's rank. parameters, nbytes: compared, all equal.
        unplaced: checkpoint tensors that left no trace on this rank.
        cross_checked: whether SGLang's own checksums can be compared with ours.
        wire: of the reads. error: why this rank is refused; then the rest is empty.
    """

    session: str = ""
    parameters: int = 0
    nbytes: int = 0
    unplaced: tuple[str, ...] = ()
    cross_checked: bool = False
    wire: str = ""
    error: str = ""
