"""Bugs to plant in the product. The suite must find each of them.

A bug replaces a piece of text in a function of the product. If a change of the product removes the
piece, planting fails: update this list then.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from windlass.control import binder, binding, link_transports, members
from windlass.control.connector import Connector
from windlass.control.driver import RoundDriver
from windlass.control.engine_agent import EngineAgent
from windlass.control.fleet import Fleet
from windlass.control.links import LinkLedger
from windlass.control.members import Members
from windlass.control.recovery import CatchUps
from windlass.control.rounds import RoundMachine
from windlass.control.run import Run
from windlass.net import rpc_server, server
from windlass.net.access import AccessGate
from windlass.net.listener import Listener
from windlass.net.reply_store import ReplyStore
from windlass.rollout.controller import RolloutController
from windlass.rollout.lifecycle import Lifecycle
from windlass.rollout.pool import WorkerPool
from windlass.transfer.destination import Destination
from windlass.transfer.sender import Sender


@dataclass(frozen=True, slots=True)
class Bug:
    """A bug that replaces `old` by `new` in `owner.function`.

    `seed` is the first seed that finds the bug, as `chaos_run.py --bugs --search` reports; -1 if
    none is known.
    """

    name: str
    owner: Any
    function: str
    old: str
    new: str
    seed: int = -1

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Plant the bug in the product inside the block."""
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
        "if call_id in self._replies:",
        "if False:",
        7,
    ),
    Bug(
        "an engine with mixed weights is routed",
        Fleet,
        "_note_outcome",
        "engine.version, now = -1, EngineStatus.MIXED_WEIGHTS",
        "now = EngineStatus.MIXED_WEIGHTS",
        6,
    ),
    Bug(
        "no resume after an abort",
        EngineAgent,
        "_abort",
        "self._end_round(deadline_s)",
        "pass",
        3,
    ),
    Bug(
        "a version that is not newer is accepted",
        Run,
        "refusal",
        "if version <= newest:",
        "if False:",
        0,
    ),
    Bug(
        "a write of unknown outcome counts as failed",
        Sender,
        "failed",
        "failed_link(name, reason, status)",
        "failed_link(name, reason, LinkStatus.FAILED)",
        8,
    ),
    Bug(
        "published before it is on disk",
        Run,
        "reserve",
        "self.record(JournalKind.PUBLISHING, version)",
        "pass",
        0,
    ),
    Bug(
        "an engine believes that its weights are whole while they are written",
        EngineAgent,
        "_carry_out",
        "self._open_to_writes |= self._mode is UpdateMode.IN_PLACE or self._num_ranks > 1",
        "pass",
        56,
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
        Fleet,
        "_note_outcome",
        "elif name in finish.mixed:",
        "elif False:",
        6,
    ),
    Bug(
        "a lost engine does not end its part of the round",
        RoundMachine,
        "_drop",
        "self._late[seq] = self.pending.pop(seq)",
        "pass",
        10,
    ),
    Bug(
        "a lost write holds its engines for ever",
        CatchUps,
        "bring_up_soon",
        "self._tasks.spawn(self._members.probe_held())",
        "pass",
        6,
    ),
    Bug(
        "a round goes on though the disk is full",
        RoundDriver,
        "_carry_out",
        "return await self._carry_out(self._next(blocked))",
        "raise",
        52,
    ),
    Bug(
        "an agent whose frame was garbled is sent away for good",
        rpc_server,
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
        "engines that stay bound are not written",
        binding.Binding,
        "joined",
        "links={**self.links, **new.links}",
        "links=new.links",
        0,
    ),
    Bug(
        "buffered answers do not grow stale",
        Lifecycle,
        "drop_stale",
        "if r.outcome and not r.is_returned and throws_away(r.outcome.versions())",
        "if False",
        3,
    ),
)

