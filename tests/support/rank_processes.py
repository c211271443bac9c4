"""Trainer ranks in their own processes; orders and answers are JSON lines."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from servers import ROOT


@dataclass(frozen=True)
class RankProcesses:
    """Running ranks and the files with their stderr."""

    processes: tuple[subprocess.Popen[str], ...]
    logs: tuple[Path, ...]

    def begin(self, order: msgspec.Struct) -> None:
        """Send an order to every rank."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(order).decode() + "\n")
            process.stdin.flush()

    def line(self, rank: int) -> str:
        """Return the answer to the oldest order without an answer."""
        process, log = self.processes[rank], self.logs[rank]
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"rank {rank}: {log.read_text()[-4000:]}"
        return line


@contextmanager
def running_ranks(
    commands: Sequence[Sequence[str]],
    logs: tuple[Path, ...],
    environment: Mapping[str, str],
    *,
    endings: Collection[int] | None = (0,),
) -> Iterator[tuple[subprocess.Popen[str], ...]]:
    """Start the ranks. At the end, close their stdin and kill them.

    Args:
        endings: allowed exit statuses, the same for all ranks; None allows any.
    """
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), **environment,
    }  # fmt: skip
    processes: list[subprocess.Popen[str]] = []
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("w") as stream:
                processes.append(
                    subprocess.Popen(
                        command, env=environment, text=True, stderr=stream,
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    )
                )  # fmt: skip
        yield tuple(processes)
        for process in processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        if endings is not None:
            found = {process.wait(60) for process in processes}
            assert len(found) == 1, found
            assert found <= set(endings), found
    finally:
        for process in processes:
            process.kill()
            process.wait(30)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None and not pipe.closed:
                    pipe.close()
