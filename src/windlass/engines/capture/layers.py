"""Group identical layers, so that capture reads element numbers from one layer of each group.

A model has dozens of layers with the same tensors, and an engine needs seconds to load all layers. Capture therefore
loads digits into one layer of each group only, and assumes that the other layers of the group have the same layout. A
load of random values then checks this assumption for every element of every layer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from windlass.element_ids.codes import Codes
from windlass.element_ids.ids import ElementIds
from windlass.engines.capture.memory import Holding

_LAYER = re.compile(r"((?:[^.]+\.)*?)(\d+)(\..+)")
"""Pattern of tensor names: the text before the first number, the number, and the rest."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Checkpoint tensors of one layer: their names are equal up to and including the first number.

    Attributes:
        indices: indices of the tensors in the checkpoint.
        tensors: for each tensor, the name after the number, the shape and the dtype. Identical layers have equal
            `tensors`.
    """

    indices: range
    tensors: tuple[object, ...]


@final
@dataclass(frozen=True, slots=True)
class Layers:
    """Layers of a checkpoint.

    Attributes:
        loaded: names of the checkpoint tensors that capture must load: one layer of each group of identical layers,
            and all tensors outside layers.
        _layers: (text before the layer's number, the number) -> layer.
    """

    loaded: frozenset[str]
    _layers: Mapping[tuple[str, int], _Layer]

    @classmethod
    def alike(cls, codes: Codes, held: Mapping[str, Holding]) -> Layers | None:
        """Return the layers of a checkpoint, or None if capture could skip less than half of the checkpoint's tensors.

        `held` has the tensors of this rank, by name. A rank of a pipeline stage has only some of the layers. From each group
        of identical layers, capture loads one layer, and one of this rank's layers if the group has any. Capture loads all
        tensors of a layer whose tensors do not follow one another in the checkpoint.
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
                # Tensors of other layers are between these tensors, but `ElementIds.moved` needs one range of indices.
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
        """Return the element numbers of the tensors in `read`, and of the same tensors in identical layers, by name.

        `read` has the element numbers of the tensors that a load of `loaded` changed. `held` has all tensors of the engine.
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
    """Return whether two tensors have the same shape, strides and dtype."""
    a, b = one.tensor, other.tensor
    return (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
