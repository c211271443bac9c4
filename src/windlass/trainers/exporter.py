"""Capture which checkpoint elements the parameters of a trainer become when its framework exports the model.

`captured_export` gives a number to every element of every parameter on every rank. It then runs the framework's own
exporter once per digit of these numbers, while the parameters contain this digit instead of weights. Each rank finds in
the exported tensors the elements that come from its own parameters. A last run on random values checks every element of
every exported tensor. `engines/capture` runs an engine's own loader in the same way.

The weights do not change, because the parameters use other memory during each run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed.tensor import DTensor

from windlass.element_ids.codes import CheckpointSpec, Codes
from windlass.element_ids.ids import ElementIds
from windlass.element_ids.memory import fingerprint, memory_of
from windlass.errors import ConfigError, PeerTimeout, UnsupportedLayout
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.layout.naming.patterns import said
from windlass.layout.naming.place import Placed, PlacedShard
from windlass.memory.torch_dtypes import dtype_of
from windlass.transfer.dtensor import HeldTensor
from windlass.transfer.saved_names import MAX_PIECES, local_part

Exporter = Callable[[list[torch.nn.Module]], Iterable[tuple[str, torch.Tensor]]]
"""Function that takes the model's chunks on this rank, and yields the name and the whole tensor of every checkpoint tensor.

