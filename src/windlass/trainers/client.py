"""Client of a trainer rank: connects to the controller once, and publishes every version.

with windlass.connect_trainer(model, controller=url, token=token) as trainer:
    trainer.publish(0)

A round is the controller's attempt to publish one version: it begins when all trainer ranks have announced the version,
and ends with a report. A replica is a copy of the weights, from which the rank sends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import final

from windlass.closing import Closing
from windlass.config import ReplicaPlace
from windlass.control.client import CommandHandler, TrainerChannel
from windlass.control.connect_messages import TurnRoom, job_of
from windlass.control.report import RoundOutcome, UpdateReport
from windlass.control.trainer_agent import TrainerAgent
from windlass.errors import ConfigError, RoundAborted, WindlassError
from windlass.memory.room import HOST, room_of, used_nbytes
from windlass.net.addresses import check_url, own_address
from windlass.trainers.pending_update import PendingUpdate, version_number
from windlass.trainers.weights import TrainerWeights
from windlass.transfer.sender import Sender
from windlass.transports.base import MemoryRegion, OneSidedTransport

_log = logging.getLogger(__name__)
MARGIN_S = 5.0
"""Seconds that the client waits beyond the deadline of `publish`, so that the controller's own error can arrive."""


@final
class TrainerClient(Closing):
    """Connection of one trainer rank to the fleet.

    `connect_trainer` creates a client for a PyTorch model. An adapter for another framework calls this class directly.

    Args:
        weights: weights of this rank.
        transport: transport of this rank. `close` and a failed constructor close the transport.
        controller: address of the controller.
        token: secret of the controller.
        job: identity of this launch of the trainer ranks, equal on all ranks. If empty, the client uses WINDLASS_JOB. If
            that is empty too, a single rank uses a random identity.
        world_size: number of trainer ranks.
        arena_nbytes: see `Sender`.
        registered: see `Sender`.
        replica: see `connect_trainer`.
        connect_deadline_s: seconds to wait until the controller accepts this rank.
        intercept: function that wraps the agent; tests use it to inject faults.

    Raises:
        ConfigError: `controller` is not a URL, `arena_nbytes` is too small, the transport cannot send from the
            requested replica, or there are several ranks and no `job`.
        AuthenticationError, ProtocolError, PeerTimeout: see `AgentChannel.connect`.
        PeerUnreachable: this host has no route to the controller.
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
            # Do not ask for the parameters here: they may not have memory yet.
            ordinal = transport.traits.gpu
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
                release=weights.release,
                used_nbytes=partial(used_nbytes, ordinal),
            )
            undo.callback(agent.close)
            own = room_of(ordinal)
            # A trainer with a replica in host memory may free its GPU before the update.
            stays = replica is not ReplicaPlace.HOST or own.name == HOST
            held = sum(parameter.nbytes for parameter in manifest.parameters)
            hello = weights.hello(
                offers=transport.offers(),
                job=job,
                world_size=world_size,
                room=TurnRoom(own.name, own.nbytes, held if stays else 0),
            )
            handler = agent if intercept is None else intercept(agent)
            self._channel = TrainerChannel(controller, token, lambda: hello, handler)
            undo.callback(self._channel.close)
            self._channel.connect(connect_deadline_s)
            undo.pop_all()

    def make_whole(self) -> None:
        """Gather the parameters that the last optimizer step changed, if the framework would gather them later.

        Collective over all trainer ranks. `publish` calls this first. Megatron-core's distributed optimizer can leave this
        gathering to the next forward pass; for other frameworks, this method does nothing.
        """
        if self._weights.make_whole is not None:
            self._weights.make_whole()

    def publish(
        self, version: int, *, wait: bool = True, copy: bool = False, deadline_s: float = 600.0
    ) -> PendingUpdate:
        """Publish the current weights as one version, which all engines then serve.

        Collective: every trainer rank must call this with the same version.

        Memory: the weights must not change until the round has ended (with `copy`: until this method returns). If the
        weights change earlier (by an optimizer step, or if PEFT unmerges adapters), the version is not published.

        Blocking: with `wait`, this method returns when the round has ended. With `copy` and without `wait`, it returns
        when all trainer ranks and enough engines are connected, and this rank has copied and packed its weights.
        With neither `wait` nor `copy`, it returns after `make_whole`.

        CUDA streams: the copy runs after the work in this thread's current stream; later work in this stream runs after
        the copy. The copy does not wait for other streams, but packing and comparing weights wait for all streams.

        Args:
            version: number of the version, greater than all earlier numbers.
            wait: True to return when the round has ended. Otherwise the caller must call `result` of the returned
                update before the next `publish`.
            copy: True to send a copy of the weights, so that the weights may change, move or be freed as soon as this
                method returns. This needs the argument `replica` of `connect_trainer`.
            deadline_s: seconds from now within which the round must end.

        Raises:
            ConfigError: `version` is not an integer >= 0, another version is still being published, or `copy` is set
                and `connect_trainer` was called without `replica`.
            RoundAborted: the version was not published; the message has the reason. The engines continue to serve the
                old version. Without `wait`, `result` of the returned update raises this error; but with `copy`, this
                method raises it if the round ended before the weights were copied.
            PeerTimeout: the round did not end, or the weights were not copied, within `deadline_s`. Without `copy`, the
                weights must not change until the round has ended.
            AuthenticationError, ProtocolError, PeerUnreachable: the connection to the controller has ended.
        """
        replica = self._sender.replica
        if copy and replica is None:
            raise ConfigError(
                "publish: copy must be False for a trainer that is connected with replica='off', got True; connect it "
                "with replica='auto'"
            )
        began, copied = time.perf_counter(), threading.Event() if copy else None
        until_over = self._begin("publish", version_number(version, "publish"), deadline_s, copied)
        if wait and copied is None:
            report = Future[UpdateReport]()
            report.set_result(until_over())
        else:
            report = self._background.submit(until_over)
        pending = PendingUpdate(version, report)
        if copied is not None and replica is not None:
            pending.when_done(copied.set)
            if not (in_time := copied.wait(deadline_s + MARGIN_S)):
                # A copy may still read the weights. Wait until it has ended.
                self._sender.end_version()
            if not in_time or pending.done():
                pending.result(deadline_s=MARGIN_S)
            elif wait:
                pending.result(deadline_s=deadline_s + MARGIN_S)
            pending.copy = replica.times
        pending.stood_s = time.perf_counter() - began
        return pending

    def prepare_publish(self, version: int) -> None:
        """Prepare this rank to send its current weights in a round that the controller's process begins.

        `TrainController` calls this on every rank, and then begins the round without another call to the ranks.

        Collective: every trainer rank must call this with the same version.

        First wait until this rank's previous round has ended. Return before the weights are sent. The weights must not
        change until the controller's round has ended. With a replica, the weights may change as soon as all ranks have
        reported that they copied their weights.

        Raises:
            ConfigError: `version` is not an integer >= 0, or a `publish` of this rank has not ended.
            AuthenticationError, ProtocolError, PeerUnreachable: the connection to the controller has ended.
        """
        number = version_number(version, "prepare_publish")
        if self._prepared is not None:
            # The controller begins a round only after the previous round has ended. So if the previous round's report
            # is still missing, it never arrives.
            self._channel.give_up_expected()
            wait([self._prepared])
        copied = threading.Event() if self._sender.replica is not None else None
        until_over = self._begin("prepare_publish", number, None, copied)
        self._prepared = self._background.submit(until_over)

    def _begin(
        self, what: str, version: int, deadline_s: float | None, copied: threading.Event | None
    ) -> Callable[[], UpdateReport]:
        """Make the weights ready to be sent as `version`.

        Args:
            what: name of the public method, for errors.
            version: number of the version.
            deadline_s: seconds within which the round must end; None if the controller begins the round itself, so that
                this rank announces nothing.
            copied: event that is set when the weights have been copied to the replica; None to send without a copy.

        Returns:
            Function that announces the version (only if `deadline_s` is not None), waits until the round has ended, and
            returns the report. The caller must call this function, or no later version can begin.

        Raises:
            ConfigError, AuthenticationError, ProtocolError, PeerUnreachable: see `publish`.
        """
        if not self._publishing.acquire(blocking=False):
            raise ConfigError(
                f"{what}: the previous update must end before version {version} begins; call `result` of the previous "
                "PendingUpdate first"
            )
        self._agent.held.hold(version)
        try:
            # Call this collective before any check that can raise. If a check raised first on this rank, the other ranks
            # would wait in the collective.
            self.make_whole()
            self._agent.held.watch()
            if self._channel.ended.done():
                self._channel.ended.result()
            if copied is None:
                self._sender.begin_version(version=version)
            else:
                stream = None if self._weights.step_stream is None else self._weights.step_stream()
                self._sender.begin_version(copied.set, version=version, stream=stream)
            until_over = (
                self._channel.begin_announcement(version, sends=False).report.result
                if deadline_s is None
                else partial(self._channel.announce, version, deadline_s)
            )
        except BaseException:
            self._agent.held.release()
            self._publishing.release()
            raise
        return partial(self._end, version, until_over, copied)

    def _end(
        self, version: int, until_over: Callable[[], UpdateReport], copied: threading.Event | None
    ) -> UpdateReport:
        """Call `until_over`, which waits until the round has ended, and return the report.

        In every case, also after an error, release the locks that `_begin` has taken, so that the next version can begin.

        Raises:
            RoundAborted: the version was not published.
            WindlassError: the error of `until_over`.
        """
        try:
            report = until_over()
            if report.compared:
                self._channel.run_later(self._agent.held.prepare_next_comparison)
            if report.outcome is RoundOutcome.PUBLISHED:
                return report
            raise RoundAborted(f"version {version} was not published: {report.reason}")
        except WindlassError as error:
            # Log the error, because the caller may never ask for the result.
            _log.warning("version %s: %s: %s", version, type(error).__name__, error)
            raise
        finally:
            if copied is not None and not copied.is_set():
                self._sender.end_version()
            self._agent.held.release()
            self._publishing.release()

    def leave(self) -> None:
        """Leave the fleet, but do not close the transport: the caller may still unregister memory with it. Idempotent."""
        self._channel.close()
        self._background.shutdown(wait=True)
        self._agent.close()
        self._sender.close()

    def close(self) -> None:
        """Leave the fleet and close the transport. Idempotent."""
        self.leave()
        self._transport.close()
