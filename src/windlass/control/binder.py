"""Binding of the fleet: compile a plan from the manifests, send each rank its part, and exchange addresses.

The plan says which source writes which bytes to which engine rank. A link is the part from one source to one engine rank.

Binding pauses no engine. The controller binds after the fleet has changed, before the next round.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import final

import msgspec

from windlass.config import ControlConfig
from windlass.control.backend import Backend
from windlass.control.binding import Binding
from windlass.control.connect_messages import (
    Bound,
    ChangeLinks,
    ConnectEngine,
    ConnectTrainer,
    NotBound,
    Offered,
)
from windlass.control.donors import tensors_to_keep
from windlass.control.fleet import Group, signature_of
from windlass.control.group_messages import JoinGroups
from windlass.control.links import Link
from windlass.control.messages import Done, Failure, FailureKind, Result
from windlass.control.report import BindCost
from windlass.control.session import AgentSession, RankCaller, describe, failures_of
from windlass.control.turn_room import too_large
from windlass.errors import ConfigError, PeerTimeout, PlanError, RoundAborted, WindlassError
from windlass.layout.manifest import Role, ShardManifest
from windlass.net.messages import RoundId
from windlass.planning.plan import TransferPlan
from windlass.planning.planner import Planner
from windlass.planning.replicated import Replicated, find_replicated
from windlass.planning.unused import find_kept, find_unused, refuse_unused
from windlass.transfer.bindings import DestinationBinding, GroupOffer

NEWCOMERS_SPREAD = 4
"""Factor for the number of trainer ranks from which new engines read.

