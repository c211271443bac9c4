"""Registry of the connected ranks: the version that each group has, and the state of every engine. No I/O."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from windlass.control.binding import Binding
from windlass.control.connect_messages import Hello, Identity
from windlass.control.engine_state import TRANSITIONS, EngineState, EngineStatus
from windlass.control.journal import MAX_QUARANTINED
from windlass.control.messages import Failure, FailureKind, Result
from windlass.control.round_state import EngineOutcome
from windlass.control.rounds import Finish, Replied
from windlass.errors import ManifestError, ProtocolError
from windlass.layout.dtypes import DType
from windlass.layout.manifest import Role, ShardManifest
from windlass.net.logs import printable
from windlass.net.messages import MustWait, RoundId, check_version
from windlass.transfer.bindings import LinkStatus, Relayed, Written
from windlass.transports.peers import PeerEndpoint

_log = logging.getLogger(__name__)
MAX_REASON_LENGTH = 2000
"""Maximum number of characters of a text from an agent that the controller stores."""
QUARANTINE_REASON = (
    "a write with an unknown outcome may still arrive in its memory; restart the engine"
)
"""Reason of a quarantined engine without a more precise reason."""
PROBE_SEQ = 1 << 30
"""Sequence number of probes; commands of a round have smaller numbers."""

KEPT_JOBS = 1024
"""Number of newest replaced trainer jobs that the fleet remembers. It refuses their ranks."""


class HalfPublished(NamedTuple):
    """Version that all ranks of an engine have, and the ranks that may not serve it yet, in rank order."""

    version: int
    workers: tuple[str, ...]


class EngineInfo(NamedTuple):
    """A routable engine: its name, its HTTP address, and the version that it serves."""

    name: str
    url: str
    version: int


@dataclass(slots=True)
class Agent:
    """One connected rank.

    Attributes:
        hello: first message of the rank.
        manifest: decoded `Hello.manifest`.
        quarantined: whether bytes of a write with an unknown outcome may still arrive in the rank's memory.
        not_resumed: reason why the rank does not generate although the controller told it to resume; else empty.
        silent: text about a command that the rank did not answer by the deadline; empty once it has answered a probe.
        num_late: number of bind commands that the rank answered too late since a round last published in its engine.
        unwritten: names of the tensors of an engine rank that no update has written, see `Hello.unwritten`; None if the
            rank has had no version.
        applied: see `Hello.applied`; a round of this controller in the engine replaces this value. It becomes the version if
            the engine left the round in PUBLISH, and -1 otherwise.
    """

    hello: Hello
    manifest: ShardManifest
    quarantined: bool = False
    not_resumed: str = ""
    silent: str = ""
    num_late: int = 0
    unwritten: frozenset[str] | None = None
    applied: int = -1

    @property
    def identity(self) -> Identity:
        """Worker name and incarnation, which distinguish this process from its predecessors."""
        return self.hello.worker, self.hello.incarnation


@dataclass(frozen=True, slots=True)
class _Hold:
    """Write command that a source has not answered.

    Attributes:
        round_id: round of the command.
        engines: engine processes; the bytes may still arrive in their memory.
    """

    round_id: RoundId
    engines: frozenset[Identity]


@dataclass(slots=True)
class Group:
    """The ranks of one engine or of the trainer job.

    The state of an engine decides whether it gets traffic. Its agents have flags of their own: silent, quarantined, not
    resumed. No round writes to an engine with a silent or quarantined agent. Several flags can be set at the same time,
    and the state names only one of them.

    Attributes:
        name: name of the group.
        role: trainer or engine.
        world_size: number of its ranks, connected or not.
        agents: rank -> agent, for connected ranks.
        version: lowest version of its ranks; -1 if a rank has no version, has a version of another lineage or may have
            mixed weights.
        lineage: lineage of the run that `version` belongs to.
        status: state of the engine; only `move` changes it.
        reason: cause of the state; empty if no fault is known.
        applied: version of this run that the processes in `applied_by` have, if the last round left the engine out in
            PUBLISH; else -1.
        applied_by: processes of the engine in that round.
        catch_up: text that says why the engine did not get the published version from another engine: none can send it, or
            the last copy (catch-up) failed. Empty once the engine has published a version.
        old_tensors: text about tensors with values of an earlier version, which no trainer sends; empty for none. Only a
            catch-up or a new process ends this.
    """

    name: str
    role: Role
    world_size: int
    agents: dict[int, Agent]
    version: int = -1
    lineage: str = ""
    status: EngineStatus = EngineStatus.GONE
    reason: str = ""
    applied: int = -1
    applied_by: frozenset[Identity] = frozenset()
    catch_up: str = ""
    old_tensors: str = ""

    def move(self, status: EngineStatus, reason: str = "") -> None:
        """Set the state of the engine and its reason. Log the reason if it has changed.

        A transition that is not in `TRANSITIONS` is a bug. The engine then gets the state `MIXED_WEIGHTS` instead, so
        that it gets no traffic until a round publishes a version to it.
        """
        if status not in TRANSITIONS[self.status]:
            reason = f"internal error: {self.status} must not become {status}"
            status = EngineStatus.MIXED_WEIGHTS
        if reason and reason != self.reason:
            _log.warning("engine %s: %s: %s", self.name, status, printable(reason))
        if status is EngineStatus.MIXED_WEIGHTS:
            self.version = -1
        self.status, self.reason = status, reason

    @property
    def complete(self) -> bool:
        """Whether all ranks of the group are connected."""
        return len(self.agents) == self.world_size

    @property
    def quarantined(self) -> bool:
        """Whether bytes of a write with an unknown outcome may still arrive in the memory of a rank."""
        return any(agent.quarantined for agent in self.agents.values())

    @property
    def not_resumed(self) -> str:
        """Reason why a rank does not generate although the controller told it to resume; empty if all ranks generate."""
        return next((agent.not_resumed for agent in self.agents.values() if agent.not_resumed), "")

    @property
    def silent(self) -> str:
        """Text about a command that a rank did not answer by the deadline; empty if all ranks answer."""
        return next((agent.silent for agent in self.agents.values() if agent.silent), "")

    @property
    def identities(self) -> frozenset[Identity]:
        """Worker name and incarnation of each connected rank."""
        return frozenset(agent.identity for agent in self.agents.values())

    @property
    def workers(self) -> tuple[str, ...]:
        """Names (GROUP/RANK) of the connected ranks, in rank order."""
        return tuple(self.agents[rank].hello.worker for rank in sorted(self.agents))

    @property
    def hellos(self) -> tuple[Hello, ...]:
        """First messages of the connected ranks, in rank order."""
        return tuple(self.agents[rank].hello for rank in sorted(self.agents))

    @property
    def manifests(self) -> tuple[ShardManifest, ...]:
        """Manifests of the connected ranks, in rank order."""
        return tuple(self.agents[rank].manifest for rank in sorted(self.agents))

    @property
    def allow_unused(self) -> frozenset[str]:
        """Name patterns of trainer tensors that engines need not have, from all trainer ranks."""
        return frozenset(p for agent in self.agents.values() for p in agent.hello.allow_unused)

    @property
    def keep(self) -> frozenset[str]:
        """Name patterns of engine tensors that stay as they are if no trainer has them, from all trainer ranks."""
        return frozenset(p for agent in self.agents.values() for p in agent.hello.keep)

    @property
    def unwritten(self) -> frozenset[str]:
        """Names of this engine's tensors that no update has written; empty without a version. See `Hello.unwritten`."""
        return frozenset[str]().union(*(agent.unwritten or () for agent in self.agents.values()))

    @property
    def rounded(self) -> dict[str, DType]:
        """Tensor -> dtype to which the engine rounds received values, joined over its ranks; see `Hello.rounded`."""
        return {n: dtype for hello in self.hellos for n, dtype in hello.rounded.items()}

    @property
    def url(self) -> str:
        """HTTP address of the engine; empty for trainers, and while rank 0 is not connected."""
        return self.agents[0].hello.url if 0 in self.agents else ""


