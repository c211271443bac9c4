"""Streams of whole tensors from one sender to several receivers, bucket by bucket, by one-sided writes.

A stream has a separate fleet, with the sender as the only trainer rank, every receiver as an engine, and the bucket as
the only parameter. The sender publishes each bucket as one version, like weights, in a round of its own: the bytes are
verified, and go over the fastest transport that sender and receiver both have. If a process dies, the stream ends at
once for all others.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Sequence
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
from windlass.trainers.client import TrainerClient
from windlass.trainers.pending_update import PendingUpdate
from windlass.trainers.weights import TrainerWeights
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
"""Seconds that a round waits for a receiver that is not connected. All receivers connect before the first bucket."""
NUM_SLOTS = 2
"""Number of the sender's buckets: the sender fills one bucket while it sends the other."""
SHRINK = 0.9
"""The sender allocates smaller buckets if their size is below this fraction of the present size."""
SENDER = "sender"


class StreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a stream.

    Attributes:
        bucket_nbytes: largest size of a bucket in bytes; `BucketSender.open` may choose a smaller size after a stream.
        transport: see `connect_trainer`.
        mode: with `in_place`, the sender writes after the receiver has read the previous bucket. With `staged`, the
            sender writes while the receiver still reads: the receiver then has a second bucket, and copies the bytes
            from one bucket to the other.
        gpu: ordinal of the GPU that stores the buckets; -1 for host memory.
        deadline_s: longest time in seconds for a receiver to read one bucket, and for the sender to write one.
        connect_s: longest time in seconds for all members to connect.
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
    """Address to which receivers connect.

    Attributes:
        bucket_nbytes: size of the sender's buckets in bytes.
    """

    bucket_nbytes: int


@dataclass(slots=True)
class StreamReport:
    """Figures of one stream.

    Attributes:
        num_tensors, num_buckets: number of sent tensors and buckets.
        nbytes: bytes of the buckets, counted once for every receiver.
        fill_s: seconds that the sender spent on taking tensors from its caller and filling buckets.
        wire_s: seconds inside the transports' writes: the sum over buckets of the slowest link's time.
        update_s: seconds of all rounds.
        seconds: time from the first tensor to the last reply.
        transports: name of a transport -> number of links that used this transport for the last bucket.
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
        """Add the figures of one bucket's round."""
        self.num_buckets += 1
        self.nbytes += report.nbytes
        self.wire_s += report.wire_s
        self.update_s += report.update_s
        self.transports = report.transports


def _bucket_manifest(worker: str, role: Role, nbytes: int) -> ShardManifest:
    """Return a manifest with the bucket as the only parameter, of `nbytes` elements of uint8."""
    builder = ManifestBuilder(worker, role)
    builder.add_parameter("bucket", nbytes=nbytes, dtype=DType.UINT8)
    builder.add_shard("bucket", (nbytes,), Box((0,), (nbytes,)), "bucket")
    return builder.build()


def _bucket_view(transport: OneSidedTransport, arena: Arena) -> torch.Tensor:
    """Return a tensor of uint8 that shares memory with an arena, which contains one bucket."""
    return memory_of(transport).view(arena.address, (arena.nbytes,), (1,), DType.UINT8)


