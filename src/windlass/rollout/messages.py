"""Messages between controller, rollout workers and trainer ranks, as frozen msgspec types.

A rollout has the same `task_id` until its end, and gets a new `attempt` number each time that the controller
assigns the rollout to a worker. The worker runs each attempt at most once, and the controller uses at most one
outcome of each attempt.

Types with objects for each rollout have `gc=False`: the garbage collector does not visit the objects, because
visits to tens of thousands of objects would block the event loop too long. This is safe, because the objects
contain only plain values and cannot be part of a reference cycle.
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
from windlass.sampling import SamplingParams, is_number

LOCAL_WORKER = "controller"
"""Name of the worker that runs in the controller's own event loop."""
MAX_FRAME_NBYTES = 64 << 20
MAX_TOKENS = 1 << 22
"""Largest number of tokens in a prompt or an answer."""
LARGEST_INTEGER = (1 << 63) - 1
"""Largest integer in a message. msgpack cannot encode much larger integers, and a message that cannot be encoded
would block all later messages."""
MAX_VALUE_NBYTES = 16 << 20
"""Largest size of a workflow's return value or arguments."""
MAX_VALUE_ITEMS = 1 << 17
"""Largest number of items in a workflow's return value or arguments, including nested items. This limits the
memory after decoding: an empty list takes 1 byte in a message and 64 bytes in memory."""
MAX_WORKFLOWS, MAX_ATTEMPTS = 1 << 12, 1 << 18
"""Largest numbers of workflows and of concurrent attempts of one worker."""
MAX_OUTCOMES = 64
"""Largest number of outcomes in a batch. This many outcomes fit into the cache of the CPU core that decodes them."""
MAX_UNSAID = 4
"""Number of received task batches after which a worker reports their receipt, unless a batch of outcomes carries
the report earlier. The controller waits for a report after twice this number of batches, so that a WebSocket ping
does not wait behind more batches."""
SMALL_VALUE_NBYTES = 4096
"""Size up to which `check_value` decodes a value without counting its items first."""
SMALL_FRAME_NBYTES = 256 << 10
"""Total size of a batch's outcomes up to which they are decoded in the event loop and not in a thread."""

TokenIds = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_TOKENS)]
Logprobs = Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_TOKENS)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_NBYTES)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class OnAbort(StrEnum):
    """Reaction of a worker to a weight update that ends a generation early.

    CONTINUE: keep the generated tokens; the engine continues after them with the new weights.
    RETRY: discard the generated tokens and start from the prompt.
    """

    CONTINUE = "continue"
    RETRY = "retry"


class OutcomeStatus(StrEnum):
    """Result of an attempt.

    ACCEPTED: the attempt succeeded.
    REJECTED: the workflow rejected its answer; the controller submits the rollout again.
    STALE: the worker stopped the workflow, because the versions of its tokens differ by more than
        `max_staleness`.
    ERROR: the engine, the worker or the workflow failed; `ErrorKind` decides about another attempt.
    CANCELLED: the controller cancelled the attempt.
    """

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    STALE = "stale"
    ERROR = "error"
    CANCELLED = "cancelled"


class ErrorKind(StrEnum):
    """Kind of an error, which decides whether the controller makes another attempt.

    PASSING: the engine or the worker failed; an attempt at another engine or worker may succeed.
    REFUSED: the engine refused the request, and other engines would refuse it too; the rollout fails.
    RAISED: the workflow raised an exception; the rollout fails after `RolloutConfig.max_same_errors` equal
        exceptions in a row.
    """

    PASSING = "passing"
    REFUSED = "refused"
    RAISED = "raised"


def check_deadline(where: str, deadline_s: object) -> None:
    """Raise `ConfigError` if a deadline is not a number of seconds."""
    if not is_number(deadline_s):
        raise ConfigError(f"{where}: deadline_s must be a number of seconds, got {deadline_s!r}")


class EngineTarget(msgspec.Struct, frozen=True, gc=False):
    """The engine that an attempt must use."""

    name: str
    url: str


