"""Telling a process of this host from its successor under the same pid."""

from __future__ import annotations

import os
from pathlib import Path

from windlass.errors import PeerUnreachable
from windlass.transports.base import PeerEndpoint

__all__ = ["check_alive", "own_endpoint", "process_start_time"]


def process_start_time(pid: int) -> str:
    """Clock ticks since boot at which the process started; empty when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in {"Z", "X"} else fields[19]


def own_endpoint(transport: str) -> PeerEndpoint:
    """This process: its pid and its start time."""
    pid = os.getpid()
    return PeerEndpoint(transport, str(pid), process_start_time(pid))


def check_alive(peer: PeerEndpoint) -> int:
    """The pid behind `peer`.

    Raises:
        PeerUnreachable: no pid, no such process, or another one under that pid.
    """
    if not peer.address.isascii() or not peer.address.isdigit():
        raise PeerUnreachable(f"{peer.transport}: address must be a pid, got {peer.address!r}")
    started = process_start_time(int(peer.address))
    if not started:
        raise PeerUnreachable(f"{peer.transport}: pid {peer.address} is gone")
    if started != peer.incarnation:
        raise PeerUnreachable(
            f"{peer.transport}: pid {peer.address} must have started at {peer.incarnation!r}, is "
            f"another process started at {started}"
        )
    return int(peer.address)
