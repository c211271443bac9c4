"""`pull`: the process that owns the memory reads the bytes out of the writer's process.

Every other transport writes into the memory of the peer. That is impossible if the peer is an engine that sleeps:
memory that sleeps keeps its addresses and loses its pages, so no other process can map it. With `pull`, a write is a
request. The writer sends the pieces (addresses and sizes) to the peer. The peer reads them into its own memory, with
`process_vm_readv` or with its GPU (`pull_gpu.py`), and answers. It accepts only pieces inside memory that it has
registered. A registration is an entry in a table, so the memory may lose its pages between two writes and get new ones.

The sender, the round and the digests are the same as for every other transport (docs/adr/0013-the-engine-pulls.md).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar, final

import msgspec
import numpy as np

from windlass.errors import (
    DECODE_ERRORS,
    ConfigError,
    PeerUnreachable,
    ProtocolError,
    RegionError,
    TransferError,
    TransferFailed,
    TransferOutcomeUnknown,
)
from windlass.layout.columns import UInt64Array
from windlass.memory.ranges import Pieces
from windlass.net.clock import Deadline
from windlass.transports.base import MemoryRegion, OneSidedTransport, WriteBatch
from windlass.transports.peers import PeerEndpoint
from windlass.transports.process_memory import copy_process_memory, error_of, probe, readv
from windlass.transports.processes import (
    OwnProcess,
    check_alive,
    connect_within,
    credentials_of,
    is_same_user,
    let_peers_write,
    own_endpoint,
)
from windlass.transports.region_transport import RegionTransport
from windlass.transports.regions import check_inside, overlaps
from windlass.transports.registry import TransportConfig
from windlass.transports.traits import CEILING_BYTES_PER_S, MemoryType, TransportTraits, WireReport

if TYPE_CHECKING:
    from windlass.transports.gpu_sharing import Exported
    from windlass.transports.pull_gpu import GpuReads

_log = logging.getLogger(__name__)
MARGIN_S, MARGIN_SHARE = 0.5, 0.2
"""Time that the reader leaves for its answer: `MARGIN_S`, or this share of the time until the deadline if that is less."""
MAX_PIECES = 1 << 24
"""Maximum number of pieces of a request."""
MAX_ANSWER_NBYTES = 1 << 16
HEAD_S = 5.0
"""Seconds within which a writer must send the head of its request. The head contains the deadline of the rest."""
ANSWER_S = 5.0
"""Seconds within which a writer must receive the answer."""
CLOSE_S = 10.0
"""Seconds that `close` waits for running reads."""
MAX_EXPORTED_NBYTES = 1 << 24
"""Maximum size of the exported memory's description in a request."""
HEAD = struct.Struct("<QdQ")
"""Head of a request: number of pieces, seconds until the reader's deadline, and number of bytes of the encoded
`GpuReads.exports`. These bytes follow the head, and then three columns of uint64: addresses in the reader's process,
addresses in the writer's process, and sizes. Then the writer sends the descriptors of exported chunks (`send_chunks`)."""


class PullConfig(TransportConfig, frozen=True, tag="pull"):
    """Configuration of transfers that the destination reads, for engines that sleep while the trainer steps.

    Attributes:
        num_threads: threads that share the copying of one link, >= 1.
    """

    memory: ClassVar[frozenset[MemoryType]] = frozenset(MemoryType)
    is_automatic: ClassVar[bool] = False
    remedy: ClassVar[str] = "allow ptrace between processes of this user"

    num_threads: int = 2

    def create(self, *, towards: str = "", gpu: int = -1) -> OneSidedTransport:  # noqa: ARG002
        """Start the transport, for GPU memory if `gpu` is not below 0."""
        return PullTransport(self.num_threads, gpu)


class _Answer(msgspec.Struct, frozen=True):
    """Answer of the reader: the class name of an error of `_ERRORS` and its text; both empty if it has read all."""

    error: str = ""
    text: str = ""


