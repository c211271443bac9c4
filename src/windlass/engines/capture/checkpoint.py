"""Read the tensors of the checkpoint folder that an engine loads."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from windlass.checkpoint_files import ADAPTER, checkpoint_files, require_file
from windlass.element_ids.codes import CheckpointSpec
from windlass.engines.quantised import is_declared
from windlass.engines.spec import AgentSettings
from windlass.errors import ConfigError, UnsupportedLayout
from windlass.layout.dtypes import DType
from windlass.layout.quantization import QuantizedTensor, scale_shape

_EXACT = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8_E4M3)
_SAFETENSORS = {dtype.safetensors_name: dtype for dtype in _EXACT}
_INTEGERS_STORED = ("BOOL", "U8", "I8", "I16", "I32", "I64")
SCALE_SUFFIX = "_scale_inv"
"""Suffix that turns the name of a float8 matrix into the name of its scales."""


def checkpoint_folder(
    option: str, model: str, revision: str | None, cache: str | None = None
) -> Path:
    """Return the folder from which an engine loaded its model.

    Args:
        option: name of the command-line option that gives `model`, for error texts.
        model: folder, or repository of the Hugging Face Hub that was downloaded to this host.
        revision: revision of the repository.
        cache: download folder; None for the default of the Hub's client.

    Raises:
        ConfigError: `model` is neither a folder nor a repository that was downloaded to this host.
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


def checkpoint_specs(folder: Path, *, adapter: bool = False) -> tuple[CheckpointSpec, ...]:
    """Return the tensors of a checkpoint, sorted by name. Read only the headers of the files.

    Sorting brings the tensors of one layer together. vLLM buffers the tensors of a layer until the layer is complete, and
    scans the whole buffer whenever a tensor arrives, so unsorted tensors would load slowly.

    The result omits integer tensors (masks, positions), because training does not change them. In a quantised checkpoint,
    integer tensors are weights, so this function refuses them.

    Raises:
        ConfigError: the folder has no safetensors files, a file is not a safetensors file, or the index is
            invalid or names a missing file.
        UnsupportedLayout: a tensor has a dtype in which capture cannot number elements, such as packed integers.
    """
    found: dict[str, CheckpointSpec] = {}
    quantised = is_declared(folder)
    with _opened(folder, adapter) as stored:
        for name in sorted(stored):
            entry = stored[name].get_slice(name)
            if (dtype := entry.get_dtype()) in _SAFETENSORS:
                found[name] = CheckpointSpec(name, tuple(entry.get_shape()), _SAFETENSORS[dtype])
            elif quantised or dtype not in _INTEGERS_STORED:
                raise UnsupportedLayout(
                    f"checkpoint: the dtype of tensor {name!r} must be one of {list(_SAFETENSORS)}, got {dtype}: "
                    "capture cannot number the elements of other dtypes"
                )
    return tuple(found.values())


@contextmanager
def _opened(folder: Path, adapter: bool) -> Iterator[dict[str, Any]]:
    """Open all files of a checkpoint; yield tensor name -> open safetensors file.

    Raises:
        ConfigError: the folder has no safetensors files, or one of them is missing or invalid.
    """
    from safetensors import SafetensorError, safe_open

    files = [folder / ADAPTER] if adapter else checkpoint_files(folder)
    if not files:
        raise ConfigError(f"checkpoint: {folder} must contain safetensors files, got none")
    with ExitStack() as stack:
        stored: dict[str, Any] = {}
        for file in files:
            require_file(file)
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(
                    f"checkpoint: {file} is not a safetensors file: {error}"
                ) from error
            stored |= dict.fromkeys(opened.keys(), opened)
        yield stored


def quantized_tensors(specs: Iterable[CheckpointSpec]) -> tuple[QuantizedTensor, ...]:
    """Return the float8 matrices with one scale per block, each with the name of its scales in the same checkpoint."""
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
    """Checkpoint in a folder of safetensors files. Methods raise ConfigError as `checkpoint_specs` does.

    Attributes:
        folder: folder of a model or of an adapter.
        adapter: True to read the adapter in the folder, False to read the model.
    """

    folder: Path
    adapter: bool = False

    def tensors(self, chosen: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor), sorted by name; only the names in `chosen`, if given. The caller owns each tensor."""
        with _opened(self.folder, self.adapter) as stored:
            for name in sorted(stored if chosen is None else stored.keys() & set(chosen)):
                yield name, stored[name].get_tensor(name)

    def elements(self, places: Iterable[tuple[str, int]]) -> Iterator[torch.Tensor]:
        """Yield one element, as a tensor of shape (1,), for each item of `places`: (tensor name, row-major index)."""
        with _opened(self.folder, self.adapter) as stored:
            for name, place in places:
                entry = stored[name].get_slice(name)
                shape = entry.get_shape()
                row, column = divmod(place, math.prod(shape[1:]))
                rows = entry[row : row + 1] if shape else stored[name].get_tensor(name)
                yield rows.reshape(-1)[column : column + 1]


def started_with(settings: AgentSettings) -> StoredCheckpoint | None:
    """Return the checkpoint that the engine loaded when it started; None if it started with random weights."""
    if not settings.loaded:
        return None
    return StoredCheckpoint(Path(settings.checkpoint), bool(settings.adapter))
