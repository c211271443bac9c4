"""What a trainer rank holds: connect once, publish every version.

with windlass.connect_trainer(model, controller=url, token=token) as trainer:
    trainer.publish(0)
"""

from __future__ import annotations

import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import final

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
"""By which an announcement ends after its deadline."""


def version_number(version: int, what: str) -> int:
    """A plain integer, also of a counter that is a numpy or torch scalar; raise ConfigError for none in [0, 2^53)."""
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
    """A version whose weights are copied and under way; made by `TrainerClient.begin_publish`.

    Attributes:
        version: which.
        stood_s: seconds that `begin_publish` took, in all.
        copy: how much of that was the step before and the copy; packing, tables that are new and the
            way to the fleet are the rest.
    """

    def __init__(self, version: int, report: Future[UpdateReport]) -> None:
        self.version = version
        self.stood_s = 0.0
        self.copy = CopyTimes()
        self._report = report

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._report.done()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call it once `result` would return or raise at once, from any thread."""
        self._report.add_done_callback(lambda _: callback())

    def result(self, *, deadline_s: float = 600.0) -> UpdateReport:
        """Wait for the round's end.

        Raises:
            RoundAborted: not published, with the reason; the old version goes on being served.
            PeerTimeout: no end within `deadline_s`; ask again, or that of `begin_publish` has passed.
        """
        if not wait([self._report], deadline_s).done:
            raise PeerTimeout(f"version {self.version}: no end of the round within {deadline_s} s")
        return self._report.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerWeights:
    """What a trainer rank holds, and where.

    Attributes:
        manifest: its rank is `manifest.worker`: GROUP/RANK, where the group is the trainer job's name.
        parameters: where its parameters lie now, in manifest order.
        read: is told which parameters engines get, by index; the others may change in any way. `parameters` must still
            return an entry for each.
        watch: has `changed` compare with the parameters as they are now; called in the caller's thread when an update
            begins, so that a change before they are read is noticed as well. None where nothing can do that.
        changed: names a parameter that has changed since they were asked for, or since `watch`; empty if none has.
            Asked when they were sent, unless from a replica: what was sent then counts as not sent.
        make_whole: see `TrainerClient.make_whole`; None where weights are whole after every optimizer step.
        step_stream: the stream of the weights' GPU that the calling thread queues its steps in, for
            the copy of `begin_publish` to wait for; None to wait for all of the GPU's work.
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
    """One trainer rank's way to the fleet. Made by `connect_trainer`, or by yourself for any framework.

    Args:
        weights: of this rank.
        transport: owned by the client from here on.
        controller: address. token: secret.
        job: the same in all ranks of one start of the trainers, and in no other start; WINDLASS_JOB
            when omitted, and made where there is one rank.
        world_size: ranks of that job. arena_nbytes: see `Sender`.
        registered: see `Sender`. connect_deadline_s: how long to wait for the controller's welcome.
        replica: see `connect_trainer`.
        intercept: stands between channel and agent, for tests that inject faults.

    Raises:
        ConfigError: `controller` is no URL, `arena_nbytes` is too small, there is no such replica
            with this transport, or no `job` for several ranks.
        AuthenticationError, ProtocolError, PeerTimeout: see `AgentChannel.connect`. The transport is
            closed, whatever it was.
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
        """Have every rank hold all of the last optimizer step; `publish` and its kin do this first.

        Collective: every trainer rank calls it. Frameworks that gather stepped parameters lazily, inside
        the next forward pass, do it here instead. Does nothing for the others.
        """
        if self._weights.make_whole is not None:
            self._weights.make_whole()

    def publish(self, version: int, *, deadline_s: float = 600.0) -> UpdateReport:
        """Publish the weights as they are now; return once the fleet serves them.

        Collective: every trainer rank calls it with the same version.
        Memory: the weights must not change until it returns.
        Blocking: until the round ends; the controller's phase deadlines bound that.

        Args:
            version: greater than every version published before.
            deadline_s: how long to wait for the round to end.

        Raises:
            ConfigError: `version` is no integer >= 0, or another thread publishes.
            RoundAborted: not published, with the reason; the old version goes on being served.
            PeerTimeout: no answer within `deadline_s`; the weights must still not change.
        """
        return self._begin("publish", version, deadline_s)()

    def publish_soon(self, version: int, *, deadline_s: float = 600.0) -> Future[UpdateReport]:
        """As `publish`, but return at once: the weights must not change until the future is done.

        If they do (an optimizer steps, PEFT takes merged adapters out), the version is not published, and the future
        raises RoundAborted. Weights are made whole in the calling thread, before it returns.

        Raises:
            ConfigError: `version` is no integer >= 0, or a version is still being published.
            ProtocolError, PeerUnreachable: there is no controller any more.
        """
        return self._background.submit(self._begin("publish_soon", version, deadline_s))

    def begin_publish(self, version: int, *, deadline_s: float = 600.0) -> PendingUpdate:
        """As `publish`, but return once the weights are copied: they may change, move or go away.

        Ranks that go on earlier than others are no harm. The next `begin_publish` or `publish` must wait for the
        result, whose round is to end within `deadline_s` from now.
        Blocking: until the fleet is there and this rank's part is copied and packed. On a GPU the copy
        comes after what this thread has queued in its current stream, and no other stream is waited for
        (packing, over a network, and comparing replicas with other ranks wait for all); whatever is queued after the return comes after the copy.

        Raises:
            ConfigError: no replica was asked for (`connect_trainer`), `version` is no integer >= 0,
                or a version is still being published.
            RoundAborted: given up before the weights were copied.
            PeerTimeout: not copied within `deadline_s`; comes later where a copy was under way, once that
                is over. The weights may change after either.
        """
        if self._sender.replica is None:
            raise ConfigError("begin_publish: needs a replica when connecting, got replica=off")
        began, copied = time.perf_counter(), threading.Event()
        until_over = self._begin("begin_publish", version, deadline_s, copied)
        pending = PendingUpdate(version, self._background.submit(until_over))
        pending.when_done(copied.set)
        if not (in_time := copied.wait(deadline_s + MARGIN_S)):
            self._sender.end_version()  # a copy that is under way still reads the weights
        if not in_time or pending.done():
            pending.result(deadline_s=MARGIN_S)
        pending.stood_s, pending.copy = time.perf_counter() - began, self._sender.copy_times
        return pending

    def prepare_publish(self, version: int) -> None:
        """Have the weights as they are now ready for a `publish` of the controller's own process.

        `TrainController` calls it on every rank, and then publishes without asking the ranks again.
        Collective: every trainer rank calls it with the same version.
        Memory: the weights must not change before the controller has published them; with a replica,
        before it has copied them.

        Raises:
            ConfigError: `version` is no integer >= 0, or a version is still being published.
            ProtocolError, PeerUnreachable: there is no controller any more.
        """
        number = version_number(version, "prepare_publish")
        if self._prepared is not None:
            # Its end was told, or never will be: who asks now knows of it.
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
        """Every way to publish begins here, and ends with a call of what is returned.

        `deadline_s`: of the announcement; None where the controller begins the round by itself. `copied`: set once the
        replica has what is sent; None where the weights stand still.
        """
        number = version_number(version, what)
        if not self._publishing.acquire(blocking=False):
            raise ConfigError(
                f"{what}: version {number} must wait for the end of the one under way: "
                "`result` of begin_publish, or publish in another thread"
            )
        self._agent.hold(number)
        try:
            self.make_whole()  # first: the other ranks wait for this one in it, and nothing else ends that
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
        except WindlassError as error:  # whoever has begun it may never ask what became of it
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
        """Leave the fleet; the transport stays open, for memory to be unregistered. Idempotent."""
        self._channel.close()
        self._background.shutdown(wait=True)
        self._agent.close()
        self._sender.close()

    def close(self) -> None:
        """Leave the fleet and free registered memory. Idempotent."""
        self.leave()
        self._transport.close()
