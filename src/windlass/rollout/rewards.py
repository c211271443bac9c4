"""Rewards of rollouts from functions in worker processes with limits, or from a server.

A *scorer* gives each rollout a reward. A rollout that cannot be scored gets a `RewardError` in place of a number, and
the other rollouts get their rewards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self, final

import msgspec

from windlass.config import check_numbers
from windlass.envs import environment_outside_jobs
from windlass.errors import ConfigError, RolloutError
from windlass.net.logs import LineLimit
from windlass.rollout.handles import Rollout
from windlass.rollout.reward_process import LENGTH, Raised, Ready, Scored
from windlass.rollout.values import plain_value

_log = logging.getLogger(__name__)
MAX_ANSWER_NBYTES = 1 << 20
"""Largest size of a message from a reward process."""
WARN_EVERY_S = 10.0
"""Shortest time between two log lines about failures of one kind."""
KILLED_S = 10.0
"""Seconds to wait until a killed process has ended. A process whose system call hangs may take longer."""


class RewardError(RolloutError):
    """One rollout could not be scored. `kind` is a short name of the reason, for counts."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class RewardCounts(msgspec.Struct, kw_only=True):
    """Counts of a scorer since its start.

    Attributes:
        scored: number of rollouts with a reward.
        failed: number of rollouts that could not be scored.
        reasons: kind of a failure -> number of rollouts.
        replaced: number of processes that were ended and replaced.
        newest_failure: text of the newest failure; empty before the first.
    """

    scored: int = 0
    failed: int = 0
    reasons: dict[str, int] = {}
    replaced: int = 0
    newest_failure: str = ""


@final
class Failures:
    """Counter of rollouts that could not be scored. It logs at most one error of each kind per `WARN_EVERY_S`.

    Args:
        counts: counts of the scorer.
    """

    def __init__(self, counts: RewardCounts) -> None:
        self._counts, self._lines = counts, LineLimit(WARN_EVERY_S)

    def add(self, error: RewardError) -> RewardError:
        """Count and return the error of one rollout. Log it unless an error of this kind was logged recently."""
        counts = self._counts
        counts.failed += 1
        counts.newest_failure = str(error)
        counts.reasons = dict(Counter(counts.reasons) + Counter((error.kind,)))
        if num_alike := self._lines.count(error.kind):
            more = f" ({num_alike} rollouts)" if num_alike > 1 else ""
            _log.warning("rewards: %s%s", error, more)
        return error


class Scorer(Protocol):
    """Interface of an object that gives rollouts their rewards. Use it with `async with`, in one event loop.

    Attributes:
        counts: counts since the start.
        name: name of the function or the server, for errors.
    """

    counts: RewardCounts
    name: str

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def score(self, rollouts: Sequence[Rollout]) -> tuple[float | RewardError, ...]:
        """Return one reward per rollout, or the reason why a rollout has none. Never raise because of one rollout."""
        ...


class ProcessRewards(msgspec.Struct, frozen=True, kw_only=True, tag="processes", tag_field="kind"):
    """Settings of a reward function that runs in worker processes.

    Attributes:
        file: Python file with the function; in a job, empty for the file of the recipe. Each process runs the file. A
            process that replaces another runs the same content, also if the file has changed since the start.
        function: name of the function. It takes a `Rollout` and returns a finite number. It may be async.
        num_processes: number of processes. Each process scores one rollout at a time.
        deadline_s: seconds that the function has for one rollout.
        start_deadline_s: seconds that a process has to import the file.
        memory_nbytes: limit of each process's private memory (RLIMIT_DATA); 0 for no limit.
    """

    file: str = ""
    function: str = "reward"
    num_processes: int = 4
    deadline_s: float = 60.0
    start_deadline_s: float = 120.0
    memory_nbytes: int = 4 << 30

    def __post_init__(self) -> None:
        least = {"num_processes": 1, "memory_nbytes": 0}
        check_numbers(self, least, ("deadline_s", "start_deadline_s"), where="rewards.")


