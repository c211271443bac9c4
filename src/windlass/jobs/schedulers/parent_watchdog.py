"""What ends processes whose owner died without ending them. Run as a script; standard library only.

`parent_watchdog.py marked MARK` follows stdin to its end, which the kernel brings about however the owner
died, and then kills every process that carries MARK in its environment. Children inherit it, so
whatever left its process group is found too, and there is no list that could be out of date.

`parent_watchdog.py lease HOST PORT` connects to the owner, says WINDLASS_LEASE, and stays until the
connection ends; a host that fell silent is noticed by keep-alive within `SILENCE_S`. Slurm ends
a job together with its batch script, which this is.
"""

import contextlib
import os
import signal
import socket
import sys

LEASE_VARIABLE = "WINDLASS_LEASE"
MARK_VARIABLE = "WINDLASS_WATCHDOG"
SILENCE_S = 20
CONNECT_DEADLINE_S = 30.0


def keep_alive(connection: socket.socket) -> None:
    """Make a connection to a host that is gone end within `SILENCE_S`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, SILENCE_S // 4),
        (socket.TCP_KEEPINTVL, SILENCE_S // 4),
        (socket.TCP_KEEPCNT, 3),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def wait_for_owner(host: str, port: int, lease: str) -> None:
    """Return once the owner is gone."""
    with socket.create_connection((host, port), timeout=CONNECT_DEADLINE_S) as connection:
        keep_alive(connection)
        connection.settimeout(None)
        connection.sendall(f"{lease}\n".encode())
        with contextlib.suppress(OSError):
            connection.recv(1)


def kill_marked(mark: str) -> None:
    """Follow stdin, then kill what is left."""
    sys.stdin.read()
    entry = f"{MARK_VARIABLE}={mark}".encode()
    while victims := _carriers(entry):
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _carriers(entry: bytes) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environment:
            # Of a process that has ended and is not yet waited for, this is empty.
            if entry in environment.read().split(b"\0"):
                found.append(int(pid))
    return found


if __name__ == "__main__":
    if sys.argv[1] == "marked":
        # Not a child of the owner, or what ends the owner's children would end this first.
        if os.fork():
            os._exit(0)
        os.setsid()
        kill_marked(sys.argv[2])
    else:
        lease = os.environ[LEASE_VARIABLE]  # noqa: TID251 - windlass is not imported here
        wait_for_owner(sys.argv[2], int(sys.argv[3]), lease)
