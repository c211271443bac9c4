"""Copies between this process and another process of this host, with `process_vm_writev` and `process_vm_readv`.

The kernel copies through the cache and looks up every page, so one thread is slower than memcpy at every call size
(`benchmarks/bench_transports.py`). Several threads therefore share a large batch.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial

import numpy as np

from windlass.errors import PeerUnreachable, TransferFailed, TransportUnavailable, WindlassError
from windlass.layout.columns import UInt64Array
from windlass.memory.ranges import Pieces, calls, merge_adjacent, split_pieces
from windlass.net.clock import Deadline
from windlass.transports.peers import PeerEndpoint
from windlass.transports.sharing import share

MAX_IOVECS = 1024
"""Maximum number of pieces of a system call."""
MAX_CALL_NBYTES = 64 << 20
"""Largest number of bytes per system call; it limits how far one call can exceed a deadline."""
MIN_THREAD_NBYTES = 1 << 20
"""Smallest number of bytes per thread; for less, another thread costs more time than it saves."""

Call = Callable[[int, UInt64Array, UInt64Array], int]
"""`writev` or `readv`, one system call. Its arguments are the other process's pid, and the local and the remote pieces,
each (n, 2) address and size. It returns the number of bytes copied, and raises OSError if the call fails."""

_libc = ctypes.CDLL(None, use_errno=True)


def _call_of(native: ctypes._NamedFuncPointer) -> Call:
    """Return the `Call` that makes the system call of `native`, a function of libc."""
    native.restype = ctypes.c_ssize_t
    native.argtypes = [ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong]

    def call(pid: int, ours: UInt64Array, theirs: UInt64Array) -> int:
        done = int(native(pid, ours.ctypes.data, len(ours), theirs.ctypes.data, len(theirs), 0))
        if done < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return done

    return call


writev, readv = _call_of(_libc.process_vm_writev), _call_of(_libc.process_vm_readv)


def copy_process_memory(
    call: Call, pid: int, pieces: Pieces, deadline: Deadline, helpers: Executor, num_threads: int
) -> None:
    """Copy pieces with several threads. Wait for all threads, also after an error, so that no byte arrives later.

    Args:
        call: `writev` or `readv`.
        pid: the other process.
        pieces: (n,) addresses in this process, addresses in the other process, and sizes.
        deadline: deadline of the whole call. It is checked before each system call.
        helpers: threads that copy at the same time as this thread.
        num_threads: maximum number of threads, including this thread.

    Raises:
        OSError: a system call failed.
        TransferFailed: the deadline passed between two calls.
    """
    merged = merge_adjacent(*pieces)
    total = int(merged[2].sum())
    num_parts = max(min(num_threads, total // MIN_THREAD_NBYTES), 1)
    parts = list(_divide(merged, total, num_parts))
    jobs = [partial(_copy_part, call, pid, *part, deadline) for part in parts]
    share(jobs, helpers, len(jobs) - 1)


def _copy_part(
    call: Call,
    pid: int,
    local: UInt64Array,
    remote: UInt64Array,
    nbytes: UInt64Array,
    deadline: Deadline,
) -> None:
    """Copy pieces, each of at most `MAX_CALL_NBYTES`, in this thread; raise OSError if a system call fails."""
    local_vectors = np.ascontiguousarray(np.stack([local, nbytes], axis=1))
    remote_vectors = np.ascontiguousarray(np.stack([remote, nbytes], axis=1))
    for part in calls(nbytes, max_pieces=MAX_IOVECS, max_nbytes=MAX_CALL_NBYTES):
        ours, theirs = local_vectors[part], remote_vectors[part]
        left = int(nbytes[part].sum())
        while left:
            deadline.check_before_more()
            done = call(pid, ours, theirs)
            if done == 0:
                raise OSError(errno.EIO, "the system call copied nothing")
            left -= done
            # The kernel stops before the first page that it cannot use; the next call returns the reason.
            if left:
                ends = np.cumsum(ours[:, 1])
                whole = int(np.searchsorted(ends, done, side="right"))
                head = np.uint64(done) - (ends[whole - 1] if whole else np.uint64(0))
                ours, theirs = ours[whole:], theirs[whole:]
                for vectors in (ours, theirs):
                    vectors[0, 0] += head
                    vectors[0, 1] -= head


def _divide(pieces: Pieces, total: int, num_parts: int) -> Iterator[Pieces]:
    """Divide pieces into `num_parts` parts of similar size, and cut pieces that are too large for one call."""
    limit = min(MAX_CALL_NBYTES, -(-total // num_parts))
    local, remote, nbytes = split_pieces(*pieces, limit)
    goals = np.arange(1, num_parts) * (total / num_parts)
    cuts = np.searchsorted(np.cumsum(nbytes), goals, "left") + 1
    edges = [0, *cuts.tolist(), len(nbytes)]
    for start, stop in itertools.pairwise(edges):
        yield local[start:stop], remote[start:stop], nbytes[start:stop]


def error_of(error: OSError, peer: PeerEndpoint, verb: str) -> WindlassError:
    """Convert the error of a system call to an error of the transport. `verb` is "write to" or "read from"."""
    name = peer.transport
    match error.errno:
        case errno.ESRCH:
            return PeerUnreachable(f"{name}: pid {peer.address} is gone")
        case errno.EPERM:
            return TransferFailed(
                f"{name}: not allowed to {verb} pid {peer.address}: both processes need the same user, "
                "ptrace permission (kernel.yama.ptrace_scope <= 1 or CAP_SYS_PTRACE) and a seccomp "
                f"profile that allows process_vm_{verb.partition(' ')[0]}v; or use transport 'shm'"
            )
        case errno.EFAULT:
            # Do not return a RegionError: it promises that nothing was sent, but earlier pieces may have been copied.
            return TransferFailed(
                f"{name}: an address of the batch is not mapped here or in pid {peer.address}"
            )
        case _:
            return TransferFailed(f"{name}: pid {peer.address}: {error}")


def probe(call: Call, transport: str) -> None:
    """Copy one byte within this process to find out whether the system call exists and is allowed.

    Raises:
        TransportUnavailable: the kernel or a seccomp filter refuses the call.
    """
    ours, theirs = np.array([7], np.uint8), np.zeros(1, np.uint8)
    vectors = [np.array([[each.ctypes.data, 1]], np.uint64) for each in (ours, theirs)]
    try:
        call(os.getpid(), *vectors)
    except OSError as error:
        name = "process_vm_writev" if call is writev else "process_vm_readv"
        raise TransportUnavailable(
            f"{transport}: {name} is refused here ({error}); a container needs a seccomp profile that "
            "allows it; use transport 'shm' instead"
        ) from error
