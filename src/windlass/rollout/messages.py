"""What travels between controller, rollout workers and trainer ranks, as frozen msgspec types.

Bodies are msgpack over HTTP. A rollout keeps its `task_id` for life; every time that it is
handed to a worker it gets a new `attempt`. (task_id, attempt) identifies one piece of
work: a worker runs it at most once, and the controller uses at most one outcome of it.

What exists once per rollout is hidden from the garbage collector (`gc=False`): it holds only
plain values and cannot be part of a cycle, and walking tens of thousands of them takes longer
than a completion may.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import chain
from typing import TypeVar

import msgspec

from windlass.errors import DECODE_ERRORS, ConfigError, ProtocolError

__all__ = [
    "CONTENT_TYPE",
    "LOCAL_WORKER",
    "AttemptKey",
    "CancelBatch",
    "CompletionAck",
    "CompletionBatch",
    "EngineTarget",
    "OnAbort",
    "OutcomeStatus",
    "Partial",
    "RolloutOutcome",
    "RolloutTask",
    "SamplingParams",
    "TaskBatch",
    "TasksAccepted",
    "TrainingBatch",
    "TrainingSample",
    "Turn",
    "Work",
    "WorkerHello",
    "WorkerSnapshot",
    "WorkerWelcome",
    "decode",
    "encode",
]

CONTENT_TYPE = "application/msgpack"
LOCAL_WORKER = "controller"
"""Name of the worker that is the controller's own event loop."""


class OnAbort(StrEnum):
    """What a worker does when a weight update ends a generation early.

    CONTINUE: send prompt and partial tokens again; the labels say which version made which token.
    RETRY: throw the partial tokens away and start from the prompt.
    """

    CONTINUE = "continue"
    RETRY = "retry"


class OutcomeStatus(StrEnum):
    """How an attempt ended.

    ACCEPTED: tokens are there.
    REJECTED: the worker found the tokens unusable; the rollout is submitted again.
    STALE: the worker stopped it, because its tokens are further apart than `max_staleness` allows.
    ERROR: the engine or the worker failed; the rollout is tried elsewhere.
    CANCELLED: the controller asked for it.
    """

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    STALE = "stale"
    ERROR = "error"
    CANCELLED = "cancelled"


class SamplingParams(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How an engine samples, with SGLang's names.

    Attributes:
        max_new_tokens: at least 1.
        temperature: 0 is greedy.
        top_p: in (0, 1]. top_k: -1 for all.
        stop_token_ids: generation ends after any of these.
        ignore_eos: go on after the model's end token.
        adapter: name of the served LoRA adapter that answers; empty asks the model.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    adapter: str = ""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"sampling: max_new_tokens must be >= 1, got {self.max_new_tokens}")
        if not self.temperature >= 0:
            raise ConfigError(f"sampling: temperature must be >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"sampling: top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 1 and self.top_k != -1:
            raise ConfigError(f"sampling: top_k must be >= 1, or -1 for all, got {self.top_k}")


class EngineTarget(msgspec.Struct, frozen=True, gc=False):
    """The engine that an attempt must use."""

    name: str
    url: str


class Partial(msgspec.Struct, frozen=True, gc=False):
    """Tokens that are already there: ids, logprobs and weight versions, of equal length."""

    output_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.output_ids) == len(self.logprobs) == len(self.versions):
            raise ProtocolError(
                "partial: output_ids, logprobs and versions must have one length, got "
                f"{len(self.output_ids)}, {len(self.logprobs)}, {len(self.versions)}"
            )


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One call of an engine by a workflow: what it was given, and what it answered."""

    prompt_ids: tuple[int, ...]
    output: Partial
    finish_reason: str


class Work(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What is to be rolled out: a prompt, or a workflow with its arguments.

    Attributes:
        prompt_ids: empty for a workflow.
        deadline_s: seconds from the first dispatch after which it fails; None for never.
        workflow: key of the workers' mappings; empty for a plain prompt.
        arguments: of the workflow, msgpack.
    """

    prompt_ids: tuple[int, ...] = ()
    sampling: SamplingParams
    deadline_s: float | None = None
    workflow: str = ""
    arguments: bytes = b""

    def __post_init__(self) -> None:
        if self.deadline_s is not None and self.deadline_s <= 0:
            raise ConfigError(f"rollout: deadline_s must be > 0, got {self.deadline_s}")


