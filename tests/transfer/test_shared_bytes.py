"""Engine parameters may share memory as views. Shared bytes of different elements are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from windlass.errors import ManifestError
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.transfer.dtensor import describe_module
from windlass.transfer.receiver import Receiver
from windlass.transports.cma import CmaTransport

SHAPE, ITEM = (6, 4), 4
ROW = SHAPE[1] * ITEM
Part = tuple[str, str, Box, int, tuple[int, int] | None]
"""Parameter, tensor, box, first byte in the memory, strides."""
WHOLE = Box((0, 0), SHAPE)


def received(*parts: Part, dtypes: tuple[DType, ...] = ()) -> None:
    memory = np.zeros(64, np.float64)
    start = int(memory.ctypes.data)
    builder = ManifestBuilder("engine/0", Role.ENGINE)
    addresses = []
    for number, (parameter, tensor, box, first, strides) in enumerate(parts):
        dtype = dtypes[number] if dtypes else DType.FLOAT32
        numel = box.sizes[0] * box.sizes[1]
        nbytes = numel * dtype.itemsize if strides is None else memory.nbytes - first
        builder.add_parameter(
            parameter, nbytes=nbytes, dtype=dtype, padding_nbytes=nbytes - numel * dtype.itemsize
        )
        builder.add_shard(tensor, SHAPE, box, parameter, strides_bytes=strides)
        addresses.append(start + first)
    transport = CmaTransport()
    try:
        Receiver(transport, builder.build(), addresses, [])
    finally:
        transport.close()


@pytest.mark.parametrize(
    "parts",
    [
        # The parameters have separate memory, next to each other.
        (("p", "a", WHOLE, 0, None), ("q", "b", WHOLE, 6 * ROW, None)),
        # The same tensor occurs twice, as tied weights do under one name or two.
        (("p", "a", WHOLE, 0, None), ("q", "a", WHOLE, 0, None)),
        (("p", "embed", WHOLE, 0, None), ("q", "head", WHOLE, 0, None)),
        # A view of some rows, and a view of some columns.
        (("p", "a", WHOLE, 0, None), ("q", "a", Box((2, 0), (3, 4)), 2 * ROW, None)),
        (("p", "a", WHOLE, 0, None), ("q", "a", Box((0, 1), (6, 2)), ITEM, (ROW, ITEM))),
        # A view of one row, with a stride that does not matter.
        (("p", "a", WHOLE, 0, None), ("q", "a", Box((5, 0), (1, 4)), 5 * ROW, (3, ITEM))),
        # Two tensors alternate row by row and share no byte.
        (("p", "a", WHOLE, 0, (2 * ROW, ITEM)), ("q", "b", WHOLE, ROW, (2 * ROW, ITEM))),
    ],
)
def test_views_and_neighbouring_parameters_are_accepted(parts: tuple[Part, ...]) -> None:
    received(*parts)


@pytest.mark.parametrize(
    "parts",
    [
        (("p", "a", WHOLE, 0, None), ("q", "b", WHOLE, 3 * ROW, None)),
        (("p", "a", WHOLE, 0, None), ("q", "a", WHOLE, ROW, None)),
        (("p", "a", WHOLE, 0, None), ("q", "a", WHOLE, 0, (ITEM, 6 * ITEM))),
        (("p", "a", WHOLE, 0, None), ("q", "a", Box((2, 0), (3, 4)), 0, None)),
        (("p", "a", Box((0, 0), (1, 4)), 0, None), ("q", "a", Box((1, 0), (1, 4)), 0, None)),
        (("p", "a", WHOLE, 0, (2 * ROW, ITEM)), ("q", "b", WHOLE, 2 * ROW, (2 * ROW, ITEM))),
        (("p", "a", WHOLE, 2, None), ("q", "a", WHOLE, 0, None)),
    ],
)
def test_bytes_shared_by_two_elements_are_refused_with_both_names(parts: tuple[Part, ...]) -> None:
    with pytest.raises(ManifestError, match=r"parameters '[pq]' and '[pq]' must not share bytes"):
        received(*parts)


@pytest.mark.parametrize(
    "strides", [(0, ITEM), (ROW, 0), (ITEM, ITEM), (2 * ITEM, ITEM), (ROW, 2), (3 * ITEM, 2 * ITEM)]
)
def test_a_parameter_whose_elements_share_bytes_is_refused_by_name(
    strides: tuple[int, int],
) -> None:
    with pytest.raises(ManifestError, match="parameter 'p': elements of tensor 'a' must not share"):
        received(("p", "a", WHOLE, 0, strides))


@pytest.mark.parametrize(
    ("box", "strides"),
    [
        (Box((0, 0), (1, 4)), (0, ITEM)),
        (Box((0, 0), (2, 2)), (3 * ITEM, 2 * ITEM)),
        (WHOLE, (ITEM, 6 * ITEM)),
        # No stride contains the extent of the other, and all elements are distinct.
        (Box((0, 0), (2, 3)), (3 * ITEM, 2 * ITEM)),
    ],
)
def test_strides_of_distinct_elements_are_accepted(box: Box, strides: tuple[int, int]) -> None:
    received(("p", "a", box, 0, strides))


def test_an_expanded_parameter_of_an_engine_is_refused_by_name() -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(4).expand(6, 4))
    with pytest.raises(ManifestError, match="parameter 'weight': elements of tensor 'weight' must"):
        describe_module(module, "engine/0", Role.ENGINE)


def test_one_element_in_two_types_is_refused() -> None:
    parts: tuple[Part, ...] = (("p", "a", WHOLE, 0, None), ("q", "a", WHOLE, 0, None))
    with pytest.raises(ManifestError, match="must not share bytes"):
        received(*parts, dtypes=(DType.FLOAT32, DType.BFLOAT16))
