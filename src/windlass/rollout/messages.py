"""What travels between controller, rollout workers and trainer ranks, as frozen msgspec types.

A rollout keeps its `task_id` for life; every time that it is handed to a worker it gets a new
`attempt`. (task_id, attempt) identifies one piece of work: a worker runs it at most once, and the
controller uses at most one outcome of it.

What exists once per rollout is hidden from the garbage collector (`gc=False`): it holds only
plain values and cannot be part of a cycle, and walking tens of thousands of them takes longer
than a completion may.
"""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import chain
from typing import Annotated, Any, Protocol, runtime_checkable

import msgspec

from windlass.errors import DECODE_ERRORS, ConfigError, ProtocolError
from windlass.net.messages import MAX_NAME_NBYTES, Codec, Refused

LOCAL_WORKER = "controller"
"""Name of the worker that is the controller's own event loop."""
MAX_FRAME_NBYTES = 64 << 20
MAX_TOKENS = 1 << 22
LARGEST_INTEGER = (1 << 63) - 1
"""Of a message: one that cannot be encoded would hold up all messages after it."""
"""Of one prompt or one answer."""
MAX_VALUE_NBYTES = 16 << 20
"""Of what a workflow returns, or is given."""
MAX_VALUE_ITEMS = 1 << 17
"""Values in it, at any depth: an empty list is one byte, and 64 of them in memory."""
MAX_WORKFLOWS, MAX_ATTEMPTS = 1 << 12, 1 << 18
"""Of one worker."""
MAX_OUTCOMES = 64
"""Of one batch: few enough to stay in the cache of the core that decodes and uses them."""
MAX_UNSAID = 4
"""Batches of tasks after which a worker says that it has received them, if it has no outcome to say it with. At most
twice as many are under way, so that a ping never waits behind more."""
SMALL_VALUE_NBYTES = 4096
"""A value that is decoded to be checked, whatever it holds."""
SMALL_FRAME_NBYTES = 256 << 10
"""Of outcomes that are decoded in the event loop."""

TokenIds = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_TOKENS)]
Logprobs = Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_TOKENS)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_NBYTES)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


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
    ERROR: the engine or the worker failed; the rollout is tried again.
    CANCELLED: the controller asked for it.
    """

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    STALE = "stale"
    ERROR = "error"
    CANCELLED = "cancelled"


class ErrorKind(StrEnum):
    """Whether an attempt that failed may succeed when it is made again.

    PASSING: the engine or the worker failed; another one may do better.
    REFUSED: the engine refuses the request, and so would every other engine.
    RAISED: the workflow raised; what it raises three times in a row it will raise again.
    """

    PASSING = "passing"
    REFUSED = "refused"
    RAISED = "raised"


class SamplingParams(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """How an engine samples, with SGLang's names.

    Attributes:
        max_new_tokens: at least 1.
        temperature: 0 is greedy.
        top_p: in (0, 1]. top_k: -1 for all. With both, vLLM and the embedded engine cut `top_p` from the
            distribution of the `top_k` tokens, and SGLang cuts both from that of all tokens.
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

    output_ids: TokenIds = ()
    logprobs: Logprobs = ()
    versions: TokenIds = ()

    def __post_init__(self) -> None:
        if not len(self.output_ids) == len(self.logprobs) == len(self.versions):
            raise ProtocolError(
                "partial: output_ids, logprobs and versions must have one length, got "
                f"{len(self.output_ids)}, {len(self.logprobs)}, {len(self.versions)}"
            )


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One call of an engine by a workflow: what it was given, and what it answered."""

    prompt_ids: TokenIds
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
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise ConfigError(f"rollout: deadline_s must be > 0, got {self.deadline_s}")


class RolloutTask(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
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


class RolloutOutcome(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """How one attempt ended. The prompt stays with the controller and is not sent back.

    Attributes:
        result: the tokens; of an error, those that survived.
        finish_reason: the engine's word (`stop`, `length`), empty unless accepted.
        error: one line, empty unless an error.
        error_kind: of an error.
        engine: name of the engine that made the last token.
        finished_at: Unix time in seconds on the worker's clock.
        turns, value: of a workflow; the value is what it returned, msgpack.
    """

    task_id: str
    attempt: int
    status: OutcomeStatus
    result: Partial
    engine: str
    worker: str
    finished_at: float
    finish_reason: str = ""
    error: str = ""
    error_kind: ErrorKind = ErrorKind.PASSING
    turns: tuple[Turn, ...] = ()
    value: bytes = b""

    def __post_init__(self) -> None:
        if self.value:
            check_value("value", self.value)

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


# --- worker -> controller ----------------------------------------------------------------


class WorkerHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first frame of a connection.

    Attributes:
        incarnation: random per process, so that a restarted worker is told apart.
        max_concurrent: attempts that it runs at a time; it is never given more.
        workflows: names of the user code that it was started with.
        attempts: that it runs, or whose outcomes it keeps.
        received: number of the newest `TaskBatch` that it has received; those of a new controller are above it.
        oldest_outcome: number of the first outcome that was not acknowledged, or will be the next.
    """

    protocol_version: int
    name: _Name
    incarnation: _Name
    max_concurrent: Annotated[int, msgspec.Meta(ge=1, le=MAX_ATTEMPTS)]
    workflows: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MAX_WORKFLOWS)] = ()
    attempts: Annotated[tuple[AttemptKey, ...], msgspec.Meta(max_length=MAX_ATTEMPTS)] = ()
    received: _Count = 0
    oldest_outcome: _Count = 1


