"""The CUDA driver and NVRTC through NVIDIA's cuda-bindings: memory and its sharing, streams, kernels compiled at run time.

torch 2.11 and later with CUDA require cuda-bindings, so a process with weights on a GPU has them. This module imports
them when a GPU is first used. Native return codes become exceptions in `_check`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, final

from windlass.errors import RegionError, TransferFailed, TransportUnavailable

IPC_HANDLE_NBYTES = 64


@functools.cache
def driver() -> Any:
    """Return the module `cuda.bindings.driver`, with the driver initialised.

    Raises:
        TransportUnavailable: this host has no NVIDIA driver, or cuda-bindings are not installed.
    """
    try:
        from cuda.bindings import driver as found
    except ImportError as error:
        raise TransportUnavailable(
            f"CUDA: the package cuda-bindings cannot be imported: {error}; install torch with CUDA"
        ) from error
    try:
        (code,) = found.cuInit(0)
    except RuntimeError as error:
        raise TransportUnavailable(f"CUDA: no NVIDIA driver on this host: {error}") from error
    if code:
        raise TransportUnavailable(
            f"CUDA: the NVIDIA driver does not start: cuInit returned {int(code)}"
        )
    return found


def count_gpus() -> int:
    """Return the number of GPUs that the driver shows; 0 without a driver."""
    try:
        return int(_call("cuDeviceGetCount"))
    except (TransferFailed, TransportUnavailable):
        return 0


@functools.cache
def has_driver() -> bool:
    """Return whether this host has an NVIDIA driver that starts."""
    try:
        driver()
    except TransportUnavailable:
        return False
    return True


def _check(code: Any, call: str) -> None:
    """Raise TransferFailed if the driver function `call` returned an error code."""
    if code:
        _, text = driver().cuGetErrorString(code)
        detail = text.decode() if text else "unknown error"
        raise TransferFailed(f"CUDA: {call} failed with {int(code)}: {detail}")


def _call(name: str, *arguments: object) -> Any:
    """Call the driver function `name`. Return its result: a tuple if there are several results, None if there is none.

    Raises:
        TransferFailed: the driver returned an error.
    """
    code, *found = getattr(driver(), name)(*arguments)
    _check(code, name)
    return found[0] if len(found) == 1 else tuple(found) or None


class MemoryKind(Enum):
    """Kind of memory at an address. Kernels can access PINNED host memory, not PAGEABLE memory."""

    DEVICE = auto()
    PINNED = auto()
    PAGEABLE = auto()


@functools.cache
def library() -> ctypes.CDLL:
    """Return the driver's library, which `driver` has loaded."""
    return ctypes.CDLL("libcuda.so.1")


