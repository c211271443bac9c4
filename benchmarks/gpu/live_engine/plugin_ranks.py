"""Rank of the FSDP2 trainer of `prove_vllm_plugin.py`. Ranks may share a GPU, because gloo connects them.

`python plugin_ranks.py RANK WORLD_SIZE PORT SETTINGS` reads one `Order` in JSON per line and answers each with a line.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from live_engine import vllm_nccl
from live_engine.surroundings import TOKEN


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings. `source`: folder with config.json. `gpu`: GPU of all ranks. `is_large`: no rank makes full tensors."""

    source: str
    device: str = "cuda"
    gpu: int = 0
    is_large: bool = False


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Command for a rank.

    fill: set the weights of seed `version`. save: write the weights of seed `version` to `folder`. join: connect to
    `servers` with `mode` and `transport`. connect: connect to a `controller`. send: publish `version` over this connection.
    own: send the weights with vLLM's backend `ipc` or `nccl` to `servers[0]`, `packed` or not. leave: disconnect.
    """

    do: str
    version: int = 0
    folder: str = ""
    servers: list[str] = []
    mode: str = "in_place"
    controller: str = ""
    transport: str = "auto"
    backend: str = "ipc"
    packed: bool = True


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an order. Times are in seconds; `begin_s` and `end_s` are times of this host's monotonic clock."""

    begin_s: float = 0.0
    end_s: float = 0.0
    error: str = ""
    update_s: float = 0.0
    wire_s: float = 0.0
    pause_s: float = 0.0
    nbytes: int = 0
    phase_s: dict[str, float] = {}
    transports: dict[str, int] = {}


