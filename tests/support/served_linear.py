"""An engine in the process of a test: one linear layer with a weight that updates write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from windlass.control.engine_agent import EngineHooks
from windlass.engines.client import EngineClient, EngineWeights
from windlass.layout.manifest import Role
from windlass.testing.resting_engine import RestingEngine
from windlass.transfer.dtensor import describe_module, parameter_addresses
from windlass.transports.cma import CmaConfig
from windlass.transports.registry import create_transport

__all__ = ["served_linear"]


@contextmanager
def served_linear(url: str, token: str, hooks: EngineHooks | None = None) -> Iterator[torch.Tensor]:
    """Join the fleet of the controller at `url` as engine "engine"; yield the (40, 24) weight. Blocks."""
    module = torch.nn.Linear(24, 40, bias=False).requires_grad_(requires_grad=False)
    module.weight.fill_(0.0)
    manifest = describe_module(module, "engine/0", Role.ENGINE)
    (address,), transport = parameter_addresses(module), create_transport(CmaConfig())
    with EngineClient(
        EngineWeights(
            manifest=manifest,
            addresses=[address],
            regions=[transport.register(address, manifest.parameters[0].nbytes)],
        ),
        transport=transport,
        hooks=hooks or RestingEngine(),
        controller=url,
        token=token,
    ):
        (weight,) = module.parameters()
        yield weight
