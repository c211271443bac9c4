"""From a backend's configuration to its two halves. The one place that knows all of them."""

from __future__ import annotations

from typing import assert_never

from windlass.config import DiskBackend, P2pBackend, UpdateBackend, XcclBackend
from windlass.transfer.base import ReceiverBackend, SenderBackend
from windlass.transfer.collective import CollectiveReceiver, CollectiveSender
from windlass.transfer.device_sender import DeviceSender
from windlass.transfer.disk import DiskReceiver, DiskSender
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender
from windlass.transfer.split_sender import SplitSender

__all__ = ["receiver_for", "sender_for"]


def sender_for(config: UpdateBackend, sender: Sender, host: str) -> SenderBackend:
    """The trainer's half, over the parameters of `sender`. `host`: own address for groups."""
    match config:
        case P2pBackend():
            if (mapper := sender.transport.mapper) is not None:
                stores = DeviceSender(mapper, sender.manifest, sender.parameters, sender.replica)
                if sender.transport.traits.strided_stores:
                    return stores
                offers = sender.transport.offers()
                by_kernels = [o.transport for o in offers if o.traits.strided_stores]
                return SplitSender(stores, sender, by_kernels)
            return sender
        case XcclBackend():
            return CollectiveSender(config, sender.manifest, sender.parameters, host)
        case DiskBackend():
            return DiskSender(config, sender.manifest, sender.parameters)
        case _:
            assert_never(config)


def receiver_for(config: UpdateBackend, receiver: Receiver, host: str) -> ReceiverBackend:
    """The engine's half, over the live parameters of `receiver`. `host`: own address for groups."""
    match config:
        case P2pBackend():
            return receiver
        case XcclBackend():
            return CollectiveReceiver(config, receiver.manifest, receiver.live_addresses, host)
        case DiskBackend():
            return DiskReceiver(config, receiver.manifest, receiver.live_addresses)
        case _:
            assert_never(config)
