"""Record all state of a model that a loader may change, and restore this state.

An engine's loader replaces parameters, moves them to the meta device, registers buffers, sets attributes of
modules, tensors and quantisation methods, and may fail at any point. A snapshot keeps references to every
module, tensor, container and engine object that the model references, and records their contents. `restore` restores
the same objects at the same addresses, because the engine's CUDA graphs and compiled code contain these addresses.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import CellType, FunctionType, MemberDescriptorType
from typing import Any, final

import numpy as np
import torch

from windlass.element_ids.codes import Load
from windlass.element_ids.memory import fingerprint
from windlass.engines.capture.memory import Holding, Kind, Watched, bytes_in, has_memory
from windlass.engines.capture.reach import BUFFERS, Form, Node, contents_of, slots_of, value_of

CHUNK_NBYTES = 32 << 20
"""Maximum number of bytes that a thread copies at a time between a GPU and the host."""
MAX_THREADS = 16
"""Maximum number of threads that copy between a GPU and the host."""
_Pair = tuple[torch.Tensor, torch.Tensor]
"""Memory on a GPU and its copy on the host, as uint8 vectors of the same length."""


@final
class Snapshot:
    """State of a model at the time of construction. A snapshot keeps every tensor of the model alive.

    Args:
        model: model of this rank.
        copies: whether to copy the bytes of tensors, and not only references. The copies of GPU tensors are on the
            GPU if it has enough free memory, else on the host.
        parameters: whether to copy the bytes of parameters; scalar parameters are copied in any case.

    Attributes:
        prints: fingerprints of the copied tensors, by name; empty if `copies` is False.
    """

    def __init__(
        self,
        model: torch.nn.Module | Watched,
        *,
        copies: bool = False,
        parameters: bool = True,
    ) -> None:
        watched = model if isinstance(model, Watched) else Watched(model)
        found = watched.reach
        self._kept: list[tuple[Callable[[Any, Any], None], object, object]] = []
        self._tensors: list[_KeptTensor] = []
        self._empty = [*found.empty]
        for node in found.nodes:
            self._keep(node)
        for item in [node.item for node in found.nodes if isinstance(node.item, BUFFERS)]:
            if (data := bytes_in(item)) is not None:
                self._kept.append((_restore_bytes, item, data.copy()))
        self._globals, self._empty_globals = [*found.globals], [*found.empty_globals]
        held: Mapping[str, Holding] = {}
        if copies:
            held = {
                name: holding
                for name, holding in watched().items()
                if parameters or holding.kind is not Kind.PARAMETER or not holding.tensor.dim()
            }
        self._keep_bytes(held)

    def _keep_bytes(self, held: Mapping[str, Holding]) -> None:
        """Copy tensors and record their fingerprints.

        If the copies of the GPU tensors need more than half of the GPU's free memory, make these copies on the host.
        """
        self._memories = {name: holding.memory() for name, holding in held.items()}
        self.prints = {name: fingerprint(memory) for name, memory in self._memories.items()}
        on_gpu = {n: memory for n, memory in self._memories.items() if memory.is_cuda}
        nbytes = sum(memory.nbytes for memory in on_gpu.values())
        roomy = not nbytes or nbytes < torch.cuda.mem_get_info()[0] // 2
        self._moved = [] if roomy else list(on_gpu)
        self._copies = {
            name: memory.clone()
            for name, memory in self._memories.items()
            if roomy or not memory.is_cuda
        }
        self._on_host = HostCopies([on_gpu[name] for name in self._moved]) if self._moved else None

    def _keep(self, node: Node) -> None:
        """Record the contents of an object. Skip a global object unless it directly contains a tensor, an array or a float.

        Other models and threads may change global objects, so a snapshot restores only those that may depend on weights.
        """
        item, shape = node.item, node.shape
        if node.is_global and not _holds_values(item):
            return
        if shape.has_dict:
            self._kept.append((_refill, vars(item), vars(item).copy()))
        if shape.members:
            self._kept.append((_restore_slots, item, slots_of(item, shape)))
        match shape.form:
            case Form.TENSOR:
                self._tensors.append(_KeptTensor.of(item))
            case Form.DICT | Form.SEQUENCE | Form.SET:
                self._kept += [(_refill, item, kept) for kept in _copies_of(item)]
            case Form.CELL:
                self._kept.append((_restore_cell, item, [*contents_of(item)]))
            case Form.PARTIAL:
                self._kept.append((_restore_partial, item, (item.func, item.args, item.keywords)))
            case Form.FUNCTION:
                self._kept.append((_restore_function, item, (item.__defaults__, item.__kwdefaults__)))  # fmt: skip
            case Form.CLASS:
                self._kept.append((_restore_class, item, dict(vars(item))))
            case _:
                pass

    def restore(self) -> None:
        """Restore the model's objects, and the bytes of the tensors that were copied. Idempotent.

        May be called in any thread, and inside or outside inference mode.
        """
        for container in (*self._empty, *filter(_holds_values, self._empty_globals)):
            container.clear()
        for restore, item, held in self._kept:
            restore(item, held)
        for names, name, value in self._globals:
            if names.get(name) is not value:
                names[name] = value
        for tensor in self._tensors:
            tensor.restore()
        # torch forbids writes to inference tensors outside inference mode.
        with torch.inference_mode():
            for name, copy in self._copies.items():
                self._memories[name].copy_(copy)
        if self._on_host is not None:
            changed = (fingerprint(self._memories[n]) != self.prints[n] for n in self._moved)
            self._on_host.restore([index for index, differs in enumerate(changed) if differs])
        if any(memory.is_cuda for memory in self._memories.values()):
            # The engine's next step may run on another stream.
            torch.cuda.synchronize()


def _refill(container: Any, kept: Any) -> None:
    """Restore the contents of a container and their order, if the contents or the order have changed."""
    # Sets have no order to compare.
    is_set = isinstance(kept, set)
    if container != kept if is_set else not _same(_members(container), _members(kept)):
        container.clear()
        (container.update if isinstance(kept, dict | set) else container.extend)(kept)


def _restore_bytes(item: object, kept: np.ndarray[Any, Any]) -> None:
    """Restore the bytes of an object such as a bytearray, unless the number of its bytes has changed."""
    held = bytes_in(item)
    if held is not None and len(held) == len(kept) and not np.array_equal(held, kept):
        held[:] = kept


def _copies_of(container: Any) -> list[Any]:
    """Return a list with a copy of a container, or an empty list if the container cannot change."""
    if isinstance(container, dict):
        return [dict(_items(container))]
    return [kind(container) for kind in (list, set, deque) if isinstance(container, kind)]


def _members(container: Any) -> tuple[object, ...]:
    """Return the items of a container in their order; of a dict, the keys and then the values."""
    if not isinstance(container, dict):
        return (*container,)
    held = dict(_items(container))
    return (*held, *held.values())


def _items(container: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a dict in their order.

    Do not call the dict's own methods: a subclass may load or compute values there, as the tables of transformers'
    `AutoModel` do.
    """
    if isinstance(container, OrderedDict):
        return OrderedDict.items(container)
    return dict.items(container)


