"""Large tensors of samples: a holder keeps the elements in its memory, and writes them into memory of a trainer rank.

The holder is the rollout worker whose workflow made the tensor, or the controller for a tensor that a recipe made. The
controller gets only the place and the digest (`HeldTensor`). A trainer rank registers memory with its transport, and asks
the controller for its tensors; the controller passes the request on to the holders. Each holder writes the elements with
the fastest transport that both processes offer, and the rank checks the digests.

The holder owns the elements. It frees them when the controller no longer refers to the tensor (its batch was consumed, or
its sample was discarded), at the end of the lease, and when its process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import final

import msgspec
import numpy as np
import xxhash

from windlass.closing import Closing
from windlass.errors import (
    ConfigError,
    PeerUnreachable,
    ProtocolError,
    RegionError,
    TransferFailed,
    WindlassError,
)
from windlass.rollout.tensors import HeldTensor, SampleTensor
from windlass.transports.base import MemoryRegion, OneSidedTransport, TransportOffer, WriteBatch
from windlass.transports.choice import choose_transport
from windlass.transports.peers import RemoteRegion
from windlass.transports.processes import host_identity
from windlass.transports.registry import parse_transport

INLINE_NBYTES = 64 << 10
"""Size up to which the elements of a tensor travel in messages."""
_ENDED = (ConfigError, RegionError, PeerUnreachable, TransferFailed)
"""Errors of a write after which no byte of it can arrive any more; see `OneSidedTransport.write`."""
LEASE_S = 3600.0
"""Seconds after which a holder frees a tensor, even if the controller still refers to it."""


class Destination(msgspec.Struct, frozen=True):
    """Registered memory of a trainer rank.

    Attributes:
        host: identity of the rank's host, see `host_identity`.
        offers: transports through which peers reach the memory.
        regions: right to write the memory, for each transport.
    """

    host: str
    offers: tuple[TransportOffer, ...]
    regions: tuple[RemoteRegion, ...]


class WriteTensors(msgspec.Struct, frozen=True, tag="write_tensors"):
    """Command to a holder: write tensors into the memory of a trainer rank.

    Attributes:
        keys: key of each tensor, see `HeldTensor`.
        offsets: byte offset of each tensor in the memory.
        to: the memory.
        deadline_s: seconds that the write may take.
    """

    keys: tuple[str, ...]
    offsets: tuple[int, ...]
    to: Destination
    deadline_s: float

    def __post_init__(self) -> None:
        check_places(self.keys, self.offsets)


class TensorsWritten(msgspec.Struct, frozen=True, tag="tensors_written", omit_defaults=True):
    """Result of `WriteTensors`.

    Attributes:
        missing: keys of tensors that the holder has freed. If there are any, the holder has written no tensor.
        error: reason why a write failed; empty if none failed.
        has_ended: whether no byte of the failed write can arrive any more. If False, bytes may still arrive.
    """

    missing: tuple[str, ...] = ()
    error: str = ""
    has_ended: bool = False


def check_places(keys: Sequence[str], offsets: Sequence[int]) -> None:
    """Raise `ProtocolError` unless there is one offset per key."""
    if len(keys) != len(offsets):
        raise ProtocolError(
            f"tensors: keys and offsets must have the same length, got {len(keys)} and {len(offsets)}"
        )


def held_of(tensors: Mapping[str, SampleTensor]) -> list[HeldTensor]:
    """Return the places of those tensors that another process holds."""
    return [tensor.held for tensor in tensors.values() if tensor.held is not None]


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest of a tensor's elements."""
    return xxhash.xxh3_128_hexdigest(data)


def destination_of(transport: OneSidedTransport, region: MemoryRegion) -> Destination:
    """Return the destination for memory that this process has registered."""
    return Destination(host_identity(), transport.offers(), region.remotes)


