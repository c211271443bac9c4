"""Start of Mooncake's TransferEngine, and detection of the wire that it uses.

The published wheels ignore the `protocol` argument of `initialize`. The engine uses RDMA if it
finds a NIC with a configured name, and TCP otherwise. It returns 0 in both cases and does not report
its choice, and `get_local_topology` ignores the configured names. So this module forces the choice
where it can, and after the start always checks which wire the engine chose: the kernel lists the RDMA
devices that this process has opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import re
import signal
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol, cast

from windlass.envs import environment_value, set_defaults
from windlass.errors import ConfigError, TransportUnavailable
from windlass.transports.inbound import OPENING, listening_ports
from windlass.transports.liveness import listen_on
from windlass.wording import install_command

MAX_PIECES = 1024
"""Largest number of pieces per call. If more than 2048 pieces wait for one peer, all later calls to it
fail. Even below that, pieces of a failed call can arrive a second after the error."""

_MINIMUM = (0, 3, 12, 1)
"""Oldest supported version. Before 0.3.12.post1, a TCP write returned when its bytes were sent, and not when
they were visible at the peer."""
WITHOUT_CUDA = "mooncake-transfer-engine-non-cuda"
"""Package of Mooncake that does not need CUDA."""
_DISTRIBUTIONS = (
    WITHOUT_CUDA,
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)
_DEFAULTS = {
    "MC_LOG_LEVEL": "ERROR",
    # With one connection per peer, operations keep their order. So the success of a later read shows that a failed
    # write has ended (see `transport.py`). 1, 2 and 4 connections are equally fast on loopback.
    "MC_TCP_LANES_PER_PEER": "1",
    # Soft-RoCE treats the engine's 7 retries as unlimited, so without a timeout a call to a dead peer would
    # never end.
    "MC_SLICE_TIMEOUT": "30",
}
VERBS = "/dev/infiniband/uverbs"
"""Beginning of the paths of RDMA devices."""
_MARK = signal.SIGIO
_MAX_MR_SIZE_OFFSET = 64 + 8 + 8
"""Offset in `ibv_device_attr`: char fw_ver[64], two GUIDs of 8 bytes, then uint64 max_mr_size."""
_DEVICE_ATTR_NBYTES = 4096
"""Size of the buffer for `ibv_device_attr`, larger than the struct of any version."""


class MooncakeProtocol(StrEnum):
    """Wire that Mooncake must use. AUTO accepts both wires."""

    AUTO = "auto"
    TCP = "tcp"
    RDMA = "rdma"


class NativeEngine(Protocol):
    """Methods of `mooncake.engine.TransferEngine` that Windlass uses. An int result is a return code; 0 is success."""

    def initialize(self, host: str, metadata: str, protocol: str, device: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def send_probe(self, peer: str, /) -> int: ...
    def register_memory(self, address: int, nbytes: int, /) -> int: ...
    def batch_register_memory(self, addresses: list[int], nbytes: list[int], /) -> int: ...
    def unregister_memory(self, address: int, /) -> int: ...
    def transfer_sync_read(self, peer: str, local: int, remote: int, nbytes: int, /) -> int: ...
    def batch_transfer_sync_read(
        self, peer: str, local: list[int], remote: list[int], nbytes: list[int], /
    ) -> int: ...
    def batch_transfer_sync_write(
        self, peer: str, local: list[int], remote: list[int], nbytes: list[int], /
    ) -> int: ...


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine.

    Attributes:
        engine: native engine.
        wire: `tcp` or `rdma`, as detected.
        ordered: whether the wire is TCP with one connection per peer, so that writes keep their order.
        detail: package, version and NICs, for reports.
        max_registration_nbytes: largest range that the engine can register at once over RDMA; 0 for no
            limit.
        ports: ports on which the engine listens.
        num_nics: number of NICs that the engine uses; 0 over TCP.
    """

    engine: NativeEngine
    wire: str
    ordered: bool
    detail: str
    max_registration_nbytes: int
    ports: frozenset[int]
    num_nics: int


def start_engine(host: str, device: str, protocol: MooncakeProtocol) -> Started:
    """Start a TransferEngine on a port that it chooses, and find out which wire it uses.

    Args:
        host: address to listen on.
        device: names of the NICs to use, separated by commas; empty for all.
        protocol: required wire.

    Raises:
        TransportUnavailable: Mooncake is not installed or too old, a system library is missing, the
            engine does not start, or it uses another wire than the configured one.
        ConfigError: `protocol` is rdma but the environment forces tcp.
    """
    # The engine starts and returns 0 even for a host name that does not exist, so check the host first.
    listen_on(host, "mooncake").close()
    forced = protocol is MooncakeProtocol.TCP
    detail = _installed_version()
    chosen = {"MC_FORCE_TCP": "1"} if forced else {}
    if ":" in host:
        # Without this variable the engine listens and connects only over IPv4.
        chosen["MC_USE_IPV6"] = "1"
    values = set_defaults(_DEFAULTS | chosen)
    force_tcp = environment_value("MC_FORCE_TCP")
    if protocol is MooncakeProtocol.RDMA and force_tcp:
        raise ConfigError(f"mooncake: MC_FORCE_TCP must be unset for rdma, got {force_tcp!r}")
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise TransportUnavailable(
            f"mooncake: cannot be loaded ({error}); the system package libibverbs1 contains "
            "libibverbs.so.1"
        ) from error
    engine = cast("NativeEngine", TransferEngine())
    asked = "tcp" if protocol is MooncakeProtocol.AUTO else protocol.value
    # Start one engine at a time: all devices and ports that are opened while it starts then belong to it.
    with OPENING:
        open_devices(mark=True)
        listened = listening_ports()
        code = engine.initialize(host, "P2PHANDSHAKE", asked, device)
        nics = sorted(open_devices(mark=False))
        ports = listening_ports() - listened
    if code != 0:
        raise TransportUnavailable(
            f"mooncake: TransferEngine does not start on {host} (code {code}): is the host "
            "an address of this machine, and is a port between 15000 and 17000 free?"
        )
    wire = "rdma" if nics else "tcp"
    _check_chosen(device, protocol, wire, nics)
    ordered = wire == "tcp" and values["MC_TCP_LANES_PER_PEER"] == "1"
    limit = _registration_limit(nics) if wire == "rdma" else 0
    return Started(
        engine=engine,
        wire=wire,
        ordered=ordered,
        detail=f"{detail}, NICs: {', '.join(nics) or 'none'}",
        ports=ports,
        max_registration_nbytes=limit,
        num_nics=len(nics),
    )


