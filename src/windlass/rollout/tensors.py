"""Named tensors of training samples: element type, shape and bytes, without a dependency on torch.

The elements of a large tensor may stay in the memory of the process that made it (`HeldTensor`). Trainer ranks get them by
a transport, see `rollout/held.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import mmap
import sys
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from windlass.errors import ConfigError
from windlass.layout.dtypes import DType

MAX_DIMS = 8
"""Largest number of dimensions of a tensor."""
MAPPED_NBYTES = 1 << 20
"""Smallest size of a copied tensor that gets its own memory mapping."""
IMAGES = "images."
"""Beginning of the names of the tensors that a worker makes of the images in a prompt: `images.SET.NAME`. SET is the key of an
`ImageSet` in an outcome, and the place of the set among the sets of a sample, such as `images.0.pixel_values`."""
KEPT_MAPPINGS = 32
"""Largest number of unused mappings that are kept, because new memory is slow at its first use: 0.3 to 4 s per GB."""


class HeldTensor(msgspec.Struct, frozen=True, weakref=True):
    """Place of a tensor's elements in the memory of another process, the holder.

    Attributes:
        holder: name of the rollout worker, or `LOCAL_WORKER` for the controller.
        incarnation: random id of the holder's process.
        key: random id of the tensor.
        digest: xxh3_128 of the elements, in hexadecimal.
    """

    holder: str
    incarnation: str
    key: str
    digest: str

    def __copy__(self) -> HeldTensor:
        return self

    def __deepcopy__(self, _: object) -> HeldTensor:
        # The holder frees the elements when this object is freed, so a copy must be the same object.
        return self


class SampleTensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tensor that travels with a `TrainingSample`. `SampleTensor.of` makes one from an array or tensor.

    Attributes:
        dtype: element type.
        shape: size of each dimension.
        data: the elements in C order, little-endian: bytes or a memoryview. Empty for a held tensor.
        per_token: whether the first dimension has one entry per token of the sample's `output_ids`.
        held: place of the elements; None if `data` contains them.

    Raises:
        ConfigError: the dtype is unknown, or shape and data do not match.
    """

    dtype: DType
    shape: tuple[int, ...]
    data: bytes = b""
    per_token: bool = True
    held: HeldTensor | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "dtype", _dtype_of(self.dtype))
        if not all(type(size) is int and size >= 0 for size in self.shape):
            raise ConfigError(f"tensor: shape must be integers >= 0, got {self.shape}")
        if not self.per_token <= len(self.shape) <= MAX_DIMS:
            raise ConfigError(
                f"tensor: shape must have {int(self.per_token)} to {MAX_DIMS} dimensions, got {self.shape}"
            )
        nbytes = 0 if self.held else self.nbytes
        data: Any = self.data
        is_data = isinstance(data, bytes | memoryview)
        if not is_data or len(data) != nbytes:
            got = f"{len(data)} bytes" if is_data else repr(data)
            raise ConfigError(
                f"tensor: data must be {nbytes} bytes for {self.dtype} of shape {self.shape}, got {got}"
            )

    @classmethod
    def of(cls, values: Any, *, per_token: bool = True) -> SampleTensor:
        """Return a `SampleTensor` with a copy of `values`. Python numbers become float32 or int64.

        Args:
            values: NumPy array, torch tensor or (nested) list of numbers. A tensor on a GPU is copied to the host.
            per_token: whether the first dimension has one entry per token of the sample's `output_ids`.

        Raises:
            ConfigError: the values are not numbers, or their element type is not in `DType`.
        """
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(values, torch.Tensor):
            whole = values.detach().cpu().contiguous()
            data = _copied(whole.reshape(-1).view(torch.uint8).numpy())
            name = str(whole.dtype).removeprefix("torch.")
            return cls(
                dtype=_dtype_of(name), shape=tuple(whole.shape), data=data, per_token=per_token
            )
        try:
            array = np.asarray(values)
        except ValueError as error:
            raise ConfigError(
                f"tensor: values must be numbers in lists of equal length: {error}"
            ) from error
        if array.dtype == np.float64 and not isinstance(values, np.ndarray | np.generic):
            array = array.astype(np.float32)
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        return cls(
            dtype=_dtype_of(array.dtype.name),
            shape=array.shape,
            data=_copied(little),
            per_token=per_token,
        )

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes, also if another process holds them."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __reduce__(self) -> tuple[Any, ...]:
        # A memoryview cannot be pickled or copied.
        return _made, (self.dtype, self.shape, bytes(self.data), self.per_token, self.held)

    @property
    def has_numpy_dtype(self) -> bool:
        """Whether NumPy has this element type; it has neither bfloat16 nor float8."""
        return self.dtype not in {DType.BFLOAT16, DType.FLOAT8_E4M3, DType.FLOAT8_E5M2}

    def to_numpy(self) -> Any:
        """Return a read-only NumPy array of the elements.

        Raises:
            ConfigError: NumPy does not have the element type (use `to_torch`), or another process holds the elements.
        """
        self._check_here()
        if not self.has_numpy_dtype:
            raise ConfigError(f"tensor: NumPy has no dtype {self.dtype}; use to_torch")
        array = np.frombuffer(self.data, np.dtype(self.dtype.value)).reshape(self.shape)
        array.flags.writeable = False
        return array

    def to_torch(self) -> Any:
        """Return a torch tensor of the elements, on the CPU.

        Copy the elements only if their memory is read-only. It is writable if a transport has written the elements.

        Raises:
            ConfigError: another process holds the elements.
        """
        self._check_here()
        torch = importlib.import_module("torch")
        dtype = vars(torch)[self.dtype.value]
        if not self.data:
            return torch.empty(self.shape, dtype=dtype)
        data: Any = self.data
        if memoryview(data).readonly:
            data = bytearray(data)
        return torch.frombuffer(data, dtype=dtype).reshape(self.shape)

    def _check_here(self) -> None:
        """Raise `ConfigError` if another process holds the elements."""
        if self.held is not None:
            raise ConfigError(
                f"tensor: the elements are in the memory of {self.held.holder}, not of this process; get the batch with "
                "BatchClient.next_batch, or start workers with a larger --inline-nbytes"
            )


