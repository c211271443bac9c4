"""Memory that is unregistered and may still be touched: by a write or read here that is not over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import final

from windlass.transports.base import MemoryRegion

IsTouched = Callable[[MemoryRegion], bool]
_log = logging.getLogger(__name__)
_KEPT: list[Callable[[], None]] = []
"""What frees memory that may be touched for ever: kept until the process ends, never called again."""


@final
class DeferredFree:
    """Such memory, and what frees it, until nothing touches it. Guarded by its transport's lock.

    Args:
        transport: registry name, for the log.

    `is_touched` tells whether what began here, and is not over, reads or fills a byte of a region.
    """

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._waiting: list[tuple[MemoryRegion, Callable[[], None]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self, region: MemoryRegion, released: Callable[[], None], is_touched: IsTouched
    ) -> None:
        """Call `released` now or, while something touches `region`, once nothing does."""
        self._waiting.append((region, released))
        self.release(is_touched)
        if any(waiting is region for waiting, _ in self._waiting):
            _log.warning(
                "%s: a write that is not over may still touch %d bytes at %#x: not freed yet",
                self._transport,
                region.nbytes,
                region.address,
            )

    def release(self, is_touched: IsTouched) -> None:
        """Free what nothing touches any more."""
        waiting, self._waiting = self._waiting, []
        for region, released in waiting:
            if is_touched(region):
                self._waiting.append((region, released))
                continue
            try:
                released()
            # Of a GPU that has failed, or of nobody knows what: the others must be freed all the same,
            # and whoever writes or closes at this moment has no part in it.
            except Exception:  # noqa: BLE001
                _log.exception("%s: memory cannot be freed", self._transport)
                _KEPT.append(released)

    def close(self, is_touched: IsTouched) -> None:
        """The transport ends: nobody will ever tell of what is touched now."""
        self.release(is_touched)
        _KEPT.extend(released for _, released in self._waiting)
        self._waiting = []
