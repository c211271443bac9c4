"""Methods that `--worker-extension-cls windlass.engines.vllm.extension.WindlassExtension` adds to a worker.

vLLM makes this class a base class of its worker, so `self` is the worker. `collective_rpc` calls the methods
in the worker's main loop, between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import msgspec
import torch

from windlass.config import PauseMode
from windlass.engines.capture.memory import fingerprints, held_by
from windlass.engines.engine_rank import EngineRank
from windlass.engines.http import EngineHttp
from windlass.engines.rank_reports import Secrets, carry_out
from windlass.engines.spec import AgentSettings
from windlass.engines.vllm.adapter import Slot, keep_adapter
from windlass.engines.vllm.cpu_kernels import multiply_by_parameters
from windlass.engines.vllm.engine_core import CoreCalls, core_calls, stamps_tokens
from windlass.engines.vllm.rank import (
    Worker,
    cache_storages,
    capture_rank,
    number_of,
    served_by,
)
from windlass.errors import ConfigError

# vLLM imports this module in a worker before the worker loads the model.
multiply_by_parameters()

_MODES: Mapping[PauseMode, str] = {PauseMode.ABORT: "abort", PauseMode.IN_PLACE: "keep"}


class VllmApi:
    """`EngineApi` that uses the routes of `VLLM_SERVER_DEV_MODE=1`.

    `can_block` and `stamps` are the results of `_can_block` and `stamps_tokens`. `core` has calls into the EngineCore of
    this process if the server has one rank; it is None if `/collective_rpc` must call the methods of several workers.
    """

    def __init__(
        self, server: EngineHttp, *, can_block: bool, stamps: bool, core: CoreCalls | None = None
    ) -> None:
        self._server, self._can_block, self._stamps = server, can_block, stamps
        self._core = core
        self._is_blocking = False

    def pause(self, mode: PauseMode, deadline_s: float) -> bool:
        """Pause: `abort` ends running requests; `in_place` keeps requests and their KV cache.

        Send `clear_cache=false`, because the cache is separated by version. Otherwise vLLM 0.32 would compute the KV cache
        of all kept requests again.
        """
        if mode not in _MODES:
            raise ConfigError(f"vLLM: pause_mode must be one of {list(_MODES)}, got {mode}")
        if self.blocks(mode):
            return False
        self._server.post(f"/pause?mode={_MODES[mode]}&clear_cache=false", {}, deadline_s)
        return True

    def blocks(self, mode: PauseMode) -> bool:
        """Return whether to block the main loops instead of calling `/pause`, which sleeps for 20 ms (0.24, 0.32)."""
        return mode is PauseMode.IN_PLACE and self._can_block

    def quiesce(self, pause_id: str, deadline_s: float, *, block: bool) -> None:
        self._is_blocking = block
        try:
            blocked_s = str(deadline_s) if block else ""
            self._call("windlass_quiesce", [pause_id, blocked_s], None if block else deadline_s)
        finally:
            self._is_blocking = False

    def resume(self, deadline_s: float) -> None:
        self._server.post("/resume", {}, deadline_s)

    def set_version(self, version: int, deadline_s: float) -> None:
        """Set the version of later tokens; see `EngineApi.set_version`.

        If Windlass records versions and the main loop is blocked, do nothing: `windlass_quiesce` returns the version.
        """
        if not self._stamps:
            self._server.post("/update_weight_version", {"new_version": str(version)}, deadline_s)
        elif not self._is_blocking:
            self._call("windlass_set_version", [version], deadline_s)

    def _call(self, method: str, args: list[object], deadline_s: float | None) -> None:
        if self._core is not None:
            self._core.call(method, args, deadline_s)
            return
        timeout = {} if deadline_s is None else {"timeout": deadline_s}
        body = {"method": method, "args": args, **timeout}
        self._server.post("/collective_rpc", body, deadline_s)


def own_api(worker: Worker, settings: AgentSettings, secrets: Secrets) -> VllmApi:
    """Return the `EngineApi` with which a rank pauses its own server."""
    return VllmApi(
        secrets.server(settings.url),
        can_block=_can_block(worker.parallel_config),
        stamps=stamps_tokens(),
        core=core_calls() if settings.world_size == 1 else None,
    )


class WindlassExtension:
    """Methods added to every worker. Their names begin with `windlass_`, because vLLM refuses names that it uses."""

    @cached_property
    def windlass_engine_rank(self) -> EngineRank:
        """Captured layout and fleet of this rank."""
        return EngineRank()

    def windlass_capture(self, encoded: str, folder: str) -> None:
        """Capture the layout. A failed capture does not change the model.

        Args:
            encoded: `AgentSettings` in JSON.
            folder: folder of the launcher, to which the rank writes its `CapturedLayout`; see `carry_out`.
        """
        settings = msgspec.json.decode(encoded, type=AgentSettings)
        worker: Worker = self

        def capture(secrets: Secrets) -> bytes:
            api = partial(own_api, worker, settings, secrets)
            found = capture_rank(worker, self.windlass_engine_rank, settings, api, is_launched=True)
            return msgspec.json.encode(found)

        carry_out(folder, self.windlass_rank(), capture, server_url=settings.url)

    def windlass_join(self, encoded: str, folder: str) -> None:
        """Join the fleet, after the launcher has checked all ranks' layouts. For arguments see `windlass_capture`."""
        settings, rank = msgspec.json.decode(encoded, type=AgentSettings), self.windlass_rank()

        def join(secrets: Secrets) -> bytes:
            self.windlass_engine_rank.join(settings, rank, secrets.token)
            return b""

        carry_out(folder, rank, join, server_url=settings.url)

    def windlass_rank(self) -> int:
        """Return the rank of this process among all ranks of the server; see `number_of`."""
        return number_of(self)

    def windlass_quiesce(
        self, pause_id: str, blocked_s: str = "", namespace: str = ""
    ) -> int | None:
        """Report to the agent that the main loop is quiesced; with `blocked_s`, block the loop until the pause ends.

        Args:
            pause_id: id of the pause.
            blocked_s: `deadline_s` of `QuiesceGate.block`; empty not to block, because the scheduler is paused.
            namespace: new cache namespace, which the EngineCore adds to the call.

        Returns:
            After a block, the version that the rank serves; None without a block or a version.

        Raises:
            ConfigError: the EngineCore sent no cache namespace.
        """
        if not namespace:
            raise ConfigError(
                "vLLM: the EngineCore must separate its caches by version, but sent no cache namespace"
            )
        rank = self.windlass_engine_rank
        if blocked_s and torch.cuda.is_available():
            torch.cuda.synchronize()
        if rank.settings.adapter:
            keep_adapter(self)
        if not blocked_s:
            rank.gate.quiesced(pause_id)
            return None
        rank.gate.block(pause_id, float(blocked_s))
        return rank.served_version if rank.served_version >= 0 else None

    def windlass_set_version(self, version: int) -> int:
        """Return `version`, which the EngineCore records for later tokens."""
        return version

    def windlass_digests(self) -> dict[str, str]:
        """Return a fingerprint of every tensor of the model, the draft model and the adapter, by name."""
        worker: Worker = self
        held = held_by(served_by(worker), cache_storages(worker))
        return fingerprints(held) | fingerprints(held_by(Slot(worker.model_runner.get_model())))


def _can_block(parallel: Any) -> bool:
    """Return whether the agent may block the main loop of a rank between two steps.

    Return False with pipeline stages or with replicas of a MoE model, because another rank may be in a step that waits
    for this rank (for a dense model, vLLM reports one replica). Also return False if vLLM records versions of tokens
    (0.32), because vLLM could not set the version while the loop is blocked.
    """
    shared = parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1
    return not shared and stamps_tokens()
