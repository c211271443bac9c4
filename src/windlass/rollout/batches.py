"""Training batches: the controller's process puts them into a queue, and trainer ranks request their shards."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
)
from windlass.net.access import authorization
from windlass.net.addresses import check_url
from windlass.net.blocking_http import BlockingHttp, HttpReply
from windlass.net.clock import Backoff
from windlass.net.messages import encode
from windlass.rollout.handles import Rollout, RolloutGroup
from windlass.rollout.messages import TRAINING_BATCHES, Partial, TrainingBatch, TrainingSample, Turn
from windlass.rollout.trajectories import merge_turns
from windlass.rollout.values import ArrayLike, plain_integers, plain_number

MAX_WAIT_S = 3600.0
KEPT_STEPS = 2
"""Number of newest batches that the queue keeps, so that a rank can request its shard again."""
CONTENT_TYPE = "application/msgpack"
PART_NBYTES = 1 << 20
"""Size above which a shard is encoded in parts; about the size of a part."""
NBYTES_PER_TOKEN = 16
MAX_ASKED_STEPS = 1024
"""Largest number of requested future steps that a `BatchQueue` remembers. A further request replaces the oldest one."""
ASK_EVERY_S = 20.0
"""Seconds after which a waiting rank repeats its request, because some networks drop silent connections."""
ANSWER_MARGIN_S = 2.0
BACKOFF = Backoff(0.05, 1.0)


def training_samples(group: RolloutGroup, rewards: Iterable[object]) -> tuple[TrainingSample, ...]:
    """Return a group's samples with their rewards: one sample per answer, or one per conversation of a workflow.

    The turns of a conversation are one sample, see `merge_turns`. If a workflow has several conversations (or branches),
    each of their samples gets the reward of the rollout.

    Args:
        group: finished rollouts.
        rewards: one reward per rollout, as numbers, an array or a tensor.

    Raises:
        ConfigError: the rewards are not one finite number per rollout, or a rollout has no generated token.
    """
    samples = []
    for rollout, reward in zip(group.rollouts, check_rewards(group, rewards), strict=True):
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
            )
            for found in merge_turns(_turns(rollout))
        ]
        if not made:
            raise ConfigError(
                f"group {group.group_id}: rollout {rollout.task_id} has no generated token"
            )
        samples += made
    return tuple(samples)


def _turns(rollout: Rollout) -> tuple[Turn, ...]:
    """Return the engine calls of a rollout. The answer to a plain prompt counts as one call."""
    if rollout.turns or not rollout.output_ids:
        return rollout.turns
    answer = Partial(rollout.output_ids, rollout.logprobs, rollout.versions)
    return (Turn(rollout.prompt_ids, answer, rollout.finish_reason),)


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
    """Return groups of samples as tuples.

    Raises:
        ConfigError: a value is not a `TrainingSample`; the text begins with `what`.
    """
    whole = []
    for number, group in enumerate(groups):
        if not isinstance(group, Iterable):
            raise ConfigError(f"{what}: group {number} must be samples, got {group!r}")
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
    """

    def __init__(self, num_ranks: Callable[[], int] = lambda: 0) -> None:
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
        """Whether all trainer ranks wait for a batch, and no rank has received a batch since the last `published`."""
        since = asyncio.get_running_loop().time() - 2 * ASK_EVERY_S
        num_asking = sum(asked_at >= since for asked_at in self._asked_at.values())
        return not self._has_answered and 0 < self._world_that_asks <= num_asking

    async def put(self, step: int, groups: Iterable[Sequence[TrainingSample]]) -> None:
        """Add the batch of `step`, and answer all ranks that wait for it.

        Raises:
            ConfigError: the step is not greater than all earlier steps, `groups` is empty, or a value of a
                group is not a `TrainingSample`.
        """
        (step,) = plain_integers("BatchQueue: step", (step,))
        batch = check_groups(f"BatchQueue: step {step}", groups)
        if step <= self._last_step:
            raise ConfigError(f"BatchQueue: step must be > {self._last_step}, got {step}")
        if not batch:
            raise ConfigError(
                f"BatchQueue: the batch of step {step} must have at least one group, got none"
            )
        self._batches[step] = batch
        self._last_step = step
        self._asked = OrderedDict.fromkeys(asked for asked in self._asked if asked > step)
        while len(self._batches) > KEPT_STEPS:
            self._batches.popitem(last=False)
        self._changes.notify()
        samples = [sample for group in batch for sample in group]
        for listener in self._listeners:
            listener(samples)

    async def requested(self, step: int, *, deadline_s: float) -> None:
        """Wait until a rank requests `step`.

        Take the groups of the batch from the controller only after this call. The controller checks the age of
        the tokens when it delivers a group, and groups that are delivered too early become older until the
        trainer uses them.

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
            lambda: self._last_step >= step,
            deadline_s,
            lambda: f"batch: step {step} was not put within {deadline_s} s",
        )
        if step not in self._batches:
            raise StaleMessage(f"batch: step must be one of {list(self._batches)}, got {step}")
        self._check_world_size(world_size)
        self._asked_at.pop(rank, None)
        self._has_answered = True
        shard = self._batches[step][rank::world_size]
        return TrainingBatch(step, tuple(sample for group in shard for sample in group))

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

        A request with another world size starts the record again, because the trainer may have restarted.
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
        # The same bytes as `encode(batch)`: a map of two fields, and the header of an array.
        await response.write(b"\x82" + encode("step") + encode(batch.step) + encode("samples"))
        await response.write(b"\xdd" + len(batch.samples).to_bytes(4))
        for part in _parts(batch.samples):
            await response.write(await asyncio.to_thread(_encode_all, part))
        return response


def _estimated_nbytes(samples: Sequence[TrainingSample]) -> int:
    """Return about how many bytes the encoded samples have."""
    return sum(
        len(sample.output_ids) * NBYTES_PER_TOKEN
        + sum(len(tensor.data) for tensor in sample.tensors.values())
        for sample in samples
    )


def _parts(samples: Sequence[TrainingSample]) -> Iterator[list[TrainingSample]]:
    """Divide samples into parts with at least about `PART_NBYTES` each, except the last one."""
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

    Raises:
        ConfigError: `url` is not an http(s) URL, or an HTTP header cannot carry the token.
    """

    def __init__(self, url: str, token: str) -> None:
        check_url(url, "BatchClient: url")
        self._url = url
        headers = authorization(check_token(token, "BatchClient: token"))
        self._controller = BlockingHttp(url, headers, to_controller=True)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._controller.close()

    def next_batch(
        self, step: int, rank: int, world_size: int, *, deadline_s: float
    ) -> TrainingBatch:
        """Wait until the controller has the batch of `step`; return this rank's shard of the batch.

        Until `deadline_s` passes, the client repeats the request after a lost connection, for example while
        the controller restarts.

        Raises:
            ConfigError: step < 0, the rank is not in [0, world_size), or the controller refused the request.
            AuthenticationError: wrong token.
            StaleMessage: the controller has dropped the batch of this step.
            PeerTimeout: the controller had no batch of this step, or did not answer, within `deadline_s`.
        """
        if step < 0:
            raise ConfigError(f"next_batch: step must be >= 0, got {step}")
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"next_batch: rank must be in [0, world_size={world_size}), got {rank}"
            )
        if not deadline_s > 0:
            raise ConfigError(f"next_batch: deadline_s must be > 0, got {deadline_s}")
        ends = time.monotonic() + deadline_s
        pauses, last = BACKOFF.pauses(), "no answer"
        while (left := ends - time.monotonic()) > 0:
            wait_s = min(left, ASK_EVERY_S)
            query = urlencode(
                {"step": step, "rank": rank, "world_size": world_size, "deadline_s": wait_s}
            )
            try:
                reply = self._controller.ask(
                    "GET", f"/v1/batches?{query}", deadline_s=wait_s + ANSWER_MARGIN_S
                )
            except (PeerTimeout, PeerUnreachable) as error:
                last = str(error)
                time.sleep(max(0.0, min(next(pauses), ends - time.monotonic())))
                continue
            if reply.status == 200:
                return TRAINING_BATCHES.decode(reply.body)
            if reply.status != 504:
                raise _refusal(reply)
            last = reply.text(500)
        raise PeerTimeout(
            f"BatchClient: got no batch of step {step} from {self._url} within {deadline_s} s ({last})"
        )


def _refusal(reply: HttpReply) -> Exception:
    """Return the error for a response with which the controller refuses a request for a batch."""
    status, text = reply.status, reply.text(500).replace("\n", " ")
    if status in {401, 403}:
        return AuthenticationError(f"BatchClient: {text}")
    if status == 410:
        return StaleMessage(text)
    if status == 400:
        return ConfigError(text)
    return ProtocolError(f"BatchClient: HTTP {status}: {text}")
