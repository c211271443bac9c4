"""One engine rank in a fleet: memory that trainers write, the agent, and the agent's channel to the controller."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import final

from windlass.closing import Closing
from windlass.control.client import CommandHandler
from windlass.control.connect_messages import Hello, Registered, TurnRoom, group_and_rank
from windlass.control.engine_agent import EngineAgent, EngineHooks, Sleeper
from windlass.control.engine_channel import EngineChannel
from windlass.control.engine_state import HoldCause
from windlass.errors import ConfigError
from windlass.layout.dtypes import DType
from windlass.layout.manifest import Role, ShardManifest
from windlass.memory.room import room_of, used_nbytes
from windlass.net.addresses import check_url, own_address
from windlass.net.messages import PROTOCOL_VERSION
from windlass.transfer.base import ParameterMemory
from windlass.transfer.receiver import Receiver, RemoteMemory
from windlass.transfer.sender import Sender
from windlass.transports.base import MemoryRegion, OneSidedTransport, TransportOffer


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWeights:
    """Parameters of an engine rank and their addresses.

    Attributes:
        manifest: manifest of the rank; `manifest.worker` is GROUP/RANK, where GROUP is the engine's name.
        addresses: addresses of the live parameters, in manifest order. A parameter must never move.
        regions: registered memory regions; together they contain every live parameter.
        register_s: seconds that the registration took; shown in `/v1/status`.
        remote: live parameters, if they are in another process. Peers write them there, and `addresses` and `regions`
            describe copies in this process. None if the live parameters are in this process.
        buffered: names of parameters from which the engine computes its own tensors after every update. The engine cannot
            keep tensors in these parameters (`keep` of `connect_trainer`).
        rounded: tensor -> dtype to which the engine rounds received values in the parameter itself. An engine that
            rounds them differently can catch up from this engine only if the trainers have the tensor in this dtype.
        mixed_weights: whether the values may be of two versions, because an earlier process of Windlass left the engine in
            the middle of an update. The engine then serves nothing before the next version.
    """

    manifest: ShardManifest
    addresses: Sequence[int]
    regions: Sequence[MemoryRegion]
    register_s: float = 0.0
    remote: RemoteMemory | None = None
    buffered: Collection[str] = ()
    rounded: Mapping[str, DType] = field(default_factory=dict)
    mixed_weights: bool = False


@final
class EngineClient(Closing):
    """One engine rank that is connected to a controller; trainer ranks use `TrainerClient`.

    Trainers and other engines may write into the parameters from construction until `close` is called.

    Args:
        weights: weights of this rank.
        transport: transport that registered `weights.regions`. `close` and a failed constructor close the transport.
        hooks: functions that pause and resume this rank and set its version.
        controller: address of the controller.
        token: secret of the controller.
        world_size: number of ranks of the engine.
        url: address where the engine serves requests; set on rank 0 only.
        can_send: whether this engine may send its weights to other engines: to one that is behind (a catch-up), or to
            pass on the bytes of an update (a relay).
        serves_own_weights: True to serve requests with the initial weights until a version is published;
            False to stay paused until then.
        comes_to_rest: whether `hooks` of this rank can pause the engine and keep its running requests. False if the
            trainer pauses the engine.
        sleeper: see `EngineAgent`.
        on_held: see `EngineAgent`.
        connect_deadline_s: seconds to wait for the controller.
        intercept: function that wraps the agent; tests use it to inject faults.

    Attributes:
        agent: agent that carries out the controller's commands.

    Raises:
        ConfigError: `controller` is not a URL, or the transport cannot write every parameter.
        PlanError, ManifestError: see `Receiver`.
        AuthenticationError, ProtocolError: the controller refused the token or this rank.
        PeerUnreachable: this host has no route to the controller.
        PeerTimeout: the controller did not answer within `connect_deadline_s`.
    """

    def __init__(
        self,
        weights: EngineWeights,
        *,
        transport: OneSidedTransport,
        hooks: EngineHooks,
        controller: str,
        token: str,
        world_size: int = 1,
        url: str = "",
        can_send: bool = True,
        serves_own_weights: bool = False,
        comes_to_rest: bool = True,
        sleeper: Sleeper | None = None,
        on_held: Callable[[HoldCause | None], None] | None = None,
        connect_deadline_s: float = 60.0,
        intercept: Callable[[EngineAgent], CommandHandler] | None = None,
    ) -> None:
        self._transport = transport
        manifest, regions = weights.manifest, weights.regions
        with ExitStack() as undo:
            undo.callback(transport.close)
            check_url(controller, "controller")
            group, rank = group_and_rank(manifest.worker)
            memory = tuple(
                ParameterMemory(address, parameter.nbytes)
                for address, parameter in zip(weights.addresses, manifest.parameters, strict=True)
            )
            ordinal = transport.traits.gpu
            remote = weights.remote
            self._receiver = Receiver(transport, manifest, weights.addresses, regions, remote)
            undo.callback(self._receiver.close)
            self._sender = Sender(transport, manifest, lambda: memory, registered=regions)
            undo.callback(self._sender.close)
            self.agent = agent = EngineAgent(
                self._receiver,
                hooks,
                self._sender if can_send else None,
                host=own_address(controller),
                serves_own_weights=serves_own_weights,
                sleeper=sleeper,
                used_nbytes=partial(used_nbytes, ordinal),
                on_held=on_held,
                buffered=weights.buffered,
                mixed_weights=weights.mixed_weights,
                num_ranks=world_size,
            )
            undo.callback(agent.close)
            nbytes = sum(m.nbytes for m in memory)
            encoded, incarnation = manifest.encode(), os.urandom(8).hex()
            offers = transport.offers() if remote else _offers_for(transport, regions)
            registered = Registered(
                len(regions), sum(region.nbytes for region in regions), weights.register_s
            )

            def hello() -> Hello:
                return Hello(
                    protocol_version=PROTOCOL_VERSION,
                    worker=manifest.worker,
                    incarnation=incarnation,
                    role=Role.ENGINE,
                    group=group,
                    rank=rank,
                    world_size=world_size,
                    manifest=encoded,
                    offers=offers,
                    url=url,
                    served_version=agent.served_version,
                    lineage=agent.lineage,
                    applied=agent.applied,
                    unwritten=tuple(sorted(agent.reported_unwritten)),
                    rounded=dict(weights.rounded),
                    mixed_weights=agent.mixed_weights,
                    can_send=can_send,
                    comes_to_rest=comes_to_rest,
                    registered=registered,
                    room=TurnRoom() if sleeper is None else _room(sleeper, ordinal, nbytes),
                )

            self._channel = EngineChannel(
                controller,
                token,
                hello,
                agent if intercept is None else intercept(agent),
                on_disconnect=agent.on_disconnect,
                on_welcome=agent.on_welcome,
                on_command=agent.on_command,
            )
            undo.callback(self._channel.close)
            self._channel.connect(connect_deadline_s)
            undo.pop_all()

    def wait_disconnected(self, deadline_s: float) -> bool:
        """Wait until the connection to the controller has ended; return False if it still exists after `deadline_s`."""
        return self._channel.wait_disconnected(deadline_s)

    def leave(self) -> None:
        """Leave the fleet. The transport stays open, so that the caller can unregister memory. Idempotent."""
        self._channel.close()
        self.agent.close()
        self._sender.close()
        self._receiver.close()

    def close(self) -> None:
        """Leave the fleet and close the transport. Call this only if no trainer or engine writes any more. Idempotent."""
        self.leave()
        self._transport.close()


def _room(sleeper: Sleeper, ordinal: int, nbytes: int) -> TurnRoom:
    """Return the description of the GPU memory that an engine rank and a trainer use in turns.

    `ordinal` is the GPU's index, and `nbytes` the size of the rank's weights.
    """
    own = room_of(ordinal)
    return TurnRoom(own.name, own.nbytes, nbytes, sleeper.caches_nbytes)


def _offers_for(
    transport: OneSidedTransport, regions: Sequence[MemoryRegion]
) -> tuple[TransportOffer, ...]:
    """Return the offers of the transport that let peers write into every region.

    Raises:
        ConfigError: no offer lets peers write into every region.
    """
    published = [{exported.endpoint for exported in region.remotes} for region in regions]
    found = tuple(
        offer
        for offer in transport.offers()
        if all(offer.endpoint in endpoints for endpoints in published)
    )
    if not found:
        names = [offer.transport for offer in transport.offers()]
        raise ConfigError(
            f"transport: at least one of {names} must let peers write all memory regions of the engine"
        )
    return found
