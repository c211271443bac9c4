"""Rank of `bench_relay.py` with its own limited link. It reads commands on stdin and writes answers to stdout."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import xxhash

import windlass
from windlass.engines.client import EngineClient, EngineWeights
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.testing.resting_engine import RestingEngine
from windlass.testing.wrapped_transport import WrappedTransport
from windlass.transfer.base import ParameterMemory
from windlass.transports.base import OneSidedTransport, WriteBatch
from windlass.transports.cma import CmaConfig
from windlass.transports.registry import create_transport

ROW_NBYTES = 4096


def values(version: int, first: int, stop: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """Return rows [first, stop) of a version. All elements and versions differ."""
    per_row = ROW_NBYTES // 8
    start = np.uint64(version << 40)
    return (start + np.arange(first * per_row, stop * per_row, dtype=np.uint64)).reshape(
        -1, per_row
    )


def manifest(worker: str, role: Role, first: int, stop: int, num_rows: int) -> ShardManifest:
    builder = ManifestBuilder(worker, role)
    builder.add_parameter("w", nbytes=(stop - first) * ROW_NBYTES, dtype=DType.UINT8)
    box = Box((first, 0), (stop - first, ROW_NBYTES))
    builder.add_shard("w", (num_rows, ROW_NBYTES), box, "w")
    return builder.build()


class LimitedLink(WrappedTransport):
    """Transport that sends all writes of this process over one link, in their order.

    A write starts after all earlier ones, takes its bytes divided by `rate`, and then arrives.
    """

    def __init__(self, inner: OneSidedTransport, rate: float) -> None:
        super().__init__(inner)
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        with self._lock:
            begin = max(time.monotonic(), self._free_at)
            self._free_at = begin + int(batch.nbytes.sum()) / self._rate
            through = self._free_at
        time.sleep(max(through - time.monotonic(), 0.0))
        super().write(batch, deadline_s=deadline_s)


def link(rate: float) -> LimitedLink:
    return LimitedLink(create_transport(CmaConfig()), rate)


def answer(value: object) -> None:
    print(json.dumps(value), flush=True)


def engine(name: str, rate: float, url: str, token: str, num_rows: int) -> None:
    described = manifest(f"{name}/0", Role.ENGINE, 0, num_rows, num_rows)
    memory = np.zeros(num_rows * ROW_NBYTES, np.uint8)
    transport = link(rate)
    region = transport.register(memory.ctypes.data, memory.nbytes)
    clients: list[EngineClient] = []

    def connect(_: object) -> None:
        clients.append(
            EngineClient(
                EngineWeights(
                    manifest=described,
                    addresses=[memory.ctypes.data],
                    regions=[region],
                ),
                transport=transport,
                hooks=RestingEngine(),
                controller=url,
                token=token,
                url=f"http://{name}",
            )
        )

    answer(transport.report().protocol)

    def digest(_: object) -> object:
        return clients[0].agent.served_version, xxhash.xxh3_128_hexdigest(memory.data)

    serve({"connect": connect, "digest": digest})
    clients[0].close()


def trainer(index: int, parts: int, rate: float, url: str, token: str, num_rows: int) -> None:
    first, stop = num_rows * index // parts, num_rows * (index + 1) // parts
    memory = values(0, first, stop).copy()
    clients: list[windlass.TrainerClient] = []

    def connect(_: object) -> None:
        clients.append(
            windlass.TrainerClient(
                windlass.TrainerWeights(
                    manifest=manifest(f"trainer/{index}", Role.TRAINER, first, stop, num_rows),
                    parameters=lambda: [ParameterMemory(memory.ctypes.data, memory.nbytes)],
                ),
                transport=link(rate),
                controller=url,
                token=token,
                world_size=parts,
                job="one start",
            )
        )

    def publish(version: object) -> object:
        assert isinstance(version, int)
        memory[...] = values(version, first, stop)
        try:
            report = clients[0].publish(version, deadline_s=120).result()
        except windlass.WindlassError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"write_s": report.phase_s["write"], "update_s": report.update_s, "left_out": report.left_out}  # fmt: skip

    answer("ready")
    serve({"connect": connect, "publish": publish})


def serve(commands: dict[str, Callable[[object], object]]) -> None:
    for line in sys.stdin:
        name, argument = json.loads(line)
        answer(commands[name](argument))


if __name__ == "__main__":
    role, *words = sys.argv[1:]
    if role == "engine":
        engine(words[0], float(words[1]), words[2], words[3], int(words[4]))
    else:
        trainer(int(words[0]), int(words[1]), float(words[2]), words[3], words[4], int(words[5]))
