"""Start of a NIXL agent, and detection of the wire that UCX uses.

NIXL only reports that it uses UCX, and UCX chooses a wire for each peer. So this module limits the
wires that UCX may use, and reads the chosen wires from UCX's log (`UCX_PROTO_INFO`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast, final

import numpy as np

from windlass.envs import environment_value, set_defaults, temporary_values
from windlass.errors import TransportUnavailable
from windlass.layout.columns import UInt64Array
from windlass.net.clock import Deadline
from windlass.transports.inbound import (
    OPENING,
    Connection,
    connections_to,
    end_connections,
    listening_ports,
    new_mark,
)


class NixlWire(StrEnum):
    """Wire that UCX must use for writes. AUTO accepts any wire."""

    AUTO = "auto"
    CMA = "cma"
    TCP = "tcp"
    RC = "rc"
    UD = "ud"


_TLS = {
    NixlWire.AUTO: "all",
    # cma cannot set up a connection; tcp does.
    NixlWire.CMA: "cma,tcp,self",
    NixlWire.TCP: "tcp,self",
    # rc cannot set up a connection; ud does.
    NixlWire.RC: "rc,ud,self",
    NixlWire.UD: "ud,self",
}
_ALLOWED = {
    NixlWire.CMA: frozenset({"cma"}),
    NixlWire.TCP: frozenset({"tcp"}),
    NixlWire.RC: frozenset({"rc_verbs", "rc_mlx5"}),
    NixlWire.UD: frozenset({"ud_verbs", "ud_mlx5"}),
}
_ONE_SIDED = frozenset({"cma", "cuda_ipc", "rc_verbs", "rc_mlx5", "dc_mlx5"})
_STAGING = "cuda_copy"
"""UCX component that copies between a GPU and its host for wires that cannot access GPU memory."""
_PROGRESS_REST_US = 100
"""Microseconds that UCX's progress thread sleeps between two polls."""
TCP_MARK = new_mark()
"""Number of SYN retries that marks all TCP connections of UCX in this process, see `new_mark`."""
_FENCES = threading.Lock()
"""Lock of `_OF_AGENTS_WITH_THEMSELVES`."""
_OF_AGENTS_WITH_THEMSELVES: dict[TcpFence, frozenset[Connection]] = {}
"""Fence -> the connection of its agent to itself, from both ends."""
_BUILDS = ("nixl_cu12", "nixl_cu13")
"""Packages with NIXL's code, one per version of CUDA."""
_HEADER = re.compile(r"\| (\S+) .*cfg#\d+ +\|")
_COMPLAINT = re.compile(r"\bUCX +(?:ERROR|FATAL|WARN|DIAG) +(.*)")
_NUM_COMPLAINTS = 3
_WIRE = re.compile(r"([a-z]+[a-z0-9_]*)/([\w.:-]+)")


class NativeAgent(Protocol):
    """Methods of `nixl._api.nixl_agent` that Windlass uses. Not thread-safe, so the transport holds its lock."""

    def create_backend(self, backend: str, parameters: dict[str, str], /) -> None: ...
    def get_reg_descs(self, regions: list[tuple[int, int, int, str]], kind: str, /) -> object: ...
    def register_memory(self, regions: object, kind: str, backends: list[str], /) -> object: ...
    def deregister_memory(self, regions: object, /) -> None: ...
    def get_partial_agent_metadata(
        self, regions: object, with_connection: bool, backends: list[str], /
    ) -> bytes: ...
    def add_remote_agent(self, metadata: bytes, /) -> bytes | str: ...
    def remove_remote_agent(self, name: str, /) -> None: ...
    def get_xfer_descs(self, pieces: UInt64Array, kind: str, /) -> object: ...
    def initialize_xfer(
        self, operation: str, local: object, remote: object, peer: str, /
    ) -> object: ...
    def transfer(self, handle: object, /) -> str: ...
    def check_xfer_state(self, handle: object, /) -> str: ...


@dataclass(frozen=True, slots=True, order=True)
class PutWire:
    """A wire through which UCX writes.

    Attributes:
        name: UCX's name of the wire: `cma`, `tcp`, `rc_verbs`, ...
        device: UCX's name of the device: `rxe0:1`, `lo`, `memory`, ...
        emulated: whether threads of the target copy the bytes, because the wire has no remote write.
    """

    name: str
    device: str
    emulated: bool

    @property
    def one_sided(self) -> bool:
        """True if a write completes while the target's process is stopped."""
        return self.name in _ONE_SIDED and not self.emulated