def images_in(tensors: Mapping[str, SampleTensor]) -> dict[str, dict[str, SampleTensor]]:
    """Return the tensors of images in `tensors`: SET -> NAME -> tensor, see `IMAGES`. The sets keep their order."""
    found: dict[str, dict[str, SampleTensor]] = {}
    for full, tensor in tensors.items():
        if full.startswith(IMAGES):
            of_set, _, name = full.removeprefix(IMAGES).partition(".")
            found.setdefault(of_set, {})[name] = tensor
    return found


def joined(sets: Sequence[Mapping[str, SampleTensor]]) -> dict[str, SampleTensor]:
    """Return the tensors of several sets of images as one set: tensors with the same name, one after the other.

    The first dimension of each tensor counts images or parts of images.

    Raises:
        ConfigError: a set lacks a name of another set. Tensors with the same name differ in dtype, or in a dimension after
            the first. Another process holds the elements. A single set is not checked.
    """
    if len(sets) < 2:
        return {name: tensor for each in sets for name, tensor in each.items()}
    names = dict.fromkeys(name for each in sets for name in each)
    return {name: _joined(name, [each.get(name) for each in sets]) for name in names}


def _joined(name: str, tensors: Sequence[SampleTensor | None]) -> SampleTensor:
    """Return the tensors called `name` as one tensor; raise `ConfigError` as `joined` does. None is a missing tensor."""
    kinds = {
        (each.dtype, each.shape[1:]) if each is not None and each.shape else None
        for each in tensors
    }
    if len(kinds) > 1 or None in kinds:
        got = [None if each is None else (each.dtype.value, each.shape) for each in tensors]
        raise ConfigError(
            f"images: tensors {name!r} must have the same dtype and the same dimensions after the first, got {got}"
        )
    whole = [each for each in tensors if each is not None]
    for each in whole:
        each._check_here()
    rows = sum(each.shape[0] for each in whole)
    data: Any = b"".join(each.data for each in whole)
    return SampleTensor(
        dtype=whole[0].dtype, shape=(rows, *whole[0].shape[1:]), data=data, per_token=False
    )


