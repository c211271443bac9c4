"""Real trainers in processes of their own, for several publications each."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from servers import ROOT, TOKEN
from trainer_rank import Order

NUM_RANKS = 2


@dataclass(frozen=True)
class Trainer:
    """A framework and its parallel layout over two processes.

    Attributes:
        axes: of two ranks each; expert parallelism may lie over the ranks of another.
    """

    name: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.name, *(f"{axis}{NUM_RANKS}" for axis in self.axes)))


FSDP = Trainer("fsdp2", ("dp",))
MEGATRON_TP = Trainer("megatron", ("tp",))
MEGATRON_PP = Trainer("megatron", ("pp",))
MEGATRON_EP = Trainer("megatron", ("ep",))
MEGATRON_CP = Trainer("megatron", ("cp",))
MEGATRON_TP_EP = Trainer("megatron", ("tp", "ep"))


@dataclass(frozen=True)
class Ranks:
    """Running ranks."""

    processes: tuple[subprocess.Popen[str], ...]
    logs: tuple[Path, ...]

    def publish(self, order: Order) -> None:
        """Return once every rank has trained a step, published it and left the fleet."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(order).decode() + "\n")
            process.stdin.flush()
        for process in self.processes:
            assert process.stdout is not None
            answer = process.stdout.readline()
            assert answer, "\n".join(log.read_text()[-4000:] for log in self.logs)
            assert json.loads(answer)["digest_ok"]


@contextmanager
def training(
    trainer: Trainer,
    kind: str,
    folder: Path,
    *,
    ends_well: bool = True,
    script: str = "trainer_rank.py",
) -> Iterator[Ranks]:
    """Args: folder: has `config.json` of the model. ends_well: whether every rank lives to the end.

    script: beside this one.
    """
    script = str(Path(__file__).with_name(script))
    layout = json.dumps(dict.fromkeys(trainer.axes, NUM_RANKS))
    environment = {
        **os.environ, "WINDLASS_TOKEN": TOKEN, "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
    }  # fmt: skip
    logs = tuple(folder / f"{trainer}-{rank}.log" for rank in range(NUM_RANKS))
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = (
                *(sys.executable, script, str(rank), str(NUM_RANKS)),
                *(trainer.name, kind, layout, str(folder)),
            )
            with log.open("w") as stream:
                processes.append(
                    subprocess.Popen(
                        command, env=environment, text=True, stderr=stream,
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    )
                )  # fmt: skip
        yield Ranks(tuple(processes), logs)
        for process in processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        if not ends_well:
            return
        assert [process.wait(60) for process in processes] == [0] * NUM_RANKS
    finally:
        for process in processes:
            process.kill()
            process.wait(30)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None and not pipe.closed:
                    pipe.close()
