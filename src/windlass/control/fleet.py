"""Who is connected, what they hold, and who may be given traffic. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from windlass.control.binding import Binding
from windlass.control.connect_messages import Hello, Identity
from windlass.control.engine_state import EngineState, EngineStatus
from windlass.control.journal import MAX_QUARANTINED
from windlass.control.messages import Failure, FailureKind, Result
from windlass.control.rounds import EngineOutcome, Finish, Replied
from windlass.errors import ManifestError, ProtocolError
from windlass.layout.manifest import Role, ShardManifest
from windlass.net.logs import printable
from windlass.net.messages import MustWait, RoundId, check_version
from windlass.transfer.bindings import LinkStatus, Relayed, Written
from windlass.transports.base import PeerEndpoint

MAX_REASON_LENGTH = 2000
"""Characters of what an engine says for a person that are kept."""
QUARANTINE_REASON = (
    "a write with an unknown outcome may still arrive in its memory; restart the engine"
)
"""Reason of a quarantined engine that no round left out."""
PROBE_SEQ = 1 << 30
"""Of probes: above the number of any command of a round."""

KEPT_JOBS = 1024
"""Trainer jobs that were replaced and are remembered: the newest."""


class EngineInfo(NamedTuple):
    """A routable engine: name, HTTP address, version it serves."""

    name: str
    url: str
    version: int


@dataclass(slots=True)
class Agent:
    """One connected rank.

    Attributes:
        quarantined: bytes of an unknown write may still land in its memory.
        not_resumed: why it does not generate although it was told to go on; else empty.
        silent: what it has not answered by a deadline; empty once it has answered a probe after that.
        num_late: how often it has not answered in time when it was bound, since it last served.
    """

    hello: Hello
    manifest: ShardManifest
    quarantined: bool = False
    not_resumed: str = ""
    silent: str = ""
    num_late: int = 0

    @property
    def identity(self) -> Identity:
        """Tells this process from its predecessors."""
        return self.hello.worker, self.hello.incarnation


@dataclass(frozen=True, slots=True)
class _Hold:
    """A write that its trainer has not answered: these processes may still be written to."""

    round_id: RoundId
    engines: frozenset[Identity]


@dataclass(slots=True)
class Group:
    """The ranks of one engine or of the trainer job.

    Attributes:
        version: served by every rank; -1 for none. lineage: of the run that published it.
        mixed_weights: live weights may be of two versions.
        left_out: why it does not serve the version of the last round that it was part of; else empty.
    """

    name: str
    role: Role
    world_size: int
    agents: dict[int, Agent]
    version: int = -1
    lineage: str = ""
    mixed_weights: bool = False
    left_out: str = ""

    @property
    def complete(self) -> bool:
        """Whether all ranks are connected."""
        return len(self.agents) == self.world_size

    @property
    def quarantined(self) -> bool:
        """Whether bytes of an unknown write may still land in the memory of a rank."""
        return any(agent.quarantined for agent in self.agents.values())

    @property
    def not_resumed(self) -> str:
        """Why it does not generate although it was told to go on; else empty."""
        return next((agent.not_resumed for agent in self.agents.values() if agent.not_resumed), "")

    @property
    def silent(self) -> str:
        """What a rank of it has not answered; empty if all answer."""
        return next((agent.silent for agent in self.agents.values() if agent.silent), "")

    @property
    def identities(self) -> frozenset[Identity]:
        """The processes behind the ranks."""
        return frozenset(agent.identity for agent in self.agents.values())

    @property
    def workers(self) -> tuple[str, ...]:
        """Worker names in rank order."""
        return tuple(self.agents[rank].hello.worker for rank in sorted(self.agents))

    @property
    def manifests(self) -> tuple[ShardManifest, ...]:
        """Manifests in rank order."""
        return tuple(self.agents[rank].manifest for rank in sorted(self.agents))

    @property
    def allow_unused(self) -> frozenset[str]:
        """Patterns of tensors that engines need not take, of all ranks of a trainer job."""
        return frozenset(p for agent in self.agents.values() for p in agent.hello.allow_unused)

    @property
    def keep(self) -> frozenset[str]:
        """Patterns of tensors that engines keep if no trainer has them, of all ranks of a trainer job."""
        return frozenset(p for agent in self.agents.values() for p in agent.hello.keep)

    @property
    def url(self) -> str:
        """Address of the engine; empty for trainers."""
        return self.agents[0].hello.url if 0 in self.agents else ""


class Fleet:
    """The registry. The coordinator is its only writer.

    Attributes:
        published: the version that the fleet serves; -1 before the first.
        published_by: processes of the trainers that published it.
        lineage: the run that it belongs to. A version of another run does not count here, whatever its number.
        job: the job of the trainer ranks that are connected, or were last; None before the first.
    """

    def __init__(
        self, quarantined: Iterable[Identity] = (), published: int = -1, lineage: str = ""
    ) -> None:
        self.published, self.lineage = published, lineage
        self.published_by: frozenset[Identity] = frozenset()
        self._groups: dict[str, Group] = {}
        self._agents: dict[str, Agent] = {}
        self._endpoints: set[PeerEndpoint] = set()
        self._num_of_job = Counter[str]()
        self._quarantined = dict.fromkeys(quarantined)
        self._quarantine_on_return: dict[str, None] = {}
        self._first_epoch: int | None = None
        self._holds: dict[Identity, _Hold] = {}
        self._num_trainers = 0
        self._trainer_group = ""
        self.job: str | None = None
        self._past_jobs: dict[str, None] = {}

    def find(self, worker: str) -> Agent | None:
        """The connected rank of that name."""
        return self._agents.get(worker)

    def admit(self, hello: Hello) -> Agent:
        """Register a rank.

        Raises:
            ProtocolError: another protocol version, a group whose world size or role differs, an
                engine with the name of the trainers' group, a manifest or an endpoint that is
                another's or is none, a trainer rank of a job that another one has replaced.
            MustWait: a process of this name, or ranks of another trainer job, are still connected. One
                that has died without a word is noticed by its silence.
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
                f"{hello.worker}: trainer group {trainers.name!r} is connected already; "
                f"got {hello.group!r}"
            )
        if hello.role is Role.ENGINE and hello.group == self._trainer_group:
            raise ProtocolError(
                f"{hello.worker}: {hello.group!r} is the name of the trainers' group"
            )
        if self.find(hello.worker) is not None:
            raise MustWait(
                f"worker name {hello.worker!r} is that of an agent that is still connected"
            )
        if any(offer.endpoint in self._endpoints for offer in hello.offers):
            raise ProtocolError(f"{hello.worker}: its endpoint is that of another agent")
        return self._insert(hello, manifest)

    @staticmethod
    def check(hello: Hello) -> ShardManifest:
        """What a Hello must be by itself; returns its manifest.

        Raises:
            ProtocolError: see `admit`.
        """
        check_version(hello.protocol_version, hello.worker)
        if not 0 <= hello.rank < hello.world_size:
            raise ProtocolError(
                f"{hello.worker}: rank must be in [0, world_size={hello.world_size}), got {hello.rank}"
            )
        manifest = ShardManifest.decode(hello.manifest)
        if (manifest.worker, manifest.role) != (hello.worker, hello.role):
            raise ManifestError(
                f"{hello.worker}: sent the manifest of {manifest.role} {manifest.worker}"
            )
        names = [offer.transport for offer in hello.offers]
        if not names or len(set(names)) < len(names):
            raise ProtocolError(
                f"{hello.worker}: offers must be one or more, of different transports, got {names}"
            )
        for offer in hello.offers:
            if offer.wire.transport != offer.transport:
                raise ProtocolError(
                    f"{hello.worker}: endpoint must be of transport {offer.wire.transport!r}, "
                    f"got {offer.transport!r}"
                )
        return manifest

    def replace_job(self, job: str) -> str:
        """Make `job` the trainers' job. Ranks of the one before are refused from now on; returns the reason."""
        reason = f"job {self.job!r} was replaced by job {job!r}"
        if self.job is not None:
            self._past_jobs[self.job] = None
            if len(self._past_jobs) > KEPT_JOBS:
                del self._past_jobs[next(iter(self._past_jobs))]
        self.job = job
        return reason

    def _check_job(self, hello: Hello) -> None:
        """All trainer ranks are of one start: others have weights of another past."""
        if hello.job in self._past_jobs:
            raise ProtocolError(
                f"{hello.worker}: job {hello.job!r} was replaced by job {self.job!r}"
            )
        group = self.trainers()
        # Of a job that was just replaced, too: its ranks are sent away one after the other.
        if group is not None and self._num_of_job.keys() - {hello.job}:
            agents = group.agents.values()
            rivals = [agent.hello for agent in agents if agent.hello.job != hello.job]
            raise MustWait(
                f"{hello.worker} of job {hello.job!r} must wait until the ranks of job "
                f"{rivals[0].job!r} have left: {', '.join(rival.worker for rival in rivals)}"
            )

    def _insert(self, hello: Hello, manifest: ShardManifest) -> Agent:
        group = self._groups.setdefault(
            hello.group, Group(hello.group, hello.role, hello.world_size, {})
        )
        if not group.agents:
            group.version, group.lineage = hello.served_version, hello.lineage
            group.mixed_weights, group.left_out = False, ""
        agent = Agent(hello, manifest, not_resumed=hello.not_resumed[:MAX_REASON_LENGTH])
        if hello.worker in self._quarantine_on_return:
            del self._quarantine_on_return[hello.worker]
            self._quarantine([agent.identity] if hello.epoch else [])
        agent.quarantined = agent.identity in self._quarantined
        # Another process has this name: its predecessors are gone, and so are their writes.
        for past in [k for k in self._holds if k[0] == hello.worker and k != agent.identity]:
            del self._holds[past]
        if hello.role is Role.TRAINER:
            self._trainer_group = hello.group
            self._num_of_job[hello.job] += 1
            self._note_mesh(hello)
            if hello.job != self.job and not hello.lineage:
                self.replace_job(hello.job)
            # Who has been connected before is not new: it takes a place that is free, and replaces nobody.
            self.job = hello.job
        for past in [k for k in self._quarantined if k[0] == hello.worker and k != agent.identity]:
            del self._quarantined[past]
        group.agents[hello.rank] = self._agents[hello.worker] = agent
        self._endpoints.update(offer.endpoint for offer in hello.offers)
        group.mixed_weights |= hello.mixed_weights
        group.version = min(group.version, hello.served_version)
        if group.lineage != hello.lineage:
            group.version = -1
        return agent

    def _note_mesh(self, hello: Hello) -> None:
        """Another mesh is another job: every rank of the one before is gone, not only namesakes."""
        if hello.world_size != self._num_trainers:
            for past in [k for k in self._holds if k[0].rpartition("/")[0] == hello.group]:
                del self._holds[past]
        self._num_trainers = hello.world_size

    def remove(self, agent: Agent) -> Group:
        """Forget a rank; its group stays known while it has other ranks."""
        hello = agent.hello
        group = self._groups[hello.group]
        if group.agents.pop(hello.rank, None) is not None:
            del self._agents[hello.worker]
            self._endpoints.difference_update(offer.endpoint for offer in hello.offers)
            if hello.role is Role.TRAINER:
                self._num_of_job -= Counter([hello.job])  # drops those that nobody is of
        if not group.agents:
            del self._groups[group.name]
        return group

    @property
    def num_trainer_ranks(self) -> int:
        """Number of ranks of the trainer job; 0 while none is connected."""
        trainers = self.trainers()
        return trainers.world_size if trainers is not None else 0

    def trainers(self) -> Group | None:
        """The trainer job, complete or not."""
        found = self._groups.get(self._trainer_group)
        return found if found is not None and found.role is Role.TRAINER else None

    def away(self) -> list[str]:
        """Return the names of trainer ranks that are not connected, in rank order."""
        trainers = self.trainers()
        if trainers is None:
            return []
        ranks = range(trainers.world_size)
        return [f"{trainers.name}/{rank}" for rank in ranks if rank not in trainers.agents]

    def engines(self) -> tuple[Group, ...]:
        """Engines with at least one rank, complete or not."""
        return tuple(g for g in self._groups.values() if g.role is Role.ENGINE)

    def group_of(self, name: str) -> Group | None:
        """The group called `name`."""
        return self._groups.get(name)

    def writable_engines(self) -> tuple[Group, ...]:
        """Engines that a round may include: complete, they answer, nothing in flight to them."""
        held = frozenset[Identity]().union(*(hold.engines for hold in self._holds.values()))
        return tuple(
            g
            for g in self.engines()
            if g.complete and not g.silent and not g.quarantined and not (g.identities & held)
        )

    def quarantine(self, engines: Iterable[Identity]) -> None:
        """These processes are not written again."""
        self._quarantine(engines)
        for group in self._groups.values():
            for agent in group.agents.values():
                agent.quarantined |= agent.identity in self._quarantined

    def _quarantine(self, engines: Iterable[Identity]) -> None:
        self._quarantined |= dict.fromkeys(engines)
        while len(self._quarantined) > MAX_QUARANTINED:
            del self._quarantined[next(iter(self._quarantined))]

    def hold(self, trainer: Identity, round_id: RoundId, engines: frozenset[Identity]) -> None:
        """`trainer` was told to write in that round and has not answered.

        Until it answers, or another process has its name, nothing else is written to `engines`.
        """
        self._holds[trainer] = _Hold(round_id, engines)

    def release(self, source: Identity) -> bool:
        """`source` has ended, and its write with it; whether anybody was held for it."""
        return self._holds.pop(source, None) is not None

    @property
    def held(self) -> dict[Identity, RoundId]:
        """Trainers that have not answered a write, and its round."""
        return {trainer: hold.round_id for trainer, hold in self._holds.items()}

    def settle(self, trainer: Identity, round_id: RoundId, seq: int, result: Result) -> bool:
        """A late answer of a trainer; true when it ended a hold.

        Links of unknown outcome quarantine their engines, as they would have in time. The answer to a
        probe says that the write was lost on its way: its own answer would have come before.
        """
        if self._first_epoch is None or round_id[0] < self._first_epoch:
            return self._settle_for_predecessor(trainer, round_id, result)
        hold = self._holds.get(trainer)
        if hold is None or round_id < hold.round_id:
            return False
        if round_id > hold.round_id and seq != PROBE_SEQ:
            return False
        if seq == PROBE_SEQ:
            del self._holds[trainer]
            return True
        unknown = _unknown_of(result)
        if unknown is not None:
            self.quarantine(key for key in hold.engines if key[0] in unknown)
        elif not isinstance(result, Failure):
            return False
        elif result.kind is FailureKind.UNKNOWN:
            self.quarantine(hold.engines)
        del self._holds[trainer]
        return True

    def bound_since(self, epoch: int) -> None:
        """Answers of earlier epochs are to a controller that is gone."""
        if self._first_epoch is None:
            self._first_epoch = epoch

    def _settle_for_predecessor(self, source: Identity, round_id: RoundId, result: Result) -> bool:
        """The unknown writes of a controller that did not live to hear of them.

        A process that was no part of its rounds, which its Hello says, wrote nothing in them and
        was not written.
        """
        writer = self.find(source[0])
        if writer is None or not 0 < round_id.epoch <= writer.hello.epoch:
            return False
        names = _unknown_of(result) or set()
        for name in names:
            agent = self.find(name)
            if agent is None:
                self._quarantine_on_return[name] = None
                if len(self._quarantine_on_return) > MAX_QUARANTINED:
                    del self._quarantine_on_return[next(iter(self._quarantine_on_return))]
            elif agent.hello.epoch:
                self.quarantine([agent.identity])
        return bool(names)

    @property
    def quarantined(self) -> frozenset[Identity]:
        """Processes that are not written again: the newest `MAX_QUARANTINED`."""
        return frozenset(self._quarantined)

    def describe(self) -> list[dict[str, object]]:
        """Return engines as `/v1/status` shows them."""
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
        """Return engines that may get traffic: they serve the published version and generate."""
        states = filter(lambda state: state.routable, self.states())
        return tuple(EngineInfo(state.name, state.url, state.version) for state in states)

    def states(self) -> tuple[EngineState, ...]:
        """Return the state of every engine with a connected rank, in the order of `engines`."""
        return tuple(self._state_of(group) for group in self.engines())

    def _state_of(self, group: Group) -> EngineState:
        """Return the state of an engine. Nothing else decides whether it gets traffic."""
        status, reason = EngineStatus.WAITING, ""
        if self.serves(group) and not group.not_resumed:
            status = EngineStatus.SERVING
        elif group.silent:
            status, reason = EngineStatus.SILENT, group.silent
        elif group.quarantined:
            status, reason = EngineStatus.QUARANTINED, group.left_out or QUARANTINE_REASON
        elif group.mixed_weights:
            status, reason = EngineStatus.MIXED_WEIGHTS, group.left_out
        elif group.left_out:
            status, reason = EngineStatus.LEFT_OUT, group.left_out
        elif group.not_resumed:
            status, reason = EngineStatus.NOT_RESUMED, group.not_resumed
        elif not group.complete:
            status = EngineStatus.INCOMPLETE
        return EngineState(
            group.name, group.url, self._version_of(group), status, printable(reason)
        )

    @property
    def unserved(self) -> str:
        """Reason why no engine can answer although a version is published; empty if an engine serves it."""
        if self.published < 0 or any(state.routable for state in self.states()):
            return ""
        return f"no engine serves version {self.published}"

    def _version_of(self, engine: Group) -> int:
        return engine.version if engine.lineage == self.lineage else -1

    def missing(self, num_trainers: int, engines: Iterable[str]) -> dict[str, str]:
        """Return the trainers and engines that lack ranks: by name, each with its connected ranks for a person.

        A rank connects with its weights, which a process has some time after its own start.
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

    def serves(self, engine: Group) -> bool:
        """Return whether an engine holds exactly the published version, and answers; none does before the first."""
        return (
            (engine.complete and not engine.mixed_weights and engine.version == self.published >= 0)
            and engine.lineage == self.lineage
            and not engine.silent
        )

    def note_round(
        self,
        finish: Finish,
        binding: Binding,
        round_id: RoundId,
        lineage: str,
        late: Iterable[Replied],
    ) -> None:
        """Note who serves what now, who may hold two versions, and whose bytes are still under way.

        `lineage` is of the run that the version belongs to; the round has not seen `late` replies.
        """
        for name, outcome in finish.engines.items():
            bound = binding.identities_of(binding.engines[name])
            if outcome is EngineOutcome.QUARANTINED:
                self.quarantine(bound)
            group = self._groups.get(name)
            # A process that came meanwhile under a name of the round took no part in it.
            if group is None or group.identities != bound:
                continue
            group.mixed_weights |= name in finish.mixed
            group.left_out = finish.report.left_out.get(name, "")
            if outcome is EngineOutcome.PUBLISHED:
                group.version, group.lineage = finish.report.version, lineage
                group.mixed_weights = False
                for agent in group.agents.values():
                    agent.num_late = 0
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


def signature_of(groups: Iterable[Group]) -> frozenset[Identity]:
    """Return the processes behind these groups. A binding holds only for the processes that it was made for."""
    return frozenset[Identity]().union(*(group.identities for group in groups))


def _unknown_of(result: Result) -> set[str] | None:
    """The ranks that a write of unknown outcome may still reach; None if it says nothing of writes."""
    match result:
        case Relayed():
            return set(result.unknown_to)
        case Written():
            return {x.destination for x in result.links if x.status is LinkStatus.UNKNOWN}
        case _:
            return None