def _restore_slots(item: object, values: dict[MemberDescriptorType, object]) -> None:
    """Assign to each slot of an object its recorded value, unless the slot still has this value."""
    for member, value in values.items():
        if value_of(member, item) is not value:
            # A class written in C may have read-only members. Such a member may create a new value at each access, so the
            # comparison fails although nothing has changed. Python then refuses the assignment.
            with suppress(AttributeError, TypeError):
                member.__set__(item, value)


def _restore_cell(cell: CellType, kept: list[tuple[str, object]]) -> None:
    """Put the recorded value back into a closure's cell, unless the cell still contains it. `kept` is empty for an empty cell."""
    for _, value in kept:
        if not any(held is value for _, held in contents_of(cell)):
            cell.cell_contents = value


def _restore_partial(item: Any, kept: tuple[object, ...]) -> None:
    """Set the recorded function and arguments of a `functools.partial`, unless it still has them."""
    if not _same((item.func, item.args, item.keywords), kept):
        item.__setstate__((*kept, vars(item)))


def _restore_function(function: FunctionType, kept: tuple[Any, Any]) -> None:
    """Set the recorded default values of a function, unless it still has them."""
    if not _same((function.__defaults__, function.__kwdefaults__), kept):
        function.__defaults__, function.__kwdefaults__ = kept


