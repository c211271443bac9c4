"""RDMA devices as the kernel shows them: addresses, drivers, counters, queue pairs.

Tests compare a transport's report of its wire with this, not with its settings.
"""

from __future__ import annotations

import ipaddress
import json
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["TOLD", "Nic", "QueuePair", "find_nics", "tell"]

TOLD: list[str] = []
"""Lines for the reader, printed at the end of the output."""


def tell(line: str) -> None:
    """Add a line to the end of the output."""
    TOLD.append(line)


_ROOT = Path("/sys/class/infiniband")
_PORT = 1


@dataclass(frozen=True, slots=True)
class QueuePair:
    """One queue pair of a process, from `rdma resource`."""

    kind: str
    state: str
    pid: int
    number: int


@dataclass(frozen=True, slots=True)
class Nic:
    """A device and its address for peers."""

    name: str
    host: str

    @property
    def folder(self) -> Path:
        """Directory of the device in sysfs."""
        return _ROOT / self.name

    @property
    def netdev(self) -> str:
        """Network interface below the device."""
        return (
            (self.folder / f"ports/{_PORT}/gid_attrs/ndevs/0").read_text(encoding="ascii").strip()
        )

    def counters(self) -> str:
        """Return the device's nonzero hardware counters, which include recovered errors."""
        folder = self.folder / f"ports/{_PORT}/hw_counters"
        counted = {p.name: p.read_text(encoding="ascii").strip() for p in sorted(folder.glob("*"))}
        return ", ".join(f"{n} {v}" for n, v in counted.items() if v not in {"0", ""})

    @property
    def driver(self) -> str:
        """Kernel module of the device."""
        link = self.folder / "device/driver"
        if link.exists():
            return link.resolve().name
        return "rdma_rxe" if (self.folder / "parent").exists() else "unknown"

    def packets_sent(self) -> int:
        """Return the device's own count of sent RDMA packets."""
        for name in ("sent_pkts", "port_xmit_packets"):
            for kind in ("hw_counters", "counters"):
                path = self.folder / f"ports/{_PORT}/{kind}/{name}"
                if path.exists():
                    return int(path.read_text(encoding="ascii"))
        raise FileNotFoundError(f"{self.name}: no counter of packets")

    def counter(self, name: str) -> int:
        """Return one hardware counter."""
        path = self.folder / f"ports/{_PORT}/hw_counters/{name}"
        return int(path.read_text(encoding="ascii"))

    def queue_pairs(self, pid: int) -> tuple[QueuePair, ...]:
        """Return the queue pairs that the process has open on this device."""
        command = ("rdma", "-j", "resource", "show", "qp", "link", f"{self.name}/{_PORT}")
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return tuple(
            QueuePair(row["type"], row["state"], pid, int(row["lqpn"]))
            for row in json.loads(done.stdout or "[]")
            # `rdma` prints the id of a thread.
            if Path(f"/proc/{pid}/task/{row.get('pid', 0)}").exists()
        )

    def registered_nbytes(self) -> list[int]:
        """Return the sizes of all memory regions on this device, largest first, for every process."""
        command = ("rdma", "-j", "resource", "show", "mr")
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        rows = [row for row in json.loads(done.stdout or "[]") if row["ifname"] == self.name]
        return sorted((int(row["mrlen"]) for row in rows), reverse=True)

    def describe(self, pid: int) -> str:
        """Return device, driver, network interface, and a process's queue pairs in one line."""
        kinds = Counter(f"{pair.kind} {pair.state}" for pair in self.queue_pairs(pid))
        pairs = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
        return f"{self.name} (driver {self.driver}, on {self.netdev}, {self.host}): {pairs}"


def _address_of(name: str) -> str:
    """Return the IPv4 address that a RoCE address of the device maps to."""
    for path in sorted((_ROOT / name / f"ports/{_PORT}/gids").iterdir(), key=lambda p: int(p.name)):
        mapped = ipaddress.IPv6Address(path.read_text(encoding="ascii").strip()).ipv4_mapped
        if mapped is not None:
            return str(mapped)
    raise pytest.UsageError(f"--rdma-device: {name} has no IPv4 address; give {name}@ADDRESS")


def find_nics(asked: list[str], at_least: int = 2) -> tuple[Nic, ...]:
    """Return devices, or skip the test if there are too few. One device may be both ends.

    Args:
        asked: `NAME` or `NAME@ADDRESS`, in turn for this side and the peer. Empty: all devices.
        at_least: number of devices that are needed.
    """
    present = sorted(path.name for path in _ROOT.iterdir()) if _ROOT.is_dir() else []
    names = asked or present
    if not present:
        pytest.skip("no RDMA device here: make test-rdma boots a machine that has some")
    if at_least == 2 and len(names) == 1:
        names = names * 2
    nics: list[Nic] = []
    for one in names[:at_least]:
        name, _, host = one.partition("@")
        if name not in present and at_least > 2:
            break
        if name not in present:
            raise pytest.UsageError(f"--rdma-device: must be in {_ROOT}, got {name!r}")
        nics.append(Nic(name, host or _address_of(name)))
    if len(nics) < at_least:
        pytest.skip(f"needs {at_least} RDMA devices that reach each other; see docs/rdma.md")
    return tuple(nics)
