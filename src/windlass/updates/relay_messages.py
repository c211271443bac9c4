"""Messages of a relay: engines pass on what they have verified. See `control.messages`."""

from __future__ import annotations

import msgspec

from windlass.planning.relay import RelayGroup
from windlass.transfer.bindings import DestinationBinding
from windlass.transfer.relay_wire import RelayAddress

__all__ = [
    "ConnectRelay",
    "Feed",
    "Forgo",
    "OpenRelay",
    "Relay",
    "RelayCommand",
    "RelayOpened",
    "Relayed",
]


class RelayOpened(msgspec.Struct, frozen=True, tag="relay_opened"):
    """Engine rank: who passes chunks on to it connects here."""

    address: RelayAddress


class Relayed(msgspec.Struct, frozen=True, tag="relayed"):
    """Engine rank: how its part of a relay went; see `execution.relay_round.RelayResult`.

    Every upstream has ended by now, but for those in `unknown_from`.
    """

    missing: tuple[str, ...]
    unknown_from: tuple[str, ...]
    unknown_to: tuple[str, ...]
    unreached: tuple[str, ...]
    nbytes: int
    wire_s: float


class OpenRelay(msgspec.Struct, frozen=True, tag="open_relay"):
    """Engine: listen for chunks and answer `RelayOpened`. After `ConnectEngine`."""


class ConnectRelay(msgspec.Struct, frozen=True, tag="connect_relay"):
    """Bind relay groups. After `ConnectTrainer`, and after `OpenRelay` of every member.

    Attributes:
        groups: all of them for a trainer, its own for an engine.
        bindings: of every member for a trainer, of those that it passes on to for an engine.
        addresses: of every root for a trainer, of those that it passes on to for an engine.
    """

    groups: tuple[RelayGroup, ...]
    bindings: tuple[DestinationBinding, ...]
    addresses: tuple[RelayAddress, ...]


class Feed(msgspec.Struct, frozen=True, tag="feed"):
    """Trainer: as `Write`, but bound relay groups are fed at their roots; answer `Written`."""

    version: int
    destinations: tuple[str, ...]
    deadline_s: float


class Relay(msgspec.Struct, frozen=True, tag="relay"):
    """Engine: verify chunks that land and pass them on; answer `Relayed` once all is over."""

    version: int
    deadline_s: float


class Forgo(msgspec.Struct, frozen=True, tag="forgo"):
    """Engine, in a relay: this upstream will not come. Taken at once; its answer is not awaited."""

    upstream: str


RelayCommand = OpenRelay | ConnectRelay | Feed | Relay | Forgo
