"""Several hosts on one machine: network namespaces, joined by a wire with adjustable faults.

    with Network(("control", "trainer", "engine")) as network:
        network.between("trainer", "engine", Line(delay_s=0.01, loss=0.01))
        subprocess.Popen(network.host("engine").command("python", "-m", ...))
        network.isolate("engine")
        network.heal()

Needs root. Each namespace exists as long as its process, which ends with this process. Everything
else is inside the namespaces, so nothing remains even after a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar, final

import msgspec
import wire
from wire import Line, Order

from windlass.errors import PeerTimeout, PeerUnreachable, TransportUnavailable

__all__ = ["Host", "Line", "Network", "why_no_hosts"]

START_S = 20.0
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_NAMESPACES = (("net", "net"), ("mount", "mnt"))
_CLONE_NEWNET = 0x40000000
# UCX and others read the names of network devices in /sys. Engines use /dev/shm to find engines of
# the same host.
_OWN_MOUNTS = "mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /dev/shm && echo ready && exec cat"
_MTU = 16_000
"""Large packets, so that there are few of them: the wire is a Python program."""
T = TypeVar("T")


def why_no_hosts() -> str:
    """Return why no `Network` can be made here; empty if it can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    for program in ("unshare", "nsenter", "ip", "tc"):
        found = shutil.which(program, path=f"{os.defpath}:/sbin:/usr/sbin:/usr/bin")
        if not found:
            return f"needs the program {program} (util-linux, iproute2)"
    with contextlib.suppress(OSError):
        os.close(os.open("/dev/net/tun", os.O_RDWR))
        return ""
    return "needs /dev/net/tun"


