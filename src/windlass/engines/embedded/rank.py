"""One rank of the engine: model loop in the main thread, agent and HTTP in threads beside it."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import msgspec
import torch
from torch.distributed.tensor import DTensor

from windlass.config import PauseMode
from windlass.engines.client import EngineClient, EngineWeights
from windlass.engines.embedded.model import ForwardRunner, ModelShard, load_model
from windlass.engines.embedded.scheduler import Scheduler, StepChannel, StepKind
from windlass.engines.embedded.server import EngineServer
from windlass.engines.embedded.settings import EngineSettings
from windlass.envs import ENGINE_TOKEN_VARIABLE, secret_value
from windlass.errors import ConfigError, PeerTimeout
from windlass.transports.base import OneSidedTransport
from windlass.transports.registry import create_transport, parse_transport
from windlass.updates.engine_agent import EngineHooks

CONNECT_DEADLINE_S = 60.0


@final
class _FollowerHooks:
    """`EngineHooks` of the other ranks: they are quiesced when rank 0's pause step reaches them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._quiesced_for = ""

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:  # noqa: ARG002
        with self._changed:
            if not self._changed.wait_for(lambda: self._quiesced_for == pause_id, deadline_s):
                raise PeerTimeout(f"pause {pause_id}: no pause step came within {deadline_s} s")

    def resume(self, deadline_s: float) -> None:
        """Rank 0's next step is the sign to go on."""

    def finalise(self) -> None:
        """Nothing is derived from weights."""

    def set_version(self, version: int, deadline_s: float) -> None:
        """Rank 0 stamps tokens."""

    def quiesced(self, pause_id: str) -> None:
        """Called by the model loop when it is quiesced."""
        with self._changed:
            self._quiesced_for = pause_id
            self._changed.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """What a rank is made of."""

    settings: EngineSettings
    index: int
    token: str
    transport: OneSidedTransport
    shard: ModelShard
    runner: ForwardRunner
    peers: StepChannel

    def join_fleet(self, hooks: EngineHooks, *, url: str = "") -> None:
        """Connect to the controller, if there is one."""
        if not self.settings.controller:
            return
        # It lives as long as this process.
        EngineClient(
            EngineWeights(
                manifest=self.shard.manifest,
                addresses=self.shard.addresses,
                regions=(self.shard.arena.region,),
            ),
            transport=self.transport,
            hooks=hooks,
            controller=self.settings.controller,
            token=self.token,
            world_size=self.settings.tensor_parallel_size,
            url=url,
            connect_deadline_s=CONNECT_DEADLINE_S,
        )


def run_rank(settings: EngineSettings, rank: int, token: str) -> None:
    """Run one rank until it is told to stop. `torch.distributed` is initialised if needed.

    Raises:
        ConfigError: see `load_model` and `EngineServer`.
        WindlassError: the controller refused this engine.
    """
    torch.set_num_threads(1)
    transport = create_transport(parse_transport(settings.transport), towards=settings.controller)
    shard = load_model(
        Path(settings.model),
        worker=f"{settings.name}/{rank}",
        dtype=settings.dtype,
        seed=settings.seed,
        transport=transport,
    )
    runner = ForwardRunner(
        shard.module, num_slots=settings.max_batch, max_positions=settings.max_positions
    )
    this = _Rank(
        settings=settings,
        index=rank,
        token=token,
        transport=transport,
        shard=shard,
        runner=runner,
        peers=StepChannel(settings.tensor_parallel_size),
    )
    if rank == 0:
        _lead(this)
    else:
        _follow(this)


def _lead(this: _Rank) -> None:
    settings, shard = this.settings, this.shard
    scheduler = Scheduler(
        num_slots=settings.max_batch,
        max_positions=settings.max_positions,
        paused=bool(settings.controller),
        seed=settings.seed,
    )
    server = EngineServer(
        settings,
        this.token,
        scheduler,
        vocab_size=int(shard.config.vocab_size),
        eos_token_ids=_eos_token_ids(shard.config.eos_token_id),
        read_weight=lambda name: _read_weight(shard, name),
        engine_token=secret_value(ENGINE_TOKEN_VARIABLE),
    )
    server.start()
    this.join_fleet(scheduler, url=server.url)
    os.write(1, msgspec.json.encode({"name": settings.name, "url": server.url}) + b"\n")
    while True:
        step = scheduler.next_step()
        this.peers.publish(step)
        if step.kind is StepKind.FORWARD:
            scheduler.sample(step, this.runner.run(step))
        elif step.kind is StepKind.PAUSE:
            scheduler.quiesced(step.pause_id)
        else:
            return


def _follow(this: _Rank) -> None:
    hooks = _FollowerHooks()
    this.join_fleet(hooks)
    while True:
        step = this.peers.receive()
        if step.kind is StepKind.FORWARD:
            this.runner.run(step)
        elif step.kind is StepKind.PAUSE:
            hooks.quiesced(step.pause_id)
        else:
            return


def _eos_token_ids(configured: Any) -> frozenset[int]:
    if configured is None:
        return frozenset()
    return frozenset(configured if isinstance(configured, list) else [configured])


def _read_weight(shard: ModelShard, name: str) -> list[Any]:
    held = shard.module.state_dict()
    if name not in held:
        raise ConfigError(f"name must be a parameter or persistent buffer, got {name!r}")
    tensor = held[name]
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    values: list[Any] = local.detach().float().tolist()
    return values
