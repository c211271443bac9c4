"""A trainer's side of vLLM's weight-transfer backend "windlass"."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, final

import msgspec

from windlass.config import ControlConfig, PauseMode, UpdateMode
from windlass.control.report import UpdateReport
from windlass.control.rounds import Phase
from windlass.controller import Controller
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable, WindlassError
from windlass.integrations.hosted import HostAddress, HostedController, TrainerRanks
from windlass.integrations.vllm.servers import PAUSE_MODES, VllmServers
from windlass.layout.naming.stacked import StackedRule
from windlass.net.access import Access
from windlass.net.addresses import check_url

if TYPE_CHECKING:
    import torch

__all__ = ["SentWeights", "WeightSync"]

logger = logging.getLogger(__name__)
REASON_S = 1.0
"""For the reason of a refusal to come, once a server has answered that it refuses."""
CALL_S = 30.0
"""Deadline in seconds of routes that answer quickly."""
PROBE_S = 2.0
"""Seconds that `send_weights` waits for a dead server to answer again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """Result of `WeightSync.send_weights`.

    Attributes:
        version: number of the version.
        servers: URLs of the servers that serve the version now.
        left_out: URL of a server that does not serve it -> reason. The server gets the version as soon as possible.
        report: report of the round: bytes, seconds per phase, pause.
    """

    version: int
    servers: tuple[str, ...]
    left_out: Mapping[str, str]
    report: UpdateReport


