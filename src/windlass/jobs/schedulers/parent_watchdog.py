"""Script that ends a job's processes after the process that started them (the owner) has died.

It uses the standard library only.

`parent_watchdog.py marked MARK` reads stdin, a pipe that the kernel closes when the owner dies. Then the script kills
every process with MARK in its environment. Child processes inherit the mark, so the script also finds a child that has
left its process group.

`parent_watchdog.py lease HOST PORT` is the batch script of a Slurm job. The script connects to the owner, sends the
secret in WINDLASS_LEASE (the lease), and ends when the connection ends; Slurm then ends the job. If the owner's host no
longer answers, TCP keep-alive ends the connection within `SILENCE_S`.
"""

import contextlib
import os
import signal
import socket
import sys

LEASE_VARIABLE = "WINDLASS_LEASE"
"""Environment variable with the secret of a Slurm job."""
MARK_VARIABLE = "WINDLASS_WATCHDOG"
"""Environment variable with the mark of the processes that the script kills."""
SILENCE_S = 20
"""Seconds without an answer of the owner's host after which the connection ends."""
CONNECT_DEADLINE_S = 30.0
"""Longest time to connect to the owner."""


def keep_alive(connection: socket.socket) -> None:
    """Enable TCP keep-alive: the kernel ends the connection if the other host has not answered for `SILENCE_S`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, SILENCE_S // 4),
        (socket.TCP_KEEPINTVL, SILENCE_S // 4),
        (socket.TCP_KEEPCNT, 3),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def wait_for_owner(host: str, port: int, lease: str) -> None:
    """Connect to the owner, send the secret `lease`, and return when the connection ends.

    Raises:
        OSError: the owner accepts no connection within `CONNECT_DEADLINE_S`.
    """
    with socket.create_connection((host, port), timeout=CONNECT_DEADLINE_S) as connection:
        keep_alive(connection)
        connection.settimeout(None)
        connection.sendall(f"{lease}\n".encode())
        with contextlib.suppress(OSError):
            connection.recv(1)


def kill_marked(mark: str) -> None:
    """Wait until stdin ends, because the owner has died. Then kill all processes with `mark` in the environment."""
    sys.stdin.read()
    entry = f"{MARK_VARIABLE}={mark}".encode()
    while victims := _carriers(entry):
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _carriers(entry: bytes) -> list[int]:
    """Return the ids of all processes that were started with this entry (`NAME=VALUE`) in their environment."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environment:
            # The environment of a zombie process is empty.
            if entry in environment.read().split(b"\0"):
                found.append(int(pid))
    return found


if __name__ == "__main__":
    if sys.argv[1] == "marked":
        # Fork and exit, so that the watchdog is no child of the owner: it survives if the owner's children are killed.
        if os.fork():
            os._exit(0)
        os.setsid()
        kill_marked(sys.argv[2])
    else:
        lease = os.environ[LEASE_VARIABLE]  # noqa: TID251 - windlass is not imported here
        wait_for_owner(sys.argv[2], int(sys.argv[3]), lease)
