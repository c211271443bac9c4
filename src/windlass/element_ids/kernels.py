"""Launch the CUDA kernels of `kernels.cu`. A kernel reads the memory once; the same computation in torch reads it 20 times."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from importlib import resources
from typing import final

import torch

from windlass.errors import TransferFailed, TransportUnavailable
from windlass.memory.cuda.driver import Device, compile_source

_log = logging.getLogger(__name__)
NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
"""dtype -> its name in `kernels.cu`, for the dtypes that the kernels support."""
_BLOCK = 256
"""Number of threads of a block."""
_BLOCKS_PER_MULTIPROCESSOR = 8


@final
class Kernels:
    """Kernels compiled for one GPU. They run on torch's current stream.

    Raises:
        TransportUnavailable: NVRTC is missing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = Device(torch.empty(0, device=device).get_device())
        self._on = device
        source = resources.files("windlass.element_ids").joinpath("kernels.cu").read_text()
        self._module = self._device.load(compile_source(source, self._device.architecture))
        self._functions: dict[str, object] = {}

    def fingerprint(self, words: torch.Tensor) -> int:
        """Return a 64-bit hash of int64 words (n,), the same as `memory.fingerprint` computes in torch."""
        return self._run(
            "fingerprint", len(words), (_address(words), ctypes.c_uint64(len(words))), 1
        )[0]

    def fill(self, out: torch.Tensor, first: int, seed: int) -> None:
        """Fill `out`, (n,), with the values of `Codes.random` for the element numbers [first, first + n).

        `seed` is the result of `codes.hash_seed` for the seed of the load.
        """
        numel = len(out)
        arguments = (
            *(_address(out), ctypes.c_uint64(numel), ctypes.c_uint64(first)),
            ctypes.c_uint32(seed % (1 << 32)),
        )
        self._launch(f"fill_{NAMES[out.dtype]}", numel, arguments)

    def check(
        self, memory: torch.Tensor, heads: torch.Tensor, patterns: torch.Tensor, end: int, seed: int
    ) -> tuple[int, int, int]:
        """Compare memory with the values of `Codes.random`.

        Args:
            memory: memory to check, (groups * rows * width,), fewer than 2^32 elements.
            heads: element number of the first place of each row, int64, (groups, rows), contiguous.
            patterns: for each place of a row, its element number minus that of the row's first place; a large negative
                number for padding. int64, (groups, width), contiguous.
            end: number of elements of the checkpoint.
            seed: result of `codes.hash_seed` for the seed of the load.

        Returns:
            The number of places with a wrong value, the fingerprint of the padding, and the number of places with an
            element.

        Raises:
            TransferFailed: the GPU did not compare every place.
        """
        numel = len(memory)
        arguments = (
            *(_address(tensor) for tensor in (memory, heads, patterns)),
            *(ctypes.c_uint32(size) for size in (numel, heads.shape[1], patterns.shape[1])),
            *(ctypes.c_int64(end), ctypes.c_uint32(seed % (1 << 32))),
        )
        wrong, padding, held, empty = self._run(f"check_{NAMES[memory.dtype]}", numel, arguments, 4)
        # `wrong` is also 0 if the kernel did not run, so check that it has counted all elements.
        if held + empty != numel:
            raise TransferFailed(
                f"cuda: the kernel compared only {held + empty} of {numel} elements"
            )
        return wrong, padding, held

    def _run(self, name: str, numel: int, arguments: Sequence[object], num_sums: int) -> list[int]:
        """Launch a kernel, wait for it, and return the `num_sums` unsigned 64-bit sums that it computes."""
        sums = torch.zeros(num_sums, dtype=torch.int64, device=self._on)
        self._launch(name, numel, (*arguments, _address(sums)))
        return [value % (1 << 64) for value in sums.tolist()]

    def _launch(self, name: str, numel: int, arguments: Sequence[object]) -> None:
        """Queue a kernel for `numel` elements in torch's current stream."""
        if name not in self._functions:
            self._functions[name] = self._device.function(self._module, name)
        most = self._device.num_multiprocessors * _BLOCKS_PER_MULTIPROCESSOR
        grid = max(1, min(most, -(-numel // _BLOCK)))
        stream = torch.cuda.current_stream(self._device.ordinal).cuda_stream
        self._device.launch(self._functions[name], grid, _BLOCK, arguments, stream)


def _address(tensor: torch.Tensor) -> ctypes.c_uint64:
    """Return a tensor's address as an argument of a kernel."""
    return ctypes.c_uint64(tensor.data_ptr())


@functools.cache
def kernels_on(device: torch.device) -> Kernels | None:
    """Return the kernels of a GPU; None for a CPU, or if NVRTC is missing. If None, the caller computes with torch."""
    if device.type != "cuda":
        return None
    try:
        return Kernels(device)
    except TransportUnavailable as error:
        _log.warning(
            "capture uses slower torch operations because its GPU kernels are unavailable: %s",
            error,
        )
        return None