class CompletionBatch(msgspec.Struct, frozen=True, tag="completions"):
    """Outcomes, each sent until it was acknowledged; none where only `received` is to be said.

    Attributes:
        last: number of the last of them; a worker numbers its outcomes from 1.
        outcomes: a `RolloutOutcome` each, which `decode_outcomes` reads. Its length stands before it, so that
            reading the frame steps over it.
        received: as in `WorkerHello`.
    """

    last: _Count
    outcomes: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_OUTCOMES)]
    received: _Count = 0

    @property
    def first(self) -> int:
        """Number of the first of them."""
        return self.last - len(self.outcomes) + 1


class WorkerLeaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The worker ends as soon as its outcomes are acknowledged, and takes no more attempts."""


# --- controller -> worker ----------------------------------------------------------------


class WorkerWelcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The answer to `WorkerHello`: the controller's identity, which outlives its processes if it has a journal."""

    controller: str


class TaskBatch(msgspec.Struct, frozen=True, tag="tasks"):
    """Run these attempts, each at most once, and cancel those; unknown ones are ignored.

    It is not answered: a connection loses nothing before its end, and the worker's next `WorkerHello` says what
    it has received.

    Attributes:
        number: of this batch; later ones are greater.
        acknowledged: outcomes up to this number may be forgotten.
    """

    number: int
    tasks: tuple[RolloutTask, ...]
    cancelled: tuple[AttemptKey, ...] = ()
    acknowledged: int = 0


# --- controller -> trainer ranks -----------------------------------------------------------


class TrainingSample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer with its reward.

    Numbers of numpy and torch become Python's when a sample is made.

    Attributes:
        prompt_ids: tokens before the answer.
        output_ids, versions: one entry per generated token, at least one.
        logprobs: as many: the log-probability of each token under the distribution that it was sampled from, after
            `temperature`, `top_k` and `top_p`. Importance weights compare it with the trainer's log-probability
            under the same settings. A greedy token has the log-probability that the model gives it.
        reward: a finite number.
        group_id: the same for all answers to one prompt.
        engine: name of the engine that made the last token.

    Raises:
        ConfigError: a value of another kind, lists of different lengths, or no generated token.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    reward: float
    group_id: int
    engine: str

    def __post_init__(self) -> None:
        where = f"sample of group {self.group_id}: "
        for name in ("prompt_ids", "output_ids", "versions"):
            self._set(name, plain_integers(f"{where}{name}", getattr(self, name)))
        self._set("logprobs", plain_numbers(f"{where}logprobs", self.logprobs))
        self._set("reward", plain_number(f"{where}reward", self.reward))
        (group_id,) = plain_integers("sample: group_id", (self.group_id,))
        self._set("group_id", group_id)
        lengths = [len(values) for values in (self.output_ids, self.logprobs, self.versions)]
        if not lengths[0] or len(set(lengths)) > 1:
            raise ConfigError(
                f"{where}output_ids, logprobs and versions must have one length of at least 1, got "
                f"{lengths[0]}, {lengths[1]} and {lengths[2]}"
            )
        if not isinstance(self.engine, str):
            raise ConfigError(f"{where}engine must be text, got {self.engine!r}")

    def _set(self, name: str, value: object) -> None:
        if value is not getattr(self, name):
            msgspec.structs.force_setattr(self, name, value)


@runtime_checkable
class ArrayLike(Protocol):
    """An array, a tensor, or a scalar of numpy, torch and others."""

    @property
    def ndim(self) -> int:
        """Number of dimensions; 0 for a scalar."""
        ...

    def item(self) -> Any:
        """Return the only element as a number of Python."""
        ...

    def tolist(self) -> Any:
        """Return the elements as numbers of Python, in lists."""
        ...


def as_number(what: str, value: object) -> float:
    """Return a number of Python, also of a number or a tensor of one element of numpy or torch.

    Raises:
        ConfigError: the value is none; begins with `what`.
    """
    refusal = f"{what} must be one number, got {_short(value)}"
    try:
        plain: Any = value.item() if isinstance(value, ArrayLike) else value
        found = float(plain)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(refusal) from error
    # Text that says a number is more likely a mistake than meant.
    if isinstance(plain, str | bytes):
        raise ConfigError(refusal)
    return found


def plain_number(what: str, value: object) -> float:
    """Return a number as `as_number` does, unless it is NaN or infinite.

    Raises:
        ConfigError: the value is no finite number; begins with `what`.
    """
    found = as_number(what, value)
    if not math.isfinite(found):
        raise ConfigError(f"{what} must be finite, got {_short(value)}")
    return found