def _copied(array: Any) -> Any:
    """Return a copy of an array's elements in C order, as bytes or a memoryview that cannot be changed; see `copy_of`."""
    return array.tobytes() if array.nbytes < MAPPED_NBYTES else copy_of(array).toreadonly()


def copy_of(array: Any) -> memoryview:
    """Return a copy of an array's elements in C order.

    A large copy has its own memory mapping. After this copy is freed, later copies use its mapping.
    """
    if array.nbytes < MAPPED_NBYTES:
        return memoryview(bytearray(array.tobytes()))
    mapping = _mapping(array.nbytes)
    # All views of the copy refer to this array, so the copy is unused when this array is freed.
    owner: Any = np.frombuffer(mapping, np.uint8, array.nbytes)
    weakref.finalize(owner, _keep_unused, mapping).atexit = False
    np.copyto(owner.view(array.dtype).reshape(array.shape), array)
    return memoryview(owner)


_unused: deque[mmap.mmap] = deque(maxlen=KEPT_MAPPINGS)
"""Mappings of copies that were freed, oldest first. Threads and finalizers use it without a lock."""


def _mapping(nbytes: int) -> mmap.mmap:
    """Return the newest unused mapping with `nbytes` to 2 * `nbytes` bytes, or a new mapping of `nbytes` bytes."""
    chosen, others = None, []
    with contextlib.suppress(IndexError):
        while chosen is None:
            mapping = _unused.pop()
            if nbytes <= len(mapping) <= 2 * nbytes:
                chosen = mapping
            else:
                others.append(mapping)
    _unused.extend(reversed(others))
    if chosen is not None:
        return chosen
    made = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # If Linux refuses huge pages, small pages work too.
    with contextlib.suppress(OSError):
        made.madvise(mmap.MADV_HUGEPAGE)
    return made


def _keep_unused(mapping: mmap.mmap) -> None:
    """Keep the mapping of a freed copy. If memory is short, Linux takes the mapping's pages back."""
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_FREE)
        _unused.append(mapping)


def check_tensors(where: str, tensors: object) -> Mapping[str, SampleTensor]:
    """Return `tensors` if it maps names to tensors.

    Raises:
        ConfigError: `tensors` is not such a mapping; the message begins with `where`.
    """
    if not isinstance(tensors, Mapping):
        raise ConfigError(f"{where}tensors must be a mapping, got {tensors!r}")
    for name, tensor in tensors.items():
        if not (isinstance(name, str) and isinstance(tensor, SampleTensor)):
            kind = type(tensor).__name__
            raise ConfigError(
                f"{where}tensors must map text to SampleTensor, got a {kind} for {name!r}; use SampleTensor.of"
            )
    return tensors


def _made(
    dtype: DType, shape: tuple[int, ...], data: bytes, per_token: bool, held: HeldTensor | None
) -> SampleTensor:
    """Return a tensor; pickle and copy call this."""
    return SampleTensor(dtype=dtype, shape=shape, data=data, per_token=per_token, held=held)


def _dtype_of(name: str) -> DType:
    """Return the element type called `name`; raise `ConfigError` if there is no such type."""
    try:
        return DType(name)
    except ValueError:
        raise ConfigError(
            f"tensor: dtype must be one of {', '.join(DType)}, got {name!r}"
        ) from None