class WireLog:
    """Reader of the wires that UCX has logged for one agent. All agents of a process share one log file.

    Args:
        name: name of the agent, which is in the header of each table of the log.
        path: path of the log file.
    """

    def __init__(self, name: str, path: Path) -> None:
        self._name = name
        self._path = path

    def put_wires(self) -> frozenset[PutWire]:
        """Return all wires that UCX has chosen for remote writes of this NIXL agent.

        Raises:
            TransportUnavailable: the log cannot be read.
        """
        try:
            lines = self._path.read_text(errors="replace").splitlines()
        except OSError as error:
            raise TransportUnavailable(f"nixl: UCX's log cannot be read: {error}") from error
        found: set[PutWire] = set()
        mine = put = False
        for line in lines:
            header = _HEADER.search(line)
            if header is not None:
                mine, put = header[1] == self._name, False
            elif mine and "remote memory write by ucp_put" in line:
                put = True
            elif "remote memory" in line or "active message" in line:
                put = False
            elif mine and put:
                emulated = "software" in line
                named = _WIRE.findall(line)
                found.update(PutWire(n, d, emulated) for n, d in named if n != _STAGING)
        return frozenset(found)

    def complaints(self) -> str:
        """Return the last errors and warnings that UCX has logged in this process; empty if there are none."""
        with contextlib.suppress(OSError):
            text = self._path.read_text(errors="replace")
            return " / ".join(_COMPLAINT.findall(text)[-_NUM_COMPLAINTS:])
        return ""

    def check(self, wire: NixlWire) -> None:
        """Check that UCX chose the configured wire. Call this after a first write, because UCX logs its choice then.

        Raises:
            TransportUnavailable: UCX chose another wire, or the log does not contain the name of the wire.
        """
        allowed, wires = _ALLOWED.get(wire, frozenset[str]()), self.put_wires()
        strange = sorted({taken.name for taken in wires} - allowed)
        if (allowed and strange) or not wires:
            raise TransportUnavailable(
                f"nixl: wire must be {wire.value}, but UCX chose "
                f"{', '.join(strange) or 'a wire that its log does not name'}; nothing was sent"
            )


def may_use_tcp(wire: NixlWire) -> bool:
    """Return whether UCX may send bytes over the kernel's TCP."""
    return wire in {NixlWire.TCP, NixlWire.AUTO}


def may_use_verbs(wire: NixlWire) -> bool:
    """Return whether UCX may use RDMA verbs, for which registration pins memory."""
    return wire in {NixlWire.RC, NixlWire.UD} or (wire is NixlWire.AUTO and _has_nics())


def _has_nics() -> bool:
    """Return whether this host has an RDMA device."""
    nics = Path("/sys/class/infiniband")
    return nics.is_dir() and any(nics.iterdir())


def native_errors() -> tuple[type[Exception], ...]:
    """Return the types of exceptions that NIXL's calls raise. Call this after NIXL was loaded."""
    classes = [
        value for name, value in vars(_module("_bindings")).items() if name.endswith("Error")
    ]
    return (*classes, RuntimeError)


def start_agent(
    name: str, wire: NixlWire, device: str, gpu: int
) -> tuple[NativeAgent, WireLog, str]:
    """Start a NIXL agent with a UCX backend. Return the agent, the reader of its UCX log, and a text with the version.

    Set defaults of UCX and NIXL in this process's environment permanently. Set other variables only while the agent
    starts.

    Args:
        name: name of the agent.
        wire: wire that UCX must use; `AUTO` lets UCX choose.
        device: UCX's names of the network devices to use, separated by commas; empty for all.
        gpu: ordinal of the GPU with the memory to register; -1 for host memory.

    Raises:
        TransportUnavailable: NIXL is not installed, or UCX does not start with the configured wire.
    """
    try:
        detail = f"nixl {version('nixl')}"
    except PackageNotFoundError as error:
        raise TransportUnavailable(
            "nixl: not installed; pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1"
        ) from error
    settings = {"UCX_PROTO_INFO": "y", "NIXL_LOG_LEVEL": "ERROR"}
    if not _has_nics():
        # UCX's `ib` module loads the wheel's copy of libnl-route, which crashes when the process exits.
        settings["UCX_MODULES"] = "^ib"
    set_defaults(settings)
    # NIXL has a parameter for UCX settings, but cuts values at the first comma. So set the environment.
    wires = _TLS[wire]
    if gpu >= 0:
        # Without `cuda_copy`, UCX does not support GPU memory.
        wires += f",{_STAGING}"
    settings = {"UCX_TLS": wires, "UCX_TCP_SYN_CNT": str(TCP_MARK)}
    if device:
        settings["UCX_NET_DEVICES"] = device
        settings["UCX_MAX_RMA_RAILS"] = str(device.count(",") + 1)
    if wire is NixlWire.AUTO:
        del settings["UCX_TLS"]
    # Start one agent at a time, because the environment is different while an agent starts. UCX opens its log once, when
    # the first agent starts, so all agents of this process have the same log.
    with OPENING:
        path = settings["UCX_LOG_FILE"] = _log_file()
        with temporary_values(settings):
            agent = native_agent(name, wire, device)
    return agent, WireLog(name, Path(path.replace("%p", str(os.getpid())))), detail


