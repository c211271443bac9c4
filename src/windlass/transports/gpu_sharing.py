"""GPU memory that a process exports and another process of this host maps.

Memory from cudaMalloc is exported as a CUDA IPC handle. Memory from cuMemCreate, such as torch's expandable segments,
consists of chunks of physical memory. Each chunk is exported as a file descriptor, and the owner sends descriptors over a
Unix socket. The peer maps the chunks one after another. The owner sends a batch of descriptors only when the peer asks for
it, so that a large memory does not need many descriptors at a time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from windlass.errors import RegionError, TransferFailed
from windlass.layout.columns import UInt64Array
from windlass.memory.cuda.driver import Device
from windlass.net.clock import Deadline

NEXT = b"\0"
"""Message of the peer that asks for the next batch, and message of the owner that carries the batch."""
BATCH = 64
"""Largest number of descriptors in a batch. For a connection, the owner has at most one batch open, and the peer two."""

_DESCRIPTOR = np.dtype(np.intc)


class Exported(msgspec.Struct, frozen=True, array_like=True):
    """Memory of a GPU that another process can map.

    Attributes:
        start: address in the owner's process.
        nbytes: size in bytes.
        handle: CUDA IPC handle; empty for memory that consists of chunks.
        num_chunks: number of chunks, all of the same size; 0 if there is a handle.
    """

    start: int
    nbytes: int
    handle: bytes = b""
    num_chunks: int = 0

    @property
    def stop(self) -> int:
        """Address after the last byte, in the owner's process."""
        return self.start + self.nbytes


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Memory of another process that is mapped in this process.

    Attributes:
        address: address in this process.
        nbytes: size in bytes.
        close: function that unmaps the memory. Kernels must not use the memory any more.
    """

    address: int
    nbytes: int
    close: Callable[[], None]


def export_memory(device: Device, addresses: UInt64Array, nbytes: UInt64Array) -> list[Exported]:
    """Return the exported memory that contains all pieces, in the order of addresses.

    Adjacent chunks of one size are joined. An allocation from cudaMalloc is never joined, so a piece that exceeds it is in no
    exported memory.

    Args:
        device: GPU that has the memory.
        addresses: (n,) address of each piece.
        nbytes: (n,) size of each piece in bytes.

    Raises:
        RegionError: a piece is not in GPU memory, or no other process can map the memory.
        TransferFailed: the driver returned an error.
    """
    order = np.argsort(addresses)
    starts = addresses[order]
    ends = np.maximum.accumulate(starts + nbytes[order])
    found, at, stop = list[Exported](), 0, 0
    while at < len(starts) or (at and int(ends[-1]) > stop):
        exceeds = at and int(ends[at - 1]) > stop
        one = _exported_at(device, stop if exceeds else int(starts[at]))
        last = found[-1] if found else None
        if (
            last is not None
            and last.stop == one.start
            and last.num_chunks
            and last.nbytes == last.num_chunks * one.nbytes
            and one.num_chunks
        ):
            found[-1] = Exported(
                last.start, last.nbytes + one.nbytes, num_chunks=last.num_chunks + 1
            )
        else:
            found.append(one)
        stop = one.stop
        at = int(np.searchsorted(starts, stop))
    return found


def _exported_at(device: Device, address: int) -> Exported:
    """Return the allocation from cudaMalloc, or the chunk, that contains an address; for errors see `export_memory`."""
    is_chunk = device.is_chunk(address)
    start, nbytes = device.allocation(address)
    if is_chunk:
        return Exported(start, nbytes, num_chunks=1)
    return Exported(start, nbytes, device.export(start))


def open_handle(device: Device, handle: bytes) -> PeerMemory:
    """Map the allocation of a CUDA IPC handle. A process can open a handle only once at a time.

    Raises:
        TransferFailed: the driver returned an error.
    """
    address = device.open(handle)
    return PeerMemory(address, device.allocation(address)[1], partial(device.close_handle, address))


def send_chunks(line: socket.socket, device: Device, exported: Exported) -> bool:
    """Send the descriptors of all chunks to a peer that calls `receive_chunks`.

    Return False if the peer has sent something else than `NEXT`, which stays in the socket, or has closed the connection.
    Then it does not want more descriptors.

    Raises:
        OSError: the connection broke, or the peer sent nothing in the socket's timeout.
        TransferFailed: the driver returned an error.
    """
    size = exported.nbytes // max(exported.num_chunks, 1)
    for first in range(0, exported.num_chunks, BATCH):
        if line.recv(1, socket.MSG_PEEK) != NEXT:
            return False
        line.recv(1)
        descriptors = list[int]()
        try:
            for chunk in range(first, min(first + BATCH, exported.num_chunks)):
                descriptors.append(device.export_chunk(exported.start + chunk * size))
            socket.send_fds(line, [NEXT], descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
    return True


def receive_chunks(
    line: socket.socket, device: Device, nbytes: int, num_chunks: int, deadline: Deadline
) -> PeerMemory:
    """Receive the descriptors of chunks from a peer that calls `send_chunks`, and map the chunks.

    Args:
        line: connection to the peer.
        device: GPU whose kernels will use the memory.
        nbytes: size of all chunks together.
        num_chunks: number of chunks, all of the same size.
        deadline: deadline of the whole call.

    Raises:
        RegionError: `nbytes` is not a multiple of `num_chunks`.
        OSError: the peer closed the connection, or sent nothing in time.
        TransferFailed: this process has too few free descriptors, the driver returned an error, or the deadline passed.
    """
    size = nbytes // max(num_chunks, 1)
    if size < 1 or size * num_chunks != nbytes:
        raise RegionError(f"map: {nbytes} bytes must be {num_chunks} chunks of the same size")
    address, mapped = device.reserve(nbytes), 0
    try:
        for first in range(0, num_chunks, BATCH):
            deadline.check_before_more()
            line.settimeout(max(deadline.remaining_s, 0.001))
            if first == 0:
                line.sendall(NEXT)
            descriptors = _received(line, min(BATCH, num_chunks - first))
            try:
                # The owner exports the next batch while this process maps this one.
                if first + BATCH < num_chunks:
                    line.sendall(NEXT)
                for descriptor in descriptors:
                    device.map_chunk(descriptor, address + mapped, size)
                    mapped += size
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        device.allow_access(address, nbytes)
    except BaseException:
        device.unmap_chunks(address, mapped, nbytes)
        raise
    return PeerMemory(address, nbytes, partial(device.unmap_chunks, address, nbytes, nbytes))


def _received(line: socket.socket, wanted: int) -> list[int]:
    """Receive a batch of descriptors. The caller closes them.

    Raises:
        OSError: the peer closed the connection, or sent nothing in time.
        TransferFailed: fewer descriptors than `wanted` arrived. The others are closed.
    """
    # No child process may inherit a descriptor, because it would keep the memory allocated. `socket.recv_fds` of Python 3.11
    # ignores flags.
    data, ancillary, _, _ = line.recvmsg(
        len(NEXT), socket.CMSG_LEN(wanted * _DESCRIPTOR.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    descriptors = list[int]()
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(content) // _DESCRIPTOR.itemsize
            descriptors += np.frombuffer(content, _DESCRIPTOR, whole).tolist()
    if len(descriptors) == wanted:
        return descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    if not data:
        raise ConnectionResetError("the owner of the memory closed the connection")
    raise TransferFailed(
        f"map: {wanted} descriptors must arrive, got {len(descriptors)}; raise the limit of open files (`ulimit -n`)"
    )
