"""Streams of whole tensors from one process to several, bucket by bucket, by one-sided writes.

Every bucket is a version and every version a round: the one that sends is a trainer rank of a fleet of its
own, those that receive are engine ranks, and what they hold is one parameter, the bucket. So the links take
the fastest transport that both ends have, bytes are verified, and a member that dies is a closed
connection that ends the stream for all the others at once.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import msgspec

from windlass.config import (
    ControlConfig,
    PauseMode,
    PhaseDeadlines,
    UpdateMode,
    check_numbers,
    take_name,
)
from windlass.control.report import UpdateReport
from windlass.engines.client import EngineClient, EngineWeights
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable, RoundAborted
from windlass.integrations.buckets import (
    MIN_BUCKET_NBYTES,
    BucketEntry,
    BucketFiller,
    BucketReader,
    least_capacity,
)
from windlass.integrations.hosted import HostAddress, HostedController
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.net.access import Access
from windlass.net.addresses import url_of
from windlass.trainers.client import TrainerClient, TrainerWeights
from windlass.transfer.arena import Arena, memory_of
from windlass.transfer.base import ParameterMemory
from windlass.transports.base import OneSidedTransport
from windlass.transports.registry import TransportConfig, parse_transport

if TYPE_CHECKING:
    import torch

__all__ = [
    "BucketReceiver",
    "BucketSender",
    "StreamAddress",
    "StreamEnd",
    "StreamReport",
    "StreamSettings",
]

FLEET_S = 1.0
"""For a receiver to be there when a bucket is sent: all of them were before the first one."""
NUM_SLOTS = 2
"""Buckets at the sender: one is filled while the other is sent."""
SHRINK = 0.9
"""A bucket that can be smaller than this part of its size is made anew."""
SENDER = "sender"


class StreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a stream is sent.

    Attributes:
        bucket_nbytes: of a bucket, at most; it becomes smaller once a stream has shown what is needed.
        transport: see `connect_trainer`.
        mode: `in_place`: a receiver is written once it has done with the bucket before; `staged`: while
            it still reads that, into a second one, which costs it a copy and as much memory again.
        gpu: ordinal of the GPU that buckets lie on; -1 for host memory.
        deadline_s: for a receiver to be done with one bucket, and for one bucket to be sent.
        connect_s: for all members to find each other.
    """

    bucket_nbytes: int
    transport: TransportConfig
    mode: UpdateMode = UpdateMode.IN_PLACE
    gpu: int = -1
    deadline_s: float = 600.0
    connect_s: float = 60.0

    def __post_init__(self) -> None:
        check_numbers(
            self, {"bucket_nbytes": MIN_BUCKET_NBYTES, "gpu": -1}, ("deadline_s", "connect_s")
        )


class StreamAddress(HostAddress, frozen=True):
    """Where receivers connect."""

    bucket_nbytes: int


@dataclass(slots=True)
class StreamReport:
    """What one stream took.

    Attributes:
        num_tensors, num_buckets: sent. nbytes: of the buckets, once for every receiver.
        fill_s: seconds in which the sender took tensors from its caller and filled buckets.
        wire_s: inside the transports' writes, of the slowest link of every bucket.
        update_s: of all rounds. seconds: from the first tensor to the last reply.
        transports: name -> links that took it.
    """

    num_tensors: int = 0
    num_buckets: int = 0
    nbytes: int = 0
    fill_s: float = 0.0
    wire_s: float = 0.0
    update_s: float = 0.0
    seconds: float = 0.0
    transports: dict[str, int] | None = None

    def add(self, report: UpdateReport) -> None:
        """Count a bucket."""
        self.num_buckets += 1
        self.nbytes += report.nbytes
        self.wire_s += report.wire_s
        self.update_s += report.update_s
        self.transports = report.transports


def _bucket_manifest(worker: str, role: Role, nbytes: int) -> ShardManifest:
    builder = ManifestBuilder(worker, role)
    builder.add_parameter("bucket", nbytes=nbytes, dtype=DType.UINT8)
    builder.add_shard("bucket", (nbytes,), Box((0,), (nbytes,)), "bucket")
    return builder.build()


def _bucket_view(transport: OneSidedTransport, arena: Arena) -> torch.Tensor:
    return memory_of(transport).view(arena.address, (arena.nbytes,), (1,), DType.UINT8)


