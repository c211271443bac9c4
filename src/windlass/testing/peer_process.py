"""A peer in a child process, for tests of transports: it registers an arena, carries out commands, and can be killed.

with PeerProcess(CmaConfig(), 1 << 20) as peer:
    transport.write(...peer.region...)
    peer.digest()
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Protocol, final

import msgspec
import xxhash

from windlass.closing import Closing
from windlass.envs import inherited_environment
from windlass.errors import PeerTimeout, ProtocolError
from windlass.transfer.arena import Arena
from windlass.transports.peers import RemoteRegion
from windlass.transports.registry import TransportConfig, create_transport, parse_transport

ANSWER_S = 30.0


class _Answer(msgspec.Struct):
    region: RemoteRegion
    data: bytes = b""


class Child(Protocol):
    """Process with pipes for stdin and stdout, such as `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> IO[bytes] | None: ...
    @property
    def stdout(self) -> IO[bytes] | None: ...
    @property
    def returncode(self) -> int | None: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


def start_child(config: TransportConfig, nbytes: int, environment: Mapping[str, str]) -> Child:
    """Start a child process that runs `serve`, with only the environment variables in `environment`."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "windlass.testing.peer_process",
            msgspec.json.encode(config).decode(),
            str(nbytes),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(environment),
    )


def digest_of(data: bytes | memoryview) -> str:
    """Return the xxh3-128 digest of bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


@final
class PeerProcess(Closing):
    """Child process with one registered arena, whose bytes are all 0xEE at the start.

    Every method that sends a command raises `PeerTimeout` if the child does not answer within `ANSWER_S` (the child is
    then killed), and `ProtocolError` or `BrokenPipeError` if the child has ended.

    Args:
        config: transport of the child.
        nbytes: size of the arena in bytes.
        environment: additional environment variables for the child.

    Raises:
        ProtocolError: the child did not start; stderr has the child's error.
        PeerTimeout: the child did not answer within `ANSWER_S`.
    """

    def __init__(
        self, config: TransportConfig, nbytes: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self._process = start_child(
            config, nbytes, inherited_environment() | dict(environment or {})
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise ProtocolError("peer process: the child must have pipes for stdin and stdout")
        self._input, self._output = self._process.stdin, self._process.stdout
        try:
            self._region = self._answer().region
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def region(self) -> RemoteRegion:
        """Remote region of the whole arena, from the arena's last registration."""
        return self._region

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes of the arena from `offset` on."""
        return self._ask("read", offset, nbytes).data

    def digest(self) -> str:
        """Return the xxh3-128 digest of the whole arena."""
        return self._ask("digest").data.decode()

    def fill(self, value: int) -> None:
        """Set all bytes of the arena to `value`."""
        self._ask("fill", value)

    def unregister(self) -> None:
        """Unregister the arena in the child. Writes to `region` fail until `register` is called."""
        self._ask("unregister")

    def register(self) -> None:
        """Register the arena in the child again, and update `region`."""
        self._region = self._ask("register").region

    def fence(self) -> None:
        """Call `OneSidedTransport.fence` in the child."""
        self._ask("fence")

    def signal_on_write(self, offset: int, number: signal.Signals) -> None:
        """Make the child poll the arena's byte at `offset`, and send the signal to itself when the byte changes.

        The child does not notice a change before this call.
        """
        self._ask("signal_on_write", offset, int(number))

    def stop(self) -> None:
        """Send SIGSTOP to the child, and wait until the child has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        # `waitid` works only for children of this process. A `Child` may be the child of another process.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Send SIGCONT to the child."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL to the child, and wait until it has ended. Idempotent."""
        self._process.kill()
        self._process.wait(ANSWER_S)
        for pipe in (self._input, self._output):
            # The child may have ended before it read its last command.
            with suppress(BrokenPipeError):
                pipe.close()

    def close(self) -> None:
        """Close the child's stdin, so that the child ends. Kill the child if it does not end within `ANSWER_S`."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGCONT)
            self._input.close()
            try:
                self._process.wait(ANSWER_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self.kill()

    def _ask(self, command: str, *numbers: int) -> _Answer:
        self._input.write(msgspec.json.encode((command, *numbers)) + b"\n")
        self._input.flush()
        return self._answer()

    def _answer(self) -> _Answer:
        # A read from a pipe has no deadline. So kill the child after `ANSWER_S`; the read then returns.
        timer = threading.Timer(ANSWER_S, self._process.kill)
        timer.start()
        try:
            line = self._output.readline()
        finally:
            timed_out = timer.finished.is_set()
            timer.cancel()
            timer.join()
        if timed_out:
            raise PeerTimeout(f"peer process {self.pid}: no answer within {ANSWER_S} s")
        if not line:
            raise ProtocolError(f"peer process {self.pid}: ended without an answer")
        return msgspec.json.decode(line, type=_Answer)


def _watch(arena: Arena, offset: int, number: int) -> None:
    """Poll a byte of the arena until it changes. Then send the signal `number` to this process."""
    before = arena.bytes[offset]
    pause = threading.Event()
    while arena.bytes[offset] == before:
        pause.wait(0.0002)
    os.kill(os.getpid(), number)


def serve(config: TransportConfig, nbytes: int) -> None:
    """Carry out commands from stdin until stdin is closed. The child process runs this function.

    Raises:
        ProtocolError: a command is unknown.
        ConfigError, TransportUnavailable, TransferFailed, PeerUnreachable: see `create_transport`.
    """
    transport = create_transport(config)
    arena = Arena(transport, nbytes)
    arena.bytes[:] = 0xEE
    region = arena.region
    output = sys.stdout.buffer

    def answer(data: bytes = b"") -> None:
        output.write(msgspec.json.encode(_Answer(region.remote, data)) + b"\n")
        output.flush()

    answer()
    for line in sys.stdin.buffer:
        data = b""
        match msgspec.json.decode(line):
            case ["read", offset, count]:
                data = arena.bytes[offset : offset + count].tobytes()
            case ["digest"]:
                data = digest_of(arena.bytes.data).encode()
            case ["fill", value]:
                arena.bytes[:] = value
            case ["unregister"]:
                transport.unregister(region)
            case ["register"]:
                region = transport.register(arena.address, arena.nbytes)
            case ["fence"]:
                transport.fence(deadline_s=ANSWER_S / 2)
            case ["signal_on_write", offset, number]:
                threading.Thread(target=_watch, args=(arena, offset, number), daemon=True).start()
            case unknown:
                raise ProtocolError(f"peer process: there is no command {unknown!r}")
        answer(data)
    transport.close()


if __name__ == "__main__":
    serve(parse_transport(sys.argv[1]), int(sys.argv[2]))
