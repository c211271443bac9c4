"""vLLM's weight-transfer backend "windlass", as it runs in each worker.

`windlass.integrations.vllm.plugin` registers the backend. A server that is started with
`--weight-transfer-config '{"backend": "windlass"}'` creates a `WindlassTransferEngine` in every worker. vLLM 0.24 and
0.32 define the interface (`vllm/distributed/weight_transfer/base.py`). The trainer calls two routes:

- `/init_weight_transfer_engine`: the API server orders every worker to capture its layout and to join the trainer's
  fleet (`windlass.engines.vllm.api_server`).
- `/update_weights`: the worker's main loop is blocked between two steps, while the agent's thread receives, verifies and
  applies a version. On a server with one rank, the agent itself blocks the loop
  (`windlass.engines.vllm.worker.VllmApi`). This is faster, because HTTP requests wait for the API server's event loop,
  which also streams all tokens.

A round is one attempt of the controller to publish a version: it writes the version into all engines of the fleet.

Methods that vLLM calls in all workers return the reason of a failure instead of raising. If a worker raises, vLLM does
not read the results of the other workers: its next call reads them instead of its own results.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import final

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from windlass.engines.engine_rank import EngineRank
from windlass.engines.vllm.rank import Worker
from windlass.engines.vllm.worker import WorkerMethods, block_loop
from windlass.errors import ConfigError, WindlassError

logger = logging.getLogger(__name__)
LEAVE_S = 1.0
"""Seconds that `shutdown` waits for the old controller to disconnect."""


@dataclass(kw_only=True)
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Body of `/update_weights`.

    Attributes:
        version: version that the trainer is about to publish.
        deadline_s: seconds within which the round of this version must reach this worker's agent.
        namespace: cache namespace that the EngineCore set for this update; see `engine_core.Namespace`.
    """

    version: int
    deadline_s: float
    namespace: str = ""


@final
class WindlassTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Weight-transfer engine of one worker. vLLM calls the methods in the worker's main loop, between two steps."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    worker: Worker
    """vLLM's worker; the first order sets this attribute, because vLLM 0.24 passes only the model to `__init__`."""

    def __init__(self, config: object, *made_with: object) -> None:
        super().__init__(config, *made_with)
        self.rank = EngineRank()

    def init_transfer_engine(self, init_info: object) -> None:
        """Raise ConfigError: `windlass.engines.vllm.api_server` should have handled this call in the API server."""
        del init_info
        raise ConfigError(
            "init_weight_transfer_engine must be called through vLLM's API server, got a call of a worker; "
            "check that VLLM_PLUGINS does not exclude Windlass's plugin"
        )

    def start_weight_update(self) -> None:
        """Do nothing: the update does not use vLLM's loader."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Call `receive_weights`; the inherited method would also need a GPU."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo, load_weights: object = None) -> None:
        """Block this worker's main loop between two steps until the round of the version in `update_info` has ended.

        The controller, not this method, reports the result of the round to the trainer. If no round reaches this worker's
        agent within `deadline_s`, the loop continues. If the round leaves mixed weights, the loop stays blocked until a
        later round has written all weights again.

        Raises:
            ConfigError: the EngineCore sent no cache namespace.
            UnsupportedLayout: see `block_loop`.
        """
        # vLLM 0.24 passes `load_weights`.
        del load_weights
        if not update_info.namespace:
            raise ConfigError(
                "vLLM: the EngineCore must separate its caches by version, but sent no cache namespace; "
                "check that VLLM_PLUGINS does not exclude Windlass's plugin"
            )
        if self.served_version >= update_info.version:
            # The round of this version has already ended.
            return
        block_loop(self.worker, f"version {update_info.version}", update_info.deadline_s)

    @property
    def served_version(self) -> int:
        """Version of the trainer's fleet that this worker serves; -1 if none."""
        return self.rank.served_version

    def finish_weight_update(self) -> None:
        """Do nothing: the agent has already finalised the weights."""

    def shutdown(self) -> None:
        """Leave the trainer's fleet. The server keeps its current weights.

        If the server cannot leave (see `EngineRank.leave`), log a warning and stay in the fleet. This happens, for
        example, if the trainer's controller is still connected after `LEAVE_S`.
        """
        try:
            self.rank.leave(LEAVE_S)
        except WindlassError as error:
            logger.warning("shutdown: the server has not left the fleet: %s", error)

    @staticmethod
    def trainer_send_weights(_iterator: object, _trainer_args: object) -> None:
        """Raise ConfigError: vLLM 0.24's function for trainers needs whole tensors, which Windlass does not gather."""
        raise ConfigError(
            "trainer_send_weights: not supported; use windlass.integrations.vllm.WeightSync"
        )


def _extend_worker() -> None:
    """Give vLLM's worker the methods of `WorkerMethods`."""
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker

    for name, member in vars(WorkerMethods).items():
        if not name.startswith("__"):
            setattr(VllmWorker, name, member)


# vLLM imports this module in every worker that uses this backend, while the worker loads the model.
_extend_worker()
