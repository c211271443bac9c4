"""Training batches: the controller's process puts them into a queue, and trainer ranks request their shards.

A held tensor is a large tensor of a sample. Its elements stay in the process that made it, until a rank gets them with its
batch (`windlass.rollout.held`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated
from urllib.parse import urlencode

import msgspec
from aiohttp import web

from windlass.closing import Closing
from windlass.control.changes import Changes, tell
from windlass.envs import check_token
from windlass.errors import (
    AuthenticationError,
    ConfigError,
    PeerTimeout,
    PeerUnreachable,
    ProtocolError,
    StaleMessage,
    TransferError,
    TransferOutcomeUnknown,
)
from windlass.net.access import authorization
from windlass.net.addresses import check_url
from windlass.net.blocking_http import BlockingHttp, HttpReply
from windlass.net.clock import Backoff, Deadline
from windlass.net.messages import encode
from windlass.rollout.fetch import (
    CONFIRMED,
    CONFIRMS,
    FETCHES,
    WRITE_S,
    WRITTEN,
    Confirm,
    Confirmations,
    Confirmed,
    Fetch,
    RankTensors,
    ShardRequest,
    WriteWith,
    held_in,
    write_tensors,
)
from windlass.rollout.handles import Rollout, RolloutGroup
from windlass.rollout.held import (
    INLINE_NBYTES,
    Destination,
    References,
    TensorStore,
    TensorsWritten,
    WriteTensors,
    is_large,
)
from windlass.rollout.messages import (
    LOCAL_WORKER,
    TRAINING_BATCHES,
    Partial,
    TrainingBatch,
    TrainingSample,
    Turn,
)
from windlass.rollout.tensors import IMAGES, HeldTensor, SampleTensor, images_in
from windlass.rollout.trajectories import merge_turns
from windlass.rollout.values import ArrayLike, plain_integers, plain_number

_log = logging.getLogger(__name__)
MAX_WAIT_S = 3600.0
"""Longest time that a request of a rank waits for its answer."""
KEPT_STEPS = 2
"""Number of newest batches that the queue keeps, so that a rank can request its shard again."""
CONTENT_TYPE = "application/msgpack"
PART_NBYTES = 1 << 20
"""Size above which a shard is encoded in parts; about the size of a part."""
NBYTES_PER_TOKEN = 16
"""Assumed encoded size of an output token, for the choice between one part and several parts."""
MAX_ASKED_STEPS = 1024
"""Largest number of requested future steps that a `BatchQueue` remembers. A further request replaces the oldest one."""
ASK_EVERY_S = 20.0
"""Seconds after which a waiting rank repeats its request, because some networks drop silent connections."""
ANSWER_MARGIN_S = 2.0
"""Seconds that a rank waits for an answer beyond the wait that it requested."""
MAX_WRITES = 5
"""Largest number of failed writes in one call of `BatchClient.fetch`. Writes whose bytes may still arrive do not count."""
BACKOFF = Backoff(0.05, 1.0)
"""Pauses between the requests of a rank to which the controller gave no usable answer."""


def training_samples(group: RolloutGroup, rewards: Iterable[object]) -> tuple[TrainingSample, ...]:
    """Return a group's samples with their rewards: one sample per answer, or one per conversation of a workflow.

    The turns of a conversation become one sample, see `merge_turns`. If a workflow has several conversations (or
    branches), each of their samples gets the reward of the rollout, and the tensors of its own images. If the workflow added
    tensors to a rollout, the rollout must have exactly one conversation. The sample of this conversation gets the tensors.

    Args:
        group: finished rollouts.
        rewards: one reward per rollout, as numbers, an array or a tensor.

    Raises:
        ConfigError: the rewards are not one finite number per rollout, a rollout has no generated token, the tensors of an
            image are missing, or a rollout has both tensors of its workflow and several conversations.
    """
    samples = []
    for rollout, reward in zip(group.rollouts, check_rewards(group, rewards), strict=True):
        images = images_in(rollout.tensors)
        others = {n: t for n, t in rollout.tensors.items() if not n.startswith(IMAGES)}
        made = [
            TrainingSample(
                prompt_ids=found.prompt_ids,
                output_ids=found.output_ids,
                logprobs=found.logprobs,
                versions=found.versions,
                loss_mask=found.loss_mask,
                reward=reward,
                group_id=group.group_id,
                engine=rollout.engine,
                task_id=rollout.task_id,
                finish_reason=found.finish_reason,
                tensors={**others, **_of_images(rollout, images, found.images)},
            )
            for found in merge_turns(_turns(rollout, tuple(images)))
        ]
        if not made:
            raise ConfigError(
                f"group {group.group_id}: rollout {rollout.task_id} has no generated token"
            )
        if others and len(made) > 1:
            raise ConfigError(
                f"group {group.group_id}: a rollout with tensors must have one conversation, got {len(made)} in "
                f"rollout {rollout.task_id}; call merge_turns, and choose the tensors of each sample"
            )
        samples += made
    return tuple(samples)


def _of_images(
    rollout: Rollout, known: Mapping[str, Mapping[str, SampleTensor]], keys: Sequence[str]
) -> dict[str, SampleTensor]:
    """Return the tensors of a sample's images, with their names in the sample; see `IMAGES`.

    Args:
        rollout: rollout of the sample.
        known: tensors of the rollout's images, see `images_in`.
        keys: keys of the sample's images, in order.

    Raises:
        ConfigError: the rollout does not have the tensors of an image.
    """
    if missing := [key for key in keys if key not in known]:
        raise ConfigError(
            f"group {rollout.group_id}: tensors of rollout {rollout.task_id} must contain those of its images, got none of "
            f"the images {missing[0]}; keep the tensors whose names begin with {IMAGES!r}"
        )
    return {
        f"{IMAGES}{n}.{name}": tensor
        for n, key in enumerate(keys)
        for name, tensor in known[key].items()
    }


def _turns(rollout: Rollout, images: tuple[str, ...]) -> tuple[Turn, ...]:
    """Return the engine calls of a rollout. The answer to a plain prompt, which has these images, counts as one call."""
    if rollout.turns or not rollout.output_ids:
        return rollout.turns
    answer = Partial(rollout.output_ids, rollout.logprobs, rollout.versions)
    return (Turn(rollout.prompt_ids, answer, rollout.finish_reason, images=images),)


def check_rewards(group: RolloutGroup, rewards: object) -> tuple[float, ...]:
    """Return the rewards of a group's rollouts as one Python number per rollout.

    Raises:
        ConfigError: the rewards are not one finite number per rollout.
    """
    where = f"group {group.group_id}: rewards"
    is_scalar = isinstance(rewards, ArrayLike) and rewards.ndim == 0
    if is_scalar or not isinstance(rewards, Iterable) or isinstance(rewards, str | bytes | Mapping):
        raise ConfigError(f"{where} must be one number per rollout, got {rewards!r}")
    found = tuple(rewards)
    if len(found) != len(group.rollouts):
        raise ConfigError(f"{where} must have {len(group.rollouts)} entries, got {len(found)}")
    unscored = [number for number, reward in enumerate(found) if reward is None]
    if unscored:
        raise ConfigError(
            f"{where}[{unscored[0]}] must be one number, got None; if a group cannot be scored, let the recipe "
            f"return no samples for the group"
        )
    return tuple([plain_number(f"{where}[{n}]", reward) for n, reward in enumerate(found)])


def check_groups(
    what: str, groups: Iterable[Iterable[TrainingSample]]
) -> tuple[tuple[TrainingSample, ...], ...]:
    """Return groups of samples as tuples. `what` is the beginning of the error text.

    Raises:
        ConfigError: a value is not a `TrainingSample`.
    """
    whole = []
    for number, group in enumerate(groups):
        if not isinstance(group, Iterable):
            raise ConfigError(
                f"{what}: group {number} must be a sequence of samples, got {group!r}"
            )
        samples = tuple(group)
        for index, sample in enumerate(samples):
            if not isinstance(sample, TrainingSample):
                raise ConfigError(
                    f"{what}: group {number}, sample {index} must be a TrainingSample, got {sample!r}"
                )
        whole.append(samples)
    return tuple(whole)


_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class _Query(msgspec.Struct):
    step: _Count
    rank: _Count
    world_size: _Count
    deadline_s: Annotated[float, msgspec.Meta(gt=0)]


class BatchQueue:
    """Queue that gives each trainer rank its shard of each step's batch. A rank may repeat a request.

    A group is never split between ranks: rank r of n gets groups r, r + n, r + 2n, ... of the batch.

    Args:
        num_ranks: function that returns the number of connected trainer ranks, or 0 while the number is unknown. The
            queue refuses a request with a `world_size` that does not divide this number.
        inline_nbytes: size up to which the elements of a tensor are part of the answer to a rank. The queue holds larger
            tensors of samples, and writes them into the memory of the rank, see `windlass.rollout.held`.
        transport: name or JSON of the transport for these tensors.

    Attributes:
        store: large tensors that a recipe made in this process.

    Raises:
        ConfigError: there is no such transport.
    """

    def __init__(
        self,
        num_ranks: Callable[[], int] = lambda: 0,
        *,
        inline_nbytes: int = INLINE_NBYTES,
        transport: str = "auto",
    ) -> None:
        self._inline_nbytes = inline_nbytes
        self.store = TensorStore(LOCAL_WORKER, uuid.uuid4().hex[:12], transport=transport)
        self._references = References(lambda held: self.store.release([held.key]))
        self._write: WriteWith = _no_workers
        self._confirmations: dict[int, Confirmations] = {}
        # Held tensors of the samples of each `lend` in progress.
        self._lent: list[Mapping[str, tuple[HeldTensor, str]]] = []
        # Step -> task ids of samples whose tensors are lost, until the step is put again.
        self._lost: dict[int, tuple[str, ...]] = {}
        self._batches: OrderedDict[int, tuple[tuple[TrainingSample, ...], ...]] = OrderedDict()
        self._num_ranks = num_ranks
        self._last_step = -1
        self._asked: OrderedDict[int, None] = OrderedDict()
        self._changes = Changes()
        self._listeners: list[Callable[[Sequence[TrainingSample]], None]] = []
        self._wait_listeners: list[Callable[[], None]] = []
        self._asked_at: dict[int, float] = {}
        self._world_that_asks = 0
        self._has_answered = True

    def on_put(self, listener: Callable[[Sequence[TrainingSample]], None]) -> None:
        """Call `listener` in the event loop with the samples of every batch that `put` adds."""
        self._listeners.append(listener)

    def on_wait(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the event loop when all trainer ranks wait for a batch, see `all_wait`."""
        self._wait_listeners.append(listener)

    def published(self) -> None:
        """Record that the trainer has published the weights that result from its last batch.

        After this call, `all_wait` is True as soon as every rank waits for the next batch.
        """
        self._has_answered = False

    @property
    def all_wait(self) -> bool:
        """True if all trainer ranks wait for a batch, and no rank has received a batch since the last `published`."""
        since = asyncio.get_running_loop().time() - 2 * ASK_EVERY_S
        num_asking = sum(asked_at >= since for asked_at in self._asked_at.values())
        return not self._has_answered and 0 < self._world_that_asks <= num_asking

    async def put(self, step: int, groups: Iterable[Sequence[TrainingSample]]) -> None:
        """Add the batch of `step`, wake all ranks that wait for it, and call the `on_put` listeners with its samples.

        If no process holds a large tensor of the samples yet, this process holds it. Keep only the newest `KEPT_STEPS`
        batches.

        If `settled` has returned lost samples, the caller must put the step again, with new groups in place of the
        groups that contain these samples.

        Raises:
            ConfigError: the step has no lost samples and is not greater than all earlier steps; `groups` is empty; or a
                value of a group is not a `TrainingSample`.
        """
        (step,) = plain_integers("BatchQueue: step", (step,))
        batch = check_groups(f"BatchQueue: step {step}", groups)
        batch = tuple([tuple([await self._held(each) for each in group]) for group in batch])
        if step <= self._last_step and step not in self._lost:
            raise ConfigError(
                f"BatchQueue: step must be > {self._last_step} or a step with lost tensors, got {step}"
            )
        if not batch:
            raise ConfigError(
                f"BatchQueue: the batch of step {step} must have at least one group, got none"
            )
        self._batches[step] = batch
        self._lost.pop(step, None)
        if any(held_in(group) for group in batch):
            self._confirmations[step] = Confirmations()
        self._last_step = max(step, self._last_step)
        self._asked = OrderedDict.fromkeys(asked for asked in self._asked if asked > step)
        while len(self._batches) > KEPT_STEPS:
            oldest = min(self._batches)
            del self._batches[oldest]
            self._confirmations.pop(oldest, None)
        self._changes.notify()
        samples = [sample for group in batch for sample in group]
        for listener in self._listeners:
            listener(samples)

    async def _held(self, sample: TrainingSample) -> TrainingSample:
        """Move the elements of large tensors to `store`, and return the sample without these elements.

        `store` holds the elements until this process drops the sample.
        """
        if not any(is_large(each, self._inline_nbytes) for each in sample.tensors.values()):
            return sample
        tensors = await self.store.hold(sample.tensors, self._inline_nbytes)
        ours = {n: t for n, t in tensors.items() if t.held and t.held.holder == LOCAL_WORKER}
        self._references.watch(ours)
        return msgspec.structs.replace(sample, tensors=tensors)

    async def settled(self, step: int, *, deadline_s: float) -> tuple[str, ...]:
        """Wait until all trainer ranks have the tensors of the batch of `step`, or until tensors are lost.

        A tensor is lost if the process that held it has ended or has freed it, or if its elements do not have the right
        digest at a rank. In this case, no rank gets the batch. The caller must then decline the groups of the returned
        samples, get new groups from the controller, and `put` the step again.

        Returns:
            Task ids of samples with lost tensors; empty if ranks have all tensors, or if no sample has a large tensor.

        Raises:
            ConfigError: the queue does not have the batch.
            PeerTimeout: not all ranks had confirmed the batch within `deadline_s`.
        """
        if step not in self._batches and step not in self._lost:
            raise ConfigError(
                f"settled: step must be one of {[*self._batches, *self._lost]}, got {step}"
            )

        def is_settled() -> bool:
            known = self._confirmations.get(step)
            return step in self._lost or known is None or known.usable

        await self._changes.until(
            is_settled,
            deadline_s,
            lambda: (
                f"batch: not all ranks confirmed the tensors of step {step} within {deadline_s} s"
            ),
        )
        return self._lost.get(step, ())

    @contextlib.asynccontextmanager
    async def lend(
        self, groups: Iterable[Sequence[TrainingSample]]
    ) -> AsyncIterator[tuple[tuple[TrainingSample, ...], ...]]:
        """Let trainer ranks fetch the held tensors of samples inside the block, with `BatchClient.fetch`.

        This is for samples that ranks get from a `TrainController` and not from this queue. The block gets the samples.
        If a recipe made large tensors, no worker holds them, so this process holds them.

        Raises:
            ConfigError: a value of a group is not a `TrainingSample`.
        """
        whole = check_groups("BatchQueue: lend", groups)
        whole = tuple([tuple([await self._held(each) for each in group]) for group in whole])
        lent = held_in(sample for group in whole for sample in group)
        self._lent.append(lent)
        try:
            yield whole
        finally:
            self._lent = [each for each in self._lent if each is not lent]

    def write_with(self, write: WriteWith) -> None:
        """Set the function that lets workers write the tensors that they hold."""
        self._write = write

    def close(self) -> None:
        """Free all tensors that this queue holds. Idempotent."""
        self._batches.clear()
        self.store.close()

    async def requested(self, step: int, *, deadline_s: float) -> None:
        """Wait until a rank requests `step`.

        Request the groups of the batch from the controller only after this call. The controller checks the age of a
        group's tokens only when it delivers the group. If it delivers the group too early, the tokens may be too old
        when the trainer uses them.

        Raises:
            PeerTimeout: no rank requested the step within `deadline_s`.
        """

        def message() -> str:
            newest = f"step {next(reversed(self._asked))}" if self._asked else "none"
            return (
                f"batch: no trainer rank requested step {step} within {deadline_s} s; "
                f"newest request: {newest}"
            )

        await self._changes.until(
            lambda: step in self._asked or step in self._batches, deadline_s, message
        )

    async def shard(
        self, step: int, rank: int, world_size: int, *, deadline_s: float
    ) -> TrainingBatch:
        """Wait until `put` has added the batch of `step`; return the rank's shard of this batch.

        Record the request. This wakes callers of `requested`, and `all_wait` then counts the rank as waiting.

        Raises:
            ConfigError: the rank is outside [0, world_size), or the world size does not divide the number of
                trainer ranks.
            StaleMessage: the queue has dropped the batch, see `KEPT_STEPS`.
            PeerTimeout: the batch was not put within `deadline_s`.
        """
        if not 0 <= rank < world_size:
            raise ConfigError(f"batch: rank must be in [0, {world_size}), got {rank}")
        self._check_world_size(world_size)
        if step > self._last_step:
            self._asked[step] = None
            self._asked.move_to_end(step)
            if len(self._asked) > MAX_ASKED_STEPS:
                self._asked.popitem(last=False)
            self._changes.notify()
            self._note_question(rank, world_size)
        await self._changes.until(
            lambda: self._last_step >= step and step not in self._lost,
            deadline_s,
            lambda: f"batch: step {step} was not put within {deadline_s} s{self._lost_text(step)}",
        )
        if step not in self._batches:
            raise StaleMessage(f"batch: step must be one of {list(self._batches)}, got {step}")
        self._check_world_size(world_size)
        self._asked_at.pop(rank, None)
        self._has_answered = True
        shard = self._batches[step][rank::world_size]
        samples = tuple(sample for group in shard for sample in group)
        return TrainingBatch(step, samples, step in self._confirmations)

    def _lost_text(self, step: int) -> str:
        """Return the end of an error text about a step: how many samples lost their tensors; "" if none did."""
        lost = self._lost.get(step)
        return f"; the tensors of {len(lost)} samples were lost" if lost else ""

    def _check_world_size(self, world_size: int) -> None:
        """Raise `ConfigError` if the world size of a request does not divide the number of trainer ranks."""
        num_ranks = self._num_ranks()
        if num_ranks % world_size:
            raise ConfigError(
                f"batch: world_size must divide the number of trainer ranks, {num_ranks}, "
                f"got {world_size}"
            )

    def _note_question(self, rank: int, world_size: int) -> None:
        """Record that a rank waits for a batch. If all ranks wait now, call the listeners of `on_wait`.

        If the world size has changed, clear the record first, because the trainer may have restarted.
        """
        if not self._num_ranks():
            return
        if world_size != self._world_that_asks:
            self._asked_at.clear()
            self._world_that_asks = world_size
        self._asked_at[rank] = asyncio.get_running_loop().time()
        if self.all_wait:
            tell(self._wait_listeners)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer `GET /v1/batches`. Encode a large batch part by part, so that the event loop is not blocked for long."""
        try:
            asked = msgspec.convert(dict(request.query), _Query, strict=False)
            batch = await self.shard(
                asked.step,
                asked.rank,
                asked.world_size,
                deadline_s=min(asked.deadline_s, MAX_WAIT_S),
            )
        except (ConfigError, msgspec.ValidationError) as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        except StaleMessage as error:
            raise web.HTTPGone(text=str(error)) from error
        except PeerTimeout as error:
            raise web.HTTPGatewayTimeout(text=str(error)) from error
        if _estimated_nbytes(batch.samples) <= PART_NBYTES:
            return web.Response(body=encode(batch), content_type=CONTENT_TYPE)
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
        await response.prepare(request)
        # Write the same bytes as `encode(batch)`: a map of three fields. The last field is the array of samples.
        await response.write(b"\x83" + encode("step") + encode(batch.step))
        await response.write(encode("must_confirm") + encode(batch.must_confirm))
        await response.write(encode("samples"))
        await response.write(b"\xdd" + len(batch.samples).to_bytes(4))
        for part in _parts(batch.samples):
            await response.write(await asyncio.to_thread(_encode_all, part))
        return response

    async def serve_tensors(self, request: web.Request) -> web.Response:
        """Answer `POST /v1/batches/tensors`: let holders write the tensors of a rank's shard."""
        try:
            asked = FETCHES.decode(await request.read())
        except ProtocolError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        known = held_in(self._shard(asked))
        for lent in self._lent:
            known.update(lent)
        # The rank reaches this process at this URL. So this process's transport uses the address of the URL's host.
        self.store.towards = str(request.url.origin())
        done = await write_tensors(known, asked, self.store, self._write)
        return web.Response(body=encode(done), content_type=CONTENT_TYPE)

    async def serve_confirm(self, request: web.Request) -> web.Response:
        """Answer `POST /v1/batches/confirm` when all ranks have confirmed the batch, or when a rank has lost tensors."""
        try:
            asked = CONFIRMS.decode(await request.read())
        except ProtocolError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        confirmations = self._confirmations.get(asked.step)
        known = held_in(self._shard(asked))
        # If the keys differ, the batch was put again after the rank got it.
        if confirmations is None or known.keys() != {*asked.keys}:
            return web.Response(body=encode(Confirmed(usable=False)), content_type=CONTENT_TYPE)
        lost = [known[key][1] for key in asked.lost if key in known]
        if lost and confirmations.usable:
            raise web.HTTPGone(
                text=f"batch: rank {asked.rank} lost tensors of step {asked.step} after all ranks had confirmed the step; "
                "other ranks may have trained on the batch"
            )
        confirmations.add(asked.rank, asked.world_size, lost)
        if lost:
            del self._batches[asked.step], self._confirmations[asked.step]
            self._lost[asked.step] = tuple(dict.fromkeys(lost))
        if lost or confirmations.usable:
            self._changes.notify()
        try:
            await self._changes.until(
                lambda: bool(confirmations.usable or confirmations.lost),
                min(asked.deadline_s, MAX_WAIT_S),
                lambda: f"batch: not all ranks have confirmed step {asked.step}",
            )
        except PeerTimeout as error:
            raise web.HTTPGatewayTimeout(text=str(error)) from error
        answer = Confirmed(usable=not confirmations.lost)
        return web.Response(body=encode(answer), content_type=CONTENT_TYPE)

    def _shard(self, asked: ShardRequest) -> list[TrainingSample]:
        """Return the samples of a rank's shard; empty if the queue does not have the batch."""
        groups = self._batches.get(asked.step, ())[asked.rank :: asked.world_size]
        return [sample for group in groups for sample in group]