def native_agent(name: str, wire: NixlWire, device: str) -> NativeAgent:
    """Start and return NIXL's agent, with its UCX backend.

    The caller holds `OPENING` and has set UCX's environment variables (`start_agent` does both).

    Args:
        name: name of the agent.
        wire: the wire that the environment selects, for the error text.
        device: the devices that the environment selects, for the error text.

    Raises:
        TransportUnavailable: NIXL cannot be loaded, or UCX does not start.
    """
    try:
        api = _module("_api")
    except ImportError as error:
        raise TransportUnavailable(f"nixl: cannot be loaded ({error})") from error
    # NIXL logs each agent at INFO.
    for logger in (logging.getLogger("nixl"), api.logger):
        logger.setLevel(logging.WARNING)
    try:
        with _patient_progress():
            agent = cast("NativeAgent", api.nixl_agent(name, api.nixl_agent_config(backends=[])))
            agent.create_backend("UCX", {})
    except native_errors() as error:
        raise TransportUnavailable(
            f"nixl: UCX does not start with wire {wire.value} and device "
            f"{device or 'any'!r}: {error}"
        ) from error
    return agent


@functools.cache
def _log_file() -> str:
    """Return the path of UCX's log in this process: the user's choice, or a file in a private folder.

    The folder is private, because in a shared folder another user could create a link with the log's name. UCX would
    then write to the link's target.
    """
    if chosen := environment_value("UCX_LOG_FILE"):
        return chosen
    folder = tempfile.mkdtemp(prefix="windlass-")
    atexit.register(_remove_folder, folder, os.getpid())
    return str(Path(folder, "ucx.%p.log"))


def _remove_folder(folder: str, owner: int) -> None:
    """Delete the folder of UCX's log if this process has created it. `owner`: pid of the process that created it."""
    # A forked child must not remove the folder of its parent.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def memory_kind(gpu: int) -> str:
    """Return NIXL's name for the memory of GPU `gpu`, or for host memory if `gpu` is -1."""
    return "DRAM" if gpu < 0 else "VRAM"


def new_write(
    agent: NativeAgent, peer: str, pieces: Sequence[UInt64Array], gpus: tuple[int, int]
) -> object:
    """Prepare a write of pieces to a peer, and return NIXL's handle. `NativeAgent.transfer` begins the write.

    NIXL releases the write when the handle is deleted, so the caller keeps the handle until the write has ended.

    Args:
        agent: agent that writes.
        peer: name of the peer's agent.
        pieces: local addresses, remote addresses, and sizes in bytes.
        gpus: GPU of the local memory and of the remote memory; -1 for host memory.
    """
    local, remote, nbytes = pieces
    here, there = (
        agent.get_xfer_descs(
            np.stack([addresses, nbytes, np.full_like(nbytes, max(gpu, 0))], axis=1),
            memory_kind(gpu),
        )
        for addresses, gpu in zip((local, remote), gpus, strict=True)
    )
    return agent.initialize_xfer("WRITE", here, there, peer)


@contextlib.contextmanager
def _patient_progress() -> Iterator[None]:
    """Inside the block, start agents with a UCX progress thread that sleeps between two polls.

    NIXL's Python layer sets this sleep to 0, so that each idle agent keeps a core busy. The sleep
    can only be changed by replacing the layer's configuration type while an agent starts.
    """
    bindings = _module("_bindings")
    original = bindings.nixlAgentConfig

    class Patient(original):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, _PROGRESS_REST_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Patient
    try:
        yield
    finally:
        bindings.nixlAgentConfig = original


def _module(name: str) -> Any:
    """Return a module of the installed NIXL build.

    The package `nixl` would import torch to choose a build. If only one build is installed, use it directly.
    """
    builds = [build for build in _BUILDS if find_spec(build) is not None]
    return import_module(f"{builds[0] if len(builds) == 1 else 'nixl'}.{name}")


@final
class TcpFence:
    """Fence that closes the TCP connections of this process's NIXL agents, except each agent's connection to itself.

    Each agent connects to itself at its start. Every registration uses this connection, because the agent loads
    the key of its own region in the same way as a peer does. Without the connection, every later registration
    would fail, and the only error would be NIXL_ERR_BACKEND (1.5.1, 2026-11-22). Create this object before the
    agent starts.

    Args:
        mark: mark of the agents' sockets (`new_mark`), the same in the whole process.
    """

    def __init__(self, mark: int) -> None:
        self._mark = mark
        self._listened = listening_ports()

    def spare_own_connections(self) -> None:
        """Record the agent's connection to itself, so that `cut` does not close it.

        Call this after the agent has registered memory and before a peer gets the agent's address. At that time, only
        the agent itself has connected to a port of the agent.
        """
        found = connections_to(listening_ports() - self._listened)
        with _FENCES:
            _OF_AGENTS_WITH_THEMSELVES[self] = found | {(peer, own) for own, peer in found}

    def cut(self, deadline: Deadline) -> int:
        """Close the connections between NIXL agents of this process and peers; return their number.

        Raises:
            TransferFailed: UCX has not closed the socket of a connection by the deadline.
        """
        with _FENCES:
            spared = frozenset[Connection]().union(*_OF_AGENTS_WITH_THEMSELVES.values())

        def is_meant(own: socket.socket) -> bool:
            marked = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT) == self._mark
            return marked and (own.getsockname(), own.getpeername()) not in spared

        return end_connections(is_meant, deadline)

    def close(self) -> None:
        """Delete the record of the agent's connection to itself. Call this after the agent has ended. Idempotent."""
        with _FENCES:
            _OF_AGENTS_WITH_THEMSELVES.pop(self, None)
