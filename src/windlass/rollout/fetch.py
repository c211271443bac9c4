"""Fetch the held tensors of a batch into the memory of a trainer rank, see `windlass.rollout.held`.

Ranks train on a batch together. So every rank confirms that it has all tensors of its shard, and the controller answers when
all ranks have confirmed. If a tensor is lost, no rank gets the batch, and all wait until the batch is in the queue again.

A rank may lose the answer to its request, or a write may miss its deadline. Bytes of that write may then arrive at any later
time. The memory that they may arrive in is called late (see `RankTensors`). The rank copies received elements out of late
memory, and checks the digests of the copies. No holder can write the copies, so the elements of a batch never change. A rank
never frees late memory. It receives later batches in late memory if they fit, so that this memory stays bounded.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import groupby
from typing import Annotated, Any, final

import msgspec

from windlass.closing import Closing
from windlass.errors import (
    PeerTimeout,
    PeerUnreachable,
    TransferFailed,
    TransferOutcomeUnknown,
)
from windlass.net.messages import Codec
from windlass.rollout.held import (
    Destination,
    TensorStore,
    TensorsWritten,
    WriteTensors,
    check_places,
    destination_of,
    digest_of,
    held_of,
)
from windlass.rollout.messages import LOCAL_WORKER, TrainingBatch, TrainingSample
from windlass.rollout.tensors import HeldTensor, SampleTensor, copy_of
from windlass.transfer.arena import Arena, aligned_offsets, keep_mapped
from windlass.transports.base import OneSidedTransport
from windlass.transports.registry import parse_transport
from windlass.wording import counted

_log = logging.getLogger(__name__)
KEPT_ARENAS = 2
"""Number of unused arenas that a rank keeps for later batches, because new memory is slow at its first use."""
WRITE_S = 120.0
"""Longest time of one write of a rank's tensors."""

WriteWith = Callable[[HeldTensor, WriteTensors], Awaitable[TensorsWritten]]
"""Async function that lets the holder of a tensor carry out a write, see `WorkerPool.write_tensors`."""
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ShardRequest(msgspec.Struct, frozen=True):
    """Request of a trainer rank about its shard of a batch. For the attributes see `BatchClient.next_batch`."""

    step: _Count
    rank: _Count
    world_size: Annotated[int, msgspec.Meta(ge=1)]


class Fetch(ShardRequest, frozen=True):
    """Request for the tensors of the shard. For the attributes see `WriteTensors`."""

    keys: tuple[str, ...]
    offsets: tuple[_Count, ...]
    to: Destination
    deadline_s: _Seconds

    def __post_init__(self) -> None:
        check_places(self.keys, self.offsets)


class Confirm(ShardRequest, frozen=True):
    """Report of a trainer rank that it has the tensors of its shard.

    Attributes:
        keys: keys of the tensors of the shard.
        lost: keys of those tensors that no process holds any more.
        deadline_s: seconds that the controller may wait for other ranks.
    """

    keys: tuple[str, ...]
    lost: tuple[str, ...]
    deadline_s: _Seconds


class Confirmed(msgspec.Struct, frozen=True):
    """Answer to `Confirm` when all ranks have confirmed.

    `usable` is False if a tensor of any rank is lost, or if the batch was put again since the rank got it. The rank must
    then request the batch again.
    """

    usable: bool


FETCHES: Codec[Fetch] = Codec(Fetch, "fetch", max_nbytes=64 << 20)
CONFIRMS: Codec[Confirm] = Codec(Confirm, "confirm", max_nbytes=64 << 20)
WRITTEN: Codec[TensorsWritten] = Codec(TensorsWritten, "answer to a fetch")
CONFIRMED: Codec[Confirmed] = Codec(Confirmed, "answer to a confirm")


def held_in(samples: Iterable[TrainingSample]) -> dict[str, tuple[HeldTensor, str]]:
    """Return key -> (held tensor, task id of its sample), for all held tensors of these samples."""
    return {
        held.key: (held, sample.task_id) for sample in samples for held in held_of(sample.tensors)
    }


# --- controller ----------------------------------------------------------------------------


class Confirmations:
    """Confirmations of the ranks for one put of one batch.

    Attributes:
        usable: whether all ranks have all tensors of the batch.
        lost: task ids of samples with lost tensors.
    """

    def __init__(self) -> None:
        self._world_size = 0
        self._ranks: set[int] = set()
        self.usable = False
        self.lost: tuple[str, ...] = ()

    def add(self, rank: int, world_size: int, lost: Iterable[str]) -> None:
        """Record the confirmation of a rank. If the world size has changed, discard the earlier confirmations."""
        if world_size != self._world_size:
            self._world_size = world_size
            self._ranks.clear()
        self._ranks.add(rank)
        self.lost += tuple(lost)
        self.usable |= not self.lost and len(self._ranks) == world_size