@final
class BucketSender:
    """Sends streams of tensors to every receiver, and hosts their controller.

    Memory: two buckets, from `open` to `close`.

    Args:
        settings: of every stream.

    Attributes:
        was_opened: whether `open` has been called, be it closed now or not.
    """

    def __init__(self, settings: StreamSettings) -> None:
        self._settings = settings
        self._bucket_nbytes = self._wanted_nbytes = settings.bucket_nbytes
        self._members: tuple[str, ...] = ()
        self._owned: ExitStack | None = None
        self._version = -1
        self.was_opened = False

    def open(self, host: str) -> StreamAddress:
        """Be there for receivers; what is open already stays, unless buckets are better made smaller.

        Args:
            host: address of this process that every receiver reaches.

        Raises:
            ConfigError, PeerUnreachable, TransportUnavailable, TransferFailed: see `HostedController`, `create_transport`
                and `Arena`.
        """
        self.was_opened = True
        if self._wanted_nbytes < SHRINK * self._bucket_nbytes:
            self.close()
        if self._owned is None:
            self._bucket_nbytes = self._wanted_nbytes
            with ExitStack() as undo:
                self._start(host, undo)
                self._owned = undo.pop_all()
        address = self._hosted.address(Access.ENGINE)
        return StreamAddress(address.url, address.token, self._bucket_nbytes)

    def wait_for(self, members: Sequence[str]) -> None:
        """Return once these receivers are connected: they, and no others, get the next streams.

        Raises:
            ConfigError: it is not open, or there are none.
            EngineRefused: one of them cannot take part; quotes the reason.
            PeerTimeout: names who is missing after `connect_s`.
        """
        if self._owned is None:
            raise ConfigError("wait_for: the stream must be open")
        if not members:
            raise ConfigError("wait_for: members must name one receiver at least, got none")
        self._members = tuple(members)
        self._hosted.wait_for_fleet(self._members, self._settings.connect_s, num_trainers=1)

    async def send(self, weights: AsyncIterator[tuple[str, torch.Tensor]]) -> StreamReport:
        """Send one stream; return once every receiver has all of it.

        Memory: a tensor is read when it comes, and not after the next one is asked for.

        Raises:
            ConfigError: no receivers are waited for, or a tensor that cannot be sent.
            UnsupportedLayout: a dtype that checkpoints do not have.
            PeerUnreachable: a receiver is gone. It is closed, as after every other error, and the others'
                streams end at once.
            RoundAborted, PeerTimeout: a bucket was not delivered.
        """
        if self._owned is None or not self._members:
            raise ConfigError("send: wait_for must have been called")
        try:
            return await self._send(weights)
        except BaseException:
            self.close()  # the receivers' connections close, and they hear of it by that
            raise

    def close(self) -> None:
        """End every session, free the buckets. Idempotent."""
        owned, self._owned = self._owned, None
        if owned is not None:
            owned.close()

    def _start(self, host: str, undo: ExitStack) -> None:
        settings, nbytes = self._settings, self._bucket_nbytes
        deadlines = PhaseDeadlines(
            pause_s=settings.deadline_s, write_s=settings.deadline_s, fleet_s=FLEET_S
        )
        self._hosted = HostedController(
            [url_of(host, 1)], ControlConfig(mode=settings.mode, deadlines=deadlines)
        )
        undo.callback(self._hosted.close)
        address = self._hosted.address(Access.TRAINER)
        transport = settings.transport.create(towards=address.url, gpu=settings.gpu)
        undo.callback(transport.close)
        arenas = []
        for _ in range(NUM_SLOTS):
            arenas.append(Arena(transport, nbytes, memory_of(transport)))
            undo.callback(arenas[-1].close)
        self._slots = [_bucket_view(transport, arena) for arena in arenas]
        undo.callback(self._slots.clear)
        self._slot = 0
        places = [ParameterMemory(arena.address, nbytes) for arena in arenas]
        self._sending = places[0]
        self._places = places
        self._client = TrainerClient(
            TrainerWeights(
                manifest=_bucket_manifest(f"{SENDER}/0", Role.TRAINER, nbytes),
                parameters=lambda: (self._sending,),
            ),
            transport=transport,
            controller=address.url,
            token=address.token,
            registered=[arena.region for arena in arenas],
            connect_deadline_s=settings.connect_s,
        )
        undo.callback(self._client.leave)

    async def _send(self, weights: AsyncIterator[tuple[str, torch.Tensor]]) -> StreamReport:
        filler, report = BucketFiller(self._bucket_nbytes), StreamReport()
        began = asked = time.perf_counter()
        sending: Future[UpdateReport] | None = None
        async for name, tensor in weights:
            for entry in filler.place(name, tensor):
                if entry is None:
                    report.fill_s += time.perf_counter() - asked
                    sending = await self._next(sending, filler.close_bucket(is_last=False), report)
                    asked = time.perf_counter()
                else:
                    self._copy(entry, tensor)
            report.num_tensors += 1
        report.fill_s += time.perf_counter() - asked
        sending = await self._next(sending, filler.close_bucket(is_last=True), report)
        await self._delivered(sending, report)
        report.seconds = time.perf_counter() - began
        if self._bucket_nbytes == self._settings.bucket_nbytes:
            self._wanted_nbytes = least_capacity(filler.parts, self._bucket_nbytes)
        return report

    def _copy(self, entry: BucketEntry, tensor: torch.Tensor) -> None:
        import torch

        flat = tensor.detach().reshape(-1).view(torch.uint8)
        bucket = self._slots[self._slot]
        bucket[entry.offset : entry.offset + entry.nbytes].copy_(
            flat[entry.begin : entry.begin + entry.nbytes]
        )

    async def _next(
        self, sending: Future[UpdateReport] | None, end: bytes, report: StreamReport
    ) -> Future[UpdateReport]:
        """Send the bucket that is full, once the one before is delivered; go on in the other one."""
        import torch

        bucket = self._slots[self._slot]
        bucket[bucket.numel() - len(end) :].copy_(
            torch.frombuffer(bytearray(end), dtype=torch.uint8)
        )
        if bucket.is_cuda:
            torch.cuda.current_stream(bucket.device).synchronize()
        if sending is not None:
            await self._delivered(sending, report)
        self._sending = self._places[self._slot]
        self._slot = (self._slot + 1) % NUM_SLOTS
        self._version += 1
        return self._client.publish_soon(self._version, deadline_s=2 * self._settings.deadline_s)

    async def _delivered(self, sending: Future[UpdateReport], report: StreamReport) -> None:
        done = await asyncio.wrap_future(sending)
        report.add(done)
        gone = sorted({*self._members} - {*done.engines})
        if gone:
            why = "; ".join(f"{name}: {done.left_out.get(name, 'not connected')}" for name in gone)
            raise PeerUnreachable(f"bucket {report.num_buckets}: not delivered to {why}")