@final
class RewardProcess:
    """Handle of one process that runs the reward function.

    The process has its own process group, so that the handle can also kill programs that the function has started. When the
    process has ended, the handle kills the group immediately, because another group may get the same number later.

    A program may have left this group. `kill` kills such a program too, but it lives on if the process ends by itself.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._ended = asyncio.create_task(self._until_end(), name="life of a reward process")
        self.num_scored = 0

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.returncode is not None

    async def _until_end(self) -> int:
        """Wait until the process has ended, kill the programs that it started, and return its exit status."""
        status = await self._process.wait()
        self._kill_group()
        return status

    @classmethod
    async def start(cls, config: ProcessRewards, source: bytes) -> RewardProcess:
        """Start a process, and wait until it has imported the function from `source`, the content of the file.

        Raises:
            ConfigError: the process could not import the function.
            RewardError: the process ended, or was not ready within `start_deadline_s`.
        """
        ours, theirs = socket.socketpair()
        command = (sys.executable, "-m", "windlass.rollout.reward_process", str(theirs.fileno()))
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                *(config.file, config.function, str(config.memory_nbytes)),
                stdin=asyncio.subprocess.DEVNULL,
                env=environment_outside_jobs(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        started = cls(process, *await asyncio.open_connection(sock=ours))
        try:
            started._write(source)
            _check_ready(
                await started._answer(
                    f"rewards.file {config.file}",
                    "the function was not imported",
                    config.start_deadline_s,
                )
            )
        except BaseException:
            await started.end()
            raise
        return started

    async def score(self, rollout: Rollout, deadline_s: float) -> float:
        """Return the reward of a rollout. After any error except `_RaisedError`, the caller must end the process.

        Raises:
            RewardError: the function raised; or the process ended, sent an invalid frame, or did not answer within
                `deadline_s`.
            ConfigError: the rollout's `metadata` or its `value` is not msgpack-plain.
        """
        try:
            encoded = msgspec.msgpack.encode(rollout, enc_hook=plain_value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"rollout {rollout.task_id}: metadata and value must be msgpack-plain for rewards in processes: {error}"
            ) from error
        self._write(encoded)
        where = f"rollout {rollout.task_id}"
        answer = await self._answer(where, "no reward", deadline_s)
        self.num_scored += 1
        if isinstance(answer, Scored):
            return answer.reward
        if isinstance(answer, Ready):
            raise RewardError(
                f"{where}: the reward process must send a reward or an error, got {answer}",
                "protocol",
            )
        if answer.is_memory:
            raise _OutOfMemoryError(
                f"{where}: the reward function needs more memory than rewards.memory_nbytes: {answer.error}"
            )
        raise _RaisedError(
            f"{where}: the reward function raised {answer.error}", f"raised {answer.kind}"
        )

    def _write(self, content: bytes) -> None:
        """Write a frame with this content into the buffer of the socket; `_frame` waits until the buffer is sent."""
        self._writer.write(LENGTH.pack(len(content)) + content)

    async def _answer(self, what: str, late: str, deadline_s: float) -> Ready | Scored | Raised:
        """Return the next frame of the process.

        Raises:
            RewardError: the process ended, or sent no valid frame within `deadline_s`.
        """
        # Also wait until the process ends: the function may have started a program that keeps the socket open longer.
        ended, frame = self._ended, asyncio.create_task(self._frame())
        try:
            await asyncio.wait(
                (frame, ended), timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not frame.done() and ended.done():
                # The process has ended, but its last frame may still be in the socket's buffer.
                await asyncio.wait((frame,), timeout=1.0)
            if frame.done() and frame.exception() is None:
                return frame.result()
            if frame.done() and not ended.done():
                # The socket closes a moment before the kernel reports the end of the process.
                await asyncio.wait((ended,), timeout=5.0)
            if ended.done():
                status = _status(ended.result())
                raise RewardError(
                    f"{what}: the reward process ended with {status}", f"ended with {status}"
                )
            if frame.done():
                raise RewardError(
                    f"{what}: the reward process sent no valid frame: {frame.exception()}",
                    "protocol",
                )
            raise RewardError(f"{what}: {late} within {deadline_s:g} s", "deadline")
        finally:
            frame.cancel()
            await asyncio.gather(frame, return_exceptions=True)

    async def _frame(self) -> Ready | Scored | Raised:
        """Finish sending to the process, then wait for its next message and return it.

        Raises:
            asyncio.IncompleteReadError: the process closed its socket.
            ValueError: the message is too large.
            msgspec.DecodeError: the message is invalid.
        """
        with contextlib.suppress(ConnectionError):
            # Sending fails if the process has ended. Read anyway: its last frame may be in the socket.
            await self._writer.drain()
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if length > MAX_ANSWER_NBYTES:
            raise ValueError(f"a frame must have at most {MAX_ANSWER_NBYTES} bytes, got {length}")
        return _FRAMES.decode(await self._reader.readexactly(length))

    def kill(self) -> None:
        """Kill the process and the programs that it started, also those with a process group of their own. Idempotent."""
        self._writer.close()
        if not self.has_ended:
            programs = _programs_of(self._process.pid)
            self._kill_group()
            for process_id in programs:
                # The program may have ended already, or may run as another user.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process_id, signal.SIGKILL)

    def _kill_group(self) -> None:
        """Kill all processes of the process group."""
        # The process group may have ended already.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill the process and the programs that it started. Wait at most `KILLED_S` until the process has ended."""
        self.kill()
        await asyncio.wait((self._ended,), timeout=KILLED_S)


def _programs_of(process_id: int) -> list[int]:
    """Return the ids of all living descendants of a process."""
    found: list[int] = []
    # Without /proc, or if a process has just ended, there is nothing to read.
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process_id}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found + [each for child in found for each in _programs_of(child)]


def _check_ready(frame: Ready | Scored | Raised) -> None:
    """Raise `ConfigError` if the first frame of a process is not `Ready`, or reports an error."""
    if not isinstance(frame, Ready) or frame.error:
        raise ConfigError(
            frame.error
            if isinstance(frame, Ready)
            else f"rewards: the first frame of a reward process must be Ready, got {frame}"
        )


