"""Controllers that trainer rank 0 hosts for servers of an engine, for tests that watch their rounds."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from windlass.control.coordinator import Coordinator
from windlass.integrations import joined
from windlass.integrations.hosted import HostedController
from windlass.integrations.vllm import sync


def remember_hosted() -> list[HostedController]:
    """Return a list to which every `WeightSync` and `JoinedServers` that is made from now on adds its controller."""
    hosted: list[HostedController] = []

    def remember(*arguments: Any) -> HostedController:
        hosted.append(HostedController(*arguments))
        return hosted[-1]

    for module in (sync, joined):
        vars(module)["HostedController"] = remember
    return hosted


def kill_in_phase(coordinator: Coordinator, version: int, phase: str, pids: Sequence[int]) -> None:
    """Kill processes (SIGKILL) as soon as the round of a version enters a phase."""

    def killed(of: int, entered: object) -> None:
        if (of, str(entered)) == (version, phase):
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    coordinator.rounds.on_phase(killed)
