"""Agents with a payload of numbers instead of a model, for tests and benchmarks of the control
plane.

Every element of the payload is distinct and encodes its version and its trainer, so that
`FakeEngineRank.live_versions` reveals a mixture of versions. Ranks of one process reach each
other's memory through a `FakeFabric`. If the memory of an engine rank is a file, other processes
can write it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt
import xxhash
from offers import offer_of

from windlass.config import UpdateMode
from windlass.control.connect_messages import (
    Bound,
    ChangeLinks,
    ConnectEngine,
    ConnectTrainer,
    Hello,
)
from windlass.control.group_messages import JoinGroups, Receive
from windlass.control.messages import (
    Abort,
    Apply,
    BeginDriven,
    Command,
    Done,
    Pause,
    Prepare,
    Publish,
    Release,
    Result,
    Verified,
    Verify,
    Write,
)
from windlass.control.push_messages import JoinPushGroup, ReadFiles, ReceiveTensors
from windlass.errors import PeerUnreachable, ProtocolError
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.net.messages import PROTOCOL_VERSION
from windlass.planning.plan import TransferPlan
from windlass.transfer.bindings import DestinationBinding, LinkOutcome, LinkStatus, Written
from windlass.transports.peers import PeerEndpoint

__all__ = [
    "CORRUPT",
    "WIDTH",
    "FakeEngineRank",
    "FakeFabric",
    "FakeTrainerRank",
    "engine_manifest",
    "fake_endpoint",
    "fake_hello",
    "payload",
    "payload_digest",
    "trainer_manifest",
]

WIDTH = 4
"""Elements that one trainer sends to one engine rank."""
CORRUPT = -2
_PER_VERSION = 1_000_000
_PER_SOURCE = 1_000

Rows = npt.NDArray[np.int64]


def payload(version: int, source: int) -> Rows:
    """Return the (WIDTH,) elements that trainer `source` sends for `version`."""
    return np.arange(WIDTH, dtype=np.int64) + version * _PER_VERSION + source * _PER_SOURCE


def payload_digest(row: Rows) -> str:
    """Return the digest of one row."""
    return xxhash.xxh3_128_hexdigest(row.tobytes())


def trainer_manifest(worker: str, index: int, num_trainers: int) -> ShardManifest:
    """Return the manifest of trainer `index`, which owns row `index` of one tensor."""
    builder = ManifestBuilder(worker, Role.TRAINER)
    builder.add_parameter("w", nbytes=WIDTH * 4, dtype=DType.FLOAT32)
    builder.add_shard("w", (num_trainers, WIDTH), Box((index, 0), (1, WIDTH)), "w")
    return builder.build()


def engine_manifest(worker: str, num_trainers: int, *, tensor: str = "w") -> ShardManifest:
    """Return the manifest of an engine rank, which has the whole tensor."""
    builder = ManifestBuilder(worker, Role.ENGINE)
    builder.add_parameter("w", nbytes=num_trainers * WIDTH * 4, dtype=DType.FLOAT32)
    builder.add_shard(tensor, (num_trainers, WIDTH), Box((0, 0), (num_trainers, WIDTH)), "w")
    return builder.build()


def fake_endpoint(worker: str, memory_path: str = "") -> PeerEndpoint:
    """Return the endpoint of a rank with its memory in this process, or in the given file."""
    return PeerEndpoint("fake", memory_path, worker)


def fake_hello(
    manifest: ShardManifest,
    *,
    group: str,
    rank: int = 0,
    world_size: int = 1,
    incarnation: str = "first",
    served_version: int = -1,
    lineage: str = "",
    job: str = "",
    endpoint: PeerEndpoint | None = None,
    mixed_weights: bool = False,
    address: str = "",
) -> Hello:
    """Return the first frame of a rank. `address` is the address of an engine; by default, it is the engine's name."""
    is_engine = manifest.role is Role.ENGINE and rank == 0
    url = f"http://{address or group}" if is_engine else ""
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        worker=manifest.worker,
        incarnation=incarnation,
        role=manifest.role,
        group=group,
        rank=rank,
        world_size=world_size,
        manifest=manifest.encode(),
        offers=(offer_of(endpoint or fake_endpoint(manifest.worker)),),
        url=url,
        served_version=served_version,
        lineage=lineage,
        job=job,
        mixed_weights=mixed_weights,
    )


def _nothing(_command: Command) -> None:
    return


