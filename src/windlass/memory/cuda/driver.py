"""The CUDA driver through ctypes: memory, IPC handles, streams, kernels compiled at run time.

This module wraps only the calls in use, so that no CUDA package is needed: libcuda comes with the
GPU's driver, and NVRTC with every CUDA toolkit and every CUDA build of torch. Native return codes
become exceptions in `_check`.
"""

from __future__ import annotations

import ctypes
import functools
import site
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path
from typing import Any, final

from windlass.errors import RegionError, TransferFailed, TransportUnavailable

IPC_HANDLE_NBYTES = 64
_LAZY_PEER_ACCESS = 1
_POINTER_MEMORY_TYPE = 2
_POINTER_DEVICE_ORDINAL = 9
_POINTER_IS_LEGACY_IPC_CAPABLE = 10
_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_PEER_ALREADY_ENABLED = 704
_MEMORY_TYPE_HOST = 1
_PIN_FOR_EVERY_CONTEXT, _PIN_FOR_KERNELS = 1, 2
_COMPUTE_MAJOR, _COMPUTE_MINOR, _MULTIPROCESSORS = 75, 76, 16


_u64, _size = ctypes.c_uint64, ctypes.c_size_t


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * IPC_HANDLE_NBYTES),)


@functools.cache
def driver() -> ctypes.CDLL:
    """Return libcuda, initialised.

    Raises:
        TransportUnavailable: this host has no NVIDIA driver.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportUnavailable(f"cuda_ipc: no NVIDIA driver on this host: {error}") from error
    code = library.cuInit(0)
    if code:
        raise TransportUnavailable(
            f"cuda_ipc: the NVIDIA driver does not start: cuInit gave {code}"
        )
    library.cuIpcOpenMemHandle_v2.argtypes = (ctypes.c_void_p, _IpcHandle, ctypes.c_uint)
    return library


def count_gpus() -> int:
    """Return the number of GPUs that the driver shows; 0 without a driver."""
    count = ctypes.c_int(0)
    try:
        code = driver().cuDeviceGetCount(ctypes.byref(count))
    except TransportUnavailable:
        return 0
    return 0 if code else count.value


@functools.cache
def _has_driver() -> bool:
    try:
        driver()
    except TransportUnavailable:
        return False
    return True


def _check(code: int, call: str) -> None:
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(text))
        detail = text.value.decode() if text.value else "unknown error"
        raise TransferFailed(f"cuda_ipc: {call} failed with {code}: {detail}")


def _call(name: str, *arguments: object) -> None:
    """Call the driver. Pointers and 64-bit numbers must be ctypes values."""
    _check(getattr(driver(), name)(*arguments), name)


class MemoryKind(Enum):
    """Kind of memory at an address. Kernels can access PINNED host memory, not PAGEABLE memory."""

    DEVICE = auto()
    PINNED = auto()
    PAGEABLE = auto()


def _attribute_of(address: int, attribute: int) -> int | None:
    """Return an attribute of an address; None if the driver does not know the address."""
    found = ctypes.c_int(0)
    code = driver().cuPointerGetAttribute(ctypes.byref(found), attribute, _u64(address))
    return None if code else found.value


def memory_kind(address: int) -> MemoryKind:
    """Return the kind of memory at `address`."""
    found = _attribute_of(address, _POINTER_MEMORY_TYPE)
    if not found:
        return MemoryKind.PAGEABLE
    return MemoryKind.PINNED if found == _MEMORY_TYPE_HOST else MemoryKind.DEVICE


def gpu_of(address: int) -> int:
    """Return the ordinal of the GPU that owns `address`; -1 for host memory or without a driver."""
    if not _has_driver() or memory_kind(address) is not MemoryKind.DEVICE:
        return -1
    ordinal = _attribute_of(address, _POINTER_DEVICE_ORDINAL)
    if ordinal is None:
        raise TransferFailed(
            f"cuda_ipc: the driver does not report the GPU of address {address:#x}"
        )
    return ordinal


def pointer_device(address: int) -> int:
    """Return the ordinal of the GPU that owns `address`.

    Raises:
        RegionError: `address` is not in GPU memory, or another process could not open the memory.
    """
    ordinal = _attribute_of(address, _POINTER_DEVICE_ORDINAL)
    capable = _attribute_of(address, _POINTER_IS_LEGACY_IPC_CAPABLE)
    if ordinal is None or capable is None:
        raise RegionError(f"cuda_ipc: {address:#x} is not in GPU memory")
    if not capable:
        raise RegionError(
            f"cuda_ipc: memory at {address:#x} cannot be opened by another process: it must come from "
            "cudaMalloc; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
        )
    return ordinal


@final
class Stream:
    """A non-blocking stream of one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.handle = ctypes.c_void_p()
        device.call("cuStreamCreate", ctypes.byref(self.handle), _NON_BLOCKING)

    def record(self) -> Event:
        """Record an event after the work that is in the stream now, and return the event."""
        return Event(self._device, self.handle)

    def close(self) -> None:
        """Destroy the stream; queued work continues."""
        with self._device.current():
            driver().cuStreamDestroy_v2(self.handle)


