"""RDMA devices as the kernel shows them: addresses, drivers, counters, queue pairs.

What a transport says about its wire is compared with this, never with what was asked for.
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
"""What a reader of the output is after; printed at the end."""


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
    """A device and the address that peers reach it at."""

    name: str
    host: str

    @property
    def folder(self) -> Path:
        """Its directory in sysfs."""
        return _ROOT / self.name

    @property
    def netdev(self) -> str:
        """The network interface below it."""
        return (
            (self.folder / f"ports/{_PORT}/gid_attrs/ndevs/0").read_text(encoding="ascii").strip()
        )

    def counters(self) -> str:
        """What the device counts of things that went wrong, and were mended or not."""
        folder = self.folder / f"ports/{_PORT}/hw_counters"
        counted = {p.name: p.read_text(encoding="ascii").strip() for p in sorted(folder.glob("*"))}
        return ", ".join(f"{n} {v}" for n, v in counted.items() if v not in {"0", ""})

    @property
    def driver(self) -> str:
        """The kernel module that drives it."""
        link = self.folder / "device/driver"
        if link.exists():
            return link.resolve().name
        return "rdma_rxe" if (self.folder / "parent").exists() else "unknown"

    def packets_sent(self) -> int:
        """RDMA packets that this device has sent, by its own count."""
        for name in ("sent_pkts", "port_xmit_packets"):
            for kind in ("hw_counters", "counters"):
                path = self.folder / f"ports/{_PORT}/{kind}/{name}"
                if path.exists():
                    return int(path.read_text(encoding="ascii"))
        raise FileNotFoundError(f"{self.name}: no counter of packets")

    def counter(self, name: str) -> int:
        """One hardware counter."""
        path = self.folder / f"ports/{_PORT}/hw_counters/{name}"
        return int(path.read_text(encoding="ascii"))

    def queue_pairs(self, pid: int) -> tuple[QueuePair, ...]:
        """Queue pairs that the process has open on this device."""
        command = ("rdma", "-j", "resource", "show", "qp", "link", f"{self.name}/{_PORT}")
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return tuple(
            QueuePair(row["type"], row["state"], pid, int(row["lqpn"]))
            for row in json.loads(done.stdout or "[]")
            if Path(f"/proc/{pid}/task/{row.get('pid', 0)}").exists()  # it names the thread
        )

    def registered_nbytes(self) -> list[int]:
        """Sizes of the memory regions on this device, of every process, largest first."""
        command = ("rdma", "-j", "resource", "show", "mr")
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        rows = [row for row in json.loads(done.stdout or "[]") if row["ifname"] == self.name]
        return sorted((int(row["mrlen"]) for row in rows), reverse=True)

    def describe(self, pid: int) -> str:
        """Device, driver, network interface, and the queue pairs of a process in one line."""
        kinds = Counter(f"{pair.kind} {pair.state}" for pair in self.queue_pairs(pid))
        pairs = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
        return f"{self.name} (driver {self.driver}, on {self.netdev}, {self.host}): {pairs}"


def _address_of(name: str) -> str:
    """The IPv4 address that one of its RoCE addresses stands for."""
    for path in sorted((_ROOT / name / f"ports/{_PORT}/gids").iterdir(), key=lambda p: int(p.name)):
        mapped = ipaddress.IPv6Address(path.read_text(encoding="ascii").strip()).ipv4_mapped
        if mapped is not None:
            return str(mapped)
    raise pytest.UsageError(f"--rdma-device: {name} has no IPv4 address; give {name}@ADDRESS")


def find_nics(asked: list[str], at_least: int = 2) -> tuple[Nic, ...]:
    """Devices; of two ends, one that talks to itself will do. Skips where there are too few.

    Args:
        asked: `NAME` or `NAME@ADDRESS`, for here and there in turn; empty for whatever there is.
        at_least: how many are needed.
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
