"""Which record goes to which worker and engine next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from windlass.rollout.choice import PREFIX_TOKENS, EngineChoice
from windlass.rollout.directory import EngineDirectory
from windlass.rollout.handles import RolloutConfig
from windlass.rollout.lifecycle import Lifecycle
from windlass.rollout.links import Link
from windlass.rollout.messages import EngineTarget, RolloutTask
from windlass.rollout.staleness import OnStale, StalenessPolicy
from windlass.rollout.table import Record, State

__all__ = ["Dispatcher"]

MAX_DISPATCHES_PER_TURN = 256


class Dispatcher:
    """Pairs what is admitted with free workers and usable engines; synchronous.

    Args:
        engines: who may be given work.
        links: the workers, shared with the controller, which alone changes them.
        life: whose records are dispatched.
        policy: says what may be admitted.
        config: limits.
    """

    def __init__(
        self,
        engines: EngineDirectory,
        links: Mapping[str, Link],
        life: Lifecycle,
        policy: StalenessPolicy,
        config: RolloutConfig,
    ) -> None:
        self._engines = engines
        self._links = links
        self._life = life
        self._book = life.book
        self._policy = policy
        self._config = config
        self._choice = EngineChoice(config.affinity_slack)

    def turn(self) -> bool:
        """Dispatch what can be; True when there is more for the next turn of the loop."""
        engines = self.usable_engines()
        if not engines:
            return False
        self._unpark()
        slots = sum(link.free_slots for link in self._links.values())
        parked = False
        for _ in range(min(slots, MAX_DISPATCHES_PER_TURN)):
            record = self._next_record()
            if record is None:
                return parked
            if not self._dispatch(record, engines):
                # What stands behind it may still find a worker in the next turn.
                self._book.move(record, State.PARKED)
                parked = True
        return parked or slots > MAX_DISPATCHES_PER_TURN

    def _next_record(self) -> Record | None:
        if self._book.queued:
            return next(iter(self._book.queued.values()))
        if not self._book.waiting or self._policy.capacity() < 1:
            return None
        record = next(iter(self._book.waiting.values()))
        self._life.admit(record)
        return record

    def usable_engines(self) -> list[EngineTarget]:
        """Routable, and not so far behind the newest that its answers would be too old."""
        routable = self._engines.routable()
        newest = max((version for _, _, version in routable), default=-1)
        return [
            EngineTarget(name, url)
            for name, url, version in routable
            if version < 0 or newest - version <= self._policy.max_staleness
        ]

    def _unpark(self) -> None:
        """Queue as many parked records as workers that know their workflow have room."""
        for workflow, records in self._book.parked.items():
            room = sum(each.free_slots for each in self._links.values() if each.takes(workflow))
            for record in reversed(list(islice(records.values(), room))):
                self._book.move(record, State.QUEUED, front=True)

    def _dispatch(self, record: Record, engines: Sequence[EngineTarget]) -> bool:
        links = [link for link in self._links.values() if link.takes(record.workflow)]
        if not links:
            return False
        prefix = (
            (record.workflow, record.arguments)
            if record.workflow
            else record.prompt_ids[:PREFIX_TOKENS]
        )
        engine = self._choice.choose(
            engines, self._book.engine_load, hash(prefix), record.avoid_engine
        )
        link = min(links, key=lambda each: len(each.assigned) / each.hello.max_concurrent)
        deadline_s = self._life.start_attempt(record, engine.name, link.hello.name)
        link.enqueue(
            RolloutTask(
                task_id=record.task_id,
                attempt=record.attempt,
                prompt_ids=record.prompt_ids,
                sampling=record.sampling,
                engine=engine,
                deadline_s=deadline_s,
                on_abort=self._config.on_abort,
                partial=record.partial,
                workflow=record.workflow,
                arguments=record.arguments,
                max_staleness=None
                if self._policy.on_stale is OnStale.TRAIN
                else self._policy.max_staleness,
            )
        )
        return True
