"""Ranks of tests are forked from one server process that has imported, once, what they need."""

from __future__ import annotations

import multiprocessing

multiprocessing.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "transformers.models.qwen3.modeling_qwen3",
        "windlass.controller",
        "windlass.engines.client",
        "windlass.execution.by_hand",
        "windlass.execution.collective",
        "windlass.execution.disk",
        "windlass.frameworks.dtensor",
        "windlass.rollout.worker",
        "windlass.testing.kill_at",
        "windlass.training.client",
        "windlass.transports.cma",
    ]
)
