"""Calls of many ranks at once, each with the same deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import final

from windlass.errors import PeerTimeout, PeerUnreachable, WindlassError
from windlass.updates.messages import Command, Failure, Result, RoundId
from windlass.updates.session import AgentSession

__all__ = ["RankCaller", "describe", "failures_of"]


@final
class RankCaller:
    """Calls ranks in one round, or in one binding; a rank that fails is a value, not an exception.

    Args:
        sessions: by worker name; a process that takes over a name later is not called.
        round_id: that the calls belong to: an answer counts only from who was asked, in it.
        first_seq: of the first call, above those of others who send commands of this round.
    """

    def __init__(
        self, sessions: Mapping[str, AgentSession], round_id: RoundId, first_seq: int = 1
    ) -> None:
        self._sessions, self._round_id, self._seq = dict(sessions), round_id, first_seq

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
        try:
            async with asyncio.timeout(deadline_s):
                return await (await session.call(key, command))
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
