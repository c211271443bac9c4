"""One rank of a real trainer that drives updates by `RolloutCallback`: trains, saves a checkpoint, sends it.

`python driving_rank.py RANK WORLD_SIZE NAME KIND LAYOUT FOLDER` reads one `Drive` in JSON per line and answers each
with a line. LAYOUT is JSON; FOLDER contains `config.json` of the model. With the axis `pp` every rank is a leader and
sends the tensors of its stage. Otherwise rank 0 is the only leader.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from trainer_rank import Fsdp, Megatron

import windlass
from windlass.layout.dtypes import DType
from windlass.transfer.bindings import WireTensor

DEADLINE_S = 60.0
BUCKET_NBYTES = 256 << 10
"""Size of a bucket: a small part of the model, so that an update has several buckets."""


class Drive(msgspec.Struct, frozen=True):
    """Order to train until step `version`, write the weights to `checkpoint`, and send them as `version`.

    Every trainer starts with the same weights. The number of steps makes each version differ from all others.

    Attributes:
        by: `xccl` for broadcasts of whole tensors, `disk` for the files of `checkpoint`.
        session_s: session of the update, see `RolloutCallback.pause_generation`.
        dies: place where every leader kills itself; empty for none. `bucket`: after the first bucket. `half`: after it
            has told the engines to receive a bucket that it does not send. `files`: after the engines have read the
            files. `continue`: while its `continue_generation` runs.
    """

    url: str
    version: int
    checkpoint: str
    by: str
    session_s: float = 600.0
    dies: str = ""


class Leader:
    """A leader's callback, and its process group, which serves all updates of one controller.

    Args:
        stage: stage of this leader; -1 if it is the only leader.
        num_stages: number of leaders; 0 if there is one.
    """

    def __init__(self, url: str, stage: int, num_stages: int) -> None:
        self._name = f"leader{stage}"
        self._callback = windlass.RolloutCallback(
            url, os.environ["WINDLASS_TOKEN"], leader=self._name, stage=stage,
            num_stages=num_stages, deadline_s=DEADLINE_S,
        )  # fmt: skip
        self._group: windlass.WeightGroup | None = None

    def send(self, order: Drive, tensors: dict[str, torch.Tensor]) -> None:
        """Send one version. `tensors` are the whole tensors of this leader."""
        self._callback.pause_generation(session_s=order.session_s)
        if order.by == "disk":
            self._callback.update_weights_from_disk(order.checkpoint).result(DEADLINE_S)
            die_at("files", order)
        else:
            self._broadcast(order, tensors)
        if order.dies == "continue":
            die_after(0.05)
        self._callback.continue_generation(order.version)

    def _broadcast(self, order: Drive, tensors: dict[str, torch.Tensor]) -> None:
        if self._group is None:
            self._group = windlass.WeightGroup(
                self._callback, self._name, bucket_nbytes=BUCKET_NBYTES, deadline_s=DEADLINE_S
            )
        for place, bucket in enumerate(buckets(tensors)):
            if place == 1 and order.dies == "half":
                specs = [
                    WireTensor(name, DType.FLOAT32, tuple(tensor.shape))
                    for name, tensor in bucket.items()
                ]
                self._callback.update_weights_from_distributed(self._name, specs, stamp="")
                # Give the engines time to enter their half.
                die_after(1.0)
                threading.Event().wait(DEADLINE_S)
            self._group.broadcast(bucket)
            die_at("bucket", order)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._callback.close()


def die_at(place: str, order: Drive) -> None:
    if order.dies == place:
        os.kill(os.getpid(), signal.SIGKILL)


def die_after(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def buckets(tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors in buckets that fit into `BUCKET_NBYTES`."""
    bucket: dict[str, torch.Tensor] = {}
    filled = 0
    for name, tensor in tensors.items():
        # Tensors are aligned in a bucket.
        nbytes = tensor.nbytes + 512
        if bucket and filled + nbytes > BUCKET_NBYTES:
            yield bucket
            bucket, filled = {}, 0
        bucket[name], filled = tensor, filled + nbytes
    yield bucket


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    name, kind, layout, folder = *sys.argv[3:5], json.loads(sys.argv[5]), Path(sys.argv[6])
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    trained = Megatron(kind, layout) if name == "megatron" else Fsdp(kind, layout)
    stages = layout.get("pp", 1)
    leaders: dict[str, Leader] = {}
    steps = 0
    with ExitStack() as running:
        for line in sys.stdin:
            order = msgspec.json.decode(line, type=Drive)
            while steps < order.version:
                trained.step()
                steps += 1
            trained.save(Path(order.checkpoint))
            if rank == 0:
                shutil.copy(folder / "config.json", order.checkpoint)
            tensors = trained.whole()
            # Every leader reads the finished checkpoint.
            dist.barrier()
            if stages > 1:
                assert isinstance(trained, Megatron)
                tensors = {each: tensors[each] for each in trained.names_here()}
            if stages > 1 or rank == 0:
                if (leader := leaders.get(order.url)) is None:
                    made = (
                        Leader(order.url, rank, stages) if stages > 1 else Leader(order.url, -1, 0)
                    )
                    leader = leaders[order.url] = made
                    running.callback(made.close)
                leader.send(order, tensors)
            os.write(1, b"sent\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