class Rank:
    """Model in bfloat16 with one FSDP2 unit per layer, and its connection to servers."""

    def __init__(self, settings: Settings) -> None:
        import transformers
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self._settings = settings
        config = transformers.AutoConfig.from_pretrained(settings.source)
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        mesh = init_device_mesh(settings.device, (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.model = model.to_empty(device=settings.device)
        self._sync: Any = None
        self._client: Any = None
        self._group: Any = None

    def _full(self, seed: int) -> Iterator[tuple[str, Any, torch.Tensor]]:
        """Yield every parameter with its full values, made without communication between ranks."""
        for number, (name, parameter) in enumerate(self.model.named_parameters()):
            generator = torch.Generator(self._settings.device).manual_seed(seed * 100_003 + number)
            drawn = torch.randn(
                parameter.shape,
                generator=generator,
                device=self._settings.device,
                dtype=torch.float32,
            )
            yield name, parameter, (drawn * 0.02 + ("norm" in name)).bfloat16()

    def fill(self, order: Order) -> Done:
        """Set the weights and wait for the GPU, so that an update does not include this time."""
        self._fill(order.version)
        if self._settings.device == "cuda":
            torch.cuda.synchronize()
        return Done()

    @torch.no_grad()
    def _fill(self, seed: int) -> None:
        from torch.distributed.tensor import distribute_tensor

        if self._settings.is_large:
            for number, parameter in enumerate(self.model.parameters()):
                generator = torch.Generator(self._settings.device)
                generator.manual_seed((seed * 1000 + number) * 64 + dist.get_rank())
                parameter.to_local().normal_(0, 0.02, generator=generator)
            return
        for _, parameter, full in self._full(seed):
            shard = distribute_tensor(
                full, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
            parameter.to_local().copy_(shard.to_local())

    @torch.no_grad()
    def save(self, order: Order) -> Done:
        from safetensors.torch import save_file

        if dist.get_rank() == 0:
            folder = Path(order.folder)
            folder.mkdir(parents=True)
            shutil.copy(Path(self._settings.source) / "config.json", folder)
            tensors = {name: full.cpu() for name, _, full in self._full(order.version)}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return Done()

    def join(self, order: Order) -> Done:
        from windlass.config import ControlConfig, UpdateMode
        from windlass.integrations.vllm import WeightSync

        self._sync = WeightSync(
            self.model,
            servers=order.servers,
            config=ControlConfig(mode=UpdateMode(order.mode)),
            transport=order.transport,
            deadline_s=200.0,
        )
        return Done()

    def connect(self, order: Order) -> Done:
        from windlass.trainers.fsdp import connect_trainer

        self._client = connect_trainer(
            self.model, controller=order.controller, token=TOKEN, transport=order.transport
        )
        return Done()

    def send(self, order: Order) -> Done:
        if self._sync is None:
            report = self._client.publish(order.version).result()
        else:
            report = self._sync.send_weights(order.version).report
        if report.left_out or not report.digest_ok:
            raise RuntimeError(f"left out: {report.left_out}, digests: {report.digest_ok}")
        return Done(
            update_s=report.update_s, wire_s=report.wire_s, pause_s=report.pause_s,
            nbytes=report.nbytes, phase_s=report.phase_s, transports=report.transports,
        )  # fmt: skip

    def own(self, order: Order) -> Done:
        """Send weights as in vLLM's own examples (`examples/rl/rlhf_http_ipc.py`, `rlhf_http_nccl.py`, 0.24)."""
        from windlass.engines.http import EngineHttp

        server = EngineHttp(order.servers[0])
        if order.backend == "nccl" and self._group is None:
            self._group = self._own_group(server)
        server.post("/pause?mode=keep", {})
        server.post("/start_weight_update", {})
        weights = [(name, p.to_local()) for name, p in self.model.named_parameters()]
        if order.backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

            IPCWeightTransferEngine.trainer_send_weights(
                iter(weights),
                {"send_mode": "http", "url": order.servers[0], "packed": order.packed},
            )
        else:
            self._own_nccl(server, weights, packed=order.packed)
        server.post("/finish_weight_update", {})
        server.post("/resume", {})
        return Done(nbytes=sum(weight.nbytes for _, weight in weights))

    @staticmethod
    def _own_group(server: Any) -> Any:
        from windlass.net.addresses import free_port

        port = free_port()
        told = vllm_nccl.server_info(port, 2)
        with ThreadPoolExecutor() as pool:
            joins = pool.submit(server.post, "/init_weight_transfer_engine", told)
            group = vllm_nccl.trainer_group(port, 2)
            joins.result()
        return group

    def _own_nccl(
        self, server: Any, weights: list[tuple[str, torch.Tensor]], *, packed: bool
    ) -> None:
        names = [(name, weight.shape) for name, weight in weights]
        told = vllm_nccl.update_info(names, packed=packed)
        with ThreadPoolExecutor() as pool:
            receives = pool.submit(server.post, "/update_weights", told)
            vllm_nccl.send(self._group, weights, packed=packed)
            torch.cuda.synchronize()
            receives.result()

    def leave(self, _order: Order) -> Done:
        if self._sync is None:
            self._client.close()
        else:
            self._sync.shutdown()
        self._sync = self._client = None
        return Done()


def main() -> None:
    answers = os.dup(1)
    # Libraries also write to stdout; NCCL writes its version.
    os.dup2(2, 1)
    rank, world_size, port = (int(word) for word in sys.argv[1:4])
    settings = msgspec.json.decode(sys.argv[4], type=Settings)
    if settings.device == "cuda":
        torch.cuda.set_device(settings.gpu)
    backend = "cpu:gloo,cuda:gloo" if settings.device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    made = Rank(settings)
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        begin_s = time.monotonic()
        try:
            done = getattr(made, order.do)(order)
            if settings.device == "cuda" and order.do in ("fill", "own"):
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - whoever asked decides
            done = Done(error=f"{type(error).__name__}: {error}")
        found = {
            **json.loads(msgspec.json.encode(done)),
            "begin_s": begin_s,
            "end_s": time.monotonic(),
        }
        os.write(answers, json.dumps(found).encode() + b"\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