def _attribute_of(address: int, attribute: str) -> int | None:
    """Return an attribute of an address; None if the driver does not know the address.

    This function calls libcuda through ctypes, because cuda-bindings 13.2 and 13.3 return the ordinal 0 for the memory of
    every GPU.
    """
    kind = getattr(driver().CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{attribute}")
    # The driver writes 4 or 8 bytes, which depends on the attribute.
    found = ctypes.c_int64(0)
    code = library().cuPointerGetAttribute(
        ctypes.pointer(found), int(kind), ctypes.c_uint64(address)
    )
    return None if code else found.value


def memory_kind(address: int) -> MemoryKind:
    """Return the kind of memory at `address`."""
    found = _attribute_of(address, "MEMORY_TYPE")
    if not found:
        return MemoryKind.PAGEABLE
    is_host = found == int(driver().CUmemorytype.CU_MEMORYTYPE_HOST)
    return MemoryKind.PINNED if is_host else MemoryKind.DEVICE


def gpu_of(address: int) -> int:
    """Return the ordinal of the GPU that owns `address`; -1 for host memory or without a driver.

    Raises:
        TransferFailed: the address is in GPU memory, but the driver does not report the GPU.
    """
    if not has_driver() or memory_kind(address) is not MemoryKind.DEVICE:
        return -1
    ordinal = _attribute_of(address, "DEVICE_ORDINAL")
    if ordinal is None:
        raise TransferFailed(f"CUDA: the driver does not report the GPU of address {address:#x}")
    return ordinal


def pointer_device(address: int) -> int:
    """Return the ordinal of the GPU that owns `address`.

    Raises:
        RegionError: `address` is not in GPU memory.
    """
    ordinal = _attribute_of(address, "DEVICE_ORDINAL")
    if ordinal is None:
        raise RegionError(f"CUDA: {address:#x} is not in GPU memory")
    return ordinal


@final
class Stream:
    """A non-blocking stream of one device.

    Attributes:
        handle: the driver's handle of the stream.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        flags = int(driver().CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.handle = int(device.call("cuStreamCreate", flags))

    def record(self) -> Event:
        """Record an event after the work that is in the stream now, and return the event."""
        return Event(self._device, self.handle)

    def close(self) -> None:
        """Destroy the stream; queued work continues."""
        with self._device.current():
            driver().cuStreamDestroy(self.handle)


@final
class Event:
    """An event that is recorded in a stream when this object is created.

    `wait` or `close` must be called once, because each destroys the driver's event.

    Args:
        device: GPU of the stream.
        stream: handle of the stream.
    """

    def __init__(self, device: Device, stream: int) -> None:
        self._device = device
        flags = int(driver().CUevent_flags.CU_EVENT_DISABLE_TIMING)
        with device.current():
            self._handle = _call("cuEventCreate", flags)
            _call("cuEventRecord", self._handle, stream)

    def wait(self) -> None:
        """Block this thread until all work before the event has ended, and destroy the event.

        Raises:
            TransferFailed: some work of this process on the GPU failed. The event is not destroyed.
        """
        self._device.call("cuEventSynchronize", self._handle)
        self.close()

    def close(self) -> None:
        """Destroy the event. Do not call this after `wait`, which also destroys the event."""
        driver().cuEventDestroy(self._handle)


@final
class Device:
    """Primary CUDA context of one GPU. In this process, torch uses the same context.

    Raises:
        TransportUnavailable: the GPU does not exist.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        code, self._device = driver().cuDeviceGet(ordinal)
        if code:
            raise TransportUnavailable(f"CUDA: there is no GPU {ordinal}")
        self._context = _call("cuDevicePrimaryCtxRetain", self._device)
        self.num_multiprocessors = self._attribute("MULTIPROCESSOR_COUNT")
        major, minor = (
            self._attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR")
        )
        self.architecture = f"{major}{minor}"

    def _attribute(self, name: str) -> int:
        """Return an attribute of the GPU, by the driver's name without its prefix."""
        kind = getattr(driver().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_call("cuDeviceGetAttribute", kind, self._device))

    @property
    def uuid(self) -> str:
        """UUID of the GPU in hexadecimal. If this process sees only a MIG part of the GPU, the UUID of this part."""
        # In cuda-bindings 12, cuDeviceGetUuid is the old function, which returns one UUID for all parts of a GPU.
        is_old = "cuDeviceGetUuid_v2" in vars(driver())
        name = "cuDeviceGetUuid_v2" if is_old else "cuDeviceGetUuid"
        return bytes(_call(name, self._device).bytes).hex()

    def memory(self) -> tuple[int, int]:
        """Return the free bytes and all bytes of the device.

        Raises:
            TransferFailed: the driver returned an error.
        """
        free, total = self.call("cuMemGetInfo")
        return int(free), int(total)

    def synchronize(self) -> None:
        """Wait for all work that this process has queued on the device, through any library.

        Raises:
            TransferFailed: the driver returned an error, for example the error of a kernel.
        """
        self.call("cuCtxSynchronize")

    def record(self, stream: int) -> Event:
        """Record an event in another library's stream, after the work that is queued there now. Return the event.

        `stream` is the handle of the stream; 0 is the default stream.
        """
        return Event(self, stream)

    def call(self, name: str, *arguments: object) -> Any:
        """Call the driver function `name` while this device's context is current. Return its result.

        The result is a tuple if the function has several results, and None if it has no result.

        Raises:
            TransferFailed: the driver returned an error.
        """
        with self.current():
            return _call(name, *arguments)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this device's context current in the calling thread, and restore the previous context after the block."""
        _call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent")

    def enable_peer(self, other: Device) -> None:
        """Allow kernels of this device to access memory of `other` in this process. Idempotent.

        Raises:
            TransferFailed: the driver returned an error.
        """
        with self.current():
            (code,) = driver().cuCtxEnablePeerAccess(other._context, 0)
        if code != driver().CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
            _check(code, f"cuCtxEnablePeerAccess({self.ordinal} -> {other.ordinal})")

    def allocate(self, nbytes: int) -> int:
        """Allocate GPU memory with cuMemAlloc, outside torch's memory pool. The caller frees it with `free`.

        Raises:
            TransferFailed: the GPU has too little free memory.
        """
        return int(self.call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        """Free GPU memory that `allocate` returned."""
        self.call("cuMemFree", address)

    def upload(self, address: int, data: bytes | memoryview) -> None:
        """Copy `data` to GPU memory and wait until the bytes are there."""
        source = bytes(data)
        with self.current():
            _call("cuMemcpyHtoD", address, source, len(source))
            # cuMemcpyHtoD may return before the bytes are on the device, and work in a non-blocking stream does
            # not wait for such a copy.
            _call("cuStreamSynchronize", 0)

    def download(self, address: int, nbytes: int, stream: Stream | None = None) -> bytes:
        """Wait for the work in `stream`, then copy `nbytes` bytes of GPU memory to the host and return them.

        Without `stream`, wait for the work in CUDA's default stream.
        """
        target = bytearray(nbytes)
        with self.current():
            if stream is None:
                _call("cuMemcpyDtoH", target, address, nbytes)
            else:
                _call("cuMemcpyDtoHAsync", target, address, nbytes, stream.handle)
                _call("cuStreamSynchronize", stream.handle)
        return bytes(target)

    def clear(self, address: int, nbytes: int, stream: Stream) -> None:
        """Queue the zeroing of GPU memory in `stream`."""
        self.call("cuMemsetD8Async", address, 0, nbytes, stream.handle)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Queue a copy in `stream`. A copy engine of the GPU makes the copy.

        `source` and `target` are addresses in memory of this device, or in a peer's memory that `open` mapped.
        """
        self.call("cuMemcpyAsync", target, source, nbytes, stream.handle)

    def allocation(self, address: int) -> tuple[int, int]:
        """Return the start and the size in bytes of the allocation that contains `address`.

        Raises:
            TransferFailed: the driver returned an error.
        """
        base, size = self.call("cuMemGetAddressRange", address)
        return int(base), int(size)

    def is_chunk(self, address: int) -> bool:
        """Return whether the memory at `address` is shared by `export_chunk`, and not by `export`.

        It is for physical memory from cuMemCreate, such as torch's expandable segments. `allocation` then returns the
        range of one chunk, which is one call of cuMemCreate.

        Raises:
            RegionError: `address` is not in GPU memory, or no other process can map the memory.
        """
        if _attribute_of(address, "IS_LEGACY_CUDA_IPC_CAPABLE"):
            return False
        pointer_device(address)
        allowed = _attribute_of(address, "ALLOWED_HANDLE_TYPES") or 0
        if not allowed & int(_descriptor_type()):
            raise RegionError(
                f"CUDA: memory at {address:#x} cannot be mapped by another process: it must come from cudaMalloc, or "
                f"from cuMemCreate with handles that are file descriptors, got handle types {allowed:#x}; set "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False and no other backend"
            )
        return True

    def export(self, address: int) -> bytes:
        """Return the IPC handle of the allocation that begins at `address`, which comes from cudaMalloc.

        Raises:
            TransferFailed: the driver returned an error.
        """
        handle = self.call("cuIpcGetMemHandle", address)
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_NBYTES)

    def open(self, handle: bytes) -> int:
        """Map a peer's allocation into this process, and return its address for kernels of this device.

        The caller unmaps the allocation by `close_handle`.

        Args:
            handle: IPC handle that the peer's `export` returned.

        Raises:
            TransferFailed: the driver returned an error.
        """
        made = driver().CUipcMemHandle()
        # Copy the handle's bytes by address: some releases of cuda-bindings lack the field `reserved`.
        ctypes.memmove(made.getPtr(), handle, IPC_HANDLE_NBYTES)
        flags = int(driver().CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return int(self.call("cuIpcOpenMemHandle", made, flags))

    def close_handle(self, address: int) -> None:
        """Unmap a peer's allocation that `open` mapped at `address`. Errors of the driver are ignored."""
        with self.current():
            driver().cuIpcCloseMemHandle(address)

    def export_chunk(self, address: int) -> int:
        """Return a file descriptor of the chunk that contains `address`. The caller closes the descriptor.

        Raises:
            TransferFailed: the driver returned an error.
        """
        chunk = _call("cuMemRetainAllocationHandle", address)
        try:
            return int(_call("cuMemExportToShareableHandle", chunk, _descriptor_type(), 0))
        finally:
            driver().cuMemRelease(chunk)

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses, for `map_chunk`, and return the first one. The caller frees them by `unmap_chunks`.

        Raises:
            TransferFailed: the driver returned an error.
        """
        return int(_call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def map_chunk(self, descriptor: int, address: int, nbytes: int) -> None:
        """Map a peer's chunk at reserved addresses. Kernels cannot access it before `allow_access`.

        The mapping keeps the chunk allocated. The descriptor is not needed after this call.

        Args:
            descriptor: descriptor that the peer's `export_chunk` returned, received by this process.
            address: first address of the mapping.
            nbytes: size of the chunk.

        Raises:
            TransferFailed: the driver returned an error.
        """
        chunk = _call("cuMemImportFromShareableHandle", descriptor, _descriptor_type())
        try:
            _call("cuMemMap", address, nbytes, 0, chunk, 0)
        finally:
            driver().cuMemRelease(chunk)

    def allow_access(self, address: int, nbytes: int) -> None:
        """Let kernels of this device read and write mapped chunks.

        Raises:
            TransferFailed: the driver returned an error.
        """
        access = driver().CUmemAccessDesc()
        access.location.type = driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.ordinal
        access.flags = driver().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _call("cuMemSetAccess", address, nbytes, [access], 1)

    def unmap_chunks(self, address: int, mapped_nbytes: int, nbytes: int) -> None:
        """Unmap chunks, and free the addresses that `reserve` returned. Errors of the driver are ignored.

        Args:
            address: first reserved address.
            mapped_nbytes: bytes from `address` at which chunks are mapped.
            nbytes: number of reserved addresses.
        """
        if mapped_nbytes:
            driver().cuMemUnmap(address, mapped_nbytes)
        driver().cuMemAddressFree(address, nbytes)

    def pin(self, address: int, nbytes: int) -> None:
        """Pin whole pages of host memory, so that kernels can access them at `device_pointer`.

        Raises:
            TransferFailed: the driver cannot pin the pages, for example because they are pinned already.
        """
        flags = driver().CU_MEMHOSTREGISTER_PORTABLE | driver().CU_MEMHOSTREGISTER_DEVICEMAP
        self.call("cuMemHostRegister", address, nbytes, flags)

    def unpin(self, address: int) -> None:
        """Unpin host memory that `pin` pinned from `address`. Errors of the driver are ignored."""
        with self.current():
            driver().cuMemHostUnregister(address)

    def device_pointer(self, address: int) -> int:
        """Return the address at which kernels access the pinned host memory at `address`."""
        return int(self.call("cuMemHostGetDevicePointer", address, 0))

    def load(self, image: bytes) -> object:
        """Load compiled kernels; return the module.

        Raises:
            TransferFailed: the driver refuses the image.
        """
        return self.call("cuModuleLoadData", image)

    def function(self, module: object, name: str) -> object:
        """Return a kernel of a module that `load` returned.

        Raises:
            TransferFailed: the module has no kernel of this name.
        """
        code, found = driver().cuModuleGetFunction(module, name.encode())
        _check(code, f"cuModuleGetFunction({name})")
        return found

    def launch(
        self, function: object, grid: int, block: int, arguments: Sequence[Any], stream: int
    ) -> None:
        """Queue a kernel.

        Args:
            function: a kernel that `Device.function` has returned.
            grid: number of blocks.
            block: number of threads per block.
            arguments: arguments of the kernel, as ctypes values.
            stream: handle of the stream. Another library, such as torch, may own the stream.
        """
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        shape = (grid, 1, 1, block, 1, 1, 0)
        self.call("cuLaunchKernel", function, *shape, stream, ctypes.addressof(pointers), 0)


def _descriptor_type() -> Any:
    """Return the driver's constant for chunks that are shared as file descriptors."""
    return driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def compile_source(source: str, architecture: str) -> bytes:
    """Compile CUDA C to a cubin for `sm_<architecture>` with NVRTC.

    Raises:
        TransportUnavailable: NVRTC is missing or refuses the source.
    """
    try:
        from cuda.bindings import nvrtc

        _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"put.cu", 0, [], [])
    except (ImportError, RuntimeError) as error:
        raise TransportUnavailable(f"CUDA: no NVRTC library: {error}") from error
    options = [f"--gpu-architecture=sm_{architecture}".encode(), b"-std=c++17"]
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if code:
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            log = bytes(size)
            nvrtc.nvrtcGetProgramLog(program, log)
            text = log.rstrip(b"\0").decode()
            raise TransportUnavailable(f"CUDA: NVRTC error {int(code)}: {text}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        image = bytes(size)
        nvrtc.nvrtcGetCUBIN(program, image)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return image
