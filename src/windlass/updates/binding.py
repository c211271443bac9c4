"""The first clock: manifests in, plan compiled, memory registered, addresses exchanged.

Nothing is paused here. Runs when the fleet has changed, before the next round needs it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from windlass.config import UpdateBackend, UpdateMode
from windlass.errors import (
    ConfigError,
    PeerTimeout,
    PlanError,
    RoundAborted,
    WindlassError,
)
from windlass.layout.manifest import Role, ShardManifest
from windlass.planning.plan import TransferPlan
from windlass.planning.replicated import Replicated, find_replicated
from windlass.transfer.bindings import DestinationBinding, GroupOffer
from windlass.transports.choice import LinkChoice, unreachable_reason
from windlass.updates.calls import RankCaller, describe, failures_of
from windlass.updates.fleet import Group, Identity
from windlass.updates.link_transports import LinkTransports
from windlass.updates.messages import (
    Bound,
    ConnectEngine,
    ConnectTrainer,
    Done,
    Failure,
    FailureKind,
    JoinGroups,
    NotBound,
    Offered,
    RelayOpened,
    Result,
    RoundId,
)
from windlass.updates.relay_binding import RelayPlan, plan_relay
from windlass.updates.session import AgentSession

__all__ = ["Binding", "EnginesUnbound", "Planner", "bind_fleet", "find_unplannable", "signature_of"]

JOIN_SHARE = 0.8
"""Of the time for binding: members give up before the coordinator does, and can say why."""

Planner = Callable[[Sequence[ShardManifest], Sequence[ShardManifest]], TransferPlan]


class EnginesUnbound(RoundAborted):
    """Some engines did not bind the plan.

    Attributes:
        refusals: engine -> what a rank of it answered.
        late: rank that did not answer in time -> what is to be said of that.
    """

    def __init__(self, refusals: Mapping[str, str], late: Mapping[str, str], gone: str) -> None:
        super().__init__("; ".join([*refusals.values(), *late.values()]) or gone)
        self.refusals, self.late = dict(refusals), dict(late)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A plan that every rank has bound to memory; none where the trainer drives the update.

    Attributes:
        signature: the incarnations it holds for; another fleet needs another binding.
        engines: engine -> workers. trainers: workers. links: (source, destination) pairs.
        transports: (source, destination) -> what that link takes, and why; empty where bytes do not
            travel by one-sided writes.
        relay: member of a relay group -> those that it passes on to.
        replicated: what several of the trainers hold; None where engines are the source.
        sent_nbytes: by the trainer that sends most.
    """

    signature: frozenset[Identity]
    engines: Mapping[str, tuple[str, ...]]
    trainers: tuple[str, ...] = ()
    links: frozenset[tuple[str, str]] = frozenset()
    plan_digest: str = ""
    transports: Mapping[tuple[str, str], LinkChoice] = field(default_factory=dict)
    relay: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    replicated: Replicated | None = None
    sent_nbytes: int = 0

    @property
    def links_by_transport(self) -> dict[str, int]:
        """Name of a transport -> links that take it."""
        return dict(Counter(choice.transport for choice in self.transports.values()))

    def describe_links(self) -> list[dict[str, str]]:
        """Links and their transports as `/v1/status` shows them."""
        return [
            {"source": s, "destination": d, "transport": c.transport, "reason": c.reason}
            for (s, d), c in self.transports.items()
        ]

    def identities_of(self, engine: str) -> frozenset[Identity]:
        """The processes behind the ranks of an engine."""
        return self._identities(self.engines[engine])

    @property
    def sources(self) -> frozenset[Identity]:
        """The processes behind the trainers."""
        return self._identities(self.trainers)

    def _identities(self, workers: Sequence[str]) -> frozenset[Identity]:
        return frozenset(identity for identity in self.signature if identity[0] in workers)


def signature_of(groups: Sequence[Group]) -> frozenset[Identity]:
    """What a binding depends on: every rank's name and incarnation."""
    return frozenset[Identity]().union(*(group.identities for group in groups))


async def find_unplannable(
    trainers: Group, engines: Sequence[Group], planner: Planner
) -> dict[str, str]:
    """Engines whose manifests cannot be served by these trainers: name -> why."""
    found: dict[str, str] = {}
    for engine in engines:
        try:
            await asyncio.to_thread(planner, trainers.manifests, engine.manifests)
        except PlanError as error:
            found[engine.name] = f"{type(error).__name__}: {error}"
    return found