@final
class FakeEngineRank:
    """`CommandHandler` of an engine rank with `num_trainers` rows of numbers as its weights.

    Args:
        worker: name of the rank.
        num_trainers: number of rows.
        on_command: called before each command; may raise, block or kill.
        memory_path: file for live rows and shadow, so that other processes can write them.
    """

    def __init__(
        self,
        worker: str,
        num_trainers: int,
        *,
        mode: UpdateMode = UpdateMode.IN_PLACE,
        on_command: Callable[[Command], None] = _nothing,
        memory_path: Path | None = None,
    ) -> None:
        self.worker = worker
        self.mode = mode
        self.on_command = on_command
        self._path = "" if memory_path is None else str(memory_path)
        shape = (2, num_trainers, WIDTH)
        self._memory: Rows = (
            np.full(shape, -1, np.int64)
            if memory_path is None
            else np.memmap(memory_path, np.int64, "w+", shape=shape)
        )
        self.paused = False
        self.mixed_weights = False
        self.version = -1
        self.sources: tuple[str, ...] = ()
        self.handled: list[str] = []

    @property
    def live(self) -> Rows:
        """Return the (num_trainers, WIDTH) rows that the rank computes with."""
        rows: Rows = self._memory[0]
        return rows

    @property
    def target(self) -> Rows:
        """Return the (num_trainers, WIDTH) rows that writes reach: live rows or shadow."""
        rows: Rows = self._memory[1 if self.mode is UpdateMode.STAGED else 0]
        return rows

    @property
    def serving(self) -> bool:
        """Return whether the rank generates."""
        return not self.paused and self.version >= 0

    @property
    def live_versions(self) -> set[int]:
        """Return the versions of the live elements; more than one is a mixture.

        An element that no trainer sends in any version counts as version `CORRUPT`.
        """
        expected = np.stack([payload(0, s) for s in range(len(self.live))])
        versions, remainder = np.divmod(self.live - expected, _PER_VERSION)
        return {int(v) for v in np.where(remainder == 0, versions, CORRUPT).ravel()}

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        """See `CommandHandler.handle`."""
        self.on_command(command)
        self.handled.append(type(command).__name__)
        match command:
            case ConnectEngine():
                self.mode = command.mode
                self.sources = TransferPlan.decode(command.plan).sources
                return Bound(command.plan_digest, self._binding())
            case Pause():
                self.paused = True
            case Verify():
                return self._verify(command)
            case Apply():
                if self.mode is UpdateMode.STAGED:
                    self.live[:] = self.target
            case Publish():
                self.version, self.paused, self.mixed_weights = command.version, False, False
            case Abort():
                self.mixed_weights |= command.mixed_weights
                self.paused = self.mixed_weights
            case (
                JoinGroups()
                | Receive()
                | BeginDriven()
                | JoinPushGroup()
                | ReceiveTensors()
                | ReadFiles()
            ):
                pass
            case _:
                raise ProtocolError(f"an engine cannot carry out {type(command).__name__}")
        return Done()

    def _verify(self, command: Verify) -> Verified:
        wrong = [
            source
            for source, digest in command.expected.items()
            if payload_digest(self.target[self.sources.index(source)]) != digest
        ]
        return Verified(tuple(wrong))

    def _binding(self) -> DestinationBinding:
        endpoint = fake_endpoint(self.worker, self._path)
        return DestinationBinding(self.worker, endpoint, (), ())


@final
class FakeFabric:
    """Access to the memory of a binding: a rank of this process, or a file."""

    def __init__(self) -> None:
        self.ranks: dict[str, FakeEngineRank] = {}

    def write(self, binding: DestinationBinding, mode: UpdateMode, row: int, values: Rows) -> None:
        """Write one row into the rank that `binding` names.

        Raises:
            PeerUnreachable: the memory does not exist.
        """
        if binding.endpoint.address:
            try:
                memory = np.memmap(binding.endpoint.address, np.int64, "r+")
            except OSError as error:
                raise PeerUnreachable(f"{binding.worker}: {error}") from error
            rows = memory.reshape(2, -1, WIDTH)[1 if mode is UpdateMode.STAGED else 0]
        elif binding.worker in self.ranks:
            rows = self.ranks[binding.worker].target
        else:
            raise PeerUnreachable(f"{binding.worker}: no such rank")
        rows[row] = values


@final
class FakeTrainerRank:
    """`CommandHandler` of a trainer rank that sends one row to every engine rank.

    Args:
        worker: name of the rank.
        fabric: memory of the engine ranks.
        mode: the controller's mode.
        on_command: called before each command; may raise, block or kill.
    """

    def __init__(
        self,
        worker: str,
        fabric: FakeFabric,
        *,
        mode: UpdateMode = UpdateMode.IN_PLACE,
        on_command: Callable[[Command], None] = _nothing,
    ) -> None:
        self.worker = worker
        self.mode = mode
        self.on_command = on_command
        self.handled: list[str] = []
        self.corrupt_next = 0
        self.fail_next: list[LinkStatus] = []
        self.has_released = False
        self._fabric = fabric
        self._bindings: dict[str, DestinationBinding] = {}
        self.bound_in = 0
        self._index = 0

    def bind(self, index: int, bindings: Sequence[DestinationBinding]) -> None:
        """Bind as `ConnectTrainer` does, for tests without a plan."""
        self._index = index
        self._bindings = {binding.worker: binding for binding in bindings}

    def handle(self, command: Command, *, epoch: int, round_number: int) -> Result:
        """See `CommandHandler.handle`."""
        self.on_command(command)
        self.handled.append(type(command).__name__)
        match command:
            case ConnectTrainer():
                self.bind(int(self.worker.rpartition("/")[2]), command.bindings)
                self.bound_in = epoch
            case ChangeLinks():
                if command.since != self.bound_in:
                    raise ProtocolError(f"bound in {self.bound_in}, got {command.since}")
                for name in command.gone:
                    self._bindings.pop(name, None)
                self._bindings |= {binding.worker: binding for binding in command.bindings}
                self.bound_in = epoch
            case JoinGroups() | Prepare() | Abort():
                pass
            case Release():
                self.has_released = True
            case Write():
                assert not self.has_released, "the weights of this round are freed"
                links = tuple(self._send(d, command.version) for d in command.destinations)
                return Written(links, 0.0, 0.0)
            case _:
                raise ProtocolError(f"a trainer cannot carry out {type(command).__name__}")
        return Done()

    def _send(self, destination: str, version: int) -> LinkOutcome:
        values = payload(version, self._index)
        digest = payload_digest(values)
        if self.fail_next:
            status = self.fail_next.pop(0)
            return LinkOutcome(destination, status, 0, "", f"told to be {status}")
        if self.corrupt_next:
            self.corrupt_next -= 1
            values = values.copy()
            values[-1] += 1
        try:
            self._fabric.write(self._bindings[destination], self.mode, self._index, values)
        except PeerUnreachable as error:
            return LinkOutcome(destination, LinkStatus.UNREACHABLE, 0, "", str(error))
        return LinkOutcome(destination, LinkStatus.OK, values.nbytes, digest)