@final
class _Turns:
    """`EngineHooks` of a receiver: whose turn the bucket is, the fleet's or the reader's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_expected = self._is_filled = False
        self._failure = ""
        self._version = self._seen = -1

    def expect(self, expected: bool) -> None:
        """Whether buckets may come."""
        with self._changed:
            self._is_expected, self._is_filled = expected, False
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """No bucket will come any more."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    @property
    def has_failed(self) -> bool:
        """Whether `fail` was called."""
        return bool(self._failure)

    def wait_filled(self, deadline_s: float) -> None:
        """Return once there is a bucket to read.

        Raises:
            PeerUnreachable: the sender is gone. PeerTimeout: none within `deadline_s`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_filled or self._failure, deadline_s):
                raise PeerTimeout(f"receive: no bucket came within {deadline_s} s")
            if not self._is_filled:
                raise PeerUnreachable(f"receive: {self._failure}")

    def give_back(self) -> None:
        """The bucket has been read."""
        with self._changed:
            self._is_filled = False
            self._changed.notify_all()

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:  # noqa: ARG002
        """See `EngineHooks`: return once the bucket has been read."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_filled or self._failure, deadline_s):
                raise PeerTimeout(f"pause: a bucket was not read within {deadline_s} s")
            if self._failure or not self._is_expected:
                self.fail("this receiver takes no part in the stream")
                raise RoundAborted(self._failure)

    def resume(self, deadline_s: float) -> None:  # noqa: ARG002
        """See `EngineHooks`: the reader's turn, if what is there is new."""
        with self._changed:
            if self._version > self._seen:
                self._seen, self._is_filled = self._version, True
                self._changed.notify_all()

    def finalise(self) -> None:
        """See `EngineHooks`: nothing is derived from a bucket."""

    def set_version(self, version: int, deadline_s: float) -> None:  # noqa: ARG002
        """See `EngineHooks`."""
        self._version = version


