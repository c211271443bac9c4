"""Update backends: the contract, and `p2p`, `xccl`, `disk` and `push`.

To add a backend, subclass `Backend` and register `BackendEntry(YourBackend)` as an entry point of the group
`windlass.backends`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.lazy import public

if TYPE_CHECKING:
    from windlass.config import BackendEntry as BackendEntry
    from windlass.control.backend import Backend as Backend
    from windlass.control.backend import OwnPathBackend as OwnPathBackend
    from windlass.control.delivery import Delivery as Delivery
    from windlass.transfer.base import RankReceiver as RankReceiver
    from windlass.transfer.base import RankSender as RankSender
    from windlass.transfer.base import ReceiverBackend as ReceiverBackend
    from windlass.transfer.base import SenderBackend as SenderBackend
    from windlass.transfer.bindings import DestinationBinding as DestinationBinding
    from windlass.transfer.bindings import Written as Written

# At run time only: a type checker must still report names that do not exist.
if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = public(__name__)
