"""Weights that encode version and position in every element."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest

ROWS, COLUMNS = 4, 8
NUM_TRAINERS = 2
MODULUS = 251
"""Bound of element values: every smaller integer is exact in bfloat16."""

Values = npt.NDArray[np.float32]


def values(version: int) -> Values:
    """Return (ROWS, COLUMNS) distinct elements. Any two of 251 successive versions differ in every element."""
    index = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    return ((index * 7 + version * 3) % MODULUS).astype(np.float32)


def trainer_rows(index: int) -> slice:
    rows = ROWS // NUM_TRAINERS
    return slice(index * rows, (index + 1) * rows)


def trainer_manifest(worker: str, index: int) -> ShardManifest:
    """Return the manifest of trainer `index`: a band of rows in float32."""
    rows = ROWS // NUM_TRAINERS
    builder = ManifestBuilder(worker, Role.TRAINER)
    builder.add_parameter("p", nbytes=rows * COLUMNS * 4, dtype=DType.FLOAT32)
    builder.add_shard("w", (ROWS, COLUMNS), Box((index * rows, 0), (rows, COLUMNS)), "p")
    return builder.build()


def engine_dtype(world_size: int) -> DType:
    """Return float32 for engines of one rank, which copy bytes unchanged; else bfloat16, which is packed."""
    return DType.FLOAT32 if world_size == 1 else DType.BFLOAT16


def engine_manifest(worker: str, rank: int, world_size: int) -> ShardManifest:
    """Return the manifest of an engine rank: a band of columns."""
    columns = COLUMNS // world_size
    dtype = engine_dtype(world_size)
    builder = ManifestBuilder(worker, Role.ENGINE)
    builder.add_parameter("q", nbytes=ROWS * columns * dtype.itemsize, dtype=dtype)
    builder.add_shard("w", (ROWS, COLUMNS), Box((0, rank * columns), (ROWS, columns)), "q")
    return builder.build()


def engine_bytes(version: int, rank: int, world_size: int) -> bytes:
    """Return the expected memory of an engine rank at `version`."""
    columns = COLUMNS // world_size
    shard = np.ascontiguousarray(values(version)[:, rank * columns : (rank + 1) * columns])
    if engine_dtype(world_size) is DType.FLOAT32:
        return shard.tobytes()
    return (shard.view(np.uint32) >> 16).astype(np.uint16).tobytes()
