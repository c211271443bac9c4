"""What a verbs device can do, asked of the system's libibverbs, which Mooncake has loaded."""

from __future__ import annotations

import ctypes

from windlass.errors import TransportUnavailable

_MAX_MR_SIZE_OFFSET = 64 + 8 + 8
"""`ibv_device_attr`: char fw_ver[64], two GUIDs of 8 bytes, then uint64 max_mr_size."""
_DEVICE_ATTR_NBYTES = 4096  # more than it is in any version


def max_registration_nbytes(device: str) -> int:
    """The largest memory region of a device, in bytes (`max_mr_size`).

    Raises:
        TransportUnavailable: no libibverbs, no such device, or it cannot be asked.
    """
    try:
        verbs = ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        raise TransportUnavailable(
            f"mooncake: libibverbs.so.1 cannot be loaded: {error}"
        ) from error
    verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    verbs.ibv_free_device_list.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    verbs.ibv_get_device_name.restype = ctypes.c_char_p
    verbs.ibv_get_device_name.argtypes = [ctypes.c_void_p]
    verbs.ibv_open_device.restype = ctypes.c_void_p
    verbs.ibv_open_device.argtypes = [ctypes.c_void_p]
    verbs.ibv_query_device.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    verbs.ibv_close_device.argtypes = [ctypes.c_void_p]
    count = ctypes.c_int(0)
    devices = verbs.ibv_get_device_list(ctypes.byref(count))
    if not devices:
        raise TransportUnavailable("mooncake: libibverbs gives no list of devices")
    try:
        for index in range(count.value):
            if verbs.ibv_get_device_name(devices[index]) == device.encode():
                return _query(verbs, devices[index], device)
    finally:
        verbs.ibv_free_device_list(devices)
    raise TransportUnavailable(f"mooncake: libibverbs knows no device {device!r}")


def _query(verbs: ctypes.CDLL, device: int | None, name: str) -> int:
    context = verbs.ibv_open_device(device)
    if not context:
        raise TransportUnavailable(f"mooncake: device {name} cannot be opened")
    try:
        answer = ctypes.create_string_buffer(_DEVICE_ATTR_NBYTES)
        code = verbs.ibv_query_device(context, answer)
        if code != 0:
            raise TransportUnavailable(f"mooncake: device {name} cannot be asked (code {code})")
        return int(ctypes.c_uint64.from_buffer(answer, _MAX_MR_SIZE_OFFSET).value)
    finally:
        verbs.ibv_close_device(context)