@final
class WeightSync:
    """Send the weights of a trainer to plain vLLM servers, shard by shard, as one transaction.

    Every trainer rank makes one and calls the same methods in the same order: all of them are
    collective. No tensor is gathered. Rank 0 hosts the controller and calls the servers' routes:
    `/init_weight_transfer_engine` when this is made, and for every version `/update_weights` of servers of several
    ranks, and `/pause` and `/resume` where `pause` says so. Servers are started with
    `--weight-transfer-config '{"backend": "windlass"}'` and VLLM_SERVER_DEV_MODE=1.

    Memory: engines' weights are written by the trainer's ranks from here to `shutdown`.

    Args:
        module: the model being trained, of FSDP2, tensor parallel, both, or neither.
        servers: URLs, in one order on every rank.
        config: of updates: mode, deadlines; its `pause_mode` is not used, see `pause`.
        transport: name of the transport, or its configuration in JSON.
        name_map: see `connect_trainer`.
        stacked: see `connect_trainer`.
        allow_unused: see `connect_trainer`.
        keep: see `connect_trainer`.
        pause: one of `PAUSE_MODES`: what becomes of running requests. With `keep` they stop between two steps and go
            on where they are; for the others `/pause` is asked before a version, and `/resume` follows. None where
            the caller has it pause and resume, which is as `keep` if nobody does.
        api_key: what the servers were started to ask for; empty for nothing.
        deadline_s: for all servers to join, and then for every version.

    Raises:
        ConfigError: an argument; or a transport, a module or servers that do not go together.
        UnsupportedLayout: a parameter of the module that cannot be described.
        EngineRefused: a server cannot be updated; quotes its reason. On every rank but 0:
        PeerUnreachable: a server, or another rank, could not be reached or has failed; quotes its reason.
        PeerTimeout: not all have joined within `deadline_s`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        servers: Sequence[str],
        config: ControlConfig | None = None,
        transport: str = "auto",
        name_map: Callable[[str], str | None] | None = None,
        stacked: Sequence[StackedRule] | None = None,
        allow_unused: Sequence[str] = (),
        keep: Sequence[str] = (),
        pause: str | None = "keep",
        api_key: str = "",
        deadline_s: float = 600.0,
    ) -> None:
        if pause is not None and pause not in PAUSE_MODES:
            raise ConfigError(f"pause: must be one of {PAUSE_MODES} or None, got {pause!r}")
        routes = VllmServers(servers, api_key=api_key)  # checks them on every rank
        self._urls = {_engine_name(url): url for url in routes.urls}
        self._deadline_s = deadline_s
        self._ranks = TrainerRanks()
        self._num_sent = 0
        self._fleet: _Fleet | None = None
        with ExitStack() as undo:

            def host() -> HostAddress:
                self._fleet = fleet = _Fleet(
                    routes, self._urls, config or ControlConfig(), transport, pause, deadline_s
                )
                undo.callback(fleet.close)
                return fleet.hosted.address(Access.TRAINER)

            def connect(address: HostAddress) -> None:
                from windlass.trainers.fsdp import connect_trainer

                self._trainer = connect_trainer(
                    module,
                    controller=address.url,
                    token=address.token,
                    transport=transport,
                    name_map=name_map,
                    stacked=stacked,
                    allow_unused=allow_unused,
                    keep=keep,
                    connect_deadline_s=deadline_s,
                )
                undo.callback(self._trainer.close)

            def join() -> None:
                if self._fleet is not None:
                    self._fleet.join([*self._urls], deadline_s, are_starting=True)

            self._ranks.meet("servers", host, connect, join, deadline_s)
            undo.pop_all()

    def send_weights(self, version: int) -> SentWeights:
        """Publish the current weights to every server. Collective; blocks.

        A server that is dead or fails is left out, and the update does not wait for it: all other servers serve the
        version when this returns. A server that runs again at its URL joins before the update.
        Memory: the weights must not change before this returns.

        Args:
            version: greater than all earlier versions.

        Raises:
            ConfigError: `version` is not an integer >= 0.
            RoundAborted: the version was not published; the servers keep their weights.
            PeerUnreachable: no server can be reached, or another rank has failed; quotes the reason.
            PeerTimeout: the update did not end within `deadline_s`.
        """
        self._num_sent += 1
        going = f"send/{self._num_sent}"
        reasons: Mapping[str, str] = {}
        if self._fleet is None:
            self._ranks.hear(going, self._deadline_s)
        else:
            try:
                reasons = self._fleet.rejoin(self._deadline_s)
            except WindlassError as error:
                self._ranks.tell(going, reason=str(error))
                raise
            self._ranks.tell(going)
        report = self._trainer.publish(version, deadline_s=self._deadline_s)
        left_out = {
            url: report.left_out.get(name) or reasons.get(url) or "not in the fleet"
            for name, url in self._urls.items()
            if name not in report.engines
        }
        if self._fleet is not None:
            self._fleet.wait_resumed(report.engines)
            for url, reason in left_out.items():
                logger.warning("%s does not serve version %s: %s", url, version, reason)
        served = tuple(url for url in self._urls.values() if url not in left_out)
        return SentWeights(version=version, servers=served, left_out=left_out, report=report)

    def shutdown(self) -> None:
        """Leave the fleet. The servers keep their weights and may join another trainer. Idempotent."""
        self._trainer.close()
        if self._fleet is not None:
            self._fleet.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _engine_name(url: str) -> str:
    """The same for one server in every fleet that it joins."""
    parts = check_url(url, "servers")
    return f"vllm-{parts.hostname}-{parts.port or parts.scheme}"


@final
class _Fleet:
    """What rank 0 has besides: the controller, and the servers' routes in step with its rounds."""

    def __init__(
        self,
        routes: VllmServers,
        urls: Mapping[str, str],
        config: ControlConfig,
        transport: str,
        pause: str | None,
        deadline_s: float,
    ) -> None:
        self._routes, self._urls = routes, urls
        self._transport, self._deadline_s = transport, deadline_s
        # Whoever holds a server lets its requests stay where they are: of vLLM's `keep` nothing is left to be asked.
        self._pause = None if pause == "keep" else pause
        kept = PauseMode.IN_PLACE if self._pause is None else PauseMode.ABORT
        config = msgspec.structs.replace(config, pause_mode=kept)
        self._held_s = config.deadlines.pause_s
        # From here on engines wait for their loops to be held.
        self._holds_in = Phase.PAUSE if config.mode is UpdateMode.STAGED else Phase.PREPARE
        self._joined: set[str] = set()
        self._round_over = threading.Event()  # of the last round
        self._joining = ThreadPoolExecutor(len(urls), "windlass-join")
        # One each: what a server is asked for one round comes after all that it was asked for another.
        self._holding = {name: ThreadPoolExecutor(1, f"windlass-{name}") for name in urls}
        self._paused: dict[str, Future[None]] = {}  # in the last round, until resumed
        self.hosted = HostedController(routes.urls, config, self._listen)
        self._coordinator = self.hosted.controller.coordinator

    def join(
        self,
        names: Sequence[str],
        deadline_s: float,
        *,
        answer_s: float = CALL_S,
        are_starting: bool = False,
    ) -> None:
        """Have servers capture their layouts and join.

        Args:
            names: of the servers.
            deadline_s: for all of them to join.
            answer_s: for each to say that it is there.
            are_starting: wait for servers that do not listen yet.

        Raises:
            EngineRefused: one cannot be updated; its reason. PeerUnreachable. PeerTimeout.
        """
        address, ends_at = self.hosted.address(Access.ENGINE), time.monotonic() + deadline_s

        def left_s() -> float:
            return max(ends_at - time.monotonic(), 0.0)

        infos = {
            self._urls[name]: {
                "name": name,
                "controller": address.url,
                "token": address.token,
                "transport": self._transport,
                "url": self._urls[name],
                "world_size": self._routes.world_size(
                    self._urls[name],
                    answer_s,
                    listens_within_s=left_s() if are_starting else 0.0,
                ),
            }
            for name in names
        }
        self._joined.update(names)
        try:
            self._routes.init_weight_transfer_engine(infos, max(left_s(), 1.0))
        except PeerUnreachable:
            # Of a refusal the answer says less than the rank that has told the controller.
            with suppress(PeerTimeout):
                self.hosted.wait_for_fleet(names, REASON_S)
            raise
        self.hosted.wait_for_fleet(names, max(left_s(), 1.0))

    def rejoin(self, deadline_s: float) -> Mapping[str, str]:
        """Have servers join that are not in the fleet, at once.

        Returns:
            Why some could not, by URL.

        Raises:
            PeerUnreachable: none is in the fleet.
        """
        tries = {
            name: self._joining.submit(self.join, [name], deadline_s, answer_s=PROBE_S)
            for name in self.hosted.missing([*self._urls])
        }
        reasons = {}
        for name, tried in tries.items():
            try:
                tried.result()
            except WindlassError as error:
                reasons[self._urls[name]] = f"{type(error).__name__}: {error}"
        if len(reasons) == len(self._urls):
            raise PeerUnreachable(f"servers: none is there: {'; '.join(reasons.values())}")
        return reasons

    def _listen(self, controller: Controller) -> None:
        controller.coordinator.on_phase(self._on_phase)

    def _on_phase(self, version: int, phase: Phase) -> None:
        """Called in the controller's loop: have the loops held of the servers that a round is about."""
        if phase is Phase.DONE:
            self._round_over.set()
        if phase is not self._holds_in:
            return
        self._round_over = over = threading.Event()
        coordinator = self._coordinator
        is_news = version > coordinator.fleet.published
        served = set() if is_news else {engine.name for engine in coordinator.routable()}
        self._paused.clear()
        for name in self._joined - served:
            if self._pause is None and self._comes_to_rest(name):
                continue
            # A server that is only brought up needs not be paused: it is held between two steps.
            pause = self._pause if is_news else None
            held = self._holding[name].submit(self._hold, name, version, pause, over)
            if pause is not None:
                self._paused[name] = held

    def _comes_to_rest(self, name: str) -> bool:
        """Whether the agent of a server holds it by itself; called in the controller's loop."""
        group = self._coordinator.fleet.group_of(name)
        first = None if group is None else group.agents.get(0)
        return first is not None and first.hello.comes_to_rest

    def _hold(self, name: str, version: int, pause: str | None, over: threading.Event) -> None:
        """Have a server's loops held until the round is over, and then have it go on."""
        if over.is_set():
            return
        among, routes, held_s = (self._urls[name],), self._routes, self._held_s
        refusals = {} if pause is None else routes.pause(among, pause, held_s)
        if not refusals:
            routes.update_weights(among, version, self._deadline_s, held_s=held_s)
        if pause is not None:
            routes.resume(among, CALL_S)

    def wait_resumed(self, names: Collection[str]) -> None:
        """Return once these servers, which serve a new version, go on: others do by themselves, when they are let go."""
        wait([self._paused[name] for name in names if name in self._paused], CALL_S)

    def close(self) -> None:
        """End the controller, and have the servers know. Idempotent."""
        self.hosted.close()
        for pool in (self._joining, *self._holding.values()):
            pool.shutdown(wait=False, cancel_futures=True)
        joined, self._joined = self._joined, set()
        self._routes.shutdown_weight_transfer_engine([self._urls[n] for n in joined], CALL_S)
        self._routes.close()