@final
class TensorStore(Closing):
    """Tensors that this process holds. Call `hold` in the event loop, and the other methods in any thread.

    Args:
        holder: name of this holder.
        incarnation: random id of this process.
        towards: URL of the controller; see `TransportConfig.create`.
        transport: name or JSON of the transport. It starts with the first write.
        lease_s: seconds after which a tensor is freed.

    Attributes:
        towards: see the argument. Later changes have no effect once the transport has started.

    Raises:
        ConfigError: `lease_s` is not above 0, or there is no such transport.
    """

    def __init__(
        self,
        holder: str,
        incarnation: str,
        *,
        towards: str = "",
        transport: str = "auto",
        lease_s: float = LEASE_S,
    ) -> None:
        if not lease_s > 0:
            raise ConfigError(f"tensors: lease_s must be > 0, got {lease_s}")
        self._holder, self._incarnation = holder, incarnation
        self._config, self.towards, self._lease_s = parse_transport(transport), towards, lease_s
        self._held: dict[str, tuple[bytes, asyncio.TimerHandle]] = {}
        self._transport: OneSidedTransport | None = None
        # Held during a write, because a transport refuses a second registration of the same memory.
        self._writing = threading.Lock()
        self._closed = False

    def __len__(self) -> int:
        """Return the number of tensors that this process holds."""
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Number of bytes that this process holds."""
        return sum(memoryview(data).nbytes for data, _ in list(self._held.values()))

    async def hold(
        self, tensors: Mapping[str, SampleTensor], inline_nbytes: int
    ) -> dict[str, SampleTensor]:
        """Store the elements of large tensors (more than `inline_nbytes` bytes). Return all tensors, large ones without elements."""
        large = [name for name, tensor in tensors.items() if is_large(tensor, inline_nbytes)]
        if not large:
            return dict(tensors)
        digests = await asyncio.to_thread(_digests, [tensors[name].data for name in large])
        found = dict(tensors)
        for name, digest in zip(large, digests, strict=True):
            found[name] = self._keep(tensors[name], digest)
        return found

    def _keep(self, tensor: SampleTensor, digest: str) -> SampleTensor:
        """Store the elements of a tensor under a new random key, for at most `lease_s`; return the tensor without elements."""
        key = secrets.token_hex(16)
        lease = asyncio.get_running_loop().call_later(self._lease_s, self.release, [key])
        self._held[key] = tensor.data, lease
        held = HeldTensor(self._holder, self._incarnation, key, digest)
        return msgspec.structs.replace(tensor, data=b"", held=held)

    def release(self, keys: Iterable[str]) -> None:
        """Free tensors. If a write is running, their elements stay in memory until it ends. Unknown keys are ignored."""
        for key in keys:
            _, lease = self._held.pop(key, (b"", None))
            if lease is not None:
                lease.cancel()

    def write(self, command: WriteTensors) -> TensorsWritten:
        """Write tensors into the memory of a trainer rank. Blocks until the last byte has arrived.

        Returns:
            Keys of tensors that this process does not hold, or the error text of a failed write and whether that write has
            ended. If a tensor is missing, no tensor is written.
        """
        places = zip(command.keys, command.offsets, strict=True)
        found = [(self._held.get(key), at) for key, at in places]
        missing = tuple(
            [key for key, (held, _) in zip(command.keys, found, strict=True) if held is None]
        )
        present = [(held[0], at) for held, at in found if held is not None]
        if missing or not present:
            return TensorsWritten(missing)
        try:
            with self._writing:
                _write(self._started(), present, command.to, command.deadline_s)
        except WindlassError as error:
            has_ended = isinstance(error, _ENDED)
            return TensorsWritten(error=f"{self._holder}: {error}", has_ended=has_ended)
        return TensorsWritten()

    def _started(self) -> OneSidedTransport:
        """Return the transport; create it at the first call. Raise `ConfigError` if the holder is closed."""
        if self._closed:
            raise ConfigError("tensors: the holder is closed")
        if self._transport is None:
            self._transport = self._config.create(towards=self.towards)
        return self._transport

    async def end(self) -> None:
        """Call `close`. Use a thread if `close` may block, because a write is running or a transport is open."""
        if self._transport is None and not self._writing.locked():
            self.close()
        else:
            await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Free all tensors, and close the transport. Idempotent."""
        self.release(list(self._held))
        with self._writing:
            self._closed = True
            if self._transport is not None:
                self._transport.close()
                self._transport = None


