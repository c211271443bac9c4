"""Backend `push`: trainer ranks drive an update themselves and send whole tensors (`windlass.RolloutCallback`).

Every controller offers this backend in addition to `ControlConfig.backend`:

- `push_leaders.py`: routes and rounds, in the controller
- `push_halves.py`: `PushSender` in a trainer rank, `PushReceiver` in an engine rank
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, final

from aiohttp import web

from windlass.backends.push_halves import PushReceiver
from windlass.config import BackendEntry, PushBackend
from windlass.control.backend import OwnPathBackend
from windlass.errors import ConfigError
from windlass.transfer.base import RankReceiver, RankSender, ReceiverBackend, SenderBackend

if TYPE_CHECKING:
    from windlass.control.coordinator import Coordinator


@final
class Push(OwnPathBackend):
    """Whole tensors, sent by calls of the trainer. A publish cannot use this backend, because no plan is bound."""

    def __init__(self, options: PushBackend) -> None:
        if not isinstance(options, PushBackend):
            raise ConfigError(
                "backend: must be p2p, xccl, disk or the backend of another package, got 'push'; every controller offers "
                "push in addition, so leave it out and use windlass.RolloutCallback"
            )

    def sender(self, sender: RankSender, host: str) -> SenderBackend:  # noqa: ARG002
        """Raise ConfigError, because `publish` cannot use this backend. `windlass.RolloutCallback` creates `PushSender`."""
        raise ConfigError("push: a publish cannot use this backend; use windlass.RolloutCallback")

    def receiver(self, receiver: RankReceiver, host: str) -> ReceiverBackend:
        """Return a receiver that takes whole tensors and copies this rank's boxes out of them."""
        return PushReceiver(receiver.manifest, receiver.live_addresses, host)

    def routes(self, coordinator: Coordinator) -> Iterable[web.RouteDef]:
        """Return the controller's routes, to which `windlass.RolloutCallback` sends its calls."""
        # Only the controller needs this module.
        from windlass.backends.push_leaders import PushUpdates

        return PushUpdates(coordinator).routes()


BACKEND = BackendEntry(Push)
