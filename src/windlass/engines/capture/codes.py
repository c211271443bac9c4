"""Checkpoint tensors whose elements say which element they are.

Every element of every checkpoint tensor gets a number, from 1 on. A load carries one digit of it,
as a small integer that each type of the checkpoint holds exactly: base 128, or base 16 where a
tensor is float8. 0 never occurs in a load, so that zero padding reads as "no element". After as
many loads as a number has digits, every place in the engine's memory tells which checkpoint element
lies there.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, final

import msgspec
import numpy as np
import torch

from windlass.engines.capture.kernels import NAMES, kernels_on
from windlass.engines.quantised import is_declared
from windlass.errors import ConfigError, UnsupportedLayout
from windlass.layout.dtypes import DType
from windlass.layout.quantization import QuantizedTensor, scale_shape
from windlass.memory.torch_dtypes import torch_dtype

DIGIT_BITS = 7
"""Digits travel as 1 .. 128: exact in bfloat16, and no digit is 0."""

FLOAT8_DIGIT_BITS = 4
"""1 .. 16: exact in e4m3, whose integers are odd up to 15 only."""

LOUDNESS = 16.0
"""Of values that must show in a maximum over others too."""


def chunk_on(device: torch.device) -> int:
    """Elements that are made or compared at a time: few enough for a core's cache; a GPU works while more are asked for."""
    return 1 << 16 if device.type == "cpu" else 1 << 24


# Of MurmurHash3 (Appleby, 2011), as signed numbers: 32 bits, which processors multiply many of at once.
_MIX_1 = 0x85EBCA6B - (1 << 32)
_MIX_2 = 0xC2B2AE35 - (1 << 32)
_HIGH = 0x9E3779B1 - (1 << 32)
"""For the high half of a number."""
_LOW_HALVES = 1 << 32
"""As many numbers share their high 32 bits."""

_EXACT = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8_E4M3)
_SAFETENSORS = {dtype.safetensors_name: dtype for dtype in _EXACT}
_INTEGERS_STORED = ("BOOL", "U8", "I8", "I16", "I32", "I64")
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
"""File of an adapter that was saved beside the model."""
SCALE_SUFFIX = "_scale_inv"
"""What the name of a float8 matrix gets to name its scales."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Load = Callable[[Iterator[tuple[str, torch.Tensor]]], None]
"""Loads a checkpoint into the model; the tensors belong to it from then on."""


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def checkpoint_folder(
    option: str, model: str, revision: str | None, cache: str | None = None
) -> Path:
    """Return the folder that an engine has loaded its model from.

    `model`, which errors call `option`, is that folder, or a repository of the Hugging Face Hub that was
    downloaded into `cache`, None for the usual one.

    Raises:
        ConfigError: it is no folder, nor a repository that this host has.
    """
    if (folder := Path(model)).is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{option} must be a folder of safetensors files, or a repository of the Hugging Face Hub that "
            f"was downloaded to every host, got {model!r}: {error}"
        ) from error
    return Path(found)


def checkpoint_specs(folder: Path) -> tuple[CheckpointSpec, ...]:
    """Return what a checkpoint holds, from the headers of its files alone; ordered by name.

    Files are ordered by type first, which parts scales from their weights. vLLM keeps what it has
    of every layer until the layer is complete, and counts all of it at each tensor: tensors of one
    layer must come together.

    Integers (masks, positions) are left out, which no training changes and engines make themselves; what
    an engine needs of them it keeps. Not of a quantised checkpoint, where they are weights.

    Raises:
        ConfigError: no safetensors files there, or one that is none; or its index names others.
        UnsupportedLayout: a tensor of a type that codes cannot travel in (packed integers, say).
    """
    found: dict[str, CheckpointSpec] = {}
    quantised = is_declared(folder)
    with _opened(folder) as stored:
        for name in sorted(stored):
            entry = stored[name].get_slice(name)
            if (dtype := entry.get_dtype()) in _SAFETENSORS:
                found[name] = CheckpointSpec(name, tuple(entry.get_shape()), _SAFETENSORS[dtype])
            elif quantised or dtype not in _INTEGERS_STORED:
                raise UnsupportedLayout(
                    f"checkpoint: tensor {name!r}: dtype must be one of {list(_SAFETENSORS)} to be "
                    f"followed through the loader, got {dtype}"
                )
    return tuple(found.values())


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def _files(folder: Path) -> list[Path]:
    """Return the model's files in the order in which engines load them: of a tensor in two files the later one counts.

    These are the files that the index names, or all but those of an adapter. Engines sort them naturally
    (`model-2` before `model-10`).
    """
    index = folder / INDEX
    if not index.exists():
        found = (file for file in folder.glob("*.safetensors") if file.name != ADAPTER)
        return sorted(found, key=_natural)
    try:
        content = index.read_bytes().removeprefix(codecs.BOM_UTF8)
        named = msgspec.json.decode(content, type=_Index).weight_map
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"checkpoint: {index} must have a `weight_map` of names to files: {error}"
        ) from error
    for name, file in named.items():
        place = PurePath(file)
        if place.is_absolute() or ".." in place.parts:
            raise ConfigError(
                f"checkpoint: {index} must name files inside the folder, got {file!r} for {name!r}; put the file "
                "into the folder, or a link to it"
            )
    return sorted({folder / file for file in named.values()}, key=_natural)


def _natural(file: Path) -> tuple[list[tuple[int, str]], str]:
    """Return a sort key of a file's name in which numbers count as numbers."""
    pieces = re.split(r"(\d+)", file.name)
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in pieces], str(file)


