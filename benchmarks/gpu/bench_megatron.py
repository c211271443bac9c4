"""Updates from live Megatron-core ranks: real `GPTModel` shards on half of the GPUs, no gather.

    python benchmarks/gpu/bench_megatron.py --json FILE [--layers 48]

Like `bench_nvlink.py`, but the trainer ranks have a Megatron-core model (TP and EP over all of them) in Megatron's own
memory. `describe_megatron_trainer` describes it, and the kernels read it in place. At the end every rank runs a training
step, sends the new weights, and the benchmark compares them.
"""

from __future__ import annotations

import functools
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_nvlink import QWEN3_30B_A3B, Host, Rank, bench_update
from megatron_model import Sizes, build, gather, start_parallel, train_step

from harness import Row, parser, report, save
from tools.plan.synthesis import engine_manifests
from tools.plan.topology import parse_topology
from windlass.layout.manifest import ShardManifest

BUFFER_NBYTES = 4 << 30
"""Bytes of the trainers' source buffer when the ceiling is measured."""


class MegatronRank(Rank):
    """Rank with a Megatron model. Trainers are the first half of the ranks, and TP and EP span them."""

    # Megatron makes dozens of groups and uses few of them.
    bind_device = False

    def groups(self) -> None:
        """Make Megatron's groups. All ranks, including engines, must call this together."""
        half = dist.get_world_size() // 2
        start_parallel(half, half)

    def build(self, sizes: Sizes) -> tuple[bytes, int]:
        from windlass.trainers.megatron import describe_megatron_trainer

        half = dist.get_world_size() // 2
        self.sizes = sizes
        self.model = build(sizes, half, half)
        self.described = describe_megatron_trainer(
            self.model, family="qwen3_moe", vocab_size=sizes.vocab
        )
        self.manifest = self.described.manifest
        by_address = {p.data_ptr(): p.detach() for p in self.model.parameters()}
        self.tensors = [by_address[m.address] for m in self.described.parameters()]
        return self.manifest.encode(), len(by_address)

    def lay_out(self, encoded: bytes) -> Any:
        if not self.is_trainer():
            return super().lay_out(encoded)
        self.float32 = False
        self.take(BUFFER_NBYTES)
        return self.region.remote

    def is_trainer(self) -> bool:
        return self.ordinal < dist.get_world_size() // 2

    def elements(self, parameter: int) -> tuple[torch.Tensor, int]:
        if not self.is_trainer():
            return super().elements(parameter)
        return self.tensors[parameter].reshape(-1).view(torch.int16), 0

    def advance(self) -> None:
        self.round += 1
        for tensor in self.tensors:
            tensor.view(torch.int16).add_(1)
        torch.cuda.synchronize()

    def located(self) -> Any:
        return self.described.parameters()

    def train(self) -> tuple[float, float]:
        """Set realistic values, run two steps, and return the loss before each step."""
        generator = torch.Generator("cuda")
        for index, tensor in enumerate(self.tensors):
            replicated = "router" in self.manifest.parameters[index].name
            generator.manual_seed(index * 2 + (0 if replicated else self.ordinal))
            if tensor.dim() > 1:
                tensor.normal_(0, 0.02, generator=generator)
            else:
                tensor.fill_(1.0)
        first = train_step(self.model, self.sizes.vocab, 0.1)
        return first, train_step(self.model, self.sizes.vocab, 0.1)

    def sums(self) -> dict[str, tuple[int, int]]:
        """Return, for this rank's part of every tensor, the sum of its units and of units times row."""
        found: dict[str, tuple[int, int]] = {}
        index_of = {p.name: index for index, p in enumerate(self.manifest.parameters)}
        for shard in self.manifest.shards():
            flat, start = self.elements(index_of[shard.parameter])
            strides = [s // 2 for s in shard.strides_bytes]
            part = flat.as_strided(shard.box.sizes, strides, (start + shard.offset_bytes) // 2)
            values = part.to(torch.int64)
            at = torch.arange(shard.box.sizes[0], device="cuda") + shard.box.offsets[0]
            weight = at.reshape(-1, *([1] * (shard.box.num_dims - 1)))
            one, two = int(values.sum()), int((values * weight).sum())
            old = found.get(shard.tensor, (0, 0))
            found[shard.tensor] = (old[0] + one, old[1] + two)
        return found

    def gathered(self) -> tuple[int, int]:
        """Return the number of tensors that `gather` makes and their bytes. All trainers must call this together."""
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
        full = gather(self.described, self.tensors, group)
        return len(full), sum(t.nbytes for _, t in full)


def distinct(parts: list[dict[str, tuple[int, int]]], replicated: set[str]) -> dict[str, Any]:
    """Return sums over ranks; for replicated tensors, the values of the first rank."""
    total: dict[str, tuple[int, int]] = {}
    for rank, part in enumerate(parts):
        for name, (one, two) in part.items():
            if name in replicated and rank:
                continue
            old = total.get(name, (0, 0))
            total[name] = (old[0] + one, old[1] + two)
    return total


def whole(manifests: list[ShardManifest]) -> set[str]:
    """Return the names of tensors with at least one box that every rank has."""
    boxes: list[set[tuple[str, bytes]]] = []
    for manifest in manifests:
        table = manifest.table
        boxes.append(
            {
                (
                    manifest.tensors[int(table.tensor[row])].name,
                    table.offsets[row].tobytes() + table.sizes[row].tobytes(),
                )
                for row in range(len(table))
            }
        )
    return {name for name, _ in set.intersection(*boxes)}


def train_and_send(
    host: Host,
    sources: list[ShardManifest],
    targets: list[ShardManifest],
    path: Path | None,
    rows: list[Row],
) -> None:
    """Run a training step and an update, and compare the sums of every tensor on both sides."""
    # Save first, because a step may fail.
    save(rows, path)
    losses = host.call(host.trainers, "train")
    print(f"losses of two steps, by rank: {losses}", flush=True)
    assert all(math.isfinite(loss) for pair in losses for loss in pair), losses
    host.call(host.engines, "spoil")
    workers = [m.worker for m in targets]
    calls: dict[int, tuple[str, list[Any]]] = {r: ("write", [workers]) for r in host.trainers}
    calls |= {r: ("wait", []) for r in host.engines}
    sent = host.everywhere(calls)
    for rank, target in zip(host.engines, targets, strict=True):
        expected = {sources[r].worker: sent[r][1][target.worker] for r in host.trainers}
        mismatched = host.call([rank], "verify", {rank: expected})[0][1]
        assert not mismatched, mismatched
    ours = distinct(host.call(host.trainers, "sums"), whole(sources))
    theirs = distinct(host.call(host.engines, "sums"), whole(targets))
    wrong = [name for name, value in ours.items() if theirs.get(name) != value]
    assert ours.keys() == theirs.keys()
    assert not wrong, wrong[:5]
    print(
        f"after the step: digests of every link and sums of {len(ours)} tensors agree", flush=True
    )


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--layers", type=int, default=48, help="number of layers of Qwen3-30B-A3B"
    )
    args = arguments.parse_args()
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {text}", flush=True)

    host = Host(torch.cuda.device_count() // 2 * 2, MegatronRank)
    rows: list[Row] = []
    half = host.half
    say("ranks are up")
    host.call(range(host.world_size), "groups")
    say("Megatron's groups are there")
    sizes = Sizes(2048, 768, args.layers, 32, 4, 128)
    built = host.call(host.trainers, "build", sizes)
    sources = [ShardManifest.decode(encoded) for encoded, _ in built]
    say(f"models are built: {built[0][1]} parameters on rank 0, {sources[0].nbytes / 1e9:.1f} GB")
    trainer = f'kind = "megatron"\nworld_size = {half}\ntp = {half}\nep = {half}'
    for ep, label in ((1, "TP"), (half, "EP")):
        text = QWEN3_30B_A3B.format(
            half=half, dtype="bfloat16", layers=args.layers, trainer=trainer, ep=ep
        )
        targets = engine_manifests(parse_topology(text))
        case = f"Qwen3-30B-A3B bf16, live Megatron-core TP{half} EP{half} -> {label}{half}"
        last = functools.partial(train_and_send, host, sources, targets, args.json)
        rows += bench_update(
            host, sources, targets, case, casting=False, last=last if ep == 1 else None
        )
        save(rows, args.json)
        say(f"{label} engine: done")
    found = host.call(host.trainers, "gathered")
    say(f"gather, as the live benchmark does it: {found[0]}")
    host.close()
    report(rows, args.json, f"Megatron-core: {torch.cuda.get_device_name(0)} x {host.world_size}")


if __name__ == "__main__":
    main()
