"""Finds parameters of a trainer rank that contain NaN or infinity."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from windlass.layout.dtypes import DType
from windlass.layout.manifest import ShardManifest
from windlass.memory.cuda.driver import gpu_of
from windlass.memory.ops import OWN_WORK_S
from windlass.memory.place import memory_on
from windlass.transfer.base import ParameterMemory

if TYPE_CHECKING:
    import torch

SAMPLE_NBYTES = 4 << 20
"""Bytes that one update checks, unless it checks all bytes. This takes about a millisecond on one core. A diverged
optimizer step usually affects all parameters, so a check of some parameters finds it."""
LEAST_NBYTES, LEAST_NBYTES_OF_GPU = SAMPLE_NBYTES >> 6, SAMPLE_NBYTES >> 4
"""Minimum number of bytes that a piece counts as, because each piece costs a call (on a GPU, several kernels)."""
_FLOATING = {DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64}


class _Piece(NamedTuple):
    """Elements of a parameter: parameter index, byte offset, sizes and byte strides."""

    parameter: int
    offset: int
    sizes: list[int]
    strides: list[int]


@final
class FiniteCheck:
    """Search for NaN and infinity in the parameters that engines get.

    Args:
        manifest: manifest of the rank.
        parameters: function that returns the current memory of the parameters, in manifest order. Each `find` calls it.
    """

    def __init__(
        self, manifest: ShardManifest, parameters: Callable[[], Sequence[ParameterMemory]]
    ) -> None:
        self._manifest, self._parameters = manifest, parameters
        self._pieces: list[_Piece] = []
        self._next = 0

    def bind(self, read: Collection[int]) -> None:
        """Set the parameters to check. `read` contains their indices in the manifest."""
        pieces = [piece for index in sorted(read) for piece in self._pieces_of(index)]
        # Sort by offset first. `find` then checks the first bytes of every parameter before later bytes of any parameter.
        self._pieces = sorted(
            pieces, key=lambda piece: (piece.offset // SAMPLE_NBYTES, piece.parameter)
        )
        if self._pieces:
            # Import torch now, because the import could exceed the deadline of a round's phase.
            importlib.import_module("torch")

    def find(self, *, everywhere: bool) -> tuple[str, ...]:
        """Check parameters, and return the names of those with NaN or infinity.

        On a GPU, first wait for all work that this process has queued there.

        Args:
            everywhere: whether to check all parameters of `bind`. If False, check at most about `SAMPLE_NBYTES`. The next call
                then checks the bytes after these, so that repeated calls check all parameters.

        Raises:
            PlanError: see `LocatedParameters`.
            TransferFailed: a GPU did not finish the queued work of this process within `OWN_WORK_S`.
            TransportUnavailable: see `memory_on`.
        """
        if not self._pieces:
            return ()
        import torch

        located = self._parameters()
        extremes: dict[tuple[int, DType], list[tuple[int, torch.Tensor]]] = {}
        settled: set[int] = set()
        for index, offset, sizes, strides in self._pieces if everywhere else self._due(located):
            address, dtype = located[index].address, self._manifest.parameters[index].dtype
            ordinal = gpu_of(address)
            memory = memory_on(ordinal)
            if ordinal not in settled:
                memory.settle(OWN_WORK_S)
                settled.add(ordinal)
            # If an element is NaN, `aminmax` returns NaN for both values.
            found = torch.aminmax(memory.view(address + offset, sizes, strides, dtype))
            extremes.setdefault((ordinal, dtype), []).extend((index, value) for value in found)
        bad: set[int] = set()
        for of_memory in extremes.values():
            # Read all results of a GPU and dtype at once, because each read waits for the GPU.
            is_bad = torch.stack([value for _, value in of_memory]).isfinite().logical_not()
            bad |= {
                index for (index, _), wrong in zip(of_memory, is_bad.tolist(), strict=True) if wrong
            }
        return tuple(self._manifest.parameters[index].name for index in sorted(bad))

    def _due(self, located: Sequence[ParameterMemory]) -> Iterator[_Piece]:
        """Yield the next pieces after those of the previous call, at most about `SAMPLE_NBYTES` in total."""
        left = SAMPLE_NBYTES
        for _ in self._pieces:
            piece = self._pieces[self._next % len(self._pieces)]
            self._next += 1
            yield piece
            itemsize = self._manifest.parameters[piece.parameter].dtype.itemsize
            on_gpu = gpu_of(located[piece.parameter].address) >= 0
            least = LEAST_NBYTES_OF_GPU if on_gpu else LEAST_NBYTES
            left -= max(math.prod(piece.sizes) * itemsize, least)
            if left <= 0:
                return

    def _pieces_of(self, index: int) -> Iterator[_Piece]:
        """Yield the pieces of a parameter, without padding; nothing if its dtype is not floating-point."""
        spec, table = self._manifest.parameters[index], self._manifest.table
        if spec.dtype not in _FLOATING:
            return
        if not spec.padding_nbytes:
            for start in range(0, spec.nbytes, SAMPLE_NBYTES):
                nbytes = min(SAMPLE_NBYTES, spec.nbytes - start)
                yield _Piece(index, start, [nbytes // spec.dtype.itemsize], [spec.dtype.itemsize])
            return
        for row in np.flatnonzero(table.parameter == index).tolist():
            sizes, strides = table.sizes[row].tolist(), table.strides_bytes[row].tolist()
            if 0 not in sizes:
                yield _Piece(index, int(table.offset_bytes[row]), sizes, strides)
