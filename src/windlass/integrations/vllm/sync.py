"""Trainer's side of vLLM's weight-transfer backend "windlass"."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Self, final

import msgspec

from windlass.config import ControlConfig, PauseMode, UpdateMode
from windlass.control.round_state import Phase
from windlass.controller import Controller
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable, WindlassError
from windlass.integrations.fleet_sync import FleetSync, SentWeights
from windlass.integrations.hosted import HostAddress, HostedController
from windlass.integrations.vllm.servers import PAUSE_MODES, VllmServers
from windlass.layout.naming.stacked import StackedRule
from windlass.net.access import Access
from windlass.net.addresses import check_url

if TYPE_CHECKING:
    import torch

    from windlass.trainers.client import TrainerClient

__all__ = ["WeightSync", "plain_servers_sync"]

logger = logging.getLogger(__name__)
REASON_S = 1.0
"""Seconds that rank 0 waits, after a server has refused, for the server's rank to report the reason."""
CALL_S = 30.0
"""Deadline in seconds of routes that answer quickly."""
PROBE_S = 2.0
"""Seconds within which a server outside the fleet must answer before `send_weights` continues without it."""


@final
class WeightSync:
    """Connection of a trainer to plain vLLM servers; each version goes to all servers in one transaction.

    The constructor and all methods are collective: every trainer rank creates a `WeightSync` and calls the same methods
    in the same order. Each rank sends its own shards, and no rank gathers tensors.

    Rank 0 hosts the controller and calls the servers' routes. The constructor calls `/init_weight_transfer_engine` of
    every server. For each version, the calls depend on `pause`. With `abort` or `wait`, rank 0 calls `/pause`,
    `/update_weights` and `/resume` of every server. With `keep` or None, rank 0 only calls `/update_weights`. It does not
    call a server with one rank that runs in the process of vLLM's EngineCore. Start the servers with
    `--weight-transfer-config '{"backend": "windlass"}'` and VLLM_SERVER_DEV_MODE=1.

    Memory: trainer ranks may write the servers' weights from the constructor until `shutdown`.

    Args:
        module: model that is trained, with FSDP2, tensor parallelism, both, or neither.
        servers: URLs of the servers, in the same order on every rank.
        config: mode and deadlines of updates. Its `pause_mode` is not used; see `pause`.
        transport: name of the transport, or its configuration in JSON.
        name_map: see `connect_trainer`.
        stacked: see `connect_trainer`.
        allow_unused: see `connect_trainer`.
        keep: see `connect_trainer`.
        pause: treatment of running requests, one of `PAUSE_MODES` or None. With `keep`, requests stop between two steps
            and continue in place after the update. With the other modes, rank 0 calls `/pause` before a version and
            `/resume` after it. With None, the caller pauses and resumes the servers. If the caller does not pause them,
            running requests stop and continue as with `keep`.
        release: see `connect_trainer`.
        api_key: API key of the servers; empty if they require none.
        deadline_s: deadline in seconds for all servers to join, and then for each version.

    Raises:
        ConfigError: an argument is invalid, or the transport, the module and the servers do not fit together.
        UnsupportedLayout: Windlass cannot describe a parameter of the module.
        EngineRefused: a server cannot be updated; the message has the reason. Rank 0 raises this; other ranks raise
            PeerUnreachable with the same reason.
        PeerUnreachable: a server or another rank could not be reached or has failed; the message has the reason.
        PeerTimeout: some servers or ranks did not join within `deadline_s`.
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
        release: Callable[[], None] | None = None,
        api_key: str = "",
        deadline_s: float = 600.0,
    ) -> None:
        def connect(address: HostAddress) -> TrainerClient:
            from windlass.trainers.fsdp import connect_trainer

            return connect_trainer(
                module,
                controller=address.url,
                token=address.token,
                transport=transport,
                name_map=name_map,
                stacked=stacked,
                allow_unused=allow_unused,
                keep=keep,
                release=release,
                connect_deadline_s=deadline_s,
            )

        self._sync = plain_servers_sync(
            connect,
            servers=servers,
            config=config,
            transport=transport,
            pause=pause,
            api_key=api_key,
            deadline_s=deadline_s,
        )

    def send_weights(self, version: int) -> SentWeights:
        """Publish the current weights to every server. Collective; blocks.

        A server that is dead or fails is left out: all other servers serve the version when this method returns. A
        server that was restarted at the same URL joins before the update.

        Memory: the weights must not change before this method returns.

        Args:
            version: number of the version, greater than all earlier versions.

        Raises:
            ConfigError: `version` is not an integer >= 0.
            RoundAborted: the version was not published; the servers keep their weights.
            PeerUnreachable: no server can be reached, or another rank has failed; the message has the reason.
            PeerTimeout: the update did not end within `deadline_s`.
        """
        return self._sync.send_weights(version)

    def shutdown(self) -> None:
        """Leave the fleet. The servers keep their weights and may join another trainer. Idempotent."""
        self._sync.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def plain_servers_sync(
    connect: Callable[[HostAddress], TrainerClient],
    *,
    servers: Sequence[str],
    config: ControlConfig | None = None,
    transport: str = "auto",
    pause: str | None = "keep",
    api_key: str = "",
    deadline_s: float = 600.0,
) -> FleetSync:
    """Connect a trainer of any framework to plain vLLM servers. Collective; blocks.

    Args:
        connect: function that connects this rank's weights to the controller.
        servers: see `WeightSync`.
        config: see `WeightSync`.
        transport: see `WeightSync`.
        pause: see `WeightSync`.
        api_key: see `WeightSync`.
        deadline_s: see `WeightSync`.

    Raises:
        ConfigError, EngineRefused, PeerUnreachable, PeerTimeout: see `WeightSync`.
        WindlassError: `connect` raised it.
    """
    if pause is not None and pause not in PAUSE_MODES:
        raise ConfigError(f"pause: must be one of {PAUSE_MODES} or None, got {pause!r}")
    # Only rank 0 calls the routes. Every rank creates `VllmServers`, because the constructor checks the URLs.
    routes = VllmServers(servers, api_key=api_key)
    urls = {_engine_name(url): url for url in routes.urls}

    def host() -> _Fleet:
        return _Fleet(routes, urls, config or ControlConfig(), transport, pause, deadline_s)

    return FleetSync(urls, host, connect, deadline_s)


def _engine_name(url: str) -> str:
    """Return the name in the fleet of the server at a URL; a restarted server has the same name."""
    parts = check_url(url, "servers")
    return f"vllm-{parts.hostname}-{parts.port or parts.scheme}"


@final
class _Fleet:
    """Controller in trainer rank 0, and the calls of the servers' routes that rank 0 makes in every round."""

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
        # `/update_weights` blocks the server's main loop and keeps running requests, so `keep` needs no `/pause`.
        self._pause = None if pause == "keep" else pause
        kept = PauseMode.IN_PLACE if self._pause is None else PauseMode.ABORT
        config = msgspec.structs.replace(config, pause_mode=kept)
        self._held_s = config.deadlines.pause_s
        # First phase for which the servers' main loops must be blocked. At its start, rank 0 calls the routes.
        self._holds_in = Phase.PAUSE if config.mode is UpdateMode.STAGED else Phase.PREPARE
        self._joined: set[str] = set()
        # Set when the newest round ends.
        self._round_over = threading.Event()
        self._joining = ThreadPoolExecutor(len(urls), "windlass-join")
        # One thread per server, so that a server's calls of one round end before its calls of the next round begin.
        self._holding = {name: ThreadPoolExecutor(1, f"windlass-{name}") for name in urls}
        # Name of a server that the newest round pauses -> its calls. The last call is `/resume`.
        self._paused: dict[str, Future[None]] = {}
        self.hosted = HostedController(routes.urls, config, self._listen)
        self._coordinator = self.hosted.controller.coordinator

    def join(self, deadline_s: float) -> None:
        """Make all servers join the fleet, also those that do not listen yet. Blocks; raises as `_join` does."""
        self._join([*self._urls], deadline_s, are_starting=True)

    def _join(
        self,
        names: Sequence[str],
        deadline_s: float,
        *,
        answer_s: float = CALL_S,
        are_starting: bool = False,
    ) -> None:
        """Make servers capture their layouts and join the fleet. Blocks.

        Args:
            names: engine names of the servers.
            deadline_s: deadline in seconds for all these servers to join.
            answer_s: seconds within which each server must return its world size.
            are_starting: whether to wait for servers that do not listen yet.

        Raises:
            EngineRefused: a server cannot be updated; the message has the reason.
            PeerUnreachable: a server could not be reached, or answered the request with an error; the message has the error.
            PeerTimeout: a server did not answer or join in time.
        """
        address, ends_at = self.hosted.address(Access.ENGINE), time.monotonic() + deadline_s

        def left_s() -> float:
            return max(ends_at - time.monotonic(), 0.0)

        infos = {}
        for name in names:
            url = self._urls[name]
            # A server that does not answer HTTP cannot report later why it did not join, so ask each server first.
            self._routes.world_size(
                url, answer_s, listens_within_s=left_s() if are_starting else 0.0
            )
            infos[url] = {
                "name": name,
                "controller": address.url,
                "token": address.token,
                "transport": self._transport,
                "url": url,
            }
        self._joined.update(names)
        try:
            self._routes.init_weight_transfer_engine(infos, max(left_s(), 1.0))
        except PeerUnreachable:
            # If a server refuses, its rank reports a more precise reason to the controller. `wait_for_fleet` raises
            # an error with this reason if the report arrives in time.
            with suppress(PeerTimeout):
                self.hosted.wait_for_fleet(names, REASON_S)
            raise
        self.hosted.wait_for_fleet(names, max(left_s(), 1.0))

    def rejoin(self, deadline_s: float) -> Mapping[str, str]:
        """Make all missing servers join the fleet, in parallel. Blocks.

        Returns:
            URL of a server that could not join -> reason.

        Raises:
            PeerUnreachable: no server is in the fleet.
        """
        tries = {
            name: self._joining.submit(self._join, [name], deadline_s, answer_s=PROBE_S)
            for name in self.hosted.missing([*self._urls])
        }
        reasons = {}
        for name, tried in tries.items():
            try:
                tried.result()
            except WindlassError as error:
                reasons[self._urls[name]] = f"{type(error).__name__}: {error}"
        if len(reasons) == len(self._urls):
            raise PeerUnreachable(f"servers: none could join: {'; '.join(reasons.values())}")
        return reasons

    def _listen(self, controller: Controller) -> None:
        """Subscribe to the phases of rounds. Called in the controller's event loop when the controller has started."""
        controller.coordinator.rounds.on_phase(self._on_phase)

    def _on_phase(self, version: int, phase: Phase) -> None:
        """At the first phase that needs blocked main loops, start `_hold` for each server that the round updates.

        Called in the controller's event loop at the start of every phase of a round.
        """
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
            # If a server catches up with the published version, do not pause it: `/update_weights` also blocks its main
            # loop between two steps.
            pause = self._pause if is_news else None
            held = self._holding[name].submit(self._hold, name, version, pause, over)
            if pause is not None:
                self._paused[name] = held

    def _comes_to_rest(self, name: str) -> bool:
        """Return whether the server's agent can block the main loop itself, so that no HTTP request is needed."""
        group = self._coordinator.fleet.group_of(name)
        first = None if group is None else group.agents.get(0)
        return first is not None and first.hello.comes_to_rest

    def _hold(self, name: str, version: int, pause: str | None, over: threading.Event) -> None:
        """Call `/update_weights`, which blocks the server's main loop until the round is over.

        If `pause` is given, first call `/pause` with this mode, and finally call `/resume`. If the server refuses to
        pause, do not call `/update_weights`.
        """
        if over.is_set():
            return
        among, routes, held_s = (self._urls[name],), self._routes, self._held_s
        refusals = {} if pause is None else routes.pause(among, pause, held_s)
        if not refusals:
            routes.update_weights(among, version, self._deadline_s, held_s=held_s)
        if pause is not None:
            routes.resume(among, CALL_S)

    def wait_resumed(self, names: Collection[str]) -> None:
        """Wait at most `CALL_S` seconds until the paused servers among `names` have answered `/resume`."""
        wait([self._paused[name] for name in names if name in self._paused], CALL_S)

    def close(self) -> None:
        """Stop the controller, and make the servers leave the fleet. Idempotent."""
        self.hosted.close()
        for pool in (self._joining, *self._holding.values()):
            pool.shutdown(wait=False, cancel_futures=True)
        joined, self._joined = self._joined, set()
        self._routes.shutdown_weight_transfer_engine([self._urls[n] for n in joined], CALL_S)
        self._routes.close()
