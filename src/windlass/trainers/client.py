"""Client of a trainer rank: it connects once and publishes every version.

with windlass.connect_trainer(model, controller=url, token=token) as trainer:
    trainer.publish(0)
"""

from __future__ import annotations

import asyncio
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from windlass.closing import Closing
from windlass.config import ReplicaPlace
from windlass.control.client import CommandHandler, TrainerChannel
from windlass.control.connect_messages import Hello, group_and_rank, job_of
from windlass.control.messages import MAX_COUNT
from windlass.control.report import RoundOutcome, UpdateReport
from windlass.control.trainer_agent import TrainerAgent
from windlass.errors import ConfigError, PeerTimeout, RoundAborted, WindlassError
from windlass.layout.manifest import Role, ShardManifest
from windlass.net.addresses import check_url, own_address
from windlass.net.messages import PROTOCOL_VERSION
from windlass.transfer.base import ParameterMemory
from windlass.transfer.replica import CopyTimes
from windlass.transfer.sender import Sender
from windlass.transports.base import MemoryRegion, OneSidedTransport

_log = logging.getLogger(__name__)
MARGIN_S = 5.0
"""Seconds that the client waits beyond the announcement's deadline."""


def version_number(version: int, what: str) -> int:
    """Return `version` as a plain integer; numpy and torch integers are accepted.

    Raises:
        ConfigError: `version` is not an integer in [0, 2^53).
    """
    try:
        number = operator.index(version)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"{what}: version must be an integer >= 0, got {version!r}")
    if number > MAX_COUNT:
        raise ConfigError(f"{what}: version must be < 2^53, got {version!r}")
    return number