_ERRORS = {kind.__name__: kind for kind in (RegionError, TransferFailed, TransferOutcomeUnknown)}
"""Errors of the reader that the writer raises unchanged. For every other error, the writer raises TransferFailed."""


@final
class PullTransport(RegionTransport):
    """`OneSidedTransport` whose peer carries out the writes: it reads the bytes.

    Args:
        num_threads: see `PullConfig`.
        gpu: ordinal of the GPU with the registered memory; -1 for host memory.

    Raises:
        ConfigError: `num_threads` < 1.
        TransportUnavailable: the kernel or a seccomp filter refuses `process_vm_readv`, or the GPU cannot be used.
    """

    def __init__(self, num_threads: int = 1, gpu: int = -1) -> None:
        if num_threads < 1:
            raise ConfigError(f"pull: num_threads must be >= 1, got {num_threads}")
        self._gpu: GpuReads | None = None
        if gpu < 0:
            probe(readv, "pull")
            let_peers_write()
        else:
            # Loading the driver takes time, and fails without one.
            from windlass.memory.cuda.gpu import shared_gpu
            from windlass.transports.pull_gpu import GpuReads

            self._gpu = GpuReads(shared_gpu(gpu))
        self._num_threads = num_threads
        self._helpers: Executor = ThreadPoolExecutor(max(num_threads - 1, 1), "windlass-pull")
        super().__init__(own_endpoint("pull"))
        self._changed = threading.Condition(self._lock)
        # Targets and sizes of each read that runs now.
        self._reads: dict[socket.socket, tuple[UInt64Array, UInt64Array]] = {}
        self._own = OwnProcess("pull", self._endpoint, self._accept)

    @property
    def traits(self) -> TransportTraits:
        """Capabilities of this transport. The highest throughput differs between host memory and GPU memory."""
        wire = "process_vm_readv" if self._gpu is None else "cuda-ipc-read"
        return TransportTraits(
            same_host=True,
            one_sided=False,
            ceiling_bytes_per_s=CEILING_BYTES_PER_S[wire],
            gpu=-1 if self._gpu is None else self._gpu.gpu.device.ordinal,
            unpinned=True,
        )

    def report(self) -> WireReport:
        """Return the wire of this transport: CUDA IPC, or `process_vm_readv`."""
        if self._gpu is not None:
            return WireReport("pull", "cuda-ipc", f"GPU {self.traits.gpu}")
        return WireReport("pull", "process_vm_readv", f"pid {self._endpoint.address}")

    def max_pieces(self, endpoint: PeerEndpoint) -> int:  # noqa: ARG002
        """Return `MAX_PIECES`, so that a link needs few requests. For each request, the reader maps the allocations again."""
        return MAX_PIECES

    def fence(self, *, deadline_s: float) -> None:
        """Wait until all reads that this process carries out for writers have ended.

        No new read begins for a writer that has ended, because `_read` first checks the connection to the writer.

        Raises:
            TransferFailed: a read still runs, or a copy by the GPU missed its deadline and may still write.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._reads, deadline_s):
                raise TransferFailed(
                    f"pull: {len(self._reads)} reads have not ended within {deadline_s} s"
                )
        if self.is_late:
            raise TransferFailed(
                f"pull: a copy by GPU {self.traits.gpu} missed its deadline and may still write; start the engine again"
            )

    def close(self) -> None:
        """Wait at most `CLOSE_S` for running reads, forget all regions, and free memory that no running read fills."""
        self._own.close()
        with contextlib.suppress(TransferFailed):
            self.fence(deadline_s=CLOSE_S)
        super().close()
        with self._lock:
            self._free_untouched(keep=True)
        self._helpers.shutdown(wait=True)

    # --- writer ------------------------------------------------------------------------------

    def _write(self, batch: WriteBatch, deadline: Deadline) -> None:
        """Ask the peer to read the pieces, and wait for its answer; for errors see `OneSidedTransport.write`."""
        peer, pid = batch.endpoint, check_alive(batch.endpoint)
        deadline.check_before_more()
        pieces = batch.remote_addresses, batch.local_addresses, batch.nbytes
        exported = [] if self._gpu is None else self._gpu.exports(pieces)
        encoded = msgspec.msgpack.encode(exported)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            try:
                connect_within(line, peer, max(deadline.remaining_s, 0.001))
                if credentials_of(line).pid != pid:
                    raise PeerUnreachable(f"pull: another process listens in place of pid {pid}")
                left_s = deadline.remaining_s
                reader_s = left_s - min(MARGIN_S, MARGIN_SHARE * left_s)
                head = HEAD.pack(len(batch.nbytes), reader_s, len(encoded))
                line.sendall(head + encoded + np.stack(pieces).tobytes())
                self._send_chunks(line, exported)
            except OSError as error:
                # The peer has not received the whole request, so it does not carry out the request.
                check_alive(peer)
                kind = TransferFailed if isinstance(error, TimeoutError) else PeerUnreachable
                raise kind(f"pull: pid {pid} did not take the request: {error}") from error
            answer = self._receive_answer(line, batch, deadline)
        check_alive(peer)
        if answer.error:
            raise _ERRORS.get(answer.error, TransferFailed)(answer.text)

    def _send_chunks(self, line: socket.socket, exported: Sequence[Exported]) -> None:
        """Send the descriptors of exported chunks, until the reader has refused the request; see `send_chunks`."""
        if self._gpu is not None:
            from windlass.transports.gpu_sharing import send_chunks

            device = self._gpu.gpu.device
            all(send_chunks(line, device, one) for one in exported)

    def _receive_answer(
        self, line: socket.socket, batch: WriteBatch, deadline: Deadline
    ) -> _Answer:
        """Wait for the reader's answer.

        Raises:
            PeerUnreachable: the reader's process has ended.
            TransferFailed: the reader closed the connection, or its answer cannot be decoded. The reader reads no more
                bytes.
            TransferOutcomeUnknown: the deadline passed.
        """
        data = bytearray()
        try:
            while len(data) <= MAX_ANSWER_NBYTES and (part := line.recv(MAX_ANSWER_NBYTES)):
                data += part
                line.settimeout(max(deadline.remaining_s, 0.001))
        except TimeoutError as error:
            check_alive(batch.endpoint)
            raise TransferOutcomeUnknown(
                f"pull: pid {batch.endpoint.address} has not answered within {deadline.seconds} s and may still read"
            ) from error
        except OSError as error:
            check_alive(batch.endpoint)
            raise TransferFailed(
                f"pull: the connection to pid {batch.endpoint.address} broke: {error}"
            ) from error
        try:
            return msgspec.msgpack.decode(data, type=_Answer)
        except DECODE_ERRORS:
            check_alive(batch.endpoint)
            raise TransferFailed(
                f"pull: pid {batch.endpoint.address} refused the request, see its log"
            ) from None

    # --- reader ------------------------------------------------------------------------------

    def _accept(self, line: socket.socket) -> None:
        """Carry out the request of a new connection in a new thread. Refuse processes of other users, except root."""
        if not is_same_user(line):
            _log.warning("pull: refused a process of another user")
            line.close()
            return
        threading.Thread(
            target=self._serve, args=(line,), name="windlass-pull-read", daemon=True
        ).start()

    def _serve(self, line: socket.socket) -> None:
        """Read the pieces of one request, and answer. Close the connection only after the last byte has been read."""
        with line:
            try:
                pieces, exported, deadline = _receive_request(line)
                self._read(line, pieces, exported, deadline)
                answer = _Answer()
            except TransferError as error:
                answer = _Answer(type(error).__name__, str(error))
            except (ProtocolError, OSError) as error:
                _log.warning("pull: a request was refused: %s", error)
                return
            line.settimeout(ANSWER_S)
            with contextlib.suppress(OSError):
                line.sendall(msgspec.msgpack.encode(answer))

    def _read(
        self, line: socket.socket, pieces: Pieces, exported: bytes, deadline: Deadline
    ) -> None:
        """Read pieces out of the writer's process. `exported`: see `GpuReads.exports`.

        Raises:
            ProtocolError: `exported` cannot be decoded.
            RegionError: a piece is outside the memory that this process has registered, or outside the allocations that
                the writer has exported; nothing was read.
            PeerUnreachable: the writer has closed the connection, or its process has ended.
            TransferFailed: the read did not start, or failed before the last byte.
            TransferOutcomeUnknown: copies by the GPU did not end by the deadline.
        """
        targets, _, nbytes = pieces
        writer = msgspec.structs.replace(self._endpoint, address=str(credentials_of(line).pid))
        with self._changed:
            spans = self.table.spans()
            check_inside(targets, nbytes, spans, "memory that the reader has registered")
            self._reads[line] = targets, nbytes
        try:
            if is_closed(line):
                raise PeerUnreachable("pull: the writer has given up")
            pid = int(writer.address)
            if self._gpu is not None:
                self._gpu.read(line, pid, exported, pieces, deadline)
            else:
                copy_process_memory(readv, pid, pieces, deadline, self._helpers, self._num_threads)
        except OSError as error:
            raise error_of(error, writer, "read from") from error
        finally:
            with self._changed:
                del self._reads[line]
                self._free_untouched()
                self._changed.notify_all()

    def _is_touched(self, region: MemoryRegion) -> bool:
        """Return whether a read that this process carries out may still write into the region."""
        return self.is_late or any(overlaps(region, *read) for read in self._reads.values())

    @property
    def is_late(self) -> bool:
        """True if a copy by the GPU missed its deadline, so that bytes may still arrive."""
        return self._gpu is not None and self._gpu.gpu.is_late


def _receive_request(line: socket.socket) -> tuple[Pieces, bytes, Deadline]:
    """Receive a request. Return its pieces, the exported memory, and the deadline.

    The pieces are addresses in this process, addresses in the writer's process, and sizes.

    Raises:
        OSError: the writer has closed the connection or has ended.
        ProtocolError: the request is too large or has no deadline.
        TransferFailed: the request was not complete by its deadline.
    """
    head = _receive_exactly(line, HEAD.size, Deadline.after(HEAD_S, "pull: head of a request"))
    num_pieces, seconds, num_exported = HEAD.unpack(head)
    is_small = num_pieces <= MAX_PIECES and num_exported <= MAX_EXPORTED_NBYTES
    if not is_small or not 0 <= seconds < 1e6:
        raise ProtocolError(
            f"pull: a request must have at most {MAX_PIECES} pieces, at most {MAX_EXPORTED_NBYTES} bytes of exports and a "
            f"deadline in [0, 1e6) s, got {num_pieces}, {num_exported} and {seconds}"
        )
    deadline = Deadline.after(seconds, "pull")
    exported = _receive_exactly(line, num_exported, deadline)
    data = _receive_exactly(line, 24 * num_pieces, deadline)
    columns = np.frombuffer(data, np.uint64).reshape(3, num_pieces)
    return (columns[0], columns[1], columns[2]), exported, deadline


def _receive_exactly(line: socket.socket, nbytes: int, deadline: Deadline) -> bytes:
    """Receive and return `nbytes` bytes.

    Raises:
        OSError: the writer closed the connection before it had sent all bytes.
        TransferFailed: the bytes did not arrive by the deadline.
    """
    data = bytearray(nbytes)
    view, done = memoryview(data), 0
    while done < nbytes:
        deadline.check_before_more()
        line.settimeout(max(deadline.remaining_s, 0.001))
        count = line.recv_into(view[done:])
        if not count:
            raise OSError(
                errno.ECONNRESET, "the writer closed the connection before its request was whole"
            )
        done += count
    return bytes(data)


def is_closed(line: socket.socket) -> bool:
    """Return whether the writer has closed the connection. The writer then no longer waits for this read."""
    line.setblocking(False)
    try:
        return not line.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