def _restore_class(kind: type, kept: dict[str, object]) -> None:
    """Restore each recorded attribute of a class if its value has changed. Skip names that begin with two underscores."""
    for name, value in kept.items():
        if not name.startswith("__") and vars(kind).get(name) is not value:
            setattr(kind, name, value)


def _holds_values(item: object) -> bool:
    """Return whether an object directly contains a tensor, an array or a float. Such values may depend on weights."""
    held: Iterable[object] = vars(item).values() if type(item).__dictoffset__ else ()
    if isinstance(item, dict):
        held = (*held, *dict.values(item))
    elif isinstance(item, list | tuple | set | deque):
        held = (*held, *item)
    return any(isinstance(value, torch.Tensor | np.ndarray | float) for value in held)


def undone_if_it_fails(load: Load, watched: Watched) -> Load:
    """Wrap the engine's loader so that tensors keep their addresses where possible.

    If the loader replaces a tensor, the wrapper copies the new tensor's values into the original tensor, and puts the
    original tensor back into the model. If the loader raises, the wrapper restores the model's objects, but not the bytes
    of tensors.
    """

    def guarded(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        before, held = Snapshot(watched), watched()
        try:
            load(weights)
        except BaseException:
            before.restore()
            raise
        finally:
            watched.changed()
        if _put_back(held, watched()):
            watched.changed()

    return guarded


def _put_back(before: Mapping[str, Holding], now: Mapping[str, Holding]) -> bool:
    """Put original tensors back into the model where a load replaced them by new tensors of the same layout.

    Each original tensor gets the new tensor's values. CUDA graphs use the addresses of the original tensors, and updates
    write to these addresses. Return True if a load has replaced tensors.
    """
    made = [
        (old, new)
        for name, old in before.items()
        if old.kind in (Kind.ATTRIBUTE, Kind.HELD)
        and (new := now.get(name)) is not None
        and new.kind is old.kind
        and new.address != old.address
        and _lies_alike(old.tensor, new.tensor)
    ]
    # torch forbids writes to inference tensors outside inference mode.
    with torch.inference_mode():
        for old, new in made:
            if old.node is None or new.node is None:
                continue
            item = old.node.item
            if type(item) is type(new.node.item) and new.node.put(item):
                old.memory().copy_(new.memory())
    return bool(made)


def _lies_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, strides, dtype and device."""
    return (one.shape, one.stride(), one.dtype, one.device) == (
        *(other.shape, other.stride(), other.dtype, other.device),
    )


@final
class HostCopies:
    """Copies of CUDA tensors in pageable host memory.

    Each thread has a CUDA stream and two pinned staging buffers. While the GPU writes (or reads) one buffer, the thread
    copies the other buffer to (or from) pageable memory. To pin all of the host memory would take longer than the copies.

    Args:
        memories: tensors to copy, (n,) each, contiguous, on one GPU. This object keeps the tensors alive.
    """

    def __init__(self, memories: Sequence[torch.Tensor]) -> None:
        self._device = memories[0].device
        total = sum(memory.nbytes for memory in memories)
        pages = mmap.mmap(-1, max(1, total), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Huge pages cause one page fault per 2 MiB instead of one per 4 KiB. Some Linux kernels do not support them.
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        host = torch.frombuffer(pages, dtype=torch.uint8)
        self._pairs: list[_Pair] = []
        begin = 0
        for memory in memories:
            self._pairs.append((memory.view(torch.uint8), host[begin : begin + memory.nbytes]))
            begin += memory.nbytes
        self._run(range(len(memories)), to_host=True)

    def restore(self, chosen: Sequence[int]) -> None:
        """Copy the host copies with the indices `chosen` back to the GPU, and wait. May be called in any thread."""
        self._run(chosen, to_host=False)

    def _run(self, chosen: Sequence[int], *, to_host: bool) -> None:
        """Copy tensors to the host if `to_host` is True, else copy the host copies to the GPU. Wait for the copies.

        `chosen` has the indices of the tensors.
        """
        chunks = [chunk for index in chosen for chunk in _chunks(*self._pairs[index])]
        if not chunks:
            return
        torch.cuda.synchronize(self._device)
        num_threads = min(MAX_THREADS, os.cpu_count() or 1, len(chunks))
        shares = [chunks[at::num_threads] for at in range(num_threads)]
        with ThreadPoolExecutor(num_threads) as pool:
            for _ in pool.map(partial(_copy, self._device, to_host), shares):
                pass


def _chunks(memory: torch.Tensor, copy: torch.Tensor) -> Iterator[_Pair]:
    """Yield a tensor and its copy in pairs of at most `CHUNK_NBYTES` bytes."""
    for begin, end in pairwise([*range(0, len(memory), CHUNK_NBYTES), len(memory)]):
        yield memory[begin:end], copy[begin:end]


def _copy(device: torch.device, to_host: bool, chunks: Sequence[_Pair]) -> None:
    """Copy one thread's share of the chunks through pinned staging buffers. Wait until the copies are complete.

    Each chunk is a pair: GPU memory, host memory. Copy to the host if `to_host` is True, else to the GPU.
    """
    size = max(len(memory) for memory, _ in chunks)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # torch forbids writes to inference tensors outside inference mode.
    with torch.inference_mode(), torch.cuda.device(device), torch.cuda.stream(stream):
        staging = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        done = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        late: list[_Pair] = []
        for number, (memory, copy) in enumerate(chunks):
            stage, event = staging[number % 2][: len(memory)], done[number % 2]
            if to_host:
                stage.copy_(memory, non_blocking=True)
                event.record()
                late.append((copy, stage))
                if number:
                    done[1 - number % 2].synchronize()
                    _move(*late.pop(0))
            else:
                # Wait until the GPU has read the previous chunk from this staging buffer.
                event.synchronize()
                _move(stage, copy)
                memory.copy_(stage, non_blocking=True)
                event.record()
        stream.synchronize()
        for copy, stage in late:
            _move(copy, stage)


def _move(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between CPU tensors with numpy, which releases the GIL and starts no threads."""
    target.numpy()[:] = source.numpy()


@dataclass(frozen=True, slots=True)
class _KeptTensor:
    """A tensor, and its class, `requires_grad` and memory at the time of the snapshot.

    `data` is a second tensor with the same memory; None if the tensor had no memory.
    """

    tensor: torch.Tensor
    kind: type
    requires_grad: bool
    data: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _KeptTensor:
        """Record the present state of a tensor."""
        data = tensor.data if has_memory(tensor) else None
        return cls(tensor, tensor.__class__, tensor.requires_grad, data)

    def restore(self) -> None:
        """Give the tensor its recorded class, memory and `requires_grad`. The bytes in the memory do not change."""
        if self.tensor.__class__ is not self.kind:
            self.tensor.__class__ = self.kind
        if self.data is not None and not _is_at(self.tensor, self.data):
            self.tensor.data = self.data
        if self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)


def _same(one: Collection[object], other: Collection[object]) -> bool:
    """Return whether two collections contain identical objects in the same order."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _is_at(tensor: torch.Tensor, kept: torch.Tensor) -> bool:
    """Return whether two tensors have the same memory, shape, strides, dtype and device."""
    return (
        tensor.device == kept.device
        and tensor.dtype == kept.dtype
        and tensor.data_ptr() == kept.data_ptr()
        and tensor.shape == kept.shape
        and tensor.stride() == kept.stride()
    )