async def write_tensors(
    known: Mapping[str, tuple[HeldTensor, str]], asked: Fetch, own: TensorStore, write: WriteWith
) -> TensorsWritten:
    """Let each holder write its tensors into the memory of a rank; return the keys of lost tensors, and errors of writes.

    Args:
        known: tensors of the rank's shard, see `held_in`.
        asked: request of the rank.
        own: tensors that this process holds.
        write: function that makes another process write its tensors.
    """
    places = zip(asked.keys, asked.offsets, strict=True)
    wanted = sorted(
        ((known[key][0], at) for key, at in places if key in known),
        key=lambda each: (each[0].holder, each[0].incarnation),
    )
    missing = [key for key in asked.keys if key not in known]
    jobs: list[Awaitable[TensorsWritten]] = []
    for (holder, _), group in groupby(wanted, lambda each: (each[0].holder, each[0].incarnation)):
        part = list(group)
        keys, offsets = tuple(h.key for h, _ in part), tuple(at for _, at in part)
        command = WriteTensors(keys, offsets, asked.to, min(asked.deadline_s, WRITE_S))
        if holder == LOCAL_WORKER:
            jobs.append(asyncio.to_thread(own.write, command))
        else:
            jobs.append(_written(write, part[0][0], command))
    answers = await asyncio.gather(*jobs)
    missing += [key for done in answers for key in done.missing]
    failed = [done for done in answers if done.error]
    return TensorsWritten(
        tuple(missing),
        "; ".join(done.error for done in failed),
        has_ended=all(done.has_ended for done in failed),
    )


async def _written(write: WriteWith, held: HeldTensor, command: WriteTensors) -> TensorsWritten:
    """Let the holder of `held` carry out `command`. If the holder's process has ended, return all keys as missing.

    If the holder does not answer in time, return an error text.
    """
    try:
        return await write(held, command)
    except PeerUnreachable as error:
        _log.warning("lost %s: %s", counted(len(command.keys), "tensor"), error)
        return TensorsWritten(command.keys)
    except PeerTimeout as error:
        return TensorsWritten(error=str(error))


# --- trainer rank --------------------------------------------------------------------------


