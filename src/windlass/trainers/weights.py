"""Description of the weights of one trainer rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from windlass.control.connect_messages import Hello, TurnRoom, group_and_rank
from windlass.layout.manifest import Role, ShardManifest
from windlass.net.messages import PROTOCOL_VERSION
from windlass.transfer.base import ParameterMemory
from windlass.transports.base import TransportOffer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerWeights:
    """Description of the weights of one trainer rank, and functions that access them.

    Attributes:
        manifest: manifest of the rank. `manifest.worker` is GROUP/RANK, where GROUP is the name of the trainer job.
        parameters: function that returns the current memory of each parameter, in manifest order.
        read: function that the client calls with the indices of the parameters that engines receive. Other parameters
            may change at any time, but `parameters` must return their memory, too.
        watch: function that records the current state of the parameters, for `changed`. The client calls it in the
            caller's thread when an update begins. None if the framework cannot record the state.
        changed: function that returns the name of a parameter that has changed since the last call of `parameters` or
            `watch`, or an empty text. The client calls it after it has sent parameters (but not a replica). If it
            returns a name, the update fails.
        make_whole: see `TrainerClient.make_whole`. None if every optimizer step leaves all parameters up to date.
        step_stream: function that returns the CUDA stream in which the calling thread queues its optimizer steps.
            `publish(copy=True)` waits for this stream only. If `step_stream` is None, `publish` waits for all work of
            the GPU.
        release: function that frees memory, such as the GPU memory of the weights. The client calls the function in
            a separate thread, after all engines have verified their bytes and before they allocate their caches. None to
            free nothing.
        allow_unused, keep: see `connect_trainer`.
    """

    manifest: ShardManifest
    parameters: Callable[[], Sequence[ParameterMemory]]
    read: Callable[[Collection[int]], None] | None = None
    watch: Callable[[], None] | None = None
    changed: Callable[[], str] = str
    make_whole: Callable[[], None] | None = None
    step_stream: Callable[[], int] | None = None
    release: Callable[[], None] | None = None
    allow_unused: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()

    def hello(
        self, *, offers: tuple[TransportOffer, ...], job: str, world_size: int, room: TurnRoom
    ) -> Hello:
        """Return the first message of this rank to the controller."""
        group, rank = group_and_rank(self.manifest.worker)
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            worker=self.manifest.worker,
            incarnation=os.urandom(8).hex(),
            role=Role.TRAINER,
            group=group,
            rank=rank,
            world_size=world_size,
            manifest=self.manifest.encode(),
            offers=offers,
            job=job,
            allow_unused=self.allow_unused,
            keep=self.keep,
            releases=self.release is not None,
            room=room,
        )
