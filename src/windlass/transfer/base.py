"""Protocols that a backend implements, so that a round does not depend on how bytes travel.

A backend is a pair: `SenderBackend` in the trainer rank and `ReceiverBackend` in the engine rank. If
the ranks of a backend form groups, both halves also implement `GroupMember`. The round machine calls every pair in
the same phases. Engines always verify one digest per link: over the link's ops in plan order, in
the destination's dtype. `LinkOutcome` says how a link ended; `status_of` turns an exception into
its status.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Protocol, TypeVar, TypeVarTuple, runtime_checkable

from windlass.config import UpdateMode
from windlass.errors import PeerUnreachable, TransferOutcomeUnknown, WindlassError
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
        address: address of the first element; 0 for a parameter that no link reads and that differs
            from its description.
        nbytes: bytes from the first element to the end of the last.
        storage: (address, nbytes) of the host allocation that contains the parameter, such as a
            torch storage. It is registered once for all parameters in it. None if it is not known,
            and on a GPU, where the driver knows the allocation.
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
        """Do the work that is possible while engines still generate. The weights do not change from now on."""
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
            PlanError: the plan is for another layout, or asks for the engine's own loader.
        """
        ...

    def verify(self, version: int, expected: Mapping[str, str]) -> tuple[str, ...]:
        """Return sources that have another digest than expected, or no link to this rank."""
        ...

    def apply(self) -> None:
        """Make verified bytes live. Idempotent. The engine must be quiesced."""
        ...

    def close(self) -> None:
        """Free all resources of the backend. Idempotent."""
        ...


@runtime_checkable
class GroupMember(Protocol):
    """Additional methods of both halves of a backend that moves bytes in groups of ranks."""

    def join(self, offers: Sequence[GroupOffer], deadline_s: float) -> None:
        """Enter the groups that this rank belongs to.

        Raises:
            PlanError: another member expects different contents.
            PeerTimeout: a member did not join within `deadline_s`.
        """
        ...


@runtime_checkable
class GroupReceiver(GroupMember, Protocol):
    """Methods of the engine half of such a backend."""

    def receive(self, groups: Mapping[str, Sequence[str]], deadline_s: float) -> None:
        """Receive the bytes of a collective write.

        Args:
            groups: source -> all destinations that enter.
            deadline_s: seconds for all groups together.

        Raises:
            TransferError: some group did not deliver; `verify` reports which links lack bytes.
        """
        ...


def status_of(error: BaseException) -> LinkStatus:
    """Return the status of a link after its write raised `error`.

    UNKNOWN includes unforeseen errors (a bug, no memory, an OSError): only a transport's own errors
    guarantee that no more bytes land.
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
    """Submit a job like `Executor.submit`, but report a failure to submit through the future.

    The caller can then wait for jobs that have begun. An executor that cannot start a thread has
    queued the job anyway, so its outcome is unknown.
    """
    try:
        return pool.submit(job, *args)
    except RuntimeError as error:
        lost: Future[T] = Future()
        lost.set_exception(TransferOutcomeUnknown(f"it may be begun later: {error}"))
        return lost


def failed_link(
    destination: str, reason: str, status: LinkStatus = LinkStatus.FAILED
) -> LinkOutcome:
    """Return the outcome of a link that did not deliver."""
    return LinkOutcome(destination, status, 0, "", reason)


def failed_links(destinations: Sequence[str], reason: str) -> tuple[LinkOutcome, ...]:
    """Return the outcomes of links that fail together."""
    return tuple(failed_link(name, reason) for name in destinations)


def joined_results(
    destinations: Sequence[str], begun: Future[Written], beside: Callable[[], Written]
) -> Written:
    """Send some links in this thread while another thread sends the others; join their results.

    If both fail, an unknown outcome is raised rather than another error.
    """
    errors: list[BaseException] = []
    results: list[Written] = []
    # The other thread must have ended, with a known outcome, before this function returns or
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
