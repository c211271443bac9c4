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

from windlass.config import P2pBackend, UpdateBackend, UpdateMode
from windlass.errors import (
    ConfigError,
    PeerTimeout,
    PeerUnreachable,
    PlanError,
    RoundAborted,
    WindlassError,
)
from windlass.layout.manifest import Role, ShardManifest
from windlass.planning.plan import TransferPlan
from windlass.planning.relay import copy_part
from windlass.planning.replicated import Replicated, find_replicated
from windlass.transfer.bindings import DestinationBinding, GroupOffer
from windlass.transports.choice import LinkChoice, unreachable_reason
from windlass.updates.fleet import Group, Identity
from windlass.updates.link_transports import LinkTransports
from windlass.updates.messages import (
    Bound,
    Command,
    ConnectEngine,
    ConnectTrainer,
    Done,
    Failure,
    JoinGroups,
    Offered,
    Result,
)
from windlass.updates.relay_binding import RelayPlan, plan_relay
from windlass.updates.relay_messages import RelayOpened
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
    """A plan that every rank has bound to memory.

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
    trainers: tuple[str, ...]
    links: frozenset[tuple[str, str]]
    plan_digest: str
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
    epoch: int,
    round_number: int,
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
    transports = LinkTransports(pinned) if isinstance(backend, P2pBackend) else LinkTransports({})
    compiled = await asyncio.to_thread(
        _compile, planner, manifests, destinations, relay, transports
    )
    _refuse_wrong({engine_of[w]: why for w, why in compiled.unreached.items()}, len(engines))
    digest = compiled.digest
    caller = _Caller(pinned, (epoch, round_number), deadline_s)
    bound = await caller.call(
        {
            w: ConnectEngine(part, digest, mode, backend)
            for w, part in compiled.destination_parts.items()
        }
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
    if isinstance(backend, P2pBackend):
        refused = {
            w: f"{w}: must bind memory of its own endpoints and no other rank's"
            for w, binding in bindings.items()
            if not transports.owns(w, binding)
        }
    else:
        refused = _find_misaddressed(bindings.values(), workers, pinned)
    if refused:
        raise EnginesUnbound({engine_of[w]: why for w, why in refused.items()}, {}, "")
    confirmed = await caller.call(
        {
            w: ConnectTrainer(
                part,
                digest,
                transports.bindings_for(w, relay.direct(bindings.values())),
                backend,
                compiled.replicated_parts.get(w, b""),
            )
            for w, part in compiled.source_parts.items()
        }
    )
    offers = []
    for worker, result in confirmed.items():
        if isinstance(result, Offered):
            offers.append(result.offer)
        elif not isinstance(result, Done):
            raise RoundAborted(f"{worker} did not bind the plan: {_describe(result)}")
    await _form_groups(caller, offers, deadline_s)
    await _bind_relay(caller, relay, workers, bindings, engine_of, transports)
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
    places = {sessions[worker].host for worker in sources if worker in sessions}
    found = {}
    for binding in bindings:
        session = sessions.get(binding.worker)
        reason = unreachable_reason(binding.endpoint)
        if reason and session is not None and places - {session.host}:
            found[binding.worker] = f"{binding.worker}: {reason}"
    return found


async def _bind_relay(
    caller: _Caller,
    relay: RelayPlan,
    trainers: Sequence[str],
    bindings: Mapping[str, DestinationBinding],
    engine_of: Mapping[str, str],
    transports: LinkTransports,
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
    for worker, result in (await caller.call(relay.openings())).items():
        if isinstance(result, RelayOpened):
            addresses[worker] = result.address
        else:
            failed[worker] = result
    if failed:
        raise _unbound(failed, engine_of, "does not relay")
    connected = await caller.call(
        {
            w: msgspec.structs.replace(
                command, bindings=transports.bindings_for(w, command.bindings)
            )
            for w, command in relay.connections(trainers, bindings, addresses).items()
        }
    )
    for worker, result in connected.items():
        if not isinstance(result, Done):
            if worker not in engine_of:
                raise RoundAborted(f"{worker} did not bind the relay: {_describe(result)}")
            failed[worker] = result
    if failed:
        raise _unbound(failed, engine_of, "did not bind the relay")


def _unbound(
    failed: Mapping[str, Result | WindlassError], engine_of: Mapping[str, str], what: str
) -> EnginesUnbound:
    refusals, late, gone = {}, {}, ""
    for worker, result in failed.items():
        reason = f"{worker} {what}: {_describe(result)}"
        match result:
            case PeerTimeout():
                late[worker] = reason
            case WindlassError():
                gone = reason  # whoever has lost its connection is not in the fleet any more
            case _:
                refusals[engine_of[worker]] = reason
    return EnginesUnbound(refusals, late, gone)


async def _form_groups(caller: _Caller, offers: Sequence[GroupOffer], deadline_s: float) -> None:
    """All members at once, each in the order of the sources' names, so that none waits in a ring.

    Raises:
        RoundAborted: some member is not in. Who is to blame shows when the fleet is bound anew.
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
        }
    )
    failed = [
        f"{worker} did not join: {_describe(result)}"
        for worker, result in joined.items()
        if not isinstance(result, Done)
    ]
    if failed:
        raise RoundAborted("; ".join(failed))


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
    plan = plan.without_landing(transports.strided)
    parts = {m.worker: plan.for_destination(m.worker) for m in relay.planned(destinations)}
    parts |= {
        m.worker: copy_part(parts[copies[m.worker]], copies[m.worker], m)
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


class _Caller:
    """Calls many ranks at once; a rank that fails is a value, not an exception."""

    def __init__(
        self, sessions: Mapping[str, AgentSession], place: tuple[int, int], deadline_s: float
    ) -> None:
        self._sessions = sessions
        self._place = place
        self._deadline_s = deadline_s
        self._seq = 0

    async def call(self, commands: Mapping[str, Command]) -> dict[str, Result | WindlassError]:
        answers = await asyncio.gather(
            *(self._one(worker, command) for worker, command in commands.items())
        )
        return dict(zip(commands, answers, strict=True))

    async def _one(self, worker: str, command: Command) -> Result | WindlassError:
        self._seq += 1
        key = (*self._place, self._seq)
        session = self._sessions.get(worker)
        if session is None:
            return PeerUnreachable(f"{worker}: not connected")
        try:
            async with asyncio.timeout(self._deadline_s):
                return await (await session.call(key, command))
        except TimeoutError:
            session.forget(key)
            return PeerTimeout(f"{worker}: no answer within {self._deadline_s} s")
        except PeerUnreachable as error:
            return error


def _describe(result: Result | WindlassError) -> str:
    if isinstance(result, Failure):
        return result.message
    return str(result) if isinstance(result, WindlassError) else f"answered {type(result).__name__}"
