"""Group identical layers: trace one per group and reuse its layout for the others.

A model has dozens of layers with the same tensors, and an engine needs seconds to load all of them. Capture
therefore loads digits into one layer of each kind and assumes the same layout for the identical layers. The
load of random values then checks that assumption for every element of every layer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from windlass.engines.capture.codes import Codes
from windlass.engines.capture.element_ids import ElementIds
from windlass.engines.capture.memory import Holding

_LAYER = re.compile(r"((?:[^.]+\.)*?)(\d+)(\..+)")
"""Pattern of tensor names: the text before the first number, the number, and the rest."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Checkpoint tensors with names that are equal up to and including the first number.

    Attributes:
        indices: positions of the tensors in the checkpoint.
        tensors: rest of the name, shape and type of each tensor.
    """

    indices: range
    tensors: tuple[object, ...]


@final
@dataclass(frozen=True, slots=True)
class Layers:
    """Layers of a checkpoint.

    Attributes:
        loaded: names of the checkpoint tensors of one layer of each kind, and of all tensors outside layers.
    """

    loaded: frozenset[str]
    _layers: Mapping[tuple[str, int], _Layer]

    @classmethod
    def alike(cls, codes: Codes, held: Mapping[str, Holding]) -> Layers | None:
        """Return the layers of a checkpoint, or None if they save less than half of its tensors.

        Prefer a layer with a number that occurs in the names of `held`: a pipeline stage has only some of the
        layers.
        """
        here = {int(found[2]) for name in held if (found := _LAYER.fullmatch(name))}
        members = defaultdict[tuple[str, int], list[int]](list)
        for index, spec in enumerate(codes.specs):
            if found := _LAYER.fullmatch(spec.name):
                members[found[1], int(found[2])].append(index)
        layers: dict[tuple[str, int], _Layer] = {}
        chosen: dict[tuple[str, tuple[object, ...]], tuple[str, int]] = {}
        for (prefix, number), indices in sorted(
            members.items(), key=lambda item: (item[0][1] not in here, item[0])
        ):
            if indices[-1] - indices[0] + 1 != len(indices):
                # Other layers have tensors between these, so adding one offset to the element numbers does not map this layer to another.
                continue
            specs = [codes.specs[index] for index in indices]
            names = len(f"{prefix}{number}")
            tensors = tuple((spec.name[names:], spec.shape, spec.dtype) for spec in specs)
            layers[prefix, number] = _Layer(range(indices[0], indices[-1] + 1), tensors)
            chosen.setdefault((prefix, tensors), (prefix, number))
        skipped = {
            codes.specs[index].name
            for key in layers.keys() - set(chosen.values())
            for index in layers[key].indices
        }
        if 2 * len(skipped) < len(codes.specs):
            return None
        return cls(frozenset(spec.name for spec in codes.specs) - skipped, layers)

    def all_of(
        self, read: Mapping[str, ElementIds], held: Mapping[str, Holding], codes: Codes
    ) -> dict[str, ElementIds]:
        """Return the element numbers of all tensors in `held` that were read or have a layer that was read.

        `read` has the element numbers of the tensors that a load of `loaded` changed. Tensors of identical
        layers get these numbers, shifted to their own checkpoint tensors.
        """
        found = dict(read)
        sources = defaultdict[tuple[str, str], list[tuple[int, str, tuple[str, int]]]](list)
        for name, numbers in read.items():
            own = _LAYER.fullmatch(name)
            if own is None or (highest := numbers.highest) not in range(int(codes.starts[-1])):
                continue
            index = int(codes.starts.searchsorted(highest, side="right")) - 1
            if of := _LAYER.fullmatch(codes.specs[index].name):
                sources[own[1], own[3]].append((int(own[2]), name, (of[1], int(of[2]))))
        for name in held.keys() - read.keys():
            if (own := _LAYER.fullmatch(name)) is None:
                continue
            for number, like, (prefix, layer) in sources[own[1], own[3]]:
                source = self._layers.get((prefix, layer))
                target = self._layers.get((prefix, layer + int(own[2]) - number))
                if source is None or target is None or source.tensors != target.tensors:
                    continue
                if _lies_alike(held[name], held[like]):
                    by = target.indices.start - source.indices.start
                    found[name] = read[like].moved(codes, source.indices, by)
                    break
        return found


def _lies_alike(one: Holding, other: Holding) -> bool:
    a, b = one.tensor, other.tensor
    return (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
