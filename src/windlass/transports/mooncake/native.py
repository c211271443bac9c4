"""Starting Mooncake's TransferEngine, and finding out what it really is.

The `protocol` argument of `initialize` is ignored by the published wheels: the engine picks
RDMA where it sees a NIC of the names given and TCP where it sees none, returns 0 either way, and
says nothing; its `get_local_topology` answers for another engine without those names. So the
choice is forced where it can be and looked up afterwards, always: in the devices that the kernel
says this process has opened.
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
from typing import TYPE_CHECKING, Protocol, cast

from windlass.envs import environment_value, set_defaults
from windlass.errors import ConfigError, TransportUnavailable
from windlass.transports.inbound import OPENING, listening_ports
from windlass.transports.liveness import listen_on
from windlass.wording import install_command

if TYPE_CHECKING:
    from windlass.transports.mooncake.transport import MooncakeConfig

MAX_PIECES = 1024
"""Per call. Over 2048 pieces waiting at one peer, the engine fails every later call to it, for
good; and until then error returns leave pieces behind that land a second later."""

_MINIMUM = (0, 3, 12, 1)
"""Before 0.3.12.post1 a TCP write returned when it was sent, not when it was visible."""
WITHOUT_CUDA = "mooncake-transfer-engine-non-cuda"
"""The distribution that asks for no CUDA."""
_DISTRIBUTIONS = (
    WITHOUT_CUDA,
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)
_DEFAULTS = {
    "MC_LOG_LEVEL": "ERROR",
    # One connection per peer keeps writes in order, and that is what lets an error be told
    # from an unknown outcome (see `transport.py`). 1, 2 and 4 are equally fast on loopback.
    "MC_TCP_LANES_PER_PEER": "1",
    # Soft-RoCE takes the engine's 7 retries for "for ever", and so would a call to a dead peer.
    "MC_SLICE_TIMEOUT": "30",
}
_VERBS = "/dev/infiniband/uverbs"
_MARK = signal.SIGIO
_MAX_MR_SIZE_OFFSET = 64 + 8 + 8
"""`ibv_device_attr`: char fw_ver[64], two GUIDs of 8 bytes, then uint64 max_mr_size."""
_DEVICE_ATTR_NBYTES = 4096  # more than it is in any version


class MooncakeProtocol(StrEnum):
    """The wire that Mooncake must use; AUTO takes what it finds and reports it."""

    AUTO = "auto"
    TCP = "tcp"
    RDMA = "rdma"


class NativeEngine(Protocol):
    """The part of `mooncake.engine.TransferEngine` in use; each int is a return code, 0 is good."""

    def initialize(self, host: str, metadata: str, protocol: str, device: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def send_probe(self, peer: str, /) -> int: ...
    def register_memory(self, address: int, nbytes: int, /) -> int: ...
    def batch_register_memory(self, addresses: list[int], nbytes: list[int], /) -> int: ...
    def unregister_memory(self, address: int, /) -> int: ...
    def transfer_sync_read(self, peer: str, local: int, remote: int, nbytes: int, /) -> int: ...
    def batch_transfer_sync_write(
        self, peer: str, local: list[int], remote: list[int], nbytes: list[int], /
    ) -> int: ...


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine.

    Attributes:
        wire: `tcp` or `rdma`, looked up.
        ordered: one TCP connection per peer, so that writes are handled in order.
        detail: distribution, version, NICs.
        ports: on which it listens.
        num_nics: that it writes through; 0 over TCP.
        max_registration_nbytes: what the engine registers at once over verbs; 0 for no limit.
    """

    engine: NativeEngine
    wire: str
    ordered: bool
    detail: str
    max_registration_nbytes: int
    ports: frozenset[int]
    num_nics: int


