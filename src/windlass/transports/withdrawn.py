"""Memory that is withdrawn and may still be touched: by a write or read here whose outcome is unknown."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import final

from windlass.transports.base import MemoryRegion

__all__ = ["Withdrawn"]

_log = logging.getLogger(__name__)
_KEPT: list[Callable[[], None]] = []
"""What frees memory that may be touched for ever: kept until the process ends, never called again."""


@final
class Withdrawn:
    """What frees such memory, until it may be called. Guarded by its transport's lock.

    Args:
        transport: registry name, for the log.
    """

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._waiting: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, region: MemoryRegion, released: Callable[[], None], is_touched: bool) -> None:
        """Call `released` now, with all that wait, or have it wait."""
        self._waiting.append(released)
        if not is_touched:
            self.release()
            return
        _log.warning(
            "%s: a write of unknown outcome may still touch %d bytes at %#x: an arena is not freed yet",
            self._transport,
            region.nbytes,
            region.address,
        )

    def release(self) -> None:
        """Nothing is touched any more."""
        waiting, self._waiting = self._waiting, []
        for released in waiting:
            try:
                released()
            # Of a GPU that has failed, or of nobody knows what: the others must be freed all the same,
            # and whoever writes or closes at this moment has no part in it.
            except Exception:  # noqa: BLE001
                _log.exception("%s: memory cannot be freed", self._transport)
                _KEPT.append(released)

    def close(self, is_touched: bool) -> None:
        """The transport ends: nobody will ever tell."""
        if not is_touched:
            self.release()
        _KEPT.extend(self._waiting)
        self._waiting = []