It must yield every tensor on every rank, and may be collective.
Example: `mbridge.AutoBridge.from_pretrained(folder).export_weights`.
"""
EXACT_NUMEL = 1 << 16
"""Largest exported tensor, in elements, that is read element by element, which takes 8 bytes per element. Larger tensors
are read by row. They are read again element by element if the rows have no common pattern."""
_NUM_CALLS = itertools.count()
"""Number of the next capture in this process. Every rank makes the same captures in the same order."""
_SEED = 11
_Key = tuple[str, int]
"""Name of an exported tensor, and how often the exporter has yielded this name before."""


def captured_export(
    tensors: Mapping[str, torch.Tensor],
    export: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    *,
    required: Collection[str],
    deadline_s: float,
) -> dict[str, Placed]:
    """Return for each local tensor the boxes of checkpoint tensors to which `export` copies its elements. Collective.

    The exporter may gather, split, join, permute, transpose, repeat and cast elements, and may leave out padding. The
    call needs memory for a second copy of `tensors`, 8 bytes for each row of the exported tensors, and the memory that
    the exporter itself needs. The exporter runs once for every 7 bits (4 bits with float8) of the number of elements on
    all ranks, and once more. These are 6 runs for up to 34 billion elements, and 7 runs for up to 4 trillion.

    Args:
        tensors: contiguous parameters and buffers of this rank by name. The result has an entry for each tensor that
            the exporter uses on this rank.
        export: function that runs the exporter on all ranks. It yields the same names in every run.
        required: names of the tensors that must be exported on at least one rank.
        deadline_s: seconds to wait for other ranks. The same limit applies to each gloo or NCCL collective of the
            exporter.

    Raises:
        ConfigError: the exporter raised an error on a rank, or yielded nothing.
        UnsupportedLayout: an exported tensor has elements that are not copied from a parameter, or the exporter leaves
            out a parameter (the message has the names of all such tensors), or copies two parameters of a rank to the same
            elements.
        PeerTimeout: another rank did not finish within `deadline_s`.
    """
    peers = _Peers(deadline_s)
    codes, own = _codes_of(tensors, peers)
    found: dict[str, list[PlacedShard]] = {}
    scattered: frozenset[_Key] = frozenset()
    while True:
        error: Exception | None = None
        again = frozenset[_Key]()
        try:
            with _deadline_on_collectives(deadline_s):
                found, again = _attempt(tensors, export, codes, own, scattered)
        except Exception as raised:  # noqa: BLE001 - an exporter may raise anything
            error = raised
        missing = [name for name in sorted(required) if tensors[name].numel() and name not in found]
        reports = peers.report(
            _Report(
                refusal=str(error) if isinstance(error, UnsupportedLayout) else "",
                failure="" if error is None else f"{type(error).__name__}: {error}",
                again=tuple(again),
                exported=tuple(found),
                missing=tuple(missing),
            )
        )
        _require_success(reports, error)
        if not (more := {key for report in reports for key in report.again}):
            break
        # The exporter is collective, so it runs again on every rank.
        scattered |= more
    return {
        name: Placed(tuple(shards), _num_unused(tensors[name], shards))
        for name, shards in found.items()
    }


class _Report(msgspec.Struct, frozen=True):
    """Outcome of one attempt on one rank.

    Attributes:
        refusal: reason why Windlass refuses the exporter; empty if it does not.
        failure: type and text of the error of the attempt; empty without an error.
        again: exported tensors that another attempt must read element by element.
        exported: names of the parameters that the exporter used.
        missing: names of required parameters that the exporter did not use; empty parameters do not count.
    """

    refusal: str
    failure: str
    again: tuple[_Key, ...]
    exported: tuple[str, ...]
    missing: tuple[str, ...]


def _require_success(reports: Sequence[_Report], error: Exception | None) -> None:
    """Raise an error if an attempt failed on any rank. All ranks have the same reports, so all raise the same error.

    Args:
        reports: reports of all ranks about the attempt.
        error: exception of the attempt on this rank; None if the attempt succeeded here. It becomes the cause of the raised
            error.

    Raises:
        ConfigError: the exporter raised an error on a rank.
        UnsupportedLayout: on some rank the exporter yields computed values instead of elements of a parameter; or this
            is the last attempt, and a required parameter was exported on no rank.
    """
    for rank, report in enumerate(reports):
        if report.failure and not report.refusal:
            raise ConfigError(f"exporter: failed on rank {rank}: {report.failure}") from error
    for rank, report in enumerate(reports):
        if report.refusal:
            raise UnsupportedLayout(f"{report.refusal} (rank {rank})") from error
    # If several ranks have equal copies of a parameter, some exporters read only one rank's copy. So a parameter is
    # missing only if no rank has exported it.
    exported = {name for report in reports for name in report.exported}
    missing = {name for report in reports for name in report.missing} - exported
    if missing and not any(report.again for report in reports):
        raise UnsupportedLayout(
            f"exporter: must export every parameter, got no elements of {said(missing)}; name their prefixes in "
            "`ignore` if no engine needs them"
        )


def exported_manifest(
    held: Sequence[HeldTensor],
    export: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    worker: str,
    *,
    deadline_s: float,
) -> ShardManifest:
    """Return the manifest of a module's tensors. Collective.

    The exporter determines the checkpoint tensors and their places in the module's tensors.

    Args:
        held: tensors of the module on this rank.
        export: see `captured_export`.
        worker: name of this rank.
        deadline_s: see `captured_export`.

    Raises:
        UnsupportedLayout: a tensor is not contiguous; or see `captured_export`.
        ConfigError, PeerTimeout: see `captured_export`.
        ManifestError: the exported places contradict each other; see `ManifestBuilder`.
    """
    # The exporter must read the memory that `captured_export` fills with codes. For a DTensor, this is its local
    # tensor.
    tensors = {one.name: local_part(one.tensor) for one in held}
    refuse_strided(tensors)
    required = [one.name for one in held if not one.is_buffer]
    found = captured_export(tensors, export, required=required, deadline_s=deadline_s)
    builder = ManifestBuilder(worker, Role.TRAINER)
    for name, tensor in tensors.items():
        placed = found.get(name, Placed((), tensor.numel()))
        add_placed(builder, name, tensor, placed)
    return builder.build()


def refuse_strided(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise UnsupportedLayout unless all tensors are contiguous."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise UnsupportedLayout(
                f"parameter {name!r} must be contiguous, got strides {tuple(tensor.stride())}"
            )


def add_placed(builder: ManifestBuilder, name: str, tensor: torch.Tensor, placed: Placed) -> None:
    """Add a contiguous tensor, and its boxes of checkpoint tensors, to a manifest.

    Raises:
        UnsupportedLayout: Windlass cannot send the tensor's dtype.
        ManifestError: see `ManifestBuilder.add_parameter` and `ManifestBuilder.add_shard`.
    """
    itemsize = tensor.element_size()
    builder.add_parameter(
        name,
        nbytes=tensor.nbytes,
        dtype=dtype_of(name, tensor),
        padding_nbytes=placed.padding * itemsize,
    )
    for shard in placed.shards:
        builder.add_shard(
            shard.tensor,
            shard.global_shape,
            shard.box,
            name,
            offset_bytes=shard.offset * itemsize,
            strides_bytes=tuple(step * itemsize for step in shard.strides),
        )


def _num_unused(tensor: torch.Tensor, shards: Iterable[PlacedShard]) -> int:
    """Return the number of a tensor's elements that the exporter leaves out, such as rows that pad a vocabulary."""
    return max(0, tensor.numel() - sum(shard.box.numel for shard in shards))


