"""Digests of links, added up part by part as the parts are written."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

from windlass.errors import TransferFailed
from windlass.memory.cuda.gpu import Gpu
from windlass.memory.cuda.links import WORDS_NBYTES, DeviceLink, read_digest
from windlass.transfer.write_progress import PartWritten

__all__ = ["ProgressDigests"]


@dataclass(frozen=True, slots=True)
class _Progress:
    """How far one write of a link has come. `num_hashed`: pieces, per table."""

    version: int
    write: str
    num_hashed: list[int]


@final
class ProgressDigests:
    """The hashing half of `ProgressListener`. Thread-safe.

    Args:
        gpu: whose memory is written; its stream does the hashing.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._lock = threading.Lock()
        self._links: Mapping[str, DeviceLink] = {}
        self._words: dict[str, int] = {}
        self._progress: dict[str, _Progress] = {}

    def load(self, links: Mapping[str, DeviceLink]) -> None:
        """From now on these links, by source; their tables must live until the next `load`.

        What it had for earlier ones is freed, unless late kernels may still use it.
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
        """Queue the hashing of a part. Whatever does not follow what was hashed is ignored."""
        with self._lock:
            link = self._links.get(part.source)
            if link is None or not 0 <= part.table < len(link.tables):
                return
            try:
                self._hash(link, part)
            except TransferFailed:
                # A GPU that fails is reported by `verify`, which hashes what is missing.
                self._progress.pop(part.source, None)

    def _hash(self, link: DeviceLink, part: PartWritten) -> None:
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
        """Digests of those links of `sources` that are written whole, each given once.

        Raises:
            TransferFailed: the GPU reports an error.
            TransferOutcomeUnknown: hashing was not over within `deadline_s`.
        """
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