@final
class Event:
    """A point in a stream."""

    def __init__(self, device: Device, stream: ctypes.c_void_p) -> None:
        self._device = device
        self._handle = ctypes.c_void_p()
        with device.current():
            _call("cuEventCreate", ctypes.byref(self._handle), _DISABLE_TIMING)
            _call("cuEventRecord", self._handle, stream)

    def wait(self) -> None:
        """Block this thread until the stream reaches the event. Destroy the event.

        Raises:
            TransferFailed: work before the event failed, or earlier work of this process failed.
        """
        self._device.call("cuEventSynchronize", self._handle)
        self.close()

    def close(self) -> None:
        """Destroy the event. Do not call this after `wait`, which also destroys the event."""
        driver().cuEventDestroy_v2(self._handle)


@final
class Device:
    """Primary CUDA context of one GPU, which torch uses too in this process.

    Raises:
        TransportUnavailable: the GPU does not exist.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        device = ctypes.c_int()
        if driver().cuDeviceGet(ctypes.byref(device), ordinal):
            raise TransportUnavailable(f"cuda_ipc: there is no GPU {ordinal}")
        self._device = device
        self._context = ctypes.c_void_p()
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.num_multiprocessors = self._attribute(_MULTIPROCESSORS)
        self.architecture = f"{self._attribute(_COMPUTE_MAJOR)}{self._attribute(_COMPUTE_MINOR)}"

    def _attribute(self, name: int) -> int:
        value = ctypes.c_int()
        _call("cuDeviceGetAttribute", ctypes.byref(value), name, self._device)
        return value.value

    def synchronize(self) -> None:
        """Wait for all work that this process has queued on the device, through any library."""
        self.call("cuCtxSynchronize")

    def record(self, stream: int) -> Event:
        """Record an event after the work that is in another library's stream now, and return the event.

        `stream` is the handle of the stream; 0 is the default stream.
        """
        return Event(self, ctypes.c_void_p(stream))

    def call(self, name: str, *arguments: object) -> None:
        """Call the driver with this device's context current; see `_call`."""
        with self.current():
            _call(name, *arguments)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this device's context current in the calling thread, and restore the previous context after the block."""
        _call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def enable_peer(self, other: Device) -> None:
        """Allow kernels of this device to access memory of `other` in this process. Idempotent."""
        with self.current():
            code = driver().cuCtxEnablePeerAccess(other._context, 0)
        if code != _PEER_ALREADY_ENABLED:
            _check(code, f"cuCtxEnablePeerAccess({self.ordinal} -> {other.ordinal})")

    def allocate(self, nbytes: int) -> int:
        """Allocate GPU memory by cuMemAlloc, outside torch's memory pool. The caller frees it by `free`."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), _size(nbytes))
        return address.value

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", _u64(address))

    def upload(self, address: int, data: bytes | memoryview) -> None:
        """Copy `data` to GPU memory and wait for the end of the copy."""
        view = memoryview(data).cast("B")
        source = (ctypes.c_char * len(view)).from_buffer_copy(view)
        with self.current():
            _call("cuMemcpyHtoD_v2", _u64(address), source, _size(len(view)))
            # cuMemcpyHtoD may return before the bytes are on the device, and work in a non-blocking stream does
            # not wait for such a copy.
            _call("cuStreamSynchronize", None)

    def download(self, address: int, nbytes: int, stream: Stream | None = None) -> bytes:
        """Return bytes of GPU memory, after the work in `stream` (by default, in CUDA's default stream) has ended."""
        target = (ctypes.c_char * nbytes)()
        with self.current():
            if stream is None:
                _call("cuMemcpyDtoH_v2", target, _u64(address), _size(nbytes))
            else:
                _call("cuMemcpyDtoHAsync_v2", target, _u64(address), _size(nbytes), stream.handle)
                _call("cuStreamSynchronize", stream.handle)
        return bytes(target)

    def clear(self, address: int, nbytes: int, stream: Stream) -> None:
        """Queue the zeroing of GPU memory in `stream`."""
        self.call("cuMemsetD8Async", _u64(address), ctypes.c_ubyte(0), _size(nbytes), stream.handle)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Queue a copy by a copy engine in `stream`. Source and target may be memory of a peer."""
        self.call("cuMemcpyAsync", _u64(target), _u64(source), _size(nbytes), stream.handle)

    def allocation(self, address: int) -> tuple[int, int]:
        """Return the start and the size in bytes of the allocation that contains `address`."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), _u64(address))
        return base.value, size.value

    def export(self, address: int) -> bytes:
        """Return the IPC handle of the allocation that begins at `address`."""
        handle = _IpcHandle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), _u64(address))
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """Map a peer's allocation into this process, so that this device's kernels can access it."""
        raw = _IpcHandle((ctypes.c_byte * IPC_HANDLE_NBYTES).from_buffer_copy(handle))
        address = ctypes.c_uint64()
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), raw, _LAZY_PEER_ACCESS)
        return address.value

    def close_handle(self, address: int) -> None:
        with self.current():
            driver().cuIpcCloseMemHandle(_u64(address))

    def pin(self, address: int, nbytes: int) -> None:
        """Pin whole pages of host memory, so that kernels can read them."""
        flags = ctypes.c_uint(_PIN_FOR_EVERY_CONTEXT | _PIN_FOR_KERNELS)
        self.call("cuMemHostRegister_v2", ctypes.c_void_p(address), _size(nbytes), flags)

    def unpin(self, address: int) -> None:
        with self.current():
            driver().cuMemHostUnregister(ctypes.c_void_p(address))

    def device_pointer(self, address: int) -> int:
        """Return the address at which kernels access the pinned host memory at `address`."""
        found = ctypes.c_uint64()
        flags = ctypes.c_uint(0)
        self.call(
            "cuMemHostGetDevicePointer_v2", ctypes.byref(found), ctypes.c_void_p(address), flags
        )
        return found.value

    def load(self, image: bytes) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), image)
        return module

    def function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        code = driver().cuModuleGetFunction(ctypes.byref(found), module, name.encode())
        _check(code, f"cuModuleGetFunction({name})")
        return found

    def launch(
        self,
        function: ctypes.c_void_p,
        grid: int,
        block: int,
        arguments: Sequence[Any],
        stream: ctypes.c_void_p,
    ) -> None:
        """Queue a kernel. `arguments` are ctypes values. `stream` is a stream's handle, also of another library."""
        pointers = (ctypes.c_void_p * len(arguments))(
            *(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in arguments)
        )
        shape = (grid, 1, 1, block, 1, 1, 0)
        self.call("cuLaunchKernel", function, *shape, stream, pointers, None)


def compile_source(source: str, architecture: str) -> bytes:
    """Compile CUDA C to a cubin for `sm_<architecture>` with NVRTC.

    Raises:
        TransportUnavailable: NVRTC is missing or refuses the source.
    """
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    code = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"put.cu", 0, None, None
    )
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture=sm_{architecture}".encode(), b"-std=c++17")
    code = code or nvrtc.nvrtcCompileProgram(program, len(options), options)
    size = ctypes.c_size_t()
    if code:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise TransportUnavailable(f"cuda_ipc: NVRTC error {code}: {log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, image)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    names = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "/usr/local/cuda/lib64/libnvrtc.so"]
    for folder in site.getsitepackages():
        names += [str(path) for path in sorted(Path(folder).glob("nvidia/*/lib/libnvrtc.so.1?"))]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise TransportUnavailable(f"cuda_ipc: no NVRTC library; looked for {', '.join(names)}")
