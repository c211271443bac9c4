"""Halves of the backend `push`: the trainer sends whole tensors, and one `apply` makes them all live.

Whole tensors arrive by broadcast or from checkpoint files. The engine rank copies its boxes out of
them into a shadow copy. `apply` raises unless every element of every parameter has arrived.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, final

import msgspec
import xxhash

from windlass.backends.collective_group import Rendezvous, TorchBroadcastGroup, join_group
from windlass.backends.disk_files import (
    DiskEntry,
    DiskIndex,
    TensorFile,
    differing_ties,
    read_boxes,
)
from windlass.checkpoint_files import ADAPTER, checkpoint_files, require_file
from windlass.config import CollectiveFabric, UpdateMode
from windlass.control.messages import BeginDriven, Command, Result
from windlass.control.push_messages import JoinPushGroup, ReadFiles, ReceiveTensors
from windlass.errors import ConfigError, PlanError, ProtocolError, TransferFailed
from windlass.layout.dtypes import cast_refusal
from windlass.layout.manifest import Shard, ShardManifest, contiguous_strides
from windlass.memory.ops import MemoryOps
from windlass.memory.packing import StridedCopy
from windlass.memory.place import memory_at
from windlass.net.clock import Deadline
from windlass.net.messages import RoundId
from windlass.planning.plan import TransferPlan
from windlass.transfer.arena import aligned_offsets
from windlass.transfer.bindings import DestinationBinding, GroupOffer, WireTensor
from windlass.transfer.destination import ShadowCopy

if TYPE_CHECKING:
    import torch

    from windlass.memory.cuda.gpu import Gpu


def signature_of_group(offer: GroupOffer, fabric: CollectiveFabric) -> str:
    """Return a digest of the offer and the fabric. The members of a group compare it before they connect."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((offer, fabric)))


STAMP_NBYTES = 16
"""Bytes after the tensors of a bucket. They are different in every bucket (`ReceiveTensors.stamp`)."""


def wire_offsets(tensors: Sequence[WireTensor]) -> tuple[tuple[int, ...], int]:
    """Return the aligned byte offset of each tensor in a bucket, and the number of bytes that the tensors fill."""
    return aligned_offsets(tensor.nbytes for tensor in tensors)


