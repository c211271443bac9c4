"""Turns of a trainer and a live engine on the same GPUs: ranks of the trainer, and the calls that differ between engines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from live_engine.proof_ranks import FsdpProof
from live_engine.proof_servers import ProofServer
from live_engine.servers import Vllm
from live_engine.trainers import unstack
from windlass.engines.http import EngineHttp
from windlass.engines.sglang.orders import HOOK

BUCKET_NBYTES = 1 << 30
KV_NBYTES = 147456
"""Bytes of the KV cache per token of Qwen3-4B; SGLang's option counts tokens."""


@dataclass(frozen=True)
class Published:
    """Result of one update on a trainer rank.

    Attributes:
        publish_s: seconds of the trainer's call. update_s, wire_s, phase_s, nbytes: see `windlass.UpdateReport`.
        used: bytes of the rank's GPU in use by all processes, by point of the turn.
    """

    publish_s: float
    update_s: float = 0.0
    wire_s: float = 0.0
    nbytes: int = 0
    phase_s: dict[str, float] | None = None
    used: dict[str, int] | None = None


class TurnsRank(FsdpProof):
    """FSDP2 rank that has GPU memory only while it steps and publishes."""

    def __init__(self, rank: int, device: int, world: int, store: str, model: str) -> None:
        super().__init__(rank, device, world, store, model)
        self.used: dict[str, int] = {}
        self._sizes: dict[int, int] = {}

    def releases(self) -> Callable[[], None]:
        return self.release

    def _storages(self) -> Iterator[tuple[torch.UntypedStorage, int]]:
        """Yield the storage of every parameter of this rank, and its bytes while it has memory."""
        for parameter in self.module.parameters():
            local: torch.Tensor = parameter.to_local()
            yield (
                local.untyped_storage(),
                self._sizes.setdefault(id(parameter), local.untyped_storage().nbytes()),
            )

    def step(self, seed: int, extra: float) -> dict[str, int]:
        """Get memory for the weights, use `extra` times this memory as gradients and optimiser would, and set new weights."""
        self.used = {"asleep": self.in_use()}
        total = 0
        for storage, nbytes in self._storages():
            storage.resize_(nbytes)
            total += nbytes
        held = torch.zeros(int(total * extra), dtype=torch.uint8, device=self.kind)
        held += 1
        self.fill(seed)
        self.used["step"] = self.in_use()
        del held
        self.empty_cache()
        return self.used

    def release(self) -> None:
        """Free the memory of the weights; the client calls this when the engines have verified them."""
        self.used["pull"] = self.in_use()
        for storage, _ in self._storages():
            storage.resize_(0)
        self.empty_cache()
        self.used["released"] = self.in_use()

    def turn(self, version: int) -> Published:
        """Publish the weights."""
        began = time.perf_counter()
        found = self.client.publish(version).result()
        publish_s = time.perf_counter() - began
        assert found.digest_ok, "a digest differs"
        assert not found.left_out, f"left out {found.left_out}"
        assert set(found.transports) == {"pull"}, f"the update used {found.transports}"
        self.points()
        phases = {str(phase): seconds for phase, seconds in found.phase_s.items()}
        return Published(
            publish_s, found.update_s, found.wire_s, found.nbytes, phases, dict(self.used)
        )

    def in_use(self) -> int:
        if self.kind == "cpu":
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def empty_cache(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def copy_s(self, nbytes: int) -> float:
        """Return the median seconds of a copy of this many bytes within the memory."""
        source = torch.ones(nbytes, dtype=torch.uint8, device=self.kind)
        target = torch.empty_like(source)
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            target.copy_(source)
            if self.kind == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        del source, target
        self.empty_cache()
        return sorted(seconds)[2]

    def send_ipc(self, url: str, own_path: str) -> None:
        """Send whole tensors by vLLM's backend `ipc` (0.24, `examples/rl/rlhf_http_ipc.py`), then free the memory."""
        if own_path and own_path not in sys.path:
            sys.path.append(own_path)
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

        def whole() -> Iterator[tuple[str, torch.Tensor]]:
            for name, parameter in self.module.named_parameters():
                yield from unstack(name, parameter.full_tensor().detach())

        told = {"send_mode": "http", "url": url, "packed": True}
        IPCWeightTransferEngine.trainer_send_weights(whole(), told)
        torch.cuda.synchronize()
        self.release()

    def send_buckets(self, url: str, tp: int) -> None:
        """Send whole tensors by CUDA IPC as SGLang's flattened buckets of 1 GiB, then free the memory."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        monkey_patch_torch_reductions()
        server, bucket, size = EngineHttp(url), list[tuple[str, torch.Tensor]](), 0

        def send() -> None:
            flat = FlattenedTensorBucket(named_tensors=bucket)
            told = {
                "flattened_tensor": flat.get_flattened_tensor(),
                "metadata": flat.get_metadata(),
            }
            # Each rank of the server maps the copy of the trainer rank on its own GPU.
            encoded: list[str] = [""] * dist.get_world_size()
            dist.all_gather_object(
                encoded, MultiprocessingSerializer.serialize(told, output_str=True)
            )
            if self.rank == 0:
                body = {
                    "serialized_named_tensors": [encoded[k % len(encoded)] for k in range(tp)],
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                }
                server.post("/update_weights_from_tensor", body, 120.0)
            # Every copy stays until the server has read it.
            dist.barrier()
            bucket.clear()

        for stacked, parameter in self.module.named_parameters():
            for name, tensor in unstack(stacked, parameter.full_tensor().detach()):
                if size + tensor.nbytes > BUCKET_NBYTES and bucket:
                    send()
                    size = 0
                bucket.append((name, tensor))
                size += tensor.nbytes
        send()
        torch.cuda.synchronize()
        self.release()

    def points(self) -> dict[str, int]:
        """Return the memory in use at each point of this turn, the present included."""
        self.used["served"] = self.in_use()
        return dict(self.used)


class TurnEngine(Protocol):
    """Calls of a server that takes turns, as a framework makes them.

    Attributes:
        levels: kinds of sleep, for `sleep`.
        own: name of the engine's own path for updates on the same GPU; empty if the CPU build has none.
    """

    levels: tuple[str, ...]
    own: str

    def flags(self, *, kv_nbytes: int, on_cpu: bool) -> tuple[str, ...]:
        """Return the flags of a server that may sleep."""
        ...

    def own_command(self, server: ProofServer, folder: str) -> list[str]:
        """Return the arguments of `python -m` for a server without Windlass that the own path updates.

        Make `server.engine` a client of this server.
        """
        ...

    async def sleep(self, server: ProofServer, level: str) -> None:
        """Make the server sleep."""
        ...

    async def own_update(self, server: ProofServer, trainers: Any) -> None:
        """Wake the weights, update them by the own path, and wake the KV cache."""
        ...


class PlainVllm(Vllm):
    """Server without Windlass; its fingerprints come from a worker extension."""

    digests = "held_weights"


class VllmTurns:
    """`TurnEngine` of vLLM 0.24 with its sleep mode."""

    levels: tuple[str, ...] = ("1", "2")
    own = "vLLM ipc"

    def flags(self, *, kv_nbytes: int, on_cpu: bool) -> tuple[str, ...]:
        if on_cpu:
            return ("--enable-sleep-mode",)
        return (
            "--enable-sleep-mode",
            *("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(kv_nbytes)),
        )

    def own_command(self, server: ProofServer, folder: str) -> list[str]:
        words = server.engine.command(folder, "")
        server.engine = PlainVllm(server.engine.settings, server.session)
        at = words.index("--model")
        launcher = {"--name", "--controller", "--transport", "--tp"}
        kept = [
            word
            for place, word in enumerate(words[at:], at)
            if word not in launcher and words[place - 1] not in launcher
        ]
        return [
            *("vllm.entrypoints.openai.api_server", *kept),
            *("--tensor-parallel-size", str(server.options.tp)),
            *("--weight-transfer-config", '{"backend": "ipc"}'),
            *("--worker-extension-cls", "live_engine.held_weights.HeldWeights"),
        ]

    async def sleep(self, server: ProofServer, level: str) -> None:
        await server.engine.call(f"/sleep?level={level}")

    async def own_update(self, server: ProofServer, trainers: Any) -> None:
        await server.engine.call("/wake_up?tags=weights")
        await server.engine.post("/start_weight_update", {})
        await trainers.all("send_ipc", server.engine.url, server.options.own_path)
        await server.engine.post("/finish_weight_update", {})
        await server.engine.call("/wake_up?tags=kv_cache")


class SglangTurns:
    """`TurnEngine` of SGLang 0.5.16 with its memory saver."""

    levels: tuple[str, ...] = ("all tags",)
    own = "SGLang flattened bucket"

    def flags(self, *, kv_nbytes: int, on_cpu: bool) -> tuple[str, ...]:
        if on_cpu:
            return ("--enable-memory-saver",)
        return ("--enable-memory-saver", "--max-total-tokens", str(kv_nbytes // KV_NBYTES))

    def own_command(self, server: ProofServer, folder: str) -> list[str]:
        words = server.engine.command(folder, "")
        # Its fingerprints come from Windlass's custom weight loader.
        launcher = {"--name", "--controller", "--transport", "--tp", "--model"}
        kept = [
            word
            for place, word in enumerate(words[1:], 1)
            if word not in launcher and words[place - 1] not in launcher
        ]
        return [
            *("sglang.launch_server", *kept, "--model-path", folder),
            *("--tp-size", str(server.options.tp), "--mem-fraction-static", "0.85"),
            *("--custom-weight-loader", HOOK),
        ]

    async def sleep(self, server: ProofServer, level: str) -> None:  # noqa: ARG002
        # SGLang demands an idle server, as frameworks do before they call this route.
        await server.engine.post("/release_memory_occupation", {})

    async def own_update(self, server: ProofServer, trainers: Any) -> None:
        await server.engine.post("/resume_memory_occupation", {"tags": ["weights"]})
        await trainers.all("send_buckets", server.engine.url, server.options.tp)
        await server.engine.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})


TURN_ENGINES: dict[str, TurnEngine] = {"vllm": VllmTurns(), "sglang": SglangTurns()}
"""Engines that take turns, by name."""