def plain_numbers(what: str, values: object) -> tuple[float, ...]:
    """Return finite numbers of Python, also of an array or a tensor.

    Raises:
        ConfigError: a value is none, or is not finite; begins with `what`.
    """
    if type(values) is tuple and set(map(type, values)) <= {float} and all(map(_isfinite, values)):
        return values
    found = _listed(what, values, "numbers")
    return tuple([plain_number(f"{what}[{index}]", value) for index, value in enumerate(found)])


def plain_integers(what: str, values: object) -> tuple[int, ...]:
    """Return integers of Python, also of an array or a tensor.

    Raises:
        ConfigError: a value is none, or no message can carry it; begins with `what`.
    """
    if type(values) is tuple and set(map(type, values)) <= {int}:
        found: tuple[int, ...] = values
    else:
        try:
            # `index` leaves a boolean as it is, which msgpack would send as one.
            found = tuple([int(operator.index(each)) for each in _listed(what, values, "integers")])
        except (TypeError, RuntimeError) as error:
            raise ConfigError(f"{what} must be integers, got {_short(values)}") from error
    if found and not (min(found) >= -LARGEST_INTEGER and max(found) <= LARGEST_INTEGER):
        raise ConfigError(f"{what} must be integers of at most 63 bits, got {_short(values)}")
    return found


_isfinite: Callable[[Any], bool] = math.isfinite


def _listed(what: str, values: object, kind: str) -> list[Any]:
    if isinstance(values, ArrayLike):
        values = values.tolist()
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
        return list(values)
    raise ConfigError(f"{what} must be a sequence of {kind}, got {_short(values)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class TrainingBatch(msgspec.Struct, frozen=True):
    """What one trainer rank trains on in one step."""

    step: int
    samples: tuple[TrainingSample, ...]


WorkerFrame = WorkerHello | CompletionBatch | WorkerLeaving
ControllerFrame = WorkerWelcome | TaskBatch | Refused

WORKER_FRAMES: Codec[WorkerFrame] = Codec(
    WorkerFrame, "frame of a worker", max_nbytes=MAX_FRAME_NBYTES
)
CONTROLLER_FRAMES: Codec[ControllerFrame] = Codec(
    ControllerFrame, "frame of the controller", max_nbytes=MAX_FRAME_NBYTES
)
TRAINING_BATCHES: Codec[TrainingBatch] = Codec(TrainingBatch, "training batch")
_OUTCOMES: Codec[RolloutOutcome] = Codec(RolloutOutcome, "outcome")


decode_outcome = _OUTCOMES.decode
"""Decodes one outcome of a batch, or raises ProtocolError."""


async def decode_outcomes(batch: CompletionBatch) -> list[RolloutOutcome]:
    """Decode a batch: a large one in a thread, one outcome at a time, so that the loop goes on meanwhile.

    Raises:
        ProtocolError: one of them is no outcome.
    """
    if sum(map(len, batch.outcomes)) <= SMALL_FRAME_NBYTES:
        return _decode_all(batch.outcomes)
    return await asyncio.to_thread(_decode_all, batch.outcomes)


def _decode_all(outcomes: Sequence[bytes]) -> list[RolloutOutcome]:
    return [decode_outcome(encoded) for encoded in outcomes]


def check_value(what: str, value: bytes) -> None:
    """Opaque bytes of a message are msgpack, or their user would fail in the middle of using them.

    Decoded they may take `MAX_VALUE_ITEMS` objects more than bytes.

    Raises:
        ProtocolError: they are not, or too large.
    """
    if len(value) > MAX_VALUE_NBYTES:
        raise ProtocolError(f"{what} must be of at most {MAX_VALUE_NBYTES} bytes, got {len(value)}")
    if len(value) > SMALL_VALUE_NBYTES and not _has_few_items(value):
        raise ProtocolError(
            f"{what} must hold at most {MAX_VALUE_ITEMS} values, got more in {len(value)} bytes"
        )
    try:
        msgspec.msgpack.decode(value)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"{what} of {len(value)} bytes: {error}") from error


_LENGTH_NBYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""First byte of a value whose length follows -> bytes of the length: bin, ext, str."""
_PAYLOAD_NBYTES = bytes(
    [0] * 160  # small integers, headers of small maps and arrays
    + [*range(32)]  # short strings
    + [0] * 7  # nil, booleans, bin
    + [1] * 3  # ext: its type
    + [4, 8, 1, 2, 4, 8, 1, 2, 4, 8]  # floats, integers
    + [2, 3, 5, 9, 17]  # ext of fixed lengths, with its type
    + [0] * 3  # str
    + [2, 4, 2, 4]  # headers of arrays and maps
    + [0] * 32  # small negative integers
)
"""First byte of a value -> bytes that follow, beside a length and what that counts."""


def _has_few_items(value: bytes) -> bool:
    """Whether there are no more headers in it than allowed; what is in a container follows its header."""
    at = num_items = 0
    while at < len(value):
        num_items += 1
        if num_items > MAX_VALUE_ITEMS:
            return False
        code = value[at]
        after = at + 1 + _LENGTH_NBYTES.get(code, 0)
        at = after + int.from_bytes(value[at + 1 : after]) + _PAYLOAD_NBYTES[code]
    return True
