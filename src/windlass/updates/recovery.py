"""Engines that are behind, or that did not go on, are tried again until they serve.

`CatchUps`: which engine gives a newcomer the published version. A trainer stands still only while it
publishes; an engine that serves a version stands still until the next one. So a newcomer is brought
up from a peer, by a round like any other whose sources are that engine's ranks: nobody else is
paused, and no trainer is asked.

If no engine serves the version, the trainers are the sources, once more and with the same version: as long as
they wait for answers, which only engines can give, their weights are still those that they published.

`ResumeRetries`: engine ranks that were told to go on and could not. Their weights are whole and of one
version: nothing is wrong with them but that the engine's own server was away, say, when its agent
asked. Meanwhile they get no traffic. What ends this: the rank goes on, a round pauses it (and has it
go on itself), it leaves, or `MAX_ATTEMPTS` are over.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, final

import numpy as np

from windlass.config import ControlConfig, PhaseDeadlines
from windlass.errors import PeerUnreachable, PlanError, WindlassError
from windlass.layout.dtypes import DType
from windlass.layout.manifest import Role, ShardManifest
from windlass.net.messages import Envelope, Reply
from windlass.planning.plan import DTYPES, TransferPlan
from windlass.updates.binding import Planner
from windlass.updates.engine_channel import WELCOME_SEQ
from windlass.updates.fleet import PROBE_SEQ, Agent, Group, Identity
from windlass.updates.journal import JournalKind
from windlass.updates.messages import Abort, Done, Result
from windlass.updates.report import RoundOutcome, UpdateReport
from windlass.updates.rounds import reply_budget_s

if TYPE_CHECKING:
    from windlass.updates.coordinator import Coordinator

_log = logging.getLogger(__name__)
KEPT_ATTEMPTS = 1024
"""Of engines, most of which have left for good; one that is forgotten begins anew."""
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
MAX_ATTEMPTS = 8
"""For one process and one cause: each attempt holds up rounds, which wait for it."""


def _backoff_s(num_failed: int) -> float:
    """Seconds to wait after so many failures: 1, 2, 4, ... `MAX_BACKOFF_S`."""
    return min(FIRST_BACKOFF_S * 2.0 ** (num_failed - 1), MAX_BACKOFF_S)


@dataclass(slots=True)
class _Attempts:
    """To bring one process up to one version.

    Attributes:
        clean: its memory was whole before the first, so whoever wrote into it since is known.
        unable: donors whose weights do not make it what trainers would.
        failures: by donor. due_s: on the loop's clock, not before.
    """

    newcomer: frozenset[Identity]
    version: int
    clean: bool
    unable: set[frozenset[Identity]] = field(default_factory=set)
    failures: Counter[frozenset[Identity]] = field(default_factory=Counter)
    due_s: float = 0.0


@final
class CatchUps:
    """Newcomers, and the engines that bring them up. In the coordinator's loop.

    An attempt that failed is made again after `backoff_s`, from the donor that has failed least, at
    most `MAX_ATTEMPTS` times for a version. A process that connects anew begins anew. The coordinator's
    lock is held while engines are brought up.
    """

    def __init__(self, coordinator: Coordinator, config: ControlConfig, planner: Planner) -> None:
        self._coordinator, self._fleet = coordinator, coordinator.fleet
        self._config, self._planner = config, planner
        self._attempts: dict[str, _Attempts] = {}
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self._settles = False

    def settle_soon(self) -> None:
        """Bind, bring newcomers up and have engines go on, as soon as no round runs."""
        if self._fleet.held:
            self._coordinator.spawn(self._coordinator.members.probe_held())
        if not self._settles:  # one that waits for its turn does it for all who come meanwhile
            self._settles = True
            self._coordinator.spawn(self._settle())

    async def _settle(self) -> None:
        async with self._coordinator.lock:
            self._settles = False  # what changes from here on is for the next one
            await self.bring_up()
            await self._coordinator.connector.bind_ahead()

    async def bring_up(self) -> None:
        """Bring up every engine that does not serve the published version, one after another."""
        if not any(map(self._fleet.serves, self._fleet.engines())):
            await self._bring_up_from_trainers()
        for engine in self._fleet.writable_engines():
            await self._bring_up(engine)

    async def _bring_up_from_trainers(self) -> None:
        """Have trainers that stand still send the published version again, to all engines."""
        coordinator, fleet = self._coordinator, self._fleet
        trainers, engines = fleet.trainers(), fleet.writable_engines()
        if fleet.published < 0 or trainers is None or not engines:
            return
        if self._config.backend.traits.driven_by_trainer or not coordinator.trainers_stand_still:
            return
        members = trainers.identities.union(*(engine.identities for engine in engines))
        attempts = self._attempts_of(trainers.name, members, clean=True)
        if (
            attempts.failures.total() >= MAX_ATTEMPTS
            or asyncio.get_running_loop().time() < attempts.due_s
        ):
            return
        names = ", ".join(engine.name for engine in engines)
        _log.info("%s: the trainers send it again to %s", fleet.unserved, names)
        try:
            # Replicas of the trainers were compared when the version was published.
            binding = replace(await coordinator.connector.ensure_bound(), replicated=None)
            report = await coordinator.run_round(fleet.published, fleet.lineage, binding)
        except WindlassError as error:
            self._failed(trainers.name, attempts, trainers.identities, str(error))
            return
        coordinator.changes.notify()
        if report.outcome is RoundOutcome.PUBLISHED:
            self._attempts.pop(trainers.name, None)
            return
        if self._config.backend.traits.collective:
            coordinator.connector.binding = None
        self._failed(trainers.name, attempts, trainers.identities, report.reason)

    def lost(self, agent: Agent, *, ended: bool) -> None:
        """An engine has lost a rank: what comes back begins anew.

        Nobody may write what the rank may still be writing. Where the connection was `ended` by its own
        side, a process that lives comes back, or has come to the end of its write by the deadline of
        that; if neither happened, it has ended.
        """
        attempts = self._attempts.get(agent.hello.group)
        if attempts is not None:
            attempts.failures.clear()
            attempts.due_s = 0.0
        if ended and agent.hello.role is Role.ENGINE:
            self._coordinator.spawn(self._presume_ended(agent.identity))

    async def _bring_up(self, newcomer: Group) -> None:
        version = self._fleet.published
        if self._fleet.serves(newcomer):
            self._attempts.pop(newcomer.name, None)
            return
        attempts = self._attempts_of(
            newcomer.name, newcomer.identities, clean=not newcomer.mixed_weights
        )
        # Before the first version there are none, and nobody looks for them, for each of many engines.
        donors = filter(self._fleet.serves, self._fleet.engines()) if version >= 0 else ()
        trainers = self._fleet.trainers()
        candidates = sorted(
            (donor for donor in donors if donor.identities not in attempts.unable),
            key=lambda donor: attempts.failures[donor.identities],
        )
        if not candidates or attempts.failures.total() >= MAX_ATTEMPTS:
            return
        if asyncio.get_running_loop().time() < attempts.due_s:
            return
        if (
            newcomer.mixed_weights
            and not attempts.clean
            and (trainers is None or not trainers.complete)
        ):
            return  # a trainer that is away may have been writing it
        truth = trainers.manifests if trainers is not None else ()
        if not self._config.backend.traits.catches_up:
            return
        found = await asyncio.to_thread(find_donor, newcomer, candidates, truth, self._planner)
        if found is None:
            attempts.unable.update(donor.identities for donor in candidates)
            return
        donor, plan = found
        donor_identities = donor.identities  # those that are there now
        try:
            report = await self._copy(donor, newcomer, plan)
        except WindlassError as error:
            self._failed(newcomer.name, attempts, donor_identities, str(error))
            return
        if report.outcome is RoundOutcome.PUBLISHED:
            _log.info("%s caught up from %s", newcomer.name, donor.name)
            self._attempts.pop(newcomer.name, None)
        else:
            self._failed(newcomer.name, attempts, donor_identities, report.reason)

    async def _copy(self, donor: Group, newcomer: Group, plan: TransferPlan) -> UpdateReport:
        coordinator, fleet = self._coordinator, self._fleet
        binding = await coordinator.connector.bind_copy(donor, newcomer, lambda *_: plan)
        report = await coordinator.run_round(fleet.published, fleet.lineage, binding)
        coordinator.changes.notify()
        return report

    def _attempts_of(self, name: str, processes: frozenset[Identity], *, clean: bool) -> _Attempts:
        known, version = self._attempts.get(name), self._fleet.published
        if known is None or (known.newcomer, known.version) != (processes, version):
            known = _Attempts(processes, version, clean=clean)
            self._attempts[name] = known
            if len(self._attempts) > KEPT_ATTEMPTS:
                del self._attempts[next(iter(self._attempts))]
        return known

    def _failed(
        self, name: str, attempts: _Attempts, donor: frozenset[Identity], reason: str
    ) -> None:
        attempts.failures[donor] += 1
        num_failed = attempts.failures.total()
        delay_s = _backoff_s(num_failed)
        attempts.due_s = asyncio.get_running_loop().time() + delay_s
        if num_failed >= MAX_ATTEMPTS:
            _log.warning("%s does not catch up before the next version: %s", name, reason)
            return
        _log.warning("%s did not catch up, again in %g s: %s", name, delay_s, reason)
        if (waiting := self._waiting.get(name)) is not None:
            waiting.cancel()  # of a version before this one
        self._waiting[name] = self._coordinator.spawn(self._try_again(name, delay_s))

    async def _try_again(self, name: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        del self._waiting[name]
        self.settle_soon()

    async def _presume_ended(self, identity: Identity) -> None:
        await asyncio.sleep(self._config.deadlines.write_s)
        agent = self._fleet.find(identity[0])
        away = agent is None or agent.identity != identity
        if away and self._fleet.release(identity):
            _log.info("%s did not come back: what it was writing is over", identity[0])
            self.settle_soon()


@final
class ResumeRetries:
    """Engine ranks that did not go on. In the coordinator's loop.

    One has gone on within both the deadline for going on and that for a pause, which would wait behind it.
    """

    def __init__(self, coordinator: Coordinator, deadlines: PhaseDeadlines) -> None:
        self._coordinator = coordinator
        self._deadline_s = reply_budget_s(min(deadlines.publish_s, deadlines.pause_s))
        self._retrying: dict[Identity, asyncio.Task[None]] = {}

    def heard(self, agent: Agent, reply: Reply[Result]) -> bool:
        """Note a reply; returns whether the rank may be given traffic, or no more, because of it.

        Every `Done` of an engine rank says how it is when the command is over, but for the answer
        to a probe, which asks nothing of the engine, and for what it says again after a welcome.
        """
        result = reply.result
        if not isinstance(result, Done) or agent.hello.role is not Role.ENGINE:
            return False
        is_repeated = reply.round_id <= (agent.hello.epoch, agent.hello.round)
        if reply.seq == PROBE_SEQ or (is_repeated and reply.seq != WELCOME_SEQ):
            return False
        before, agent.not_resumed = agent.not_resumed, result.not_resumed
        if not agent.not_resumed:
            self.forget(agent.identity)
        elif agent.identity not in self._retrying:
            _log.warning("%s did not go on: %s", agent.hello.worker, agent.not_resumed)
            self._retrying[agent.identity] = self._coordinator.spawn(self._retry(agent))
        return bool(before) is not bool(agent.not_resumed)

    def forget(self, identity: Identity) -> None:
        """It goes on, or it has left. Idempotent."""
        if (task := self._retrying.pop(identity, None)) is not None:
            task.cancel()

    async def _retry(self, agent: Agent) -> None:
        worker = agent.hello.worker
        for num_told in range(MAX_ATTEMPTS):
            await asyncio.sleep(_backoff_s(num_told + 1))
            async with self._coordinator.lock:  # else a round might have paused it meanwhile
                again = Abort(f"go on: {agent.not_resumed}", deadline_s=self._deadline_s)
                try:
                    session = self._coordinator.members.sessions[worker]
                    await session.send(Envelope(*self._coordinator.run.new_epoch(), 1, again))
                except PeerUnreachable as error:
                    _log.info("%s", error)  # a process that comes back says how it is
        await asyncio.sleep(_backoff_s(MAX_ATTEMPTS + 1))
        reason = agent.not_resumed
        _log.error(
            "%s stays paused until the next round: told %s times: %s", worker, MAX_ATTEMPTS, reason
        )
        run, version = self._coordinator.run, self._coordinator.fleet.published
        run.record_outcome(JournalKind.NOT_RESUMED, version, (worker,), reason)


def find_donor(
    newcomer: Group,
    candidates: Sequence[Group],
    trainers: Sequence[ShardManifest],
    planner: Planner,
) -> tuple[Group, TransferPlan] | None:
    """The first engine whose weights make the newcomer exactly what the trainers would, and its plan.

    `candidates` serve the published version; `trainers` is empty when none is connected. May take seconds
    with a large model.
    """
    for donor in candidates:
        if not all(agent.hello.can_send for agent in donor.agents.values()):
            continue
        try:
            plan = planner(donor.manifests, newcomer.manifests)
        except PlanError:
            continue  # it holds something that this engine does not
        if _is_exact(plan, trainers):
            return donor, plan
    return None


def _is_exact(plan: TransferPlan, trainers: Sequence[ShardManifest]) -> bool:
    """Whether no element is rounded on its way that was not rounded by the trainers' own plan.

    A cast of what has the trainers' dtype rounds once, as theirs does; any other cast would come
    on top of the one that the donor's weights have been through.
    """
    casts = np.flatnonzero(plan.ops.src_dtype != plan.ops.dst_dtype)
    if not len(casts):
        return True
    names = {plan.tensors[int(t)] for t in np.unique(plan.ops.tensor[casts])}
    have = {
        (plan.tensors[int(plan.ops.tensor[op])], DTYPES[int(plan.ops.src_dtype[op])])
        for op in casts
    }
    return have <= _dtypes_of(trainers, names)


def _dtypes_of(
    manifests: Sequence[ShardManifest], names: Collection[str]
) -> set[tuple[str, DType]]:
    found: set[tuple[str, DType]] = set()
    for manifest in manifests:
        dtypes = {parameter.name: parameter.dtype for parameter in manifest.parameters}
        found.update(
            (shard.tensor, dtypes[shard.parameter])
            for shard in manifest.shards()
            if shard.tensor in names
        )
    return found
