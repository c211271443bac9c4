"""Test kit for users: injected faults, and the conformance suite of transports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.lazy import public

if TYPE_CHECKING:
    from windlass.testing.faulty_transport import Fault as Fault
    from windlass.testing.faulty_transport import FaultKind as FaultKind
    from windlass.testing.faulty_transport import FaultyTransport as FaultyTransport
    from windlass.testing.peer_process import PeerProcess as PeerProcess
    from windlass.testing.transport_conformance import Peer as Peer
    from windlass.testing.transport_conformance import ProcessConformance as ProcessConformance
    from windlass.testing.transport_conformance import Rig as Rig
    from windlass.testing.transport_conformance import TransportConformance as TransportConformance
    from windlass.testing.wrapped_transport import WrappedTransport as WrappedTransport

# Hide `__getattr__` from type checkers, so that they still report unknown names.
if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = public(__name__)