class Fleet:
    """Registry of the connected ranks. Only the coordinator and its parts change it.

    Args:
        quarantined: quarantined processes, from the journal.
        published: published version, from the journal; -1 for none.
        lineage: lineage of the run.

    Attributes:
        published: the published version; -1 for none. `publish` changes it.
        published_by: trainer processes that published this version; empty if this controller does not know them.
        published_from: manifests of these processes; empty if this controller does not know them.
        lineage: lineage of the run that the published version belongs to. Engines with a version of another lineage
            count as engines without a version.
        job: job of the connected trainer ranks, or of the last ones; None before the first rank.
        quarantine_on_return: names of absent ranks that are quarantined when they connect again, the oldest first.
        holds: source -> its unanswered write command. No round writes to the engines in a hold.
    """

    def __init__(
        self, quarantined: Iterable[Identity] = (), published: int = -1, lineage: str = ""
    ) -> None:
        self.published, self.lineage = published, lineage
        self.published_by: frozenset[Identity] = frozenset()
        self.published_from: tuple[ShardManifest, ...] = ()
        self._groups: dict[str, Group] = {}
        self._agents: dict[str, Agent] = {}
        self._endpoints: set[PeerEndpoint] = set()
        self._num_of_job = Counter[str]()
        self._quarantined = dict.fromkeys(quarantined)
        self.quarantine_on_return: dict[str, None] = {}
        self._first_epoch: int | None = None
        self.holds: dict[Identity, _Hold] = {}
        self._num_trainers = 0
        self._trainer_group = ""
        self.job: str | None = None
        self._past_jobs: dict[str, None] = {}

    # --- the state of an engine --------------------------------------------------------------

    def publish(self, version: int, lineage: str) -> None:
        """Record the published version (-1 for none) and its lineage, and update the states of all engines.

        The lineage is the random identity of the controller's run that the version belongs to; see `Welcome`. If the
        version or the lineage has changed, clear `published_by` and `published_from`.
        """
        if (version, lineage) != (self.published, self.lineage):
            self.published_by, self.published_from = frozenset(), ()
        self.published, self.lineage = version, lineage
        for engine in self.engines():
            self._update_state(engine)

    def note_silent(self, agent: Agent, command: str) -> None:
        """Set `Agent.silent` of a rank to `command`, empty if the rank answers again, and update its engine's state."""
        agent.silent = command
        self._update_state_of(agent)

    def note_not_resumed(self, agent: Agent, reason: str) -> None:
        """Set `Agent.not_resumed` of a rank to `reason`, empty if the rank generates, and update its engine's state."""
        agent.not_resumed = reason
        self._update_state_of(agent)

    def _update_state_of(self, agent: Agent) -> None:
        """Update the state of a rank's engine; do nothing for a rank that is not connected any more."""
        group = self._groups.get(agent.hello.group)
        if group is not None:
            self._update_state(group)

    def _update_state(self, engine: Group) -> None:
        """Move an engine to the state that follows from the published version and from its ranks. Skip trainers."""
        if engine.role is Role.ENGINE:
            engine.move(*self._next_state(engine, engine.status, engine.reason))

    def _next_state(
        self, engine: Group, now: EngineStatus, reason: str
    ) -> tuple[EngineStatus, str]:
        """Return the state that an engine must have now, and the cause of this state.

        Args:
            engine: the engine, with its present version and the flags of its ranks.
            now: state that the engine has had until now. After a round: state that follows from the engine's outcome.
            reason: cause of `now`.
        """
        is_kept = now in {EngineStatus.MIXED_WEIGHTS, EngineStatus.QUARANTINED}
        if engine.silent and not is_kept:
            return EngineStatus.SILENT, engine.silent
        if self._is_current(engine) and not engine.silent:
            status = EngineStatus.NOT_RESUMED if engine.not_resumed else EngineStatus.SERVING
            return status, engine.not_resumed
        is_known = is_kept or now in {EngineStatus.LEFT_OUT, EngineStatus.SILENT}
        if engine.quarantined:
            return EngineStatus.QUARANTINED, reason if is_known else QUARANTINE_REASON
        if is_kept:
            # If the engine was quarantined, a new process has replaced the quarantined rank. The other ranks have kept
            # their weights, which may be of another version.
            return EngineStatus.MIXED_WEIGHTS, reason
        if is_known:
            return EngineStatus.LEFT_OUT, reason
        if not engine.complete:
            return EngineStatus.INCOMPLETE, ""
        return EngineStatus.WAITING, engine.not_resumed

    def _is_current(self, engine: Group) -> bool:
        """Return whether all ranks of an engine are connected and have the published version."""
        holds = engine.version == self.published >= 0 and engine.lineage == self.lineage
        return holds and engine.complete

    @staticmethod
    def serves(engine: Group) -> bool:
        """Return whether an engine has the published version and answers commands, so that another engine can copy from it."""
        return engine.status in {EngineStatus.SERVING, EngineStatus.NOT_RESUMED}

    # --- ranks that come and go --------------------------------------------------------------

    def releasing(self, workers: Iterable[str]) -> tuple[str, ...]:
        """Return the `workers` that free memory in a round, see `Hello.releases`."""
        found = {worker: self.find(worker) for worker in workers}
        return tuple(w for w, agent in found.items() if agent is not None and agent.hello.releases)

    def find(self, worker: str) -> Agent | None:
        """Return the connected rank with this name, or None."""
        return self._agents.get(worker)

    def admit(self, hello: Hello) -> Agent:
        """Check the Hello of a rank, add the rank to its group, and update the state of its engine.

        End the quarantines and holds of earlier processes with the rank's name. The first rank of a new trainer job
        replaces the previous job (`replace_job`).

        Raises:
            ManifestError: see `check`.
            ProtocolError: see `check`; the rank's group is connected with a different role or world size; a trainer
                group with a different name is connected; the engine has the name of the trainers' group; an endpoint
                belongs to a connected agent; or the rank belongs to a trainer job that was replaced.
            MustWait: a process with this name, or ranks of another trainer job, are still connected. A dead process
                counts as connected until missed heartbeats end its connection.
        """
        manifest = self.check(hello)
        if hello.role is Role.TRAINER:
            self._check_job(hello)
        known = self._groups.get(hello.group)
        if known is not None and (known.world_size, known.role) != (hello.world_size, hello.role):
            raise ProtocolError(
                f"{hello.worker}: group {hello.group!r} has role {known.role} and world_size "
                f"{known.world_size}, got {hello.role} and {hello.world_size}"
            )
        trainers = self.trainers() if hello.role is Role.TRAINER else None
        if trainers is not None and trainers.name != hello.group:
            raise ProtocolError(
                f"{hello.worker}: group must be {trainers.name!r}, got {hello.group!r}: this trainer group is "
                "connected already"
            )
        if hello.role is Role.ENGINE and hello.group == self._trainer_group:
            raise ProtocolError(
                f"{hello.worker}: group must not be {hello.group!r}, the name of the trainers' group"
            )
        if self.find(hello.worker) is not None:
            raise MustWait(
                f"worker name {hello.worker!r} belongs to an agent that is still connected"
            )
        if any(offer.endpoint in self._endpoints for offer in hello.offers):
            raise ProtocolError(f"{hello.worker}: must not offer an endpoint of another agent")
        return self._insert(hello, manifest)

    @staticmethod
    def check(hello: Hello) -> ShardManifest:
        """Check a Hello without regard to other agents, and return its decoded manifest.

        Raises:
            ManifestError: the manifest is invalid, or of another rank or role.
            ProtocolError: the protocol version differs, the rank is not below the world size, the offers are empty, two
                offers have the same transport, or an offer has an endpoint of another transport.
        """
        check_version(hello.protocol_version, hello.worker)
        if not 0 <= hello.rank < hello.world_size:
            raise ProtocolError(
                f"{hello.worker}: rank must be in [0, world_size={hello.world_size}), got {hello.rank}"
            )
        manifest = ShardManifest.decode(hello.manifest)
        if (manifest.worker, manifest.role) != (hello.worker, hello.role):
            raise ManifestError(
                f"{hello.worker}: the manifest must be of {hello.role} {hello.worker}, got the manifest of {manifest.role} "
                f"{manifest.worker}"
            )
        names = [offer.transport for offer in hello.offers]
        if not names or len(set(names)) < len(names):
            raise ProtocolError(
                f"{hello.worker}: must offer at least one transport, and no transport twice, got {names}"
            )
        for offer in hello.offers:
            if offer.wire.transport != offer.transport:
                raise ProtocolError(
                    f"{hello.worker}: the offer of transport {offer.transport!r} must have an endpoint of this "
                    f"transport, got an endpoint of {offer.wire.transport!r}"
                )
        return manifest

    def replace_job(self, job: str) -> str:
        """Make `job` the trainers' job, and refuse new connections of the previous job's ranks from now on.

        Returns:
            Reason to send to the ranks of the previous job that are still connected. The caller must disconnect them.
        """
        reason = f"job {self.job!r} was replaced by job {job!r}"
        if self.job is not None:
            self._past_jobs[self.job] = None
            if len(self._past_jobs) > KEPT_JOBS:
                del self._past_jobs[next(iter(self._past_jobs))]
        self.job = job
        return reason

    def _check_job(self, hello: Hello) -> None:
        """Check that a trainer rank belongs to the same job as the connected trainer ranks.

        The ranks of different jobs may have different weights.

        Raises:
            ProtocolError: the job of the rank was replaced.
            MustWait: ranks of another job are still connected.
        """
        if hello.job in self._past_jobs:
            raise ProtocolError(
                f"{hello.worker}: job {hello.job!r} was replaced by job {self.job!r}"
            )
        group = self.trainers()
        # `_num_of_job` also counts ranks of a replaced job until their connections have ended.
        if group is not None and self._num_of_job.keys() - {hello.job}:
            agents = group.agents.values()
            rivals = [agent.hello for agent in agents if agent.hello.job != hello.job]
            raise MustWait(
                f"{hello.worker} of job {hello.job!r} must wait until the ranks of job "
                f"{rivals[0].job!r} have left: {', '.join(rival.worker for rival in rivals)}"
            )

    def _insert(self, hello: Hello, manifest: ShardManifest) -> Agent:
        """Add a rank to its group and to the fleet, and return the rank. `admit` has checked the rank's Hello.

        - Set the group's version to the lowest version of its ranks, and update the state of its engine.
        - Record the rank's endpoints, so that no other rank may connect with one of them.
        - End the quarantines and holds of earlier processes with the rank's name: these processes have ended, because a
          new process has their name.
        - Quarantine the rank itself if its name is in `quarantine_on_return` and its Hello has an epoch above 0.
        - For a trainer rank, set `job`. If the job is new, refuse the ranks of the previous job from now on.
        """
        group = self._groups.setdefault(
            hello.group, Group(hello.group, hello.role, hello.world_size, {})
        )
        if not group.agents:
            group.version, group.lineage = hello.served_version, hello.lineage
        agent = Agent(
            hello,
            manifest,
            not_resumed=hello.not_resumed[:MAX_REASON_LENGTH],
            unwritten=(
                frozenset(hello.unwritten)
                if max(hello.served_version, hello.applied) >= 0
                else None
            ),
            applied=hello.applied,
        )
        if hello.worker in self.quarantine_on_return:
            del self.quarantine_on_return[hello.worker]
            self._quarantine([agent.identity] if hello.epoch else [])
        agent.quarantined = agent.identity in self._quarantined
        # A new process has this name, so the earlier process and its writes have ended.
        for past in [k for k in self.holds if k[0] == hello.worker and k != agent.identity]:
            del self.holds[past]
        if hello.role is Role.TRAINER:
            self._trainer_group = hello.group
            self._num_of_job[hello.job] += 1
            self._note_mesh(hello)
            # Only a rank without a lineage can belong to a new job: all other ranks were connected to a controller before.
            if hello.job != self.job and not hello.lineage:
                self.replace_job(hello.job)
            self.job = hello.job
        for past in [k for k in self._quarantined if k[0] == hello.worker and k != agent.identity]:
            del self._quarantined[past]
        group.agents[hello.rank] = self._agents[hello.worker] = agent
        self._endpoints.update(offer.endpoint for offer in hello.offers)
        group.version = min(group.version, hello.served_version)
        if group.lineage != hello.lineage:
            group.version = -1
        if hello.mixed_weights and hello.role is Role.ENGINE:
            reason = f"{hello.worker}: its weights may be of two versions"
            group.move(EngineStatus.MIXED_WEIGHTS, reason)
        self._update_state(group)
        return agent

    def _note_mesh(self, hello: Hello) -> None:
        """If the number of trainer ranks has changed, drop the holds of earlier trainer processes, which have all ended."""
        if hello.world_size != self._num_trainers:
            for past in [k for k in self.holds if k[0].rpartition("/")[0] == hello.group]:
                del self.holds[past]
        self._num_trainers = hello.world_size

    def remove(self, agent: Agent) -> Group:
        """Remove a rank from its group, so that its endpoints are free again; return the group.

        If other ranks of the group are connected, update the state of their engine. Otherwise remove the group too, and
        set its state to `GONE`.
        """
        hello = agent.hello
        group = self._groups[hello.group]
        if group.agents.pop(hello.rank, None) is not None:
            del self._agents[hello.worker]
            self._endpoints.difference_update(offer.endpoint for offer in hello.offers)
            if hello.role is Role.TRAINER:
                # `-=` on a Counter also removes keys with a count of zero.
                self._num_of_job -= Counter([hello.job])
        if group.agents:
            self._update_state(group)
        else:
            del self._groups[group.name]
            group.move(EngineStatus.GONE)
        return group

    @property
    def num_trainer_ranks(self) -> int:
        """Number of ranks of the trainer job; 0 while none is connected."""
        trainers = self.trainers()
        return trainers.world_size if trainers is not None else 0

    def trainers(self) -> Group | None:
        """Return the group of the trainers, complete or not; None while no trainer is connected."""
        found = self._groups.get(self._trainer_group)
        return found if found is not None and found.role is Role.TRAINER else None

    def away(self) -> list[str]:
        """Return the names of the trainer ranks that are not connected, in rank order.

        The list is also empty if no trainer rank is connected, because the number of ranks is then unknown.
        """
        trainers = self.trainers()
        if trainers is None:
            return []
        ranks = range(trainers.world_size)
        return [f"{trainers.name}/{rank}" for rank in ranks if rank not in trainers.agents]

    def engines(self) -> tuple[Group, ...]:
        """Return the engines with at least one connected rank, complete or not."""
        return tuple(g for g in self._groups.values() if g.role is Role.ENGINE)

    def has_lost_all(self, binding: Binding) -> bool:
        """Return whether none of the engine processes in `binding` is connected any more."""
        found = ((self.group_of(name), own) for name, own in binding.engines.items())
        return all(
            engine is None or engine.identities.isdisjoint(binding.identities_of(own))
            for engine, own in found
        )

    def must_catch_up(self, binding: Binding) -> dict[str, frozenset[str]]:
        """Return the engines that must catch up before the trainers of `binding` publish the next version.

        Such an engine lacks the published version, and the next version does not update all its tensors: the present
        trainers do not have some tensors that earlier updates wrote. Other engines with the published version have the
        right values of these tensors.

        Returns:
            Engine -> names of these tensors.
        """
        engines = {name: self._groups[name] for name in binding.stays if name in self._groups}
        current = {name: engine for name, engine in engines.items() if self._is_current(engine)}
        written = frozenset[str]().union(
            *(binding.stays[name] - engine.unwritten for name, engine in current.items())
        )
        behind = engines.keys() - current.keys()
        return {name: lacked for name in behind if (lacked := binding.stays[name] & written)}

    def half_published(self) -> dict[str, HalfPublished]:
        """Return the engines in which only some ranks got the command to serve a version.

        The connection to an earlier controller, or to a rank, was lost between these commands. All ranks have the version:
        each rank either serves it or has applied it. So no bytes need to be sent again. If this controller did not run the
        round, it knows this only for the published version, and only if at least one rank serves it.
        """
        found = {}
        for engine in self.writable_engines():
            if engine.status is not EngineStatus.MIXED_WEIGHTS:
                continue
            is_known = engine.applied >= 0 and engine.identities == engine.applied_by
            version = engine.applied if is_known else self.published
            applied = {a.hello.worker for a in engine.agents.values() if a.applied == version >= 0}
            served = {h.worker for h in engine.hellos if self._serves_version(h, version)}
            is_known |= bool(served)
            if applied and is_known and applied | served == set(engine.workers):
                workers = tuple(worker for worker in engine.workers if worker in applied)
                found[engine.name] = HalfPublished(version, workers)
        return found

    def _serves_version(self, hello: Hello, version: int) -> bool:
        """Return whether a rank served this version of this run when it connected."""
        serves = (hello.served_version, hello.lineage) == (version, self.lineage)
        return serves and not hello.mixed_weights

    def _forget_applied(self, engines: Iterable[str]) -> None:
        """Reset `Group.applied` of these engines, and `Agent.applied` of their ranks, to -1.

        The values from an earlier round, or from the time when a rank connected, are no longer current.
        """
        for name in engines:
            group = self._groups.get(name)
            if group is not None:
                group.applied, group.applied_by = -1, frozenset()
                for agent in group.agents.values():
                    agent.applied = -1

    def note_all_serve(self, engine: Group, version: int) -> None:
        """Record that all ranks of an engine serve a version of this run now; see `half_published`.

        If the version is newer than the published version, it is published now.
        """
        engine.version, engine.lineage = version, self.lineage
        self._forget_applied([engine.name])
        if version > self.published:
            self.publish(version, self.lineage)
        engine.move(*self._next_state(engine, EngineStatus.WAITING, ""))

    def group_of(self, name: str) -> Group | None:
        """Return the group with this name, or None."""
        return self._groups.get(name)

    def writable_engines(self) -> tuple[Group, ...]:
        """Return the engines that a round may write to: complete, not silent, not quarantined, and in none of the `holds`."""
        held = frozenset[Identity]().union(*(hold.engines for hold in self.holds.values()))
        return tuple(
            g
            for g in self.engines()
            if g.complete and not g.silent and not g.quarantined and not (g.identities & held)
        )

    def quarantine(self, engines: Iterable[Identity]) -> None:
        """Quarantine these engine processes, so that no round writes to them. Update the states of all engines.

        Also record processes that are not connected. If more than `MAX_QUARANTINED` processes are recorded, drop the
        oldest.
        """
        self._quarantine(engines)
        for group in self._groups.values():
            for agent in group.agents.values():
                agent.quarantined |= agent.identity in self._quarantined
            self._update_state(group)

    def _quarantine(self, engines: Iterable[Identity]) -> None:
        """Add processes to the record of quarantined processes. The caller updates the connected agents and engines."""
        self._quarantined |= dict.fromkeys(engines)
        while len(self._quarantined) > MAX_QUARANTINED:
            del self._quarantined[next(iter(self._quarantined))]

    def hold(self, trainer: Identity, round_id: RoundId, engines: frozenset[Identity]) -> None:
        """Record that a source has not answered the write command of a round.

        No round writes to `engines` until the source answers (`settle`), a new process replaces the source, or `release`
        is called.

        Args:
            trainer: process of the source: a trainer rank, or an engine rank in a catch-up or relay.
            round_id: round of the command.
            engines: engine processes whose memory the bytes may still reach.
        """
        self.holds[trainer] = _Hold(round_id, engines)

    def release(self, source: Identity) -> bool:
        """Drop the hold of a source whose process has ended; return whether there was a hold."""
        return self.holds.pop(source, None) is not None

    @property
    def held(self) -> dict[Identity, RoundId]:
        """Sources that have not answered a write command, each with the round of the command."""
        return {trainer: hold.round_id for trainer, hold in self.holds.items()}

    def settle(self, trainer: Identity, round_id: RoundId, seq: int, result: Result) -> bool:
        """End a hold if a late answer shows that the write of the hold has ended.

        Late answers arrive after the end of their round. The answer to the write command of a hold ends the hold. The
        answer may name links with an unknown outcome: quarantine the destinations of these links. If the whole command
        failed with an unknown outcome, no link is named: quarantine all engine processes of the hold. The answer to a probe
        also ends the hold: agents answer in order, so the write has ended or has never begun.

        Returns:
            Whether the answer has ended a hold or quarantined an engine.
        """
        if self._first_epoch is None or round_id[0] < self._first_epoch:
            return self._settle_for_predecessor(trainer, round_id, result)
        hold = self.holds.get(trainer)
        if hold is None or round_id < hold.round_id:
            return False
        if round_id > hold.round_id and seq != PROBE_SEQ:
            return False
        if seq == PROBE_SEQ:
            del self.holds[trainer]
            return True
        unknown = _unknown_of(result)
        if unknown is not None:
            self.quarantine(key for key in hold.engines if key[0] in unknown)
        elif not isinstance(result, Failure):
            return False
        elif result.kind is FailureKind.UNKNOWN:
            self.quarantine(hold.engines)
        del self.holds[trainer]
        return True

    def note_first_epoch(self, epoch: int) -> None:
        """Store `epoch`, the epoch of this controller's first bind command. Later calls do nothing.

        If an answer has a lower epoch, `settle` treats it as an answer to an earlier controller.
        """
        if self._first_epoch is None:
            self._first_epoch = epoch

    def _settle_for_predecessor(self, source: Identity, round_id: RoundId, result: Result) -> bool:
        """Quarantine the ranks that a write of an earlier controller may still reach.

        `result` is the answer to the write command. A rank that is not connected is quarantined when it connects again.
        A process with epoch 0 in its Hello is not quarantined, because it got no command of an earlier controller.

        Returns:
            Whether `result` reports ranks that the write may still reach.
        """
        writer = self.find(source[0])
        if writer is None or not 0 < round_id.epoch <= writer.hello.epoch:
            return False
        names = _unknown_of(result) or set()
        for name in names:
            agent = self.find(name)
            if agent is None:
                self.quarantine_on_return[name] = None
                if len(self.quarantine_on_return) > MAX_QUARANTINED:
                    del self.quarantine_on_return[next(iter(self.quarantine_on_return))]
            elif agent.hello.epoch:
                self.quarantine([agent.identity])
        return bool(names)

    @property
    def quarantined(self) -> frozenset[Identity]:
        """The newest `MAX_QUARANTINED` quarantined processes, connected or not."""
        return frozenset(self._quarantined)

    def describe(self) -> list[dict[str, object]]:
        """Return the engines as `/v1/status` shows them."""
        return [
            {
                "name": state.name,
                "url": state.url,
                "version": state.version,
                "ranks": len(group.agents),
                "world_size": group.world_size,
                "state": state.status,
                "routable": state.routable,
                "reason": state.reason,
                "registered": [
                    msgspec.structs.asdict(group.agents[rank].hello.registered)
                    for rank in sorted(group.agents)
                ],
            }
            for group, state in zip(self.engines(), self.states(), strict=True)
        ]

    def routable(self) -> tuple[EngineInfo, ...]:
        """Return the engines in the state `SERVING`."""
        engines = filter(_is_routable, self.engines())
        return tuple(EngineInfo(g.name, g.url, g.version) for g in engines)

    def states(self) -> tuple[EngineState, ...]:
        """Return the state of every engine with a connected rank, in the order of `engines`."""
        return tuple(
            EngineState(
                g.name,
                g.url,
                self._version_of(g),
                g.status,
                printable(self._reason_of(g)),
            )
            for g in self.engines()
        )

    def _reason_of(self, engine: Group) -> str:
        """Return all that is known about why an engine is in its state, or serves some values of an earlier version."""
        texts = (engine.reason or self._held_up(engine), engine.catch_up, engine.old_tensors)
        return "; ".join(filter(None, texts))

    def note_catch_up(self, name: str, text: str) -> bool:
        """Store `Group.catch_up` of an engine, and return whether it has changed. Do nothing for a group that is no engine."""
        group, text = self._groups.get(name), text[:MAX_REASON_LENGTH]
        if group is None or group.role is not Role.ENGINE or group.catch_up == text:
            return False
        group.catch_up = text
        return True

    def note_old_tensors(self, name: str, tensors: str) -> str:
        """Store that an engine may have old values of some tensors, and return the text that the status shows.

        Args:
            name: the engine.
            tensors: names of the tensors; empty after a catch-up, which has copied the present values.
        """
        engine = self._groups.get(name)
        if engine is None:
            return ""
        engine.old_tensors = (
            f"it may have old values of {tensors}: no trainer has these tensors, an earlier version changed them in other "
            "engines, and no copy from such an engine to this engine succeeded"
            if tensors
            else ""
        )
        return "; ".join(filter(None, (engine.old_tensors, engine.catch_up)))

    def _held_up(self, engine: Group) -> str:
        """Return a text that names the sources that have not answered a command to write to this engine.

        Return an empty string if the engine's state is not WAITING, or if all sources have answered.
        """
        if engine.status is not EngineStatus.WAITING:
            return ""
        sources = sorted(s[0] for s, hold in self.holds.items() if hold.engines & engine.identities)
        return (
            f"{', '.join(sources)}: no answer to a write command; bytes of the write may still arrive"
            if sources
            else ""
        )

    @property
    def unserved(self) -> str:
        """Error text if a version is published and no engine serves it; else empty."""
        if self.published < 0 or any(map(_is_routable, self.engines())):
            return ""
        return f"no engine serves version {self.published}"

    def _version_of(self, engine: Group) -> int:
        return engine.version if engine.lineage == self.lineage else -1

    def missing(self, num_trainers: int, engines: Iterable[str]) -> dict[str, str]:
        """Return the expected groups whose ranks are not all connected, for an error text.

        Args:
            num_trainers: expected number of trainer ranks.
            engines: names of the expected engines.

        Returns:
            "trainers" or engine name -> text. The text has the number of connected ranks. If this number is 0 for an
            engine, the text is only the engine's name. The text for trainers says "weights of trainers", because a trainer
            process connects only after it has built its model.
        """
        trainers = self.trainers()
        there = len(trainers.agents) if trainers is not None else 0
        found = {}
        if there < num_trainers:
            found["trainers"] = f"weights of trainers ({there} of {num_trainers} ranks)"
        groups = {group.name: group for group in self.engines()}
        for name in engines:
            if (group := groups.get(name)) is None or not group.agents:
                found[name] = name
            elif not group.complete:
                found[name] = f"{name} ({len(group.agents)} of {group.world_size} ranks)"
        return found

    def note_round(
        self,
        finish: Finish,
        binding: Binding,
        round_id: RoundId,
        lineage: str,
        late: Iterable[Replied],
    ) -> None:
        """Store the outcome of a round in the fleet.

        - Engines that published get the new version. `Agent.unwritten` keeps only the tensors that neither this nor
          an earlier version has written. The counts of late bindings become 0.
        - Every engine gets the state that follows from its outcome. Engines with the outcome QUARANTINED are quarantined.
        - Each source that has not answered a write command gets a hold on the engines that its bytes may still reach.

        The version and the state of an engine do not change if one of its processes was replaced during the round, because
        the new process took no part. They do not change either if the engine has lost a rank, unless its weights may be
        mixed.

        Args:
            finish: outcome of the round.
            binding: binding that the round used.
            round_id: id of the round.
            lineage: lineage of the run that the version belongs to.
            late: replies that arrived too late for the state machine (`RoundDriver.late`). If a source gets a hold, its
                late reply is passed to `settle`.
        """
        self._forget_applied(finish.engines)
        for name, outcome in finish.engines.items():
            bound = binding.identities_of(binding.engines[name])
            if outcome is EngineOutcome.QUARANTINED:
                self.quarantine(bound)
            group = self._groups.get(name)
            # New processes may have taken over the names of the group. They took no part in the round.
            if group is None or not group.identities <= bound:
                continue
            is_mixed = name in finish.mixed and outcome is not EngineOutcome.PUBLISHED
            # A rank of an engine with mixed weights may be disconnected now and come back, while the others stay paused.
            if group.identities != bound and not is_mixed:
                continue
            if name in finish.applied and lineage == self.lineage:
                group.applied, group.applied_by = finish.report.version, bound
            self._note_outcome(group, finish, binding.stays.get(name, frozenset()), lineage)
        incarnations = dict(binding.signature)
        for source, engines in finish.unsettled.items():
            reached = binding.identities_of(
                w for engine in engines for w in binding.engines[engine]
            )
            self.hold((source, incarnations[source]), round_id, reached)
        for reply in late:
            if reply.worker in finish.unsettled:
                identity = (reply.worker, incarnations[reply.worker])
                self.settle(identity, round_id, reply.seq, reply.result)

    def _note_outcome(
        self, engine: Group, finish: Finish, kept: frozenset[str], lineage: str
    ) -> None:
        """Store the outcome of a round for one engine whose processes took part in the round; see `note_round`.

        Args:
            engine: the engine.
            finish: outcome of the round.
            kept: tensors of the engine that the round did not write.
            lineage: lineage of the run that the version of the round belongs to.
        """
        name, agents = engine.name, engine.agents.values()
        now, reason = engine.status, finish.report.left_out.get(name, "")
        is_published = finish.engines[name] is EngineOutcome.PUBLISHED
        if is_published:
            engine.version, engine.lineage = finish.report.version, lineage
            now, engine.catch_up = EngineStatus.WAITING, ""
            for agent in agents:
                agent.num_late = 0
        elif name in finish.mixed:
            engine.version, now = -1, EngineStatus.MIXED_WEIGHTS
        elif now is not EngineStatus.MIXED_WEIGHTS:
            now = EngineStatus.LEFT_OUT
        if is_published or name in finish.applied:
            for agent in agents:
                agent.applied = engine.applied
                agent.unwritten = kept if agent.unwritten is None else agent.unwritten & kept
        engine.move(*self._next_state(engine, now, reason))


def signature_of(groups: Iterable[Group]) -> frozenset[Identity]:
    """Return all connected processes of these groups. A binding is valid for exactly these (`Binding.signature`)."""
    return frozenset[Identity]().union(*(group.identities for group in groups))


def _is_routable(engine: Group) -> bool:
    return engine.status is EngineStatus.SERVING


def _unknown_of(result: Result) -> set[str] | None:
    """Return the ranks in whose memory the bytes of a write may still arrive; None if `result` is not from a write."""
    match result:
        case Relayed():
            return set(result.unknown_to)
        case Written():
            return {x.destination for x in result.links if x.status is LinkStatus.UNKNOWN}
        case _:
            return None
