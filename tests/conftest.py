"""Ranks of tests are forked from one server process that has imported, once, what they need."""

from __future__ import annotations

import multiprocessing
import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in the background of a shell; what tests start and interrupt would ignore it as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)

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
