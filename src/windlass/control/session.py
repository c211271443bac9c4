"""The controller's end of the agents' sessions, and calls of many ranks at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import final

from aiohttp import web

from windlass.control.fleet import PROBE_SEQ, Agent
from windlass.control.messages import Command, Failure, Probe, Result
from windlass.errors import PeerTimeout, PeerUnreachable, WindlassError
from windlass.net.messages import Envelope, RoundId
from windlass.net.rpc import Session
from windlass.net.rpc_server import host_of
from windlass.net.sockets import SEND_DEADLINE_S


@final
class AgentSession(Session[Command | Probe, Result]):
    """One agent's connection. A process that connects again gets another one.

    Args:
        socket: of the connection. agent: at its other end.
        send_deadline_s: see `Session`.

    Attributes:
        host: address of the agent's host; empty for this one.
    """

    def __init__(
        self,
        socket: web.WebSocketResponse,
        agent: Agent,
        *,
        send_deadline_s: float = SEND_DEADLINE_S,
    ) -> None:
        super().__init__(agent.hello.worker, socket, send_deadline_s=send_deadline_s)
        self.agent = agent
        self.host = host_of(socket)

    async def probe(self, round_id: RoundId) -> None:
        """Ask for an answer to come after all that are due; see `Fleet.settle`."""
        try:
            await self.send(Envelope(*round_id, PROBE_SEQ, Probe()))
        except PeerUnreachable:
            return  # whoever comes back is asked again


@final
class RankCaller:
    """Calls ranks in one round, or in one binding; a rank that fails is a value, not an exception.

    Args:
        sessions: by worker name; a process that takes over a name later is not called.
        round_id: that the calls belong to: an answer counts only from who was asked, in it.
        first_seq: of the first call, above those of others who send commands of this round.

    Attributes:
        took_s: rank -> seconds until its last call was answered.
    """

    def __init__(
        self, sessions: Mapping[str, AgentSession], round_id: RoundId, first_seq: int = 1
    ) -> None:
        self._sessions, self._round_id, self._seq = dict(sessions), round_id, first_seq
        self.took_s: dict[str, float] = {}

    async def call(
        self, commands: Mapping[str, Command], deadline_s: float
    ) -> dict[str, Result | WindlassError]:
        """Send every rank its command; returns what each answered within `deadline_s`."""
        answers = await asyncio.gather(
            *(self._one(worker, command, deadline_s) for worker, command in commands.items())
        )
        return dict(zip(commands, answers, strict=True))

    async def _one(
        self, worker: str, command: Command, deadline_s: float
    ) -> Result | WindlassError:
        key = (*self._round_id, self._seq)
        self._seq += 1
        session = self._sessions.get(worker)
        if session is None:
            return PeerUnreachable(f"{worker}: not connected")
        began = time.perf_counter()
        try:
            async with asyncio.timeout(deadline_s):
                answer = await (await session.call(key, command))
            self.took_s[worker] = time.perf_counter() - began
            return answer  # noqa: TRY300
        except TimeoutError:
            return PeerTimeout(f"{worker}: no answer within {deadline_s} s")
        except PeerUnreachable as error:
            return error
        finally:
            session.forget(key)


def failures_of(
    results: Mapping[str, Result | WindlassError], kind: type[Result]
) -> dict[str, Result | WindlassError]:
    """What the ranks said that did not answer with `kind`."""
    return {worker: result for worker, result in results.items() if not isinstance(result, kind)}


def describe(result: Result | WindlassError) -> str:
    """Why a result is none, in one line."""
    if isinstance(result, Failure):
        return result.message
    return str(result) if isinstance(result, WindlassError) else f"answered {type(result).__name__}"
