"""Writes within one host with `process_vm_writev`: the kernel copies into another process.

This is cross memory attach (CMA). A write returns once its bytes are in the peer's memory. It is
one-sided: it completes even if the target's process is stopped. The kernel only checks that pages
are mapped, so pieces are checked against the published regions first. Before the first write, a
peer must prove that it is the process behind its endpoint (`processes.py`).

The kernel copies through the cache and looks up every page, so one thread is slower than memcpy at every call size
(`benchmarks/bench_transports.py`). Several threads therefore share a large batch.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import ClassVar, final

import numpy as np

from windlass.errors import ConfigError, PeerUnreachable, TransferFailed, TransportUnavailable
from windlass.layout.columns import UInt64Array
from windlass.memory.ranges import Pieces, calls, merge_adjacent, split_pieces
from windlass.net.clock import Deadline
from windlass.transports.base import OneSidedTransport, WriteBatch
from windlass.transports.peers import PeerEndpoint
from windlass.transports.processes import OwnProcess, PeerProcesses, check_alive, let_peers_write
from windlass.transports.region_transport import RegionTransport
from windlass.transports.registry import TransportConfig
from windlass.transports.sharing import share
from windlass.transports.traits import CEILING_BYTES_PER_S, TransportTraits, WireReport

MAX_IOVECS = 1024
MAX_CALL_NBYTES = 64 << 20
"""Largest number of bytes per system call; it limits how far one call can exceed a deadline."""
MIN_THREAD_NBYTES = 1 << 20
"""Smallest number of bytes per thread; for less, another thread costs more time than it saves."""


class CmaConfig(TransportConfig, frozen=True, tag="cma"):
    """Configuration of writes into another process of this host with `process_vm_writev`.

    Attributes:
        num_threads: threads that share the copying of one batch, >= 1.
    """

    remedy: ClassVar[str] = "allow ptrace between processes of this user, or use --transport shm"

    num_threads: int = 2

    def create(self, *, towards: str = "", gpu: int = -1) -> OneSidedTransport:  # noqa: ARG002
        return CmaTransport(self.num_threads)


def write_process_memory(
    pid: int, local: UInt64Array, remote: UInt64Array, nbytes: UInt64Array, deadline: Deadline
) -> None:
    """Write pieces into another process. Check the deadline before each system call.

    The columns are (n,): addresses in this process and in the other one, and sizes of at most `MAX_CALL_NBYTES`.

    Raises:
        OSError: the system call failed.
        TransferFailed: the deadline passed between two calls.
    """
    local_vectors = np.ascontiguousarray(np.stack([local, nbytes], axis=1))
    remote_vectors = np.ascontiguousarray(np.stack([remote, nbytes], axis=1))
    for part in calls(nbytes, max_pieces=MAX_IOVECS, max_nbytes=MAX_CALL_NBYTES):
        ours, theirs = local_vectors[part], remote_vectors[part]
        left = int(nbytes[part].sum())
        while left:
            deadline.check_before_more()
            done = writev(pid, ours, theirs)
            if done == 0:
                raise OSError(errno.EIO, "process_vm_writev wrote nothing")
            left -= done
            # The kernel stops before the first page that cannot be written; the next call returns the reason.
            if left:
                ends = np.cumsum(ours[:, 1])
                whole = int(np.searchsorted(ends, done, side="right"))
                head = np.uint64(done) - (ends[whole - 1] if whole else np.uint64(0))
                ours, theirs = ours[whole:], theirs[whole:]
                for vectors in (ours, theirs):
                    vectors[0, 0] += head
                    vectors[0, 1] -= head


_libc = ctypes.CDLL(None, use_errno=True)
_process_vm_writev = _libc.process_vm_writev
_process_vm_writev.restype = ctypes.c_ssize_t
_ADDRESS, _COUNT = ctypes.c_void_p, ctypes.c_ulong
_process_vm_writev.argtypes = [ctypes.c_int, _ADDRESS, _COUNT, _ADDRESS, _COUNT, _COUNT]


def writev(pid: int, local_vectors: UInt64Array, remote_vectors: UInt64Array) -> int:
    """Call `process_vm_writev` once, and return the number of bytes written.

    The vectors are (n, 2): address and size of each piece in this process, and in the other process.

    Raises:
        OSError: the system call failed.
    """
    ours, theirs = local_vectors.ctypes.data, remote_vectors.ctypes.data
    done = int(_process_vm_writev(pid, ours, len(local_vectors), theirs, len(remote_vectors), 0))
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return done


@final
class CmaTransport(RegionTransport):
    """`OneSidedTransport` over `process_vm_writev`.

    Raises:
        ConfigError: `num_threads` < 1.
        TransportUnavailable: the kernel or a seccomp filter refuses the call.
    """

    traits = TransportTraits(
        same_host=True,
        one_sided=True,
        ceiling_bytes_per_s=CEILING_BYTES_PER_S["process_vm_writev"],
    )

    def __init__(self, num_threads: int = 1) -> None:
        if num_threads < 1:
            raise ConfigError(f"cma: num_threads must be >= 1, got {num_threads}")
        self._num_threads = num_threads
        self.helpers: Executor = ThreadPoolExecutor(max(num_threads - 1, 1), "windlass-cma")
        """Threads that share the copying of a batch with the calling thread."""
        _probe()
        let_peers_write()
        self._own, self._peers = OwnProcess("cma"), PeerProcesses()
        super().__init__(self._own.endpoint)

    def report(self) -> WireReport:
        return WireReport("cma", "process_vm_writev", f"pid {self._endpoint.address}")

    def close(self) -> None:
        self._own.close()
        super().close()
        self.helpers.shutdown(wait=True)

    def _write(self, batch: WriteBatch, deadline: Deadline) -> None:
        pid = self._peers.check(batch.endpoint)
        try:
            self._copy_into(pid, batch, deadline)
        except OSError as error:
            check_alive(batch.endpoint)
            raise _classify(error, batch.endpoint) from error
        check_alive(batch.endpoint)

    def _copy_into(self, pid: int, batch: WriteBatch, deadline: Deadline) -> None:
        """Write a batch with several threads. Wait for all threads, also after an error, so that no byte arrives later."""
        pieces = merge_adjacent(batch.local_addresses, batch.remote_addresses, batch.nbytes)
        total = int(batch.nbytes.sum())
        num_parts = max(min(self._num_threads, total // MIN_THREAD_NBYTES), 1)
        parts = list(_shares(pieces, total, num_parts))
        jobs = [partial(write_process_memory, pid, *part, deadline) for part in parts]
        share(jobs, self.helpers, len(jobs) - 1)


def _shares(pieces: Pieces, total: int, num_parts: int) -> Iterator[Pieces]:
    """Divide pieces into `num_parts` parts of similar size, and cut pieces that are too large for one call."""
    limit = min(MAX_CALL_NBYTES, -(-total // num_parts))
    local, remote, nbytes = split_pieces(*pieces, limit)
    goals = np.arange(1, num_parts) * (total / num_parts)
    cuts = np.searchsorted(np.cumsum(nbytes), goals, "left") + 1
    edges = [0, *cuts.tolist(), len(nbytes)]
    for start, stop in itertools.pairwise(edges):
        yield local[start:stop], remote[start:stop], nbytes[start:stop]


def _classify(error: OSError, peer: PeerEndpoint) -> Exception:
    match error.errno:
        case errno.ESRCH:
            return PeerUnreachable(f"cma: pid {peer.address} is gone")
        case errno.EPERM:
            return TransferFailed(
                f"cma: not allowed to write to pid {peer.address}: both processes need the same user, "
                "ptrace permission (kernel.yama.ptrace_scope <= 1 or CAP_SYS_PTRACE) and a seccomp "
                "profile that allows process_vm_writev; or use transport 'shm'"
            )
        case errno.EFAULT:
            # Not a RegionError, which promises that nothing was sent: earlier pieces may have been written.
            return TransferFailed(
                f"cma: an address of the batch is not mapped here or in pid {peer.address}"
            )
        case _:
            return TransferFailed(f"cma: pid {peer.address}: {error}")


def _probe() -> None:
    """Write one byte into this process to find out whether the system call exists and is allowed."""
    source, target = np.array([7], np.uint8), np.zeros(1, np.uint8)
    local, remote = source.ctypes.data, target.ctypes.data
    pieces = np.array([[local], [remote], [1]], np.uint64)
    try:
        write_process_memory(
            os.getpid(), pieces[0], pieces[1], pieces[2], Deadline.after(5.0, "cma probe")
        )
    except (OSError, TransferFailed) as error:
        raise TransportUnavailable(
            f"cma: process_vm_writev is refused here ({error}); a container needs a seccomp profile "
            "that allows it; use transport 'shm' instead"
        ) from error
