"""Backend `disk`: trainer ranks write safetensors files to a folder, and engine ranks read them."""

from __future__ import annotations

from typing import final

from windlass.config import BackendEntry, DiskBackend, UpdateMode
from windlass.control.backend import OwnPathBackend
from windlass.control.binding import Binding
from windlass.control.delivery import Delivery
from windlass.transfer.base import RankReceiver, RankSender, ReceiverBackend, SenderBackend
from windlass.transfer.disk import DiskReceiver, DiskSender


@final
class Disk(OwnPathBackend):
    """Files in a shared folder."""

    def __init__(self, options: DiskBackend) -> None:
        self._options = options

    def sender(self, sender: RankSender, host: str) -> SenderBackend:  # noqa: ARG002
        """Return a writer of files."""
        return DiskSender(self._options, sender.manifest, sender.parameters)

    def receiver(self, receiver: RankReceiver, host: str) -> ReceiverBackend:  # noqa: ARG002
        """Return a reader of files."""
        return DiskReceiver(self._options, receiver.manifest, receiver.live_addresses)

    def delivery(self, binding: Binding) -> Delivery:  # noqa: ARG002
        """Return a delivery that changes live weights only in APPLY."""
        return FileDelivery()


@final
class FileDelivery(Delivery):
    """Delivery by files, which receivers read into a shadow copy."""

    def changes_live(self, mode: UpdateMode) -> bool:  # noqa: ARG002
        """Return False: in both modes a torn file leaves the old weights whole."""
        return False


BACKEND = BackendEntry(Disk)
