"""Registered memory that updates use, and the interface of update backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.lazy import public

if TYPE_CHECKING:
    from windlass.config import BackendTraits as BackendTraits
    from windlass.transfer.arena import Arena as Arena
    from windlass.transfer.backends import Backend as Backend
    from windlass.transfer.base import ReceiverBackend as ReceiverBackend
    from windlass.transfer.base import SenderBackend as SenderBackend
    from windlass.transfer.bindings import DestinationBinding as DestinationBinding
    from windlass.transfer.bindings import Written as Written

# At run time only: a type checker must still report names that do not exist.
if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = public(__name__)