@final
class BucketSender:
    """Sender of streams of tensors to all receivers; it also hosts the fleet's controller.

    Memory: two buckets, from `open` to `close`.

    Args:
        settings: settings of every stream.

    Attributes:
        was_opened: whether `open` was ever called; `close` does not reset it.
    """

    def __init__(self, settings: StreamSettings) -> None:
        self._settings = settings
        self._bucket_nbytes = self._wanted_nbytes = settings.bucket_nbytes
        self._members: tuple[str, ...] = ()
        self._owned: ExitStack | None = None
        self._version = -1
        self.was_opened = False

    def open(self, host: str) -> StreamAddress:
        """Start the controller, allocate the buckets, and return the address for receivers.

        A sender that is already open normally stays open. If the previous stream would fit much smaller buckets
        (`SHRINK`), the sender closes and opens again with smaller buckets.

        Args:
            host: address of this process that every receiver can reach.

        Raises:
            ConfigError, PeerUnreachable: this host has no address that receivers can reach.
            TransportUnavailable, TransferFailed: the transport does not work here, or cannot register the buckets.
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
        """Wait until these receivers are connected. Only these receivers get the next streams.

        Raises:
            ConfigError: the sender is not open, or `members` is empty.
            EngineRefused: a receiver cannot take part; the message has the reason.
            PeerTimeout: receivers are missing after `connect_s`; the message names them.
        """
        if self._owned is None:
            raise ConfigError("wait_for: the sender is not open; call open first")
        if not members:
            raise ConfigError("wait_for: members must name at least one receiver, got none")
        self._members = tuple(members)
        self._hosted.wait_for_fleet(self._members, self._settings.connect_s, num_trainers=1)

    async def send(self, weights: AsyncIterator[tuple[str, torch.Tensor]]) -> StreamReport:
        """Send one stream; return when every receiver has all tensors.

        After any error the sender is closed, and the receivers' streams end at once.

        Memory: the sender copies each tensor before it requests the next tensor from `weights`.

        Raises:
            ConfigError: `wait_for` was not called, or a tensor cannot be sent.
            UnsupportedLayout: a tensor has a dtype that checkpoints do not have.
            PeerUnreachable: a receiver did not get a bucket, for example because its connection closed.
            RoundAborted, PeerTimeout: the round of a bucket failed.
        """
        if self._owned is None or not self._members:
            raise ConfigError("send: the sender has no receivers; call open and wait_for first")
        try:
            return await self._send(weights)
        except BaseException:
            # This closes the receivers' connections, so their streams end now and not at their deadlines.
            self.close()
            raise

    def close(self) -> None:
        """Close every connection, stop the controller, and free the buckets. Idempotent."""
        owned, self._owned = self._owned, None
        if owned is not None:
            owned.close()

    def _start(self, host: str, undo: ExitStack) -> None:
        """Start the controller, register the buckets, and connect as the only trainer rank. Closing `undo` reverts this."""
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
        """Copy all tensors into buckets, and publish each full bucket while the next bucket is filled; see `send`."""
        filler, report = BucketFiller(self._bucket_nbytes), StreamReport()
        began = asked = time.perf_counter()
        sending: PendingUpdate | None = None
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
        """Copy one part of a tensor into the current bucket. `entry` has its position in the tensor and in the bucket."""
        import torch

        flat = tensor.detach().reshape(-1).view(torch.uint8)
        bucket = self._slots[self._slot]
        bucket[entry.offset : entry.offset + entry.nbytes].copy_(
            flat[entry.begin : entry.begin + entry.nbytes]
        )

    async def _next(
        self, sending: PendingUpdate | None, end: bytes, report: StreamReport
    ) -> PendingUpdate:
        """Publish the full bucket after the previous bucket is delivered, and switch to the other bucket.

        `sending` is the update that sends the previous bucket. `end` has the last bytes of the full bucket (see
        `BucketFiller.close_bucket`).

        Returns:
            The update that now sends the full bucket.
        """
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
        deadline_s = 2 * self._settings.deadline_s
        return self._client.publish(self._version, wait=False, deadline_s=deadline_s)

    async def _delivered(self, sending: PendingUpdate, report: StreamReport) -> None:
        """Wait until a bucket's round has ended, and add the round's figures to the report.

        Raises:
            PeerUnreachable: a receiver did not get the bucket; the message has the receiver's name and the reason.
            RoundAborted, PeerTimeout: the round failed.
        """
        done = await sending
        report.add(done)
        gone = sorted({*self._members} - {*done.engines})
        if gone:
            why = "; ".join(f"{name}: {done.left_out.get(name, 'not connected')}" for name in gone)
            raise PeerUnreachable(f"bucket {report.num_buckets} was not delivered to {why}")


@final
class _Turns:
    """`EngineHooks` of a receiver; lets either the sender write the bucket or the caller of `receive` read the bucket."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_expected = self._is_filled = False
        self._failure = ""
        self._version = self._seen = -1

    def expect(self, expected: bool) -> None:
        """Set whether the receiver expects buckets, and mark the bucket as empty."""
        with self._changed:
            self._is_expected, self._is_filled = expected, False
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Record why no more buckets will come. Only the first call has an effect."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    @property
    def has_failed(self) -> bool:
        """Whether `fail` was called."""
        return bool(self._failure)

    def wait_filled(self, deadline_s: float) -> None:
        """Wait until there is a bucket to read.

        Raises:
            PeerUnreachable: `fail` was called; the message has the reason.
            PeerTimeout: no bucket came within `deadline_s`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_filled or self._failure, deadline_s):
                raise PeerTimeout(f"receive: no bucket came within {deadline_s} s")
            if not self._is_filled:
                raise PeerUnreachable(f"receive: {self._failure}")

    def give_back(self) -> None:
        """Record that the reader has read the bucket."""
        with self._changed:
            self._is_filled = False
            self._changed.notify_all()

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:  # noqa: ARG002
        """Wait until the reader has read the bucket; see `EngineHooks`.

        Raises:
            PeerTimeout: the reader did not read the bucket within `deadline_s`.
            RoundAborted: the receiver has failed, or expects no bucket.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_filled or self._failure, deadline_s):
                raise PeerTimeout(
                    f"pause: the receiver did not read a bucket within {deadline_s} s"
                )
            if self._failure or not self._is_expected:
                self.fail("this receiver takes no part in the stream")
                raise RoundAborted(self._failure)

    def resume(self, deadline_s: float) -> None:  # noqa: ARG002
        """Let the reader read the bucket if the bucket's version is new; see `EngineHooks`."""
        with self._changed:
            if self._version > self._seen:
                self._seen, self._is_filled = self._version, True
                self._changed.notify_all()

    def finalise(self) -> None:
        """See `EngineHooks`. Do nothing: a bucket has no computed tensors."""

    def set_version(self, version: int, deadline_s: float) -> None:  # noqa: ARG002
        """See `EngineHooks`. Record the version of the bucket."""
        self._version = version