@final
class BucketReceiver:
    """Receives the streams of a `BucketSender`.

    Memory: one bucket, or two (`staged`), from `connect` to `close`.

    Args:
        settings: see `StreamSettings`; a bucket is as large as the sender's.

    Attributes:
        name: of this receiver, for `BucketSender.wait_for`; no other process has it.
    """

    def __init__(self, settings: StreamSettings) -> None:
        self.name = f"receiver-{secrets.token_hex(6)}"
        self._settings = settings
        self._address: StreamAddress | None = None
        self._owned: ExitStack | None = None
        self._turns = _Turns()

    def connect(self, address: StreamAddress) -> None:
        """Be one of the sender's receivers; nothing where it is already, and the connection holds.

        Raises:
            AuthenticationError, ProtocolError, PeerTimeout, PeerUnreachable: see `Client.connect`.
            TransportUnavailable, TransferFailed: see `create_transport` and `Arena`.
        """
        if self._owned is not None and (self._turns.has_failed or address != self._address):
            self.close()
        if self._owned is None:
            with ExitStack() as undo:
                self._start(address, undo)
                self._owned = undo.pop_all()
            self._address = address
        self._turns.expect(True)

    async def receive(self) -> AsyncIterator[list[tuple[str, torch.Tensor]]]:
        """Yield the (name, tensor)s of one stream, bucket by bucket. A reader that stops earlier leaves the fleet.

        Memory: tensors are valid until the next bucket is asked for; see `BucketReader.tensors`.

        Raises:
            ConfigError: it is not connected.
            PeerUnreachable: the sender is gone, or has given up because another receiver is.
            PeerTimeout: no bucket within `deadline_s`.
            ProtocolError: a bucket that cannot be read.
        """
        if self._owned is None:
            raise ConfigError("receive: connect must have been called")
        reader, turns, is_last = BucketReader(self._bucket), self._turns, False
        try:
            while not is_last:
                await asyncio.to_thread(turns.wait_filled, self._settings.deadline_s)
                table = reader.table()
                yield [*reader.tensors(table)]
                is_last = table.is_last
                turns.give_back()
        except BaseException:
            self.close()
            raise
        turns.expect(False)

    def close(self) -> None:
        """Leave the fleet, free the bucket. Idempotent."""
        self._turns.fail("this receiver is closed")
        owned, self._owned = self._owned, None
        if owned is not None:
            owned.close()

    def _start(self, address: StreamAddress, undo: ExitStack) -> None:
        settings, nbytes = self._settings, address.bucket_nbytes
        self._turns = turns = _Turns()
        transport = settings.transport.create(towards=address.url, gpu=settings.gpu)
        undo.callback(transport.close)
        arena = Arena(transport, nbytes, memory_of(transport))
        undo.callback(arena.close)
        self._bucket = _bucket_view(transport, arena)
        client = EngineClient(
            EngineWeights(
                manifest=_bucket_manifest(f"{self.name}/0", Role.ENGINE, nbytes),
                addresses=(arena.address,),
                regions=(arena.region,),
            ),
            transport=transport,
            hooks=turns,
            controller=address.url,
            token=address.token,
            can_send=False,
            connect_deadline_s=settings.connect_s,
        )
        undo.callback(client.leave)

        def watch() -> None:
            client.wait_disconnected(threading.TIMEOUT_MAX)
            turns.fail("the sender is gone, or has given up")

        threading.Thread(target=watch, name="windlass-watch", daemon=True).start()


@final
class StreamEnd:
    """One rank's end for checkpoint engines, which are told late, or never, whether they send, receive, or neither.

    Args:
        bucket_nbytes: see `StreamSettings`, as for `mode` and `deadline_s`.
        transport: see `connect_trainer`.
        device: where buckets lie: `cuda`, `cpu`, or `auto`: on this process's GPU if it has one.
        option: how messages name the place of these in the framework's configuration.

    Attributes:
        sender: to be opened by the one that sends. receiver: to be connected by those that receive.

    Raises:
        ConfigError: an argument is out of range. TransportUnavailable: see `parse_transport`.
    """

    def __init__(
        self,
        bucket_nbytes: int,
        *,
        transport: str,
        mode: str,
        device: str,
        deadline_s: float,
        option: str,
    ) -> None:
        import torch

        if device not in {"auto", "cpu", "cuda"}:
            raise ConfigError(f"{option}.device must be auto, cpu or cuda, got {device!r}")
        on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        settings = StreamSettings(
            bucket_nbytes=bucket_nbytes,
            transport=parse_transport(transport),
            mode=take_name(f"{option}.mode", mode, UpdateMode),
            gpu=torch.cuda.current_device() if on_gpu else -1,
            deadline_s=deadline_s,
        )
        self.sender, self.receiver = BucketSender(settings), BucketReceiver(settings)

    async def send(self, weights: AsyncIterator[tuple[str, torch.Tensor]]) -> StreamReport | None:
        """Send every tensor; where the sender was never opened, take part in the gathers and return None.

        Args:
            weights: collective over the ranks of a trainer.

        Raises:
            PeerUnreachable, RoundAborted, PeerTimeout, UnsupportedLayout: see `BucketSender.send`; the
                receivers have been told before the rest of `weights` is taken.
        """
        try:
            return await self.sender.send(weights) if self.sender.was_opened else None
        finally:
            # The other ranks go on with gathers that wait for this one, whatever has failed here.
            async for _ in weights:
                pass

    def close(self) -> None:
        """End every connection, free the buckets. Idempotent; both ends can be opened again."""
        self.sender.close()
        self.receiver.close()