def _codes_of(tensors: Mapping[str, torch.Tensor], peers: _Peers) -> tuple[Codes, range]:
    """Return codes for the elements of all ranks, and the range of this rank's tensors in `Codes.specs`."""
    own = [
        CheckpointSpec(name, tuple(tensor.shape), dtype_of(name, tensor))
        for name, tensor in tensors.items()
        if tensor.numel()
    ]
    runs = [
        (sum(spec.numel for spec in run), str(dtype))
        for dtype, run in itertools.groupby(own, lambda spec: spec.dtype)
    ]
    sizes = [
        msgspec.msgpack.decode(data, type=list[tuple[int, str]])
        for data in peers.exchange("sizes", msgspec.msgpack.encode(runs))
    ]
    specs: list[CheckpointSpec] = []
    chosen = range(0)
    for rank, others in enumerate(sizes):
        if rank == peers.rank:
            chosen = range(len(specs), len(specs) + len(own))
            specs += own
        else:
            # Only the sizes matter: this rank does not need the names of other ranks' tensors.
            specs += [
                CheckpointSpec(f"rank {rank}, part {part}", (numel,), DType(dtype))
                for part, (numel, dtype) in enumerate(others)
            ]
    devices = {tensor.device for tensor in tensors.values()}
    return Codes(specs, devices.pop() if len(devices) == 1 else "cpu"), chosen


def _attempt(
    tensors: Mapping[str, torch.Tensor],
    export: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    codes: Codes,
    own: range,
    scattered: frozenset[_Key],
) -> tuple[dict[str, list[PlacedShard]], frozenset[_Key]]:
    """Run the exporter several times, and find the elements of this rank's tensors in its output.

    In each run but the last, each element of the tensors contains one digit of its number in `codes`. In the last run,
    the elements contain random values.

    Args:
        tensors: see `captured_export`.
        export: see `captured_export`.
        codes: a unique number for each element on each rank, as digits; see `Codes`.
        own: indices of this rank's tensors in `codes`.
        scattered: exported tensors to read element by element, see `EXACT_NUMEL`.

    Returns:
        The boxes of checkpoint tensors in each tensor of this rank, and the keys of the exported tensors that another
        attempt must read element by element.

    Raises:
        UnsupportedLayout: the exporter computes values.
        ConfigError: the exporter yields nothing.
    """
    exported = _observed(tensors, export, codes, own, scattered)
    if not exported:
        raise ConfigError("the exporter yielded no tensor")
    found: dict[str, list[PlacedShard]] = {}
    wrong: set[_Key] = set()
    for key, one in exported.items():
        if one.is_constant:
            continue
        sources = one.numbers.sources(codes, one.shape, own, MAX_PIECES) if one.is_right else None
        if sources is None:
            wrong.add(key)
        for spec, boxes in sources or ():
            found.setdefault(spec.name, []).extend(
                PlacedShard(key[0], one.shape, placed.box, placed.offset, placed.strides)
                for placed in boxes
            )
    if computed := {name for name, count in wrong if exported[name, count].numbers.by_place}:
        raise UnsupportedLayout(
            f"exporter: must copy elements of parameters, got computed values in {said(computed)}; pass `family` to "
            "use a naming table, or an exporter that does not scale, add or quantise"
        )
    _refuse_two_sources(found)
    return found, frozenset(wrong)


