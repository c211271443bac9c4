"""Sleep mode in vLLM's EngineCore: the scheduler stays paused until a round (one update) has filled the weights.

vLLM's `/sleep` pauses the scheduler and frees memory in all workers. `/wake_up` maps the memory again by tag, and resumes
the scheduler when all memory is back. A round of Windlass can come at any time in between:

- `begin` wakes the weights, before a round writes into them.
- `go_on` wakes the KV cache if `begin` woke the weights, and resumes the scheduler. A framework that woke the weights
  itself must also wake the KV cache itself, before or after `go_on`.

While memory sleeps, the weights are lost, or a round writes them, the patched `resume_scheduler` only records that the
scheduler shall resume, and `wake_up` or `go_on` resumes it. All functions run in the core's loop, between two steps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from windlass.engines.rank_sleep import RankSleep
from windlass.engines.vllm.backend import is_backend_of

WEIGHTS = RankSleep.WEIGHTS
GO_ON = "windlass_go_on"
"""Method of `/collective_rpc` and `CoreCalls` that the core carries out itself: `go_on`."""
RESTS = "rests"
"""Third argument of `windlass_quiesce` for a server whose scheduler is paused by vLLM's sleep mode."""
_SHORTAGE, _IS_EMPTY, _REFUSES = "windlass_shortage", "windlass_is_empty", "windlass_refuse"
_IN_ROUND, _FAILURE = "windlass_in_round", "windlass_wake_failure"
_EXPECTS = "windlass_expect_update"
"""Worker methods."""


class _Turn:
    """State of this process's EngineCore from its sleep to the end of the next round.

    Attributes:
        may_be_lost: True if the engine slept at level 2, or a round woke the weights, and no round has ended since.
        is_in_round: whether a round writes the weights.
        resumes: whether the scheduler shall resume as soon as it may.
        woke: whether a round woke the weights, so that `go_on` also wakes the KV cache.
    """

    may_be_lost = is_in_round = resumes = woke = False


_turn = _Turn()


@functools.cache
def keep_lost_weights_paused() -> None:
    """Patch `sleep`, `wake_up` and `resume_scheduler` of this process's EngineCore. Idempotent.

    The patched `sleep` refuses to sleep during a round. The patched `wake_up` wakes memory only if the GPUs of all
    ranks have enough free memory. The patched `resume_scheduler` does not resume while memory sleeps, the weights are lost
    or a round writes them; see `go_on`.
    """
    from vllm.v1.engine.core import EngineCore

    fall_asleep, awaken = EngineCore.sleep, EngineCore.wake_up
    resume = EngineCore.resume_scheduler

    def sleep(core: Any, level: int = 1, mode: str = "abort") -> Any:
        """Make the ranks sleep. Raise RuntimeError if an update runs. A level above 1 may lose the weights."""
        if level >= 1 and may_sleep(core):
            if any(core.collective_rpc(_IN_ROUND)):
                raise RuntimeError("sleep: an update runs; call again after its end")
            if core.model_executor.is_sleeping and WEIGHTS not in core.model_executor.sleeping_tags:
                # vLLM 0.24 ignores a call of `sleep` while only the KV cache sleeps, so first wake the KV cache.
                _wake(core, sorted(core.model_executor.sleeping_tags))
            _turn.may_be_lost |= level > 1
            _turn.resumes = _turn.woke = _turn.is_in_round = False
        return fall_asleep(core, level, mode)

    def wake_up(core: Any, tags: list[str] | None = None) -> Any:
        """Wake memory on all ranks, and resume the scheduler when all memory is awake."""
        asleep = core.model_executor.sleeping_tags
        woken = [tag for tag in sorted(asleep) if tags is None or tag in tags]
        if not woken or not may_sleep(core):
            return awaken(core, tags)
        _wake(core, woken)
        is_awake = not core.model_executor.is_sleeping
        if is_awake:
            core.resume_scheduler()
        return is_awake

    def resume_scheduler(core: Any) -> None:
        """Resume, or record that `wake_up` or `go_on` must resume later."""
        if _turn.is_in_round or is_at_rest(core):
            _turn.resumes = True
        else:
            resume(core)

    EngineCore.sleep, EngineCore.wake_up = sleep, wake_up
    EngineCore.resume_scheduler = resume_scheduler


