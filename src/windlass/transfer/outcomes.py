"""What the end of a link's writes means, and jobs that cannot get lost between a thread and its pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import TypeVar, TypeVarTuple

from windlass.errors import PeerUnreachable, TransferOutcomeUnknown, WindlassError
from windlass.transfer.base import SendResult
from windlass.transfer.bindings import LinkOutcome, LinkStatus

__all__ = ["failed_links", "is_unknown", "joined_results", "status_of", "submit"]

Arguments = TypeVarTuple("Arguments")
T = TypeVar("T")


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


def failed_links(destinations: Sequence[str], reason: str) -> tuple[LinkOutcome, ...]:
    """Return the outcomes of links that fail together."""
    return tuple(LinkOutcome(name, LinkStatus.FAILED, 0, "", reason) for name in destinations)


def joined_results(
    destinations: Sequence[str], begun: Future[SendResult], beside: Callable[[], SendResult]
) -> SendResult:
    """Send some links while another thread sends the others; an unknown outcome is told before any error."""
    errors: list[BaseException] = []
    results: list[SendResult] = []
    # What the other way still sends must be over, and its outcome known, before anything is told.
    for send in (beside, begun.result):
        try:
            results.append(send())
        except Exception as error:  # noqa: BLE001
            errors.append(error)
    if errors:
        raise next((e for e in errors if is_unknown(e)), errors[0])
    links = {link.destination: link for result in results for link in result.links}
    return SendResult(
        tuple(links[name] for name in destinations),
        sum(result.pack_s for result in results),
        max(result.wire_s for result in results),
    )
