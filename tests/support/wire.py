"""A network in user space: packets between hosts, with delay, loss, reordering and partitions.

Run as a process of its own by `hosts`. Each host's interface is a TUN device
whose other end this process holds, so whatever the host sends passes here: kernels retransmit,
back off and time out as on a real line. Nothing is known of the protocols above IP.

Orders come as JSON lines on stdin, each answered with a line once it holds.
"""

from __future__ import annotations

import heapq
import os
import random
import selectors
import sys
import time
from collections.abc import Mapping
from typing import final

import msgspec

__all__ = ["Line", "Order", "Wire", "main"]

MAX_PACKET_NBYTES = 1 << 16
PACKETS_AT_ONCE = 64
MAX_WAITING_NBYTES = 256 << 20
"""More than this on the line is dropped, as a full queue would."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What packets of one direction meet.

    Attributes:
        delay_s: on top of what the machine takes.
        loss: share that is dropped.
        reorder: share that takes `reorder_s` longer, and so arrives after later ones.
        cut: nothing arrives, what is on its way included.
    """

    delay_s: float = 0.0
    loss: float = 0.0
    reorder: float = 0.0
    reorder_s: float = 0.01
    cut: bool = False


class Order(msgspec.Struct, frozen=True):
    """From now on packets from `source` to `destination` (host names) meet `line`."""

    source: str
    destination: str
    line: Line


class _Setup(msgspec.Struct, frozen=True):
    """Devices by host and the addresses behind each: {host: [[fd, [packed hex, ...]], ...]}."""

    hosts: Mapping[str, tuple[tuple[int, tuple[str, ...]], ...]]
    seed: int


@final
class Wire:
    """The switch: reads from every device, and writes when a packet is due.

    Args:
        setup: devices and addresses. orders: descriptor of the orders. answers: of the answers.
    """

    def __init__(self, setup: _Setup, orders: int, answers: int) -> None:
        self._orders, self._answers = orders, answers
        self._random = random.Random(setup.seed)
        self._place: dict[bytes, tuple[str, int]] = {}
        self._lines: dict[tuple[str, str], Line] = {}
        self._waiting: list[tuple[float, int, int, tuple[str, str], bytes]] = []
        self._waiting_nbytes = self._count = 0
        self._text = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ, "")
        for host, devices in setup.hosts.items():
            for device, addresses in devices:
                os.set_blocking(device, False)
                self._selector.register(device, selectors.EVENT_READ, host)
                for address in addresses:
                    self._place[bytes.fromhex(address)] = host, device

    def run(self) -> None:
        """Until the orders end."""
        while True:
            timeout = self._waiting[0][0] - time.monotonic() if self._waiting else None
            for key, _ in self._selector.select(timeout and max(timeout, 0.0)):
                if key.fd == self._orders:
                    if not self._obey():
                        return
                else:
                    self._read(key.fd, key.data)
            self._deliver()

    def _obey(self) -> bool:
        data = os.read(self._orders, 1 << 16)
        if not data:
            return False
        *lines, self._text = (self._text + data).split(b"\n")
        for text in lines:
            order = msgspec.json.decode(text, type=Order)
            self._lines[order.source, order.destination] = order.line
            os.write(self._answers, b"done\n")
        return True

    def _read(self, device: int, source: str) -> None:
        for _ in range(PACKETS_AT_ONCE):
            try:
                packet = os.read(device, MAX_PACKET_NBYTES)
            except BlockingIOError:
                return
            target = packet[16:20] if packet[0] >> 4 == 4 else packet[24:40]
            place = self._place.get(target)
            if place is None:
                continue
            way = source, place[0]
            line = self._lines.get(way)
            if line is None:
                self._write(place[1], packet)
                continue
            if line.cut or self._random.random() < line.loss:
                continue
            delay_s = line.delay_s
            if self._random.random() < line.reorder:
                delay_s += line.reorder_s
            if self._waiting_nbytes < MAX_WAITING_NBYTES:
                self._count += 1
                due_s = time.monotonic() + delay_s
                heapq.heappush(self._waiting, (due_s, self._count, place[1], way, packet))
                self._waiting_nbytes += len(packet)

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, device, way, packet = heapq.heappop(self._waiting)
            self._waiting_nbytes -= len(packet)
            if not self._lines[way].cut:
                self._write(device, packet)

    def _write(self, device: int, packet: bytes) -> None:
        try:
            os.write(device, packet)
        except OSError:
            return  # the interface is down or its queue is full: a lost packet


def main() -> int:
    """`python -m wire SETUP`."""
    Wire(msgspec.json.decode(sys.argv[1], type=_Setup), 0, 1).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
