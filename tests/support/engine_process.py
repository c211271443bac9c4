"""One fake engine rank in its own process. It kills itself at a given command."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from fake_agents import FakeEngineRank, engine_manifest, fake_endpoint, fake_hello

from windlass.control.client import AgentChannel
from windlass.control.messages import Command


def main() -> None:
    url, token, group, memory, num_trainers, kill_in = sys.argv[1:]

    def die(command: Command) -> None:
        if type(command).__name__ == kill_in:
            os.kill(os.getpid(), signal.SIGKILL)

    worker = f"{group}/0"
    rank = FakeEngineRank(worker, int(num_trainers), on_command=die, memory_path=Path(memory))
    hello = fake_hello(
        engine_manifest(worker, int(num_trainers)),
        group=group,
        incarnation=str(os.getpid()),
        endpoint=fake_endpoint(worker, memory),
    )
    channel = AgentChannel(url, token, lambda: hello, rank)
    channel.connect(20.0)
    # Wait until the test closes stdin.
    sys.stdin.read()
    channel.close()


if __name__ == "__main__":
    main()
