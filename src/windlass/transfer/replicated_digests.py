"""Digests of replicated boxes: boxes that trainer ranks hold several times. The controller compares the digests of all ranks.

Each rank hashes its boxes in the memory of the parameters, in host memory or on a GPU. A turn hashes a part of the
boxes. The tables for the next turn can be built right after a turn, so that the next update does not wait for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple, final

import numpy as np

from windlass.errors import TransferFailed, TransferOutcomeUnknown
from windlass.layout.columns import Int64Array, StructuredArray
from windlass.layout.manifest import ShardManifest
from windlass.memory.cuda.driver import gpu_of
from windlass.memory.ops import OWN_WORK_S, ChunkDigests, MemoryOps
from windlass.memory.place import memory_on
from windlass.planning.program import DigestKind
from windlass.planning.replicated import DIGESTED, HELD, decode_held, due_pieces, num_pieces
from windlass.transfer.base import ParameterMemory

_KINDS = tuple(DigestKind)
BATCH_PIECES = 1 << 16
"""Approximate number of pieces that are hashed at a time. It bounds the memory of their tables. Tables of all boxes
together could have 16 GiB."""


class _Cut(NamedTuple):
    """Pieces of some boxes that are hashed in one turn. All of these pieces are in one memory.

    Attributes:
        memory: memory that contains the pieces.
        rows: (n,) row of each box in the rank's `HELD`.
        addresses: index of a parameter that contains pieces -> address of the parameter.
        chunks: prepared digests, one per box in the order of `rows`.
    """

    memory: MemoryOps
    rows: Int64Array
    addresses: dict[int, int]
    chunks: ChunkDigests


@final
class ReplicatedDigests:
    """Digests of the replicated boxes of one rank. Thread-safe: its methods run one at a time.

    Args:
        manifest: manifest of the rank.
        parameters: function that returns the current memory of the parameters, such as `LocatedParameters`. Each `take`
            calls it.

    Attributes:
        compare_s: duration of the last `take` in seconds, without locating parameters and without waiting for earlier
            GPU work.
    """

    def __init__(
        self, manifest: ShardManifest, parameters: Callable[[], Sequence[ParameterMemory]]
    ) -> None:
        self._manifest, self._parameters = manifest, parameters
        self._held: StructuredArray = np.zeros(0, HELD)
        self._lock = threading.Lock()
        self._last: tuple[int, int, Sequence[ParameterMemory]] | None = None
        self._ahead: tuple[tuple[int, int] | None, list[_Cut]] = None, []
        self.compare_s = self._waited_s = 0.0

    def bind(self, part: bytes) -> None:
        """Set the boxes of this rank. `part` is an array of dtype `HELD` as bytes; empty for no boxes.

        Raises:
            ProtocolError, PlanError: see `decode_held`.
        """
        with self._lock:
            self._held = decode_held(part, self._manifest)
            # Drop the prepared tables under the same lock, because they belong to the old boxes.
            self._drop()

    @property
    def read(self) -> frozenset[int]:
        """Indices of parameters that contain replicated boxes."""
        return frozenset(np.unique(self._held["parameter"]).tolist())

    def __len__(self) -> int:
        return len(self._held)

    def take(self, turn: int, period: int) -> StructuredArray:
        """Hash the pieces that are compared in one turn, and return their digests.

        The parameters must not change during this call. The call uses up the tables of `cut_ahead`, sets `compare_s`,
        and records the turn for the next `cut_ahead`.

        On a GPU, first wait for all work that this process has queued there.

        Args:
            turn: number of earlier comparisons.
            period: number of turns in which every piece is compared once; see `due_pieces`.

        Returns:
            (n,) array of dtype `DIGESTED` with one row per box that has pieces in this turn.

        Raises:
            PlanError: see `LocatedParameters`.
            TransferFailed: the GPU has too little memory for the tables, or earlier GPU work did not end within
                `OWN_WORK_S`.
            TransferOutcomeUnknown: the hashing did not end within `OWN_WORK_S`.
        """
        located = self._parameters()
        with self._lock, ExitStack() as stack:
            began, self._waited_s = time.perf_counter(), 0.0
            key, ahead = self._ahead
            for cut in ahead:
                self._settle(cut.memory)
            self._ahead = None, []
            stack.callback(_close, ahead)
            is_ready = key == (turn, period) and _still_hold(ahead, located)
            found = [np.zeros(0, DIGESTED)]
            for cut in ahead if is_ready else self.cut_pieces(turn, period, located):
                stack.callback(_close, [cut])
                digests = cut.chunks.take(range(len(cut.rows)), OWN_WORK_S)
                cut.chunks.close()
                table = np.zeros(len(digests), DIGESTED)
                table["row"], table["kind"] = cut.rows, _KINDS.index(cut.memory.digest_kind)
                for name, half in (("a", slice(0, 16)), ("b", slice(16, 32))):
                    table[name] = np.array(
                        [int(digest[half], 16) for digest in digests.values()], np.uint64
                    )
                found.append(table)
            self._last = turn, period, located
            self.compare_s = time.perf_counter() - began - self._waited_s
            return np.concatenate(found)

    def cut_ahead(self) -> None:
        """Build the tables for the turn after the last `take`, and store them for the next `take`.

        This method does not read the values of parameters.

        Do nothing if `take` was not called since the last call of this method, or if the period of the last `take` was 1.
        On a GPU, wait for all work that this process has queued there before building the tables. The next `take` uses
        the tables only if no parameter has moved.

        Raises:
            TransferFailed, TransferOutcomeUnknown: see `take`. After this error, the next `take` builds the tables.
        """
        with self._lock, ExitStack() as undo:
            last, self._last = self._last, None
            # A comparison with period 1 covers all boxes. Usually only the first comparison has period 1. The next
            # comparison has a longer period and could not use these tables.
            if last is None or last[1] == 1:
                return
            turn, period, located = last
            cuts: list[_Cut] = []
            undo.callback(_close, cuts)
            # If this raises, `undo` frees the tables that were built before.
            cuts.extend(self.cut_pieces(turn + 1, period, located))
            undo.pop_all()
            self._ahead = (turn + 1, period), cuts

    def close(self) -> None:
        """Free the tables, unless late kernels may still read them. Idempotent."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        """Free the tables that `cut_ahead` has built, and forget the last `take`."""
        _close(self._ahead[1])
        self._ahead, self._last = (None, []), None

    def _settle(self, memory: MemoryOps) -> None:
        """Wait for earlier GPU work with a deadline, because allocating tables would wait for it without a deadline."""
        began = time.perf_counter()
        memory.settle(OWN_WORK_S)
        self._waited_s += time.perf_counter() - began

    def cut_pieces(
        self, turn: int, period: int, located: Sequence[ParameterMemory]
    ) -> Iterator[_Cut]:
        """Yield the pieces of a turn with prepared digests, batch by batch. The caller closes the digests.

        Args:
            turn: number of the turn.
            period: number of turns that cover all boxes.
            located: current memory of the parameters.
        """
        held = self._held
        batch = np.cumsum(num_pieces(held)) // BATCH_PIECES
        for at in np.split(np.arange(len(held)), np.flatnonzero(np.diff(batch)) + 1):
            row, offset, nbytes = due_pieces(held[at], turn, period)
            row = at[row]
            used, index = np.unique(held["parameter"][row], return_inverse=True)
            addresses = [located[parameter].address for parameter in used.tolist()]
            on = np.array([gpu_of(address) for address in addresses], np.int64)
            address = np.array(addresses, np.uint64)[index] + offset.astype(np.uint64)
            for ordinal in np.unique(on).tolist():
                here = np.flatnonzero(on[index] == ordinal)
                rows, first = np.unique(row[here], return_index=True)
                memory, start = memory_on(ordinal), np.append(first, len(here))
                self._settle(memory)
                chunks = memory.chunk_digests(address[here], nbytes[here], start)
                kept = {int(used[i]): addresses[i] for i in np.flatnonzero(on == ordinal).tolist()}
                yield _Cut(memory, rows, kept, chunks)


def _still_hold(cuts: Iterable[_Cut], located: Sequence[ParameterMemory]) -> bool:
    return all(
        located[parameter].address == address
        and gpu_of(address)
        # The old memory may be freed, and the address may now belong to host memory or to another GPU.
        == cut.memory.ordinal
        for cut in cuts
        for parameter, address in cut.addresses.items()
    )


def _close(cuts: Iterable[_Cut]) -> None:
    for cut in cuts:
        with suppress(TransferFailed, TransferOutcomeUnknown):
            # After an error, the memory stays allocated until the process ends.
            cut.chunks.close()
