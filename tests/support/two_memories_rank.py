"""Trainer rank that describes the elements of one checkpoint tensor in two parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

import windlass
from windlass.errors import WindlassError
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.transfer.base import ParameterMemory
from windlass.transports.registry import create_transport, parse_transport

TENSOR = "lm_head.weight"


@dataclass
class TwoMemoriesSettings:
    """Settings that the rank gets at its start.

    Attributes:
        way: `exporter` connects with an exporter that yields the tensor twice; `manifest` has a manifest that names it twice.
    """

    url: str
    token: str
    config: dict[str, object]
    way: str


def run(pipe: Connection, settings: TwoMemoriesSettings) -> None:
    """Publish once per message, which is the difference of the two memories. Answer with the error, or an empty text."""
    import transformers

    torch.set_num_threads(1)
    config = transformers.AutoConfig.for_model(**settings.config)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    first = model.get_parameter(TENSOR).detach()
    # Two halves, so that no box of them equals a box of the first parameter.
    second = [torch.nn.Parameter(half.clone()) for half in first.chunk(2)]
    connect = by_exporter if settings.way == "exporter" else by_manifest
    version = 0
    with connect(settings, model, second) as trainer:
        while (difference := pipe.recv()) is not None:
            for half, part in zip(second, first.chunk(2), strict=True):
                half.data.copy_(part + difference)
            try:
                trainer.publish(version, deadline_s=60).result(deadline_s=60)
                pipe.send("")
            except WindlassError as error:
                pipe.send(f"{type(error).__name__}: {error}")
            version += 1


def by_exporter(
    settings: TwoMemoriesSettings, model: torch.nn.Module, second: list[torch.nn.Parameter]
) -> windlass.TrainerClient:
    model.halves = torch.nn.ParameterList(second)

    def export(models: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in models[0].state_dict().items():
            if not name.startswith("halves."):
                yield name, tensor
        yield TENSOR, torch.cat([*second])

    return windlass.connect_trainer(
        model, controller=settings.url, token=settings.token, exporter=export
    )


def by_manifest(
    settings: TwoMemoriesSettings, model: torch.nn.Module, second: list[torch.nn.Parameter]
) -> windlass.TrainerClient:
    builder, memory = ManifestBuilder("trainer/0", Role.TRAINER), []

    def add(name: str, tensor: torch.Tensor, of: str, first_row: int) -> None:
        shape = tuple(model.get_parameter(of).shape)
        builder.add_parameter(name, nbytes=tensor.nbytes, dtype=DType.FLOAT32)
        rest = (0,) * (len(shape) - 1)
        builder.add_shard(of, shape, Box((first_row, *rest), tuple(tensor.shape)), name)
        memory.append(ParameterMemory(tensor.data_ptr(), tensor.nbytes))

    for number, half in enumerate(second):
        add(f"halves.{number}", half, TENSOR, number * half.shape[0])
    for name, parameter in model.named_parameters():
        add(name, parameter, name, 0)
    return windlass.TrainerClient(
        windlass.TrainerWeights(manifest=builder.build(), parameters=lambda: memory),
        transport=create_transport(parse_transport("cma")),
        controller=settings.url,
        token=settings.token,
        job="two memories",
        world_size=1,
    )
