"""Updates that trainer ranks drive themselves: a trainer rank broadcasts whole tensors to the engines, in buckets.

    callback = windlass.RolloutCallback(url, token, leader="pp0")
    callback.pause_generation()
    group = windlass.WeightGroup(callback, "pp0")          # a process group of this process and the engine ranks
    for bucket in buckets:
        group.broadcast(bucket)                            # this process sends, the engines receive
    callback.continue_generation(version)                  # engines serve the version, or an error is raised

A trainer rank that drives an update is a leader; one update can have several leaders. If a call of `RolloutCallback`
makes the engines enter a collective, the call returns a future at once. The caller must then enter the same collective,
and wait for the future afterwards. `WeightGroup` does so.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NoReturn, final

import msgspec

from windlass.backends.push_halves import PushSender
from windlass.closing import Closing
from windlass.config import CollectiveFabric, take_name
from windlass.control.push_messages import (
    AliveCall,
    CallbackAnswer,
    CallbackCall,
    CallbackRequest,
    ContinueCall,
    JoinPushGroup,
    MembersCall,
    PauseCall,
    ReadFiles,
    ReceiveTensors,
)
from windlass.envs import check_token
from windlass.errors import (
    AuthenticationError,
    ConfigError,
    PeerTimeout,
    PeerUnreachable,
    ProtocolError,
    RoundAborted,
    WindlassError,
)
from windlass.net.access import authorization
from windlass.net.addresses import check_url, own_address
from windlass.net.blocking_http import BlockingHttp, HttpReply
from windlass.net.clock import Backoff
from windlass.trainers.client import TrainerClient
from windlass.trainers.pending_update import PendingUpdate, version_number
from windlass.transfer.bindings import GroupOffer, WireTensor

if TYPE_CHECKING:
    import torch

    from windlass.memory.cuda.gpu import Gpu

NUM_THREADS = 8
MARGIN_S = 5.0
BACKOFF = Backoff(0.05, 1.0)
LEASE_S = 30.0
"""Seconds without a report after which the controller ends the update of a leader."""


@final
class RolloutCallback(Closing):
    """Connection of one leader (a trainer rank that drives updates) to the controller. Thread-safe.

    Args:
        controller: address of the controller.
        token: secret of the controller.
        leader: name of this leader, unique among the leaders of one update.
        client: client for `update_weights`; `close` does not close it.
        check_weights: function that `pause_generation` calls first. It must raise if parameters are not gathered, for
            example `functools.partial(windlass.trainers.megatron.check_whole, model)`.
        stage: index of this leader in [0, `num_stages`), such as its pipeline stage.
        num_stages: number of leaders; all leaders must set it, or none. If it is set, engines carry out the first calls
            of all leaders (ordered by `stage`), then their second calls, and so on. The update ends when all leaders
            have called `continue_generation`.
        deadline_s: deadline in seconds of a call whose own `deadline_s` is None.

    Raises:
        ConfigError: `controller` is not a URL, an HTTP header cannot carry the token, `stage` is out of range or
            `num_stages` is missing, or `deadline_s` is not > 0.
    """

    def __init__(
        self,
        controller: str,
        token: str,
        *,
        leader: str = "leader",
        client: TrainerClient | None = None,
        check_weights: Callable[[], None] | None = None,
        stage: int = -1,
        num_stages: int = 0,
        deadline_s: float = 120.0,
    ) -> None:
        check_url(controller, "RolloutCallback: controller")
        check_token(token, "RolloutCallback: token")
        if not deadline_s > 0:
            raise ConfigError(f"RolloutCallback: deadline_s must be > 0, got {deadline_s}")
        if (num_stages or stage != -1) and not 0 <= stage < num_stages:
            raise ConfigError(
                f"RolloutCallback: stage must be in [0, num_stages={num_stages}), got {stage}; pass both arguments or "
                "neither"
            )
        self.url, self.leader = controller, leader
        self._stage, self._num_stages = stage, num_stages
        self._lock, self._num_calls = threading.Lock(), 0
        self._token, self._client, self._deadline_s = token, client, deadline_s
        self._check_weights = check_weights
        self._pool = ThreadPoolExecutor(NUM_THREADS, "windlass-callback")
        self._closed = threading.Event()
        self._ended = threading.Event()

    def pause_generation(
        self, *, session_s: float = 600.0, deadline_s: float | None = None
    ) -> None:
        """Pause the engines and begin an update, or join the update that another leader has begun.

        From now until `continue_generation`, a thread reports to the controller that this process is alive. If the reports
        cease for 30 s, the controller ends the update, and the engines continue with the old version.

        Args:
            session_s: seconds within which the leaders must end the update, at most a day. After this time, the engines
                continue with the old version.
            deadline_s: deadline of this call in seconds.

        Raises:
            RoundAborted: an engine did not pause, or no engine is connected.
            PeerTimeout, AuthenticationError, ProtocolError: see `continue_generation`.
            WindlassError: the error of `check_weights`; no engine was paused.
        """
        if self._check_weights is not None:
            self._check_weights()
        with self._lock:
            self._num_calls = 0
        self._ended.set()
        self._call(PauseCall(session_s, self._stage, self._num_stages, LEASE_S), deadline_s)
        self._ended = ended = threading.Event()
        # Use a daemon thread, so that the process can end without a call of `close`.
        threading.Thread(
            target=self._report, args=(ended,), name="windlass-alive", daemon=True
        ).start()

    def continue_generation(self, version: int, *, deadline_s: float | None = None) -> None:
        """End the update, and stop the thread that `pause_generation` started.

        Return when all leaders have called this method and the engines serve the version.

        Raises:
            RoundAborted: a call of a leader failed, or the leaders did not send all tensors. All engines serve the old
                version.
            PeerTimeout: the controller did not answer within the deadline. The engines may serve the new version.
            AuthenticationError: the token is wrong.
            ProtocolError: the controller refused the request, for example because a deadline is longer than a day.
            ConfigError: the version is not an integer >= 0. The update has ended, and the engines serve the old version.
        """
        try:
            number = version_number(version, "continue_generation")
        except ConfigError:
            # End the update now: otherwise the engines would stay paused for `session_s`.
            with contextlib.suppress(WindlassError):
                self._continue(-1, deadline_s)
            raise
        self._continue(number, deadline_s)

    def _continue(self, version: int, deadline_s: float | None) -> None:
        """Send the call that ends the update. Stop the thread of `_report` even if the call fails; see `_call`."""
        ended = self._ended
        try:
            self._call(ContinueCall(version), deadline_s)
        finally:
            ended.set()

    def _report(self, ended: threading.Event) -> None:
        """Report to the controller that this process is alive, until `ended` is set or this object is closed."""
        while not ended.wait(LEASE_S / 6) and not self._closed.is_set():
            # Ignore a failed report and try again. If no report arrives for `LEASE_S`, the controller ends the update.
            with contextlib.suppress(WindlassError):
                self._call(AliveCall(), LEASE_S / 6)

    def engine_ranks(self, *, deadline_s: float | None = None) -> tuple[str, ...]:
        """Return the names of the engine ranks in this update.

        In the process group of a `WeightGroup`, these engine ranks have the ranks 1, 2, and so on, in this order.

        Raises:
            RoundAborted: no update has begun.
            PeerTimeout, AuthenticationError, ProtocolError: see `continue_generation`.
        """
        return self._call(MembersCall(), deadline_s)

    def init_weights_update_group(
        self,
        offer: GroupOffer,
        *,
        fabric: CollectiveFabric = CollectiveFabric.GLOO,
        deadline_s: float | None = None,
    ) -> Future[None]:
        """Make every engine rank join a process group in which this process is rank 0. Return a future at once.

        Joining is a collective: this process must join the group now, with `PushSender.join`. The future is done when all
        engine ranks have joined; it raises RoundAborted if one of them failed.
        """
        return self._start(JoinPushGroup(offer, fabric, deadline_s or self._deadline_s), deadline_s)

    def update_weights_from_distributed(
        self,
        group: str,
        tensors: Sequence[WireTensor],
        *,
        stamp: str,
        deadline_s: float | None = None,
    ) -> Future[None]:
        """Make every engine rank receive one bucket of whole tensors in the process group `group`. Return a future at once.

        This process must broadcast the bucket now. The future is done when all engine ranks have received the bucket; it
        raises RoundAborted if one of them failed.

        Args:
            group: name of the group.
            tensors: result of `PushSender.fill`.
            stamp: `PushSender.stamp` after this `fill`. Engines refuse a bucket with another stamp.
            deadline_s: deadline of this call in seconds.
        """
        seconds = deadline_s or self._deadline_s
        return self._start(ReceiveTensors(group, tuple(tensors), stamp, seconds), deadline_s)

    def update_weights_from_disk(
        self, folder: str, *, deadline_s: float | None = None
    ) -> Future[None]:
        """Make every engine rank read its boxes from the checkpoint folder `folder`. Return a future at once.

        The future is done when all engine ranks have read the files; it raises RoundAborted if one of them failed.
        """
        return self._start(ReadFiles(folder), deadline_s)

    def update_weights(self, version: int, *, deadline_s: float | None = None) -> PendingUpdate:
        """Publish the weights as `version` with `TrainerClient.publish(wait=False)`.

        This replaces `pause_generation`, the broadcasts and `continue_generation`.

        Raises:
            ConfigError: this object has no `client`; see also `TrainerClient.publish`.
        """
        if self._client is None:
            raise ConfigError("update_weights: RolloutCallback must have a client, got None")
        deadline_s = deadline_s or self._deadline_s
        return self._client.publish(version, wait=False, deadline_s=deadline_s)

    def offload(self) -> NoReturn:
        """Raise ConfigError: AReaL's call makes engines release their memory, and engines here must keep it."""
        _refuse_release("offload")

    def onload(self) -> NoReturn:
        """Raise ConfigError, see `offload`."""
        _refuse_release("onload")

    def close(self) -> None:
        """Stop all threads without waiting. Idempotent.

        Calls in progress may wait for the controller until their deadlines.
        """
        self._closed.set()
        self._ended.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, call: CallbackCall, deadline_s: float | None) -> Future[None]:
        """Give a call the next number of this update, and send the call in a thread.

        Return a future that is done when the controller has answered the call.
        """
        with self._lock:
            number, self._num_calls = self._num_calls, self._num_calls + 1

        def run() -> None:
            self._call(call, deadline_s, number)

        return self._pool.submit(run)

    def _call(
        self, call: CallbackCall, deadline_s: float | None, number: int = 0
    ) -> tuple[str, ...]:
        """Send a call to the controller, and send it again after a lost connection, until the controller answers.

        All these requests have the same id, so that the controller carries out the call once.

        Args:
            call: the call.
            deadline_s: seconds for the call; None for the deadline of this object.
            number: see `CallbackRequest.number`.

        Returns:
            Engine ranks of the update, for a `MembersCall`; else an empty tuple.

        Raises:
            RoundAborted: the controller reported a failure.
            PeerTimeout: the controller did not answer within the deadline, or this object was closed.
            AuthenticationError: the token is wrong.
            ProtocolError: the controller refused the request.
        """
        seconds = deadline_s or self._deadline_s
        asked = CallbackRequest(uuid.uuid4().hex, self.leader, call, seconds, number)
        body, ends = msgspec.msgpack.encode(asked), time.monotonic() + seconds + MARGIN_S
        pauses, last = BACKOFF.pauses(), ""
        while (left_s := ends - time.monotonic()) > 0 and not self._closed.is_set():
            try:
                with BlockingHttp(
                    self.url, authorization(self._token), to_controller=True
                ) as controller:
                    reply = controller.ask("POST", "/v1/callback", body, deadline_s=left_s)
            except (PeerTimeout, PeerUnreachable) as error:
                last = str(error)
                self._closed.wait(max(min(next(pauses), ends - time.monotonic()), 0.0))
            else:
                return self._members(reply)
        if self._closed.is_set():
            what = f"RolloutCallback was closed before {self.url} answered"
        else:
            what = f"{self.url} did not answer within {seconds} s: {last}"
        raise PeerTimeout(f"{type(call).__name__}: {what}")

    def _members(self, reply: HttpReply) -> tuple[str, ...]:
        """Return the engine ranks in the controller's answer, or raise the error that it contains.

        Raises:
            AuthenticationError: the controller refused the token.
            ProtocolError: the controller answered with another HTTP status than 200.
            PeerTimeout, RoundAborted: the controller reports this error.
        """
        if reply.status in {401, 403}:
            raise AuthenticationError(f"{self.url} refused the token: {reply.text(200)}")
        if reply.status != 200:
            raise ProtocolError(f"{self.url}: {reply.status}: {reply.text(200)}")
        answer = msgspec.msgpack.decode(reply.body, type=CallbackAnswer)
        if answer.error.startswith("PeerTimeout"):
            raise PeerTimeout(answer.error)
        if answer.error:
            raise RoundAborted(answer.error)
        return answer.members


