"""One rank of an FSDP2 trainer that sends its weights to plain vLLM servers by `WeightSync`.

`python sync_rank.py RANK WORLD_SIZE STORE SETTINGS` writes a line when it has joined. Then it
reads one `Order` in JSON per line and answers each with a line.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from windlass.control.routes import status_of

if TYPE_CHECKING:
    from windlass.integrations.hosted import HostedController


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the ranks; `source` contains `config.json` of the model."""

    source: str
    servers: list[str]
    kind: str = "dense"
    mode: str = "in_place"
    pause: str | None = "keep"
    transport: str = "auto"
    deadline_s: float = 240.0
    pause_s: float = 60.0


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Order to train a step, write the weights to `checkpoint` and send them as `version`.

    Attributes:
        kill: process ids that rank 0 kills when the round of this version enters the phase `kill_in`.
    """

    version: int
    checkpoint: str
    kill: list[int] = []
    kill_in: str = ""


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an order. `error` begins with the type's name; `links` (rank 0): "source >
    destination" -> transport."""

    version: int = -1
    servers: list[str] = []
    left_out: dict[str, str] = {}
    digest_ok: bool = False
    nbytes: int = 0
    pause_s: float = 0.0
    took_s: float = 0.0
    links: dict[str, str] = {}
    error: str = ""


def main() -> None:
    rank, world_size = (int(word) for word in sys.argv[1:3])
    settings = msgspec.json.decode(sys.argv[4], type=Settings)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=world_size)
    from hosted_controllers import kill_in_phase, remember_hosted
    from trainer_rank import Fsdp, FsdpAdapter

    from windlass.config import ControlConfig, PhaseDeadlines, UpdateMode
    from windlass.errors import WindlassError
    from windlass.integrations.vllm import WeightSync
    from windlass.layout.naming.adapters import adapter_names

    base = settings.kind.removesuffix("+lora")
    is_adapter = base != settings.kind
    trained = FsdpAdapter(base) if is_adapter else Fsdp(base)
    began_s, hosted = time.monotonic(), remember_hosted()
    try:
        sync = WeightSync(
            trained.model,
            servers=settings.servers,
            config=ControlConfig(
                mode=UpdateMode(settings.mode), deadlines=PhaseDeadlines(pause_s=settings.pause_s)
            ),
            pause=settings.pause,
            name_map=adapter_names() if is_adapter else None,
            transport=settings.transport,
            deadline_s=settings.deadline_s,
        )
    except WindlassError as error:
        answer(Sent(error=f"{type(error).__name__}: {error}", took_s=time.monotonic() - began_s))
        return
    answer(Sent(took_s=time.monotonic() - began_s))
    with sync:
        for line in sys.stdin:
            order = msgspec.json.decode(line, type=Order)
            trained.step()
            trained.save(Path(order.checkpoint))
            if rank == 0 and not is_adapter:
                shutil.copy(Path(settings.source) / "config.json", order.checkpoint)
            if order.kill and rank == 0:
                coordinator = hosted[-1].controller.coordinator
                kill_in_phase(coordinator, order.version, order.kill_in, order.kill)
            began_s = time.monotonic()
            try:
                sent = sync.send_weights(order.version)
            except WindlassError as error:
                answer(Sent(error=f"{type(error).__name__}: {error}"))
                continue
            answer(
                Sent(
                    version=sent.version, servers=list(sent.servers), left_out=dict(sent.left_out),
                    digest_ok=sent.report.digest_ok, nbytes=sent.report.nbytes,
                    pause_s=sent.report.pause_s, took_s=time.monotonic() - began_s,
                    links=links_of(hosted[-1]) if rank == 0 else {},
                )
            )  # fmt: skip
    dist.destroy_process_group()


def links_of(hosted: HostedController) -> dict[str, str]:
    """Return the transport of each link, from the controller's status."""

    async def status() -> dict[str, Any]:
        return status_of(hosted.controller.coordinator)

    links = hosted.call(status()).result(30)["links"]
    return {f"{link['source']} > {link['destination']}": link["transport"] for link in links}


def answer(sent: Sent) -> None:
    os.write(1, msgspec.json.encode(sent) + b"\n")


if __name__ == "__main__":
    main()