@contextmanager
def _opened(folder: Path) -> Iterator[dict[str, Any]]:
    """Open a folder; yield the safetensors file of every tensor in it, by the tensor's name."""
    from safetensors import SafetensorError, safe_open

    files = _files(folder)
    if not files:
        raise ConfigError(f"checkpoint: {folder} must hold safetensors files, found none")
    with ExitStack() as stack:
        stored: dict[str, Any] = {}
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
            except FileNotFoundError as error:
                raise ConfigError(f"checkpoint: {file} must be there: {INDEX} names it") from error
            except SafetensorError as error:
                raise ConfigError(f"checkpoint: {file} is no safetensors file: {error}") from error
            stored |= dict.fromkeys(opened.keys(), opened)
        yield stored


def quantized_tensors(specs: Iterable[CheckpointSpec]) -> tuple[QuantizedTensor, ...]:
    """Return the matrices in block float8 that have their scales beside them."""
    by_name = {spec.name: spec for spec in specs}
    found: list[QuantizedTensor] = []
    for spec in by_name.values():
        scale = by_name.get(spec.name + SCALE_SUFFIX)
        if spec.dtype is not DType.FLOAT8_E4M3 or len(spec.shape) != 2 or scale is None:
            continue
        if scale.dtype is DType.FLOAT32 and scale.shape == scale_shape(spec.shape):
            found.append(QuantizedTensor(spec.name, scale.name))
    return tuple(found)


