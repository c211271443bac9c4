"""Notifications of written parts: a source reports each part of a link that it has written, and the engine hashes it.

An engine rank does not notice one-sided writes. Without notifications, it hashes the whole update after the last write.
With notifications, it hashes each part while later parts are written. A lost, late or wrong notification costs only
time, because the engine uses a digest from notifications only if it equals the expected digest. Notifications are
datagrams between two processes of one host.

The source calls `notify`. The engine rank has a `ProgressDigests` with a `ProgressListener`.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import final

import msgspec

from windlass.errors import DECODE_ERRORS, TransferFailed
from windlass.memory.cuda.gpu import Gpu
from windlass.memory.cuda.links import WORDS_NBYTES, DeviceLink, read_digest

_log = logging.getLogger(__name__)

MAX_NBYTES = 4096
"""Maximum size of a notification in bytes."""
CLOSE_S = 5.0
MAX_AT_ONCE = 1024
"""Maximum number of messages that one `drain` delivers. The queue of a socket has fewer messages, so `drain` empties
it, but it returns even if a peer sends more messages all the time."""


class PartWritten(msgspec.Struct, frozen=True, array_like=True):
    """Notification that pieces [start, stop) of one table of a link are written.

    Attributes:
        source: worker that writes.
        version: version of the weights.
        write: random id of one call of `StoredLinks.write`. At a new id, the receiver hashes the link from its first
            piece on.
        table: index of the table in `DeviceLink.tables`.
        start, stop: range of the pieces in the table.
    """

    source: str
    version: int
    write: str
    table: int
    start: int
    stop: int


def notify(listener: str, part: PartWritten) -> None:
    """Send a notification to the listener at this address. Neither wait nor raise.

    If the listener's queue is full, or the listener is in another network namespace, the notification is lost. The
    engine rank then hashes the link in `verify`.
    """
    kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as sender:
        sender.sendto(msgspec.msgpack.encode(part), _name_of(listener))


@final
class ProgressListener:
    """Receiving end of notifications: an abstract Unix socket, and a thread that reads from it.

    Args:
        deliver: function that gets each notification. The thread or a caller of `drain` calls it, never both at the
            same time.

    Attributes:
        address: address for `notify`.

    Raises:
        OSError, RuntimeError: the socket cannot be opened, or the thread cannot be started.
    """

    def __init__(self, deliver: Callable[[PartWritten], None]) -> None:
        self._deliver = deliver
        self._decoder = msgspec.msgpack.Decoder(PartWritten)
        self._lock = threading.Lock()
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.address = secrets.token_hex(16)
        self._thread = threading.Thread(target=self._listen, name="write-progress", daemon=True)
        try:
            self._socket.bind(_name_of(self.address))
            self._thread.start()
        except (OSError, RuntimeError):
            self._socket.close()
            raise

    def drain(self) -> None:
        """Deliver the notifications that were sent before this call. Ignore messages that cannot be decoded."""
        with self._lock:
            for _ in range(MAX_AT_ONCE):
                if self._closed or (message := self._next()) is None:
                    return
                with contextlib.suppress(*DECODE_ERRORS):
                    self._deliver(self._decoder.decode(message))

    def close(self) -> None:
        """End the thread and close the socket. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._socket.shutdown(socket.SHUT_RD)
        self._thread.join(CLOSE_S)
        self._socket.close()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while not self._closed:
                selector.select()
                self.drain()

    def _next(self) -> bytes | None:
        try:
            return self._socket.recv(MAX_NBYTES)
        except BlockingIOError:
            return None


def _name_of(listener: str) -> str:
    return f"\0windlass-{listener}"


@dataclass(frozen=True, slots=True)
class _Progress:
    """Progress of the hashing of one link. `num_hashed`: number of hashed pieces per table."""

    version: int
    write: str
    num_hashed: list[int]


@final
class ProgressDigests:
    """Digests of links that are computed part by part, as sources report the parts. Thread-safe.

    Args:
        gpu: GPU that contains the received bytes; its stream runs the hashing.

    Attributes:
        listener: receiver of notifications; None if it could not be created. `verify` then hashes everything.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._lock = threading.Lock()
        self._links: Mapping[str, DeviceLink] = {}
        self._words: dict[str, int] = {}
        self._progress: dict[str, _Progress] = {}
        self.listener: ProgressListener | None = None
        try:
            self.listener = ProgressListener(self.add)
        except (OSError, RuntimeError) as error:
            _log.warning(
                "links are hashed after the writes instead of during the writes: %s", error
            )

    @property
    def address(self) -> str:
        """Address of the listener; empty without one."""
        return "" if self.listener is None else self.listener.address

    def close(self) -> None:
        """Stop listening, and free the memory that `load` allocated. Idempotent."""
        if self.listener is not None:
            self.listener.close()
        self.load({})

    def load(self, links: Mapping[str, DeviceLink]) -> None:
        """Set the links to hash: source -> link. The caller must keep the tables of these links until the next `load`.

        Free the digests of earlier links, unless late kernels may still use them.
        """
        device = self._gpu.device
        with self._lock:
            freed, self._words = self._words, {}
            self._links, self._progress = {}, {}
            for address in freed.values() if not self._gpu.is_late else ():
                device.free(address)
            for source in links:
                self._words[source] = device.allocate(WORDS_NBYTES)
            self._links = dict(links)

    def add(self, part: PartWritten) -> None:
        """Queue the hashing of a part on the GPU. Ignore it if it does not directly follow its table's hashed parts."""
        with self._lock:
            link = self._links.get(part.source)
            if link is None or not 0 <= part.table < len(link.tables):
                return
            try:
                self._hash(link, part)
            except TransferFailed:
                # `verify` hashes this link and reports the failure of the GPU.
                self._progress.pop(part.source, None)

    def _hash(self, link: DeviceLink, part: PartWritten) -> None:
        """Queue the hashing of a part if it directly follows the hashed parts of its table.

        The first part of a new write clears the digest of the earlier write.
        """
        gpu, words = self._gpu, self._words[part.source]
        progress = self._progress.get(part.source)
        if progress is None or (progress.version, progress.write) != (part.version, part.write):
            progress = _Progress(part.version, part.write, [0] * len(link.tables))
            self._progress[part.source] = progress
            gpu.device.clear(words, WORDS_NBYTES, gpu.stream)
        table, pieces = link.tables[part.table], range(part.start, part.stop)
        follows = pieces.start == progress.num_hashed[part.table]
        if pieces and follows and pieces.stop <= table.num_pieces:
            gpu.kernels.hash(table, gpu.stream, words, pieces)
            progress.num_hashed[part.table] = pieces.stop

    def take(self, version: int, sources: Iterable[str], deadline_s: float) -> dict[str, str]:
        """Return source -> digest, for each link whose parts were all reported as written in `version`.

        A second call does not return these digests again.

        Args:
            version: number of the version.
            sources: sources of the links.
            deadline_s: longest wait for the hashing, in seconds.

        Raises:
            TransferFailed: the GPU reports an error.
            TransferOutcomeUnknown: hashing did not end within `deadline_s`.
        """
        if self.listener is None:
            return {}
        self.listener.drain()
        with self._lock:
            taken = {source: self._progress.pop(source, None) for source in sources}
            whole = [
                source
                for source, progress in taken.items()
                if progress is not None
                and progress.version == version
                and progress.num_hashed == [t.num_pieces for t in self._links[source].tables]
            ]
            if whole:
                self._gpu.finish(deadline_s)
            return {source: read_digest(self._gpu, self._words[source]) for source in whole}
