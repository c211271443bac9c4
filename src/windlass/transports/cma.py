"""`process_vm_writev`: the kernel copies into another process of this host (cross memory attach).

Truly one-sided: the target may be stopped while the write completes, and it needs nothing
but memory. The kernel checks no bounds beyond mapped pages, so pieces are checked against
the published regions first. A peer is a pid and its start time: a pid that was given to
another process is noticed. Measured 12-14 GB/s on a 2-core AMD EPYC guest, 2026-11.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt

from windlass.errors import (
    PeerUnreachable,
    RegionError,
    TransferFailed,
    TransferOutcomeUnknown,
    TransportUnavailable,
)
from windlass.telemetry.clock import Deadline
from windlass.transports.base import (
    MemoryRegion,
    PeerEndpoint,
    RemoteRegion,
    WireReport,
    WriteBatch,
)
from windlass.transports.regions import RegionTable, check_batch

__all__ = ["CmaTransport", "merge_adjacent", "process_start_time", "write_process_memory"]

MAX_IOVECS = 1024
MAX_CALL_NBYTES = 64 << 20
"""Bytes per system call: bounds how long one call can outlast a deadline."""

UInt64Array = npt.NDArray[np.uint64]


def process_start_time(pid: int) -> str:
    """Clock ticks since boot at which the process started; empty when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in {"Z", "X"} else fields[19]


def merge_adjacent(
    local: UInt64Array, remote: UInt64Array, nbytes: UInt64Array
) -> tuple[UInt64Array, UInt64Array, UInt64Array]:
    """Join pieces that follow each other on both sides."""
    if len(nbytes) < 2:
        return local, remote, nbytes
    joins = (local[:-1] + nbytes[:-1] == local[1:]) & (remote[:-1] + nbytes[:-1] == remote[1:])
    heads = np.flatnonzero(np.r_[True, ~joins])
    return local[heads], remote[heads], np.add.reduceat(nbytes, heads)


def write_process_memory(
    pid: int, local: UInt64Array, remote: UInt64Array, nbytes: UInt64Array, deadline: Deadline
) -> None:
    """Write all pieces into `pid`.

    Raises:
        OSError: of the system call.
        TransferOutcomeUnknown: never by the kernel, which returns only when done.
        TransferFailed: the deadline passed between two calls.
    """
    local, remote, nbytes = _split(*merge_adjacent(local, remote, nbytes))
    local_vectors = np.ascontiguousarray(np.stack([local, nbytes], axis=1))
    remote_vectors = np.ascontiguousarray(np.stack([remote, nbytes], axis=1))
    cumulative = np.cumsum(nbytes)
    start, written = 0, 0
    while start < len(nbytes):
        deadline.check_before_more()
        stop = min(
            start + MAX_IOVECS,
            max(start + 1, int(np.searchsorted(cumulative, written + MAX_CALL_NBYTES, "right"))),
        )
        expected = int(cumulative[stop - 1]) - written
        done = _writev(pid, local_vectors[start:stop], remote_vectors[start:stop])
        if done < expected:
            # A partial count stops at the first bad page; asking again names the reason.
            start, done = _advance(local_vectors, remote_vectors, start, done, written, cumulative)
            written += done
            continue
        written += done
        start = stop


def _split(
    local: UInt64Array, remote: UInt64Array, nbytes: UInt64Array
) -> tuple[UInt64Array, UInt64Array, UInt64Array]:
    """Cut pieces over `MAX_CALL_NBYTES`, so that one call stays short."""
    if len(nbytes) == 0 or int(nbytes.max()) <= MAX_CALL_NBYTES:
        return local, remote, nbytes
    counts = (nbytes + MAX_CALL_NBYTES - 1) // np.uint64(MAX_CALL_NBYTES)
    row = np.repeat(np.arange(len(nbytes)), counts.astype(np.int64))
    first = np.r_[0, np.cumsum(counts.astype(np.int64))[:-1]]
    offset = ((np.arange(len(row)) - first[row]) * MAX_CALL_NBYTES).astype(np.uint64)
    size = np.minimum(nbytes[row] - offset, np.uint64(MAX_CALL_NBYTES))
    return local[row] + offset, remote[row] + offset, size


