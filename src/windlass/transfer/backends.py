"""Map a backend's configuration to its sender and receiver. Only this module knows all backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import assert_never

from windlass.config import (
    DiskBackend,
    P2pBackend,
    PluginBackend,
    RegisteredBackend,
    UpdateBackend,
    XcclBackend,
    find_backend,
)
from windlass.errors import ConfigError
from windlass.transfer.base import ReceiverBackend, SenderBackend
from windlass.transfer.collective import CollectiveReceiver, CollectiveSender
from windlass.transfer.disk import DiskReceiver, DiskSender
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend(RegisteredBackend):
    """Backend of another package. An entry point of the group `windlass.backends` refers to it.

    Attributes:
        sender: makes the trainer half from `PluginBackend.options`, the rank's sender and the host
            address of this rank.
        receiver: makes the engine half from the options, the rank's receiver and the host address.
    """

    sender: Callable[[Mapping[str, object], Sender, str], SenderBackend]
    receiver: Callable[[Mapping[str, object], Receiver, str], ReceiverBackend]


def _registered(name: str) -> Backend:
    found = find_backend(name)
    if not isinstance(found, Backend):
        raise ConfigError(
            f"backend: entry point {name!r} must refer to a {Backend.__qualname__}, got {found!r}"
        )
    return found


def sender_for(config: UpdateBackend, sender: Sender, host: str) -> SenderBackend:
    """Return the trainer half of a backend, which sends the parameters of `sender`.

    `host` is the address at which the engines of a group can connect to this rank.

    Raises:
        ConfigError: the backend is not installed here.
    """
    match config:
        case P2pBackend():
            return sender
        case XcclBackend():
            return CollectiveSender(config, sender.manifest, sender.parameters, host)
        case DiskBackend():
            return DiskSender(config, sender.manifest, sender.parameters)
        case PluginBackend():
            return _registered(config.name).sender(config.options, sender, host)
        case _:
            assert_never(config)


def receiver_for(config: UpdateBackend, receiver: Receiver, host: str) -> ReceiverBackend:
    """Return the engine half of a backend, which fills the live parameters of `receiver`.

    `host` is the address at which the other members of a group can connect to this rank.

    Raises:
        ConfigError: the backend is not installed here.
    """
    match config:
        case P2pBackend():
            return receiver
        case XcclBackend():
            return CollectiveReceiver(config, receiver.manifest, receiver.live_addresses, host)
        case DiskBackend():
            return DiskReceiver(config, receiver.manifest, receiver.live_addresses)
        case PluginBackend():
            return _registered(config.name).receiver(config.options, receiver, host)
        case _:
            assert_never(config)
