"""An agent inside one rank of somebody else's engine: captured layout, memory, channel, hooks.

The engine's own HTTP API pauses and resumes it; what only its main loop can say (that every step
before this one is over) comes through `RestGate`.
"""

from __future__ import annotations

import http.client
import os
import threading
from typing import Protocol, final
from urllib.parse import urlsplit

import msgspec

from windlass.config import PauseMode
from windlass.control.agents import EngineAgent
from windlass.control.client import AgentChannel
from windlass.control.messages import PROTOCOL_VERSION, Hello
from windlass.engines.capture.capture import Captured
from windlass.errors import PeerTimeout, PeerUnreachable
from windlass.execution.backends import address_towards
from windlass.execution.receiver import Receiver
from windlass.execution.sender import ParameterMemory, Sender
from windlass.layout.manifest import Role
from windlass.transports.base import MemoryRegion, OneSidedTransport
from windlass.transports.configs import CudaIpcConfig, TransportConfig, parse_transport
from windlass.transports.registry import create_transport

__all__ = [
    "AgentSettings",
    "EngineApi",
    "NoSuchRoute",
    "RankHooks",
    "RestGate",
    "attach",
    "post",
]

CONNECT_DEADLINE_S = 60.0
API_DEADLINE_S = 60.0


class NoSuchRoute(PeerUnreachable):
    """The engine's server has no such route: this release cannot do that."""


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank of an engine is told.

    Attributes:
        name: identity in the fleet; ranks are called `name/rank`.
        controller: address. transport: name of the transport that receives weights.
        url: of the engine's own HTTP server.
        checkpoint: folder with safetensors files of the model's names, shapes and types.
        world_size: ranks of this engine.
    """

    name: str
    controller: str
    transport: str
    url: str
    checkpoint: str
    world_size: int


class EngineApi(Protocol):
    """The engine's own way to be paused; called on rank 0 only, may block."""

    def pause(self, mode: PauseMode, deadline_s: float) -> None:
        """Stop admission and treat running requests as `mode` says."""
        ...

    def rest(self, pause_id: str, deadline_s: float) -> None:
        """Make the main loop of every rank call its `RestGate.at_rest`."""
        ...

    def resume(self) -> None:
        """Go on generating."""
        ...

    def set_version(self, version: int) -> None:
        """Stamp what is generated from now on."""
        ...


@final
class RestGate:
    """Tells the agent's thread that the main loop has come past every earlier step."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pause_id = ""

    def at_rest(self, pause_id: str) -> None:
        """Called by the engine's main loop."""
        with self._changed:
            self._pause_id = pause_id
            self._changed.notify_all()

    def wait(self, pause_id: str, deadline_s: float) -> None:
        """Return once the main loop is at rest for this pause.

        Raises:
            PeerTimeout: it was not within `deadline_s`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._pause_id == pause_id, deadline_s):
                raise PeerTimeout(
                    f"pause {pause_id}: the engine's loop is not at rest after {deadline_s} s"
                )


@final
class RankHooks:
    """`EngineHooks` of one rank.

    Args:
        captured: of this rank. gate: set by its main loop. api: on rank 0, None elsewhere.
    """

    def __init__(self, captured: Captured, gate: RestGate, api: EngineApi | None) -> None:
        self._captured, self._gate, self._api = captured, gate, api
        self._paused = False

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:
        """See `EngineHooks.pause`."""
        if self._api is not None:
            self._api.pause(mode, deadline_s)
            self._paused = True
            self._api.rest(pause_id, deadline_s)
        self._gate.wait(pause_id, deadline_s)

    def resume(self) -> None:
        """See `EngineHooks.resume`; an engine that was not paused is left alone."""
        if self._api is not None and self._paused:
            self._api.resume()
            self._paused = False

    def finalise(self) -> None:
        """See `EngineHooks.finalise`."""
        self._captured.finalise()

    def set_version(self, version: int) -> None:
        """See `EngineHooks.set_version`."""
        if self._api is not None:
            self._api.set_version(version)


def attach(
    settings: AgentSettings,
    rank: int,
    token: str,
    captured: Captured,
    hooks: RankHooks,
) -> AgentChannel:
    """Register the captured memory and join the fleet. The channel lives as long as the rank.

    Called where the rank's GPU, if it has one, is the current device.

    Raises:
        AuthenticationError, ProtocolError, PeerTimeout: see `AgentChannel.connect`.
        TransportUnavailable, RegionError: the transport cannot serve this memory.
    """
    transport = create_transport(_transport_config(settings.transport))
    manifest = captured.manifest
    regions = _register(transport, captured)
    receiver = Receiver(transport, manifest, captured.addresses, regions)
    memory = [
        ParameterMemory(address, parameter.nbytes)
        for address, parameter in zip(captured.addresses, manifest.parameters, strict=True)
    ]
    # Repacked parameters are read from their buffers, which hold what was last received.
    sender = Sender(transport, manifest, lambda: memory, registered=regions)
    agent = EngineAgent(receiver, hooks, sender, host=address_towards(settings.controller))
    encoded, wire = manifest.encode(), transport.report()
    incarnation = os.urandom(8).hex()

    def hello() -> Hello:
        epoch, round_number = agent.place
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            worker=manifest.worker,
            incarnation=incarnation,
            role=Role.ENGINE,
            group=settings.name,
            rank=rank,
            world_size=settings.world_size,
            manifest=encoded,
            wire=wire,
            url=settings.url if rank == 0 else "",
            served_version=agent.served_version,
            epoch=epoch,
            round=round_number,
            tainted=agent.tainted,
            can_send=True,
        )

    channel = AgentChannel(
        settings.controller, token, hello, agent, on_disconnect=agent.on_disconnect
    )
    channel.connect(CONNECT_DEADLINE_S)
    return channel


def _transport_config(name: str) -> TransportConfig:
    config = parse_transport(name)
    if isinstance(config, CudaIpcConfig):
        import torch

        return msgspec.structs.replace(config, device=torch.cuda.current_device())
    return config


def _register(transport: OneSidedTransport, captured: Captured) -> tuple[MemoryRegion, ...]:
    """One region per stretch of memory; parameters that overlap share one.

    Those that only touch do not: on GPUs they may belong to different allocations.
    """
    spans = sorted(
        (address, address + parameter.nbytes)
        for address, parameter in zip(captured.addresses, captured.manifest.parameters, strict=True)
    )
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        if joined and begin < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return tuple(transport.register(begin, end - begin) for begin, end in joined)


def post(url: str, path: str, body: object, deadline_s: float = API_DEADLINE_S) -> bytes:
    """POST JSON to the engine's own server and return the answer. Blocks.

    Raises:
        PeerTimeout: no answer within `deadline_s`.
        NoSuchRoute: 404. PeerUnreachable: no connection, or an answer that is not 200.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=deadline_s)
    try:
        connection.request(
            "POST", path, msgspec.json.encode(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        answer = response.read()
    except TimeoutError as error:
        raise PeerTimeout(f"POST {url}{path}: no answer within {deadline_s} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise PeerUnreachable(f"POST {url}{path}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if response.status == http.client.NOT_FOUND:
        raise NoSuchRoute(f"POST {url}{path}: {response.status} {answer[:500]!r}")
    if response.status != http.client.OK:
        raise PeerUnreachable(f"POST {url}{path}: {response.status} {answer[:500]!r}")
    return answer
