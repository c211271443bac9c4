"""Real trainers in their own processes, for several publications each."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hosts import Host
from rank_processes import RankProcesses, running_ranks
from servers import TOKEN
from trainer_rank import Order

AXIS_SIZE = 2


@dataclass(frozen=True)
class Trainer:
    """A framework and its parallel layout over its processes.

    Attributes:
        axes: axes of two ranks each; expert parallelism may share the ranks of another axis.
        num_ranks: number of processes.
    """

    name: str
    axes: tuple[str, ...]
    num_ranks: int = 2

    def __str__(self) -> str:
        return " ".join((self.name, *(f"{axis}{AXIS_SIZE}" for axis in self.axes)))


FSDP = Trainer("fsdp2", ("dp",))
FSDP_TP = Trainer("fsdp2", ("tp",))
FSDP_DP_TP = Trainer("fsdp2", ("dp", "tp"), 4)
FSDP_CP = Trainer("fsdp2", ("cp",))
HSDP = Trainer("fsdp2", ("replicate", "dp"), 4)
MEGATRON_TP = Trainer("megatron", ("tp",))
MEGATRON_PP = Trainer("megatron", ("pp",))
MEGATRON_EP = Trainer("megatron", ("ep",))
MEGATRON_CP = Trainer("megatron", ("cp",))
MEGATRON_TP_EP = Trainer("megatron", ("tp", "ep"))


class Ranks(RankProcesses):
    """Running ranks of `trainer_rank.py`."""

    def publish(self, order: Order) -> None:
        """Wait until every rank has trained a step, published it and left the fleet."""
        self.begin(order)
        for rank in range(len(self.logs)):
            assert json.loads(self.line(rank))["digest_ok"]


@contextmanager
def training(
    trainer: Trainer,
    kind: str,
    folder: Path,
    *,
    ends_well: bool = True,
    script: str = "trainer_rank.py",
    hosts: Sequence[Host] = (),
) -> Iterator[Ranks]:
    """Start the ranks of a trainer.

    Args:
        folder: contains `config.json` of the model.
        ends_well: every rank lives to the end.
        script: file in the folder of this module.
        hosts: hosts of the ranks, if they run on hosts of a `Network`.
    """
    script = str(Path(__file__).with_name(script))
    layout = json.dumps(dict.fromkeys(trainer.axes, AXIS_SIZE))
    logs = tuple(folder / f"{trainer}-{rank}.log" for rank in range(trainer.num_ranks))
    of_all = str(trainer.num_ranks), trainer.name, kind, layout, str(folder)
    commands: list[tuple[str, ...]] = [
        (sys.executable, script, str(rank), *of_all) for rank in range(trainer.num_ranks)
    ]
    if hosts:
        network = ("env", "GLOO_SOCKET_IFNAME=rail0")
        commands = [
            tuple(host.command(*network, *command))
            for host, command in zip(hosts, commands, strict=True)
        ]
    endings = (0,) if ends_well else None
    with running_ranks(commands, logs, {"WINDLASS_TOKEN": TOKEN}, endings=endings) as processes:
        yield Ranks(processes, logs)