def is_large(tensor: SampleTensor, inline_nbytes: int) -> bool:
    """Return whether a tensor has more than `inline_nbytes` bytes, and no process holds it yet."""
    return tensor.held is None and tensor.nbytes > inline_nbytes


def _digests(parts: Sequence[bytes]) -> list[str]:
    """Return the digest of each tensor's elements, in order."""
    return [digest_of(part) for part in parts]


def _write(
    transport: OneSidedTransport,
    tensors: Sequence[tuple[bytes, int]],
    to: Destination,
    deadline_s: float,
) -> None:
    """Write the elements of tensors into a destination. `tensors` has (elements, offset in the destination) pairs.

    Raises:
        ConfigError: the two processes have no transport in common.
        TransferError: see `OneSidedTransport.write`.
    """
    same_host = host_identity() == to.host
    choice = choose_transport(
        transport.offers(), to.offers, same_host=same_host, same_address=same_host
    )
    remote = next(
        (each for each in to.regions if each.endpoint.transport == choice.transport), None
    )
    if remote is None:
        raise ConfigError(f"tensors: the rank's memory has no region for {choice.transport}")
    sources = [np.frombuffer(data, np.uint8) for data, _ in tensors]
    # Answers to one prompt share the tensors of its images, and a transport registers a range once.
    ranges = {each.ctypes.data: each for each in sources}
    regions = transport.register_all([(address, each.nbytes) for address, each in ranges.items()])
    try:
        batch = WriteBatch(
            endpoint=remote.endpoint,
            local_addresses=np.array([each.ctypes.data for each in sources], np.uint64),
            remote_addresses=np.array([remote.address + at for _, at in tensors], np.uint64),
            nbytes=np.array([each.nbytes for each in sources], np.uint64),
            regions=(remote,),
        )
        transport.write(batch, deadline_s=deadline_s)
    finally:
        for region, source in zip(regions, ranges.values(), strict=True):
            # The callback refers to `source`, and so keeps the elements in memory. The transport drops the callback
            # when no call uses the elements any more.
            transport.unregister(region, partial(_drop, source))


def _drop(_: object) -> None:
    """Do nothing. A partial of this function keeps its argument."""


@final
class References:
    """Counts of the `HeldTensor` objects in this process, by tensor. After the last object of a tensor, release the tensor.

    A tensor has several objects if its holder sends an outcome again. Call `watch` in the event loop.

    Args:
        release: function that is called in the event loop with a tensor that no object names any more.
    """

    def __init__(self, release: Callable[[HeldTensor], None]) -> None:
        self._release = release
        self._counts: Counter[str] = Counter()

    def watch(self, tensors: Mapping[str, SampleTensor]) -> None:
        """Count the `HeldTensor` objects of these tensors. The count decreases when an object is freed."""
        loop = asyncio.get_running_loop()
        for held in held_of(tensors):
            self._counts[held.key] += 1
            # The callback refers to a copy of `held`, because a reference to `held` itself would keep `held` in memory.
            # Any thread may run the callback.
            known = HeldTensor(held.holder, held.incarnation, held.key, held.digest)
            weakref.finalize(held, _call_in, loop, self._gone, known).atexit = False

    def _gone(self, held: HeldTensor) -> None:
        """Record that one `HeldTensor` of a tensor was freed. If it was the last one, release the tensor."""
        self._counts[held.key] -= 1
        if self._counts[held.key] <= 0:
            del self._counts[held.key]
            self._release(held)


def _call_in(
    loop: asyncio.AbstractEventLoop, call: Callable[[HeldTensor], None], held: HeldTensor
) -> None:
    """Call a function in an event loop, unless the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, held)