def start_engine(config: MooncakeConfig) -> Started:
    """Start a TransferEngine on a port that it picks.

    Raises:
        TransportUnavailable: not installed, too old, a system library is missing, it does not
            start, or it chose another wire than the one asked for.
        ConfigError: `config.protocol` is rdma and the environment forces tcp.
    """
    # The engine starts, and returns 0, on a host name that does not exist.
    listen_on(config.host, "mooncake").close()
    forced = config.protocol is MooncakeProtocol.TCP
    detail = _installed_version()
    chosen = {"MC_FORCE_TCP": "1"} if forced else {}
    if ":" in config.host:
        chosen["MC_USE_IPV6"] = "1"  # listens and connects by IPv4 only without it
    values = set_defaults(_DEFAULTS | chosen)
    force_tcp = environment_value("MC_FORCE_TCP")
    if config.protocol is MooncakeProtocol.RDMA and force_tcp:
        raise ConfigError(f"mooncake: MC_FORCE_TCP must be unset for rdma, got {force_tcp!r}")
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise TransportUnavailable(
            f"mooncake: cannot be loaded ({error}); libibverbs.so.1 comes with the system package "
            "libibverbs1"
        ) from error
    engine = cast("NativeEngine", TransferEngine())
    asked = "tcp" if config.protocol is MooncakeProtocol.AUTO else config.protocol.value
    with OPENING:  # one engine at a time: the devices opened meanwhile are its own, too
        _open_devices(mark=True)
        listened = listening_ports()
        code = engine.initialize(config.host, "P2PHANDSHAKE", asked, config.device)
        nics = sorted(_open_devices(mark=False))
        ports = listening_ports() - listened
    if code != 0:
        raise TransportUnavailable(
            f"mooncake: TransferEngine does not start on {config.host} (code {code}): is the host "
            "an address of this machine, and is a port between 15000 and 17000 free?"
        )
    wire = "rdma" if nics else "tcp"
    _check_chosen(config, wire, nics)
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


def _check_chosen(config: MooncakeConfig, wire: str, nics: list[str]) -> None:
    """Refuse another wire, or other NICs, than those asked for."""
    if config.protocol is not MooncakeProtocol.AUTO and wire != config.protocol.value:
        raise TransportUnavailable(
            f"mooncake: protocol must be {config.protocol.value}, the engine chose {wire} "
            f"(NICs it opened: {', '.join(nics) or 'none'})"
        )
    wanted = {name.strip() for name in config.device.split(",") if name.strip()}
    if wire == "rdma" and wanted and wanted != set(nics):
        raise TransportUnavailable(
            f"mooncake: device must be {config.device}, the engine opened {', '.join(nics)}"
        )


def _registration_limit(nics: list[str]) -> int:
    """Return what to register at once: the engine splits what is larger by itself, and then refuses pieces that cross the seam."""
    asked = environment_value("MC_MAX_MR_SIZE") or ""
    limits = [max_registration_nbytes(nic) for nic in nics]
    if asked.isdigit():
        limits.append(int(asked))
    return min((limit for limit in limits if limit >= mmap.PAGESIZE), default=0)


def is_installed(distribution: str) -> bool:
    """Return whether this environment has a distribution, by its metadata."""
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _installed_version() -> str:
    found = [f"{name} {version(name)}" for name in _DISTRIBUTIONS if is_installed(name)]
    if not found:
        raise TransportUnavailable(
            f"mooncake: not installed; {install_command('mooncake')}, on machines with GPUs "
            "'.[mooncake-cuda13]' or '.[mooncake-cuda12]'"
        )
    if len(found) > 1:
        raise TransportUnavailable(
            f"mooncake: one distribution must own the package, found {' and '.join(found)}"
        )
    match = re.search(r" (\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", found[0])
    if match is None or tuple(int(part or 0) for part in match.groups()) < _MINIMUM:
        raise TransportUnavailable(f"mooncake: version must be >= 0.3.12.post1, got {found[0]}")
    return found[0]


def _open_devices(*, mark: bool) -> set[str]:
    """RDMA devices that this process has opened and that bear no mark yet. `mark`: have them bear one from now on.

    The mark is a signal that is never sent, of the open file: a number is no identity. An engine that
    another thread is destroying closes its device at any moment, and the next one gets its number.
    """
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile: the listing's own descriptor is
            target, number = str(entry.readlink()), int(entry.name)
            if not target.startswith(_VERBS) or fcntl.fcntl(number, fcntl.F_GETSIG) == _MARK:
                continue
            found.add(_device_name(target))
            if mark:
                fcntl.fcntl(number, fcntl.F_SETSIG, _MARK)
    return found


def _device_name(verbs: str) -> str:
    name = Path("/sys/class/infiniband_verbs", Path(verbs).name, "ibdev")
    return name.read_text(encoding="ascii").strip()


def max_registration_nbytes(device: str) -> int:
    """Return the largest memory region of a device, in bytes (`max_mr_size`), by the system's libibverbs.

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
