"""Process that runs one reward function of the user, for `windlass.rollout.rewards.ProcessRewards`.

`python -m windlass.rollout.reward_process SOCKET FILE FUNCTION MEMORY_NBYTES`

The first frame is the content of the user's file. The process runs the file, and then scores one rollout per frame. A frame
is a length of four bytes and the content; all contents except the first are in msgpack. The function may print: its output
does not use the socket.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FunctionType

import msgspec

from windlass.errors import ConfigError
from windlass.files import raised_at, run_file
from windlass.rollout.handles import Rollout
from windlass.rollout.values import plain_number

LENGTH = struct.Struct("<I")
"""Header of each message: the number of bytes that follow."""
MODULE = "windlass_reward_function"
"""Name of the module that the user's file becomes."""
PR_SET_PDEATHSIG = 1
"""Linux constant: option of `prctl` that sets the signal that this process gets when its parent process ends."""
MAX_TEXT = 2000
"""Largest number of characters of an error text that the process sends."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """First frame. `error` is empty if the function was imported. Otherwise `error` has the reason."""

    error: str = ""


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """The reward of one rollout."""

    reward: float


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """The function raised an exception, or returned a value that is not a finite number.

    Attributes:
        kind: name of the exception's class.
        error: text of the exception, with the line of the user's file.
        is_memory: whether the memory limit caused the exception. The process ends after this frame.
    """

    kind: str
    error: str
    is_memory: bool = False


def import_function(
    file: Path, name: str, source: bytes | None = None
) -> Callable[[Rollout], object]:
    """Run the user's file, and return its function `name`. The file may import modules in the same folder.

    `source` is the content to run, see `run_file`.

    Raises:
        ConfigError: there is no such file or function, the file raises an error, or the function does not take one
            argument.
    """
    module = run_file("rewards.file", file, MODULE, source)
    found: Callable[[Rollout], object] | None = vars(module).get(name)
    if not callable(found):
        known = sorted(
            key
            for key, value in vars(module).items()
            if isinstance(value, FunctionType) and value.__module__ == MODULE
        )
        raise ConfigError(
            f"rewards.function must be a function of {file.name}, which has {known}, got {name!r}"
        )
    try:
        signature = inspect.signature(found)
    except ValueError:
        # Some functions that are written in C have no signature.
        return found
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigError(
            "rewards.function must take one argument, a Rollout (its `text` is the answer, its `metadata` the row of the "
            f"data), got {name}{signature}"
        ) from error
    return found


async def _result(value: Awaitable[object]) -> object:
    """Await a value. `asyncio.Runner.run` accepts only coroutines, so this function wraps other awaitables."""
    return await value


def _score(
    function: Callable[[Rollout], object], rollout: Rollout, file: Path, runner: asyncio.Runner
) -> Scored | Raised:
    """Call the function for one rollout. Every exception becomes a `Raised`.

    If the function is async, `runner` runs it. All calls use the same event loop, so the function may keep connections.

    If the function forks, it also returns or raises in the child process. End the child then: otherwise the child would
    send a second answer, and the pool would take this answer for the reward of the next rollout.
    """
    process_id = os.getpid()
    try:
        try:
            value = function(rollout)
            if isinstance(value, Awaitable):
                value = runner.run(_result(value))
        finally:
            # An alarm that the function has not cancelled would interrupt the score of a later rollout.
            signal.setitimer(signal.ITIMER_REAL, 0)
        if os.getpid() != process_id:
            sys.exit()
        return Scored(plain_number("reward", value))
    except BaseException as error:
        if os.getpid() != process_id:
            raise
        is_memory = isinstance(error, MemoryError)
        kind = "MemoryError" if is_memory else type(error).__name__
        return Raised(kind, raised_at(error, file)[:MAX_TEXT], is_memory)


def _end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent process ends, so that no reward process is left behind."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _send(connection: socket.socket, message: Ready | Scored | Raised) -> None:
    """Send a message with its length before it; return when the kernel has taken all bytes."""
    encoded = msgspec.msgpack.encode(message)
    connection.sendall(LENGTH.pack(len(encoded)) + encoded)


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    """Return the next bytes of the socket; raise `EOFError` if the pool has closed it."""
    found = bytearray()
    while len(found) < num_bytes:
        part = connection.recv(min(num_bytes - len(found), 1 << 20))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def _frame(connection: socket.socket) -> bytes:
    """Return the next frame of the socket, without its length; raise `EOFError` if the pool has closed the socket."""
    (length,) = LENGTH.unpack(_received(connection, LENGTH.size))
    return _received(connection, length)


def main(arguments: list[str]) -> int:
    """Import the function and score rollouts until the pool closes the socket; return the exit status."""
    number, path, name, memory_nbytes = arguments
    _end_with_parent()
    connection, file = socket.socket(fileno=int(number)), Path(path)
    # If the function starts a program, the program must not keep the socket open.
    connection.set_inheritable(False)
    # If the function forks, the child must not use the socket.
    os.register_at_fork(after_in_child=connection.close)
    try:
        function = import_function(file, name, _frame(connection))
    except EOFError:
        return 0
    except ConfigError as error:
        _send(connection, Ready(str(error)[:MAX_TEXT]))
        return 2
    if (limit := int(memory_nbytes)) > 0:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    _send(connection, Ready())
    runner = asyncio.Runner()
    while True:
        try:
            rollout = msgspec.msgpack.decode(_frame(connection), type=Rollout)
        except EOFError:
            return 0
        answer = _score(function, rollout, file, runner)
        del rollout
        _send(connection, answer)
        if isinstance(answer, Raised) and answer.is_memory:
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