_FRAMES: msgspec.msgpack.Decoder[Ready | Scored | Raised] = msgspec.msgpack.Decoder(
    Ready | Scored | Raised
)


class _RaisedError(RewardError):
    """The function raised an exception, and its process may score other rollouts."""


class _OutOfMemoryError(RewardError):
    """The function exceeded the memory limit."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "memory")


def _status(returncode: int) -> str:
    """Return the exit status of a process, or the name of the signal that ended the process."""
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


@final
class RewardPool:
    """Pool of processes that run one reward function. Use it with `async with`.

    If the function hangs, raises, exceeds the memory limit or kills its process, only the rollout of this call gets no
    reward. After an exception, the process scores other rollouts. In the other cases the pool ends the process, and starts
    a new one for the next rollout.

    Args:
        config: the function and the limits; `file` must not be empty.

    Attributes:
        counts: counts since the start.
        name: file and name of the function.

    Raises:
        ConfigError: `config.file` is not a file.
    """

    def __init__(self, config: ProcessRewards) -> None:
        try:
            self._source = Path(config.file).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"rewards.file must be a Python file, got {config.file!r}: {error}"
            ) from error
        self._config, self.name = config, f"{config.function} of {config.file}"
        self._slots = asyncio.Semaphore(config.num_processes)
        self._idle: list[RewardProcess] = []
        self._busy: set[RewardProcess] = set()
        self._ends: set[asyncio.Task[None]] = set()
        self._closed = False
        self.counts = RewardCounts()
        self._failures = Failures(self.counts)

    async def __aenter__(self) -> Self:
        """Start all processes.

        Raises:
            ConfigError: a process could not import the function.
            RewardError: a process ended, or was not ready within `start_deadline_s`.
        """
        starts = [
            RewardProcess.start(self._config, self._source)
            for _ in range(self._config.num_processes)
        ]
        found = await asyncio.gather(*starts, return_exceptions=True)
        self._idle = [each for each in found if isinstance(each, RewardProcess)]
        for each in found:
            if isinstance(each, BaseException):
                await self.__aexit__()
                raise each
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kill all processes. Calls of `score` that still run end with an error."""
        self._closed = True
        for process in (*self._idle, *self._busy):
            self._end(process)
        self._idle.clear()
        await asyncio.gather(*self._ends)

    async def score(self, rollouts: Sequence[Rollout]) -> tuple[float | RewardError, ...]:
        """Return for each rollout its reward, or a `RewardError` that says why it has none.

        Raises:
            ConfigError: the metadata of a rollout is not msgpack-plain, or the pool is closed.
        """
        jobs = [asyncio.create_task(self._score(rollout)) for rollout in rollouts]
        try:
            return tuple(await asyncio.gather(*jobs))
        finally:
            for job in jobs:
                job.cancel()

    async def _score(self, rollout: Rollout) -> float | RewardError:
        """Return the reward of a rollout; count and return the error if the rollout cannot be scored."""
        async with self._slots:
            try:
                reward = await self._score_in_process(rollout)
            except RewardError as error:
                return self._failures.add(error)
        self.counts.scored += 1
        return reward

    async def _score_in_process(self, rollout: Rollout) -> float:
        """Score a rollout in an idle process, or in a new one if no process is idle.

        If a process exceeds the memory limit and has scored other rollouts before, end it and try the rollout in another
        process, because earlier calls of the function may not have freed all memory.

        Raises:
            RewardError: the rollout could not be scored, or a new process exceeded the memory limit.
            ConfigError: the metadata is not msgpack-plain, or the pool is closed.
        """
        while True:
            if self._closed:
                raise ConfigError("rewards: score: the pool is closed")
            process = self._take_idle() or await self._start()
            is_new, is_usable = not process.num_scored, False
            self._busy.add(process)
            try:
                reward = await process.score(rollout, self._config.deadline_s)
            except _RaisedError:
                is_usable = True
                raise
            except _OutOfMemoryError:
                if is_new:
                    raise
            else:
                is_usable = True
                return reward
            finally:
                self._busy.discard(process)
                if is_usable and not self._closed:
                    self._idle.append(process)
                elif not self._closed:
                    self.counts.replaced += 1
                    self._end(process)

    def _take_idle(self) -> RewardProcess | None:
        """Remove and return an idle process; None if no idle process lives. Drop idle processes that have ended."""
        while self._idle:
            process = self._idle.pop()
            if not process.has_ended:
                return process
            self.counts.replaced += 1
            self._end(process)
        return None

    def _end(self, process: RewardProcess) -> None:
        """Kill a process at once. Wait in the background until it has ended."""
        process.kill()
        ending = asyncio.create_task(process.end(), name="end of a reward process")
        self._ends.add(ending)
        ending.add_done_callback(self._ends.discard)

    async def _start(self) -> RewardProcess:
        """Start a process and return it; raise `RewardError` if it does not start."""
        try:
            started = await RewardProcess.start(self._config, self._source)
        except (ConfigError, OSError) as error:
            raise RewardError(f"a reward process could not be started: {error}", "start") from error
        if self._closed:
            await started.end()
            raise RewardError("the pool was closed while it started a reward process", "closed")
        return started
