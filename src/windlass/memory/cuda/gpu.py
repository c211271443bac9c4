"""One GPU, the kernels compiled for it, and the stream that they are queued in."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from queue import SimpleQueue
from typing import final

from windlass.errors import TransferFailed, TransferOutcomeUnknown, WindlassError
from windlass.memory.cuda.driver import Device, Event, Stream
from windlass.memory.cuda.kernels import Kernels


@final
class Gpu:
    """See the module.

    Args:
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
        try:
            _waits.submit(event.wait).result(deadline_s)
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
            TransferFailed: queued work failed, `event` was not reached within `deadline_s`, or no thread
                is to be had that waits.
            TransferOutcomeUnknown: kernels outlived an earlier deadline.
        """
        self._wait_for(event.wait, deadline_s, "what was queued was")

    def settle(self, deadline_s: float, step: Event | None = None) -> float:
        """Wait for what this process has queued on the GPU by whatever library, such as a step.

        `step`: wait for this only, and not for what other streams or later calls have queued.

        Returns:
            Seconds that the driver waited, without those that it took to ask it.

        Raises:
            TransferFailed: it is not over within `deadline_s` (of this library nothing was queued),
                or it failed.
            TransferOutcomeUnknown: kernels outlived an earlier deadline.
        """
        wait = self.device.synchronize if step is None else step.wait
        return self._wait_for(wait, deadline_s, "work of this process was", "; nothing was sent")

    def _wait_for(
        self, wait: Callable[[], None], deadline_s: float, what: str, hence: str = ""
    ) -> float:
        self.refuse_late()
        try:
            return _waits.submit(wait).result(deadline_s)
        except FutureTimeout:
            raise TransferFailed(
                f"GPU {self.device.ordinal}: {what} not over within {deadline_s} s{hence}"
            ) from None
        except RuntimeError as error:
            if isinstance(error, WindlassError):
                raise
            raise TransferFailed(
                f"GPU {self.device.ordinal}: nobody can wait for it: {error}{hence}"
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
    """Return the one of this process for work on the GPU's own memory; never closed."""
    return Gpu(ordinal)


@final
class _Waits:
    """Calls of the driver that wait and know no deadline, in threads that are kept for the next one.

    They are daemons, since what hangs is not ours to end, and it holds up nobody else.
    """

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[tuple[Callable[[], None], Future[float]]]] = []

    def submit(self, wait: Callable[[], None]) -> Future[float]:
        """Begin; the future has the seconds that it took, or the `TransferFailed` that it raised.

        Raises:
            RuntimeError: no thread is to be had.
        """
        over: Future[float] = Future()
        try:
            calls = self._idle.pop()
        except IndexError:
            calls = SimpleQueue()
            threading.Thread(target=self._serve, args=(calls,), daemon=True).start()
        calls.put((wait, over))
        return over

    def _serve(self, calls: SimpleQueue[tuple[Callable[[], None], Future[float]]]) -> None:
        while True:
            wait, over = calls.get()
            began, failure = time.perf_counter(), None
            try:
                wait()
            except TransferFailed as error:
                failure = error
            waited_s = time.perf_counter() - began
            self._idle.append(calls)  # before anybody knows, so that who waits next finds it
            if failure is None:
                over.set_result(waited_s)
            else:
                over.set_exception(failure)
            del wait, over, failure


_waits = _Waits()
