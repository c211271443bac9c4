"""Calls of vLLM's EngineCore by the one rank that lives in its process, past the API server.

A server of one rank runs it in the core's process. `/collective_rpc` comes there through the event loop of the API server, behind the
rollouts that are asked for at once when a trainer ends a step, and just then its update is due. An order of the rank goes into the
core's own queue, and is carried out between two steps as that call is.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, final

from windlass.errors import PeerTimeout, PeerUnreachable

_log = logging.getLogger(__name__)
SLOW_S = 0.1
"""Longer than a step should take."""
NUM_FRAMES = 8
_ORDER = object()
"""In the place of vLLM's kind of a client's request."""


@final
class CoreCalls:
    """The EngineCore of this process. Made in its loop.

    Args:
        core: vLLM's `EngineCoreProc`.
    """

    def __init__(self, core: Any) -> None:
        self._core, self._loop = core, threading.get_ident()

    def call(self, method: str, args: list[object], deadline_s: float | None) -> None:
        """Run a method of the worker in the core's loop, and return when it has. Called in another thread.

        Args:
            method: of the worker.
            args: for it.
            deadline_s: None only for a call that lasts as long as a pause does.

        Raises:
            PeerTimeout: it had not within `deadline_s`; it may yet.
            PeerUnreachable: it raised.
        """
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        taken = threading.Event()

        def run() -> None:
            taken.set()
            try:
                self._core.collective_rpc(method, args=tuple(args))
                done.set_result(None)
            # As vLLM's own call: it is raised where the result is asked for.
            except Exception as error:  # noqa: BLE001
                done.set_exception(error)

        self._core.input_queue.put_nowait((_ORDER, run))
        if not taken.wait(SLOW_S):
            _log.warning(
                "%s waits for vLLM's core, whose loop is in %s", method, self._loop_is_in()
            )
        try:
            error = done.exception(deadline_s)
        except concurrent.futures.TimeoutError:
            raise PeerTimeout(f"vLLM's core: {method}: not within {deadline_s} s") from None
        if error is not None:
            raise PeerUnreachable(
                f"vLLM's core: {method}: {type(error).__name__}: {error}"
            ) from error

    def _loop_is_in(self) -> str:
        """Where the loop is now, innermost first."""
        frame = sys._current_frames().get(self._loop)
        if frame is None:
            return "a thread that has ended"
        frames = traceback.extract_stack(frame)[-NUM_FRAMES:]
        return " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))


_cores: list[CoreCalls] = []


def core_calls() -> CoreCalls | None:
    """Return the core of this process, once it has been called; None where there is none."""
    return _cores[0] if _cores else None


def take_orders(core: Any) -> None:
    """Have an EngineCore take orders from its own process. Called in its loop; again for nothing."""
    from vllm.v1.engine.core import EngineCoreProc

    if not _cores and isinstance(core, EngineCoreProc):
        _patch_once()
        _cores.append(CoreCalls(core))


@functools.cache
def _patch_once() -> None:
    """Have the queue of clients' requests carry orders (0.24, 0.32)."""
    from vllm.v1.engine.core import EngineCoreProc

    handle = EngineCoreProc._handle_client_request

    def handle_client_request(core: Any, kind: Any, request: Any) -> None:
        if kind is _ORDER:
            request()
        else:
            handle(core, kind, request)

    EngineCoreProc._handle_client_request = handle_client_request
