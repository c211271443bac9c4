"""What a trainer rank holds to drive an update itself, half of each collective at a time.

    callback = windlass.RolloutCallback(url, token, leader="pp0")
    callback.pause_generation()
    group = windlass.WeightGroup(callback, "pp0")          # both halves of a new group
    for bucket in buckets:
        group.broadcast(bucket)                            # both halves of a broadcast
    callback.continue_generation(version)                  # publishes, or raises and nothing changed

Calls that are one half of a collective return a future at once, because the other half is the
caller's: a call that waited would keep it from entering.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, final

import msgspec

from windlass.closing import Closing
from windlass.config import CollectiveFabric, take_name
from windlass.control.push_messages import (
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
from windlass.control.report import UpdateReport
from windlass.envs import check_token
from windlass.errors import (
    AuthenticationError,
    ConfigError,
    PeerTimeout,
    ProtocolError,
    RoundAborted,
    WindlassError,
)
from windlass.net.access import authorization
from windlass.net.addresses import check_url, own_address
from windlass.net.clock import Backoff, Deadline
from windlass.net.sockets import open_connection
from windlass.trainers.client import TrainerClient, version_number
from windlass.transfer.bindings import GroupOffer, WireTensor
from windlass.transfer.collective_group import Rendezvous, join_group
from windlass.transfer.push import signature_of_group, wire_offsets

if TYPE_CHECKING:
    import torch

    from windlass.memory.cuda.gpu import Gpu

NUM_THREADS = 8
MARGIN_S = 5.0
BACKOFF = Backoff(0.05, 1.0)


@final
class RolloutCallback(Closing):
    """One leader's way to the controller. May be used from several threads.

    Args:
        controller: address. token: secret.
        leader: name of this leader, unique among those that drive one update together.
        client: for `update_weights`; not closed.
        check_weights: called by `pause_generation` first, to refuse weights that are not whole:
            `functools.partial(windlass.trainers.megatron.check_whole, model)`.
        stage: which of the leaders this one is, its pipeline stage for example.
        num_stages: how many leaders there are.
            Engines then take the calls of all leaders in the order (call, stage), whichever
            arrives first, and the update ends when all leaders have called
            `continue_generation`. All leaders declare this or none.
        deadline_s: of every call that names no other.

    Raises:
        ConfigError: no URL of a server, a token that no header can carry, a stage out of range or
            without a number of stages, a deadline that is not > 0.
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
                f"RolloutCallback: stage must be in [0, num_stages={num_stages}), got {stage}"
            )
        self.url, self.leader = controller, leader
        self._stage, self._num_stages = stage, num_stages
        self._lock, self._num_calls = threading.Lock(), 0
        self._token, self._client, self._deadline_s = token, client, deadline_s
        self._check_weights = check_weights
        self._pool = ThreadPoolExecutor(NUM_THREADS, "windlass-callback")
        self._closed = threading.Event()

    def pause_generation(
        self, *, session_s: float = 600.0, deadline_s: float | None = None
    ) -> None:
        """Begin an update, or join the one that another leader has begun: engines come to rest.

        Args:
            session_s: the engines go on with the old version if the leaders do not end it by then; at most
                a day.
            deadline_s: of this call.

        Raises:
            RoundAborted: an engine did not come to rest.
            PeerTimeout, AuthenticationError: see `continue_generation`.
            WindlassError: what `check_weights` raises; no engine has been paused.
        """
        if self._check_weights is not None:
            self._check_weights()
        with self._lock:
            self._num_calls = 0
        self._call(PauseCall(session_s, self._stage, self._num_stages), deadline_s)

    def continue_generation(self, version: int, *, deadline_s: float | None = None) -> None:
        """End the update; returns when the last leader has called it and the version is served.

        Raises:
            RoundAborted: some call of some leader had failed, or tensors are missing: the old version
                is served, everywhere.
            PeerTimeout: no answer within the deadline; the version may be served all the same.
            AuthenticationError: wrong token.
            ConfigError: the version is no integer >= 0; the update has been ended as one that failed.
        """
        try:
            number = version_number(version, "continue_generation")
        except ConfigError:
            # Engines stand still: they must not wait for the end of the session.
            with contextlib.suppress(WindlassError):
                self._call(ContinueCall(-1), deadline_s)
            raise
        self._call(ContinueCall(number), deadline_s)

    def engine_ranks(self, *, deadline_s: float | None = None) -> tuple[str, ...]:
        """The receiving members of every group, in rank order; valid until the update ends."""
        return self._call(MembersCall(), deadline_s)

    def init_weights_update_group(
        self,
        offer: GroupOffer,
        *,
        fabric: CollectiveFabric = CollectiveFabric.GLOO,
        deadline_s: float | None = None,
    ) -> Future[None]:
        """Have every engine rank enter a group whose rank 0 is the caller; at once a future."""
        return self._start(JoinPushGroup(offer, fabric, deadline_s or self._deadline_s), deadline_s)

    def update_weights_from_distributed(
        self, group: str, tensors: Sequence[WireTensor], *, deadline_s: float | None = None
    ) -> Future[None]:
        """Have every engine rank receive one bucket of whole tensors; at once a future."""
        return self._start(
            ReceiveTensors(group, tuple(tensors), deadline_s or self._deadline_s), deadline_s
        )

    def update_weights_from_disk(
        self, folder: str, *, deadline_s: float | None = None
    ) -> Future[None]:
        """Have every engine rank read its boxes from a checkpoint folder; at once a future."""
        return self._start(ReadFiles(folder), deadline_s)

    def update_weights(
        self, version: int, *, deadline_s: float | None = None
    ) -> Future[UpdateReport]:
        """`TrainerClient.publish_soon`: by the controller's own backend, no pause needed.

        Raises:
            ConfigError: the callback was made without a client; see also there.
        """
        if self._client is None:
            raise ConfigError("update_weights: the callback was made without a client")
        return self._client.publish_soon(version, deadline_s=deadline_s or self._deadline_s)

    def close(self) -> None:
        """End the threads; calls under way end at their deadline. Idempotent."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, call: CallbackCall, deadline_s: float | None) -> Future[None]:
        with self._lock:
            number, self._num_calls = self._num_calls, self._num_calls + 1

        def run() -> None:
            self._call(call, deadline_s, number)

        return self._pool.submit(run)

    def _call(
        self, call: CallbackCall, deadline_s: float | None, number: int = 0
    ) -> tuple[str, ...]:
        """Ask until there is an answer: the request id makes a repetition the same call."""
        seconds = deadline_s or self._deadline_s
        asked = CallbackRequest(uuid.uuid4().hex, self.leader, call, seconds, number)
        body, ends = msgspec.msgpack.encode(asked), time.monotonic() + seconds + MARGIN_S
        pauses, last = BACKOFF.pauses(), ""
        while (left_s := ends - time.monotonic()) > 0 and not self._closed.is_set():
            try:
                return self._post(body, left_s)
            except (OSError, http.client.HTTPException) as error:
                last = f"{type(error).__name__}: {error}"
                self._closed.wait(max(min(next(pauses), ends - time.monotonic()), 0.0))
        raise PeerTimeout(
            f"{type(call).__name__}: no answer of {self.url} within {seconds} s: {last}"
        )

    def _post(self, body: bytes, timeout_s: float) -> tuple[str, ...]:
        connection = open_connection(self.url, timeout_s, to_controller=True)
        try:
            connection.request("POST", "/v1/callback", body, authorization(self._token))
            response = connection.getresponse()
            data, status = response.read(), response.status
        finally:
            connection.close()
        if status in {401, 403}:
            said = data[:200].decode(errors="replace")
            raise AuthenticationError(f"{self.url} refused the token: {said}")
        if status != 200:
            raise ProtocolError(f"{self.url}: {status}: {data[:200].decode(errors='replace')}")
        answer = msgspec.msgpack.decode(data, type=CallbackAnswer)
        if answer.error.startswith("PeerTimeout"):
            raise PeerTimeout(answer.error)
        if answer.error:
            raise RoundAborted(answer.error)
        return answer.members


@final
class WeightGroup:
    """Both halves of a named group: this process is rank 0, every engine rank is a member.

    The port is bound before it is published. Groups live side by side and stay from one update to
    the next. Made between `pause_generation` and `continue_generation`.

    Args:
        callback: of this leader. name: unique among the groups of all leaders.
        bucket_nbytes: the largest bucket. fabric: gloo or NCCL.
        deadline_s: of forming it, and of every broadcast.

    Raises:
        ConfigError: no such fabric.
        RoundAborted: an engine did not enter. PlanError, PeerTimeout, TransferFailed: own half.
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
        self._bucket_nbytes = bucket_nbytes
        host = own_address(callback.url)
        rendezvous = Rendezvous(host, deadline_s)
        members = (callback.leader, *callback.engine_ranks(deadline_s=deadline_s))
        offer = GroupOffer(name, members, host, rendezvous.port, (), (bucket_nbytes,))
        entered = callback.init_weights_update_group(offer, fabric=fabric, deadline_s=deadline_s)
        self._group = join_group(
            offer,
            callback.leader,
            fabric=fabric,
            num_buffers=1,
            signature=signature_of_group(offer, fabric),
            host=host,
            deadline=Deadline.after(deadline_s, "join"),
            hosted=rendezvous,
            gpu=_current_gpu() if fabric is CollectiveFabric.NCCL else None,
        )
        entered.result(deadline_s + MARGIN_S)

    def broadcast(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send one bucket of whole tensors under their checkpoint names. Blocks until it is taken.

        Raises:
            ConfigError: the bucket is too large.
            RoundAborted: an engine did not take it; `TransferFailed`: the broadcast failed.
        """
        from windlass.memory.torch_dtypes import dtype_of

        specs = [
            WireTensor(name, dtype_of(name, tensor), tuple(tensor.shape))
            for name, tensor in tensors.items()
        ]
        offsets, nbytes = wire_offsets(specs)
        if nbytes > self._bucket_nbytes:
            raise ConfigError(
                f"broadcast: bucket must be <= {self._bucket_nbytes} bytes, got {nbytes}"
            )
        for offset, tensor in zip(offsets, tensors.values(), strict=True):
            self._group.put(0, offset, tensor)
        taken = self._callback.update_weights_from_distributed(
            self.name, specs, deadline_s=self._deadline_s
        )
        try:
            self._group.start(0, nbytes, self._deadline_s)
            self._group.finish(0, self._deadline_s)
            self._group.drain(self._deadline_s)
        finally:
            # Whatever became of this half: the engines' answer says more than a broken socket.
            taken.result(self._deadline_s + MARGIN_S)

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._group.abort()


def _current_gpu() -> Gpu:
    """Torch's current device.

    Raises:
        ConfigError: there is none. TransportUnavailable: its kernels cannot be compiled.
    """
    import torch

    from windlass.memory.cuda.gpu import shared_gpu

    if not torch.cuda.is_available():
        raise ConfigError("WeightGroup: fabric nccl needs a CUDA device, none was found")
    return shared_gpu(torch.cuda.current_device())
