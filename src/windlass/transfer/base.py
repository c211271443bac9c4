"""Protocols that a backend implements, so that a round does not depend on how bytes travel.

A backend has a half in the trainer rank, `SenderBackend`, and a half in the engine rank,
`ReceiverBackend`. A round calls every pair in
the same phases. Engines always verify one digest per link. It covers the elements of the link's ops
in plan order, in the destination's dtype. `LinkOutcome` says how a link ended; `status_of` turns an
exception into a link status.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Protocol, TypeVar, TypeVarTuple

from windlass.config import UpdateMode
from windlass.errors import PeerUnreachable, TransferOutcomeUnknown, WindlassError
from windlass.layout.manifest import ShardManifest
from windlass.planning.plan import TransferPlan
from windlass.transfer.bindings import (
    DestinationBinding,
    GroupOffer,
    LinkOutcome,
    LinkStatus,
    Written,
)

Arguments = TypeVarTuple("Arguments")
T = TypeVar("T")

LINKS_AT_ONCE = 16
"""Maximum number of links that a trainer rank writes at the same time. With fewer, ranks wait for
the same receivers: in `python -m tools.plan --simulate`, DeepSeek-V3 on 128 to 128 ranks loses 13 %
with 4."""


@dataclass(frozen=True, slots=True)
class ParameterMemory:
    """Current memory of a parameter.

    Attributes:
        address: address of the first element; 0 for a parameter that no link reads and whose layout
            is no longer the one in the manifest.
        nbytes: bytes from the first element to the end of the last.
        storage: (address, nbytes) of the host allocation that contains the parameter, such as a
            torch storage. It is registered once for all parameters in it. None if the allocation is
            not known, and on a GPU, where the driver can report it.
    """

    address: int
    nbytes: int
    storage: tuple[int, int] | None = None


class SenderBackend(Protocol):
    """Trainer half of a backend, for one rank. Called by the agent's command thread."""

    def connect(
        self, plan: TransferPlan, bindings: Sequence[DestinationBinding]
    ) -> GroupOffer | None:
        """Bind a plan part (`TransferPlan.parts`); return an offer if engines must join a group.

        Raises:
            PlanError: the plan was made for another layout, or a destination has no binding.
            TransferError: the backend cannot get memory, a port or a folder.
        """
        ...

    def prepare(self, version: int) -> None:
        """Do the work that is possible while engines still generate.

        The trainer does not change the weights between this call and the end of the round.
        """
        ...

    def write(self, version: int, destinations: Sequence[str], deadline_s: float) -> Written:
        """Move the bytes of the links to `destinations`. Idempotent.

        Raises:
            RoundAborted: this rank has no link to one of the destinations.
        """
        ...

    def close(self) -> None:
        """Free all resources of the backend. Idempotent."""
        ...


class ReceiverBackend(Protocol):
    """Engine half of a backend, for one rank. Called by the agent's command thread."""

    def connect(self, plan: TransferPlan, mode: UpdateMode) -> DestinationBinding:
        """Bind a plan part (`TransferPlan.parts`).

        Raises:
            PlanError: the plan is for another layout, or needs the engine's own loader and this
                backend cannot call it.
        """
        ...

    def verify(self, version: int, expected: Mapping[str, str]) -> tuple[str, ...]:
        """Return the sources in `expected` (source -> digest) with another digest here, or without a link to this rank."""
        ...

    def apply(self) -> None:
        """Make verified bytes live, while the engine is paused. Idempotent."""
        ...

    def close(self) -> None:
        """Free all resources of the backend. Idempotent."""
        ...


class RankSender(SenderBackend, Protocol):
    """Sender of one-sided writes of a trainer rank, from which a backend makes its own half."""

    @property
    def manifest(self) -> ShardManifest:
        """Layout of the rank's parameters."""
        ...

    @property
    def parameters(self) -> Callable[[], Sequence[ParameterMemory]]:
        """Function that returns the current memory of the parameters, in manifest order."""
        ...


class RankReceiver(ReceiverBackend, Protocol):
    """Receiver of one-sided writes of an engine rank, from which a backend makes its own half."""

    @property
    def manifest(self) -> ShardManifest:
        """Layout of the rank's parameters."""
        ...

    @property
    def live_addresses(self) -> Sequence[int]:
        """Addresses of the live parameters, in manifest order; they never move."""
        ...


def status_of(error: BaseException) -> LinkStatus:
    """Return the status of a link after its write raised `error`.

    An unforeseen error (a bug, no memory, an OSError) gives UNKNOWN, because only a transport's own
    errors guarantee that no more bytes land.
    """
    match error:
        case PeerUnreachable():
            return LinkStatus.UNREACHABLE
        case TransferOutcomeUnknown():
            return LinkStatus.UNKNOWN
        case WindlassError():
            return LinkStatus.FAILED
        case _:
            return LinkStatus.UNKNOWN


def is_unknown(error: BaseException) -> bool:
    """Return whether bytes may still land after a write that raised `error`."""
    return status_of(error) is LinkStatus.UNKNOWN


def submit(pool: Executor, job: Callable[[*Arguments], T], /, *args: *Arguments) -> Future[T]:
    """Submit a job like `Executor.submit`, but put an error of the submission into the returned future.

    The caller can then still wait for jobs that it submitted before. The error says that the
    outcome is unknown, because an executor that cannot start a thread has queued the job anyway.
    """
    try:
        return pool.submit(job, *args)
    except RuntimeError as error:
        lost: Future[T] = Future()
        lost.set_exception(TransferOutcomeUnknown(f"the job may still start: {error}"))
        return lost


def failed_link(
    destination: str, reason: str, status: LinkStatus = LinkStatus.FAILED
) -> LinkOutcome:
    """Return the outcome of a link that failed."""
    return LinkOutcome(destination, status, 0, "", reason)


def failed_links(destinations: Sequence[str], reason: str) -> tuple[LinkOutcome, ...]:
    """Return the outcomes of links that fail together, for one reason."""
    return tuple(failed_link(name, reason) for name in destinations)


def joined_results(
    destinations: Sequence[str], begun: Future[Written], beside: Callable[[], Written]
) -> Written:
    """Call `beside`, which sends some links, and wait for `begun`, a thread that sends the other links.

    Return the joined result. If both raise, raise the error of unknown outcome, if there is one.
    """
    errors: list[BaseException] = []
    results: list[Written] = []
    # If `beside` raises, still wait for the other thread: it must have ended before this function
    # raises.
    for send in (beside, begun.result):
        try:
            results.append(send())
        except Exception as error:  # noqa: BLE001
            errors.append(error)
    if errors:
        raise next((e for e in errors if is_unknown(e)), errors[0])
    links = {link.destination: link for result in results for link in result.links}
    return Written(
        tuple(links[name] for name in destinations),
        sum(result.pack_s for result in results),
        max(result.wire_s for result in results),
        sum(result.register_s for result in results),
    )
