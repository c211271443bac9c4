"""An engine with tensors of given names, each in its own memory, and its connection to a controller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from windlass.engines.client import EngineClient, EngineWeights
from windlass.layout.box import Box
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.memory.torch_dtypes import dtype_of
from windlass.testing.resting_engine import RestingEngine
from windlass.transports.registry import create_transport, parse_transport

__all__ = ["flat_engine"]


@contextmanager
def flat_engine(
    url: str,
    token: str,
    like: Mapping[str, torch.Tensor],
    *,
    name: str = "engine",
    aliases: Mapping[str, str] = {},
    served_at: str = "",
    can_send: bool = True,
) -> Iterator[dict[str, torch.Tensor]]:
    """Connect an engine and yield its tensors, all ones at first.

    Args:
        url: URL of the controller.
        token: secret of the controller.
        like: name -> tensor of the same shape and type.
        name: name of the engine.
        aliases: second name -> name.
        served_at: URL of the engine's HTTP server.
        can_send: whether other engines can catch up from this engine.
    """
    held = {key: torch.ones_like(tensor).contiguous() for key, tensor in like.items()}
    builder = ManifestBuilder(f"{name}/0", Role.ENGINE)
    transport = create_transport(parse_transport("cma"), towards=url)
    for key, tensor in held.items():
        builder.add_parameter(key, nbytes=tensor.nbytes, dtype=dtype_of(key, tensor))
        builder.add_shard(key, tuple(tensor.shape), Box.full(tuple(tensor.shape)), key)
    for alias, target in aliases.items():
        builder.add_alias(alias, target)
    client = EngineClient(
        EngineWeights(
            manifest=builder.build(),
            addresses=[tensor.data_ptr() for tensor in held.values()],
            regions=[transport.register(t.data_ptr(), t.nbytes) for t in held.values()],
        ),
        transport=transport,
        hooks=RestingEngine(),
        controller=url,
        token=token,
        can_send=can_send,
        url=served_at,
    )
    try:
        yield held
    finally:
        client.close()
