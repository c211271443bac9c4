"""Commands of updates in which engines pass on to others what they receive."""

from __future__ import annotations

import msgspec

from windlass.planning.relay import RelayGroup
from windlass.transfer.bindings import DestinationBinding, RelayAddress


class ConnectRelay(msgspec.Struct, frozen=True, tag="connect_relay"):
    """Bind relay groups, after every member has answered `Bound`: a command to engines, part of another to trainers.

    Attributes:
        groups: all of them for a trainer, its own for an engine.
        bindings: of every member for a trainer, of those that it passes on to for an engine.
        addresses: of every root for a trainer, of those that it passes on to for an engine.
    """

    groups: tuple[RelayGroup, ...]
    bindings: tuple[DestinationBinding, ...]
    addresses: tuple[RelayAddress, ...]


class RelayWrite(msgspec.Struct, frozen=True, tag="relay_write"):
    """Trainer: as `Write`, but bound relay groups are written at their roots; answer `Written`."""

    version: int
    destinations: tuple[str, ...]
    deadline_s: float


class Relay(msgspec.Struct, frozen=True, tag="relay"):
    """Engine: verify chunks that land and pass them on; answer `Relayed` once all is over."""

    version: int
    deadline_s: float


class SkipUpstream(msgspec.Struct, frozen=True, tag="skip_upstream"):
    """Engine, in a relay: this upstream will not come. Carried out at once; its answer is not awaited."""

    upstream: str


RelayCommand = ConnectRelay | Relay | SkipUpstream
