"""Weight updates of an engine's own servers by all ranks of a trainer, for integrations whose rank 0 hosts the controller."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, final

from windlass.control.report import UpdateReport
from windlass.errors import WindlassError
from windlass.integrations.hosted import HostAddress, HostedController, TrainerRanks
from windlass.net.access import Access
from windlass.trainers.client import TrainerClient

__all__ = ["FleetSync", "SentWeights", "ServerFleet"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """Result of `WeightSync.send_weights`.

    Attributes:
        version: number of the version.
        servers: URLs of the servers that serve the version now.
        left_out: URL of a server that does not serve the version -> reason.
        report: report of the round: bytes, seconds per phase, pause.
    """

    version: int
    servers: tuple[str, ...]
    left_out: Mapping[str, str]
    report: UpdateReport


class ServerFleet(Protocol):
    """Controller that rank 0 hosts, with the servers that it updates."""

    @property
    def hosted(self) -> HostedController:
        """The controller."""
        ...

    def join(self, deadline_s: float) -> None:
        """Make all servers join, and wait until they are in the fleet. Raises WindlassError if one cannot join."""
        ...

    def rejoin(self, deadline_s: float) -> Mapping[str, str]:
        """Make all servers outside the fleet join it. Return the failures as URL -> reason.

        Raises:
            PeerUnreachable: no server is in the fleet.
        """
        ...

    def wait_resumed(self, names: Collection[str]) -> None:
        """Wait until the servers of these names accept requests again."""
        ...

    def close(self) -> None:
        """End the controller. Idempotent."""
        ...


@final
class FleetSync:
    """Connection of every trainer rank to the servers of one fleet. The constructor and all methods are collective.

    Args:
        urls: name of a server in the fleet -> URL of the server, in the same order on every rank.
        host: function that creates the fleet. Rank 0 calls it.
        connect: function that connects the rank's weights to the controller.
        deadline_s: deadline in seconds for all servers to join, and then for each version.

    Raises:
        WindlassError: see `TrainerRanks.meet`.
    """

    def __init__(
        self,
        urls: Mapping[str, str],
        host: Callable[[], ServerFleet],
        connect: Callable[[HostAddress], TrainerClient],
        deadline_s: float,
    ) -> None:
        self._urls, self._deadline_s = urls, deadline_s
        self._ranks = TrainerRanks.of_process()
        self._num_sent = 0
        self._fleet: ServerFleet | None = None
        with ExitStack() as undo:

            def start() -> HostAddress:
                self._fleet = fleet = host()
                undo.callback(fleet.close)
                return fleet.hosted.address(Access.TRAINER)

            def enter(address: HostAddress) -> None:
                self._trainer = connect(address)
                undo.callback(self._trainer.close)

            def join() -> None:
                if self._fleet is not None:
                    self._fleet.join(deadline_s)

            self._ranks.meet("servers", start, enter, join, deadline_s)
            undo.pop_all()

    def send_weights(self, version: int) -> SentWeights:
        """Publish the current weights to every server. For the errors, see `WeightSync.send_weights`."""
        self._num_sent += 1
        going = f"send/{self._num_sent}"
        reasons: Mapping[str, str] = {}
        if self._fleet is None:
            self._ranks.hear(going, self._deadline_s)
        else:
            try:
                reasons = self._fleet.rejoin(self._deadline_s)
            except WindlassError as error:
                self._ranks.tell(going, reason=str(error))
                raise
            self._ranks.tell(going)
        report = self._trainer.publish(version, deadline_s=self._deadline_s).result()
        left_out = {
            url: report.left_out.get(name) or reasons.get(url) or "not in the fleet"
            for name, url in self._urls.items()
            if name not in report.engines
        }
        if self._fleet is not None:
            self._fleet.wait_resumed(report.engines)
            for url, reason in left_out.items():
                logger.warning("%s does not serve version %s: %s", url, version, reason)
        served = tuple(url for url in self._urls.values() if url not in left_out)
        return SentWeights(version=version, servers=served, left_out=left_out, report=report)

    def shutdown(self) -> None:
        """Leave the fleet. The servers keep their weights and may join another trainer. Idempotent."""
        self._trainer.close()
        if self._fleet is not None:
            self._fleet.close()