def _refuse_two_sources(found: Mapping[str, list[PlacedShard]]) -> None:
    """Raise UnsupportedLayout if two parameters of this rank are exported to the same elements of a checkpoint tensor."""
    first: dict[tuple[str, object], str] = {}
    for name, shards in found.items():
        for shard in shards:
            other = first.setdefault((shard.tensor, shard.box), name)
            if other != name:
                raise UnsupportedLayout(
                    f"exporter: must yield {shard.tensor!r} from one parameter, got {other!r} and {name!r}"
                )


@dataclass(slots=True)
class _Exported:
    """One exported tensor.

    Attributes:
        shape: shape of the tensor.
        numbers: numbers of its elements.
        print: fingerprint of the tensor in the first run.
        padding: fingerprint of the values that come from no parameter, in the last run on digits.
        is_constant: True if the last run gives the same values as the first, such as rotary frequencies.
        is_right: True if the run on random values gives the values that the numbers predict.
        last_run: number of the last run that yielded this tensor.
    """

    shape: tuple[int, ...]
    numbers: ElementIds
    print: int
    padding: int = 0
    is_constant: bool = False
    is_right: bool = False
    last_run: int = 0


def _observed(
    tensors: Mapping[str, torch.Tensor],
    export: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    codes: Codes,
    own: range,
    scattered: frozenset[_Key],
) -> dict[_Key, _Exported]:
    """Run the exporter once per digit of the element numbers, and then on random values. Return each exported tensor.

    The result says which elements each exported tensor contains, and whether the run on random values confirms it. For
    arguments see `_attempt`.

    Raises:
        ConfigError: the exporter yields other tensors in a later run, or something other than names and tensors.
    """
    chosen = frozenset(codes.specs[index].name for index in own)
    exported: dict[_Key, _Exported] = {}
    for position in range(codes.num_digits):
        with _filled(tensors, codes.digits(position, chosen)):
            for key, tensor in _each(export()):
                if not position:
                    by_place = tensor.numel() <= EXACT_NUMEL or key in scattered
                    numbers = ElementIds(tensor, by_place=by_place)
                    prints = fingerprint(memory_of(tensor))
                    exported[key] = _Exported(tuple(tensor.shape), numbers, prints)
                one = _same_as_before(exported, key, tensor, position)
                one.numbers.observe(tensor, codes, position)
                if position == codes.num_digits - 1:
                    one.padding = one.numbers.check(tensor, codes, None).padding
    with _filled(tensors, codes.random(_SEED, chosen)):
        for key, tensor in _each(export()):
            one = _same_as_before(exported, key, tensor, codes.num_digits)
            one.is_constant = fingerprint(memory_of(tensor)) == one.print
            check = one.numbers.check(tensor, codes, _SEED)
            # Elements that come from no parameter (padding) must have the same values in every run.
            one.is_right = check.is_right and check.padding == one.padding
    gone = [name for (name, _), one in exported.items() if one.last_run != codes.num_digits]
    if gone:
        raise ConfigError(
            f"the exporter must yield the same tensors in every run, got no {said(gone)} in the last run"
        )
    return exported


def _same_as_before(
    exported: Mapping[_Key, _Exported], key: _Key, tensor: torch.Tensor, run: int
) -> _Exported:
    """Return the entry that the first run made for an exported tensor, and record that `run` has yielded it again.

    Raises:
        ConfigError: the first run has not yielded this tensor, or has yielded it with another shape.
    """
    one = exported.get(key)
    if one is None or one.shape != tuple(tensor.shape):
        before = "no such tensor" if one is None else f"shape {one.shape}"
        raise ConfigError(
            f"the exporter must yield the same tensors in every run, got {key[0]!r} of shape {tuple(tensor.shape)}, but "
            f"{before} in the first run"
        )
    one.last_run = run
    return one


