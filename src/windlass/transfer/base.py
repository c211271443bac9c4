"""The seam between the transaction and how bytes travel.

A backend is a pair: what a trainer rank does (`SenderBackend`) and what an engine rank does
(`ReceiverBackend`). Backends whose ranks form groups are `GroupMember`s besides. The round machine drives
every pair through the same phases; what verifies is always a digest per link, over the link's ops in plan
order in the destination's dtype. How a link ended is a `LinkOutcome`; `status_of` tells what an error means.
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
"""Links that a trainer rank has on the wire at a time: with fewer, ranks wait for the same receivers.

By `python -m tools.plan --simulate`, DeepSeek-V3 on 128 to 128 ranks loses 13 % with 4.
"""


@dataclass(frozen=True, slots=True)
class ParameterMemory:
    """Where a parameter lies now.

    Attributes:
        address: of its first element; 0 for a parameter that no link reads and that is not as it was described.
        nbytes: from the first to the last.
        storage: (address, nbytes) of what was allocated at once in host memory and is freed at once, such
            as a torch storage, with the parameter in it: registered once for all that lie in it. None
            where that is not known, and where a GPU's driver knows.
    """

    address: int
    nbytes: int
    storage: tuple[int, int] | None = None


class SenderBackend(Protocol):
    """One trainer rank. Called by the agent's command thread."""

    def connect(
        self, plan: TransferPlan, bindings: Sequence[DestinationBinding]
    ) -> GroupOffer | None:
        """Bind a plan part (`TransferPlan.parts`); an offer where engines must join a group.

        Raises:
            PlanError: the plan was made for another layout, or a destination has no binding.
            TransferError: memory, a port or a folder cannot be had.
        """
        ...

    def prepare(self, version: int) -> None:
        """Do what can be done while engines still generate. The weights stand still from here on."""
        ...

    def write(self, version: int, destinations: Sequence[str], deadline_s: float) -> Written:
        """Move the bytes of the links to `destinations`. Idempotent.

        Raises:
            RoundAborted: a destination that this rank does not send to.
        """
        ...

    def close(self) -> None:
        """Free what the backend holds. Idempotent."""
        ...


class ReceiverBackend(Protocol):
    """One engine rank. Called by the agent's command thread."""

    def connect(self, plan: TransferPlan, mode: UpdateMode) -> DestinationBinding:
        """Bind a plan part (`TransferPlan.parts`).

        Raises:
            PlanError: the plan is for another layout, or asks for the engine's own loader.
        """
        ...

    def verify(self, version: int, expected: Mapping[str, str]) -> tuple[str, ...]:
        """Sources whose bytes do not have the expected digest, or that send nothing here."""
        ...

    def apply(self) -> None:
        """Make verified bytes live. Idempotent. The engine must be quiesced."""
        ...

    def close(self) -> None:
        """Free what the backend holds. Idempotent."""
        ...


@runtime_checkable
class GroupMember(Protocol):
    """What either half of a backend also has whose ranks move bytes together."""

    def join(self, offers: Sequence[GroupOffer], deadline_s: float) -> None:
        """Enter the groups that this rank belongs to.

        Raises:
            PlanError: another member means to send or receive something else.
            PeerTimeout: a member did not come within `deadline_s`.
        """
        ...


@runtime_checkable
class GroupReceiver(GroupMember, Protocol):
    """What the engine's half of such a backend has."""

    def receive(self, groups: Mapping[str, Sequence[str]], deadline_s: float) -> None:
        """Receive what a collective write brings.

        Args:
            groups: source -> all destinations that enter.
            deadline_s: for all of them.

        Raises:
            TransferError: some group did not deliver; `verify` says which links lack bytes.
        """
        ...


def status_of(error: BaseException) -> LinkStatus:
    """How a link stands whose write raised `error`.

    UNKNOWN also for what nobody foresaw (a bug, no memory, an OSError): a transport says that nothing
    more lands by raising one of its own errors, and in no other way.
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
    """Whether bytes may still land after a write that raised `error`."""
    return status_of(error) is LinkStatus.UNKNOWN


def submit(pool: Executor, job: Callable[[*Arguments], T], /, *args: *Arguments) -> Future[T]:
    """As `Executor.submit`, but what goes wrong there is the job's: others that have begun are waited for.

    An executor that gets no thread has queued the job all the same, so its outcome is unknown.
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
    """Send some links while another thread sends the others; an unknown outcome is told before any error."""
    errors: list[BaseException] = []
    results: list[Written] = []
    # What the other way still sends must be over, and its outcome known, before anything is told.
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
