"""What a trainer rank holds: connect once, publish every version.

with windlass.connect_trainer(model, controller=url, token=token) as trainer:
    trainer.publish(0)
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, final

from windlass.control.agents import TrainerAgent
from windlass.control.client import AgentChannel, CommandHandler
from windlass.control.messages import PROTOCOL_VERSION, Hello, RoundOutcome, UpdateReport
from windlass.errors import ConfigError, RoundAborted
from windlass.execution.base import ParameterMemory
from windlass.execution.sender import Sender
from windlass.layout.manifest import Role, ShardManifest
from windlass.layout.naming.stacked import TRANSFORMERS_EXPERTS, StackedRule
from windlass.transports.addresses import check_url, own_address
from windlass.transports.base import MemoryRegion, OneSidedTransport
from windlass.transports.configs import TransportConfig, parse_transport
from windlass.transports.registry import create_transport

if TYPE_CHECKING:
    import torch

__all__ = ["TrainerClient", "connect_trainer", "version_number"]


def version_number(version: int, what: str) -> int:
    """A plain integer, also of a counter that is a numpy or torch scalar.

    Raises:
        ConfigError: no integer >= 0.
    """
    try:
        number = operator.index(version)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"{what}: version must be an integer >= 0, got {version!r}")
    return number


@final
class TrainerClient:
    """One trainer rank's way to the fleet. Made by `connect_trainer`, or by hand for any framework.

    Args:
        manifest: of this rank. parameters: where its parameters lie now, in manifest order.
        transport: owned by the client from here on.
        controller: address. token: secret. group: name of the trainer job.
        rank, world_size: in that job. arena_nbytes: see `Sender`.
        registered: see `Sender`. connect_deadline_s: how long to wait for the controller's welcome.
        intercept: stands between channel and agent, for tests that inject faults.

    Raises:
        ConfigError: `controller` is no URL, or `arena_nbytes` is too small.
        AuthenticationError, ProtocolError, PeerTimeout: see `AgentChannel.connect`. The transport is
            closed, whatever it was.
    """

    def __init__(
        self,
        *,
        manifest: ShardManifest,
        parameters: Callable[[], Sequence[ParameterMemory]],
        transport: OneSidedTransport,
        controller: str,
        token: str,
        group: str = "trainer",
        rank: int = 0,
        world_size: int = 1,
        arena_nbytes: int = 0,
        registered: Sequence[MemoryRegion] = (),
        connect_deadline_s: float = 60.0,
        intercept: Callable[[TrainerAgent], CommandHandler] | None = None,
    ) -> None:
        self._transport = transport
        self._publishing = threading.Lock()
        with ExitStack() as undo:
            undo.callback(transport.close)
            check_url(controller, "controller")
            self._sender = Sender(
                transport, manifest, parameters, arena_nbytes=arena_nbytes, registered=registered
            )
            undo.callback(self._sender.close)
            self._agent = agent = TrainerAgent(self._sender, host=own_address(controller))
            undo.callback(agent.close)
            hello = Hello(
                protocol_version=PROTOCOL_VERSION,
                worker=manifest.worker,
                incarnation=os.urandom(8).hex(),
                role=Role.TRAINER,
                group=group,
                rank=rank,
                world_size=world_size,
                manifest=manifest.encode(),
                wire=transport.report(),
            )
            handler = agent if intercept is None else intercept(agent)
            self._channel = AgentChannel(controller, token, lambda: hello, handler)
            undo.callback(self._channel.close)
            self._channel.connect(connect_deadline_s)
            undo.pop_all()

    def publish(self, version: int, *, deadline_s: float = 600.0) -> UpdateReport:
        """Publish the weights as they are now; return once the fleet serves them.

        Collective: every trainer rank calls it with the same version.
        Memory: the weights must not change until it returns.
        Blocking: until the round ends; the controller's phase deadlines bound that.

        Args:
            version: greater than every version published before.
            deadline_s: how long to wait for the round to end.

        Raises:
            ConfigError: `version` is no integer >= 0, or another thread publishes.
            RoundAborted: not published, with the reason; the old version goes on being served.
            PeerTimeout: no answer within `deadline_s`; the weights must still not change.
        """
        version = version_number(version, "publish")
        if not self._publishing.acquire(blocking=False):
            raise ConfigError(f"publish: version {version}: another thread of this rank publishes")
        try:
            report = self._channel.announce(version, deadline_s)
        finally:
            self._publishing.release()
        if report.outcome is not RoundOutcome.PUBLISHED:
            raise RoundAborted(f"version {version} was not published: {report.reason}")
        return report

    def close(self) -> None:
        """Leave the fleet and free registered memory. Idempotent."""
        self._channel.close()
        self._agent.close()
        self._sender.close()
        self._transport.close()

    def __enter__(self) -> TrainerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect_trainer(
    module: torch.nn.Module,
    *,
    controller: str,
    token: str,
    transport: str | TransportConfig = "cma",
    arena_nbytes: int = 0,
    name_map: Callable[[str], str | None] | None = None,
    stacked: Sequence[StackedRule] = TRANSFORMERS_EXPERTS,
    group: str = "trainer",
    connect_deadline_s: float = 60.0,
) -> TrainerClient:
    """Connect this rank of a PyTorch trainer (FSDP2, tensor parallel, both, or neither).

    Called by every rank; not collective, gathers nothing. Rank and world size come from
    `torch.distributed` where it is initialised.

    Args:
        module: the model being trained; its DTensor parameters are described where they lie.
        controller: address of the controller.
        token: its secret.
        transport: name or configuration.
        arena_nbytes: memory for packed bytes; 0 for as much as one update packs.
        name_map: from parameter name to checkpoint name, None for what is left out; identity when
            omitted. `adapter_names()` keeps a LoRA adapter and nothing else.
        stacked: experts that the framework stacks; other rules for models of other frameworks.
        group: name of the trainer job.
        connect_deadline_s: how long to wait for the controller.

    Raises:
        ConfigError: `controller` is no URL, `transport` no transport, or `arena_nbytes` too small.
        UnsupportedLayout: a parameter whose placement cannot be described.
        TransportUnavailable, AuthenticationError, ProtocolError, PeerTimeout: see there.
    """
    from windlass.training.fsdp import describe_trainer

    config = parse_transport(transport) if isinstance(transport, str) else transport
    described = describe_trainer(module, group=group, name_map=name_map, stacked=stacked)
    return TrainerClient(
        manifest=described.manifest,
        parameters=described.parameters,
        transport=create_transport(config, towards=controller),
        controller=controller,
        token=token,
        group=group,
        rank=described.rank,
        world_size=described.world_size,
        arena_nbytes=arena_nbytes,
        connect_deadline_s=connect_deadline_s,
    )