def _check_chosen(device: str, protocol: MooncakeProtocol, wire: str, nics: list[str]) -> None:
    """Raise `TransportUnavailable` if the engine uses another wire or other NICs than the configured ones."""
    if protocol is not MooncakeProtocol.AUTO and wire != protocol.value:
        raise TransportUnavailable(
            f"mooncake: protocol must be {protocol.value}, but the engine chose {wire} "
            f"(NICs that it opened: {', '.join(nics) or 'none'})"
        )
    wanted = {name.strip() for name in device.split(",") if name.strip()}
    if wire == "rdma" and wanted and wanted != set(nics):
        raise TransportUnavailable(
            f"mooncake: device must be {device}, but the engine opened {', '.join(nics)}"
        )


def _registration_limit(nics: list[str]) -> int:
    """Return the largest size in bytes of one registration over these NICs; 0 for no limit.

    The engine divides a larger range into several registrations, and then refuses pieces that cross from one
    registration to the next.
    """
    asked = environment_value("MC_MAX_MR_SIZE") or ""
    limits = [max_registration_nbytes(nic) for nic in nics]
    if asked.isdigit():
        limits.append(int(asked))
    return min((limit for limit in limits if limit >= mmap.PAGESIZE), default=0)


def is_installed(distribution: str) -> bool:
    """Return whether a package is installed in this environment."""
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _installed_version() -> str:
    """Return the version of the installed distribution.

    Raises:
        TransportUnavailable: no distribution is installed, several are installed, or the installed one is too old.
    """
    found = [f"{name} {version(name)}" for name in _DISTRIBUTIONS if is_installed(name)]
    if not found:
        raise TransportUnavailable(
            f"mooncake: not installed; {install_command('mooncake')}, on machines with GPUs "
            "'.[mooncake-cuda13]' or '.[mooncake-cuda12]'"
        )
    if len(found) > 1:
        raise TransportUnavailable(
            f"mooncake: exactly one distribution of Mooncake must be installed, got {' and '.join(found)}"
        )
    match = re.search(r" (\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", found[0])
    if match is None or tuple(int(part or 0) for part in match.groups()) < _MINIMUM:
        raise TransportUnavailable(f"mooncake: version must be >= 0.3.12.post1, got {found[0]}")
    return found[0]


def open_devices(*, mark: bool) -> set[str]:
    """Return the RDMA devices that this process has opened, except devices that an earlier call marked.

    `start_engine` marks all open devices before it starts an engine, to find the devices that the engine opens.
    The mark is a signal number that is set on the open file (F_SETSIG) and never sent. Numbers of file descriptors cannot
    replace the mark: after another thread has destroyed an engine, devices of a new engine can get the same numbers.

    Args:
        mark: whether to mark the returned devices.
    """
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        # A descriptor may be closed by now, for example the descriptor with which the folder is read.
        with contextlib.suppress(OSError):
            target, number = str(entry.readlink()), int(entry.name)
            if not target.startswith(VERBS) or fcntl.fcntl(number, fcntl.F_GETSIG) == _MARK:
                continue
            found.add(device_name(target))
            if mark:
                fcntl.fcntl(number, fcntl.F_SETSIG, _MARK)
    return found


def device_name(verbs: str) -> str:
    """Return the name of the RDMA device at a path that begins with `VERBS`, such as `mlx5_0`."""
    name = Path("/sys/class/infiniband_verbs", Path(verbs).name, "ibdev")
    return name.read_text(encoding="ascii").strip()


def max_registration_nbytes(device: str) -> int:
    """Return the size in bytes of the largest memory region that an RDMA device can register (`max_mr_size`).

    Raises:
        TransportUnavailable: libibverbs or the device is missing, or the query failed.
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
        raise TransportUnavailable("mooncake: libibverbs returned no list of devices")
    try:
        for index in range(count.value):
            if verbs.ibv_get_device_name(devices[index]) == device.encode():
                return _query(verbs, devices[index], device)
    finally:
        verbs.ibv_free_device_list(devices)
    raise TransportUnavailable(
        f"mooncake: device must be a device that libibverbs lists, got {device!r}"
    )


def _query(verbs: ctypes.CDLL, device: int | None, name: str) -> int:
    """Open a device, return the largest size of one registration, and close the device.

    Raises:
        TransportUnavailable: the device cannot be opened or queried.
    """
    context = verbs.ibv_open_device(device)
    if not context:
        raise TransportUnavailable(f"mooncake: device {name} cannot be opened")
    try:
        answer = ctypes.create_string_buffer(_DEVICE_ATTR_NBYTES)
        code = verbs.ibv_query_device(context, answer)
        if code != 0:
            raise TransportUnavailable(f"mooncake: device {name} cannot be queried (code {code})")
        return int(ctypes.c_uint64.from_buffer(answer, _MAX_MR_SIZE_OFFSET).value)
    finally:
        verbs.ibv_close_device(context)
