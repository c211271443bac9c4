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
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import chain
from typing import Annotated

import msgspec

from windlass.errors import ConfigError, ProtocolError
from windlass.net.messages import MAX_NAME_NBYTES, Codec, Envelope, Refused, Reply
from windlass.rollout.held import TensorsWritten, WriteTensors
from windlass.rollout.tensors import SampleTensor, check_tensors, images_in, joined
from windlass.rollout.values import (
    check_value,
    plain_booleans,
    plain_integers,
    plain_map,
    plain_number,
    plain_numbers,
)
from windlass.sampling import SamplingParams, is_number

LOCAL_WORKER = "controller"
"""Name of the worker that runs in the controller's own event loop."""
MAX_FRAME_NBYTES = 64 << 20
"""Largest size of a message between the controller and a worker."""
MAX_BATCH_NBYTES = 16 << 30
"""Largest size of one trainer rank's part of a batch."""
MAX_TOKENS = 1 << 22
"""Largest number of tokens in a prompt or an answer."""
MAX_IMAGE_SETS = 64
"""Largest number of sets of images in a prompt; each set has at least one image."""
MAX_SHARED_TOKENS = 1 << 24
"""Largest sum of `TurnIncrement.num_shared` in an outcome."""
MAX_WORKFLOWS, MAX_ATTEMPTS = 1 << 12, 1 << 18
"""Largest numbers of workflows and of concurrent attempts of one worker."""
MAX_OUTCOMES = 64
"""Largest number of outcomes in a batch. This many outcomes fit into the cache of the CPU core that decodes them."""
MAX_UNSAID = 4
"""Number of received task batches after which a worker reports their receipt, unless a batch of outcomes carries
the report earlier. The controller waits for a report after twice this number of batches, so that a WebSocket ping
does not wait behind more batches."""
SMALL_FRAME_NBYTES = 256 << 10
"""Largest total size of a batch's outcomes that is decoded in the event loop instead of in a thread."""

TokenIds = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_TOKENS)]
Logprobs = Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_TOKENS)]
ImageKeys = Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_IMAGE_SETS)]
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
    """One call of an engine by a workflow: the prompt, and the engine's answer.

    `text` is the decoded answer of `WorkflowContext.chat`, and empty after `WorkflowContext.generate`. `images` has the keys of
    the sets of images in the prompt, in their order. Their tensors are in the rollout's `tensors`.
    """

    prompt_ids: TokenIds
    output: Partial
    finish_reason: str
    text: str = ""
    images: ImageKeys = ()