@final
class RankTensors(Closing):
    """Memory of a trainer rank for held tensors. Use it in one thread.

    The memory of a batch is used again once no tensor of the batch is in use.

    Memory is late if bytes of an earlier write may still arrive in it. Late memory stays allocated until this process ends.
    If a shard fits into late memory, its tensors arrive there, and are copied. Otherwise the new memory has at least twice
    the size of the largest late memory. So all late memory together has less than four times the size of the largest shard.

    Args:
        towards: URL of the controller; see `TransportConfig.create`.
        transport: name or JSON of the transport. It starts with the first tensor.
    """

    def __init__(self, towards: str, transport: str) -> None:
        self._config, self._towards = parse_transport(transport), towards
        self._transport: OneSidedTransport | None = None
        # Each arena that is not late, with a function that returns None if no tensor in the arena is in use.
        self._arenas: list[tuple[Arena, Callable[[], object]]] = []
        self._late: list[Arena] = []
        # Keys of the tensors that arrived in late memory with wrong digests at the last call of `fetch`.
        self._changed: frozenset[str] = frozenset()

    def fetch(
        self,
        batch: TrainingBatch,
        ask: Callable[[tuple[str, ...], tuple[int, ...], Destination], TensorsWritten],
    ) -> tuple[TrainingBatch, tuple[str, ...]]:
        """Return the batch with the elements of all its tensors. If tensors are lost, return the given batch and their keys.

        A tensor also counts as lost if the elements that arrived do not match its digest. But in late memory, a late write
        may have changed the elements. So the first mismatch there raises TransferFailed, and the caller fetches the batch
        again. If the digest of the tensor does not match in the next call either, the tensor counts as lost.

        Args:
            batch: shard of this rank.
            ask: function that lets the holders write their tensors. Its arguments are the tensors' keys, the tensors'
                offsets in the memory, and the memory as a destination.

        Raises:
            TransferFailed: a write failed, and none of its bytes can arrive later; or a late write may have changed the
                elements.
            TransferOutcomeUnknown: a write failed, and its bytes may still arrive. The memory of this call is late now.
            TransportUnavailable, OSError: the transport cannot be started, or there is too little memory.
            Exception: any exception of `ask`. The memory of this call is late now.
        """
        found = [
            (tensor.held, tensor.nbytes)
            for sample in batch.samples
            for tensor in sample.tensors.values()
            if tensor.held is not None
        ]
        if not found:
            return batch, ()
        offsets, nbytes = aligned_offsets(size for _, size in found)
        transport = self._started()
        arena = self._arena(transport, nbytes)
        keys = tuple(held.key for held, _ in found)
        try:
            answer = ask(keys, offsets, destination_of(transport, arena.region))
        except BaseException:
            self._note_late(arena)
            raise
        failure = f"tensors of step {batch.step}: {answer.error}"
        if answer.error and not answer.has_ended:
            self._note_late(arena)
            raise TransferOutcomeUnknown(failure)
        is_late = arena in self._late
        # All writes of this call have ended.
        owner: Any = None if answer.error or answer.missing else arena.bytes[:]
        if not is_late:
            self._arenas.append((arena, _nothing if owner is None else weakref.ref(owner)))
        if answer.error:
            raise TransferFailed(failure)
        if answer.missing:
            return batch, answer.missing
        whole = memoryview(owner)
        views = {
            held.key: copy_of(owner[at : at + size]) if is_late else whole[at : at + size]
            for (held, size), at in zip(found, offsets, strict=True)
        }
        wrong = [held for held, _ in found if digest_of(views[held.key]) != held.digest]
        changed, self._changed = self._changed, frozenset(held.key for held in wrong if is_late)
        if self._changed - changed:
            raise TransferFailed(
                f"tensors of step {batch.step}: a late write may have changed {counted(len(wrong), 'tensor')}"
            )
        for held in wrong:
            _log.error(
                "the %d bytes of a tensor from %s must have digest %s, got %s; the sample is lost",
                *(views[held.key].nbytes, held.holder, held.digest, digest_of(views[held.key])),
            )
        if wrong:
            return batch, tuple(held.key for held in wrong)
        samples = [_with_elements(sample, views) for sample in batch.samples]
        return msgspec.structs.replace(batch, samples=tuple(samples)), ()

    def _started(self) -> OneSidedTransport:
        """Return the transport; create it at the first call."""
        if self._transport is None:
            self._transport = self._config.create(towards=self._towards)
        return self._transport

    def _note_late(self, arena: Arena) -> None:
        """Record that bytes may still arrive in the memory."""
        if arena not in self._late:
            self._late.append(arena)
            _log.warning(
                "writes of a failed transfer may still arrive in %d bytes of memory, so this memory stays allocated until "
                "this process ends. Later batches that fit use it for receiving, and their tensors are copied out of it",
                arena.nbytes,
            )

    def _arena(self, transport: OneSidedTransport, nbytes: int) -> Arena:
        """Return memory of at least `nbytes` bytes: late memory, an unused arena from `_arenas`, or a new arena.

        Free all other unused arenas, but keep up to `KEPT_ARENAS` - 1 of those that are large enough. If the result is late
        memory, keep none.
        """
        free = [arena for arena, owner in self._arenas if owner() is None]
        self._arenas = [each for each in self._arenas if each[1]() is not None]
        late = next((arena for arena in self._late if arena.nbytes >= nbytes), None)
        least = max(nbytes, 1, *(2 * arena.nbytes for arena in self._late))
        fitting = sorted(
            (arena for arena in free if late is None and arena.nbytes >= least),
            key=lambda arena: arena.nbytes,
        )
        chosen, kept = fitting[:1], fitting[1:KEPT_ARENAS]
        for arena in free:
            if arena not in (*chosen, *kept):
                arena.close()
        self._arenas += [(arena, _nothing) for arena in kept]
        if late is not None:
            return late
        return chosen[0] if chosen else Arena(transport, least)

    def close(self) -> None:
        """Free the memory of batches that are not in use, and close the transport. Idempotent.

        Tensors that are in use stay valid. If the transport allocated their memory, the transport stays open. Late memory
        stays allocated.
        """
        for arena in self._late:
            keep_mapped(arena)
        self._late = []
        used = [arena for arena, owner in self._arenas if owner() is not None]
        for arena, owner in self._arenas:
            if owner() is None:
                arena.close()
        self._arenas = []
        transport, self._transport = self._transport, None
        if transport is None:
            return
        if used and transport.allocator is not None:
            keep_mapped((transport, used))
            return
        for arena in used:
            arena.close()
        transport.close()


def _nothing() -> None:
    """Stand in for a reference to an object that has been freed."""


def _with_elements(sample: TrainingSample, views: Mapping[str, memoryview]) -> TrainingSample:
    """Return the sample with the elements of its held tensors.

    `views` maps the key of each held tensor to its elements.
    """
    if not held_of(sample.tensors):
        return sample
    tensors: dict[str, SampleTensor] = {}
    for name, tensor in sample.tensors.items():
        data = tensor.data if tensor.held is None else views[tensor.held.key]
        tensors[name] = msgspec.structs.replace(tensor, data=data, held=None)
    return msgspec.structs.replace(sample, tensors=tensors)
