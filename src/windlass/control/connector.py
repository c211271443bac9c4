"""Keeps the binding of the fleet up to date: after ranks have connected or left, plans and binds their links."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import final

from windlass.config import ControlConfig
from windlass.control.backend import Backend
from windlass.control.binder import EnginesUnbound, FleetBinder
from windlass.control.binding import Binding
from windlass.control.changes import Changes
from windlass.control.connect_messages import Identity
from windlass.control.fleet import Group, signature_of
from windlass.control.links import Link
from windlass.control.members import Members
from windlass.control.report import BindCost, UpdateReport
from windlass.control.run import Run
from windlass.errors import ConfigError, PeerUnreachable, PlanError, WindlassError
from windlass.layout.manifest import Role
from windlass.layout.naming.patterns import said
from windlass.planning.planner import Planner
from windlass.transfer.bindings import Carried
from windlass.wording import counted

_log = logging.getLogger(__name__)
MAX_LATE = 2
"""Number of late answers to bind commands that an engine rank may give. After one more the engine is refused."""


@final
class Connector:
    """Owner of the fleet's `Binding`. Its methods run in the controller's event loop.

    Callers of methods that bind hold `RoundRunner.lock`, so no round runs during a binding.

    Args:
        run: versions, journal and fleet.
        members: connections of the agents.
        changes: notified when a binding begins and when it ends.
        config: limits and deadlines.
        backend: backend that moves the bytes.
        planner: compiles plans.

    Attributes:
        binding: the present binding; None if the whole fleet must be bound before the next round.
        binds: names of the engines that are being bound now.
    """

    def __init__(
        self,
        run: Run,
        members: Members,
        changes: Changes,
        config: ControlConfig,
        backend: Backend,
        planner: Planner,
    ) -> None:
        self._run, self._fleet = run, run.fleet
        self._members, self._changes = members, changes
        self._config, self._backend, self._planner = config, backend, planner
        self.binding: Binding | None = None
        self.binds: tuple[str, ...] = ()
        self._costs: dict[str, BindCost] = {}
        self._carried: dict[Link, Carried] = {}
        self._kept: frozenset[str] = frozenset()
        self._unused: tuple[frozenset[Identity], frozenset[str] | None] = frozenset(), None

    async def until_enough(self) -> Binding:
        """Wait until at least `ControlConfig.min_engines` engines are writable and bound; return the binding.

        An engine is writable if a round may write to it (`Fleet.writable_engines`).

        Raises:
            PeerTimeout: too few engines became writable within `deadlines.fleet_s`.
            PeerUnreachable: no complete trainer job is connected.
            WindlassError: the fleet cannot be bound, see `FleetBinder.bind`.
        """
        needed = self._config.min_engines
        while True:
            await self._wait_for_engines(needed)
            binding = await self.ensure_bound()
            if len(binding.engines) >= needed:
                return binding
            # Binding refused some engines, so wait for other engines.

    async def _wait_for_engines(self, needed: int) -> None:
        deadline_s = self._config.deadlines.fleet_s

        def there() -> int:
            return len(self._fleet.writable_engines())

        await self._changes.until(
            lambda: there() >= needed,
            deadline_s,
            lambda: (
                f"publish: at least {counted(needed, 'engine')} must be ready within {deadline_s} s, got {there()}"
                + "".join(f"; {name} was refused: {why}" for name, why in self._members.refused())
            ),
        )

    async def bind_ahead(self) -> None:
        """Bind the fleet now if its ranks have changed, so that the next round need not do this; see `ensure_bound`.

        Do nothing if a trainer rank is missing, or if no engine is writable. If the binding fails, log the error and do
        not raise it: the next round binds again. If the plan or the configuration is wrong, store the error in
        `Members.unbindable`, so that callers of `wait_for_version` fail.
        """
        trainers = self._fleet.trainers()
        if trainers is None or not trainers.complete or not self._fleet.writable_engines():
            return
        try:
            await self.ensure_bound()
        except WindlassError as error:
            _log.warning("binding failed, the next round tries again: %s", error)
            # The next round would fail with the same error, so callers of `wait_for_version` get it now.
            if isinstance(error, PlanError | ConfigError):
                self._members.unbindable = f"{type(error).__name__}: {error}"
                self._changes.notify()

    async def ensure_bound(self) -> Binding:
        """Return a binding of the trainers and of all writable engines.

        If ranks have changed since the last binding, bind them first, and store the new binding in `binding` and its
        costs for `pop_costs`. If engines do not bind, refuse them, or exclude them until they answer a probe
        (`exclude_unbound`). Then bind the other engines.

        Raises:
            PeerUnreachable: no complete trainer job is connected, or no engine is writable.
            WindlassError: see `FleetBinder.bind`.
        """
        trainers, engines = self._fleet.trainers(), self._fleet.writable_engines()
        if trainers is None or not trainers.complete:
            raise PeerUnreachable("connect: no complete group of trainers is connected")
        if not engines:
            raise PeerUnreachable("connect: no complete engine is connected")
        held = self.binding
        wanted = signature_of([trainers, *engines])
        if held is not None and held.signature == wanted and not held.ended:
            return held
        self.binding = None
        try:
            self.binding = await self._bind(trainers, engines, self._planner, held)
        except EnginesUnbound as error:
            self.binding = error.kept
            await self.exclude_unbound(error)
            return await self.ensure_bound()
        self._costs |= self.binding.costs
        return self.binding

    async def bind_copy(self, donor: Group, newcomer: Group, planner: Planner) -> Binding:
        """Return a binding for a catch-up, in which one engine sends its weights to another engine.

        Args:
            donor: engine that sends.
            newcomer: engine that receives. This method removes it from the fleet's binding.
            planner: returns the plan of the copy.

        Raises:
            EnginesUnbound: a rank of the newcomer did not bind. Late ranks take part in no round until they answer a
                probe; see `exclude_unbound`.
            WindlassError: see `FleetBinder.bind`.
        """
        # An engine rank can be bound to only one plan at a time.
        if self.binding is not None:
            self.binding = self.binding.without((newcomer.name,))
        try:
            return await self._bind(donor, (newcomer,), planner)
        except EnginesUnbound as error:
            # Do not refuse the engine, because it may still be able to bind the trainers' plan. Only exclude its late ranks.
            await self.exclude_unbound(EnginesUnbound({}, error.late))
            raise

    async def _bind(
        self,
        sources: Group,
        engines: Sequence[Group],
        planner: Planner,
        held: Binding | None = None,
    ) -> Binding:
        """Make sources and engines bind a plan, in a new epoch, and return the binding.

        Clear `Members.unbindable`. While the ranks bind, `binds` contains the names of the engines. After each change
        of `binds`, wake the coroutines that wait for changes. Log the tensors that engines keep, and the trainer
        tensors that no engine has. Leave the attribute `binding` unchanged.

        Args:
            sources: trainers; in a catch-up, the donor.
            engines: engines to bind.
            planner: compiles the plan.
            held: present binding. Engines that have not changed stay bound, if the backend supports this.

        Raises:
            WindlassError: see `FleetBinder.bind`.
        """
        known, unused = self._unused
        round_id = self._run.new_epoch()
        self._run.has_bound, self._members.unbindable = True, ""
        self._fleet.note_first_epoch(round_id.epoch)
        binder = FleetBinder(
            trainers=sources,
            engines=engines,
            sessions=self._members.sessions,
            planner=planner,
            config=self._config,
            backend=self._backend,
            round_id=round_id,
            held=held,
            unused=unused if known == sources.identities else None,
        )
        self.binds = tuple(engine.name for engine in engines)
        self._changes.notify()
        try:
            binding = await binder.bind()
        finally:
            self.binds = ()
            self._changes.notify()
        if binding.kept and binding.kept != self._kept:
            _log.warning("engines keep %s as they are", said(binding.kept))
        if sources.role is Role.TRAINER:
            self._kept = binding.kept
            if binding.unused and (known, unused) != (sources.identities, binding.unused):
                _log.warning("no engine takes these trainer tensors: %s", said(binding.unused))
            self._unused = sources.identities, binding.unused
        return binding

    async def exclude_unbound(self, unbound: EnginesUnbound) -> None:
        """Exclude the engines that did not bind, so that the other engines can be bound.

        Engines in `unbound.refusals` are refused and disconnected. Ranks in `unbound.late` did not answer in time: their
        engines are excluded until the ranks answer a probe. If a rank was late more than `MAX_LATE` times, its engine is
        refused.
        """
        refused = unbound.refusals
        for worker, reason in unbound.late.items():
            session = self._members.sessions.get(worker)
            if session is None:
                continue
            session.agent.num_late += 1
            if session.agent.num_late > MAX_LATE:
                refused.setdefault(session.agent.hello.group, reason)
            else:
                self._members.set_aside(session, reason)
        for name, reason in refused.items():
            await self._members.refuse(name, reason)

    def drop_if_spent(self, report: UpdateReport) -> bool:
        """Drop the binding if the backend cannot use it after the round of `report`; return whether it was dropped."""
        is_spent = self._backend.is_spent(report)
        if is_spent:
            self.binding = None
        return is_spent

    # --- costs of connecting, and figures of links ---------------------------------------------

    def pop_costs(self) -> dict[str, BindCost]:
        """Return rank -> bind cost, for ranks that were bound since the previous call. The next call omits these ranks."""
        costs, self._costs = self._costs, {}
        return costs

    def note_carried(self, carried: Mapping[Link, Carried]) -> None:
        """Store the traffic of the last round, for `describe_links`: link -> bytes and seconds.

        Keep the earlier figures of links that this round did not use. Drop the figures of links that are not in the
        binding.
        """
        known = {} if self.binding is None else self.binding.transports
        both = {**self._carried, **carried}
        self._carried = {link: found for link, found in both.items() if link in known}

    def describe_links(self) -> list[dict[str, str | float]]:
        """Return the links as `/v1/status` shows them."""
        return [] if self.binding is None else self.binding.describe_links(self._carried)