class TurnIncrement(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A `Turn` without the tokens that its prompt shares with an earlier turn; see `trajectories.increments`.

    Without this type, the size of a conversation's outcome grows with the square of the number of turns. A journal that was
    written before Windlass had this type contains whole turns. They are increments without shared tokens.

    Attributes:
        prompt_ids: tokens of the prompt after the shared ones.
        output, finish_reason, text, images: see `Turn`.
        earlier: index of the earlier turn; -1 for none.
        num_shared: number of tokens that the prompt shares with the beginning of the earlier turn's prompt and output.
    """

    prompt_ids: TokenIds
    output: Partial
    finish_reason: str
    text: str = ""
    earlier: int = -1
    num_shared: int = 0
    images: ImageKeys = ()


class Work(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Content of a rollout: a prompt, or a workflow with its arguments.

    Attributes:
        prompt_ids: token ids; empty for a workflow, text or messages.
        sampling: sampling parameters.
        deadline_s: seconds from the first dispatch after which the rollout fails; None for no deadline.
        prompt: encoded text or messages, see `text.encode_prompt`; empty for token ids.
        workflow: name of the workflow; empty for a plain prompt.
        arguments: arguments of the workflow, encoded as msgpack.
    """

    prompt_ids: tuple[int, ...] = ()
    sampling: SamplingParams
    deadline_s: float | None = None
    workflow: str = ""
    arguments: bytes = b""
    prompt: bytes = b""

    def __post_init__(self) -> None:
        if self.deadline_s is None:
            return
        check_deadline("rollout", self.deadline_s)
        if not self.deadline_s > 0:
            raise ConfigError(f"rollout: deadline_s must be > 0, got {self.deadline_s}")


class RolloutTask(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One attempt, as sent to a worker.

    Attributes:
        prompt_ids: token ids. Empty for a workflow, and in the first attempts of a rollout of text or messages.
        deadline_s: seconds that the worker may take after it has received the task.
        partial: tokens that an earlier attempt generated; the engine continues after these tokens.
        workflow: name of the workflow; empty for a plain prompt.
        arguments: arguments of the workflow, encoded as msgpack.
        max_staleness: largest difference between the versions of a workflow's oldest and newest token. The
            worker stops a workflow above this limit. None for no limit.
        prompt: encoded text or messages, see `text.encode_prompt`. If `prompt_ids` is empty, the worker tokenises it.
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
    prompt: bytes = b""


class RolloutOutcome(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Outcome of one attempt. A prompt that was submitted as token ids is left out, because the controller has it.

    Attributes:
        result: generated tokens; after an error, the tokens from which another attempt may continue.
        finish_reason: the engine's reason (`stop`, `length`); empty unless `status` is ACCEPTED.
        error: description of the error or rejection, in one line; empty after a success.
        error_kind: kind of the error.
        engine: name of the engine that made the last token.
        finished_at: Unix time in seconds on the worker's clock.
        turns: engine calls of a workflow, see `trajectories.whole_turns`.
        value: return value of a workflow, encoded as msgpack.
        prompt_ids: token ids of a prompt of text or messages.
        text: decoded answer to a prompt of text or messages.
        tensors: named tensors of a workflow. The worker keeps the elements of large ones, see `windlass.rollout.held`.
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
    turns: tuple[TurnIncrement, ...] = ()
    value: bytes = b""
    prompt_ids: TokenIds = ()
    text: str = ""
    tensors: dict[str, SampleTensor] = {}

    def __post_init__(self) -> None:
        if self.value:
            check_value("value", self.value)
        if self.turns:
            self._check_turns()

    def _check_turns(self) -> None:
        """Check how many tokens each turn shares with an earlier turn. A worker sends shared tokens only once.

        Raises:
            ProtocolError: a turn shares more tokens than the earlier turn has, or all turns together share more than
                `MAX_SHARED_TOKENS` tokens.
        """
        lengths: list[int] = []
        num_shared = 0
        for index, turn in enumerate(self.turns):
            most = lengths[turn.earlier] if 0 <= turn.earlier < index else 0
            if not 0 <= turn.num_shared <= most:
                raise ProtocolError(
                    f"outcome: turns[{index}] must share at most {most} tokens with an earlier turn, got "
                    f"{turn.num_shared} of turn {turn.earlier}"
                )
            lengths.append(turn.num_shared + len(turn.prompt_ids) + len(turn.output.output_ids))
            num_shared += turn.num_shared
        if num_shared > MAX_SHARED_TOKENS:
            raise ProtocolError(
                f"outcome: turns must share at most {MAX_SHARED_TOKENS} tokens, got {num_shared}"
            )

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
    """Announcement that the worker accepts no more attempts, and exits when its outcomes are acknowledged."""


# --- controller -> worker ----------------------------------------------------------------


class WorkerWelcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to `WorkerHello`. `controller` is the controller's random id; with a journal, a restart keeps the id."""

    controller: str


class TaskBatch(msgspec.Struct, frozen=True, tag="tasks"):
    """Attempts to start, and attempts to cancel. The worker ignores a cancellation if it does not run the attempt.

    The worker does not answer a batch. A batch can get lost only if the connection ends; the worker's
    `WorkerHello` on the next connection then reports which batches arrived.

    Attributes:
        number: number of this batch; it increases by 1 per batch.
        acknowledged: the worker may drop its outcomes up to this number.
        released: keys of tensors that the worker may free.
    """

    number: int
    tasks: tuple[RolloutTask, ...]
    cancelled: tuple[AttemptKey, ...] = ()
    acknowledged: int = 0
    released: tuple[str, ...] = ()


# --- controller -> trainer ranks -----------------------------------------------------------


class TrainingSample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, or one conversation, with its reward: a prompt and all tokens after the prompt.

    The constructor converts numbers of NumPy and torch to Python numbers.

    Attributes:
        prompt_ids: tokens before the first answer.
        output_ids: all tokens after `prompt_ids`, at least one. In a conversation, some of them are not generated: answers
            of tools, and tokens of the chat template between two turns.
        logprobs: log-probability of each generated token in the distribution that the engine sampled from, after
            penalties, `temperature`, `min_p`, `top_k` and `top_p`. For importance weights, the trainer must
            compute its log-probability with the same settings. For greedy sampling, the entry is the
            log-probability that the model gives the token. 0.0 for a token that is not generated.
        versions: weight version of each generated token; -1 for a token that is not generated.
        loss_mask: whether to train on each token of `output_ids`; False for a token that is not generated. If omitted,
            all tokens are trained.
        reward: a finite number.
        group_id: equal for all answers to one prompt.
        engine: name of the engine that made the last token.
        task_id: id of the rollout. Several samples of one rollout have the same id.
        finish_reason: the engine's reason for the end of the last answer (`stop`, `length`).
        tensors: named tensors for the loss, such as advantages or reference log-probabilities. Tensors of images have
            names such as `images.0.pixel_values`; see `image_tensors`.
        metadata: msgpack-plain values.

    Raises:
        ConfigError: a value has the wrong type, sequences differ in length, there is no output token, or a per-token
            tensor does not have one entry per output token.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    reward: float
    group_id: int
    engine: str
    loss_mask: tuple[bool, ...] = ()
    task_id: str = ""
    finish_reason: str = ""
    tensors: Mapping[str, SampleTensor] = {}
    metadata: Mapping[str, object] = {}

    def __post_init__(self) -> None:
        where = f"sample of group {self.group_id}: "
        for name in ("prompt_ids", "output_ids", "versions"):
            self._set(name, plain_integers(f"{where}{name}", getattr(self, name)))
        self._set("logprobs", plain_numbers(f"{where}logprobs", self.logprobs))
        self._set("reward", plain_number(f"{where}reward", self.reward))
        (group_id,) = plain_integers("sample: group_id", (self.group_id,))
        self._set("group_id", group_id)
        mask = plain_booleans(f"{where}loss_mask", self.loss_mask)
        self._set("loss_mask", mask or (True,) * len(self.output_ids))
        sequences = (self.output_ids, self.logprobs, self.versions, self.loss_mask)
        lengths = [len(values) for values in sequences]
        if not lengths[0] or len(set(lengths)) > 1:
            raise ConfigError(
                f"{where}output_ids, logprobs, versions and loss_mask must have the same length, at least 1, got "
                f"{lengths[0]}, {lengths[1]}, {lengths[2]} and {lengths[3]}"
            )
        for name in ("engine", "task_id", "finish_reason"):
            if not isinstance(value := getattr(self, name), str):
                raise ConfigError(f"{where}{name} must be text, got {value!r}")
        if self.tensors:
            self._check_tensors(where)
        if self.metadata:
            self._set("metadata", plain_map(f"{where}metadata", self.metadata))

    def _check_tensors(self, where: str) -> None:
        """Raise `ConfigError` for an invalid entry of `tensors`, for a per-token tensor of the wrong length, or for a wrong name."""
        for name, tensor in check_tensors(where, self.tensors).items():
            if tensor.per_token and tensor.shape[0] != len(self.output_ids):
                raise ConfigError(
                    f"{where}tensor {name!r} must have one entry per output token ({len(self.output_ids)}), got shape "
                    f"{tensor.shape}; set per_token=False if the tensor has other dimensions"
                )
        if unknown := [key for key in images_in(self.tensors) if not key.isdecimal()]:
            raise ConfigError(
                f"{where}tensors of images must have names like 'images.0.pixel_values', got 'images.{unknown[0]}...'; call "
                "training_samples, which makes these names from those of a rollout"
            )

    @property
    def has_images(self) -> bool:
        """Whether the sample has images."""
        return bool(images_in(self.tensors))

    @property
    def image_tensors(self) -> dict[str, SampleTensor]:
        """Tensors of all images in the sample, by the model's names, such as `pixel_values`; empty if there are none.

        The images are in the order of their tokens. Reading the attribute copies the tensors of a conversation with several
        sets of images.

        Raises:
            ConfigError: the tensors of several sets cannot be joined, or are not in this process.
        """
        sets = images_in(self.tensors)
        return joined([sets[key] for key in sorted(sets, key=int)]) if sets else {}

    def refuse_images(self, what: str) -> None:
        """Raise `ConfigError` if the sample has images, which `what` would ignore."""
        if sets := images_in(self.tensors):
            names = sorted({name for found in sets.values() for name in found})
            raise ConfigError(
                f"{what}: sample of group {self.group_id} must have no images, got {names}; see docs/text.md"
            )

    @property
    def num_trained(self) -> int:
        """Number of tokens that `loss_mask` selects."""
        return sum(self.loss_mask)

    @property
    def oldest_version(self) -> int:
        """Smallest version of the tokens that `loss_mask` selects; -1 if it selects none."""
        return min(
            (v for v, used in zip(self.versions, self.loss_mask, strict=True) if used), default=-1
        )

    def _set(self, name: str, value: object) -> None:
        """Set an attribute of this frozen object, unless it has this very value."""
        if value is not getattr(self, name):
            msgspec.structs.force_setattr(self, name, value)


class TrainingBatch(msgspec.Struct, frozen=True):
    """Training data of one trainer rank for one step.

    Attributes:
        must_confirm: whether samples of this step, of any rank, have held tensors (large tensors that stay in the process
            that made them). Every rank must then confirm that it has its tensors, see `BatchClient.next_batch`.
    """

    step: int
    samples: tuple[TrainingSample, ...]
    must_confirm: bool = False


WorkerFrame = WorkerHello | CompletionBatch | WorkerLeaving | Reply[TensorsWritten]
ControllerFrame = WorkerWelcome | TaskBatch | Envelope[WriteTensors] | Refused

WORKER_FRAMES: Codec[WorkerFrame] = Codec(
    WorkerFrame, "frame of a worker", max_nbytes=MAX_FRAME_NBYTES
)
CONTROLLER_FRAMES: Codec[ControllerFrame] = Codec(
    ControllerFrame, "frame of the controller", max_nbytes=MAX_FRAME_NBYTES
)
TRAINING_BATCHES: Codec[TrainingBatch] = Codec(
    TrainingBatch, "training batch", max_nbytes=MAX_BATCH_NBYTES
)
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
    """Decode outcomes, in order; raise `ProtocolError` for an invalid outcome."""
    return [decode_outcome(encoded) for encoded in outcomes]