@final
class PendingUpdate:
    """Handle of an update, returned by `TrainerClient.publish`. Coroutines may await it to get the report.

    Attributes:
        version: number of the version.
        stood_s: seconds that `publish` took.
        copy: with `copy=True`, the part of `stood_s` that went into waiting for the optimizer step and into the copy.
            The rest went into packing, new link tables and messages to the fleet.
    """

    def __init__(self, version: int, report: Future[UpdateReport]) -> None:
        self.version = version
        self.stood_s = 0.0
        self.copy = CopyTimes()
        self._report = report

    def __await__(self) -> Generator[Any, None, UpdateReport]:
        return asyncio.wrap_future(self._report).__await__()

    def done(self) -> bool:
        """Return whether `result` would return or raise at once."""
        return self._report.done()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` as soon as `result` would return or raise at once; it may run in any thread."""
        self._report.add_done_callback(lambda _: callback())

    def result(self, *, deadline_s: float = 600.0) -> UpdateReport:
        """Wait for the end of the round and return its report.

        Raises:
            RoundAborted: the version was not published, with the reason. The engines continue to serve the old version.
            PeerTimeout: the round did not end within `deadline_s`, and the caller may call `result` again; or the
                deadline of `publish` has passed.
        """
        if not wait([self._report], deadline_s).done:
            raise PeerTimeout(
                f"version {self.version}: the round did not end within {deadline_s} s"
            )
        return self._report.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerWeights:
    """The weights of one trainer rank: their description, and functions that access them.

    Attributes:
        manifest: description of the weights. `manifest.worker` is GROUP/RANK, where GROUP is the name of the
            trainer job.
        parameters: returns the current memory of each parameter, in manifest order.
        read: called with the indices of the parameters that engines receive. All other parameters may change at any
            time, but `parameters` must still return an entry for each.
        watch: records the current state of the parameters, for `changed`. The client calls it in the caller's thread
            when an update begins, so that `changed` also finds changes before the parameters are read. None if the
            framework cannot do that.
        changed: returns the name of a parameter that changed since `parameters` or `watch` was called last; empty if
            none did. The client calls it after it has sent the parameters, except from a replica. If it returns a name,
            the version counts as not sent.
        make_whole: see `TrainerClient.make_whole`; None if weights are whole after every optimizer step.
        step_stream: returns the CUDA stream in which the calling thread queues its optimizer steps.
            `publish(copy=True)` waits only for this stream; if None, it waits for all work of the GPU.
        allow_unused, keep: see `connect_trainer`.
    """

    manifest: ShardManifest
    parameters: Callable[[], Sequence[ParameterMemory]]
    read: Callable[[Collection[int]], None] | None = None
    watch: Callable[[], None] | None = None
    changed: Callable[[], str] = str
    make_whole: Callable[[], None] | None = None
    step_stream: Callable[[], int] | None = None
    allow_unused: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()


@final
class TrainerClient(Closing):
    """Connection of one trainer rank to the fleet. `connect_trainer` makes it for PyTorch models.

    An adapter for another framework calls this class directly.

    Args:
        weights: weights of this rank.
        transport: transport of this rank. The client owns it, and closes it also if this call raises.
        controller: address of the controller. token: its secret.
        job: identity of this start of the trainers: equal on all its ranks and different for every other start.
            WINDLASS_JOB if omitted; a client with a single rank makes one if that is not set either.
        world_size: number of ranks of the job. arena_nbytes: see `Sender`.
        registered: see `Sender`. connect_deadline_s: seconds to wait until the controller accepts this rank.
        replica: see `connect_trainer`.
        intercept: wraps the agent's handler of commands; for tests that inject faults.

    Raises:
        ConfigError: `controller` is not a URL, `arena_nbytes` is too small, the transport cannot send from the
            requested replica, or there are several ranks and no `job`.
        AuthenticationError, ProtocolError, PeerTimeout: see `AgentChannel.connect`.
    """

    def __init__(
        self,
        weights: TrainerWeights,
        *,
        transport: OneSidedTransport,
        controller: str,
        token: str,
        job: str = "",
        world_size: int = 1,
        arena_nbytes: int = 0,
        registered: Sequence[MemoryRegion] = (),
        replica: ReplicaPlace = ReplicaPlace.OFF,
        connect_deadline_s: float = 60.0,
        intercept: Callable[[TrainerAgent], CommandHandler] | None = None,
    ) -> None:
        self._transport = transport
        self._weights, manifest = weights, weights.manifest
        self._publishing = threading.Lock()
        with ExitStack() as undo:
            undo.callback(transport.close)
            check_url(controller, "controller")
            job = job_of(job, world_size)
            group, rank = group_and_rank(manifest.worker)
            self._sender = Sender(
                transport,
                manifest,
                weights.parameters,
                arena_nbytes=arena_nbytes,
                registered=registered,
                replica=replica,
            )
            undo.callback(self._sender.close)
            self._background = ThreadPoolExecutor(1, "windlass-publish")
            self._prepared: Future[UpdateReport] | None = None
            self._agent = agent = TrainerAgent(
                self._sender,
                host=own_address(controller),
                read=weights.read,
                watch=weights.watch,
                changed=weights.changed,
            )
            undo.callback(agent.close)
            hello = Hello(
                protocol_version=PROTOCOL_VERSION,
                worker=manifest.worker,
                incarnation=os.urandom(8).hex(),
                role=Role.TRAINER,
                group=group,
                rank=rank,
                world_size=world_size,
                manifest=manifest.encode(),
                offers=transport.offers(),
                job=job,
                allow_unused=weights.allow_unused,
                keep=weights.keep,
            )
            handler = agent if intercept is None else intercept(agent)
            self._channel = TrainerChannel(controller, token, lambda: hello, handler)
            undo.callback(self._channel.close)
            self._channel.connect(connect_deadline_s)
            undo.pop_all()

    def make_whole(self) -> None:
        """Gather the results of the last optimizer step on every rank. `publish` calls this first.

        Collective: every trainer rank calls it. Some frameworks gather stepped parameters lazily, in the next forward
        pass; for them this call gathers the parameters now. For other frameworks it does nothing.
        """
        if self._weights.make_whole is not None:
            self._weights.make_whole()

    def publish(
        self, version: int, *, wait: bool = True, copy: bool = False, deadline_s: float = 600.0
    ) -> PendingUpdate:
        """Publish the weights as they are now, as one version of the whole fleet.

        Collective: every trainer rank calls it with the same version.
        Memory: the weights must not change until the round has ended; with `copy`, until this call returns. If they
        change (an optimizer steps, PEFT unmerges adapters), the version is not published.
        Blocking: with `wait`, until the round has ended; the controller's phase deadlines limit the duration. Without
        `wait`, until `make_whole` has ended; with `copy` also until the fleet is complete and this rank's weights are
        copied and packed. On a GPU the copy runs after the work that this thread has queued in its current stream, and
        does not wait for other streams. Packing for a network and comparing boxes with other ranks wait for all
        streams. Work that is queued after the return runs after the copy.

        Args:
            version: greater than every version published before.
            wait: whether to return after the end of the round. If not, the caller must call `result` of the returned
                update before the next `publish`.
            copy: whether to send a copy of the weights. The weights may then change, move or be freed as soon as this
                rank's call returns, also without `wait`. It needs the argument `replica` of `connect_trainer`.
            deadline_s: seconds from now within which the round must end.

        Raises:
            ConfigError: `version` is not an integer >= 0, another version is still being published, or `copy` is set
                and `connect_trainer` was called without `replica`.
            RoundAborted: the version was not published, with the reason. The engines continue to serve the old version.
                Without `wait` only `result` raises this, unless the round ended before the weights were copied.
            PeerTimeout: the round did not end, or the weights were not copied, within `deadline_s`. Without `copy` the
                weights must still not change. With `copy` they may: if a copy was running at the deadline, the error
                is raised after its end.
            ProtocolError, PeerUnreachable: the connection to the controller has ended.
        """
        if copy:
            return self._publish_copy(version, wait=wait, deadline_s=deadline_s)
        began = time.perf_counter()
        until_over = self._begin("publish", version, deadline_s)
        if wait:
            report = Future[UpdateReport]()
            report.set_result(until_over())
        else:
            report = self._background.submit(until_over)
        pending = PendingUpdate(version, report)
        pending.stood_s = time.perf_counter() - began
        return pending

    def _publish_copy(self, version: int, *, wait: bool, deadline_s: float) -> PendingUpdate:
        if self._sender.replica is None:
            raise ConfigError(
                "publish: copy=True needs a replica when connecting, got replica=off; connect with replica='auto'"
            )
        began, copied = time.perf_counter(), threading.Event()
        until_over = self._begin("publish", version, deadline_s, copied)
        pending = PendingUpdate(version, self._background.submit(until_over))
        pending.when_done(copied.set)
        if not (in_time := copied.wait(deadline_s + MARGIN_S)):
            # A running copy still reads the weights: wait for its end.
            self._sender.end_version()
        if not in_time or pending.done():
            pending.result(deadline_s=MARGIN_S)
        if wait:
            pending.result(deadline_s=deadline_s + MARGIN_S)
        pending.stood_s, pending.copy = time.perf_counter() - began, self._sender.copy_times
        return pending

    def prepare_publish(self, version: int) -> None:
        """Prepare this rank to send its current weights, in a round that the controller's process begins.

        `TrainController` calls this on every rank, and then publishes without another call to the ranks.
        Collective: every trainer rank calls it with the same version.
        Memory: the weights must not change until the controller has published them; with a replica, until this rank
        has copied them.

        Raises:
            ConfigError: `version` is not an integer >= 0, or a version is still being published.
            ProtocolError, PeerUnreachable: the connection to the controller has ended.
        """
        number = version_number(version, "prepare_publish")
        if self._prepared is not None:
            # The previous round has reported its result or never will; a waiter gets it (or an error) now.
            self._channel.give_up_expected()
            wait([self._prepared])
        copied = threading.Event() if self._sender.replica is not None else None
        until_over = self._begin("prepare_publish", number, None, copied)
        self._prepared = self._background.submit(until_over)

    def _begin(
        self,
        what: str,
        version: int,
        deadline_s: float | None,
        copied: threading.Event | None = None,
    ) -> Callable[[], UpdateReport]:
        """Begin to publish; return a function that waits for the end of the round and returns its report.

        Args:
            what: name of the method, for errors.
            version: version to publish.
            deadline_s: deadline of the announcement; None if the controller begins the round by itself.
            copied: set once the weights are copied to the replica; None if the caller does not change the weights
                until the round ends.
        """
        number = version_number(version, what)
        if not self._publishing.acquire(blocking=False):
            raise ConfigError(
                f"{what}: version {number} must wait until the previous update has ended; call `result` of its "
                "PendingUpdate first"
            )
        self._agent.hold(number)
        try:
            # Call the collective before any check that can raise: otherwise the other ranks would wait in it.
            self.make_whole()
            self._agent.watch()
            if self._channel.ended.done():
                self._channel.ended.result()
            find_stream = None if copied is None else self._weights.step_stream
            self._sender.begin_version(
                None if copied is None else copied.set,
                version=number,
                stream=None if find_stream is None else find_stream(),
            )
            until_over = (
                self._channel.expect(number).result
                if deadline_s is None
                else partial(self._channel.announce, number, deadline_s)
            )
        except BaseException:
            self._agent.release()
            self._publishing.release()
            raise
        return partial(self._end, number, until_over, copied)

    def _end(
        self,
        version: int,
        until_over: Callable[[], UpdateReport],
        copied: threading.Event | None,
    ) -> UpdateReport:
        try:
            report = until_over()
            if report.compared:
                self._channel.run_later(self._agent.after_update)
            if report.outcome is not RoundOutcome.PUBLISHED:
                raise RoundAborted(f"version {version} was not published: {report.reason}")
        except WindlassError as error:
            # Log the error, because the caller may never ask for the result.
            _log.warning("version %s: %s: %s", version, type(error).__name__, error)
            raise
        else:
            return report
        finally:
            if copied is not None and not copied.is_set():
                self._sender.end_version()
            self._agent.release()
            self._publishing.release()

    def leave(self) -> None:
        """Leave the fleet. The transport stays open, so that the caller can unregister memory. Idempotent."""
        self._channel.close()
        self._background.shutdown(wait=True)
        self._agent.close()
        self._sender.close()

    def close(self) -> None:
        """Leave the fleet and free registered memory. Idempotent."""
        self.leave()
        self._transport.close()
