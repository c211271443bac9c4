"""Controller side of the agents' sessions, and calls to many ranks at once."""

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
    """Connection of one agent. A process that connects again gets a new session.

    Args:
        socket: socket of the connection.
        agent: the connected agent.
        send_deadline_s: see `Session`.

    Attributes:
        agent: as given.
        host: address of the agent's host; empty for the controller's host.
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
        """Send a probe. If the connection is lost, do nothing.

        The agent answers the probe after all earlier commands. `Fleet.settle` uses the answer.
        """
        try:
            await self.send(Envelope(*round_id, PROBE_SEQ, Probe()))
        except PeerUnreachable:
            # The controller sends another probe when the agent connects again.
            return


@final
class RankCaller:
    """Caller of many ranks at once, in one round or one binding. A failed call returns its error instead of raising it.

    Args:
        sessions: worker -> session. A process that connects later under the same name is never called.
        round_id: round id of the calls; an answer counts only from the called session and for this round.
        first_seq: sequence number of the first call, above the numbers of all other senders in this round.

    Attributes:
        took_s: rank -> seconds until it answered its last call.
    """

    def __init__(
        self, sessions: Mapping[str, AgentSession], round_id: RoundId, first_seq: int = 1
    ) -> None:
        self._sessions, self._round_id, self._seq = dict(sessions), round_id, first_seq
        self.took_s: dict[str, float] = {}

    async def call(
        self, commands: Mapping[str, Command], deadline_s: float
    ) -> dict[str, Result | WindlassError]:
        """Send every rank its command, and wait for all answers.

        Returns:
            Rank -> its answer, or an error: PeerTimeout if the rank did not answer within `deadline_s`, PeerUnreachable
            if it is not connected.
        """
        answers = await asyncio.gather(
            *(self._one(worker, command, deadline_s) for worker, command in commands.items())
        )
        return dict(zip(commands, answers, strict=True))

    async def _one(
        self, worker: str, command: Command, deadline_s: float
    ) -> Result | WindlassError:
        """Call one rank, and return its answer or the error; see `call`. Record in `took_s` how long an answer took."""
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
    """Return the results that are not of the expected type `kind`, including errors: rank -> result."""
    return {worker: result for worker, result in results.items() if not isinstance(result, kind)}


def describe(result: Result | WindlassError) -> str:
    """Return a one-line description of a failed or unexpected result."""
    if isinstance(result, Failure):
        return result.message
    return (
        str(result)
        if isinstance(result, WindlassError)
        else f"unexpected answer {type(result).__name__}"
    )