INTRUDER_BUGS = (
    Bug("strangers stay", Listener, "_drop", "transport.abort()", "pass", 100013),
    Bug(
        "there may be any number of strangers",
        Listener,
        "_on_accepted",
        "if len(self._strangers) >= self._max_strangers or _takes_reserved(key):",
        "if False:",
        100013,
    ),
    Bug(
        "any token will do",
        AccessGate,
        "role_of",
        "hmac.compare_digest(given, expected) and found is None",
        "found is None",
        100005,
    ),
    Bug("a token opens every route", server, "refusal_of", "if role in roles:", "if True:", 100005),
    Bug(
        "a session need not begin",
        rpc_server,
        "_first_frame",
        "socket.receive(timeout=deadline_s)",
        "socket.receive()",
        100005,
    ),
    Bug(
        "a name may forge lines of a log",
        members,
        "check_name",
        "not name.isprintable()",
        "False",
        100014,
    ),
    Bug(
        "a name may be of any length",
        members,
        "check_name",
        "len(name.encode()) > MAX_NAME_NBYTES",
        "False",
        100014,
    ),
    Bug(
        "a rank has any name",
        members,
        "check_first",
        'if first.worker != f"{first.group}/{first.rank}":',
        "if False:",
        100014,
    ),
    Bug(
        "an engine's token makes trainers",
        members,
        "_check_role",
        "access.value != role.value",
        "False",
        100092,
    ),
    Bug(
        "an engine's URL leads anywhere",
        members,
        "check_published",
        'check_url(hello.url, f"{hello.worker}: url", may_be_plain=True)',
        "pass",
        100014,
    ),
    Bug(
        "a Hello has numbers of any size",
        Run,
        "check_past",
        "if not least <= value <= MAX_COUNT:",
        "if False:",
        100014,
    ),
    Bug(
        "a Hello names any epoch",
        Run,
        "check_past",
        "if hello.received_epoch > self.round_id.epoch + MAX_EPOCHS_AHEAD:",
        "if False:",
        100014,
    ),
    Bug(
        "trainers of another run train this one",
        Run,
        "check_past",
        "if hello.role is Role.TRAINER and not ours and self.journal.is_kept:",
        "if False:",
        100004,
    ),
    Bug(
        "an engine says what is published",
        Run,
        "note_joined",
        "version <= self.reserved and not hello.mixed_weights",
        "not hello.mixed_weights",
        100001,
    ),
    Bug(
        "refused engines are remembered without bound",
        Members,
        "_note_refusal",
        "if len(self.refusals) > KEPT_REFUSALS:",
        "if False:",
        100002,
    ),
    Bug(
        "one that never binds is asked for ever",
        Connector,
        "exclude_unbound",
        "if session.agent.num_late > MAX_LATE:",
        "if False:",
        100375,
    ),
    Bug(
        "versions of another run count",
        Fleet,
        "_is_current",
        "and engine.lineage == self.lineage",
        "and True",
        100025,
    ),
    Bug(
        "the ranks of an engine may be of two runs",
        Fleet,
        "_insert",
        "if group.lineage != hello.lineage:",
        "if False:",
        100071,
    ),
    Bug(
        "two starts of a job train together",
        Fleet,
        "_check_job",
        "if group is not None and self._num_of_job.keys() - {hello.job}:",
        "if False:",
        100022,
    ),
    Bug(
        "two ranks have one endpoint",
        Fleet,
        "admit",
        "if any(offer.endpoint in self._endpoints for offer in hello.offers):",
        "if False:",
        100014,
    ),
    Bug(
        "two processes have one name",
        Fleet,
        "admit",
        "if self.find(hello.worker) is not None:",
        "if False:",
        100014,
    ),
    Bug(
        "an engine takes the trainers' name",
        Fleet,
        "admit",
        "if hello.role is Role.ENGINE and hello.group == self._trainer_group:",
        "if False:",
        101100,
    ),
    Bug(
        "an engine may bind the memory of another",
        link_transports.LinkTransports,
        "owns",
        "return binding.worker == worker and owners <= {o.endpoint for o in self._offers(worker)}",
        "return True",
        100005,
    ),
    Bug(
        "what one engine binds ends the binding for all",
        binder.FleetBinder,
        "_bind_sources",
        "case NotBound() if result.reasons.keys() <= self._engine_of.keys():",
        "case NotBound() if False:",
        100010,
    ),
    Bug(
        "anybody answers any call",
        RoundMachine,
        "handle",
        "if command is None or worker != event.worker:",
        "if command is None:",
        100008,
    ),
    Bug(
        "an answer of another type will do",
        RoundMachine,
        "_on_result",
        "if not self._links.verify(worker, result.mismatched):",
        "if False:",
        100000,
    ),
    Bug(
        "an engine that never verifies ends the round",
        RoundMachine,
        "_write_again",
        "if self._config.mode is UpdateMode.STAGED and len(incomplete) == len(self.engines.active):",
        "if self._config.mode is UpdateMode.STAGED:",
        100011,
    ),
    Bug(
        "an answer of an earlier round counts",
        RoundDriver,
        "on_reply",
        "if reply.round_id == self.round_id and self.sessions.get(worker) is session:",
        "if self.sessions.get(worker) is session:",
        100294,
    ),
    Bug(
        "anybody reports writes to a predecessor",
        Fleet,
        "_settle_for_predecessor",
        "if writer is None or not 0 < round_id.epoch <= writer.hello.epoch:",
        "if writer is None:",
        100027,
    ),
    Bug(
        "an outcome of another attempt counts",
        Lifecycle,
        "find_running",
        "or record.attempt != attempt",
        "",
        100000,
    ),
    Bug(
        "a worker that was replaced comes back",
        WorkerPool,
        "register",
        "if (hello.name, hello.incarnation) in self._replaced:",
        "if False:",
        100006,
    ),
)
"""Bugs that intruders, other runs and misfits reveal, from seed `ATTACKED_FROM` on."""

RARE_BUGS = (
    Bug(
        "a command of a past round is carried out",
        ReplyStore,
        "lookup",
        "if round_id < self.newest or",
        "if False or",
        307,
    ),
    Bug(
        "what came over a lost connection is carried out after it",
        ReplyStore,
        "void",
        "self._void = self.newest_received",
        "pass",
        15,
    ),
)
"""Bugs behind another defence. About one schedule in a hundred finds them; only
`chaos_run.py --bugs` searches for them."""

ALL_BUGS = (*BUGS, *INTRUDER_BUGS, *RARE_BUGS)
