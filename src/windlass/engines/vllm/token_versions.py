"""Which version of the weights made each token, in releases of vLLM that do not say it (0.24).

The scheduler notes the version in every step that it schedules, and for every request over how many of
its tokens that version held; what was scheduled before a pause and is read after it keeps the version
that made it. The spans leave with the last output of a request in `kv_transfer_params`, the one
place of vLLM's outputs that its server passes on as it is (connectors, which use it, are refused).

The version comes from the agents in the ranks: a loop that was blocked for an update returns it, before the core
schedules the next step. All of this lives in the EngineCore's process and is called in its loop, but for
`stamps_tokens`.

vLLM 0.32 sets a version itself, in the core's loop, and so it must be paused by `/pause` for it, which sleeps
for 20 ms; with WINDLASS_VLLM_OWN_VERSIONS=1 it does as 0.24 does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from windlass.envs import environment_value

OWN_VERSIONS = "WINDLASS_VLLM_OWN_VERSIONS"
SPANS = "weight_versions"
"""Key in `kv_transfer_params`: a list of spans, as vLLM 0.32 and SGLang spell them."""
TELLING_CALLS = frozenset({"windlass_block", "windlass_set_version"})
"""Methods of workers that return the version to note from now on, or None."""
_NOTED = "windlass_weight_version"
_KEPT = "windlass_weight_versions"

Span = dict[str, int]
"""`version` over output tokens [`start`, `end`)."""


class _Step(Protocol):
    """The part of vLLM's `SchedulerOutput` that is used."""

    num_scheduled_tokens: dict[str, int]


class _Versions:
    """What an EngineCore was told last."""

    def __init__(self) -> None:
        self.version: int | None = None


def stamps_tokens() -> bool:
    """Whether Windlass, and not vLLM, says which version made a token. Called in vLLM's processes."""
    from vllm.v1.engine.core import EngineCore

    return "set_weight_version" not in vars(EngineCore) or bool(environment_value(OWN_VERSIONS))


def add_tokens(spans: list[Span], num_tokens: int, version: int) -> None:
    """Add the tokens of one step to the spans of a request."""
    start = spans[-1]["end"] if spans else 0
    if spans and spans[-1]["version"] == version:
        spans[-1]["end"] = start + num_tokens
    elif num_tokens:
        spans.append({"version": version, "start": start, "end": start + num_tokens})


@functools.cache
def _told() -> _Versions:
    """Have the EngineCore of this process keep what TELLING_CALLS return."""
    from vllm.v1.engine.core import EngineCore

    told, call = _Versions(), EngineCore.collective_rpc

    def collective_rpc(
        core: Any,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Sequence[Any]:
        found: Sequence[Any] = call(core, method, timeout, args, kwargs)
        if method in TELLING_CALLS:
            told.version = next((v for v in found if v is not None), told.version)
        return found

    EngineCore.collective_rpc = collective_rpc
    return told


def noting(scheduler: type) -> type:
    """Return a scheduler that notes versions, made of one of vLLM's (0.24, 0.32)."""
    told = _told()
    base: Any = scheduler

    class NotingScheduler(base):  # type: ignore[misc]
        """Notes versions; schedules as its base does."""

        def schedule(self, throttle_prefills: bool = False) -> Any:
            step = super().schedule(throttle_prefills)
            vars(step)[_NOTED] = told.version
            return step

        def update_from_output(self, scheduler_output: _Step, model_runner_output: Any) -> Any:
            version: int | None = vars(scheduler_output)[_NOTED]
            # With its last tokens a request leaves the scheduler's.
            kept = {name: self.requests.get(name) for name in scheduler_output.num_scheduled_tokens}
            found = super().update_from_output(scheduler_output, model_runner_output)
            for output in (each for outputs in found.values() for each in outputs.outputs):
                request = kept.get(output.request_id)
                if request is None or version is None:
                    continue
                spans: list[Span] = vars(request).setdefault(_KEPT, [])
                add_tokens(spans, len(output.new_token_ids), version)
                if output.finish_reason is not None:
                    output.kv_transfer_params = {**(output.kv_transfer_params or {}), SPANS: spans}
            return found

    return NotingScheduler
