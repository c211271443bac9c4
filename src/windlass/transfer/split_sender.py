"""A GPU's links of one update by two ways: stored by its kernels, or packed and written by a network."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

from windlass.planning.plan import TransferPlan
from windlass.transfer.base import SenderBackend, SendResult
from windlass.transfer.bindings import DestinationBinding, GroupOffer
from windlass.transfer.outcomes import is_unknown

__all__ = ["SplitSender"]


@final
class SplitSender:
    """`SenderBackend` that sends each link by the transport that it was bound to.

    Args:
        stores: of links whose transport is one of `stored_by`. Closed with this one.
        writes: of all other links. The caller closes it.
        stored_by: names of transports.
    """

    def __init__(
        self, stores: SenderBackend, writes: SenderBackend, stored_by: Collection[str]
    ) -> None:
        self._stores, self._writes, self._stored_by = stores, writes, frozenset(stored_by)
        self._stored: frozenset[str] = frozenset()
        self._thread = ThreadPoolExecutor(1, "windlass-split")

    def connect(
        self, plan: TransferPlan, bindings: Sequence[DestinationBinding]
    ) -> GroupOffer | None:
        """See `SenderBackend.connect`; every destination is bound by one of the two."""
        near = [b for b in bindings if b.endpoint.transport in self._stored_by]
        far = [b for b in bindings if b.endpoint.transport not in self._stored_by]
        self._stored = frozenset(b.worker for b in near)
        self._stores.connect(plan.for_destinations(self._stored), near)
        others = frozenset(plan.destinations) - self._stored
        return self._writes.connect(plan.for_destinations(others), far)

    def prepare(self, version: int) -> None:
        """See `SenderBackend.prepare`."""
        self._stores.prepare(version)
        self._writes.prepare(version)

    def write(self, version: int, destinations: Sequence[str], deadline_s: float) -> SendResult:
        """See `SenderBackend.write`; both ways at once.

        Raises:
            TransferOutcomeUnknown: of either, before any other error.
        """
        near = [name for name in destinations if name in self._stored]
        far = [name for name in destinations if name not in self._stored]
        if not near or not far:
            only = self._stores if near else self._writes
            return only.write(version, destinations, deadline_s)
        written = self._thread.submit(self._writes.write, version, far, deadline_s)
        errors: list[BaseException] = []
        results: list[SendResult] = []
        try:
            results.append(self._stores.write(version, near, deadline_s))
        # What the other way still sends must be over, and its outcome known, before this is told.
        except Exception as error:  # noqa: BLE001
            errors.append(error)
        failed = written.exception()
        if failed is None:
            results.append(written.result())
        else:
            errors.append(failed)
        if errors:
            raise next((e for e in errors if is_unknown(e)), errors[0])
        links = {link.destination: link for result in results for link in result.links}
        return SendResult(
            tuple(links[name] for name in destinations),
            sum(result.pack_s for result in results),
            max(result.wire_s for result in results),
        )

    def close(self) -> None:
        """See `SenderBackend.close`."""
        self._thread.shutdown(wait=True)
        self._stores.close()