def may_sleep(core: Any) -> bool:
    """Return whether the server of an EngineCore was started with vLLM's sleep mode and our weight-transfer backend."""
    config = core.vllm_config
    return is_backend_of(config) and bool(config.model_config.enable_sleep_mode)


def is_at_rest(core: Any) -> bool:
    """Return whether memory of the server sleeps or its weights are lost, so that its scheduler is paused."""
    return may_sleep(core) and (bool(core.model_executor.is_sleeping) or _is_empty(core))


def begin(core: Any, pause_id: str) -> None:
    """Wake the weights before a round, if they sleep, and keep the scheduler paused until `go_on`.

    `pause_id` is the id of the pause that the ranks' agents wait for. An empty id means each agent's latest pause.

    Raises:
        RuntimeError: a rank has too little memory, or the engine has woken since its agent asked for the pause. Before it
            raises, this function makes the pause fail in the agents of all ranks.
    """
    try:
        _require_paused(core)
        if WEIGHTS in core.model_executor.sleeping_tags:
            _wake(core, [WEIGHTS], expects_update=True)
            _turn.woke = True
    except Exception as error:
        core.collective_rpc(_REFUSES, args=(pause_id, f"{error}"))
        raise
    _turn.is_in_round = True


def _require_paused(core: Any) -> None:
    """Raise RuntimeError unless the scheduler is paused: the server may have woken after its agent asked for the pause."""
    if not core.is_scheduler_paused():
        raise RuntimeError("the engine woke while the round began; the next round updates it")


def go_on(core: Any) -> None:
    """Wake the KV cache, if `begin` woke the weights, and resume the scheduler after a round. Idempotent.

    Do nothing if the weights are still lost: the round has failed, and the next round fills them. Resume the scheduler only
    if `begin` woke the weights, or if vLLM was asked to resume during the sleep or the round.

    Raises:
        RuntimeError: a rank has too little memory. The caller may repeat the call.
    """
    if _is_empty(core):
        return
    if _turn.woke and core.model_executor.is_sleeping:
        _wake(core, sorted(core.model_executor.sleeping_tags))
    resumes = _turn.woke or _turn.resumes
    _turn.may_be_lost = _turn.is_in_round = _turn.woke = _turn.resumes = False
    if resumes:
        core.resume_scheduler()


def _is_empty(core: Any) -> bool:
    """Return whether the weights of any rank are lost, or may be lost and still sleep."""
    return _turn.may_be_lost and any(core.collective_rpc(_IS_EMPTY))


def _wake(core: Any, tags: Sequence[str], *, expects_update: bool = False) -> None:
    """Wake the memory with these tags on all ranks, if the GPUs of all ranks have enough free memory.

    With `expects_update`, also mark weights that sleep at level 1 as lost: a round will fill them, so vLLM does not copy them
    back (see `WorkerSleep.expect_update`).

    Raises:
        RuntimeError: a rank has too little memory (then no rank has woken memory), or a rank failed to wake. The workers
            return the reason instead of raising; see `WorkerSleep.wake_up`.
    """
    executor = core.model_executor
    reasons = [reason for reason in core.collective_rpc(_SHORTAGE, args=(tags,)) if reason]
    if reasons:
        raise RuntimeError(reasons[0])
    if expects_update:
        _turn.may_be_lost = True
        core.collective_rpc(_EXPECTS)
    executor.wake_up(list(tags))
    reasons = [reason for reason in core.collective_rpc(_FAILURE) if reason]
    if reasons:
        # The executor now counts the memory as awake. Count it as asleep, so that the next call wakes it on the failed
        # ranks; the other ranks ignore that call.
        executor.sleeping_tags |= {*tags}
        if "is_sleeping" in vars(executor):
            # Only vLLM 0.24 stores this attribute. In later releases it is a property.
            executor.is_sleeping = True
        raise RuntimeError(reasons[0])
