"""The first clock: manifests in, plan compiled, memory registered, addresses exchanged.

Nothing is paused here. Runs when the fleet has changed, before the next round needs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from windlass.config import UpdateMode
from windlass.control.fleet import Group
from windlass.control.messages import Bound, Command, ConnectEngine, ConnectTrainer, Done, Result
from windlass.control.session import AgentSession
from windlass.errors import PeerTimeout, PeerUnreachable, PlanError, RoundAborted, WindlassError
from windlass.layout.manifest import ShardManifest
from windlass.planning.plan import TransferPlan

__all__ = ["Binding", "Planner", "bind_fleet", "find_unplannable"]

Planner = Callable[[Sequence[ShardManifest], Sequence[ShardManifest]], TransferPlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A plan that every rank has bound to memory.

    Attributes:
        signature: the incarnations it holds for; another fleet needs another binding.
        engines: engine -> workers. trainers: workers. links: (source, destination) pairs.
    """

    signature: frozenset[tuple[str, str]]
    engines: Mapping[str, tuple[str, ...]]
    trainers: tuple[str, ...]
    links: frozenset[tuple[str, str]]
    plan_digest: str


def signature_of(groups: Sequence[Group]) -> frozenset[tuple[str, str]]:
    """What a binding depends on: every rank's name and incarnation."""
    return frozenset(
        (agent.hello.worker, agent.hello.incarnation)
        for group in groups
        for agent in group.agents.values()
    )


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
    epoch: int,
    round_number: int,
    deadline_s: float,
) -> Binding:
    """Compile the plan and have every rank bind it.

    Raises:
        PlanError: the manifests cannot be served.
        RoundAborted: a rank answered with a failure, or another plan digest.
        PeerTimeout: a rank did not answer within `deadline_s`.
        PeerUnreachable: a rank went away.
    """
    destinations = [manifest for engine in engines for manifest in engine.manifests]
    signature = signature_of([trainers, *engines])
    plan = await asyncio.to_thread(planner, trainers.manifests, destinations)
    digest = plan.digest()
    seq = 0

    async def call(commands: Mapping[str, Command]) -> dict[str, Result]:
        nonlocal seq
        futures = {}
        for worker, command in commands.items():
            seq += 1
            futures[worker] = await sessions[worker].call((epoch, round_number, seq), command)
        return await _gather(futures, deadline_s)

    bound = await call(
        {
            m.worker: ConnectEngine(plan.for_destination(m.worker).encode(), digest, mode)
            for m in destinations
        }
    )
    bindings = []
    for worker, result in bound.items():
        if not isinstance(result, Bound) or result.plan_digest != digest:
            raise RoundAborted(f"{worker} did not bind the plan: {result}")
        bindings.append(result.binding)
    confirmed = await call(
        {
            worker: ConnectTrainer(plan.for_source(worker).encode(), digest, tuple(bindings))
            for worker in trainers.workers
        }
    )
    for worker, result in confirmed.items():
        if not isinstance(result, Done):
            raise RoundAborted(f"{worker} did not bind the plan: {result}")
    return Binding(
        signature=signature,
        engines={engine.name: engine.workers for engine in engines},
        trainers=trainers.workers,
        links=frozenset(
            (plan.sources[link.src], plan.destinations[link.dst]) for link in plan.links()
        ),
        plan_digest=digest,
    )


async def _gather(
    futures: Mapping[str, asyncio.Future[Result]], deadline_s: float
) -> dict[str, Result]:
    done, late = await asyncio.wait(futures.values(), timeout=deadline_s)
    if late:
        names = [worker for worker, future in futures.items() if future in late]
        raise PeerTimeout(f"connect: no answer from {', '.join(names)} within {deadline_s} s")
    for future in done:
        error = future.exception()
        if isinstance(error, WindlassError):
            raise PeerUnreachable(str(error)) from error
    return {worker: future.result() for worker, future in futures.items()}
