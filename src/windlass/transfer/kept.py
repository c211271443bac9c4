"""Checks that engine tensors without a counterpart in the trainers stay unchanged (`keep` of `connect_trainer`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

import numpy as np

from windlass.errors import PlanError
from windlass.layout.columns import Int64Array
from windlass.layout.manifest import ShardManifest
from windlass.layout.naming.patterns import said
from windlass.memory.ops import OWN_WORK_S
from windlass.memory.place import memory_at


@final
class KeptTensors:
    """Digests of the tensors that an engine rank keeps. `bind` computes them.

    Args:
        manifest: manifest of the rank.
        live: addresses of the live parameters, in manifest order; they never move.
        buffered: names of the parameters in `live` from which the engine computes its own tensors after every update.
    """

    def __init__(
        self, manifest: ShardManifest, live: Sequence[int], buffered: Collection[str] = ()
    ) -> None:
        self._manifest, self._live, self._buffered = manifest, live, buffered
        self._digests: dict[str, str] = {}

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors that the rank keeps now."""
        return frozenset(self._digests)

    def bind(self, names: Collection[str], *, are_whole: bool = True) -> None:
        """Set the names of the tensors to keep, and compute the digests of tensors that were not kept before.

        Names that the rank does not have are ignored.

        Args:
            names: names of the tensors.
            are_whole: False if the weights of the rank are lost or may be of two versions. The rank can then keep only
                tensors that it kept before: no update writes kept tensors, and an engine saves them when it sleeps.

        Raises:
            PlanError: `are_whole` is False, and a tensor was not kept before.
            PlanError: the engine computes a kept tensor from a buffer. Only updates fill buffers, so the engine would
                overwrite the tensor with values that no trainer sent.
            TransferFailed, TransferOutcomeUnknown: see `Digests.take`.
        """
        held = {spec.name for spec in self._manifest.tensors}.intersection(names)
        if computed := held & self._in_buffers():
            raise PlanError(
                f"keep: the engine computes {said(computed)} of {self._manifest.worker} from received values, so it cannot "
                "keep them; publish these tensors too"
            )
        before = {name: digest for name, digest in self._digests.items() if name in held}
        if not are_whole and (new := held - before.keys()):
            raise PlanError(
                f"keep: {said(new)} of {self._manifest.worker} must have the values of one version, but the weights of this "
                "engine are lost or may be of two versions; publish these tensors too, or start the engine again"
            )
        self._digests = self._digests_of(held - before.keys()) | before

    def verify(self) -> None:
        """Compute the digests again, and compare them with the digests from `bind`.

        Raises:
            PlanError: a kept tensor has changed.
            TransferFailed, TransferOutcomeUnknown: see `Digests.take`.
        """
        now = self._digests_of(self._digests)
        changed = [name for name, digest in self._digests.items() if now[name] != digest]
        if changed:
            raise PlanError(
                f"keep: {said(changed)} of {self._manifest.worker} must not change after the trainers connected, but code "
                "outside of Windlass has changed them; start the engine again"
            )

    def _in_buffers(self) -> set[str]:
        """Return the names of the tensors that have elements in a buffer."""
        manifest = self._manifest
        return {
            name
            for name, index in manifest.rows()
            if manifest.parameters[index].name in self._buffered
        }

    def _digests_of(self, names: Collection[str]) -> dict[str, str]:
        """Return name -> digest of the present bytes, for tensors of this rank."""
        if not names:
            return {}
        manifest, table = self._manifest, self._manifest.table
        ordered = sorted(names)
        index = {spec.name: i for i, spec in enumerate(manifest.tensors)}
        addresses, nbytes, start = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)], [0]
        for name in ordered:
            pieces = start[-1]
            for row in np.flatnonzero(table.tensor == index[name]).tolist():
                parameter = int(table.parameter[row])
                itemsize = manifest.parameters[parameter].dtype.itemsize
                offsets, run = _runs(table.sizes[row], table.strides_bytes[row], itemsize)
                first = self._live[parameter] + int(table.offset_bytes[row])
                addresses.append((offsets + first).astype(np.uint64))
                nbytes.append(np.full(len(offsets), run, np.int64))
                pieces += len(offsets)
            start.append(pieces)
        memory = memory_at(self._live, manifest.worker)
        digests = memory.chunk_digests(
            np.concatenate(addresses), np.concatenate(nbytes), np.array(start, np.int64)
        )
        try:
            found = digests.take(range(len(ordered)), OWN_WORK_S)
        finally:
            digests.close()
        return {name: found[number] for number, name in enumerate(ordered)}


def _runs(sizes: Int64Array, strides: Int64Array, itemsize: int) -> tuple[Int64Array, int]:
    """Return the byte offsets of the contiguous runs of a strided shard, and the size of one run in bytes."""
    if not sizes.prod():
        return np.zeros(0, np.int64), 0
    run, offsets = itemsize, np.zeros(1, np.int64)
    for size, stride in zip(reversed(sizes.tolist()), reversed(strides.tolist()), strict=True):
        if size > 1 and stride == run and len(offsets) == 1:
            run *= size
        elif size > 1:
            offsets = (np.arange(size)[:, None] * stride + offsets).ravel()
    return offsets, run
