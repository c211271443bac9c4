"""One rank of the embedded engine: model loop in the main thread, agent and HTTP server in other threads."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
import torch.distributed as dist

from windlass.engines.client import EngineClient, EngineWeights
from windlass.engines.embedded.model import ForwardRunner, ModelShard, load_model
from windlass.engines.embedded.scheduler import Scheduler, Step
from windlass.engines.embedded.server import EngineServer
from windlass.engines.embedded.sleep import SleepingHooks, SleepingWeights
from windlass.engines.embedded.spec import EngineSettings
from windlass.engines.engine_rank import RankHooks
from windlass.engines.quiesce_gate import QuiesceGate
from windlass.envs import ENGINE_TOKEN_VARIABLE, secret_value
from windlass.errors import ConfigError
from windlass.transfer.dtensor import parameter_addresses
from windlass.transports.registry import create_transport, parse_transport


def run_rank(settings: EngineSettings, rank: int, token: str) -> NoReturn:
    """Run one rank until this process ends.

    If the engine has several ranks, the default process group of `torch.distributed` must exist.

    Raises:
        ConfigError: the model cannot be loaded or sharded, or the server cannot listen on its address.
        WindlassError: the controller refused this engine or did not answer.
    """
    torch.set_num_threads(1)
    transport = create_transport(parse_transport(settings.transport), towards=settings.controller)
    shard = load_model(
        Path(settings.model),
        worker=f"{settings.name}/{rank}",
        dtype=settings.dtype,
        seed=settings.seed or 0,
        transport=transport,
    )
    runner = ForwardRunner(
        shard.module, num_slots=settings.max_batch, max_positions=settings.max_positions
    )
    weights = SleepingWeights(
        shard.arena,
        shard.manifest,
        shard.addresses,
        lambda: parameter_addresses(shard.module),
        may_sleep=transport.traits.unpinned,
        caches_nbytes=runner.cache_nbytes // settings.tensor_parallel_size,
    )

    def fall_asleep(client: EngineClient | None) -> None:
        weights.sleep(() if client is None else client.agent.kept)
        runner.free_cache()
        _wait_for_all_ranks()

    def join_fleet(hooks: SleepingHooks, url: str = "") -> EngineClient | None:
        if not settings.controller:
            return None
        # The client is never closed: it lives as long as this process.
        return EngineClient(
            EngineWeights(
                manifest=shard.manifest,
                addresses=shard.addresses,
                regions=(shard.arena.region,),
            ),
            transport=transport,
            hooks=hooks,
            sleeper=hooks,
            controller=settings.controller,
            token=token,
            world_size=settings.tensor_parallel_size,
            url=url,
        )

    if rank:
        gate = QuiesceGate()
        # This engine has no captured layout, because it derives no values from its weights.
        client = join_fleet(SleepingHooks(RankHooks(None, gate, None), weights, None))
        while True:
            step = _broadcast(None)
            if step.sleeps:
                fall_asleep(client)
            if step.pause_id:
                gate.quiesced(step.pause_id)
            else:
                runner.run(step)
    scheduler = Scheduler(
        num_slots=settings.max_batch,
        max_positions=settings.max_positions,
        paused=bool(settings.controller),
        seed=secrets.randbits(63) if settings.seed is None else settings.seed,
    )
    hooks = SleepingHooks(scheduler, weights, scheduler.sleep)
    server = EngineServer(
        settings,
        token,
        scheduler,
        vocab_size=int(shard.module.config.vocab_size),
        eos_token_ids=_eos_token_ids(shard.module.config.eos_token_id),
        read_weight=lambda name: _read_weight(shard, name),
        require_weights=weights.require_values,
        sleep=hooks.sleep,
        engine_token=secret_value(ENGINE_TOKEN_VARIABLE),
    )
    server.start()
    client = join_fleet(hooks, server.url)
    os.write(1, msgspec.json.encode({"name": settings.name, "url": server.url}) + b"\n")
    while True:
        step = scheduler.next_step()
        if settings.tensor_parallel_size > 1:
            _broadcast(step)
        if step.sleeps:
            fall_asleep(client)
        if step.pause_id:
            scheduler.quiesced(step.pause_id)
        else:
            scheduler.sample(step, runner.run(step))


def _wait_for_all_ranks() -> None:
    """Wait until every rank has freed its memory, because rank 0 then reports that the engine sleeps. Collective."""
    if dist.is_initialized():
        dist.barrier()


def _broadcast(step: Step | None) -> Step:
    """Send a step from rank 0 to all other ranks, and return the step on every rank. Collective.

    Only rank 0 passes a step; the other ranks pass None.

    The bytes are msgpack, because a rank must not unpickle bytes that it receives.
    """
    data = bytearray() if step is None else bytearray(msgspec.msgpack.encode(step))
    length = torch.tensor([len(data)])
    dist.broadcast(length, src=0)
    body = torch.frombuffer(data or bytearray(int(length)), dtype=torch.uint8)
    dist.broadcast(body, src=0)
    return step or msgspec.msgpack.decode(body.numpy().data, type=Step)


def _eos_token_ids(configured: Any) -> frozenset[int]:
    """Return the tokens that end an answer, from the value in a transformers configuration (None, an id or a list)."""
    if configured is None:
        return frozenset()
    return frozenset(configured if isinstance(configured, list) else [configured])


def _read_weight(shard: ModelShard, name: str) -> list[Any]:
    """Return the values of a parameter's shard on this rank, as nested lists of floats.

    Raises:
        ConfigError: `name` is not the name of a parameter or persistent buffer of the model.
    """
    held = shard.module.state_dict()
    if name not in held:
        raise ConfigError(f"name must be a parameter or persistent buffer, got {name!r}")
    values: list[Any] = held[name].detach().float().tolist()
    return values
