"""Backend `disk`: updates through files in a shared folder, for engines that no other backend reaches.

Trainer ranks write their shards as safetensors files. Engine ranks read the boxes that they need into a
shadow copy in both update modes, so that a torn or damaged file never changes live weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import final

from windlass.backends.disk_files import (
    OWNERS_FOLDER,
    file_digest,
    prune,
    read_boxes,
    read_index,
    version_folder,
    write_shards,
)
from windlass.config import BackendEntry, DiskBackend, UpdateMode
from windlass.control.backend import OwnPathBackend
from windlass.control.binding import Binding
from windlass.control.delivery import Delivery
from windlass.errors import TransferFailed
from windlass.layout.manifest import ShardManifest
from windlass.planning.plan import TransferPlan
from windlass.transfer.base import (
    ParameterMemory,
    RankReceiver,
    RankSender,
    ReceiverBackend,
    SenderBackend,
    failed_links,
)
from windlass.transfer.bind import check_destinations
from windlass.transfer.bindings import DestinationBinding, GroupOffer, Written
from windlass.transfer.destination import Destination
from windlass.transfer.source import SourceMemory, refuse_transforms
from windlass.transports.peers import PeerEndpoint

_log = logging.getLogger(__name__)


@final
class Disk(OwnPathBackend):
    """Files in a shared folder."""

    def __init__(self, options: DiskBackend) -> None:
        self._options = options

    def sender(self, sender: RankSender, host: str) -> SenderBackend:  # noqa: ARG002
        """Return the trainer half: it writes the rank's shards to a file."""
        return DiskSender(self._options, sender.manifest, sender.parameters)

    def receiver(self, receiver: RankReceiver, host: str) -> ReceiverBackend:  # noqa: ARG002
        """Return the engine half: it reads the rank's boxes from the files of the trainer ranks."""
        return DiskReceiver(self._options, receiver.manifest, receiver.live_addresses)

    def delivery(self, binding: Binding) -> Delivery:  # noqa: ARG002
        """Return a delivery in which engines keep their old weights until APPLY, in both update modes."""
        return FileDelivery()


@final
class FileDelivery(Delivery):
    """Delivery by files, which receivers read into a shadow copy."""

    def changes_live(self, mode: UpdateMode) -> bool:  # noqa: ARG002
        """Return False: in both modes the boxes are read into a shadow copy, so a torn file changes no live weights."""
        return False


@final
class DiskSender:
    """Trainer half: writes one file per version, which all engine ranks read."""

    def __init__(
        self,
        config: DiskBackend,
        manifest: ShardManifest,
        parameters: Callable[[], Sequence[ParameterMemory]],
    ) -> None:
        self._config = config
        self._folder = Path(config.folder)
        self._source = SourceMemory(manifest, parameters)
        self._pack_s = 0.0

    def connect(
        self, plan: TransferPlan, bindings: Sequence[DestinationBinding]
    ) -> GroupOffer | None:
        """Bind the plan, and create the shared folder, which only its owner can read.

        The plan needs no group, so return None.

        Raises:
            TransferFailed: the folder cannot be created; see also `SourceMemory.bind`.
            PlanError, BindingsRefused, TransportUnavailable: see `SourceMemory.bind`.
        """
        self._source.bind(plan, bindings)
        try:
            self._folder.mkdir(OWNERS_FOLDER, parents=True, exist_ok=True)
        except OSError as error:
            raise TransferFailed(f"disk: {self._folder}: {error}") from error
        return None

    def prepare(self, version: int) -> None:
        """Compute the digest of every link. Delete this rank's files of old versions; see `prune`."""
        began = time.perf_counter()
        self._source.locate()
        self._source.hash_links()
        try:
            prune(self._folder, version, self._source.manifest.worker, self._config.keep_versions)
        except OSError as error:
            # If the disk has really failed, `write` reports the failure.
            _log.warning("old versions could not be removed: %s", error)
        self._pack_s = time.perf_counter() - began

    def write(
        self,
        version: int,
        destinations: Sequence[str],
        deadline_s: float,  # noqa: ARG002
    ) -> Written:
        """Write this rank's parameters to one file. All engines read this file; see `SenderBackend.write`.

        If the file cannot be written, all links fail.

        Raises:
            RoundAborted: this rank has no link to one of the destinations.
        """
        check_destinations(self._source.programs, destinations)
        pack_s, self._pack_s = self._pack_s, 0.0
        began = time.perf_counter()
        manifest = self._source.manifest
        addresses = tuple(self._source.addresses.tolist())
        try:
            write_shards(self._folder, version, manifest, addresses, self._source.memory)
        except TransferFailed as error:
            links = failed_links(destinations, str(error))
        else:
            links = self._source.delivered(destinations)
        return Written(links, pack_s, time.perf_counter() - began)

    def close(self) -> None:
        """Free the digests and drop all links; the files stay. Idempotent."""
        self._source.close()


@final
class DiskReceiver:
    """Engine half: reads its boxes from the files of the trainer ranks into a shadow copy."""

    def __init__(
        self, config: DiskBackend, manifest: ShardManifest, addresses: Sequence[int]
    ) -> None:
        self._folder = Path(config.folder)
        self._destination = Destination(manifest, addresses)

    def connect(self, plan: TransferPlan, mode: UpdateMode) -> DestinationBinding:  # noqa: ARG002
        """Bind the plan to a shadow copy.

        Return a binding that names the folder and contains no memory addresses.

        Raises:
            PlanError: the plan quantises tensors, or is for another layout.
            TransferError, TransportUnavailable, OSError: see `Destination.bind`.
        """
        refuse_transforms(self._destination.manifest.worker, plan)
        self._destination.bind(plan, shadow=True, staged=False)
        return self._destination.unaddressed_binding(PeerEndpoint("disk", str(self._folder), ""))

    def verify(self, version: int, expected: Mapping[str, str]) -> tuple[str, ...]:
        """Read the boxes of this rank from the files of all sources in `expected`, and compare the digests.

        The boxes are read into the shadow copy. Return the sources with a wrong digest or an unreadable file.

        Raises:
            TransferError: see `read_boxes` and `Destination.verify`.
        """
        indices, unreadable = [], []
        for source in sorted(expected):
            try:
                indices.append(read_index(self._folder, version, source))
            except TransferFailed as error:
                _log.warning("%s", error)
                unreadable.append(source)
        home = version_folder(self._folder, version)
        unreadable += read_boxes(
            home,
            indices,
            self._destination.manifest,
            self._destination.addresses,
            self._destination.memory,
        )
        wrong = set(self._destination.verify(expected)) | set(unreadable)
        for index in indices:
            if index.worker in wrong:
                self._explain(home / index.file, index.digest)
        return tuple(sorted(wrong))

    def apply(self) -> None:
        """Copy the shadow copy into the live weights."""
        self._destination.apply()

    def close(self) -> None:
        """Free the shadow copy. Idempotent."""
        self._destination.close()

    @staticmethod
    def _explain(path: Path, expected: str) -> None:
        """Log whether a refused file has changed since the trainer rank wrote it. `expected`: digest from the index."""
        try:
            found = file_digest(path)
        except OSError as error:
            found = str(error)
        change = "has changed" if found != expected else "has not changed"
        _log.warning(
            "refused %s, which %s since it was written; its digest was %s then and is %s now",
            path,
            change,
            expected,
            found,
        )


BACKEND = BackendEntry(Disk)