class Partial(msgspec.Struct, frozen=True, gc=False):
    """Generated tokens: their ids, logprobs and weight versions, in three sequences of equal length."""

    output_ids: TokenIds = ()
    logprobs: Logprobs = ()
    versions: TokenIds = ()

    def __post_init__(self) -> None:
        if not len(self.output_ids) == len(self.logprobs) == len(self.versions):
            raise ProtocolError(
                "partial: output_ids, logprobs and versions must have the same length, got "
                f"{len(self.output_ids)}, {len(self.logprobs)}, {len(self.versions)}"
            )


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One call of an engine by a workflow: the prompt, and the engine's answer."""

    prompt_ids: TokenIds
    output: Partial
    finish_reason: str


class Work(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Content of a rollout: a prompt, or a workflow with its arguments.

    Attributes:
        prompt_ids: token ids; empty for a workflow.
        sampling: sampling parameters.
        deadline_s: seconds from the first dispatch after which the rollout fails; None for no deadline.
        workflow: name of the workflow; empty for a plain prompt.
        arguments: arguments of the workflow, encoded as msgpack.
    """

    prompt_ids: tuple[int, ...] = ()
    sampling: SamplingParams
    deadline_s: float | None = None
    workflow: str = ""
    arguments: bytes = b""

    def __post_init__(self) -> None:
        if self.deadline_s is None:
            return
        check_deadline("rollout", self.deadline_s)
        if not self.deadline_s > 0:
            raise ConfigError(f"rollout: deadline_s must be > 0, got {self.deadline_s}")


class RolloutTask(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One attempt, as sent to a worker.

    Attributes:
        deadline_s: seconds that the worker may take after it has received the task.
        partial: tokens that an earlier attempt generated; the engine continues after these tokens.
        workflow: name of the workflow; empty for a plain prompt.
        arguments: arguments of the workflow, encoded as msgpack.
        max_staleness: largest difference between the versions of a workflow's oldest and newest token. The
            worker stops a workflow above this limit. None for no limit.
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
    """Outcome of one attempt, without the prompt, because the controller has it.

    Attributes:
        result: generated tokens; after an error, the tokens from which another attempt may continue.
        finish_reason: the engine's reason (`stop`, `length`); empty unless `status` is ACCEPTED.
        error: description of the error or rejection, in one line; empty after a success.
        error_kind: kind of the error.
        engine: name of the engine that made the last token.
        finished_at: Unix time in seconds on the worker's clock.
        turns: engine calls of a workflow.
        value: return value of a workflow, encoded as msgpack.
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
        """Return the weight version of every generated token, over all turns."""
        match self.turns:
            case ():
                return self.result.versions
            case (turn,):
                return turn.output.versions
            case turns:
                return tuple(chain.from_iterable(turn.output.versions for turn in turns))


class AttemptKey(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Identity of one attempt of one rollout."""

    task_id: str
    attempt: int


# --- worker -> controller ----------------------------------------------------------------


class WorkerHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First frame of a connection.

    Attributes:
        incarnation: random id of the worker process; the controller recognises a restarted worker by its new id.
        max_concurrent: largest number of attempts that the controller may assign to the worker at a time.
        workflows: names of the workflows that the worker was started with.
        attempts: attempts that the worker runs, and attempts with outcomes that are not acknowledged.
        received: number of the newest `TaskBatch` that the worker received; a restarted controller gives its
            batches higher numbers.
        oldest_outcome: number of the oldest unacknowledged outcome; if all are acknowledged, the number of
            the next outcome.
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
    """Outcomes that the controller has not acknowledged. A batch without outcomes only reports `received`.

    Attributes:
        last: number of the last outcome in the batch; a worker numbers its outcomes from 1.
        outcomes: encoded `RolloutOutcome`s for `decode_outcomes`. They stay encoded when the event loop decodes
            the frame, so a large batch does not block the loop.
        received: number of the newest `TaskBatch` that the worker received.
    """

    last: _Count
    outcomes: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_OUTCOMES)]
    received: _Count = 0

    @property
    def first(self) -> int:
        """Number of the first outcome in the batch."""
        return self.last - len(self.outcomes) + 1


class WorkerLeaving(msgspec.Struct, frozen=True, tag="leaving"):
    """Announcement that the worker takes no more attempts, and ends when its outcomes are acknowledged."""


# --- controller -> worker ----------------------------------------------------------------


class WorkerWelcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to `WorkerHello`. `controller` is the controller's random id; with a journal, a restart keeps the id."""

    controller: str


class TaskBatch(msgspec.Struct, frozen=True, tag="tasks"):
    """Attempts to start, and attempts to cancel. The worker ignores cancellations of attempts it does not run.

    The worker does not answer a batch. A batch can get lost only if the connection ends; the worker's
    `WorkerHello` on the next connection then reports which batches arrived.

    Attributes:
        number: number of this batch; it increases by 1 per batch.
        acknowledged: the worker may drop its outcomes up to this number.
    """

    number: int
    tasks: tuple[RolloutTask, ...]
    cancelled: tuple[AttemptKey, ...] = ()
    acknowledged: int = 0


# --- controller -> trainer ranks -----------------------------------------------------------


class TrainingSample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer with its reward.

    The constructor converts numbers of NumPy and torch to Python numbers.

    Attributes:
        prompt_ids: tokens before the answer.
        output_ids, versions: one entry per generated token; at least one token.
        logprobs: log-probability of each generated token in the distribution that the engine sampled from, after
            penalties, `temperature`, `min_p`, `top_k` and `top_p`. For importance weights, the trainer must
            compute its log-probability with the same settings. For greedy sampling, the entry is the
            log-probability that the model gives the token.
        reward: a finite number.
        group_id: equal for all answers to one prompt.
        engine: name of the engine that made the last token.

    Raises:
        ConfigError: a value has the wrong type, the sequences differ in length, or no token was generated.
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
                f"{where}output_ids, logprobs and versions must have the same length, at least 1, got "
                f"{lengths[0]}, {lengths[1]} and {lengths[2]}"
            )
        if not isinstance(self.engine, str):
            raise ConfigError(f"{where}engine must be text, got {self.engine!r}")

    def _set(self, name: str, value: object) -> None:
        if value is not getattr(self, name):
            msgspec.structs.force_setattr(self, name, value)


@runtime_checkable
class ArrayLike(Protocol):
    """Array, tensor or scalar of NumPy, torch or a similar library."""

    @property
    def ndim(self) -> int:
        """Number of dimensions; 0 for a scalar."""
        ...

    def item(self) -> Any:
        """Return the only element as a Python number."""
        ...

    def tolist(self) -> Any:
        """Return the elements as Python numbers, in nested lists."""
        ...


def as_number(what: str, value: object) -> float:
    """Return a number, or the only element of an array or tensor, as a Python float.

    Raises:
        ConfigError: the value is not one number; the message begins with `what`.
    """
    refusal = f"{what} must be one number, got {_short(value)}"
    try:
        plain: Any = value.item() if isinstance(value, ArrayLike) else value
        found = float(plain)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(refusal) from error
    # `float` accepts text such as "1.5", but a caller that passes text has probably made a mistake.
    if isinstance(plain, str | bytes):
        raise ConfigError(refusal)
    return found


def plain_number(what: str, value: object) -> float:
    """Return a number as a Python float, see `as_number`; refuse NaN and infinity.

    Raises:
        ConfigError: the value is not a finite number; the message begins with `what`.
    """
    found = as_number(what, value)
    if not math.isfinite(found):
        raise ConfigError(f"{what} must be finite, got {_short(value)}")
    return found


def plain_numbers(what: str, values: object) -> tuple[float, ...]:
    """Return a sequence, array or tensor as finite Python numbers.

    Raises:
        ConfigError: a value is not a number, or not finite; the message begins with `what`.
    """
    if type(values) is tuple and set(map(type, values)) <= {float} and all(map(_isfinite, values)):
        return values
    found = _listed(what, values, "numbers")
    return tuple([plain_number(f"{what}[{index}]", value) for index, value in enumerate(found)])


def plain_integers(what: str, values: object) -> tuple[int, ...]:
    """Return a sequence, array or tensor of integers as Python integers.

    Raises:
        ConfigError: a value is not an integer, or needs more than 63 bits; the text begins with `what`.
    """
    if type(values) is tuple and set(map(type, values)) <= {int}:
        found: tuple[int, ...] = values
    else:
        try:
            # `operator.index` returns booleans unchanged, and msgpack would send them as booleans. So call `int`, too.
            found = tuple([int(operator.index(each)) for each in _listed(what, values, "integers")])
        except (TypeError, RuntimeError) as error:
            raise ConfigError(f"{what} must be integers, got {_short(values)}") from error
    if found and not (min(found) >= -LARGEST_INTEGER and max(found) <= LARGEST_INTEGER):
        raise ConfigError(f"{what} must be integers of at most 63 bits, got {_short(values)}")
    return found


_isfinite: Callable[[Any], bool] = math.isfinite


def _listed(what: str, values: object, kind: str) -> list[Any]:
    """Return the values of a sequence, array or tensor as a list; raise `ConfigError` for text and other types."""
    if isinstance(values, ArrayLike):
        values = values.tolist()
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
        return list(values)
    raise ConfigError(f"{what} must be a sequence of {kind}, got {_short(values)}")


def _short(value: object) -> str:
    """Return the `repr` of a value, with at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class TrainingBatch(msgspec.Struct, frozen=True):
    """Training data of one trainer rank for one step."""

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
"""Decode one outcome of a batch, or raise ProtocolError."""


async def decode_outcomes(batch: CompletionBatch) -> list[RolloutOutcome]:
    """Decode the outcomes of a batch. Decode a large batch in a thread, because decoding would block the event loop.

    Raises:
        ProtocolError: an entry of the batch is not an outcome.
    """
    if sum(map(len, batch.outcomes)) <= SMALL_FRAME_NBYTES:
        return _decode_all(batch.outcomes)
    return await asyncio.to_thread(_decode_all, batch.outcomes)


def _decode_all(outcomes: Sequence[bytes]) -> list[RolloutOutcome]:
    return [decode_outcome(encoded) for encoded in outcomes]


def check_value(what: str, value: bytes, max_nbytes: int = MAX_VALUE_NBYTES) -> None:
    """Check that `value` is valid msgpack, so that decoding it later cannot fail.

    A value of more than `SMALL_VALUE_NBYTES` bytes may contain at most `MAX_VALUE_ITEMS` items.

    Raises:
        ProtocolError: `value` is not msgpack, or too large; the text begins with `what`.
    """
    if len(value) > max_nbytes:
        raise ProtocolError(f"{what} must be of at most {max_nbytes} bytes, got {len(value)}")
    if len(value) > SMALL_VALUE_NBYTES and not _has_few_items(value):
        raise ProtocolError(
            f"{what} must contain at most {MAX_VALUE_ITEMS} values, got more in {len(value)} bytes"
        )
    try:
        msgspec.msgpack.decode(value)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"{what} of {len(value)} bytes: {error}") from error


_LENGTH_NBYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""First byte of an encoded bin, ext or str value -> size in bytes of the length field that follows."""
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
"""First byte of an encoded value -> number of bytes that follow it. This number excludes a length field and the bytes
that the field counts. It also excludes the items of an array or map, because each item counts as a separate value."""


def _has_few_items(value: bytes) -> bool:
    """Return whether an encoded value has at most `MAX_VALUE_ITEMS` items; read only the items' headers."""
    at = num_items = 0
    while at < len(value):
        num_items += 1
        if num_items > MAX_VALUE_ITEMS:
            return False
        code = value[at]
        after = at + 1 + _LENGTH_NBYTES.get(code, 0)
        at = after + int.from_bytes(value[at + 1 : after]) + _PAYLOAD_NBYTES[code]
    return True