def _each(
    exported: Iterable[tuple[str, torch.Tensor | None]],
) -> Iterator[tuple[_Key, torch.Tensor]]:
    """Yield the exported tensors, whole and contiguous, each with its key.

    Skip None, empty tensors, and complex tensors (which are no weights). Collective if the exporter yields DTensors.

    Raises:
        ConfigError: the exporter has yielded something other than names and tensors.
    """
    counts = Counter[str]()
    with torch.no_grad():
        for item in exported:
            name, tensor = _pair(item)
            # Exporters of some frameworks yield None on the ranks that do not save the tensor.
            if tensor is None or not tensor.numel() or tensor.is_complex():
                continue
            key = (name, counts[name])
            counts[name] += 1
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            yield key, whole.detach().contiguous()


def _pair(item: object) -> tuple[str, torch.Tensor | None]:
    """Return the name and the tensor that an exporter has yielded.

    Raises:
        ConfigError: the item is not a pair of a name and a tensor (or None), or the tensor has no memory.
    """
    if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], str):
        shown = repr(item) if isinstance(item, str) else type(item).__name__
        raise ConfigError(f"the exporter must yield pairs of a name and a tensor, got {shown}")
    name, tensor = item
    if tensor is not None and (not isinstance(tensor, torch.Tensor) or tensor.is_meta):
        what = (
            "a tensor on the meta device"
            if isinstance(tensor, torch.Tensor)
            else f"a {type(tensor).__name__}"
        )
        raise ConfigError(f"the exporter must yield tensors with memory, got {what} for {name!r}")
    return name, tensor


@contextmanager
def _filled(
    tensors: Mapping[str, torch.Tensor], values: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[None]:
    """Inside the block, give the tensors new memory that contains `values`. At the end, give them their memory back."""
    before = {name: tensor.data for name, tensor in tensors.items()}
    try:
        for name, value in values:
            tensors[name].data = value.to(before[name].device)
        yield
    finally:
        for name, memory in before.items():
            tensors[name].data = memory


class _Peers:
    """All ranks of the default process group. They exchange bytes through the group's store."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline = timedelta(seconds=deadline_s)
        self._call, self._num_reports = next(_NUM_CALLS), 0
        is_alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if is_alone else dist.get_rank()
        self._world_size = 1 if is_alone else dist.get_world_size()

    def report(self, mine: _Report) -> list[_Report]:
        """Send this rank's report about one attempt to all ranks, and return the reports of all ranks; see `exchange`."""
        self._num_reports += 1
        found = self.exchange(f"report {self._num_reports}", msgspec.msgpack.encode(mine))
        return [msgspec.msgpack.decode(data, type=_Report) for data in found]

    def exchange(self, stage: str, mine: bytes) -> list[bytes]:
        """Send `mine` to all ranks, and return the bytes of every rank, in rank order. All ranks use the same `stage`.

        Raises:
            PeerTimeout: a rank did not make the call within the deadline.
            ConfigError: the store cannot be reached.
        """
        if self._world_size == 1:
            return [mine]
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        keys = [
            f"windlass/exporter/{self._call}/{stage}/{rank}" for rank in range(self._world_size)
        ]
        try:
            store.set(keys[self.rank], mine)  # type: ignore[arg-type]
            store.wait(keys, self._deadline)
            return [bytes(store.get(key)) for key in keys]
        except dist.DistStoreError as error:
            raise PeerTimeout(
                f"exporter: not every rank reached the stage {stage!r} within "
                f"{self._deadline.total_seconds():g} s; connect all ranks of the trainer together"
            ) from error
        except RuntimeError as error:
            raise ConfigError(
                f"exporter: the store of torch.distributed must be reachable: {error}"
            ) from error


@contextmanager
def _deadline_on_collectives(deadline_s: float) -> Iterator[None]:
    """Inside the block, limit the timeout of each gloo and NCCL process group to `deadline_s`. Keep shorter timeouts."""
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    from torch.distributed.distributed_c10d import _world

    before: dict[Backend, timedelta] = {}
    for group in _world.pg_map:
        for device in group._device_types:
            backend = group._get_backend(device)
            # Other backends have no timeout that can be changed.
            with suppress(AttributeError):
                before.setdefault(backend, backend.options._timeout)
    deadline = timedelta(seconds=deadline_s)
    try:
        for backend, timeout in before.items():
            backend._set_default_timeout(min(deadline, timeout))
        yield
    finally:
        for backend, timeout in before.items():
            backend._set_default_timeout(timeout)
