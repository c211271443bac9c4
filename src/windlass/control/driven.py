"""Rounds that trainer ranks drive through a backend, call by call.

A publish ends WRITE as soon as every source has answered its command. A driven round has no links. The round stays in
WRITE until the backend calls `end`. Before that, the backend sends its own commands to the engines (`call`). The other
phases do not differ from the phases of a publish.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import final

import msgspec

from windlass.config import UpdateMode
from windlass.control.binding import Binding
from windlass.control.coordinator import Coordinator
from windlass.control.delivery import Delivery, reply_budget_s
from windlass.control.driver import RoundDriver
from windlass.control.fleet import signature_of
from windlass.control.messages import Command, Result
from windlass.control.report import UpdateReport, report_of
from windlass.control.round_state import Phase
from windlass.control.rounds import GiveUp, RoundSpec, Sent
from windlass.control.session import RankCaller
from windlass.errors import PeerUnreachable, RoundAborted, WindlassError

FIRST_CALL_SEQ = 1 << 20
"""Sequence number of the first command of `call`, above the number of any command of the round machine."""


@final
class DrivenRound:
    """One driven round. `begin` makes it.

    Attributes:
        report: task that returns the report at the end of the round.
    """

    def __init__(
        self, driver: RoundDriver, in_write: asyncio.Event, report: asyncio.Task[UpdateReport]
    ) -> None:
        self._driver, self._in_write, self.report = driver, in_write, report
        self._caller = RankCaller(driver.sessions, driver.round_id, FIRST_CALL_SEQ)

    @property
    def workers(self) -> tuple[str, ...]:
        """Engine ranks that are still part of the round."""
        return self._driver.machine.engines.active_workers

    @property
    def is_writing(self) -> bool:
        """Whether the engines have paused and wait for bytes."""
        return self._driver.machine.phase is Phase.WRITE

    async def until_paused(self) -> None:
        """Wait until all engines of the round have paused, so that the caller may send bytes.

        Raises:
            RoundAborted: the round ended before all engines paused, for example because no engine is left.
        """
        paused = asyncio.create_task(self._in_write.wait())
        try:
            await asyncio.wait({paused, self.report}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            paused.cancel()
        if not self._in_write.is_set():
            raise RoundAborted((await asyncio.shield(self.report)).reason)

    async def call(self, command: Command, deadline_s: float) -> dict[str, Result | WindlassError]:
        """Send a command to every engine rank of the round, and wait for all answers; see `RankCaller.call`."""
        return await self._caller.call(dict.fromkeys(self.workers, command), deadline_s)

    def end(self, version: int, deadline_s: float) -> None:
        """Tell the round that all bytes of `version` are sent, so that it can verify, apply and publish. Do not wait.

        VERIFY and APPLY may each take `deadline_s`. The attribute `report` gets the result.
        """
        self._driver.deadlines = msgspec.structs.replace(
            self._driver.deadlines, verify_s=deadline_s, apply_s=deadline_s
        )
        self._driver.post(Sent(version))

    def give_up(self, reason: str) -> None:
        """Tell the round to end without a published version. Do not wait; the attribute `report` gets the result."""
        self._driver.post(GiveUp(reason))


async def begin(
    coordinator: Coordinator, delivery: Delivery, *, pause_s: float, session_s: float
) -> DrivenRound:
    """Wait for the end of a running round or binding, and begin a driven round with all writable engines.

    Args:
        coordinator: coordinator of the engines.
        delivery: delivery of the new round.
        pause_s: seconds from now until every engine has paused or is left out.
        session_s: seconds within which the caller must call `DrivenRound.end`, from the beginning of WRITE. If the
            caller is late, the round publishes no version.

    Raises:
        PeerUnreachable: no engine is writable (`Fleet.writable_engines`).
        RoundAborted: the controller cannot record the round in its journal.
    """
    rounds, began_s, in_write = coordinator.rounds, time.monotonic(), asyncio.Event()
    await rounds.lock.acquire()
    try:
        await coordinator.catch_ups.complete_half_published()
        left_s = pause_s - (time.monotonic() - began_s)
        spec, binding = _spec(coordinator, delivery, left_s, session_s)
        driver = rounds.start(spec, binding, in_write)
    except BaseException:
        rounds.lock.release()
        raise
    report = coordinator.tasks.spawn(_finish(coordinator, driver))
    return DrivenRound(driver, in_write, report)


def _spec(
    coordinator: Coordinator, delivery: Delivery, pause_s: float, session_s: float
) -> tuple[RoundSpec, Binding]:
    """Return the specification and the binding of a driven round with all writable engines.

    Drop the binding of the fleet: the next publish binds all ranks again.

    Args:
        coordinator: coordinator of the engines.
        delivery: delivery of the round.
        pause_s: seconds within which the engines must pause.
        session_s: deadline of WRITE in seconds.

    Raises:
        PeerUnreachable: no engine is writable.
    """
    config = coordinator.config
    groups = sorted(coordinator.fleet.writable_engines(), key=lambda group: group.name)
    if not groups:
        raise PeerUnreachable("pause_generation: no complete engine is connected")
    # Another backend fills the engines now, so the next publish must bind them again.
    coordinator.connector.binding = None
    engines: Mapping[str, tuple[str, ...]] = {group.name: group.workers for group in groups}
    # Leave out an engine that does not pause early enough, so that the caller still gets an answer
    # within `pause_s`.
    prepare_s = reply_budget_s(pause_s)
    deadlines = msgspec.structs.replace(
        config.deadlines,
        prepare_s=prepare_s,
        pause_s=reply_budget_s(prepare_s),
        write_s=session_s,
    )
    # With IN_PLACE, engines pause before WRITE. A driven round needs this even if a shadow copy receives the bytes.
    config = msgspec.structs.replace(config, mode=UpdateMode.IN_PLACE, deadlines=deadlines)
    spec = RoundSpec(
        version=-1,
        lineage=coordinator.run.lineage,
        config=config,
        delivery=delivery,
        engines=engines,
    )
    return spec, Binding(signature=signature_of(groups), engines=engines)


async def _finish(coordinator: Coordinator, driver: RoundDriver) -> UpdateReport:
    """Drive the round to its end, release the lock of the rounds, store the report (`end_update`), and return it."""
    rounds = coordinator.rounds
    try:
        report = await report_of(lambda: driver.machine.version, rounds.finish(driver))
    finally:
        rounds.lock.release()
    coordinator.end_update(report)
    return report
