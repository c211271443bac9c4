"""Engine ranks that were told to go on and could not are told again, until they do.

Their weights are whole and of one version: nothing is wrong with them but that the engine's own
server was away, say, when its agent asked. Meanwhile they get no traffic. What ends this: the rank
goes on, a round pauses it (and has it go on itself), it leaves, or `MAX_ATTEMPTS` are over.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol, final

from windlass.config import PhaseDeadlines
from windlass.errors import PeerUnreachable
from windlass.layout.manifest import Role
from windlass.updates.client import WELCOME_SEQ
from windlass.updates.fleet import PROBE_SEQ, Agent, Identity
from windlass.updates.messages import Abort, Done, Envelope, Reply, Result
from windlass.updates.relay_round import time_to_act_s
from windlass.updates.retries import MAX_ATTEMPTS, Timers, backoff_s
from windlass.updates.session import AgentSession

__all__ = ["ResumeOwner", "Resumes"]

_log = logging.getLogger(__name__)


class ResumeOwner(Protocol):
    """Who runs the rounds; it calls `Resumes.tell` when none runs, and runs none meanwhile."""

    def new_place(self) -> tuple[int, int]:
        """An (epoch, round) above all that were used."""
        ...

    def settle_soon(self) -> None:
        """Have `Resumes.tell` called as soon as no round runs."""
        ...

    def note_given_up(self, worker: str, reason: str) -> None:
        """Put on record that this rank rests, and is not told again."""
        ...


@final
class Resumes:
    """In the coordinator's loop.

    Args:
        owner: runs the rounds. sessions: of the agents that are connected.
        deadlines: an engine has gone on within both that for going on and that for a pause, which
            would wait behind it.
    """

    def __init__(
        self, owner: ResumeOwner, sessions: Mapping[str, AgentSession], deadlines: PhaseDeadlines
    ) -> None:
        self._owner, self._sessions = owner, sessions
        self._deadline_s = time_to_act_s(min(deadlines.publish_s, deadlines.pause_s))
        self._num_told: dict[Identity, int] = {}
        self._due: set[Identity] = set()
        self._timers = Timers()

    def heard(self, agent: Agent, reply: Reply[Result]) -> bool:
        """Take a reply; returns whether the rank may be given traffic, or no more, because of it.

        Every `Done` of an engine rank says how it is when the command is over, but for the answer
        to a probe, which asks nothing of the engine, and for what it says again after a welcome.
        """
        result = reply.result
        if not isinstance(result, Done) or agent.hello.role is not Role.ENGINE:
            return False
        is_repeated = (reply.epoch, reply.round) <= (agent.hello.epoch, agent.hello.round)
        if reply.seq == PROBE_SEQ or (is_repeated and reply.seq != WELCOME_SEQ):
            return False
        before, agent.at_rest = agent.at_rest, result.at_rest
        if not agent.at_rest:
            self.forget(agent.identity)
        elif agent.identity not in self._num_told:
            _log.warning("%s did not go on: %s", agent.hello.worker, agent.at_rest)
            self._num_told[agent.identity] = 0
            self._wait(agent)
        return bool(before) is not bool(agent.at_rest)

    async def tell(self) -> None:
        """Tell those whose time has come. No round runs, so that none of them is paused for one."""
        due, self._due = self._due, set()
        for identity in sorted(due):
            session = self._sessions.get(identity[0])
            if session is None or session.agent.identity != identity:
                continue
            self._num_told[identity] += 1
            again = Abort(f"go on: {session.agent.at_rest}", deadline_s=self._deadline_s)
            try:
                await session.send(Envelope(*self._owner.new_place(), 1, again))
            except PeerUnreachable as error:
                _log.info("%s", error)  # a process that comes back says how it is
            if identity in self._num_told:  # it has not gone on or left meanwhile
                self._wait(session.agent)

    def forget(self, identity: Identity) -> None:
        """It goes on, or it has left. Idempotent."""
        if self._num_told.pop(identity, None) is not None:
            self._due.discard(identity)
            self._timers.cancel(identity[0])

    def close(self) -> None:
        """Nobody is told any more. Idempotent."""
        self._timers.close()

    def _wait(self, agent: Agent) -> None:
        delay_s = backoff_s(self._num_told[agent.identity] + 1)
        self._timers.call_later(agent.hello.worker, delay_s, lambda: self._again(agent))

    def _again(self, agent: Agent) -> None:
        if self._num_told[agent.identity] < MAX_ATTEMPTS:
            self._due.add(agent.identity)
            self._owner.settle_soon()
            return
        worker, reason = agent.hello.worker, agent.at_rest
        _log.error("%s rests until the next round: told %s times: %s", worker, MAX_ATTEMPTS, reason)
        self._owner.note_given_up(worker, reason)