@final
class BucketReceiver:
    """Receiver of the streams of a `BucketSender`.

    Memory: one bucket, or two (`staged`), from `connect` to `close`.

    Args:
        settings: see `StreamSettings`; `bucket_nbytes` is ignored, because `StreamAddress` contains the sender's size.

    Attributes:
        name: unique name of this receiver, for `BucketSender.wait_for`.
    """

    def __init__(self, settings: StreamSettings) -> None:
        self.name = f"receiver-{secrets.token_hex(6)}"
        self._settings = settings
        self._address: StreamAddress | None = None
        self._owned: ExitStack | None = None
        self._turns = _Turns()

    def connect(self, address: StreamAddress) -> None:
        """Connect to the sender, and expect a stream.

        Keep an existing connection to the same address if its stream has not failed. Otherwise close the existing
        connection first.

        Raises:
            AuthenticationError, ProtocolError: the sender refused this receiver.
            PeerTimeout, PeerUnreachable: the sender did not answer within `connect_s`.
            TransportUnavailable, TransferFailed: the transport does not work here, or cannot register the bucket.
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
        """Yield (name, tensor) pairs of one stream, one list per bucket.

        The receiver disconnects if the caller stops before the last bucket, and after any error.

        Memory: tensors are valid until the caller requests the next bucket; see `BucketReader.tensors`.

        Raises:
            ConfigError: the receiver is not connected.
            PeerUnreachable: the connection to the sender closed. The sender also closes the connection if another
                receiver fails.
            PeerTimeout: no bucket came within `deadline_s`.
            ProtocolError: a bucket cannot be read.
        """
        if self._owned is None:
            raise ConfigError("receive: the receiver is not connected; call connect first")
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
        """Leave the fleet and free the bucket. Idempotent."""
        self._turns.fail("this receiver is closed")
        owned, self._owned = self._owned, None
        if owned is not None:
            owned.close()

    def _start(self, address: StreamAddress, undo: ExitStack) -> None:
        """Register the bucket, and join the sender's fleet as an engine. Closing `undo` reverts this."""
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
            turns.fail("the connection to the sender has ended")

        threading.Thread(target=watch, name="windlass-watch", daemon=True).start()


@final
class StreamEnd:
    """Sender and receiver of one rank, for a checkpoint engine of a framework.

    Each rank has both, because a framework creates the checkpoint engine before the rank knows whether it sends or
    receives.

    Args:
        bucket_nbytes, mode, deadline_s: see `StreamSettings`.
        transport: see `connect_trainer`.
        device: memory of the buckets: `cuda`, `cpu`, or `auto` for this process's GPU if it has one.
        option: name of the section of the framework's configuration, for error messages.

    Attributes:
        sender: sender, which the sending rank opens.
        receiver: receiver, which every receiving rank connects.

    Raises:
        ConfigError: an argument is out of range.
        TransportUnavailable: see `parse_transport`.
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
        """Send every tensor. A rank that never opened its sender only takes part in the gathers and returns None.

        Args:
            weights: (name, tensor) pairs. Getting the next pair is collective over the ranks of the trainer.

        Raises:
            ConfigError, PeerUnreachable, RoundAborted, PeerTimeout, UnsupportedLayout: see `BucketSender.send`.
        """
        try:
            return await self.sender.send(weights) if self.sender.was_opened else None
        finally:
            # All trainer ranks gather each tensor together. If this rank has an error, the other ranks gather the
            # remaining tensors nevertheless. They would wait for this rank, so take part in these gathers.
            async for _ in weights:
                pass

    def close(self) -> None:
        """Close every connection and free the buckets. Idempotent; sender and receiver can be opened again."""
        self.sender.close()
        self.receiver.close()