async def _no_workers(held: HeldTensor, command: WriteTensors) -> TensorsWritten:  # noqa: ARG001
    """Raise `PeerUnreachable`. The queue calls this function until `write_with` sets another function."""
    raise PeerUnreachable(f"worker {held.holder}: the batch queue has no connection to workers")


def _estimated_nbytes(samples: Sequence[TrainingSample]) -> int:
    """Return the approximate size of the encoded samples in bytes."""
    return sum(
        len(sample.output_ids) * NBYTES_PER_TOKEN
        + sum(len(tensor.data) for tensor in sample.tensors.values())
        for sample in samples
    )


def _parts(samples: Sequence[TrainingSample]) -> Iterator[list[TrainingSample]]:
    """Divide samples into parts of about `PART_NBYTES` or more. Only the last part may be smaller."""
    part: list[TrainingSample] = []
    nbytes = 0
    for sample in samples:
        part.append(sample)
        nbytes += _estimated_nbytes([sample])
        if nbytes >= PART_NBYTES:
            yield part
            part, nbytes = [], 0
    yield part


def _encode_all(samples: Sequence[TrainingSample]) -> bytes:
    """Return the encoded samples, one after the other."""
    return b"".join(map(encode, samples))


class BatchClient(Closing):
    """Client that requests a trainer rank's shards of batches from the controller. Use it in one thread.

    Args:
        url: URL of the controller.
        token: secret of the job, or the token of the trainer role.
        transport: name or JSON of the transport through which large tensors arrive.

    Raises:
        ConfigError: `url` is not an http(s) URL, an HTTP header cannot carry the token, or there is no such transport.
    """

    def __init__(self, url: str, token: str, *, transport: str = "auto") -> None:
        check_url(url, "BatchClient: url")
        self._tensors = RankTensors(url, transport)
        self._url = url
        headers = authorization(check_token(token, "BatchClient: token"))
        self._controller = BlockingHttp(url, headers, to_controller=True)

    def close(self) -> None:
        """Close the connection, and free the memory of tensors that are not in use. Idempotent."""
        self._controller.close()
        self._tensors.close()

    def next_batch(
        self, step: int, rank: int, world_size: int, *, deadline_s: float
    ) -> TrainingBatch:
        """Wait until the controller has the batch of `step`; return this rank's shard of the batch.

        Until `deadline_s` passes, the client repeats the request after a lost connection, for example while
        the controller restarts.

        If samples of the step have large tensors, the processes that hold the tensors of this shard write them into memory
        of this process. If a write fails, the client requests it again. The call returns when every rank has its tensors.
        If a tensor is lost, for example because its worker has ended, all ranks wait until the batch is in the queue again.

        When this process has dropped all tensors of a batch, and all arrays that share their memory, a later batch may
        use this memory.

        Raises:
            ConfigError: step < 0, the rank is not in [0, world_size), deadline_s <= 0, or the controller refused the
                request.
            AuthenticationError: wrong token.
            StaleMessage: the controller has dropped the batch of this step.
            ProtocolError: the controller answered with an unexpected HTTP status.
            PeerTimeout: within `deadline_s`, the controller had no batch of this step or did not answer, or tensors of this
                shard did not arrive.
            TransportUnavailable: the transport cannot be started.
        """
        if step < 0:
            raise ConfigError(f"next_batch: step must be >= 0, got {step}")
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"next_batch: rank must be in [0, world_size={world_size}), got {rank}"
            )
        if not deadline_s > 0:
            raise ConfigError(f"next_batch: deadline_s must be > 0, got {deadline_s}")
        what = f"BatchClient: got no batch of step {step} from {self._url} within {deadline_s} s"
        deadline = Deadline.after(deadline_s, what)
        pauses, last = BACKOFF.pauses(), "tensors of the step were lost"
        while deadline.remaining_s:

            def path(wait_s: float) -> str:
                query = {"step": step, "rank": rank, "world_size": world_size, "deadline_s": wait_s}
                return f"/v1/batches?{urlencode(query)}"

            batch = TRAINING_BATCHES.decode(self._ask("GET", path, lambda _: None, deadline))
            if not batch.must_confirm:
                return batch
            try:
                found = self._with_tensors(batch, rank, world_size, deadline)
            except TransferError as error:
                last = str(error)
                _log.warning("%s; trying again", error)
                time.sleep(min(next(pauses), deadline.remaining_s))
                continue
            if found is not None:
                return found
        raise PeerTimeout(f"{what} ({last})")

    def _with_tensors(
        self, batch: TrainingBatch, rank: int, world_size: int, deadline: Deadline
    ) -> TrainingBatch | None:
        """Return the batch with its tensors after every rank has received its tensors; None if tensors are lost.

        Raises:
            TransferError: a write failed; see `RankTensors.fetch`.
            WindlassError: the controller refused a request or did not answer; see `_ask`.
        """
        whole, lost = self._fetched(batch, rank, world_size, deadline)
        keys = tuple(held_in(batch.samples))

        def confirm(wait_s: float) -> bytes:
            return encode(Confirm(batch.step, rank, world_size, keys, lost, wait_s))

        answer = self._ask("POST", lambda _: "/v1/batches/confirm", confirm, deadline)
        return whole if CONFIRMED.decode(answer).usable else None

    def fetch(
        self, batch: TrainingBatch, rank: int, world_size: int, *, deadline_s: float
    ) -> tuple[TrainingBatch, tuple[str, ...]]:
        """Return the batch with the elements of its tensors, and the keys of lost tensors.

        Call this while the controller runs a `BatchQueue.lend` block with the samples of the batch. The processes that
        hold the tensors write the elements into memory of this process. If a write fails, the client requests it again.
        If tensors are lost, the returned batch has no elements.

        Args:
            batch: samples of this rank.
            rank: number of this rank.
            world_size: number of ranks.
            deadline_s: seconds for the whole call.

        Raises:
            AuthenticationError: wrong token.
            PeerTimeout: the tensors did not arrive within `deadline_s`.
            TransferError: `MAX_WRITES` writes have failed. Writes whose bytes may still arrive do not count.
        """
        what = (
            f"BatchClient: got no tensors of step {batch.step} from {self._url} in {deadline_s:g} s"
        )
        deadline, pauses = Deadline.after(deadline_s, what), BACKOFF.pauses()
        num_failed, last = 0, "no answer"
        while deadline.remaining_s:
            try:
                return self._fetched(batch, rank, world_size, deadline)
            except TransferError as error:
                last = str(error)
                num_failed += not isinstance(error, TransferOutcomeUnknown)
                if num_failed == MAX_WRITES:
                    raise
                _log.warning("%s; trying again", error)
                time.sleep(min(next(pauses), deadline.remaining_s))
        raise PeerTimeout(f"{what} ({last})")

    def _fetched(
        self, batch: TrainingBatch, rank: int, world_size: int, deadline: Deadline
    ) -> tuple[TrainingBatch, tuple[str, ...]]:
        """Return the batch with its elements, and the keys of lost tensors; see `RankTensors.fetch`."""

        def ask(keys: tuple[str, ...], offsets: tuple[int, ...], to: Destination) -> TensorsWritten:
            # Do not repeat the request here, because an earlier write could still change the memory of the repetition.
            wait_s = min(max(deadline.remaining_s, 0.001), WRITE_S)
            body = encode(Fetch(batch.step, rank, world_size, keys, offsets, to, wait_s))
            try:
                reply = self._controller.ask(
                    "POST", "/v1/batches/tensors", body, deadline_s=wait_s + ANSWER_MARGIN_S
                )
            except (PeerTimeout, PeerUnreachable) as error:
                return TensorsWritten(error=str(error))
            if reply.status != 200:
                raise _refusal(reply)
            return WRITTEN.decode(reply.body)

        return self._tensors.fetch(batch, ask)

    def _ask(
        self,
        method: str,
        path: Callable[[float], str],
        body: Callable[[float], bytes | None],
        deadline: Deadline,
    ) -> bytes:
        """Send a request until the controller answers it, and return the answer.

        Args:
            method: HTTP method.
            path: function that returns the path. Its argument is the number of seconds that the controller may wait.
            body: function that returns the content. Its argument is the same number.
            deadline: deadline of the call. The error's text begins with the deadline's `purpose`.

        Raises:
            AuthenticationError, ConfigError, ProtocolError, StaleMessage: see `next_batch`.
            PeerTimeout: there was no answer in time.
        """
        pauses, last = BACKOFF.pauses(), "no answer"
        while left := deadline.remaining_s:
            wait_s = min(left, ASK_EVERY_S)
            try:
                reply = self._controller.ask(
                    method, path(wait_s), body(wait_s), deadline_s=wait_s + ANSWER_MARGIN_S
                )
            except (PeerTimeout, PeerUnreachable) as error:
                last = str(error)
                time.sleep(min(next(pauses), deadline.remaining_s))
                continue
            if reply.status == 200:
                return reply.body
            if reply.status != 504:
                raise _refusal(reply)
            last = reply.text(500)
        raise PeerTimeout(f"{deadline.purpose} ({last})")


def _refusal(reply: HttpReply) -> Exception:
    """Return the error for a response of the controller that refuses a request for a batch."""
    status, text = reply.status, reply.text(500).replace("\n", " ")
    if status in {401, 403}:
        return AuthenticationError(f"BatchClient: {text}")
    if status == 410:
        return StaleMessage(text)
    if status == 400:
        return ConfigError(text)
    return ProtocolError(f"BatchClient: HTTP {status}: {text}")