class RolloutTask(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One attempt, as handed to a worker.

    Attributes:
        deadline_s: seconds that the worker may take, from receipt.
        partial: tokens to go on from.
        workflow: key of the worker's own mapping; empty for a plain prompt.
        arguments: of the workflow, msgpack.
        max_staleness: a workflow whose newest token is more versions newer than its oldest is
            stopped; None for never.
    """

    task_id: str
    attempt: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    engine: EngineTarget
    deadline_s: float
    on_abort: OnAbort = OnAbort.CONTINUE
    partial: Partial = Partial()
    workflow: str = ""
    arguments: bytes = b""
    max_staleness: int | None = None


class RolloutOutcome(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How one attempt ended. The prompt stays with the controller and is not sent back.

    Attributes:
        seq: numbers the outcomes of one worker incarnation from 1.
        result: the tokens; of an error, those that survived.
        finish_reason: the engine's word (`stop`, `length`), empty unless accepted.
        error: one line, empty unless an error.
        engine: name of the engine that made the last token.
        finished_at: Unix time in seconds on the worker's clock.
        turns, value: of a workflow; the value is what it returned, msgpack.
    """

    task_id: str
    attempt: int
    seq: int
    status: OutcomeStatus
    result: Partial
    engine: str
    worker: str
    finished_at: float
    finish_reason: str = ""
    error: str = ""
    turns: tuple[Turn, ...] = ()
    value: bytes = b""

    def __post_init__(self) -> None:
        _check_plain("value", self.value)

    def num_tokens(self) -> int:
        """How many tokens travel with it, prompts of turns included."""
        return len(self.result.output_ids) + sum(
            [len(turn.prompt_ids) + len(turn.output.output_ids) for turn in self.turns]
        )

    def versions(self) -> tuple[int, ...]:
        """The weight version of every generated token, those of all turns included."""
        match self.turns:
            case ():
                return self.result.versions
            case (turn,):
                return turn.output.versions
            case turns:
                return tuple(chain.from_iterable(turn.output.versions for turn in turns))


class AttemptKey(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Identity of one piece of work."""

    task_id: str
    attempt: int


# --- controller -> worker ----------------------------------------------------------------


class TaskBatch(msgspec.Struct, frozen=True):
    """POST /rollouts. Answered with 202 before anything runs."""

    tasks: tuple[RolloutTask, ...]


class TasksAccepted(msgspec.Struct, frozen=True):
    """The answer to `TaskBatch`: how many were new, and which incarnation took them."""

    incarnation: str
    num_new: int


class CancelBatch(msgspec.Struct, frozen=True):
    """POST /cancel. Unknown keys are ignored."""

    keys: tuple[AttemptKey, ...]


class WorkerSnapshot(msgspec.Struct, frozen=True):
    """GET /completions?since=SEQ: unacknowledged outcomes after SEQ, and what still runs."""

    worker: str
    incarnation: str
    outcomes: tuple[RolloutOutcome, ...]
    running: tuple[AttemptKey, ...]


# --- worker -> controller ----------------------------------------------------------------


class WorkerHello(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/workers.

    Attributes:
        incarnation: random per process, so that a restarted worker is told apart.
        max_concurrent: attempts that it runs at a time; it is never given more.
        workflows: names of the user code that it was started with.
    """

    name: str
    url: str
    incarnation: str
    max_concurrent: int
    workflows: tuple[str, ...] = ()


class WorkerWelcome(msgspec.Struct, frozen=True):
    """The answer to `WorkerHello`: the controller's own incarnation."""

    controller: str


class CompletionBatch(msgspec.Struct, frozen=True):
    """POST /v1/completions, at least once per outcome."""

    worker: str
    incarnation: str
    outcomes: tuple[RolloutOutcome, ...]


class CompletionAck(msgspec.Struct, frozen=True):
    """The outcomes that the worker may forget.

    Attributes:
        registered: False tells the worker to register (again).
    """

    seqs: tuple[int, ...]
    registered: bool = True


# --- controller -> trainer ranks -----------------------------------------------------------


class TrainingSample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer with its reward.

    Attributes:
        output_ids, logprobs, versions: one entry per generated token.
        group_id: answers to one prompt share it.
        engine: name of the engine that made the last token.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    reward: float
    group_id: int
    engine: str


class TrainingBatch(msgspec.Struct, frozen=True):
    """What one trainer rank trains on in one step."""

    step: int
    samples: tuple[TrainingSample, ...]


Body = (
    TaskBatch
    | TasksAccepted
    | CancelBatch
    | WorkerSnapshot
    | WorkerHello
    | WorkerWelcome
    | CompletionBatch
    | CompletionAck
    | TrainingBatch
)
BodyT = TypeVar("BodyT", bound=Body)

_encoder = msgspec.msgpack.Encoder()


def _check_plain(name: str, value: bytes) -> None:
    """Opaque bytes of a message are msgpack, or their user would fail in the middle of using them."""
    if not value:
        return
    try:
        msgspec.msgpack.decode(value)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"{name} of {len(value)} bytes: {error}") from error


def encode(body: Body) -> bytes:
    """The wire form of a body."""
    return _encoder.encode(body)


def decode(data: bytes, kind: type[BodyT]) -> BodyT:
    """Decode a body of a known kind.

    Raises:
        ProtocolError: not such a body.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (*DECODE_ERRORS, ConfigError, ProtocolError) as error:
        raise ProtocolError(f"{kind.__name__} of {len(data)} bytes: {error}") from error
