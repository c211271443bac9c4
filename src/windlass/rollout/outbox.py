"""Outcomes that a worker keeps until the controller has them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec

from windlass.errors import ProtocolError
from windlass.rollout.messages import CompletionAck, RolloutOutcome

__all__ = ["Outbox"]

# Decoded, so many stay in a core's cache; and the controller's loop is free again soon.
MAX_OUTCOMES_PER_POST = 64
MAX_TOKENS_PER_POST = 1 << 20
FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0

Send = Callable[[tuple[RolloutOutcome, ...]], Awaitable[CompletionAck]]


class Outbox:
    """Delivers outcomes at least once, in order of `seq`, one batch in flight.

    An outcome is sent at once when nothing is in flight; those that end meanwhile form
    the next batch. So the batch grows with the load and nobody waits for a timer.

    Args:
        send: delivers a batch and returns what may be forgotten.
        unregistered: called when the controller does not know this worker.
    """

    def __init__(self, send: Send, unregistered: Callable[[], None]) -> None:
        self._send = send
        self._unregistered = unregistered
        self._kept: OrderedDict[int, RolloutOutcome] = OrderedDict()
        self._next_seq = 1
        self._work = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def add(self, outcome: RolloutOutcome) -> None:
        """Keep an outcome; its `seq` is set here."""
        self._kept[self._next_seq] = msgspec.structs.replace(outcome, seq=self._next_seq)
        self._next_seq += 1
        self._empty.clear()
        self._work.set()

    def since(self, seq: int) -> tuple[RolloutOutcome, ...]:
        """What is kept after `seq`."""
        return tuple(outcome for number, outcome in self._kept.items() if number > seq)

    async def drained(self) -> None:
        """Return once everything was acknowledged."""
        await self._empty.wait()

    async def run(self) -> None:
        """Deliver until cancelled."""
        backoff = FIRST_BACKOFF_S
        while True:
            await self._work.wait()
            self._work.clear()
            while self._kept:
                try:
                    ack = await self._send(self._next_batch())
                except (aiohttp.ClientError, TimeoutError, OSError, ProtocolError):
                    # The outcomes stay; whether the controller is gone for good is decided
                    # by the worker's registration, not here.
                    await asyncio.sleep(backoff)
                    backoff = min(2 * backoff, MAX_BACKOFF_S)
                    continue
                backoff = FIRST_BACKOFF_S
                for seq in ack.seqs:
                    self._kept.pop(seq, None)
                if not ack.registered:
                    self._unregistered()
            self._empty.set()

    def _next_batch(self) -> tuple[RolloutOutcome, ...]:
        batch: list[RolloutOutcome] = []
        num_tokens = 0
        for outcome in self._kept.values():
            num_tokens += outcome.num_tokens()
            if batch and num_tokens > MAX_TOKENS_PER_POST:
                break
            batch.append(outcome)
            if len(batch) == MAX_OUTCOMES_PER_POST:
                break
        return tuple(batch)