@final
class PushSender:
    """Trainer half of one leader: rank 0 of a broadcast group with all engine ranks.

    Args:
        name: name of the group, unique among the groups of all leaders.
        members: name of the leader, followed by the engine ranks.
        host: address of this process that the engines can reach.
        bucket_nbytes: maximum number of bytes of a bucket.
        fabric: gloo or NCCL.
        deadline_s: seconds to form the group.

    Attributes:
        offer: offer of the group; the engines must join it (`JoinPushGroup`) while this rank calls `join`.
        stamp: `ReceiveTensors.stamp` of the bucket that `fill` has filled; empty before the first.

    Raises:
        ConfigError: `host` is not an address of this host.
        TransferFailed: this process cannot host the group.
    """

    def __init__(
        self,
        name: str,
        members: tuple[str, ...],
        *,
        host: str,
        bucket_nbytes: int,
        fabric: CollectiveFabric,
        deadline_s: float,
    ) -> None:
        self._fabric, self._deadline_s = fabric, deadline_s
        self._rendezvous = Rendezvous(host, deadline_s)
        self._limit_nbytes, self.stamp = bucket_nbytes, ""
        room = (bucket_nbytes + STAMP_NBYTES,)
        self.offer = GroupOffer(name, members, host, self._rendezvous.port, (), room)
        self._group: TorchBroadcastGroup | None = None
        self._nbytes = 0

    def join(self, gpu: Gpu | None) -> None:
        """Enter the group. Collective: all engine ranks must carry out `JoinPushGroup` at the same time.

        Args:
            gpu: GPU whose kernels fill the bucket; None for a bucket in host memory.

        Raises:
            ConfigError, PlanError, PeerTimeout, TransferFailed: see `join_group`.
        """
        self._group = join_group(
            self.offer,
            self.offer.source,
            fabric=self._fabric,
            num_buffers=1,
            signature=signature_of_group(self.offer, self._fabric),
            host=self.offer.host,
            deadline=Deadline.after(self._deadline_s, "join"),
            hosted=self._rendezvous,
            gpu=gpu,
        )

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> tuple[WireTensor, ...]:
        """Copy whole tensors into the bucket; return their descriptions, for `ReceiveTensors`.

        Raises:
            ConfigError: the tensors do not fit into a bucket.
            UnsupportedLayout: Windlass does not support the dtype of a tensor.
            ProtocolError: `join` was not called.
            TransferFailed: the group has failed. A broadcast that failed may still send its bucket, so this method
                leaves the bucket as it is.
        """
        import torch

        from windlass.memory.torch_dtypes import dtype_of

        specs = tuple(
            WireTensor(name, dtype_of(name, tensor), tuple(tensor.shape))
            for name, tensor in tensors.items()
        )
        offsets, nbytes = wire_offsets(specs)
        if nbytes > self._limit_nbytes:
            raise ConfigError(
                f"broadcast: the tensors of one call must fit into {self._limit_nbytes} bytes, got {nbytes}; send fewer "
                "tensors per call"
            )
        group, stamp = self._require_group(), bytearray(secrets.token_bytes(STAMP_NBYTES))
        for offset, tensor in zip(offsets, tensors.values(), strict=True):
            group.put(0, offset, tensor)
        group.put(0, nbytes, torch.frombuffer(stamp, dtype=torch.uint8))
        self._nbytes, self.stamp = nbytes + STAMP_NBYTES, stamp.hex()
        return specs

    def send(self, deadline_s: float) -> None:
        """Broadcast the tensors of the last `fill`, and wait until the bucket may be filled again.

        Raises:
            TransferFailed: the broadcast failed, or did not end within `deadline_s`. The group is then broken.
            TransferOutcomeUnknown: see `TorchBroadcastGroup.drain`.
            ProtocolError: `join` was not called.
        """
        group = self._require_group()
        group.start(0, self._nbytes, deadline_s)
        group.finish(0, deadline_s)
        group.drain(deadline_s)

    def give_up(self) -> None:
        """Make `join` or `send`, which another thread may be in, fail at once. The group cannot be used any more."""
        if self._group is None:
            self._rendezvous.release(self.offer)
        else:
            self._group.abort()

    def close(self) -> None:
        """Leave the broadcast group. Idempotent."""
        if self._group is not None:
            self._group.abort()

    def _require_group(self) -> TorchBroadcastGroup:
        """Return the group; raise ProtocolError if `join` was not called."""
        if self._group is None:
            raise ProtocolError(f"group {self.offer.name} does not exist yet; call join first")
        return self._group


