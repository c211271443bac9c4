"""A pause in mode `abort` that does not wait for the answers of the ended requests.

SGLang's own `abort` returns when its server has sent the answer of every running request, and the engine generates nothing
until then. Windlass instead pauses with SGLang's `retract`, which frees the KV cache of all running requests and moves them
to the waiting queue. When generation resumes, the scheduler ends them there before its first step. So the server sends
the answers, and receives the next requests, while the engine generates again.

This needs SGLang 0.5.19 or later, whose scheduler names the version of each token. Earlier releases name one version per
answer. They read this version when the server sends the answer, which would be after the update.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Pause:
    """The present pause of this rank.

    Attributes:
        ends_requests: whether requests end when generation resumes.
    """

    ends_requests: bool = False


_pause = _Pause()


@functools.cache
def can_end_requests() -> bool:
    """Patch this rank's scheduler for `end_at_resume`, and return True. Idempotent.

    Return False if this release of SGLang lacks a needed part.
    """
    module = sys.modules.get("sglang.srt.managers.scheduler")
    try:
        from sglang.srt.utils import weight_versions  # noqa: F401 - from 0.5.19
    except ImportError:
        return False
    if module is None:
        return False
    scheduler_class: Any = vars(module)["Scheduler"]
    if not {"get_next_batch_to_run", "_release_aborted_request"} <= vars(scheduler_class).keys():
        return False
    # A paused scheduler does not call `get_next_batch_to_run`, so the next call shows that generation has resumed. A
    # patch of `continue_generation` would have no effect, because the scheduler keeps references to its message
    # handlers.
    choose: Callable[..., Any] = scheduler_class.get_next_batch_to_run

    @functools.wraps(choose)
    def _choose(scheduler: Any, *given: Any, **named: Any) -> Any:
        if _pause.ends_requests:
            _pause.ends_requests = False
            _end_requests(scheduler)
        return choose(scheduler, *given, **named)

    scheduler_class.get_next_batch_to_run = _choose
    return True


def end_at_resume(*, ends_requests: bool) -> None:
    """Set what happens to paused requests when generation resumes: True to end them, False to continue them."""
    _pause.ends_requests = ends_requests


def _end_requests(scheduler: Any) -> None:
    """End every waiting request that has generated tokens.

    The answer contains these tokens, and the finish reason `abort`. Requests without tokens stay in the queue, and start
    with the new weights.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    ended = [request for request in scheduler.waiting_queue if request.output_ids]
    scheduler.waiting_queue[:] = [r for r in scheduler.waiting_queue if not r.output_ids]
    for request in ended:
        request.finished_reason = FINISH_ABORT("the weights were updated")
        scheduler.beam_coordinator.retire_group(request)
        scheduler._release_aborted_request(request)
    has_logprobs = any(request.return_logprob for request in ended)
    scheduler.output_streamer.stream_output(ended, has_logprobs)