async def bind_fleet(
    *,
    trainers: Group,
    engines: Sequence[Group],
    sessions: Mapping[str, AgentSession],
    planner: Planner,
    mode: UpdateMode,
    backend: UpdateBackend,
    round_id: RoundId,
    deadline_s: float,
) -> Binding:
    """Compile the plan and have every rank bind it.

    Raises:
        PlanError: the manifests cannot be served.
        ConfigError: no engine has a transport in common with the trainers that reaches it.
        EnginesUnbound: some engines did not bind; the others would.
        RoundAborted: a trainer did not bind the plan, or did not answer within `deadline_s`.
    """
    destinations = [manifest for engine in engines for manifest in engine.manifests]
    relay = plan_relay(trainers, engines, backend)
    engine_of = {worker: engine.name for engine in engines for worker in engine.workers}
    # Taken before the first await: whoever joins meanwhile is no part of this binding.
    signature, workers = signature_of([trainers, *engines]), trainers.workers
    engine_workers = {engine.name: engine.workers for engine in engines}
    manifests = trainers.manifests
    pinned = {name: sessions[name] for name in (*workers, *engine_of) if name in sessions}
    transports = LinkTransports(pinned) if backend.traits.one_sided else LinkTransports({})
    compiled = await asyncio.to_thread(
        _compile, planner, manifests, destinations, relay, transports
    )
    _refuse_wrong({engine_of[w]: why for w, why in compiled.unreached.items()}, len(engines))
    digest = compiled.digest
    caller = RankCaller(pinned, round_id)
    bound = await caller.call(
        {
            w: ConnectEngine(part, digest, mode, backend)
            for w, part in compiled.destination_parts.items()
        },
        deadline_s,
    )
    bindings: dict[str, DestinationBinding] = {}
    failed: dict[str, Result | WindlassError] = {}
    for worker, result in bound.items():
        if isinstance(result, Bound) and result.plan_digest == digest:
            bindings[worker] = result.binding
        else:
            failed[worker] = result
    if failed:
        raise _unbound(failed, engine_of, "did not bind the plan")
    if backend.traits.one_sided:
        refused = {
            w: f"{w}: must bind memory of its own endpoints and no other rank's"
            for w, binding in bindings.items()
            if not transports.owns(w, binding)
        }
    else:
        refused = _find_misaddressed(bindings.values(), workers, pinned)
    if refused:
        raise EnginesUnbound({engine_of[w]: why for w, why in refused.items()}, {}, "")
    parts = {
        w: ConnectTrainer(
            part,
            digest,
            transports.bindings_for(w, relay.direct(bindings.values())),
            backend,
            compiled.replicated_parts.get(w, b""),
        )
        for w, part in compiled.source_parts.items()
    }
    offers = await _bind_sources(caller, parts, engine_of, deadline_s)
    await _form_groups(caller, offers, engine_of, deadline_s)
    await _bind_relay(caller, relay, workers, bindings, engine_of, transports, deadline_s)
    return Binding(
        signature=signature,
        engines=engine_workers,
        trainers=workers,
        links=compiled.links,
        transports=transports.choices,
        plan_digest=digest,
        relay=relay.children,
        replicated=compiled.replicated,
        sent_nbytes=compiled.sent_nbytes,
    )


async def _bind_sources(
    caller: RankCaller,
    commands: Mapping[str, ConnectTrainer],
    engine_of: Mapping[str, str],
    deadline_s: float,
) -> list[GroupOffer]:
    """Tell the sources where to write; returns the groups that they offer.

    Raises:
        EnginesUnbound: what some engines offer cannot be written.
        ConfigError: what all of them offer cannot be.
        RoundAborted: a source did not bind the plan.
    """
    offers = []
    wrong: dict[str, str] = {}
    for worker, result in (await caller.call(commands, deadline_s)).items():
        match result:
            case Offered():
                offers.append(result.offer)
            case NotBound() if result.reasons.keys() <= engine_of.keys():
                wrong |= {
                    engine_of[name]: f"{worker} cannot write to {name}: {why}"
                    for name, why in result.reasons.items()
                }
            case Done():
                pass
            case _:
                raise RoundAborted(f"{worker} did not bind the plan: {describe(result)}")
    _refuse_wrong(wrong, len(set(engine_of.values())))
    return offers


def _refuse_wrong(wrong: Mapping[str, str], num_engines: int) -> None:
    if wrong and len(wrong) == num_engines:
        raise ConfigError("; ".join(wrong.values()))
    if wrong:
        raise EnginesUnbound(wrong, {}, "")


def _find_misaddressed(
    bindings: Iterable[DestinationBinding],
    sources: Sequence[str],
    sessions: Mapping[str, AgentSession],
) -> dict[str, str]:
    """Engine ranks whose address would lead a source on another host to itself: worker -> why."""
    hosts = {sessions[worker].host for worker in sources if worker in sessions}
    found = {}
    for binding in bindings:
        session = sessions.get(binding.worker)
        reason = unreachable_reason(binding.endpoint)
        if reason and session is not None and hosts - {session.host}:
            found[binding.worker] = f"{binding.worker}: {reason}"
    return found


