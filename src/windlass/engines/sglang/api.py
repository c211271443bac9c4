"""How SGLang is paused, comes to rest, and goes on: called by the agent of rank 0."""

from __future__ import annotations

import uuid

from windlass.config import PauseMode
from windlass.engines.attach import post
from windlass.engines.quiesce_gate import RestGate
from windlass.engines.sglang.orders import AtRest, Hold, order_ranks, send_order, session
from windlass.errors import ConfigError

__all__ = ["SglangApi"]

DRAIN_S = 30.0
"""For stages to notice that no request is left; they do so after a turn of every micro-batch."""


class SglangApi:
    """`EngineApi` over SGLang's routes.

    Caches of old weights are outdated by the order that brings the loop to rest, in whichever mode,
    before anything is written: `/flush_cache` refuses while requests are kept, and leaves embeddings.

    Args:
        url: of the server.
        world_size: ranks.
        gate: of rank 0.
        holds: whether weights may be written while an order runs.
        num_stages: of the pipeline.
    """

    def __init__(
        self, url: str, world_size: int, gate: RestGate, *, holds: bool, num_stages: int = 1
    ) -> None:
        self._url, self._world_size, self._gate, self._holds = url, world_size, gate, holds
        self._num_stages = num_stages

    def pause(self, mode: PauseMode, deadline_s: float) -> bool:
        """SGLang's own modes.

        Its loop of a pipeline (0.5.23) does not look whether it is paused, so that only `abort`,
        which waits until no request is left, stops it.
        """
        if self._num_stages > 1 and mode is not PauseMode.ABORT:
            raise ConfigError(
                f"SGLang: pause_mode must be abort with stages, whose loop runs on in the others, "
                f"got {mode}"
            )
        post(self._url, "/pause_generation", {"mode": str(mode)}, deadline_s)
        return True

    def holds(self, mode: PauseMode) -> bool:  # noqa: ARG002
        """See `EngineApi.holds`; a loop that is only paused spins."""
        return self._holds

    def hold(self, pause_id: str, deadline_s: float) -> None:
        """See `EngineApi.hold`."""
        with session(self._url, deadline_s) as selector:
            order = Hold(pause_id, uuid.uuid4().hex, deadline_s)
            send_order(self._url, order, selector, self._world_size, None)
            self._gate.wait_ended(pause_id)  # the end of a session works on weights

    def rest(self, pause_id: str, deadline_s: float) -> None:
        """See `EngineApi.rest`."""
        order = AtRest(pause_id, uuid.uuid4().hex)
        order_ranks(self._url, order, self._world_size, deadline_s)
        if self._num_stages > 1:  # a flush waits until every stage knows that no request is left
            waits = f"?timeout={min(DRAIN_S, deadline_s)}"
            post(self._url, f"/flush_cache{waits}", {}, deadline_s)

    def resume(self, deadline_s: float) -> None:
        """See `EngineApi.resume`."""
        post(self._url, "/continue_generation", {}, deadline_s)

    def set_version(self, version: int, deadline_s: float) -> None:
        """See `EngineApi.set_version`; running requests are not aborted."""
        body = {"new_version": str(version), "abort_all_requests": False}
        post(self._url, "/update_weight_version", body, deadline_s)
