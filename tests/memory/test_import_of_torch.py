"""Ranks without torch tensors import torch when they connect and never within an update."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import numpy as np
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.memory.host import HostMemory
from windlass.memory.packing import StridedCopy
from windlass.planning.planner import plan_transfer
from windlass.planning.program import bind_links

def manifest(worker, role, box):
    builder = ManifestBuilder(worker, role)
    builder.add_parameter("w", nbytes=box.numel * 4, dtype=DType.INT32)
    builder.add_shard("w", (64, 64), box, "w")
    return builder.build()

columns = int(sys.argv[1])
source = np.arange(64 * 64, dtype=np.int32)
target = np.zeros(64 * columns, np.int32)
plan = plan_transfer(
    [manifest("t", Role.TRAINER, Box((0, 0), (64, 64)))],
    [manifest("e", Role.ENGINE, Box((0, 0), (64, columns)))],
)
(sent,), (received,) = bind_links(plan, sending=True), bind_links(plan, sending=False)
seen = ["torch" in sys.modules]
memory = HostMemory()
ends = [
    memory.sent_digests({"e": sent}, np.array([source.ctypes.data], np.uint64)),
    memory.received_digests({"t": received}, np.array([target.ctypes.data], np.uint64)),
]
copies = memory.prepare([
    StridedCopy(
        sizes=(64, columns), tensor="w",
        src_address=source.ctypes.data, src_strides=(256, 4), src_dtype=DType.INT32,
        dst_address=target.ctypes.data, dst_strides=(columns * 4, 4), dst_dtype=DType.INT32,
    )
] if sys.argv[2] == "copies" else [])
seen.append("torch" in sys.modules)
ends[0].take(["e"], 9.0)
ends[1].take(["t"], 9.0)
copies.run()
seen.append("torch" in sys.modules)
print(json.dumps(seen))
"""


@pytest.mark.parametrize(
    ("columns", "work", "imported"),
    [(64, "digests", False), (8, "digests", True), (64, "copies", True)],
)
def test_host_memory_imports_torch_when_it_is_bound_and_only_if_it_needs_torch(
    columns: int, work: str, imported: bool
) -> None:
    command = (sys.executable, "-c", SCRIPT, str(columns), work)
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(found.stdout) == [False, imported, imported]