@final
@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """The safetensors files of a folder. Reading them raises what `checkpoint_specs` does of the folder."""

    folder: Path

    def tensors(self, chosen: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Read tensors, all or those that are chosen, in the order of `checkpoint_specs`; each belongs to the caller."""
        with _opened(self.folder) as stored:
            for name in sorted(stored if chosen is None else stored.keys() & set(chosen)):
                yield name, stored[name].get_tensor(name)

    def elements(self, places: Iterable[tuple[str, int]]) -> Iterator[torch.Tensor]:
        """Read elements, (1,) each, that are told by their tensors' names and by the place in these, row by row."""
        with _opened(self.folder) as stored:
            for name, place in places:
                entry = stored[name].get_slice(name)
                shape = entry.get_shape()
                row, column = divmod(place, math.prod(shape[1:]))
                rows = entry[row : row + 1] if shape else stored[name].get_tensor(name)
                yield rows.reshape(-1)[column : column + 1]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Tensors whose elements have the numbers [first, last)."""

    specs: list[CheckpointSpec]
    first: int
    last: int
    is_chosen: bool


class Codes:
    """ElementIds of all elements of a checkpoint, and the loads that spell them.

    Args:
        specs: of the checkpoint, each name once.
        device: where the loads are made; tensors of real models are made fast only on a GPU.

    Attributes:
        index: of every tensor in `specs`, by its name.
        dtypes: torch's, of the tensors.
    """

    def __init__(self, specs: Sequence[CheckpointSpec], device: torch.device | str = "cpu") -> None:
        self.specs = tuple(specs)
        self.device = torch.device(device)
        sizes = np.array([spec.numel for spec in specs], np.int64)
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        total = int(self.starts[-1])
        narrow = any(spec.dtype is DType.FLOAT8_E4M3 for spec in specs)
        self.digit_bits = FLOAT8_DIGIT_BITS if narrow else DIGIT_BITS
        self.num_digits = max(1, -(-max(0, total - 1).bit_length() // self.digit_bits))
        self.index = {spec.name: at for at, spec in enumerate(specs)}
        self._dtypes = tuple(sorted({spec.dtype for spec in specs}))
        self.dtypes = tuple(torch_dtype(dtype) for dtype in self._dtypes)
        self._kinds = torch.tensor([self._dtypes.index(s.dtype) for s in specs], device=self.device)
        self._all = tuple(self._batches(range(len(specs))))

    def digits(
        self, position: int, chosen: frozenset[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Make one load: the digit at `position` of every element, tensor by tensor; or part of it, of `chosen`."""
        return self._load(
            lambda first, last, _dtype, _chosen: _digits(
                first, last, self.digit_bits, position, self.device
            ),
            None if chosen is None else self._batches(self._indices(chosen)),
        )

    def constant(self, value: float) -> Iterator[tuple[str, torch.Tensor]]:
        """Make one load of the same value everywhere."""
        same = torch.full((1,), value, device=self.device)
        return self._load(lambda first, last, _dtype, _chosen: same.expand(last - first))

    def random(self, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Make one load of ordinary values, the same for the same seed.

        Uniform, below 0.125; in float8 each of the 254 patterns that are a number.
        """
        return self._load(
            lambda first, last, dtype, _chosen: self._ordinary(first, last, seed, dtype)
        )

    def some(self, chosen: frozenset[str], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Make part of a load: the tensors named `chosen`, of larger values, below 2."""
        return self._load(
            lambda first, last, dtype, _chosen: _loud(*self._halves(first, last), seed, dtype),
            self._batches(self._indices(chosen)),
        )

    def mixed(self, chosen: frozenset[str], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Make one load: `chosen` as in `some`, the others as in `random(0)`."""
        return self._load(
            lambda first, last, dtype, is_chosen: (
                _loud(*self._halves(first, last), seed, dtype)
                if is_chosen
                else self._ordinary(first, last, 0, dtype)
            ),
            self._batches(range(len(self.specs)), chosen),
        )

    def expected(
        self, numbers: torch.Tensor, seed: int, dtype: torch.dtype, *, loud: bool = False
    ) -> torch.Tensor:
        """Return what a copy of `random(seed)` leaves in the engine's `dtype` where the elements `numbers` lie.

        `numbers`, (n,) int64, may be on any device. `loud`: the load was `some` or `mixed`, of these elements.
        Each of the (n,) values is made in its tensor's type, then cast.
        """
        make = _loud if loud else _ordinary

        def values(numbers: torch.Tensor, stored: DType) -> torch.Tensor:
            if self.starts[-1] <= _LOW_HALVES:
                return make(numbers.to(torch.int32), 0, seed, stored)
            halves = numbers.contiguous().view(torch.int32).view(-1, 2)
            return make(halves[:, 0].clone(), halves[:, 1], seed, stored)

        if len(self._dtypes) == 1:
            return values(numbers, self._dtypes[0]).to(dtype)
        bounds = torch.from_numpy(self.starts[1:-1]).to(numbers.device)
        tensors = torch.searchsorted(bounds, numbers, right=True)
        kinds = self._kinds.to(numbers.device)[tensors]
        result = torch.empty(numbers.shape, dtype=dtype, device=numbers.device)
        for kind, stored in enumerate(self._dtypes):
            chosen = kinds == kind
            bits_of(result)[chosen] = bits_of(values(numbers[chosen], stored).to(dtype))
        return result

    def tensor_of(
        self, numbers: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the index of the tensor that each element number belongs to."""
        return np.searchsorted(self.starts, numbers, side="right") - 1

    def _indices(self, chosen: frozenset[str]) -> list[int]:
        return [at for at, spec in enumerate(self.specs) if spec.name in chosen]

    def _ordinary(self, first: int, last: int, seed: int, dtype: DType) -> torch.Tensor:
        kernels, stored = kernels_on(self.device), torch_dtype(dtype)
        if kernels is None or stored not in NAMES:
            return _ordinary(*self._halves(first, last), seed, dtype)
        made = torch.empty(last - first, dtype=stored, device=self.device)
        kernels.fill(made, first, hash_seed(seed))
        return made

    def _halves(self, first: int, last: int) -> tuple[torch.Tensor, int]:
        """Return the low 32 bits of the numbers [first, last), and the high 32 bits, which all of them share."""
        low = torch.arange(_signed(first), _signed(first) + last - first, device=self.device)
        return low.to(torch.int32), first >> 32

    def _load(
        self,
        values: Callable[[int, int, DType, bool], torch.Tensor],
        batches: Iterable[_Batch] | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of `values(first, last, dtype, is_chosen)`, called for numbers that share their high 32 bits."""
        most = chunk_on(self.device)
        for batch in self._all if batches is None else batches:
            stored, first, last = batch.specs[0].dtype, batch.first, batch.last
            made = torch.empty(last - first, dtype=torch_dtype(stored), device=self.device)
            begin = first
            while begin < last:
                end = min(last, begin + most, ((begin >> 32) + 1) * _LOW_HALVES)
                part = values(begin, end, stored, batch.is_chosen)
                made[begin - first : end - first] = part
                begin = end
            parts = torch.split(made, [spec.numel for spec in batch.specs])
            for spec, part in zip(batch.specs, parts, strict=True):
                # Each is the loader's own: it may keep one, and read it as another type.
                yield spec.name, (part.clone() if len(parts) > 1 else part).view(spec.shape)

    def _batches(
        self, specs: Iterable[int], chosen: frozenset[str] = frozenset()
    ) -> Iterator[_Batch]:
        """Tensors, of which models have thousands, that are made at once: neighbours, alike, and few enough (`chunk_on`)."""
        batch: list[CheckpointSpec] = []
        first = last = 0
        most = chunk_on(self.device)
        for index in specs:
            spec = self.specs[index]
            begin, end = int(self.starts[index]), int(self.starts[index + 1])
            if batch:
                is_chosen = batch[0].name in chosen
                alike = spec.dtype is batch[0].dtype and (spec.name in chosen) == is_chosen
                fits = end - first <= most and (end - 1) >> 32 == first >> 32
                if begin != last or not alike or not fits:
                    yield _Batch(batch, first, last, is_chosen)
                    batch = []
            if not batch:
                first = begin
            batch.append(spec)
            last = end
        if batch:
            yield _Batch(batch, first, last, batch[0].name in chosen)


def bits_of(memory: torch.Tensor) -> torch.Tensor:
    """View a tensor's bytes as integers of its elements' size; not every operation knows float8."""
    return memory.view(_INTEGERS[memory.element_size()])


def _signed(number: int) -> int:
    """Wrap a number as 32 signed bits hold it."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _digits(first: int, last: int, bits: int, position: int, device: torch.device) -> torch.Tensor:
    """Make the digit at `position` of the numbers [first, last), plus 1, in float32, which converts to every type."""
    # A row of the table has the numbers that differ in their last digit alone.
    if position:
        rows = torch.arange(first >> bits, (last - 1 >> bits) + 1, device=device)
        rows = rows.bitwise_right_shift_(bits * (position - 1)).bitwise_and_((1 << bits) - 1)
        table = rows.add_(1).float()[:, None].expand(-1, 1 << bits)
    else:
        row = torch.arange(1, (1 << bits) + 1, device=device).float()
        table = row.expand((last - 1 >> bits) + 1 - (first >> bits), -1)
    begin = first & (1 << bits) - 1
    return table.reshape(-1)[begin : begin + last - first]


_HighHalf = torch.Tensor | int
"""(n,) int32, or one that all numbers share."""


def _loud(low: torch.Tensor, high: _HighHalf, seed: int, dtype: DType) -> torch.Tensor:
    """Make values as `_ordinary` does, but larger; float8 has none larger, others are multiplied, which is exact."""
    values = _ordinary(low, high, seed, dtype)
    return values if dtype is DType.FLOAT8_E4M3 else values * LOUDNESS


def _ordinary(low: torch.Tensor, high: _HighHalf, seed: int, dtype: DType) -> torch.Tensor:
    """Make a value of `dtype` for each number, the same on every device: 24 bits of a hash; overwrite `low`, (n,) int32."""
    bits = _bits24(low, high, hash_seed(seed))
    if dtype is DType.FLOAT8_E4M3:
        pattern = bits.remainder_(254)
        pattern += pattern >= 127  # 127 and 255 are no numbers
        return pattern.to(torch.uint8).view(torch.float8_e4m3fn)
    return bits.sub_(1 << 23).to(torch.float32).mul_(2.0**-26).to(torch_dtype(dtype))


def hash_seed(seed: int) -> int:
    """Return what the hash of a load's values begins with."""
    return _signed((seed + 1) * _HIGH)


def _bits24(low: torch.Tensor, high: _HighHalf, seed: int) -> torch.Tensor:
    """Hash numbers, given as halves; overwrite `low` with the results and return it."""
    mixed = _signed(high * _HIGH) if isinstance(high, int) else high * _HIGH
    state = low.bitwise_xor_(mixed).add_(seed)
    state.bitwise_xor_(state >> 16).mul_(_MIX_1)
    state.bitwise_xor_(state >> 13).mul_(_MIX_2)
    return state.bitwise_xor_(state >> 16).bitwise_right_shift_(4).bitwise_and_(0xFFFFFF)