def _advance(
    local_vectors: UInt64Array,
    remote_vectors: UInt64Array,
    start: int,
    done: int,
    written: int,
    cumulative: UInt64Array,
) -> tuple[int, int]:
    """Skip what a short call wrote: whole pieces, then the head of the next one."""
    stop = int(np.searchsorted(cumulative, written + done, side="right"))
    whole = int(cumulative[stop - 1]) - written if stop > start else 0
    part = np.uint64(done - whole)
    for vectors in (local_vectors, remote_vectors):
        vectors[stop, 0] += part
        vectors[stop, 1] -= part
    return stop, done


_libc = ctypes.CDLL(None, use_errno=True)
_process_vm_writev = _libc.process_vm_writev
_process_vm_writev.restype = ctypes.c_ssize_t
_process_vm_writev.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


def _writev(pid: int, local_vectors: UInt64Array, remote_vectors: UInt64Array) -> int:
    """One call; the one place where errno becomes an exception."""
    done = int(
        _process_vm_writev(
            pid,
            local_vectors.ctypes.data,
            len(local_vectors),
            remote_vectors.ctypes.data,
            len(remote_vectors),
            0,
        )
    )
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return done


@final
class CmaTransport:
    """`OneSidedTransport` over `process_vm_writev`.

    Raises:
        TransportUnavailable: the kernel or a seccomp filter refuses the call.
    """

    def __init__(self) -> None:
        self._endpoint = PeerEndpoint("cma", str(os.getpid()), process_start_time(os.getpid()))
        self._table = RegionTable()
        _probe()

    def report(self) -> WireReport:
        """See `OneSidedTransport.report`."""
        return WireReport("cma", "process_vm_writev", f"pid {self._endpoint.address}", True)

    def endpoint(self) -> PeerEndpoint:
        """See `OneSidedTransport.endpoint`."""
        return self._endpoint

    def register(self, address: int, nbytes: int) -> MemoryRegion:
        """See `OneSidedTransport.register`; bookkeeping only."""
        self._table.check_new(address, nbytes)
        region = MemoryRegion(address, nbytes, RemoteRegion(self._endpoint, address, nbytes))
        self._table.add(region)
        return region

    def unregister(self, region: MemoryRegion) -> None:
        """See `OneSidedTransport.unregister`."""
        self._table.remove(region)

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        """See `OneSidedTransport.write`; the outcome is never unknown."""
        check_batch(self._table, batch)
        pid = int(batch.endpoint.address)
        self._check_alive(batch.endpoint)
        deadline = Deadline.after(deadline_s, f"cma write to pid {pid}")
        try:
            write_process_memory(
                pid, batch.local_addresses, batch.remote_addresses, batch.nbytes, deadline
            )
        except OSError as error:
            self._check_alive(batch.endpoint)
            raise _classify(error, batch.endpoint) from error
        self._check_alive(batch.endpoint)

    def close(self) -> None:
        """See `OneSidedTransport.close`."""
        self._table = RegionTable()

    @staticmethod
    def _check_alive(peer: PeerEndpoint) -> None:
        started = process_start_time(int(peer.address))
        if started != peer.incarnation:
            what = "is gone" if not started else f"is another process (started {started})"
            raise PeerUnreachable(
                f"cma: pid {peer.address} started {peer.incarnation or '?'} {what}"
            )


def _classify(error: OSError, peer: PeerEndpoint) -> Exception:
    match error.errno:
        case errno.ESRCH:
            return PeerUnreachable(f"cma: pid {peer.address} is gone")
        case errno.EPERM:
            return TransferFailed(
                f"cma: not allowed to write pid {peer.address}: both processes need the same user, "
                "and ptrace permission (kernel.yama.ptrace_scope=0 or CAP_SYS_PTRACE)"
            )
        case errno.EFAULT:
            return RegionError(
                f"cma: an address of the batch is not mapped here or in pid {peer.address}"
            )
        case _:
            return TransferFailed(f"cma: pid {peer.address}: {error}")


def _probe() -> None:
    """Write one byte into this process: shows whether the call exists and is let through."""
    source, target = np.array([7], np.uint8), np.zeros(1, np.uint8)
    one = np.array([1], np.uint64)
    try:
        write_process_memory(
            os.getpid(),
            np.array([source.ctypes.data], np.uint64),
            np.array([target.ctypes.data], np.uint64),
            one,
            Deadline.after(5.0, "cma probe"),
        )
    except (OSError, TransferOutcomeUnknown) as error:
        raise TransportUnavailable(
            f"cma: process_vm_writev is refused here ({error}); a container needs a seccomp profile "
            "that allows it; use transport 'shm' instead"
        ) from error