Several trainer ranks may hold the same boxes. New engines read from this fraction of these ranks: new engines / all
engines * NEWCOMERS_SPREAD. A factor of 1 would overload some of these ranks. If new engines read from all of them, there
would be a link from every rank to every engine.
"""
JOIN_SHARE = 0.8
"""Fraction of the bind deadline given to agents, so that they time out before the coordinator and report the reason."""


class EnginesUnbound(RoundAborted):
    """Some engines did not bind the plan.

    Attributes:
        refusals: engine -> reason why it cannot be part of the fleet.
        late: rank that did not answer by the deadline -> description of its failure.
        kept: binding that is still valid; None if all ranks must be bound again.
    """

    def __init__(
        self,
        refusals: Mapping[str, str],
        late: Mapping[str, str] | None = None,
        gone: str = "",
        kept: Binding | None = None,
    ) -> None:
        super().__init__("; ".join([*refusals.values(), *(late or {}).values()]) or gone)
        self.refusals, self.late = dict(refusals), dict(late or {})
        self.kept = kept


# --- the binding ---------------------------------------------------------------------------


def _least_loaded(
    sources: Sequence[ShardManifest], kept: Binding, num_engines: int
) -> tuple[ShardManifest, ...]:
    """Return the manifests of the trainer ranks from which new engines read; see `NEWCOMERS_SPREAD`.

    Trainer ranks with equal layouts hold the same boxes. Among such ranks, choose the ranks that send the fewest bytes.

    Args:
        sources: manifests of all trainer ranks.
        kept: binding of the engines that are not new, with the bytes that each trainer rank sends to them.
        num_engines: number of new engines.
    """
    sent, share = kept.sent_by, NEWCOMERS_SPREAD * num_engines / (num_engines + len(kept.engines))
    alike: dict[str, list[ShardManifest]] = {}
    for manifest in sources:
        alike.setdefault(manifest.layout_digest, []).append(manifest)
    chosen = {
        manifest.worker
        for found in alike.values()
        for manifest in sorted(found, key=lambda manifest: sent[manifest.worker])[
            : math.ceil(share * len(found))
        ]
    }
    return tuple(manifest for manifest in sources if manifest.worker in chosen)


@final
class FleetBinder:
    """Compile one plan and make every rank bind it.

    With `held`, only the changes are planned and bound: engines of that binding with unchanged processes get no command,
    and trainers keep their links to these engines.

    Args:
        trainers: group of the sources: the trainer ranks, or the ranks of an engine that sends its weights to another
            engine (a catch-up).
        engines: engines to bind.
        sessions: sessions of the ranks that are connected now. Ranks that join later are not part of the binding.
        planner: compiles the plan.
        config: mode, backend, and the deadline for every rank to bind.
        backend: backend of `config`.
        round_id: round id of the commands.
        held: binding that the fleet has now; None without one.
        unused: tensors of these trainers that no engine has had until now; None if no engine was bound before.
    """

    def __init__(
        self,
        *,
        trainers: Group,
        engines: Sequence[Group],
        sessions: Mapping[str, AgentSession],
        planner: Planner,
        config: ControlConfig,
        backend: Backend,
        round_id: RoundId,
        held: Binding | None = None,
        unused: frozenset[str] | None = None,
    ) -> None:
        self._all, self._of_trainers, self._unused = tuple(engines), trainers, unused
        kept = None if held is None else backend.kept_part(held, trainers, engines)
        if kept is not None:
            engines = [engine for engine in engines if engine.name not in kept.engines]
        self._signature = signature_of([trainers, *engines])
        self._trainers, self._sources = trainers.workers, trainers.manifests
        if kept is not None and engines:
            self._sources = _least_loaded(self._sources, kept, len(engines))
        self._engines = {engine.name: engine.workers for engine in engines}
        self._engine_of = {w: name for name, workers in self._engines.items() for w in workers}
        self._manifests = {engine.name: engine.manifests for engine in engines}
        self._sessions = {
            name: sessions[name] for name in (*self._trainers, *self._engine_of) if name in sessions
        }
        self._planner, self._config, self._backend = planner, config, backend
        self._deadline_s = config.deadlines.connect_s
        self._addresses = backend.addresses(self._sessions)
        # The plan leaves out the engine ranks in `LinkCopies.of`: other engines send them their bytes.
        self._copies = backend.copies(trainers, engines)
        self._caller = RankCaller(self._sessions, round_id)
        self._epoch, self._kept = round_id.epoch, kept

    async def bind(self) -> Binding:
        """Compile the plan, make all ranks bind it, and return the binding of the whole fleet.

        Raises:
            PlanError: the trainers' tensors cannot fill the engines' parameters, or a trainer tensor is in no engine and
                matches no pattern of `allow_unused`.
            ConfigError: no engine can be bound, for example because trainers and engines have no transport in common.
            EnginesUnbound: some engines did not bind; a new attempt can bind the other engines.
            RoundAborted: a trainer did not bind the plan, or did not answer by the deadline; or a collective group was
                not formed.
        """
        began = time.perf_counter()
        try:
            binding, to_engines, to_trainers = await asyncio.to_thread(self._compile)
            plan_s = time.perf_counter() - began
            bound = await self._bind_engines(to_engines)
        except EnginesUnbound as unbound:
            # No trainer got a command, so the previous binding is still valid.
            unbound.kept = self._kept
            raise
        offers = await self._bind_sources(self._addressed(to_trainers, bound, binding), binding)
        costs = {
            w: BindCost(self._sessions[w].agent.hello.registered.seconds, plan_s, bind_s)
            for w, bind_s in self._caller.took_s.items()
        }
        await self._form_groups(offers)
        await self._bind_copies(bound, binding)
        bound_in = dict.fromkeys(to_trainers, self._epoch)
        binding = replace(binding, bound_in=bound_in, costs=costs)
        return binding if self._kept is None else self._kept.joined(binding)

    def _compile(
        self,
    ) -> tuple[Binding, dict[str, ConnectEngine], Mapping[str, ConnectTrainer | ChangeLinks]]:
        """Compile the plan and the commands. Planning a large model takes seconds, so `bind` calls this in a thread.

        Returns:
            The new binding, the command to each engine rank, and the command to each source, still without addresses.

        Raises:
            PlanError, ConfigError, EnginesUnbound: see `bind`.
            ManifestError: a trainer tensor is in no engine, and no pattern of `allow_unused` matches its name.
        """
        if self._kept is not None and not self._engines:
            binding = Binding(signature=self._signature, engines={}, unused=self._kept.unused)
            return binding, {}, self._change_trainers(self._kept, (), {})
        if self._of_trainers.role is Role.TRAINER:
            hellos = (hello for engine in self._all for hello in engine.hellos)
            large = too_large(self._of_trainers.hellos, hellos)
            new = {name: why for name, why in large.items() if name in self._engines}
            self._refuse(new, self._kept)
        destinations = [m for manifests in self._manifests.values() for m in manifests]
        planned = [m for m in destinations if m.worker not in self._copies.of]
        stays = self._find_kept()
        plan = self._plan(planned, stays)
        unused = self._find_unused()
        links = {
            (plan.sources[link.src], plan.destinations[link.dst]): int(
                plan.ops.nbytes[link.start : link.stop].sum()
            )
            for link in plan.links()
        }
        links |= {
            (s, copy): 0
            for copy, of in self._copies.of.items()
            for s, to in tuple(links)
            if to == of
        }
        passed_on = {(w, child) for w, own in self._copies.children.items() for child in own}
        unreached = self._addresses.choose(links.keys() | passed_on)
        self._refuse({self._engine_of[w]: why for w, why in unreached.items()}, self._kept)
        plan = plan.without_staging(frozenset(self._addresses.strided))
        parts = self._backend.parts(plan, sending=False)
        for manifest in destinations:
            if (of := self._copies.of.get(manifest.worker)) is not None:
                parts[manifest.worker] = parts[of].for_replica(of, manifest)
        digest = plan.digest()
        binding = Binding(
            signature=self._signature,
            engines=self._engines,
            trainers=self._trainers,
            links=links,
            transports=self._addresses.choices,
            relay=self._copies.children,
            replicated=None if self._kept else self._find_replicated(unused),
            unused=unused,
            stays={engine: names for engine, names in stays.items() if names},
        )
        to_engines = {
            w: ConnectEngine(
                part.encode(),
                digest,
                self._config.mode,
                self._config.backend,
                w in self._copies.children,
                tuple(sorted(stays[self._engine_of[w]])),
            )
            for w, part in parts.items()
        }
        own = self._backend.parts(plan, sending=True)
        if self._kept is not None:
            return binding, to_engines, self._change_trainers(self._kept, links, own)
        held = {} if binding.replicated is None else binding.replicated.parts
        to_trainers = {
            w: ConnectTrainer(
                own[w].encode(),
                (),
                self._config.backend,
                held[w].tobytes() if w in held else b"",
            )
            for w in self._trainers
        }
        return binding, to_engines, to_trainers

    def _find_unused(self) -> frozenset[str]:
        """Return the trainer tensors that no engine has; an empty set if the sources are engines.

        A tensor counts as used if some engine has had it since these trainers connected, even if this engine is gone.
        Otherwise the loss of an engine could raise ManifestError and so stop the updates of all other engines.

        Raises:
            ManifestError: an unused tensor matches no pattern of `allow_unused`.
        """
        if self._of_trainers.role is not Role.TRAINER:
            return frozenset()
        manifests = self._of_trainers.manifests
        unused = find_unused(manifests, (m for engine in self._all for m in engine.manifests))
        if self._unused is not None:
            unused &= self._unused
        refuse_unused(unused, self._of_trainers.allow_unused, manifests)
        return unused

    def _find_replicated(self, unused: frozenset[str]) -> Replicated | None:
        """Return the boxes that several trainer ranks hold. Rounds compare the ranks' copies of these boxes.

        Boxes of `unused` tensors are left out. Return None in a catch-up: its sources are engine ranks,
        which have already verified their weights by digests.
        """
        of_trainers = all(manifest.role is Role.TRAINER for manifest in self._sources)
        return find_replicated(self._sources, unused) if of_trainers else None

    def _change_trainers(
        self, kept: Binding, links: Iterable[Link], parts: Mapping[str, TransferPlan]
    ) -> dict[str, ChangeLinks]:
        """Return a command for each trainer rank that gets or loses links; other trainer ranks get no command.

        Args:
            kept: part of the present binding that stays bound. The links in `kept.ended` must end.
            links: new links.
            parts: trainer rank -> part of the plan for its new links.
        """
        gone: dict[str, list[str]] = {}
        for source, destination in sorted(kept.ended):
            gone.setdefault(source, []).append(destination)
        sources = {source for source, _ in links}
        return {
            w: ChangeLinks(
                kept.bound_in[w],
                tuple(gone.get(w, ())),
                parts[w].encode() if w in sources else b"",
                (),
            )
            for w in self._trainers
            if w in gone or w in sources
        }

    def _addressed(
        self,
        commands: Mapping[str, ConnectTrainer | ChangeLinks],
        bound: Mapping[str, Bound],
        binding: Binding,
    ) -> dict[str, ConnectTrainer | ChangeLinks]:
        """Add the memory addresses of the destinations to the commands for sources. Return the new commands.

        Args:
            commands: source -> command without addresses.
            bound: engine rank -> its answer, with the addresses.
            binding: binding with the links. If a rank gets its bytes from another engine, links to this rank are left
                out.
        """
        direct: dict[str, list[DestinationBinding]] = {}
        for source, destination in binding.links:
            if destination not in self._copies.of and destination in bound:
                narrowed = self._addresses.narrow(source, bound[destination].binding)
                direct.setdefault(source, []).append(narrowed)
        return {
            worker: msgspec.structs.replace(command, bindings=tuple(direct.get(worker, ())))
            if command.plan
            else command
            for worker, command in commands.items()
        }

    def _find_kept(self) -> dict[str, frozenset[str]]:
        """Return engine -> tensors that the engine keeps.

        If trainers send, these are the tensors that no trainer has and that match a `keep` pattern. If another engine
        sends its weights (a catch-up), see `tensors_to_keep`.
        """
        if self._of_trainers.role is Role.ENGINE:
            return {
                engine: tensors_to_keep(self._of_trainers, manifests)
                for engine, manifests in self._manifests.items()
            }
        kept = dict.fromkeys(self._manifests, frozenset[str]())
        patterns = self._of_trainers.keep
        for engine, manifests in self._manifests.items() if patterns else ():
            # If `find_kept` raises, ignore the error here: the planner raises the same error for this engine later.
            with suppress(PlanError):
                kept[engine] = find_kept(self._sources, manifests, patterns)
        return kept

    def _plan(
        self, destinations: Sequence[ShardManifest], stays: Mapping[str, frozenset[str]]
    ) -> TransferPlan:
        """Compile the plan from the sources to `destinations`, without the tensors that engines keep (`stays`).

        Raises:
            EnginesUnbound: some engines do not fit the trainers. The error has a reason for each of these engines.
            PlanError: no engine fits the trainers; or every engine alone fits, but all engines together do not.
        """

        def written(manifest: ShardManifest) -> ShardManifest:
            return manifest.without(stays[self._engine_of[manifest.worker]])

        try:
            plan = self._planner(self._sources, [*map(written, destinations)])
            # An engine checks the plan against the digest of its whole manifest.
            return replace(plan, destination_digests=tuple(m.digest() for m in destinations))
        except PlanError:
            refused: dict[str, str] = {}
            for engine, manifests in self._manifests.items():
                try:
                    self._planner(self._sources, [*map(written, manifests)])
                except PlanError as error:
                    refused[engine] = f"{type(error).__name__}: {error}"
            if not refused or (len(refused) == len(self._engines) and self._kept is None):
                # If no engine fits the trainers, report the error to the trainers and keep the engines connected.
                raise
            raise EnginesUnbound(refused) from None

    async def _bind_engines(self, commands: Mapping[str, ConnectEngine]) -> dict[str, Bound]:
        """Send engine ranks their commands; return their answers, with the addresses of their memory and listeners.

        Raises:
            EnginesUnbound: an engine rank did not bind its part in time, or answered with addresses that the sources
                must not use.
        """
        bound: dict[str, Bound] = {}
        failed: dict[str, Result | WindlassError] = {}
        for worker, result in (await self._caller.call(commands, self._deadline_s)).items():
            command = commands[worker]
            if (
                isinstance(result, Bound)
                and result.plan_digest == command.plan_digest
                and (result.relay is not None or not command.relays)
            ):
                bound[worker] = result
            else:
                failed[worker] = result
        if failed:
            raise self._unbound(failed, "did not bind the plan")
        refused = self._addresses.find_refused(
            {worker: result.binding for worker, result in bound.items()}, self._trainers
        )
        if refused:
            raise EnginesUnbound({self._engine_of[w]: why for w, why in refused.items()})
        return bound

    async def _bind_sources(
        self, commands: Mapping[str, ConnectTrainer | ChangeLinks], binding: Binding
    ) -> list[GroupOffer]:
        """Send the sources their commands.

        Return the collective groups that the sources offer (none for one-sided writes).

        Raises:
            EnginesUnbound: a source cannot write to some engines.
            ConfigError: the sources can write to no engine.
            RoundAborted: a source did not bind the plan.
        """
        offers = []
        wrong: dict[str, str] = {}
        bound_in = dict.fromkeys(commands, self._epoch)
        for worker, result in (await self._caller.call(commands, self._deadline_s)).items():
            match result:
                case Offered():
                    offers.append(result.offer)
                case NotBound() if result.reasons.keys() <= self._engine_of.keys():
                    del bound_in[worker]
                    wrong |= {
                        self._engine_of[name]: f"{worker} cannot write to {name}: {why}"
                        for name, why in result.reasons.items()
                    }
                case Done():
                    pass
                case _:
                    raise RoundAborted(f"{worker} did not bind the plan: {describe(result)}")
        kept = self._kept
        if kept is not None:
            # Sources that refused are unchanged; all other sources now have the new links.
            bound_in = {**kept.bound_in, **bound_in}
            kept = replace(kept, bound_in=bound_in, ended=kept.ended | binding.links.keys())
        self._refuse(wrong, kept)
        return offers

    async def _form_groups(self, offers: Sequence[GroupOffer]) -> None:
        """Make all members join their collective groups, and wait until they have joined.

        Each member joins its groups in the order of the sources' names, so that the groups cannot deadlock.

        Raises:
            EnginesUnbound: ranks of a single engine failed to join, and all other failed members only timed out.
            RoundAborted: a member did not join, and the failure cannot be attributed to a single engine.
        """
        ordered = sorted(offers, key=lambda offer: offer.source)
        commands = {
            worker: JoinGroups(
                tuple(offer for offer in ordered if worker in offer.members),
                self._deadline_s * JOIN_SHARE,
            )
            for worker in dict.fromkeys(worker for offer in ordered for worker in offer.members)
        }
        failed = failures_of(await self._caller.call(commands, self._deadline_s), Done)
        to_blame = {
            worker: result
            for worker, result in failed.items()
            if not (isinstance(result, Failure) and result.kind is FailureKind.TIMED_OUT)
        }
        engines = {self._engine_of.get(worker) for worker in to_blame}
        if len(engines) == 1 and None not in engines:
            raise self._unbound(to_blame, "did not join")
        if failed:
            reasons = (f"{w} did not join: {describe(r)}" for w, r in failed.items())
            raise RoundAborted("; ".join(reasons))

    async def _bind_copies(self, bound: Mapping[str, Bound], binding: Binding) -> None:
        """Make engine ranks and sources bind the links between engines, if the backend has such links.

        Raises:
            EnginesUnbound: an engine rank did not bind the links.
            RoundAborted: a source did not bind the links.
        """
        commands = self._copies.commands(binding.links, bound, self._addresses.narrow)
        failed = failures_of(await self._caller.call(commands, self._deadline_s), Done)
        sources = {w: result for w, result in failed.items() if w not in self._engine_of}
        for worker, result in sources.items():
            raise RoundAborted(f"{worker} did not bind the plan: {describe(result)}")
        if failed:
            raise self._unbound(failed, "did not bind the links between engines")

    def _refuse(self, wrong: Mapping[str, str], kept: Binding | None) -> None:
        """Check that `wrong` (engine -> reason) is empty. `kept` is the binding of all engines that are not in `wrong`.

        Raises:
            EnginesUnbound: some engines cannot be bound.
            ConfigError: no engine can be bound.
        """
        if wrong and len(wrong) == len(self._engines) and self._kept is None:
            raise ConfigError("; ".join(wrong.values()))
        if wrong:
            raise EnginesUnbound(wrong, kept=kept)

    def _unbound(self, failed: Mapping[str, Result | WindlassError], what: str) -> EnginesUnbound:
        """Return the error for engine ranks whose call failed. `what`: text for the failure, such as "did not join".

        The error has a reason for each engine that must be refused, and for each rank that did not answer in time. If all
        failed ranks have lost their connections, the error's text names one of these ranks.
        """
        refusals, late, gone = {}, {}, ""
        for worker, result in failed.items():
            reason = f"{worker} {what}: {describe(result)}"
            match result:
                case PeerTimeout():
                    late[worker] = reason
                case WindlassError():
                    # The rank has lost its connection, so it is not in the fleet any more.
                    gone = reason
                case _:
                    refusals[self._engine_of[worker]] = reason
        return EnginesUnbound(refusals, late, gone)
