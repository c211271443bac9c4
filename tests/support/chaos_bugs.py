"""Bugs to be planted in the product, each of which the suite must find.

A bug is a function of the product with a piece of its text replaced. If the product changes so
that the piece is no longer there, planting fails, and the list has to be kept up.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from windlass.net import rpc
from windlass.net.rpc_client import ReplyStore
from windlass.rollout.controller import RolloutController
from windlass.rollout.lifecycle import Lifecycle
from windlass.transfer.destination import Destination
from windlass.transfer.sender import Sender
from windlass.updates.coordinator import Coordinator
from windlass.updates.driver import RoundDriver
from windlass.updates.engine_agent import EngineAgent
from windlass.updates.fleet import Fleet
from windlass.updates.rounds import LinkLedger, RoundMachine


@dataclass(frozen=True, slots=True)
class Bug:
    """In `owner.function`, `old` becomes `new`.

    `seed` is the first that finds it, as `chaos_run.py --bugs --search` said; -1 for none yet.
    """

    name: str
    owner: Any
    function: str
    old: str
    new: str
    seed: int = -1

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Inside, the product has the bug."""
        original = inspect.getattr_static(self.owner, self.function)
        is_property = isinstance(original, property)
        plain = original.fget if is_property else original
        source = textwrap.dedent(inspect.getsource(plain))
        assert source.count(self.old) == 1, f"{self.name}: {self.old!r} must be there once"
        space: dict[str, Any] = {}
        exec(
            compile(source.replace(self.old, self.new), f"<bug {self.name}>", "exec"),
            plain.__globals__,
            space,
        )
        mutated = space[self.function]
        assert isinstance(mutated, FunctionType | property)
        setattr(self.owner, self.function, mutated)
        try:
            yield
        finally:
            setattr(self.owner, self.function, original)


BUGS = (
    Bug(
        "publish without verify",
        LinkLedger,
        "unverified",
        "d in self._links_to and d not in self._verified",
        "False",
        9,
    ),
    Bug("every digest is right", Destination, "verify", "found.get(s) != digest", "False", 9),
    Bug(
        "a repeated command is carried out again",
        ReplyStore,
        "lookup",
        "if key in self._replies:",
        "if False:",
        7,
    ),
    Bug(
        "an engine with mixed weights is routed",
        Fleet,
        "serving",
        "g.complete and not g.mixed_weights and g.version",
        "g.complete and g.version",
        6,
    ),
    Bug(
        "no resume after an abort",
        EngineAgent,
        "_abort",
        "self._go_on_if_whole(deadline_s)",
        "pass",
        3,
    ),
    Bug(
        "a version that is not newer is accepted",
        Coordinator,
        "refusal",
        "if version <= newest:",
        "if False:",
        0,
    ),
    Bug(
        "a write of unknown outcome counts as failed",
        Sender,
        "_failed",
        "LinkOutcome(name, status,",
        "LinkOutcome(name, LinkStatus.FAILED if status is LinkStatus.UNKNOWN else status,",
        8,
    ),
    Bug(
        "published before it is on disk",
        Coordinator,
        "_on_phase",
        "self._journal_round(JournalKind.PUBLISHING, version, ())",
        "pass",
        0,
    ),
    Bug(
        "an engine believes that its weights are whole while they are written",
        EngineAgent,
        "mixed_weights",
        "return self._mixed_weights or self._open_to_writes",
        "return self._mixed_weights",
        29,
    ),
    Bug(
        "a quarantined engine is written again",
        Fleet,
        "writable_engines",
        "not g.quarantined",
        "True",
        8,
    ),
    Bug(
        "mixed engines are forgotten at the end of a round",
        Coordinator,
        "_note_outcomes",
        "group.mixed_weights |= name in finish.mixed",
        "pass",
        6,
    ),
    Bug(
        "a lost engine does not end its part of the round",
        RoundMachine,
        "_drop",
        "self._pending = {s: sent for s, sent in self._pending.items() if sent[0] not in gone}",
        "pass",
        10,
    ),
    Bug(
        "a lost write holds its engines for ever",
        Coordinator,
        "_settle",
        "await probe_held(self._fleet, self._sessions)",
        "pass",
        6,
    ),
    Bug(
        "a round goes on though the disk is full",
        RoundDriver,
        "_carry_out",
        "return await self._carry_out(self._machine.handle(blocked))",
        "raise",
        52,
    ),
    Bug(
        "an agent whose frame was garbled is sent away for good",
        rpc,
        "_decode",
        'raise Garbled(f"{what}: {error}") from error',
        "raise",
        12,
    ),
    Bug(
        "rollouts of a lost worker are forgotten",
        RolloutController,
        "_try_again",
        "if record is not None:",
        "if False:",
        6,
    ),
    Bug(
        "staleness is not checked when an answer arrives",
        Lifecycle,
        "end_attempt",
        "if self._policy.throws_away(outcome.versions()):",
        "if False:",
        2101,
    ),
    Bug(
        "buffered answers do not grow stale",
        Lifecycle,
        "drop_stale",
        "r for r in buffered if r.outcome and throws_away(r.outcome.versions())",
        "r for r in ()",
        3,
    ),
)

RARE_BUGS = (
    Bug(
        "a command of a past round is carried out",
        ReplyStore,
        "lookup",
        "if round_id < self._newest or",
        "if False or",
        5,
    ),
    Bug(
        "what came over a lost connection is carried out after it",
        ReplyStore,
        "void",
        "self._void = self._received",
        "pass",
        47,
    ),
)
"""Behind another defence: about one schedule in a hundred finds them, so a search by hand does."""
