"""A network in user space: packets between hosts, with delay, loss, reordering and partitions.

`hosts` runs it as a separate process. Each host's interface is a TUN device. This process has the
other end of it, so all packets of the host pass here: kernels retransmit, back off and time out as
on a real line. The wire knows no protocol above IP.

Orders are JSON lines on stdin; each is answered with a line once it has taken effect.
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
"""Most bytes on the line; the wire drops further packets, as a full queue does."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Faults of the packets of one direction.

    Attributes:
        delay_s: delay in addition to the machine's own.
        loss: share of packets that is dropped.
        reorder: share that takes `reorder_s` longer, and so arrives after later packets.
        cut: nothing arrives, not even packets that are already on the line.
    """

    delay_s: float = 0.0
    loss: float = 0.0
    reorder: float = 0.0
    reorder_s: float = 0.01
    cut: bool = False


class Order(msgspec.Struct, frozen=True):
    """Order to apply `line` to further packets from `source` to `destination` (host names)."""

    source: str
    destination: str
    line: Line


class _Setup(msgspec.Struct, frozen=True):
    """Devices of each host, and the addresses behind each device: {host: [[fd, [packed hex, ...]], ...]}."""

    hosts: Mapping[str, tuple[tuple[int, tuple[str, ...]], ...]]
    seed: int


@final
class Wire:
    """Switch that reads from every device, and writes each packet when it is due.

    Args:
        setup: devices and addresses.
        orders: descriptor to read orders from.
        answers: descriptor to write answers to.
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
        """Run until the orders end."""
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
            # The interface is down or its queue is full, so the packet is lost.
            return


def main() -> int:
    """Run a wire: `python -m wire SETUP`."""
    Wire(msgspec.json.decode(sys.argv[1], type=_Setup), 0, 1).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
