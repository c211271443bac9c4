"""One GPU, the kernels compiled for it, and the stream that they are queued in."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import final

from windlass.errors import TransferFailed, TransferOutcomeUnknown, WindlassError
from windlass.memory.cuda.driver import Device, Event, Stream
from windlass.memory.cuda.kernels import Kernels

__all__ = ["Gpu", "end_queued", "shared_gpu"]


@final
class Gpu:
    """See the module.

    Args:
        ordinal: which.
        num_multiprocessors: that kernels may occupy; 0 for all.

    Raises:
        TransportUnavailable: no NVIDIA driver, no such GPU, no NVRTC.
    """

    def __init__(self, ordinal: int = 0, num_multiprocessors: int = 0) -> None:
        self.device = Device(ordinal)
        self.kernels = Kernels(self.device, num_multiprocessors)
        self.stream = Stream(self.device)
        self._late = ""

    @property
    def is_late(self) -> bool:
        """Whether queued work outlived a deadline; it may go on for ever."""
        return bool(self._late)

    def wait(self, event: Event, deadline_s: float) -> None:
        """Return once `event` is reached.

        Raises:
            TransferFailed: queued work failed.
            TransferOutcomeUnknown: not within `deadline_s`, now or in an earlier call; it goes on.
        """
        self.refuse_late()
        reached: Future[None] = Future()
        # The driver's wait has no deadline; a daemon thread of its own holds up nobody else.
        try:
            threading.Thread(target=_wait_for, args=(event, reached), daemon=True).start()
            reached.result(deadline_s)
        except FutureTimeout:
            self.distrust(f"kernels were not over within {deadline_s} s and may still go on")
            raise TransferOutcomeUnknown(f"GPU {self.device.ordinal}: {self._late}") from None
        except RuntimeError as error:
            if isinstance(error, WindlassError):
                raise
            self.distrust(f"kernels may still go on, nobody can wait for them: {error}")
            raise TransferOutcomeUnknown(f"GPU {self.device.ordinal}: {self._late}") from error

    def wait_or_leave(self, event: Event, deadline_s: float) -> None:
        """As `wait`, but what is late is the caller's to end: the GPU is trusted as before.

        Raises:
            TransferFailed: queued work failed, or `event` was not reached within `deadline_s`.
            TransferOutcomeUnknown: kernels outlived an earlier deadline.
        """
        self.refuse_late()
        reached: Future[None] = Future()
        threading.Thread(target=_wait_for, args=(event, reached), daemon=True).start()
        try:
            reached.result(deadline_s)
        except FutureTimeout:
            raise TransferFailed(
                f"GPU {self.device.ordinal}: what was queued is not over within {deadline_s} s"
            ) from None

    def settle(self, deadline_s: float, step: Event | None = None) -> None:
        """Wait for what this process has queued on the GPU by whatever library, such as a step.

        Args:
            deadline_s: for it.
            step: wait for this only, and not for what other streams or later calls have queued.

        Raises:
            TransferFailed: it is not over within `deadline_s` (of this library nothing was queued),
                or it failed.
            TransferOutcomeUnknown: kernels outlived an earlier deadline.
        """
        self.refuse_late()
        settled: Future[None] = Future()
        # As in `wait`: the driver knows no deadline, and what hangs here is not ours to end.
        wait = (_settle, self.device) if step is None else (_wait_for, step)
        try:
            threading.Thread(target=wait[0], args=(wait[1], settled), daemon=True).start()
            settled.result(deadline_s)
        except FutureTimeout:
            raise TransferFailed(
                f"GPU {self.device.ordinal}: work of this process was not over within {deadline_s} s; "
                "nothing was sent"
            ) from None
        except RuntimeError as error:
            if isinstance(error, WindlassError):
                raise
            raise TransferFailed(
                f"GPU {self.device.ordinal}: nobody can wait for it: {error}; nothing was sent"
            ) from error

    def distrust(self, reason: str) -> None:
        """Queued work may go on for ever, as far as anybody knows."""
        self._late = reason

    def refuse_late(self) -> None:
        """To be called before tables are freed or made: late kernels may read the old ones.

        Raises:
            TransferOutcomeUnknown: there are such.
        """
        if self._late:
            raise TransferOutcomeUnknown(f"GPU {self.device.ordinal}: {self._late}")

    def finish(self, deadline_s: float) -> None:
        """As `wait`, for everything queued in the stream so far."""
        self.wait(self.stream.record(), deadline_s)


def end_queued(gpu: Gpu, error: Exception, deadline_s: float) -> None:
    """`error` came up when work was queued already: return once that is over, then raise `error`.

    Raises:
        TransferOutcomeUnknown: it is not, or that cannot be told.
    """
    try:
        gpu.finish(deadline_s)
    # Whatever it is: as nobody has seen the end of what was queued, bytes may still land.
    except Exception as again:  # noqa: BLE001
        gpu.distrust(f"{error}; then {again}: bytes may still land")
        raise TransferOutcomeUnknown(f"{error}; then {again}: bytes may still land") from error


@functools.cache
def shared_gpu(ordinal: int) -> Gpu:
    """The one of this process for work on the GPU's own memory; never closed."""
    return Gpu(ordinal)


def _settle(device: Device, settled: Future[None]) -> None:
    try:
        device.synchronize()
    except TransferFailed as error:
        settled.set_exception(error)
    else:
        settled.set_result(None)


def _wait_for(event: Event, reached: Future[None]) -> None:
    try:
        event.wait()
    except TransferFailed as error:
        reached.set_exception(error)
    else:
        reached.set_result(None)