def _refuse_release(call: str) -> NoReturn:
    raise ConfigError(
        f"{call}: engines must keep the memory of their weights, because updates write into it at fixed addresses; remove "
        "the call, and let the trainer free its GPU instead: with connect_trainer(..., replica=ReplicaPlace.HOST), or "
        "with FSDP2's CPUOffloadPolicy"
    )


@final
class WeightGroup:
    """Process group for broadcasts: this process is rank 0, and all engine ranks are the other ranks.

    Create a group between `pause_generation` and `continue_generation`. Later updates can use the same group, and
    several groups can exist at the same time.

    Args:
        callback: callback of this leader.
        name: name of the group, unique among the groups of all leaders.
        bucket_nbytes: maximum number of bytes of a bucket.
        fabric: gloo or NCCL.
        deadline_s: seconds to form the group, and for every broadcast.

    Raises:
        ConfigError: the fabric is unknown, or it is NCCL and this process has no CUDA device.
        RoundAborted: an engine rank did not join the group.
        PlanError, PeerTimeout, TransferFailed: this process could not join the group.
    """

    def __init__(
        self,
        callback: RolloutCallback,
        name: str,
        *,
        bucket_nbytes: int = 64 << 20,
        fabric: CollectiveFabric = CollectiveFabric.GLOO,
        deadline_s: float = 60.0,
    ) -> None:
        fabric = take_name("WeightGroup: fabric", fabric, CollectiveFabric)
        self._callback, self.name, self._deadline_s = callback, name, deadline_s
        self._sender = PushSender(
            name,
            (callback.leader, *callback.engine_ranks(deadline_s=deadline_s)),
            host=own_address(callback.url),
            bucket_nbytes=bucket_nbytes,
            fabric=fabric,
            deadline_s=deadline_s,
        )
        entered = callback.init_weights_update_group(
            self._sender.offer, fabric=fabric, deadline_s=deadline_s
        )
        entered.add_done_callback(self._end_if_refused)
        try:
            self._sender.join(_current_gpu() if fabric is CollectiveFabric.NCCL else None)
        finally:
            # If the engines report an error, raise it instead of this process's error.
            entered.result(deadline_s + MARGIN_S)

    def broadcast(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Broadcast one bucket of whole tensors, and block until all engines have received the bucket.

        The keys of `tensors` are names in checkpoints.

        Raises:
            ConfigError: the tensors have more than `bucket_nbytes` bytes.
            RoundAborted: an engine did not receive the bucket.
            TransferFailed: the broadcast failed in this process, or an earlier broadcast of this group failed.
        """
        specs = self._sender.fill(tensors)
        taken = self._callback.update_weights_from_distributed(
            self.name, specs, stamp=self._sender.stamp, deadline_s=self._deadline_s
        )
        taken.add_done_callback(self._end_if_refused)
        try:
            self._sender.send(self._deadline_s)
        finally:
            # If the engines report an error, raise it instead of this process's error (often only a broken socket).
            taken.result(self._deadline_s + MARGIN_S)

    def close(self) -> None:
        """Leave the process group. Idempotent."""
        self._sender.close()

    def _end_if_refused(self, call: Future[None]) -> None:
        """If a call to the engines has failed, end the collective of this process, because engines may not enter theirs.

        The group cannot be used again, because this process has sent a bucket that engines have not received.
        """
        if call.cancelled() or call.exception() is not None:
            self._sender.give_up()


def _current_gpu() -> Gpu:
    """Return torch's current CUDA device.

    Raises:
        ConfigError: there is no CUDA device.
        TransportUnavailable: the CUDA kernels for this device cannot be compiled.
    """
    import torch

    from windlass.memory.cuda.gpu import shared_gpu

    if not torch.cuda.is_available():
        raise ConfigError("WeightGroup: fabric nccl needs a CUDA device, none was found")
    return shared_gpu(torch.cuda.current_device())