@final
class PushReceiver:
    """Engine half: `receive_bucket` and `read_files` receive bytes, `apply` makes them live.

    A group that was joined for one update is used again in the next.

    Args:
        manifest: manifest of this rank.
        addresses: addresses of the live parameters, in manifest order.
        host: address at which leaders (the trainer ranks that send) can reach this rank.
    """

    def __init__(self, manifest: ShardManifest, addresses: Sequence[int], host: str) -> None:
        self._manifest, self._host = manifest, host
        self._live = tuple(addresses)
        self._memory: MemoryOps | None = None
        self._shadow: ShadowCopy | None = None
        self._indices = {p.name: i for i, p in enumerate(manifest.parameters)}
        self._shards: dict[str, list[tuple[int, Shard]]] = {}
        for row, shard in enumerate(manifest.shards()):
            self._shards.setdefault(shard.tensor, []).append((row, shard))
        for alias, tensor in manifest.aliases.items():
            self._shards.setdefault(alias, []).extend(self._shards.get(tensor, ()))
        self._groups: dict[str, TorchBroadcastGroup] = {}
        self._missing: set[int] = set()
        self._arrived: dict[int, str] = {}
        """Row of a shard -> name under which its tensor has arrived in this update."""

    def connect(self, plan: TransferPlan, mode: UpdateMode) -> DestinationBinding:  # noqa: ARG002
        """Raise ProtocolError, because a publish cannot use this backend."""
        raise ProtocolError("push: a publish cannot use this backend; use windlass.RolloutCallback")

    def carry_out(self, command: Command, round_id: RoundId) -> Result | None:  # noqa: ARG002
        """Carry out a command of the controller: begin an update, join a group, or receive tensors or files.

        Raises:
            ProtocolError: the backend has no such command, or no update has begun.
            WindlassError: another error; see `begin`, `join_named`, `receive_bucket` and `read_files`.
        """
        match command:
            case BeginDriven():
                self.begin()
            case JoinPushGroup():
                self.join_named(command.offer, command.fabric, command.deadline_s)
            case ReceiveTensors():
                self.receive_bucket(
                    command.group, command.tensors, command.stamp, command.deadline_s
                )
            case ReadFiles():
                self.read_files(command.folder)
            case _:
                raise ProtocolError(f"a push cannot carry out {type(command).__name__}")
        return None

    def begin(self) -> None:
        """Begin an update, and mark all tensors as missing. The first call allocates the shadow copy.

        Raises:
            PlanError: the parameters are in several memories, for example on two GPUs.
            TransferFailed: there is no memory for the shadow copy.
            TransportUnavailable: kernels cannot be compiled for the GPU.
        """
        if self._memory is None:
            self._memory = memory_at(self._live, self._manifest.worker)
        if self._shadow is None:
            self._shadow = ShadowCopy(self._memory, self._manifest, self._live)
        self._missing = {row for shards in self._shards.values() for row, _ in shards}
        self._arrived = {}

    def join_named(self, offer: GroupOffer, fabric: CollectiveFabric, deadline_s: float) -> None:
        """Enter the broadcast group that a leader offers. First leave an older group of the same name.

        Raises:
            PlanError: members disagree about the group.
            ConfigError, PeerTimeout, TransferFailed: see `join_group`.
            ProtocolError: no update has begun.
        """
        old = self._groups.pop(offer.name, None)
        if old is not None:
            old.abort()
        self._groups[offer.name] = join_group(
            offer,
            self._manifest.worker,
            fabric=fabric,
            num_buffers=1,
            signature=signature_of_group(offer, fabric),
            host=self._host,
            deadline=Deadline.after(deadline_s, "join"),
            gpu=self._require_update()[0].gpu,
        )

    def receive_bucket(
        self, name: str, tensors: Sequence[WireTensor], stamp: str, deadline_s: float
    ) -> None:
        """Receive one bucket of whole tensors. Copy this rank's boxes into the shadow copy, and record them as arrived.

        Raises:
            PlanError: a tensor does not belong to this rank's model or has another shape, or its dtype cannot be cast.
            ProtocolError: no update has begun.
            TransferFailed: the group was not formed or has failed, the broadcast failed, the bucket has another stamp, a
                cast overflowed, or tied weights have arrived with different values.
            TransferOutcomeUnknown: see `TorchBroadcastGroup.drain`.

        After any error, this rank leaves the group, so that the leader's broadcast fails at once instead of at its
        deadline.
        """
        group = self._groups.get(name)
        if group is None:
            raise TransferFailed(f"group {name} was not formed or has failed; form it again")
        try:
            self._receive(group, tensors, stamp, deadline_s)
        except BaseException:
            self._groups.pop(name).abort()
            raise

    def _receive(
        self,
        group: TorchBroadcastGroup,
        tensors: Sequence[WireTensor],
        stamp: str,
        deadline_s: float,
    ) -> None:
        """Receive one bucket in `group`.

        Raises:
            PlanError, ProtocolError, TransferFailed, TransferOutcomeUnknown: see `receive_bucket`.
        """
        self._check_tensors(tensors)
        offsets, nbytes = wire_offsets(tensors)
        memory, shadow = self._require_update()
        found = [
            (row, self._box_of(shadow, shard, tensor, group.buffer(0) + offset))
            for tensor, offset in zip(tensors, offsets, strict=True)
            for row, shard in self._shards.get(tensor.name, ())
        ]
        copies = memory.prepare([copy for _, copy in found])
        try:
            group.start(0, nbytes + STAMP_NBYTES, deadline_s)
            group.finish(0, deadline_s)
            # `_differing` runs in torch's own stream, which does not wait for the broadcast.
            group.drain(deadline_s)
            if group.read(0, nbytes, STAMP_NBYTES).hex() != stamp:
                # The leader has sent this bucket in a call that this rank did not carry out.
                raise TransferFailed(
                    "the bucket belongs to another call, which not all engines have received; form the group again"
                )
            differing = self._differing(memory, found)
            copies.run()
            group.drain(deadline_s)
            copies.check()
        finally:
            copies.close()
        if differing:
            # The copies have replaced the values that arrived first. So this update can no longer be applied.
            self._missing.update(row for row, _ in found)
            raise TransferFailed(f"{self._manifest.worker}: {differing}")
        self._missing.difference_update(row for row, _ in found)

    def read_files(self, folder: str) -> None:
        """Read this rank's boxes from the safetensors files of a checkpoint folder into the shadow copy.

        Read the files that an engine would load from this folder, and the file of an adapter if the folder has one. If two
        files contain a tensor of the same name, use the tensor of the later file, as engines do.

        Raises:
            ConfigError: the index of the folder is invalid, or names a missing file.
            PlanError: a tensor of the model has another shape in the files.
            ProtocolError: no update has begun.
            TransferFailed: the folder has no safetensors file, a file is incomplete, a value cannot be cast, or tied
                weights have different values.
        """
        home = Path(folder)
        files = checkpoint_files(home)
        if (adapter := home / ADAPTER).exists():
            files.append(adapter)
        if not files:
            raise TransferFailed(f"disk: {home}: contains no safetensors file")
        indices = _latest([_index_of(path, home) for path in files])
        shapes = self._shapes
        for entry in (entry for index in indices for entry in index.entries):
            if entry.tensor in shapes:
                self._check_shape(entry.tensor, entry.sizes, shapes)
        memory, shadow = self._require_update()
        arguments = home, indices, self._manifest, shadow.addresses, memory
        if unreadable := read_boxes(*arguments):
            raise TransferFailed(f"disk: {home}: cannot read {', '.join(sorted(set(unreadable)))}")
        if differing := differing_ties(*arguments):
            raise TransferFailed(f"{self._manifest.worker}: {differing}")
        for index in indices:
            for entry in index.entries:
                self._missing.difference_update(
                    row for row, _ in self._shards.get(entry.tensor, ())
                )

    def apply(self) -> None:
        """Copy the shadow copy over the live parameters.

        Raises:
            PlanError: a part of a parameter did not arrive; the live parameters are unchanged.
            ProtocolError: no update has begun.
            TransferFailed, TransferOutcomeUnknown: see `ShadowCopy.copy_over`.
        """
        self._check_complete()
        self._require_update()[1].copy_over()

    def verify(self, version: int, expected: Mapping[str, str]) -> tuple[str, ...]:  # noqa: ARG002
        """Check that every part of every parameter has arrived.

        Return an empty tuple: a push has no digests to compare.

        Raises:
            PlanError: a part of a parameter did not arrive.
        """
        self._check_complete()
        return ()

    def close(self) -> None:
        """Leave all broadcast groups and free the shadow copy. Idempotent."""
        for group in self._groups.values():
            group.abort()
        self._groups = {}
        if self._shadow is not None:
            self._shadow.close()
            self._shadow = None

    def _require_update(self) -> tuple[MemoryOps, ShadowCopy]:
        """Return the memory and the shadow copy of the update; raise ProtocolError if no update has begun."""
        if self._memory is None or self._shadow is None:
            raise ProtocolError(f"{self._manifest.worker}: no update has begun")
        return self._memory, self._shadow

    def _check_complete(self) -> None:
        """Raise PlanError if a part of a parameter has not arrived in this update."""
        if self._missing:
            missing = sorted(
                name
                for name, rows in self._shards.items()
                if any(r in self._missing for r, _ in rows)
            )
            raise PlanError(
                f"{self._manifest.worker}: {len(missing)} tensors did not arrive, the first is "
                f"{missing[0]!r}"
            )

    def _check_tensors(self, tensors: Sequence[WireTensor]) -> None:
        """Raise PlanError if a tensor is not in the engine's model, has another shape, or cannot be cast."""
        shapes, worker = self._shapes, self._manifest.worker
        for tensor in tensors:
            if tensor.name not in shapes:
                raise PlanError(
                    f"{worker}: must receive a tensor of the engine's model, got {tensor.name!r}"
                )
            self._check_shape(tensor.name, tensor.shape, shapes)
            for _, shard in self._shards.get(tensor.name, ()):
                wanted = self._manifest.parameters[self._indices[shard.parameter]].dtype
                if refusal := cast_refusal(tensor.dtype, wanted):
                    raise PlanError(f"{worker}: tensor {tensor.name!r}: {refusal}")

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Name or alias of each tensor of the engine's model -> its shape."""
        shapes = {spec.name: spec.shape for spec in self._manifest.tensors}
        return shapes | {alias: shapes[name] for alias, name in self._manifest.aliases.items()}

    def _check_shape(
        self, name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Raise PlanError if a tensor has another shape than in the engine's model. `shapes`: see `_shapes`."""
        if shapes[name] != shape:
            raise PlanError(
                f"{self._manifest.worker}: shape of {name!r} must be {shapes[name]}, got {shape}"
            )

    def _differing(self, memory: MemoryOps, found: Sequence[tuple[int, StridedCopy]]) -> str:
        """Compare tied tensors before their copies run; return the message about a difference, or an empty string.

        Tied tensors have two names in the checkpoint and one place in this rank's parameters. The tensor that arrives
        first in an update is copied to this place. The other tensor must have the same values.

        Args:
            memory: memory of the bucket and of the shadow copy.
            found: copies that are about to run, as pairs (row of a shard, copy of this shard from the bucket).
        """
        differing, copied = "", dict[int, StridedCopy]()
        for row, copy in found:
            earlier = self._arrived.setdefault(row, copy.tensor)
            if earlier != copy.tensor:
                sent = memory.view(copy.src_address, copy.sizes, copy.src_strides, copy.src_dtype)
                held = memory.view(copy.dst_address, copy.sizes, copy.dst_strides, copy.dst_dtype)
                if (other := copied.get(row)) is not None:
                    # The earlier tensor is in the same bucket, and has not been copied yet.
                    other_sent = other.src_address, other.sizes, other.src_strides, other.src_dtype
                    held = memory.view(*other_sent).to(held.dtype)
                sent = sent.to(held.dtype)
                # NaN is not equal to NaN.
                if not bool(((sent == held) | ((sent != sent) & (held != held))).all()):
                    differing = (
                        f"the engine ties {copy.tensor!r} to {earlier!r}, but they have arrived with different values; "
                        "keep the two tied in training, or serve the model with tie_word_embeddings=false"
                    )
            copied[row] = copy
        return differing

    def _box_of(
        self, shadow: ShadowCopy, shard: Shard, tensor: WireTensor, address: int
    ) -> StridedCopy:
        """Return the operation that copies a shard's box out of the whole tensor at `address` into the shadow copy."""
        position = self._indices[shard.parameter]
        dtype = self._manifest.parameters[position].dtype
        strides = contiguous_strides(tensor.shape, tensor.dtype.itemsize)
        starts = zip(shard.box.offsets, strides, strict=True)
        return StridedCopy(
            sizes=shard.box.sizes or (1,),
            src_address=address + sum(start * stride for start, stride in starts),
            src_strides=strides or (tensor.dtype.itemsize,),
            src_dtype=tensor.dtype,
            dst_address=shadow.addresses[position] + shard.offset_bytes,
            dst_strides=shard.strides_bytes or (dtype.itemsize,),
            dst_dtype=dtype,
            tensor=tensor.name,
        )


def _index_of(path: Path, home: Path) -> DiskIndex:
    """Return an index of a checkpoint file in the folder `home`, with one entry per tensor.

    The field `worker` is the file's path in `home`, because `read_boxes` returns this field for unreadable files.

    Raises:
        ConfigError: the path does not exist, or is not a file.
        TransferFailed: the file cannot be read.
    """
    require_file(path)
    try:
        with TensorFile(path) as file:
            shapes = file.shapes
    except OSError as error:
        raise TransferFailed(f"disk: {path}: {error}") from error
    entries = tuple(
        DiskEntry(name, name, (0,) * len(shape), shape) for name, shape in shapes.items()
    )
    name = str(path.relative_to(home))
    return DiskIndex(-1, name, name, path.stat().st_size, "", entries, {})


def _latest(indices: Sequence[DiskIndex]) -> list[DiskIndex]:
    """Return the indices without the entries of tensors that a later file contains too."""
    last = {entry.tensor: number for number, index in enumerate(indices) for entry in index.entries}
    return [
        msgspec.structs.replace(
            index, entries=tuple(e for e in index.entries if last[e.tensor] == number)
        )
        for number, index in enumerate(indices)
    ]
