"""Execution of a plan in the plainest numpy, as the reference for every real data path.

Slow on purpose: one Python step per op, with element addresses as index arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from windlass.errors import TransferFailed
from windlass.planning.plan import DTYPES, CopyMode, TransferPlan

__all__ = ["execute"]

Bytes = npt.NDArray[np.uint8]
Buffers = Mapping[str, Sequence[Bytes]]


def execute(plan: TransferPlan, sources: Buffers, destinations: Buffers) -> dict[str, list[Bytes]]:
    """Run every op of `plan`.

    Args:
        plan: a whole plan, or the part of one rank. Ops must not cast.
        sources: per worker, one uint8 array per parameter of its manifest.
        destinations: likewise; written in place.

    Returns:
        Per destination worker and parameter, how often each byte was written.

    Raises:
        TransferFailed: an op reaches outside its buffer, overlaps another payload in a
            staging memory, casts, or contradicts its mode.
    """
    counts = {w: [np.zeros(len(p), np.uint8) for p in ps] for w, ps in destinations.items()}
    staged = [np.zeros(nbytes, np.uint8) for nbytes in plan.staging_nbytes]
    taken = [np.zeros(nbytes, np.bool_) for nbytes in plan.staging_nbytes]
    ops = plan.ops
    for op in range(len(ops)):
        if ops.src_dtype[op] != ops.dst_dtype[op]:
            raise TransferFailed(f"op {op}: the reference executor does not cast")
        itemsize = DTYPES[int(ops.dst_dtype[op])].itemsize
        source = sources[plan.sources[int(ops.src[op])]][int(ops.src_parameter[op])]
        dst, parameter = int(ops.dst[op]), int(ops.dst_parameter[op])
        worker = plan.destinations[dst]
        read = _addresses(ops.src_offset[op], ops.sizes[op], ops.src_strides[op], itemsize)
        written = _addresses(ops.dst_offset[op], ops.sizes[op], ops.dst_strides[op], itemsize)
        for name, index, buffer in (
            ("source", read, source),
            ("destination", written, destinations[worker][parameter]),
        ):
            if index.min() < 0 or index.max() >= len(buffer):
                raise TransferFailed(f"op {op}: reaches outside its {name} parameter")
        if len(read) != ops.nbytes[op]:
            raise TransferFailed(f"op {op}: nbytes is {ops.nbytes[op]}, sizes say {len(read)}")
        payload = source[read]
        mode = CopyMode(int(ops.mode[op]))
        if mode is CopyMode.SCATTER:
            at = slice(int(ops.staging_offset[op]), int(ops.staging_offset[op]) + len(payload))
            if at.start < 0 or at.stop > len(staged[dst]) or taken[dst][at].any():
                raise TransferFailed(f"op {op}: staged {at.start}:{at.stop} is outside or taken")
            taken[dst][at] = True
            staged[dst][at] = payload
            payload = staged[dst][at]
        else:
            _check_runs(op, mode, int(ops.run_nbytes[op]), read, written)
        destinations[worker][parameter][written] = payload
        np.add.at(counts[worker][parameter], written, 1)
    return counts


def _addresses(
    offset: np.int64, sizes: npt.NDArray[np.int64], strides: npt.NDArray[np.int64], itemsize: int
) -> npt.NDArray[np.int64]:
    """Return the byte addresses of all elements, row-major over `sizes`."""
    address = np.array([offset], np.int64)
    for size, stride in zip(sizes.tolist(), strides.tolist(), strict=True):
        address = (address[:, None] + np.arange(size) * stride).ravel()
    flat: npt.NDArray[np.int64] = (address[:, None] + np.arange(itemsize)).ravel()
    return flat


def _check_runs(
    op: int,
    mode: CopyMode,
    run_nbytes: int,
    read: npt.NDArray[np.int64],
    written: npt.NDArray[np.int64],
) -> None:
    """Check that a direct op has contiguous runs on both sides, a packed op at the destination."""
    if run_nbytes < 1 or len(read) % run_nbytes:
        raise TransferFailed(f"op {op}: run_nbytes {run_nbytes} does not divide {len(read)}")
    sides = (read, written) if mode is CopyMode.DIRECT else (written,)
    for side in sides:
        runs = side.reshape(-1, run_nbytes)
        if (runs != runs[:, :1] + np.arange(run_nbytes)).any():
            raise TransferFailed(f"op {op}: mode {mode.name}, but a run is not contiguous")
