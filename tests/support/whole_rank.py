"""One rank that trains in Megatron-core with options that leave weights half-stepped, and
publishes. Tests only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_rank import Case, build, start_parallel
from real_step import RealTraining
from trained_rank import NUM_TOKENS, bytes_at, scatter

from windlass.config import ReplicaPlace

NUM_VERSIONS = 2


@dataclass(frozen=True, eq=False)
class Row:
    """A model, its layout, its training, and its publication.

    Attributes:
        ddp, optimizer: arguments of Megatron's two configurations.
        way: `publish`, `copy` or `update_weights`.
        unsynced: publish without making weights whole.
        freed: offload the parameters' buffers as Megatron does.
        main_params: publish the optimizer's fp32 copies.
        wrapper: name of a further class around the model.
        config: settings of Megatron that the model has when it connects.
    """

    case: Case
    ddp: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    way: str = "publish"
    unsynced: bool = False
    freed: bool = False
    main_params: bool = False
    wrapper: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.case.name


def run_whole(
    rank: int, world_size: int, rows: list[Row], urls: list[str], token: str, folder: str
) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    from windlass.jobs.megatron_cpu import install, without_cuda_tensors

    install()
    with without_cuda_tensors():
        for row, url in zip(rows, urls, strict=True):
            torch.save(published(row, url, token), Path(folder) / f"{row}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def published(row: Row, url: str, token: str) -> dict[str, Any]:
    """Return this rank's weights after the forward pass that follows the last version, and its errors."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    from windlass.errors import WindlassError
    from windlass.trainers.callback import RolloutCallback
    from windlass.trainers.fsdp import connect_described
    from windlass.trainers.megatron import describe_megatron_trainer

    start_parallel(row.case)
    model_parallel_cuda_manual_seed(1)
    chunks = build(row.case)
    for chunk in chunks:
        scatter(chunk)
    bf16 = row.case.dtype is torch.bfloat16
    models = [Float16Module(c.config, c) if bf16 else c for c in chunks]
    training = RealTraining(
        models,
        num_tokens=NUM_TOKENS,
        lr=0.01,
        distributed=True,
        ddp=row.ddp,
        optimizer=row.optimizer,
    )
    met: dict[str, str] = {}
    for name, value in row.config.items():
        setattr(chunks[0].config, name, value)
    if row.config or row.wrapper or row.main_params or row.ddp.get("fp8_param_gather"):
        return refused(row, training, url, token)
    described = describe_megatron_trainer(
        training.models, family=row.case.spec.family, vocab_size=row.case.spec.vocab_size
    )
    if row.unsynced:
        described = dataclasses.replace(described, make_whole=None)
    with connect_described(
        described,
        "auto",
        url,
        token,
        arena_nbytes=0,
        replica=ReplicaPlace.AUTO if row.way == "copy" else ReplicaPlace.OFF,
        allow_unused=(),
        keep=(),
        connect_deadline_s=60.0,
    ) as trainer:
        for version in range(NUM_VERSIONS):
            training.step()
            met |= unwhole("before", training)
            for buffer in (b for m in training.models for b in m.buffers if row.freed):
                # Megatron's own buffer would be pinned.
                buffer.param_data_cpu = buffer.param_data.clone()
                buffer.offload_to_cpu(move_grads=False)
            try:
                if row.way == "copy":
                    trainer.publish(version, deadline_s=60, wait=False, copy=True).result(
                        deadline_s=60
                    )
                elif row.way == "update_weights":
                    with RolloutCallback(url, token, client=trainer) as callback:
                        callback.update_weights(version, deadline_s=60).result(deadline_s=60)
                else:
                    trainer.publish(version, deadline_s=60)
            except WindlassError as error:
                met["publish"] = f"{type(error).__name__}: {error}"
            met |= unwhole("after", training)
            for buffer in (b for m in training.models for b in m.buffers if row.freed):
                buffer.reload_from_cpu(move_grads=False)
        # The forward pass gathers all weights that are not gathered yet.
        loss = training.loss()
    return {**state_of(row, training), "loss": loss, "met": met}


def refused(row: Row, training: RealTraining, url: str, token: str) -> dict[str, Any]:
    """Return the error of connecting."""
    import megatron.core.distributed as wrappers
    from megatron.core import parallel_state

    from windlass.errors import UnsupportedLayout
    from windlass.trainers.megatron import connect_megatron_trainer

    (model,) = training.models
    # Build the wrapper by hand, because its constructor needs CUDA.
    if row.wrapper:
        kind = vars(wrappers)[row.wrapper]
        inner, model = model.module, kind.__new__(kind)
        torch.nn.Module.__init__(model)
        model.module = inner
    try:
        connect_megatron_trainer(
            model,
            family=row.case.spec.family,
            vocab_size=row.case.spec.vocab_size,
            controller=url,
            token=token,
            use_main_params=row.main_params,
        ).close()
    except UnsupportedLayout as error:
        return {"met": {"publish": str(error)}}
    finally:
        parallel_state.destroy_model_parallel()
    return {"met": {"publish": ""}}


def unwhole(when: str, training: RealTraining) -> dict[str, str]:
    """Return the error of `check_whole`, if any."""
    from windlass.errors import ConfigError
    from windlass.trainers.megatron import check_whole

    try:
        check_whole(training.models)
    except ConfigError as error:
        return {when: str(error)}
    return {}


def state_of(row: Row, training: RealTraining) -> dict[str, Any]:
    from megatron.core import parallel_state

    from windlass.trainers.megatron import describe_megatron_trainer

    described = describe_megatron_trainer(
        training.models, family=row.case.spec.family, vocab_size=row.case.spec.vocab_size
    )
    memory = [bytes_at(m.address, m.nbytes) for m in described.parameters()]
    parallel_state.destroy_model_parallel()
    return {"manifest": described.manifest.encode(), "memory": memory}
