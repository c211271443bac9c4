"""Time that an update stops a trainer rank with weights on a GPU, with and without a replica.

    python benchmarks/gpu/bench_replica_gpu.py --json FILE [--layers 16] [--transport cuda_ipc] [--runs 9]

One trainer rank and one engine rank have a GPU each; the controller is in this process. The shapes are `--layers` layers
of Qwen3-30B-A3B (16: 21 GB). In one run, `publish` without a replica returns when the engine serves the version.
`publish(copy=True)` with a replica returns when the weights are copied, to pinned host memory or within the GPU. The ceilings
are plain copies of the same bytes in the same process. After `publish(copy=True)` the trainer changes every byte at once.
After every update each byte of the engine is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence

import torch
from bench_nvlink import QWEN3_30B_A3B, Host, Rank

import windlass
from harness import Row, median_p95, parser, report, save
from tools.plan.synthesis import engine_manifests, trainer_manifests
from tools.plan.topology import parse_topology
from windlass.config import ControlConfig, ReplicaPlace, UpdateMode
from windlass.engines.client import EngineClient, EngineWeights
from windlass.testing.resting_engine import RestingEngine
from windlass.trainers.client import TrainerClient
from windlass.trainers.weights import TrainerWeights
from windlass.transports.registry import create_transport, parse_transport

TOKEN = "of a benchmark"
DEADLINE_S = 60.0
CHUNK_NBYTES = 2 << 30
FLIP = 0x5555
NO_REPLICA = "none"


class ReplicaRank(Rank):
    """Rank that is connected to a controller."""

    # --- the trainer ----------------------------------------------------------------------------

    def train(self, url: str, transport: str, replica: str) -> None:
        self.trainer = TrainerClient(
            TrainerWeights(
                manifest=self.manifest,
                parameters=self.located,
                step_stream=lambda: int(torch.cuda.current_stream().cuda_stream),
            ),
            transport=create_transport(
                parse_transport(transport), towards=url, memory_at=self.address
            ),
            controller=url,
            token=TOKEN,
            replica=ReplicaPlace.OFF if replica == NO_REPLICA else ReplicaPlace(replica),
        )
        self.replica = replica

    def publish(self, version: int) -> tuple[float, float, float, int]:
        """Publish; return the seconds of the stop, of the copy, and until the version is served, and the bytes copied."""
        # Change all bytes, like an optimiser step.
        self.memory += 1
        torch.cuda.synchronize()
        began = time.perf_counter()
        if self.replica == NO_REPLICA:
            self.trainer.publish(version, deadline_s=DEADLINE_S)
            stood = time.perf_counter() - began
            return stood, 0.0, stood, 0
        pending = self.trainer.publish(version, deadline_s=DEADLINE_S, wait=False, copy=True)
        stood = time.perf_counter() - began
        self.memory.bitwise_xor_(FLIP)
        pending.result(deadline_s=DEADLINE_S)
        served = time.perf_counter() - began
        self.memory.bitwise_xor_(FLIP)
        return stood, pending.copy.copy_s, served, pending.copy.nbytes

    def leave(self) -> None:
        self.trainer.close()

    def plain_copies(self, runs: int) -> dict[str, list[float]]:
        """Return the seconds of plain copies of all bytes, within the GPU and to pinned host memory."""
        found = self._copy_plainly(runs)
        # Free memory for the replica.
        torch.cuda.empty_cache()
        return found

    def _copy_plainly(self, runs: int) -> dict[str, list[float]]:
        raw = self.memory.view(torch.uint8)
        other = torch.empty_like(raw)
        pinned = torch.empty(min(CHUNK_NBYTES, len(raw)), dtype=torch.uint8, pin_memory=True)

        def to_host() -> None:
            for start in range(0, len(raw), len(pinned)):
                part = raw[start : start + len(pinned)]
                pinned[: len(part)].copy_(part, non_blocking=True)

        copies: dict[str, Callable[[], object]] = {
            "device": lambda: other.copy_(raw),
            "host": to_host,
        }
        found: dict[str, list[float]] = {}
        for name, copy in copies.items():
            spent = []
            for _ in range(runs + 1):
                torch.cuda.synchronize()
                began = time.perf_counter()
                copy()
                torch.cuda.synchronize()
                spent.append(time.perf_counter() - began)
            found[name] = spent[1:]
        return found

    # --- the engine -----------------------------------------------------------------------------

    def serve(self, url: str, transport: str) -> None:
        """Compute the expected weights once, and connect."""
        self.fill()
        self.truth = self.memory.clone()
        wire = create_transport(parse_transport(transport), towards=url, memory_at=self.address)
        self.engine = EngineClient(
            EngineWeights(
                manifest=self.manifest,
                addresses=[self.address + offset for offset in self.offsets],
                regions=[wire.register(self.address, self.nbytes)],
            ),
            transport=wire,
            hooks=RestingEngine(),
            controller=url,
            token=TOKEN,
            url="http://nowhere",
        )

    def expect_next(self) -> None:
        self.truth += 1
        self.spoil()

    def wrong_elements(self) -> int:
        torch.cuda.synchronize()
        parts = (slice(start, start + (1 << 30)) for start in range(0, len(self.truth), 1 << 30))
        return sum(int((self.memory[part] != self.truth[part]).sum()) for part in parts)

    def stop_serving(self) -> None:
        self.engine.close()
        del self.truth


def measure(host: Host, url: str, options: argparse.Namespace) -> list[Row]:
    text = QWEN3_30B_A3B.format(
        half=1, dtype="bfloat16", layers=options.layers, trainer='kind = "fsdp"\nworld_size = 1', ep=1
    )  # fmt: skip
    topology = parse_topology(text)
    (source,), (target,) = trainer_manifests(topology), engine_manifests(topology)
    if any(p.nbytes % 256 for m in (source, target) for p in m.parameters):
        raise SystemExit("parameters must fill their memory: gaps between them are compared too")
    trainer, engine = [0], [1]
    host.call([0, 1], "lay_out", {0: source.encode(), 1: target.encode()})
    host.call(trainer, "fill")
    plain = host.call(trainer, "plain_copies", options.runs)[0]
    host.call(engine, "serve", url, options.transport)
    case = (
        f"Qwen3-30B-A3B, {options.layers} layers, {source.nbytes / 1e9:.1f} GB, {options.transport}"
    )
    kinds = (NO_REPLICA, "device") + (("host",) if options.transport == "cuda_ipc" else ())
    stood: dict[str, list[float]] = {kind: [] for kind in kinds}
    copied: dict[str, list[float]] = {kind: [] for kind in kinds}
    served: dict[str, list[float]] = {kind: [] for kind in kinds}
    version, nbytes = 0, 0
    for kind in kinds:
        began = time.perf_counter()
        host.call(trainer, "train", url, options.transport, kind)
        for run in range(options.runs + 1):
            host.call(engine, "expect_next")
            times = host.call(trainer, "publish", version)[0]
            version, nbytes = version + 1, times[3]
            if wrong := host.call(engine, "wrong_elements")[0]:
                raise SystemExit(f"{kind}: {wrong} wrong elements in run {run}")
            # The first run binds, allocates and builds tables.
            if run:
                stood[kind].append(times[0])
                copied[kind].append(times[1])
                served[kind].append(times[2])
        host.call(trainer, "leave")
        print(f"{kind}: {nbytes / 1e9:.2f} GB copied, {time.perf_counter() - began:.1f} s in all")
    host.call(engine, "stop_serving")
    return rows_of(case, kinds, stood, copied, served, plain)


def rows_of(
    case: str,
    kinds: Sequence[str],
    stood: dict[str, list[float]],
    copied: dict[str, list[float]],
    served: dict[str, list[float]],
    plain: dict[str, list[float]],
) -> list[Row]:
    rows = []
    alone = median_p95(stood[NO_REPLICA])
    for index, statistic in enumerate(("median", "p95")):
        lines = [("publish without a replica: the trainer stands still", alone[index],
                  "plain copy within the GPU", median_p95(plain["device"])[0])]  # fmt: skip
        for kind in kinds[1:]:
            copy = f"plain copy, {kind}"
            top = median_p95(plain[kind])[0]
            stands, copies = median_p95(stood[kind])[index], median_p95(copied[kind])[index]
            lines += [
                (f"replica {kind}: the trainer stands still", stands, copy, top),
                (f"replica {kind}: the copy in it", copies, copy, top),
                (f"replica {kind}: the trainer stands still", stands, "without a replica", alone[0]),
                (f"replica {kind}: until served", median_p95(served[kind])[index],
                 "without a replica", alone[0]),
            ]  # fmt: skip
        rows += [
            Row(
                case,
                f"{metric}, {statistic}",
                1e3 * value,
                "ms",
                f"{reference}, median",
                1e3 * beside,
            )
            for metric, value, reference, beside in lines
        ]
    return rows


async def run(host: Host, options: argparse.Namespace) -> list[Row]:
    config = ControlConfig(mode=UpdateMode.IN_PLACE)
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        return await asyncio.to_thread(measure, host, controller.url, options)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--layers", type=int, default=16)
    arguments.add_argument("--transport", default="cuda_ipc")
    arguments.add_argument("--runs", type=int, default=9)
    options = arguments.parse_args()
    began = time.perf_counter()
    host = Host(2, ReplicaRank)
    rows = asyncio.run(run(host, options))
    save(rows, options.json)
    host.close()
    title = f"A replica of weights on a GPU: {torch.cuda.get_device_name(0)}"
    report(rows, options.json, f"{title}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
