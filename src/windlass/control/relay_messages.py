"""Commands of the relay: engines pass bytes on to other engines."""

from __future__ import annotations

import msgspec

from windlass.planning.relay import RelayGroup
from windlass.transfer.bindings import DestinationBinding, RelayAddress


class ConnectRelay(msgspec.Struct, frozen=True, tag="connect_relay"):
    """Command to bind relay groups, sent after all ranks have bound the plan.

    Attributes:
        groups: for a trainer, the groups that it sends to; for an engine, its own group.
        bindings: for a trainer, bindings of all members of `groups`; for an engine, bindings of the ranks to which it
            forwards chunks.
        addresses: for a trainer, addresses of the roots of `groups`; for an engine, addresses of the ranks to which it
            forwards chunks.
    """

    groups: tuple[RelayGroup, ...]
    bindings: tuple[DestinationBinding, ...]
    addresses: tuple[RelayAddress, ...]


class RelayWrite(msgspec.Struct, frozen=True, tag="relay_write"):
    """Command to a trainer: write to `destinations`, and answer `Written`.

    In contrast to `Write`, a relay group gets bytes from the trainer only at the roots of its trees.
    """

    version: int
    destinations: tuple[str, ...]
    deadline_s: float


class Relay(msgspec.Struct, frozen=True, tag="relay"):
    """Command to an engine: verify chunks that arrive, forward them, and answer `Relayed` after the last chunk."""

    version: int
    deadline_s: float


class SkipUpstream(msgspec.Struct, frozen=True, tag="skip_upstream"):
    """Command to an engine in a relay: stop waiting for this upstream.

    The agent carries out this command at once, even during `Relay`. The controller does not await the answer.
    """

    upstream: str


RelayCommand = ConnectRelay | Relay | RelayWrite | SkipUpstream
RELAY_WRITING = (Relay, RelayWrite)
