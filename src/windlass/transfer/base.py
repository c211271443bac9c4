"""Protocols of a backend's two halves, and functions for the outcomes of links.

A backend has a half in each trainer rank (`SenderBackend`) and a half in each engine rank (`ReceiverBackend`). Rounds
call the halves of all backends in the same phases. The receiver verifies one digest per link. The digest covers the
payload of the link: the elements of its ops in plan order, in the destination's dtype.
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
"""Maximum number of links that a trainer rank writes at the same time. With a lower number, more ranks wait for the
same receivers: with 4, `python -m tools.plan --simulate` is 13 % slower for DeepSeek-V3 from 128 to 128 ranks."""


@dataclass(frozen=True, slots=True)
class ParameterMemory:
    """Current memory of a parameter.

    Attributes:
        address: address of the first element. 0 if no link reads the parameter, and it was removed, has no memory or has
            another layout than in the manifest.
        nbytes: bytes from the start of the first element to the end of the last element.
        storage: (address, nbytes) of the host allocation that contains the parameter, such as a torch storage. All
            parameters in one allocation share one registration. None if the allocation is unknown, and on a GPU, where
            the driver reports the allocation.
        generation: number that changes if the host allocation was freed and a new one is at the same addresses. Pages that
            were pinned or registered before are not the pages of the new allocation. 0 if nothing observes the allocation.
    """

    address: int
    nbytes: int
    storage: tuple[int, int] | None = None
    generation: int = 0


class SenderBackend(Protocol):
    """Half of a backend in one trainer rank. The agent calls it in the thread that carries out commands."""

    def connect(
        self, plan: TransferPlan, bindings: Sequence[DestinationBinding]
    ) -> GroupOffer | None:
        """Bind a plan part (`TransferPlan.parts`) to the addresses of its destinations.

        Returns:
            Offer of a collective group that the destinations must join; None if the backend needs no group.

        Raises:
            PlanError: the plan was made for another layout, or a destination has no binding.
            BindingsRefused: this rank cannot write to some destinations.
            TransferError: the backend cannot get memory, a port or a folder.
        """
        ...

    def prepare(self, version: int) -> None:
        """Do the work that is possible while engines still generate, such as packing.

        The trainer keeps the weights unchanged from this call until the round ends.

        Raises:
            PlanError: the number or the sizes of the parameters differ from the manifest.
            RegionError: parameters have moved, and the transport cannot register their new memory.
            TransferFailed: the weights cannot be packed or copied.
            RoundAborted: this rank cannot send the weights of this version any more, because they may have changed.
        """
        ...

    def write(self, version: int, destinations: Sequence[str], deadline_s: float) -> Written:
        """Write the links to `destinations`, and return their outcomes and times. Idempotent.

        Raises:
            RoundAborted: this rank has no link to one of the destinations.
        """
        ...

    def close(self) -> None:
        """Free all resources of the backend. Idempotent."""
        ...


class ReceiverBackend(Protocol):
    """Half of a backend in one engine rank. The agent calls it in the thread that carries out commands."""

    def connect(self, plan: TransferPlan, mode: UpdateMode) -> DestinationBinding:
        """Bind a plan part (`TransferPlan.parts`), and return the addresses that sources write to.

        Raises:
            PlanError: the plan is for another layout, or needs the engine's own loader, which this backend cannot call.
            TransferError: the backend cannot get or register memory.
        """
        ...

    def verify(self, version: int, expected: Mapping[str, str]) -> tuple[str, ...]:
        """Compare the digests of the received bytes with `expected` (source -> digest).

        Returns:
            Sources whose bytes have a wrong digest on this rank, and sources without a link to this rank. Empty if
            everything is correct.

        Raises:
            TransferError: the bytes cannot be read, or the GPU reports an error.
        """
        ...

    def apply(self) -> None:
        """Copy the verified bytes to the live parameters, unless they are there already. Idempotent.

        The engine is paused during this call.

        Raises:
            TransferError: the copy failed or did not end in time. The live parameters may then be of two versions.
        """
        ...

    def close(self) -> None:
        """Free all resources of the backend. Idempotent."""
        ...


class RankSender(SenderBackend, Protocol):
    """Sender of one-sided writes in a trainer rank. Other backends build their half from its layout and parameters."""

    @property
    def manifest(self) -> ShardManifest:
        """Layout of the rank's parameters."""
        ...

    @property
    def parameters(self) -> Callable[[], Sequence[ParameterMemory]]:
        """Function that returns the current memory of the parameters, in manifest order."""
        ...


class RankReceiver(ReceiverBackend, Protocol):
    """Receiver of one-sided writes in an engine rank. Other backends build their half from its layout and addresses."""

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

    An exception that is not a WindlassError gives UNKNOWN, because bytes may still arrive after such an exception.
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
    """Return whether bytes may still arrive after a write that raised `error`."""
    return status_of(error) is LinkStatus.UNKNOWN


def submit(pool: Executor, job: Callable[[*Arguments], T], /, *args: *Arguments) -> Future[T]:
    """Submit a job as `Executor.submit` does. If this fails, return a future with the error instead of raising it.

    The caller can then still wait for the jobs that it submitted before. The error is TransferOutcomeUnknown: an executor
    queues a job before it starts a thread, so it may still run the job.
    """
    try:
        return pool.submit(job, *args)
    except RuntimeError as error:
        lost: Future[T] = Future()
        lost.set_exception(
            TransferOutcomeUnknown(f"no thread could start; the queued job may still run: {error}")
        )
        return lost


def failed_link(
    destination: str, reason: str, status: LinkStatus = LinkStatus.FAILED
) -> LinkOutcome:
    """Return the outcome of a link that was not written completely."""
    return LinkOutcome(destination, status, 0, "", reason)


def failed_links(destinations: Sequence[str], reason: str) -> tuple[LinkOutcome, ...]:
    """Return the outcomes of several links that failed for the same reason."""
    return tuple(failed_link(name, reason) for name in destinations)


def joined_results(
    destinations: Sequence[str], begun: Future[Written], beside: Callable[[], Written]
) -> Written:
    """Write some links in this thread while another thread writes the other links; return the combined result.

    If both threads fail, raise the error of this thread. But if bytes may still arrive only after the other thread's error
    (`is_unknown`), raise that error instead.

    Args:
        destinations: destinations of all links, in the order of the result.
        begun: future of the other thread.
        beside: function that writes links in this thread.
    """
    errors: list[BaseException] = []
    results: list[Written] = []
    # If `beside` raises, wait for the other thread: it must not write any more after this function has raised.
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