async def _bind_relay(
    caller: RankCaller,
    relay: RelayPlan,
    trainers: Sequence[str],
    bindings: Mapping[str, DestinationBinding],
    engine_of: Mapping[str, str],
    transports: LinkTransports,
    deadline_s: float,
) -> None:
    """Have members listen, then tell everybody who passes on to whom.

    Raises:
        EnginesUnbound: a member does not take part.
        RoundAborted: a trainer does not.
    """
    if not relay.groups:
        return
    addresses = {}
    failed: dict[str, Result | WindlassError] = {}
    for worker, result in (await caller.call(relay.openings(), deadline_s)).items():
        if isinstance(result, RelayOpened):
            addresses[worker] = result.address
        else:
            failed[worker] = result
    if failed:
        raise _unbound(failed, engine_of, "does not relay")
    commands = {
        w: msgspec.structs.replace(command, bindings=transports.bindings_for(w, command.bindings))
        for w, command in relay.connections(trainers, bindings, addresses).items()
    }
    failed = failures_of(await caller.call(commands, deadline_s), Done)
    for worker, result in failed.items():
        if worker not in engine_of:
            raise RoundAborted(f"{worker} did not bind the relay: {describe(result)}")
    if failed:
        raise _unbound(failed, engine_of, "did not bind the relay")


def _unbound(
    failed: Mapping[str, Result | WindlassError], engine_of: Mapping[str, str], what: str
) -> EnginesUnbound:
    refusals, late, gone = {}, {}, ""
    for worker, result in failed.items():
        reason = f"{worker} {what}: {describe(result)}"
        match result:
            case PeerTimeout():
                late[worker] = reason
            case WindlassError():
                gone = reason  # whoever has lost its connection is not in the fleet any more
            case _:
                refusals[engine_of[worker]] = reason
    return EnginesUnbound(refusals, late, gone)


async def _form_groups(
    caller: RankCaller,
    offers: Sequence[GroupOffer],
    engine_of: Mapping[str, str],
    deadline_s: float,
) -> None:
    """All members at once, each in the order of the sources' names, so that none waits in a ring.

    Raises:
        EnginesUnbound: one engine is not in, and nobody else is to blame.
        RoundAborted: others are not.
    """
    ordered = sorted(offers, key=lambda offer: offer.source)
    members = dict.fromkeys(worker for offer in ordered for worker in offer.members)
    joined = await caller.call(
        {
            worker: JoinGroups(
                tuple(offer for offer in ordered if worker in offer.members),
                deadline_s * JOIN_SHARE,
            )
            for worker in members
        },
        deadline_s,
    )
    failed = failures_of(joined, Done)
    to_blame = {
        worker: result
        for worker, result in failed.items()
        if not (isinstance(result, Failure) and result.kind is FailureKind.TIMED_OUT)
    }
    engines = {engine_of.get(worker) for worker in to_blame}
    if len(engines) == 1 and None not in engines:
        raise _unbound(to_blame, engine_of, "did not join")
    if failed:
        raise RoundAborted("; ".join(f"{w} did not join: {describe(r)}" for w, r in failed.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiled:
    digest: str
    source_parts: dict[str, bytes]
    destination_parts: dict[str, bytes]
    links: frozenset[tuple[str, str]]
    unreached: dict[str, str]
    replicated: Replicated | None
    replicated_parts: dict[str, bytes]
    sent_nbytes: int


def _compile(
    planner: Planner,
    sources: Sequence[ShardManifest],
    destinations: Sequence[ShardManifest],
    relay: RelayPlan,
    transports: LinkTransports,
) -> _Compiled:
    """Everything that takes long with a large model; runs outside the loop."""
    plan = planner(sources, relay.planned(destinations))
    copies = relay.copies
    links = {(plan.sources[link.src], plan.destinations[link.dst]) for link in plan.links()}
    links |= {(source, copy) for copy, of in copies.items() for source, to in links if to == of}
    passed_on = {(member, c) for member, below in relay.children.items() for c in below}
    unreached = transports.choose(links | passed_on)
    plan = plan.without_staging(transports.strided)
    parts = {m.worker: plan.for_destination(m.worker) for m in relay.planned(destinations)}
    parts |= {
        m.worker: parts[copies[m.worker]].for_replica(copies[m.worker], m)
        for m in destinations
        if m.worker in copies
    }
    # Engines verify what they serve: they may hold copies of a tensor that they use differently.
    of_trainers = all(manifest.role is Role.TRAINER for manifest in sources)
    replicated = find_replicated(sources) if of_trainers else None
    held = {} if replicated is None else replicated.parts
    return _Compiled(
        replicated=replicated,
        replicated_parts={worker: part.encode() for worker, part in held.items()},
        sent_nbytes=int(np.bincount(plan.ops.src, plan.ops.nbytes, 1).max()),
        digest=plan.digest(),
        source_parts={m.worker: plan.for_source(m.worker).encode() for m in sources},
        destination_parts={worker: part.encode() for worker, part in parts.items()},
        links=frozenset(links),
        unreached=unreached,
    )