@final
@dataclass(frozen=True, slots=True)
class Host:
    """One network namespace with its own /dev/shm. Processes and files are shared with the
    machine.

    Attributes:
        name: name in its network.
        addresses: IPv4 addresses, one per rail.
        addresses_v6: IPv6 addresses, one per rail.
        pid: process that keeps the namespace.
    """

    name: str
    addresses: tuple[str, ...]
    addresses_v6: tuple[str, ...]
    pid: int

    @property
    def address(self) -> str:
        """IPv4 address on the first rail."""
        return self.addresses[0]

    def command(self, *argv: str) -> list[str]:
        """Return the command that runs `argv` on this host. Each step replaces its process:
        `argv` keeps the pid."""
        own = (f"--{kind}=/proc/{self.pid}/ns/{path}" for kind, path in _NAMESPACES)
        return ["nsenter", *own, "--", "env", f"--chdir={os.getcwd()}", *argv]

    def run(self, *argv: str) -> str:
        """Run a command to its end and return its output.

        Raises:
            TransportUnavailable: the command failed; the message contains its stderr.
        """
        return _run(self.command(*argv))

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in a thread of this process. Sockets that it opens belong to this host."""

        def there() -> T:
            with open(f"/proc/{self.pid}/ns/net") as namespace:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"setns: host {self.name}")
            return function()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(there).result()


@final
class Network:
    """Hosts that reach each other over every rail, and nothing else. Enter it once.

    Args:
        names: names of the hosts.
        rails: interfaces per host, each in its own network.
        rate_bit_s: highest rate of each interface (tc tbf).
        by_wire: packets pass a wire in user space, which `between` and `isolate` control; False joins
            the hosts by a bridge in the kernel, which is faster and has no faults.
        seed: seed of the wire's losses.

    Raises:
        TransportUnavailable: this process is not root, or the kernel lacks something; see `why_no_hosts`.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        rails: int = 1,
        rate_bit_s: int = 1_000_000_000,
        by_wire: bool = True,
        seed: int = 1,
    ) -> None:
        self._names, self._rails = tuple(names), rails
        self._rate_bit_s, self._by_wire, self._seed = rate_bit_s, by_wire, seed
        self._hosts: dict[str, Host] = {}
        self._undo = ExitStack()
        self._wire: subprocess.Popen[bytes] | None = None
        self._touched: set[tuple[str, str]] = set()

    def host(self, name: str) -> Host:
        """Return the host of that name."""
        return self._hosts[name]

    def __enter__(self) -> Network:
        reason = why_no_hosts()
        if reason:
            raise TransportUnavailable(f"Network: {reason}")
        with ExitStack() as undo:
            undo.callback(self.close)
            bridge = 0 if self._by_wire else self._namespace()
            devices: dict[str, list[tuple[int, tuple[str, ...]]]] = {}
            for rail in range(0 if self._by_wire else self._rails):
                _inside(bridge, "ip", "link", "add", f"bridge{rail}", "type", "bridge")
                _inside(bridge, "ip", "link", "set", f"bridge{rail}", "up")
            for index, name in enumerate(self._names, 1):
                devices[name] = self._add(name, index, bridge)
            if self._by_wire:
                self._start_wire(devices)
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the wire and the namespaces, but not the processes on the hosts. Idempotent."""
        self._undo.close()
        self._wire = None

    def between(self, one: str, other: str, line: Line) -> None:
        """Apply `line` to all further packets between these two hosts, in both directions.

        Raises:
            PeerUnreachable, PeerTimeout: the wire has ended.
        """
        self._order(one, other, line)
        self._order(other, one, line)

    def everywhere(self, line: Line) -> None:
        """Apply `line` between every two hosts; see `between`."""
        for index, one in enumerate(self._names):
            for other in self._names[index + 1 :]:
                self.between(one, other, line)

    def isolate(self, name: str, *, towards: Sequence[str] = ()) -> None:
        """Cut a host off from `towards`, or from all others."""
        for other in towards or self._names:
            if other != name:
                self.between(name, other, Line(cut=True))

    def heal(self) -> None:
        """Remove the faults of every line."""
        for source, destination in sorted(self._touched):
            self._order(source, destination, Line())
        self._touched.clear()

    # --- construction ----------------------------------------------------------------------------

    def _namespace(self) -> int:
        """Start a process in its own namespace, which ends with this process. Return its pid."""
        holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--", "sh", "-c", _OWN_MOUNTS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._undo.callback(_end, holder)
        _read_line(holder, "namespace")
        _inside(holder.pid, "ip", "link", "set", "lo", "up")
        return holder.pid

    def _add(self, name: str, index: int, bridge: int) -> list[tuple[int, tuple[str, ...]]]:
        pid = self._namespace()
        v4 = tuple(f"10.77.{rail}.{index}" for rail in range(self._rails))
        v6 = tuple(f"fd77:{rail}::{index}" for rail in range(self._rails))
        self._hosts[name] = Host(name, v4, v6, pid)
        devices: list[tuple[int, tuple[str, ...]]] = []
        for rail in range(self._rails):
            device = f"rail{rail}"
            if self._by_wire:
                descriptor = self._tun(pid, device, f"wl{os.getpid() % 100_000}-{index}-{rail}")
                packed = tuple(ipaddress.ip_address(a).packed.hex() for a in (v4[rail], v6[rail]))
                devices.append((descriptor, packed))
            else:
                port = f"p{index}-{rail}"
                _inside(
                    bridge, *("ip", "link", "add", port, "type", "veth", "peer", "name", device)
                )
                _inside(bridge, "ip", "link", "set", device, "netns", str(pid))
                _inside(bridge, "ip", "link", "set", port, "master", f"bridge{rail}", "up")
            _inside(pid, "ip", "address", "add", f"{v4[rail]}/24", "dev", device)
            _inside(pid, "ip", "address", "add", f"{v6[rail]}/64", "dev", device, "nodad")
            _inside(pid, "ip", "link", "set", device, "up")
            # Allow a burst of 5 ms.
            burst_nbytes = max(4 * _MTU, self._rate_bit_s // 8 // 200)
            _inside(
                pid,
                *("tc", "qdisc", "add", "dev", device, "root", "tbf", "latency", "200ms"),
                *("rate", f"{self._rate_bit_s}bit", "burst", str(burst_nbytes)),
            )
        return devices

    def _tun(self, pid: int, device: str, temporary: str) -> int:
        """Create a TUN device of that name inside the namespace; return the descriptor of its other end."""
        descriptor = os.open("/dev/net/tun", os.O_RDWR)
        self._undo.callback(os.close, descriptor)
        request = struct.pack("16sH14x", temporary.encode(), _IFF_TUN | _IFF_NO_PI)
        try:
            fcntl.ioctl(descriptor, _TUNSETIFF, request)
        except OSError as error:
            raise TransportUnavailable(f"Network: no TUN device: {error}") from error
        _run(["ip", "link", "set", temporary, "netns", str(pid), "name", device])
        _inside(pid, "ip", "link", "set", device, "mtu", str(_MTU))
        return descriptor

    def _start_wire(self, devices: dict[str, list[tuple[int, tuple[str, ...]]]]) -> None:
        setup = msgspec.json.encode({"hosts": devices, "seed": self._seed}).decode()
        self._wire = subprocess.Popen(
            [sys.executable, wire.__file__, setup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[descriptor for rails in devices.values() for descriptor, _ in rails],
        )
        self._undo.callback(_end, self._wire)
        # The wire answers this order once it runs.
        self._order(self._names[0], self._names[0], Line())

    def _order(self, source: str, destination: str, line: Line) -> None:
        if self._wire is None or self._wire.stdin is None:
            raise PeerUnreachable("Network: there is no wire to rule (by_wire=False, or closed)")
        self._touched.add((source, destination))
        try:
            self._wire.stdin.write(msgspec.json.encode(Order(source, destination, line)) + b"\n")
            self._wire.stdin.flush()
        except OSError as error:
            raise PeerUnreachable(f"Network: the wire is gone: {error}") from error
        _read_line(self._wire, "wire")


def _inside(pid: int, *argv: str) -> str:
    return _run(["nsenter", f"--net=/proc/{pid}/ns/net", "--", *argv])


def _run(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            list(argv), capture_output=True, text=True, timeout=START_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TransportUnavailable(f"Network: {' '.join(argv)}: still runs after {START_S} s") from error  # fmt: skip
    if done.returncode != 0:
        raise TransportUnavailable(f"Network: {' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def _read_line(process: subprocess.Popen[bytes], what: str) -> None:
    """Wait for one line, unbuffered."""
    if process.stdout is None:
        return
    end_s, line = time.monotonic() + START_S, b""
    while not line.endswith(b"\n"):
        if not select.select([process.stdout], [], [], max(end_s - time.monotonic(), 0.0))[0]:
            raise PeerTimeout(f"Network: {what}: no answer within {START_S} s")
        more = os.read(process.stdout.fileno(), 1)
        if not more:
            raise PeerUnreachable(f"Network: {what}: ended with status {process.wait(START_S)}")
        line += more


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(START_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
