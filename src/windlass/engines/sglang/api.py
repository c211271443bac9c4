"""How SGLang is paused, quiesced, and goes on: called by the agent of rank 0."""

from __future__ import annotations

import uuid
from typing import final

from windlass.config import PauseMode
from windlass.engines.http import EngineHttp
from windlass.engines.quiesce_gate import QuiesceGate
from windlass.engines.sglang.orders import Block, Quiesce, order_ranks, send_order, session
from windlass.errors import ConfigError

__all__ = ["SglangApi"]

DRAIN_S = 30.0
"""For stages to notice that no request is left; they do so after a turn of every micro-batch."""


@final
class SglangApi:
    """`EngineApi` over SGLang's routes.

    Caches of old weights are outdated by the order that quiesces the loop, in whichever mode,
    before anything is written: `/flush_cache` refuses while requests are kept, and leaves embeddings.

    Args:
        server: in front of the ranks.
        world_size: ranks.
        gate: of rank 0.
        blocks: whether weights may be written while an order keeps the loops blocked.
        num_stages: of the pipeline.
    """

    def __init__(
        self,
        server: EngineHttp,
        world_size: int,
        gate: QuiesceGate,
        *,
        blocks: bool,
        num_stages: int = 1,
    ) -> None:
        self._server, self._world_size = server, world_size
        self._gate, self._blocks = gate, blocks
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
        self._server.post("/pause_generation", {"mode": str(mode)}, deadline_s)
        return True

    def blocks(self, mode: PauseMode) -> bool:  # noqa: ARG002
        """See `EngineApi.blocks`; a loop that is only paused spins."""
        return self._blocks

    def block(self, pause_id: str, deadline_s: float) -> None:
        """See `EngineApi.block`."""
        with session(self._server, deadline_s) as selector:
            order = Block(pause_id, uuid.uuid4().hex, deadline_s)
            send_order(self._server, order, selector, self._world_size, None)
            self._gate.wait_ended(pause_id)  # the end of a session works on weights

    def quiesce(self, pause_id: str, deadline_s: float) -> None:
        """See `EngineApi.quiesce`."""
        order = Quiesce(pause_id, uuid.uuid4().hex)
        order_ranks(self._server, order, self._world_size, deadline_s)
        if self._num_stages > 1:  # a flush waits until every stage knows that no request is left
            waits_s = min(DRAIN_S, deadline_s)
            self._server.post(f"/flush_cache?timeout={waits_s}", {}, deadline_s)

    def resume(self, deadline_s: float) -> None:
        """See `EngineApi.resume`."""
        self._server.post("/continue_generation", {}, deadline_s)

    def set_version(self, version: int, deadline_s: float) -> None:
        """See `EngineApi.set_version`; running requests are not aborted."""
        body = {"new_version": str(version), "abort_all_requests": False}
        self._server.post("/update_weight_version", body, deadline_s)
