"""One GPU, the kernels compiled for it, and the stream in which they are queued."""

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
    """One GPU with its compiled kernels and its stream.

    Args:
        ordinal: ordinal of the GPU.
        num_multiprocessors: largest number of multiprocessors that kernels use; 0 for all.

    Raises:
        TransportUnavailable: the NVIDIA driver, the GPU or NVRTC is missing.
    """

    def __init__(self, ordinal: int = 0, num_multiprocessors: int = 0) -> None:
        self.device = Device(ordinal)
        self.kernels = Kernels(self.device, num_multiprocessors)
        self.stream = Stream(self.device)
        self._late = ""

    @property
    def is_late(self) -> bool:
        """True if queued work exceeded a deadline and may still run."""
        return bool(self._late)

    def wait(self, event: Event, deadline_s: float) -> None:
        """Wait until all work before `event` has ended. If the deadline passes, mark the GPU as late permanently.

        Raises:
            TransferFailed: queued work failed.
            TransferOutcomeUnknown: the work did not end within `deadline_s`, or an earlier `wait` exceeded its
                deadline, or no thread could start to wait. Queued work may still run.
        """
        self.refuse_late()
        try:
            _waits.submit(event.wait).result(deadline_s)
        except FutureTimeout:
            self.distrust(f"kernels did not end within {deadline_s} s and may still run")
            raise TransferOutcomeUnknown(f"GPU {self.device.ordinal}: {self._late}") from None
        except RuntimeError as error:
            if isinstance(error, WindlassError):
                raise
            self.distrust(f"kernels may still run; no thread could start to wait for them: {error}")
            raise TransferOutcomeUnknown(f"GPU {self.device.ordinal}: {self._late}") from error

    def wait_or_leave(self, event: Event, deadline_s: float) -> None:
        """Wait until all work before `event` has ended. If the deadline passes, raise, but do not mark the GPU as late.

        Raises:
            TransferFailed: queued work failed, or did not end within `deadline_s`, or no thread could start to wait.
            TransferOutcomeUnknown: an earlier wait has marked the GPU as late.
        """
        self._wait_for(event.wait, deadline_s, "queued work")

    def settle(self, deadline_s: float, step: Event | None = None) -> float:
        """Wait, before a transfer, for work of this process that may still change the weights.

        Args:
            deadline_s: longest time to wait, in seconds.
            step: event that was recorded after the training step. The method waits only for the work before this event.
                If it is None, wait for all work of this process on the GPU, including the work of other libraries.

        Returns:
            Seconds that the wait took.

        Raises:
            TransferFailed: the work failed or did not end within `deadline_s`. The error text says that nothing was sent.
            TransferOutcomeUnknown: an earlier wait has marked the GPU as late.
        """
        wait = self.device.synchronize if step is None else step.wait
        return self._wait_for(wait, deadline_s, "work of this process", "; nothing was sent")

    def _wait_for(
        self, wait: Callable[[], None], deadline_s: float, what: str, hence: str = ""
    ) -> float:
        """Call `wait` in a thread, and return the seconds it took. `what` and `hence` are parts of the error texts.

        For errors see `settle`.
        """
        self.refuse_late()
        try:
            return _waits.submit(wait).result(deadline_s)
        except FutureTimeout:
            raise TransferFailed(
                f"GPU {self.device.ordinal}: {what} did not end within {deadline_s} s{hence}"
            ) from None
        except RuntimeError as error:
            if isinstance(error, WindlassError):
                raise
            raise TransferFailed(
                f"GPU {self.device.ordinal}: no thread could start to wait for the GPU: {error}{hence}"
            ) from error

    def distrust(self, reason: str) -> None:
        """Mark the GPU as late for ever, because queued work may still run. `reason` becomes part of later errors."""
        self._late = reason

    def refuse_late(self) -> None:
        """Raise `TransferOutcomeUnknown` if the GPU is late.

        Call this before building or freeing tables that late kernels may read.
        """
        if self._late:
            raise TransferOutcomeUnknown(f"GPU {self.device.ordinal}: {self._late}")

    def finish(self, deadline_s: float) -> None:
        """Wait for all work that is in this object's stream at the time of the call. Raises the same errors as `wait`."""
        self.wait(self.stream.record(), deadline_s)


def end_queued(gpu: Gpu, error: Exception, deadline_s: float) -> None:
    """Wait until the work that was queued before `error` has ended. The caller then raises `error`.

    Raises:
        TransferOutcomeUnknown: the work did not end within `deadline_s`, or the wait itself failed. The GPU is then
            marked as late.
    """
    try:
        gpu.finish(deadline_s)
    # If the wait fails for any reason, it is unknown whether the queued work has ended, so bytes may still arrive.
    except Exception as again:  # noqa: BLE001
        text = f"{error}; then the wait for queued work failed: {again}; bytes may still arrive"
        gpu.distrust(text)
        raise TransferOutcomeUnknown(text) from error


@functools.cache
def shared_gpu(ordinal: int) -> Gpu:
    """Return the same `Gpu` object for every caller in this process. It is never closed.

    `CudaIpcTransport` does not use this object. It has its own `Gpu`, whose kernels use a limited number of
    multiprocessors.
    """
    return Gpu(ordinal)


@final
class WaitThreads:
    """Threads for driver calls that wait without a deadline. An idle thread is used again.

    Daemon threads: a driver call that hangs cannot be cancelled and must not block process exit.
    """

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[tuple[Callable[[], None], Future[float]]]] = []

    def submit(self, wait: Callable[[], None]) -> Future[float]:
        """Call `wait` in a thread. Return a future of the seconds that the call took.

        If `wait` raises `TransferFailed`, the future raises this error.

        Raises:
            RuntimeError: no thread could start.
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
        """Run the functions from this thread's queue, for ever. After each function, mark the thread as idle."""
        while True:
            wait, over = calls.get()
            began, failure = time.perf_counter(), None
            try:
                wait()
            except TransferFailed as error:
                failure = error
            waited_s = time.perf_counter() - began
            # Mark the thread as idle before the future is done, so that the next caller can use it.
            self._idle.append(calls)
            if failure is None:
                over.set_result(waited_s)
            else:
                over.set_exception(failure)
            del wait, over, failure


_waits = WaitThreads()
